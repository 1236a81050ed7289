"""Lookups in hash tables, as `gf.nn.HashTable` builds them: which nodes they are, and what they
need.

    state, ids ─hash_find→ rows, entries ─take→ owners' ids ─draw_rows→ initial values of fresh ids
    table_rows, take, first_values → values          hash_insert → the state with new ids

All of it follows from the ids one by one. So the owner of a part of the table can do it alone, for
the distinct ids that others ask it for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.parallel.mesh.axis_split import AxisSplit
from graphflow.parallel.mesh.layouts import Layout, whole
from graphflow.parallel.mesh.row_ranges import RowRanges, ring_ranges
from graphflow.parallel.sharding.propagation.propagation import is_slot
from graphflow.parallel.tables.row_updates import Readers, RowUpdate, nodes_after, nodes_before


@dataclass(frozen=True, eq=False)
class HashLookup:
    """A lookup in a hash table.

    Attributes:
        table: the variable of the rows.
        state: the variable of the index.
        ids: the ids, of any shape.
        rows: the row of each id, as optimisers find it in gradients.
        values: the values of the ids' rows.
        insert: the node that stores new ids, if the lookup is part of training.
        nodes: the nodes of the lookup, in build order; `hash_find` is the first.
    """

    table: Node
    state: Node
    ids: Tensor
    rows: Tensor
    values: Tensor
    insert: Node | None
    nodes: tuple[Node, ...]

    @property
    def parts(self) -> int:
        """The number of parts of the table."""
        return int(self.nodes[0].attrs["parts"])

    @property
    def has_row(self) -> Tensor:
        """Which ids have a row."""
        return self.values.node.inputs[3]

    @property
    def fresh(self) -> Tensor:
        """Which ids have their initial value."""
        return self.values.node.inputs[1]


def is_hashed(node: Node) -> bool:
    """Return True if a variable holds the rows of a hash table."""
    return getattr(node.attrs.get("initial"), "kind", None) == "hashed"


def table_of(node: Node) -> Node | None:
    """Return the hash table whose rows a variable holds, or the state of whose rows; else None."""
    owner = node.origin if is_slot(node) else node
    return owner if owner is not None and is_hashed(owner) else None


def find_hash_lookups(graph: Graph, readers: Readers) -> list[HashLookup]:
    """Return the lookups in hash tables of a graph."""
    found = []
    for node in graph.of_op("table_rows"):
        (rows,) = node.outputs
        takes = [n for n in readers.get(rows, ()) if n is not None and _takes_row(n)]
        values = [
            n for t in takes for n in readers.get(t.outputs[0], ()) if _has_op(n, "first_values")
        ]
        if len(takes) != 1 or len(values) != 1:
            continue
        find, (last,) = node.inputs[0].node, values
        assert last is not None
        asked = readers.get(find.outputs[1], ())
        inserts = [n for n in asked if n is not None and n.op.name == "hash_insert"]
        between = nodes_before([last, *inserts]) & nodes_after(graph, find)
        nodes = tuple(sorted(between, key=lambda each: each.serial))
        state, ids = find.inputs
        table, insert = takes[0].inputs[0].node, inserts[0] if inserts else None
        found.append(HashLookup(table, state.node, ids, rows, last.outputs[0], insert, nodes))
    return found


def _takes_row(node: Node) -> bool:
    return node.op.name == "take" and is_hashed(node.inputs[0].node)


def _has_op(node: Node | None, name: str) -> bool:
    return node is not None and node.op.name == name


def find_closed_tables(
    graph: Graph, readers: Readers, updates: Sequence[RowUpdate]
) -> dict[Node, list[HashLookup]]:
    """Return the hash tables of which nothing but lookups and updates reads rows, with their
    lookups."""
    found: dict[Node, list[HashLookup]] = {}
    for lookup in find_hash_lookups(graph, readers):
        found.setdefault(lookup.table, []).append(lookup)
    inside = {node for update in updates for node in update.replaced}
    inside |= {node for own in found.values() for each in own for node in each.nodes}
    trained = {update.table: update for update in updates}
    for table, own in [*found.items()]:
        update = trained.get(table)
        rows = {each.rows for each in own}
        if (
            update is not None
            and any(each.ids not in rows or len(update.lookups) > 1 for each in update.lookups)
        ) or not all(_is_closed(each, readers, inside) for each in own):
            del found[table]
    family = [node for node in graph.variables if table_of(node) in found]
    for node in family:
        for user in readers.get(node.outputs[0], ()):
            if user is None or user in inside or user.op.name == "group":
                continue
            if user.op.name != "assign" or user.inputs[0].node is not node:
                found.pop(table_of(node) or node, None)
    return found


def _is_closed(lookup: HashLookup, readers: Readers, inside: set[Node]) -> bool:
    """Return True if nothing else reads what is computed between ids and results."""
    ends = (lookup.values.node, lookup.insert)
    return all(
        user in inside
        for node in lookup.nodes
        if node not in ends
        for tensor in node.outputs
        for user in readers.get(tensor, ())
    )


def spread_parts(
    graph: Graph,
    tables: Mapping[Node, Sequence[HashLookup]],
    layouts: Mapping[Tensor, Layout],
    existing: Mapping[Tensor, Layout],
    axes: Mapping[Node, str],
    counts: Mapping[str, int],
) -> dict[Tensor, Layout]:
    """Return layouts in which whole parts of hash tables lie on a mesh axis, each with its rows,
    slots and index.

    Args:
        tables: the tables, with their lookups.
        existing: the layouts of variables that exist already.
        axes: the mesh axis that splits the rows of each.
        counts: the sizes of mesh axes.
    """
    found = dict(layouts)
    for table, (lookup, *_) in tables.items():
        axis, there = axes.get(table), existing.get(table.outputs[0])
        if axis is None or lookup.parts < counts[axis]:
            continue
        rows = int(table.specs[0].shape[0])
        ranges = there.dims[0].ranges if there is not None else None
        if there is None:
            name = graph.names[table]
            ranges = ring_ranges(name, rows, counts[axis], rows // lookup.parts)
        if ranges is None:
            continue
        split = AxisSplit((axis,), ranges=ranges)
        for node in graph.variables:
            if table_of(node) is table:
                found[node.outputs[0]] = whole(node.specs[0].rank).with_dim(0, split)
        index = AxisSplit((axis,), ranges=ranges.of_units())
        found[lookup.state.outputs[0]] = whole(2).with_dim(0, index)
    return found


def are_parts(lookup: HashLookup, layouts: Mapping[Tensor, Layout]) -> bool:
    """Return True if rows and index of a table lie by whole parts, alike."""
    rows, index = (
        _ranges_of(layouts.get(node.outputs[0])) for node in (lookup.table, lookup.state)
    )
    return rows is not None and index == rows.of_units() and len(rows.owners) == lookup.parts


def _ranges_of(layout: Layout | None) -> RowRanges | None:
    return None if layout is None else layout.dims[0].ranges


__all__ = [
    "HashLookup", "are_parts", "find_closed_tables", "find_hash_lookups", "is_hashed",
    "spread_parts", "table_of",
]  # fmt: skip

"""The variables that are looked up and updated by their rows' owners, and along which mesh axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.parallel.mesh.axis_split import AxisSplit
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import Layout
from graphflow.parallel.mesh.row_ranges import ring_ranges
from graphflow.parallel.sharding.propagation.propagation import is_slot
from graphflow.parallel.tables.hash_lookups import (
    HashLookup,
    are_parts,
    find_closed_tables,
    is_hashed,
    spread_parts,
    table_of,
)
from graphflow.parallel.tables.row_updates import Readers, RowUpdate, find_row_updates


@dataclass(frozen=True, eq=False)
class OwnedTables:
    """The tables of a graph whose rows' owners look up and update them.

    Attributes:
        axes: the mesh axis that splits the rows of each table.
        updates: the updates of tables and their slots.
        hashed: the lookups in hash tables, whose owners have whole parts.
    """

    axes: Mapping[Node, str] = field(default_factory=dict)
    updates: tuple[RowUpdate, ...] = ()
    hashed: tuple[HashLookup, ...] = ()

    def is_lookup(self, node: Node) -> bool:
        """Return True if a node looks up rows of one of these tables."""
        return node.op.name == "take" and node.inputs[0].node in self.axes


def choose_tables(
    graph: Graph,
    readers: Readers,
    layouts: Mapping[Tensor, Layout],
    mesh: Mesh,
    sequence_axis: str | None = None,
) -> OwnedTables:
    """Return the tables of a graph: variables that are split by rows along one mesh axis, and that
    nodes read by rows only.

    If a node needs a variable otherwise, such as a product or an optimiser that moves all rows, its
    lookups are no exception: each place sums what it has. So do places along the sequence axis,
    which scatter such sums.
    """
    axes: dict[Node, str] = {
        node: axis
        for node in graph.variables
        if (axis := _row_axis(node, layouts, mesh)) not in (None, sequence_axis)
    }
    if not axes:
        return OwnedTables()
    updates = [
        update
        for update in find_row_updates(graph, readers)
        if update.table in axes
        and all(axes.get(state) == axes[update.table] for state in update.states)
    ]
    closed = find_closed_tables(graph, readers, updates).values()
    hashed = [each for own in closed if all(are_parts(e, layouts) for e in own) for each in own]
    owned = {lookup.table for lookup in hashed}
    inside = {node for update in updates for node in update.replaced}
    tables = {
        node: axis
        for node, axis in axes.items()
        if table_of(node) in owned
        or (
            table_of(node) is None
            and all(_reads_rows(user, node, inside) for user in readers.get(node.outputs[0], ()))
        )
    }
    chosen = tuple(update for update in updates if update.table in tables)
    dropped = {state for update in updates if update not in chosen for state in update.states}
    left = {node: axis for node, axis in tables.items() if node not in dropped}
    return OwnedTables(left, chosen, tuple(hashed))


def spread_rows(
    graph: Graph,
    readers: Readers,
    layouts: Mapping[Tensor, Layout],
    existing: Mapping[Tensor, Layout],
    mesh: Mesh,
    ring_axis: str | None,
) -> dict[Tensor, Layout]:
    """Return layouts in which tables lie in ranges: whole parts of hash tables, and rows of those
    tables that `ring_axis` splits.

    Their slots lie alike. Variables that something reads otherwise than by rows stay contiguous.

    Args:
        existing: the layouts of variables that exist already.
    """
    found = dict(layouts)
    tables = OwnedTables() if ring_axis is None else choose_tables(graph, readers, layouts, mesh)
    for node, own in tables.axes.items():
        owner = node.origin if is_slot(node) and node.origin in tables.axes else node
        if own == ring_axis and owner is not None:
            rows = int(node.specs[0].shape[0])
            there = existing.get(owner.outputs[0])
            name, count = graph.names[owner], mesh.sizes[ring_axis]
            ranges = there.dims[0].ranges if there else ring_ranges(name, rows, count, even=True)
            tensor = node.outputs[0]
            found[tensor] = layouts[tensor].with_dim(0, AxisSplit((ring_axis,), ranges=ranges))
    if not any(map(is_hashed, graph.variables)):
        return found
    closed = find_closed_tables(graph, readers, find_row_updates(graph, readers))
    axes = {node: axis for node in closed if (axis := _row_axis(node, found, mesh)) is not None}
    return spread_parts(graph, closed, found, existing, axes, mesh.sizes)


def _row_axis(node: Node, layouts: Mapping[Tensor, Layout], mesh: Mesh) -> str | None:
    """Return the mesh axis that alone splits the rows of a variable, and nothing else of it."""
    layout = layouts.get(node.outputs[0])
    if layout is None or not layout.dims or node.specs[0].dtype.kind == "b":
        return None
    rows, *rest = layout.dims
    plain = rows == AxisSplit(rows.axes, ranges=rows.ranges)
    if layout.partial or any(rest) or len(rows.axes) != 1 or not plain:
        return None
    return None if rows.axes[0] in mesh.sequential else rows.axes[0]


def _reads_rows(user: Node | None, variable: Node, inside: set[Node]) -> bool:
    """Return True if a node reads a variable by rows, or only fetches or replaces it."""
    if user is None or user in inside or user.op.name == "group":
        return True
    first = user.inputs[0].node is variable and all(t.node is not variable for t in user.inputs[1:])
    return first and (
        user.op.name == "assign" or (user.op.name == "take" and user.attrs["axis"] == 0)
    )


__all__ = ["OwnedTables", "choose_tables", "spread_rows"]

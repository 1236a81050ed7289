"""The tables of a step that servers keep by rows: which variables they are, and why others are not.

A table is looked up by ids that follow from the feeds, and nothing else reads it. Its update is
that of looked-up rows (`tables/row_updates.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.parallel.sharding.propagation.rule_layouts import match_tensors, unknown_rule_error
from graphflow.parallel.tables.row_updates import RowUpdate, find_row_updates, readers_of

TableKeys = Sequence[Tensor | str]
"""Variables, their names, or patterns. "*" means all variables that servers can keep by rows."""


@dataclass(frozen=True, eq=False)
class ServedTable:
    """A table that servers keep by rows.

    Attributes:
        node: the variable.
        update: the update of its rows.
        lookups: the nodes that look rows up in a turn.
    """

    node: Node
    update: RowUpdate
    lookups: tuple[Node, ...]

    @property
    def states(self) -> list[Node]:
        """The variables of which the update writes rows: slots, then the table."""
        return self.update.states

    @property
    def ids(self) -> list[Tensor]:
        """The ids of the lookups, each once."""
        looked_up = [node.inputs[1] for node in self.lookups]
        return [*dict.fromkeys([*looked_up, *(each.ids for each in self.update.lookups)])]

    @property
    def outside(self) -> list[Tensor]:
        """What the update reads beside rows and gradients of rows, such as rates."""
        update = self.update
        inside = {t for node in update.computed for t in node.outputs}
        inside |= {update.rows, update.number, *(s.outputs[0] for s in self.states)}
        inside |= {lookup.sums.outputs[0] for lookup in update.lookups}
        return [*dict.fromkeys(t for n in update.computed for t in n.inputs if t not in inside)]


def select_tables(graph: Graph, keys: TableKeys) -> tuple[ServedTable, ...]:
    """Return the tables of a training step that some keys name.

    Raises:
        ShardingError: a key names nothing, or a variable that servers cannot keep by rows.
    """
    if not keys:
        return ()
    named = {graph.names[node]: node.outputs[0] for node in graph.variables}
    readers = readers_of(graph)
    updates = {update.table: update for update in find_row_updates(graph, readers)}
    found: dict[Node, ServedTable] = {}
    for key in keys:
        chosen = match_tensors(graph, key, named)
        if not chosen and key != "*":
            raise unknown_rule_error(key, named)
        for tensor in chosen.values():
            table = _as_table(tensor.node, updates, readers)
            if isinstance(table, ServedTable):
                found[tensor.node] = table
            elif key != "*":
                raise ShardingError(
                    f"tables= names {graph.names[tensor.node]!r} (made at {tensor.node.location}), "
                    f"of which servers cannot keep rows: {table}; leave it out of tables="
                )
    return tuple(found.values())


def _as_table(
    node: Node, updates: Mapping[Node, RowUpdate], readers: Mapping[Tensor, Sequence[Node | None]]
) -> ServedTable | str:
    """Return a variable as a table, or why it is none."""
    update = updates.get(node)
    if update is None:
        return (
            "its update moves all rows, or it is no table of gf.nn.embedding; take Adagrad, SGD "
            "without momentum, or an optimiser with sparse=True"
        )
    if update.firsts:
        return "a hash table finds its rows by an index, which servers have no part of"
    lookups = []
    for state in update.states:
        for reader in readers.get(state.outputs[0], ()):
            if reader is None or reader in update.replaced or reader.op.name in ("assign", "group"):
                continue
            if state is not node or not _is_lookup(reader, node):
                return (
                    f"{reader.op.name} {reader.name!r} (made at {reader.location}) reads it whole"
                )
            lookups.append(reader)
    table = ServedTable(node, update, tuple(lookups))
    for each in Graph(table.ids).nodes:
        if not _follows_from_feeds(each):
            return (
                f"its ids depend on {each.op.name} {each.name!r} (made at {each.location}), and "
                "servers have to know the ids of a window from its feeds"
            )
    return table


def _is_lookup(reader: Node, table: Node) -> bool:
    """Return True if a node looks rows of a table up by ids."""
    is_take = reader.op.name == "take" and reader.attrs["axis"] == 0
    return is_take and reader.inputs[0].node is table and reader.inputs[1].node is not table


def _follows_from_feeds(node: Node) -> bool:
    """Return True if feeds determine what a node computes, given its inputs."""
    if node.op.name in ("placeholder", "constant"):
        return True
    return node.op.pure and not node.op.random and node.op.name != "variable" and not bodies(node)


__all__ = ["ServedTable", "TableKeys", "select_tables"]

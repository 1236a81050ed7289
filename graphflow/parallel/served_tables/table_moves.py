"""Ranges of tables that move when a server joins or leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from graphflow.init import zeros
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import REGISTRY, Node, Tensor, origin_scope
from graphflow.parallel.mesh.row_ranges import RowRanges
from graphflow.parallel.served_tables.table_pieces import SERVER
from graphflow.parallel.sharding.emission.sharded_graph import ShardedVariable
from graphflow.strategy import RowCopies


class Servers(Protocol):
    """The servers before and after one joins or leaves; see `servers.server_moves.Parties`."""

    @property
    def servers(self) -> int: ...
    @property
    def devices(self) -> Sequence[DeviceName]: ...
    @property
    def leaving(self) -> int | None: ...
    def number_after(self, server: int) -> int | None: ...


class TableMoves(NamedTuple):
    """The moves of some tables.

    Attributes:
        shards: the pieces of tables and their slots, once rows are copied.
        copies: the ranges that are copied, between two servers or within one.
        ranges: the number of ranges that change servers, of tables alone.
    """

    shards: dict[Node, ShardedVariable]
    copies: list[RowCopies]
    ranges: int


def move_tables(
    parties: Servers, shards: Mapping[Node, ShardedVariable], names: Mapping[Node, str]
) -> TableMoves:
    """Return the moves of all tables.

    Args:
        parties: the servers.
        shards: the shards of the session's variables.
        names: the names by which tables lie on the ring.

    Raises:
        ShardingError: a table has too few ranges for one more server.
    """
    of_tables: dict[Node, list[Node]] = {}
    for node, own in shards.items():
        if own.ranges is not None and list(own.mesh) == [SERVER]:
            is_slot = node.origin is not None and node.origin in shards
            table = node.origin if is_slot and node.origin is not None else node
            of_tables.setdefault(table, []).append(node)
    found = TableMoves({}, [], 0)
    for table, states in of_tables.items():
        before = shards[table].ranges
        assert before is not None
        name = names.get(table, table.name)
        leaving = parties.leaving
        after = before.join(name) if leaving is None else before.leave(name, leaving)
        pieces = {s: _remake(s, shards[s], before, after, parties) for s in states}
        found.shards.update(pieces)
        copies, moved = _copy_ranges([(shards[s], pieces[s]) for s in states], before, after,
                                     parties)  # fmt: skip
        found.copies.extend(copies)
        found = found._replace(ranges=found.ranges + moved)
    return found


def _remake(
    node: Node, own: ShardedVariable, before: RowRanges, after: RowRanges, parties: Servers
) -> ShardedVariable:
    """Return the pieces of a variable; a server that keeps its ranges keeps its piece."""
    kept = {parties.number_after(server): server for server in range(before.count)}
    nodes, spans = [], []
    for server in range(after.count):
        old, rows = kept.get(server), after.bounds_of(server)
        span = own.spans[0][0]._replace(start=0, stop=after.sizes[server], ranges=rows)
        spans.append((span, *own.spans[0][1:]))
        if old is not None and before.bounds_of(old) == rows:
            nodes.append(own.nodes[old])
            continue
        shape = (after.sizes[server], *(int(size) for size in node.specs[0].shape[1:]))
        with origin_scope(node, "", parties.devices[server]):
            piece: Tensor = REGISTRY["variable"](
                initial=zeros(shape, node.attrs["dtype"]), trainable=node.attrs["trainable"],
                shape=shape, dtype=node.attrs["dtype"], named=False,
                name=f"{node.name}@server={server}",
            )  # fmt: skip
        nodes.append(piece.node)
    layout = own.layout.with_dim(0, replace(own.layout.dims[0], ranges=after))
    return ShardedVariable(tuple(nodes), tuple(spans), layout, {SERVER: after.count})


def _copy_ranges(
    states: Sequence[tuple[ShardedVariable, ShardedVariable]],
    before: RowRanges,
    after: RowRanges,
    parties: Servers,
) -> tuple[list[RowCopies], int]:
    """Return the copies between each two pieces, and the number of ranges that change servers."""
    last = len(before.owners) - 1
    is_short = before.rows % before.width > 0
    ways: dict[tuple[int, int, bool], list[int]] = {}
    for number, (old, new) in enumerate(zip(before.owners, after.owners, strict=True)):
        ways.setdefault((old, new, is_short and number == last), []).append(number)
    copies, moved = [], 0
    for (old, new, short), numbers in ways.items():
        moved += len(numbers) * (parties.number_after(old) != new)
        pairs = tuple((was.nodes[old], now.nodes[new]) for was, now in states)
        if pairs[0][0] is pairs[0][1]:
            continue
        at = np.array(numbers)
        copies.append(
            RowCopies(
                pairs,
                before.first_positions[at] - before.starts[old],
                after.first_positions[at] - after.starts[new],
                before.rows % before.width if short else before.width,
            )
        )
    return copies, moved


__all__ = ["Servers", "TableMoves", "move_tables"]

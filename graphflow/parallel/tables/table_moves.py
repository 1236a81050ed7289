"""Moves of tables' ranges to other owners, given how many rows of each range are asked for."""

from __future__ import annotations

from collections.abc import Mapping

from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import nbytes
from graphflow.parallel.mesh.row_ranges import Int64s, RowRanges
from graphflow.parallel.sharding.emission.sharded_graph import ShardedVariable
from graphflow.parallel.tables.range_moves import (
    changed_ranges,
    find_swaps,
    owner_loads,
    write_moves,
)
from graphflow.strategy import RowMoves


def move_rows(
    counts: Mapping[Node, Int64s],
    shards: Mapping[Node, ShardedVariable],
    homes: Mapping[Node, str],
) -> RowMoves | None:
    """Return the moves that let owners of tables be asked for about as many rows; None if none is
    worth it.

    Args:
        counts: how many rows of each range are asked for, by table.
        shards: the shards of tables and slots.
        homes: the devices of shards.
    """
    updates: list[Tensor] = []
    moved: dict[Node, ShardedVariable] = {}
    number, size, ratios = 0, 0, [(1.0, 1.0)]
    for table, asked in counts.items():
        before = shards[table].ranges
        if before is None or not _has_owners(shards[table], before, homes):
            continue
        swaps = find_swaps(before, asked)
        if not swaps:
            continue
        after = before.swap(swaps)
        for node, own in shards.items():
            there = own.ranges
            if table in (node, node.origin) and there and there.of_units() == before.of_units():
                now = there.swap(swaps)
                moved[node] = own.with_ranges(now)
                updates += write_moves(tuple(dict.fromkeys(own.nodes)), there, now, homes)
                size += _moved_rows(there, now) * nbytes(node.specs[0]) // there.rows
        number += sum(a != b for a, b in zip(before.owners, after.owners, strict=True))
        ratios.append((_imbalance(before, asked), _imbalance(after, asked)))
    if not moved:
        return None
    first, last = (max(each) for each in zip(*ratios, strict=True))
    return RowMoves(tuple(updates), moved, number, size, first, last)


def _has_owners(pieces: ShardedVariable, ranges: RowRanges, homes: Mapping[Node, str]) -> bool:
    """Return True if each owner has one piece, and they are on several devices."""
    nodes = dict.fromkeys(pieces.nodes)
    return len(nodes) == ranges.count and len({homes.get(node) for node in nodes}) > 1


def _moved_rows(before: RowRanges, after: RowRanges) -> int:
    """Return the number of rows that change owners."""
    changed = changed_ranges(before, after)
    return before.width * sum(before.owners[i] != after.owners[i] for i in changed)


def _imbalance(ranges: RowRanges, asked: Int64s) -> float:
    """Return the rows asked of the busiest owner over the mean."""
    loads = owner_loads(ranges, asked)
    return float(loads.max() / loads.mean())


__all__ = ["move_rows"]

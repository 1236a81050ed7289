"""Ranges of rows that change owners, so that each owner is asked for about as many rows.

Two owners exchange ranges of as many rows. So pieces keep their shapes, each owner keeps its share
of the memory, and only the rows of these ranges are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from graphflow.ir.nodes.scopes import device
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, as_tensor
from graphflow.ops.tables.hash_index import part_of
from graphflow.parallel.mesh.row_ranges import Int64s, RowRanges

Float64s = np.ndarray[tuple[int], np.dtype[np.float64]]

IMBALANCE = 1.05
"""Rows asked of the busiest owner over the mean, from which ranges move. They must take as much
from it as this exceeds 1."""
BALANCED = 1.01
"""The same ratio at which no more ranges move."""
DEVIATIONS = 4.0
"""Standard deviations of a count (its square root) by which the busiest owner must exceed the
mean, and by which moves must relieve it."""
_LEAST_GAIN = 1e-3
"""Share of the mean that a swap must take from the busiest owner."""


def count_rows(ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]], ranges: RowRanges) -> Int64s:
    """Return how many rows of each range the places ask for, if they share some ids.

    A row that occurs more than once in the part of a place is asked for once.
    """
    found = np.zeros(len(ranges.owners), np.int64)
    for part in np.array_split(ids.reshape(-1), ranges.count):
        rows = np.unique(part % ranges.rows)
        found += np.bincount(rows // ranges.width, minlength=len(found))
    return found


def count_ids(ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]], ranges: RowRanges) -> Int64s:
    """Return how many ids of each part of a hash table the places ask for, as `count_rows`.

    Args:
        ranges: those of the table's rows, one for each part.
    """
    parts = len(ranges.owners)
    found = np.zeros(parts, np.int64)
    for own in np.array_split(ids.reshape(-1), ranges.count):
        found += np.bincount(part_of(np.unique(own), parts), minlength=parts)
    return found


def owner_loads(ranges: RowRanges, counts: Int64s) -> Int64s:
    """Return the number of rows that each owner is asked for, given that of each range."""
    return np.bincount(ranges.owners, counts, ranges.count).astype(np.int64)


def find_swaps(ranges: RowRanges, counts: Int64s) -> list[tuple[int, int]]:
    """Return pairs of ranges to exchange, one after the other; [] if that gains little.

    Each swap takes as much of the difference to the mean as one swap can from the busiest owner,
    for the one with least to do.

    Args:
        counts: how many rows of each range are asked for.
    """
    owners, loads = np.array(ranges.owners), owner_loads(ranges, counts).astype(np.float64)
    mean, busiest = float(loads.mean()), float(loads.max())
    least = max((IMBALANCE - 1) * mean, DEVIATIONS * mean**0.5)
    if busiest <= mean + least:
        return []
    likely = _likely_counts(counts, owners)
    full = np.arange(len(owners)) < ranges.rows // ranges.width  # the last range may be short
    found: list[tuple[int, int]] = []
    while loads.max() > BALANCED * mean and len(found) < len(owners):
        giver, taker = int(loads.argmax()), int(loads.argmin())
        wanted = min(loads[giver] - mean, mean - loads[taker])
        given, back = (np.flatnonzero(full & (owners == each)) for each in (giver, taker))
        if not len(given) or not len(back):
            break
        back = back[np.argsort(likely[back], kind="stable")]
        near = np.searchsorted(likely[back], likely[given] - wanted)
        choices = np.stack([np.clip(near + step, 0, len(back) - 1) for step in (-1, 0)])
        moved = likely[given] - likely[back[choices]]
        way, at = divmod(int(np.abs(moved - wanted).argmin()), len(given))
        gain = float(moved[way, at])
        most = max(loads[giver] - gain, loads[taker] + gain)
        if loads[giver] - most < _LEAST_GAIN * mean:
            break
        pair = int(given[at]), int(back[choices[way, at]])
        owners[[*pair]] = taker, giver
        loads[giver] -= gain
        loads[taker] += gain
        found.append(pair)
    return found if busiest - loads.max() >= least else []


def _likely_counts(counts: Int64s, owners: Int64s) -> Float64s:
    """Return counts without the part of their differences that chance explains.

    Of an owner's ranges, those that were asked for most were lucky, too. Counts of chance alone
    have the variance of their mean, so each count keeps its distance to the mean by the share of
    the variance that exceeds it. Sums stay.
    """
    found = counts.astype(np.float64)
    for owner in range(int(owners.max()) + 1):
        own = found[owners == owner]
        mean, variance = own.mean(), own.var()
        kept = max(0.0, 1 - mean / variance) if variance > 0 else 0.0
        found[owners == owner] = mean + kept * (own - mean)
    return found


def changed_ranges(before: RowRanges, after: RowRanges) -> list[int]:
    """Return the ranges that lie elsewhere after swaps."""
    places = zip(before.first_positions.tolist(), after.first_positions.tolist(), strict=True)
    return [number for number, (old, new) in enumerate(places) if old != new]


def write_moves(
    nodes: Sequence[Node], before: RowRanges, after: RowRanges, homes: Mapping[Node, str]
) -> list[Tensor]:
    """Return assignments that bring rows from where they lie to where they shall lie.

    Args:
        nodes: the variables of the owners' pieces, by owner.
        homes: the device of each.
    """
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by new and old owner: new, old row
    for number in changed_ranges(before, after):
        old, new = before.owners[number], after.owners[number]
        first = int(after.first_positions[number]) - after.starts[new]
        rows.setdefault((new, old), []).append(
            (first, int(before.first_positions[number]) - before.starts[old])
        )
    steps = np.arange(before.width)
    updates = []
    for owner, node in enumerate(nodes):
        sources = [(old, np.array(own)) for (new, old), own in rows.items() if new == owner]
        if not sources:
            continue
        parts = []
        for old, own in sources:
            with device(homes[nodes[old]]):
                numbers = (own[:, 1:] + steps).reshape(-1)
                parts.append(FUNCTIONS["take"](nodes[old].outputs[0], numbers, 0))
        numbers = np.concatenate([(own[:, :1] + steps).reshape(-1) for _, own in sources])
        with device(homes[node]):
            given = FUNCTIONS["concat"](parts, 0) if len(parts) > 1 else parts[0]
            arguments = (node.outputs[0], as_tensor(numbers), given, as_tensor(len(numbers)))
            value = REGISTRY["update_rows"](*arguments)
            updates.append(REGISTRY["assign"](node.outputs[0], value))
    return updates


__all__ = ["changed_ranges", "count_ids", "count_rows", "find_swaps", "owner_loads", "write_moves"]

"""Contiguous splits: stages as pieces of a topological order, or between nested ideals.

Second step of `split_stages`. Items are units that any contiguous split must keep together: those
on a common cycle of the graph of units. Units of backward nodes alone find their place by their
edges, turned round.
"""

from __future__ import annotations

import heapq
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.placement.problems.problem import Ints, Problem
from graphflow.placement.stages import loops as stage_loops
from graphflow.placement.stages.units import StageUnits

MOST_ITEMS = 1_000
"""Longer orders are cut into that many blocks of neighbours first."""
MOST_STATES = 512
"""Of devices in use; where many kinds of devices make more, stages take them in their order."""


@dataclass(frozen=True, eq=False)
class Items:
    """Item of each unit, and the items that read each item's tensors (an acyclic graph)."""

    item: Ints
    after: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """Number of items."""
        return len(self.after)


def items_of(problem: Problem, units: StageUnits, backward: NDArray[np.bool_]) -> Items:
    """The items of a problem, numbered in one topological order."""
    import networkx as nx

    graph: Any = nx.DiGraph()
    graph.add_nodes_from(range(len(units.compute)))
    forward = set(units.unit[~backward].tolist())
    for source, target in problem.edges.tolist():
        u, v = int(units.unit[source]), int(units.unit[target])
        if backward[source] != backward[target] or (backward[source] and {u, v} <= forward):
            continue
        if u != v:
            graph.add_edge(*((v, u) if backward[source] else (u, v)))
    whole: Any = nx.condensation(graph)
    order = list(nx.lexicographical_topological_sort(whole))
    number = {c: i for i, c in enumerate(order)}
    item = np.empty(len(units.compute), dtype=np.int64)
    for c in order:
        for u in whole.nodes[c]["members"]:
            item[u] = number[c]
    after = tuple(tuple(sorted(number[s] for s in whole.successors(c))) for c in order)
    return Items(item, after)


def orders(items: Items) -> dict[str, list[int]]:
    """Some topological orders of the items: by level, depth first, and depth first from the end."""
    before: list[list[int]] = [[] for _ in range(items.count)]
    for i, readers in enumerate(items.after):
        for j in readers:
            before[j].append(i)
    level = [0] * items.count
    for i, readers in enumerate(items.after):
        for j in readers:
            level[j] = max(level[j], level[i] + 1)
    return {
        "by level": sorted(range(items.count), key=lambda i: (level[i], i)),
        "depth first": _depth_first(items.after, before),
        "late inputs": _depth_first(before, items.after)[::-1],
        "as given": list(range(items.count)),
    }


def _depth_first(after: Any, before: Any) -> list[int]:
    """Whatever became ready last comes first."""
    missing = [len(b) for b in before]
    ready = [(0, -i) for i in range(len(after)) if not missing[i]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        node = -heapq.heappop(ready)[1]
        order.append(node)
        for reader in after[node]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (-len(order), -reader))
    return order


def ideals_of(items: Items, most: int) -> list[int] | None:
    """All sets of items closed under producers, as bit sets, smaller ones first; None if more."""
    before = [0] * items.count
    for i, readers in enumerate(items.after):
        for j in readers:
            before[j] |= 1 << i
    found, layer = [0], {0}
    while layer:
        grown = set()
        for ideal in layer:
            for i in range(items.count):
                if not ideal >> i & 1 and before[i] & ~ideal == 0:
                    grown.add(ideal | 1 << i)
            if len(found) + len(grown) > most:
                return None
        layer = grown
        found.extend(sorted(grown))
    return found


@dataclass(frozen=True, eq=False)
class Stock:
    """Devices by class (alike in every cost) and the states of using them up.

    Args:
        members: devices of each class.
        follow: (states, classes) state after one more of a class, or -1.
    """

    members: tuple[tuple[int, ...], ...]
    follow: Ints

    @property
    def column(self) -> Ints:
        """(classes,) a device that stands for its class."""
        return np.array([m[0] for m in self.members], dtype=np.int64)


def stock_of(units: StageUnits) -> Stock:
    """The devices as the dynamic programs count them."""
    kinds: dict[bytes, list[int]] = {}
    for p in range(units.compute.shape[1]):
        key = b"".join(
            np.ascontiguousarray(a).tobytes()
            for a in (units.compute[:, p], units.capacity[p], units.enter[:, p], units.leave[:, p])
        )
        kinds.setdefault(key, []).append(p)
    members = tuple(tuple(m) for m in kinds.values())
    counts = [len(m) for m in members]
    if np.prod([c + 1.0 for c in counts]) > MOST_STATES:
        devices = range(units.compute.shape[1])
        chain = np.full((len(devices) + 1, len(devices)), -1, dtype=np.int64)
        for s in devices:
            chain[s, s:] = np.arange(s, len(devices)) + 1
        return Stock(tuple((p,) for p in devices), chain)
    states = {used: i for i, used in enumerate(product(*(range(c + 1) for c in counts)))}
    follow = np.full((len(states), len(counts)), -1, dtype=np.int64)
    for used, i in states.items():
        for c in range(len(counts)):
            follow[i, c] = states.get((*used[:c], used[c] + 1, *used[c + 1 :]), -1)
    return Stock(members, follow)


def best_cuts(units: StageUnits, items: Items, order: list[int]) -> Ints | None:
    """(u,) devices of the best split of an order into pieces; None if none fits."""
    blocks, tensors = min(len(order), MOST_ITEMS), len(units.maker)
    place = np.empty(items.count, dtype=np.int64)
    place[order] = np.arange(len(order)) * blocks // max(len(order), 1)
    stock = stock_of(units)
    position = place[items.item]
    start = np.searchsorted(np.sort(position), np.arange(blocks + 1))
    loads = np.full((len(stock.members), blocks, blocks + 1), np.inf).ravel()
    native(stage_loops, "segment_loads")(
        np.argsort(position, kind="stable"), start, blocks, stock.column, units.devices,
        np.zeros(tensors, np.int64), np.zeros(tensors, np.int64), loads, *units.hypergraph,
    )  # fmt: skip
    table = _SplitTable(blocks + 1, len(stock.follow))
    native(stage_loops, "chain_split")(
        len(stock.members), blocks, table.states, loads, stock.follow.ravel(), *table.flat
    )

    def piece(i: int, j: int) -> Ints:
        return np.flatnonzero((position >= i) & (position < j))

    return _trace(units, stock, table, piece)


def best_ideals(units: StageUnits, items: Items, ideals: list[int]) -> Ints | None:
    """(u,) devices of the best contiguous split of all: every stage between two ideals."""
    stock = stock_of(units)
    weight = np.zeros((items.count, len(stock.members)))
    np.add.at(weight, items.item, units.compute[:, stock.column])
    memory = np.zeros(items.count)
    np.add.at(memory, items.item, units.memory)
    masks = [0] * len(units.maker)
    for t in range(len(masks)):
        for r in units.readers_of(t).tolist():
            masks[t] |= 1 << int(items.item[r])
    table, words = _SplitTable(len(ideals), len(stock.follow)), items.count // 64 + 1
    native(stage_loops, "ideal_split")(
        len(ideals), words, table.states, units.devices, _words(ideals, words),
        stock.follow.ravel(), stock.column, weight.ravel(), memory, units.capacity,
        units.enter.ravel(), units.leave.ravel(), items.item[units.maker], _words(masks, words),
        np.zeros(words, np.int64), *table.flat,
    )  # fmt: skip

    def piece(i: int, j: int) -> Ints:
        chosen = ideals[j] & ~ideals[i]
        return np.flatnonzero([chosen >> int(x) & 1 for x in items.item])

    return _trace(units, stock, table, piece)


def _words(sets: list[int], count: int) -> Ints:
    """Bit sets as rows of 64-bit words, flat."""
    low = (1 << 64) - 1
    rows = [[s >> 64 * w & low for w in range(count)] for s in sets]
    return np.array(rows, dtype=np.uint64).ravel().view(np.int64)


class _SplitTable:
    """The table of a dynamic program: (positions, states) least max load, and its predecessor."""

    def __init__(self, positions: int, states: int) -> None:
        self.states = states
        self.best = np.full((positions, states), np.inf)
        self.since, self.state, self.kind = np.full((3, positions, states), -1, dtype=np.int64)

    @property
    def flat(self) -> tuple[Any, ...]:
        """Return the table as flat arrays for the loops."""
        return tuple(a.ravel() for a in (self.best, self.since, self.state, self.kind))


def _trace(units: StageUnits, stock: Stock, table: _SplitTable, piece: Any) -> Ints | None:
    at = len(table.best) - 1
    s = int(np.argmin(table.best[at]))
    if not np.isfinite(table.best[at, s]):
        return None
    free = [list(m) for m in stock.members]
    device: Ints = np.zeros(units.count, dtype=np.int64)
    while at > 0:
        before = int(table.since[at, s])
        device[piece(before, at)] = free[int(table.kind[at, s])].pop()
        at, s = before, int(table.state[at, s])
    return device

"""Local search for splits: annealing in machine code, then neighbourhoods searched by HiGHS.

Second step of `split_stages`; everything here turns a split that fits into one that fits and is no
worse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.placement.problems.problem import Floats, Ints
from graphflow.placement.solvers.highs import MixedIntegerProgram
from graphflow.placement.stages import loops as stage_loops
from graphflow.placement.stages.units import StageUnits

COLDEST = 1e-5
"""Heat at the end of every anneal, as a share of the max load."""
CHOICES = (4.0, 24.0, 400.0)
"""Least, first and most number of choices (a unit on a device) that a neighbourhood leaves open."""
EASY, HARD = 300, 1_200
"""Pivots below which the next neighbourhood is larger, and above which it is smaller."""
LEAST_SPENT = 50
"""Pivots that making a program counts for."""
NODES = 10
"""Of a search tree, for one neighbourhood."""
TIE = 1e-3
"""What a second of all loads together counts for beside one of the max load."""


@dataclass(frozen=True)
class Anneal:
    """Settings of one anneal: share of the max load that is accepted at first, squarings of the
    norm (2: the fourth power), largest group that moves as one."""

    heat: float
    squarings: int
    largest: int


def anneal_split(
    units: StageUnits, start: Ints, steps: int, how: Anneal, seed: int, bound: float
) -> Ints:
    """The best split met; see `stage_loops.anneal`."""
    d, tensors, most = units.devices, len(units.maker), how.largest + 2
    best, where = start.copy(), start.copy()
    state = np.array([(seed * 16807 + 1) % 2147483646 + 1])
    native(stage_loops, "anneal")(
        steps, how.heat, COLDEST, how.squarings, how.largest, bound, d, state, best, where,
        np.zeros(d), np.zeros(d), np.zeros(tensors * d, np.int64), np.zeros(tensors, np.int64),
        np.zeros(most, np.int64), np.zeros(most, np.int64), np.full(units.count, -1, np.int64),
        *units.hypergraph,
    )  # fmt: skip
    return best


def neighbourhoods(
    units: StageUnits,
    start: Ints,
    pivots: int,
    seed: int,
    bound: float,
    times: Iterable[float] = repeat(np.inf),
) -> Iterator[Ints]:
    """Splits, each no worse than the one before: units around the busiest device are freed, and
    where they had better be is a mixed-integer program. Their number follows how hard that is.

    In turn: units near one on the busiest device may go anywhere, and units of the busiest and one
    other device may change between these. `times` are the seconds that each may take; where they
    end, or so many `pivots` have been made, the search does.
    """
    rng = np.random.default_rng(seed)
    where, near = start, _neighbours(units)
    choices = [CHOICES[1], CHOICES[1]]
    for turn, seconds in enumerate(times):
        loads = units.loads(where)
        if loads.max() <= bound or pivots <= 0 or units.devices == 1:
            return
        busiest, kind = int(np.argmax(loads)), turn % 2
        allowed = list(range(units.devices))
        if kind:
            others = [p for p in allowed if p != busiest]
            allowed = [busiest, others[int(rng.integers(len(others)))]]
        most = max(2, int(choices[kind]) // len(allowed))
        free = _ball(near, where, allowed, busiest, most, rng)
        found, spent = _place_free_units(units, where, free, allowed, seconds)
        pivots -= spent + LEAST_SPENT
        factor = 1.5 if spent < EASY else 0.6 if spent > HARD else 1.0
        choices[kind] = min(CHOICES[2], max(CHOICES[0], choices[kind] * factor))
        if found is not None and units.fits(found):
            after = units.loads(found)
            better = after.max() < loads.max() * (1 - 1e-12)
            level = after.max() <= loads.max() and (after**2).sum() < (loads**2).sum()
            if better or level:
                where = found
                yield where


def _neighbours(units: StageUnits) -> list[list[int]]:
    """The units that share a tensor with each unit."""
    near: list[set[int]] = [set() for _ in range(units.count)]
    for t, maker in enumerate(units.maker.tolist()):
        for reader in units.readers_of(t).tolist():
            near[maker].add(reader)
            near[reader].add(maker)
    return [sorted(each) for each in near]


def _ball(
    near: list[list[int]],
    where: Ints,
    allowed: list[int],
    busiest: int,
    most: int,
    rng: np.random.Generator,
) -> list[int]:
    """Units on some devices, nearest first to a random one on the busiest."""
    mine = np.flatnonzero(where == busiest)
    queue = [int(mine[int(rng.integers(len(mine)))])]
    seen = set(queue)
    for u in queue:
        if len(queue) >= most:
            break
        for v in near[u]:
            if v not in seen and int(where[v]) in allowed:
                seen.add(v)
                queue.append(v)
    rest = [u for u in rng.permutation(len(where)).tolist() if u not in seen]
    queue += [u for u in rest if int(where[u]) in allowed][: max(0, most - len(queue))]
    return queue[:most]


def _place_free_units(
    units: StageUnits,
    where: Ints,
    free: list[int],
    allowed: list[int],
    seconds: float,
) -> tuple[Ints | None, int]:
    """The best devices for free units, all others where they are; pivots that it took."""
    model, column = MixedIntegerProgram(), {}
    for u in free:
        here = [p for p in allowed if np.isfinite(units.compute[u, p])]
        first = model.columns(len(here), upper=1.0, integer=True)
        column.update({(u, p): first + i for i, p in enumerate(here)})
        model.row({first + i: 1.0 for i in range(len(here))}, lower=1.0, upper=1.0)
    program = _StageProgram(units, where, set(free), column, model)
    program.transfers()
    top = program.loads(allowed)
    begin = np.zeros(len(model.cost))
    for u in free:
        begin[column[u, int(where[u])]] = 1.0
    program.complete(begin, top)
    found = model.solve(nodes=NODES, begin=begin, gap=1e-4, seconds=seconds)
    if found.values is None:
        return None, found.pivots
    result = where.copy()
    for (u, p), at in column.items():
        if found.values[at] > 0.5:
            result[u] = p
    return result, found.pivots


class _StageProgram:
    """A split with some units free, as rows over the columns of `model`."""

    def __init__(
        self,
        units: StageUnits,
        where: Ints,
        free: set[int],
        column: dict[tuple[int, int], int],
        model: MixedIntegerProgram,
    ) -> None:
        self.units, self.where, self.free = units, where, free
        self.column, self.model = column, model
        self.terms: list[dict[int, float]] = [{} for _ in range(units.devices)]
        self.fixed = np.zeros(units.devices)
        self.moves: list[tuple[int, list[tuple[dict[int, float], float]]]] = []
        for u in range(units.count):
            if u not in free:
                self.fixed[where[u]] += units.compute[u, where[u]]
        for (u, p), at in column.items():
            self.terms[p][at] = float(units.compute[u, p])

    def _placement_term(self, u: int, p: int) -> tuple[dict[int, float], float]:
        """Return True if a unit is on a device: a column, or a number."""
        if u in self.free:
            at = self.column.get((u, p))
            return ({at: 1.0}, 0.0) if at is not None else ({}, 0.0)
        return {}, float(self.where[u] == p)

    def transfers(self) -> None:
        """Add the cost of tensors: a column for each that is not fixed."""
        units = self.units
        for t, maker in enumerate(units.maker.tolist()):
            readers = units.readers_of(t).tolist()
            for p in range(units.devices):
                makes = self._placement_term(maker, p)
                reads = [self._placement_term(r, p) for r in readers]
                enters = [_difference(r, makes) for r in reads]
                leaves = [_difference(makes, r) for r in reads]
                for price, all_ in ((units.enter[t, p], enters), (units.leave[t, p], leaves)):
                    if price > 0.0:
                        self._add_price(p, float(price), all_)

    def _add_price(self, p: int, price: float, gaps: list[tuple[dict[int, float], float]]) -> None:
        """A price to pay on p if any of these is 1."""
        if any(not terms and number > 0.5 for terms, number in gaps):
            self.fixed[p] += price
            return
        open_ = [(terms, number) for terms, number in gaps if terms and _most(terms, number) > 0.5]
        if not open_:
            return
        paid = self.model.columns(1, upper=1.0)
        self.terms[p][paid] = price
        self.moves.append((paid, open_))
        for terms, number in open_:
            row = {at: -value for at, value in terms.items()}
            row[paid] = 1.0
            self.model.row(row, lower=number)

    def loads(self, allowed: list[int]) -> int:
        """The rows of loads and memory; the column of the max load."""
        units, model = self.units, self.model
        top = model.columns(1, cost=1.0, lower=float(self.fixed.max()))
        for p in range(units.devices):
            if self.terms[p]:
                model.row(self.terms[p] | {top: -1.0}, upper=-float(self.fixed[p]))
                for at, value in self.terms[p].items():
                    model.cost[at] += TIE * value / units.devices
        for p in allowed:
            stays = sum(
                float(units.memory[u])
                for u in np.flatnonzero(self.where == p).tolist()
                if u not in self.free
            )
            mine = {at: float(units.memory[u]) for (u, q), at in self.column.items() if q == p}
            if mine and np.isfinite(units.capacity[p]):
                model.row(mine, upper=float(units.capacity[p]) - stays)
        return top

    def complete(self, point: Floats, top: int) -> None:
        """Fill in what follows from where units are."""
        for paid, gaps in self.moves:
            point[paid] = max(
                [0.0] + [number + sum(v * point[at] for at, v in terms.items())
                         for terms, number in gaps]
            )  # fmt: skip
        loads = [sum(v * point[at] for at, v in terms.items()) for terms in self.terms]
        point[top] = float((self.fixed + np.array(loads)).max())


def _difference(
    one: tuple[dict[int, float], float], other: tuple[dict[int, float], float]
) -> tuple[dict[int, float], float]:
    terms = dict(one[0])
    for at, value in other[0].items():
        terms[at] = terms.get(at, 0.0) - value
    return terms, one[1] - other[1]


def _most(terms: dict[int, float], number: float) -> float:
    return number + sum(max(0.0, value) for value in terms.values())

"""Three lower bounds on the max load of a split, each stronger and slower than the one before.

`fluid_bound` divides units freely; `closure_bound` asks what the dearest unit's device must take on
at least (a minimum cut); `cover_bound` asks whether so many devices can hold everything, in
fractions of whole sets (column generation: sets of a load below the bound are priced by HiGHS).
Last step of `split_stages`, and what tells its search that it may stop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.problems.problem import Floats, Ints
from graphflow.placement.solvers.highs import Live, MixedIntegerProgram
from graphflow.placement.stages.contiguous import Stock, stock_of
from graphflow.placement.stages.units import StageUnits

GAPS = (0.3, 0.03, 0.0)
"""Shares within which sets are priced: roughly while that brings new ones."""
LEAST_SPENT = 50
"""Pivots that a set counts for at least."""
FINE = 1e-3
"""Share to which the bound is narrowed down."""
SAFE = 1e-7
"""Share by which bounds that come from a solver are lowered: its tolerances."""


def fluid_bound(units: StageUnits) -> float:
    """Units in fractions, transfers free, memory as a sum; never below the dearest unit's least
    cost. A linear program over classes of devices."""
    stock = stock_of(units)
    least = units.compute.min(axis=1)
    model = MixedIntegerProgram()
    top = model.columns(1, cost=1.0, lower=float(least.max(initial=0.0)))
    shares = model.columns(units.count * len(stock.members), upper=1.0)
    loads: list[dict[int, float]] = [{top: -float(len(m))} for m in stock.members]
    stays: list[dict[int, float]] = [{} for _ in stock.members]
    for u in range(units.count):
        whole = {}
        for c, p in enumerate(stock.column.tolist()):
            share, seconds = shares + u * len(stock.members) + c, float(units.compute[u, p])
            if np.isfinite(seconds):
                whole[share] = 1.0
                loads[c][share] = seconds
                if units.memory[u] > 0.0:
                    stays[c][share] = float(units.memory[u])
        model.row(whole, lower=1.0)
    for c, (load, held) in enumerate(zip(loads, stays, strict=True)):
        model.row(load, upper=0.0)
        room = float(units.capacity[stock.column[c]]) * len(stock.members[c])
        if held and np.isfinite(room):
            model.row(held, upper=room)
    return _subtract_margin(model.solve().bound)


def closure_bound(units: StageUnits, known: float = 0.0) -> float:
    """The most that any one unit asks of its device at least, with all it has to take along so as
    not to pay for transfers: a minimum cut for each unit that alone is dearer than `known`."""
    stock = stock_of(units)
    alone = np.array([_alone(units, u) for u in range(units.count)])
    lives = [_set_model(units, p) for p in stock.column.tolist()]
    best = known
    for u in np.argsort(-alone.min(axis=1), kind="stable").tolist():
        if alone[u].min() <= best:
            break
        least = np.inf
        for c, p in enumerate(stock.column.tolist()):
            if np.isfinite(units.compute[u, p]) and best < least:
                lives[c].bounds(u, 1.0, 1.0)
                least = min(least, _subtract_margin(lives[c].solve().bound))
                lives[c].bounds(u, 0.0, 1.0 if np.isfinite(units.compute[u, p]) else 0.0)
        best = max(best, least)
    return best


def _alone(units: StageUnits, u: int) -> Floats:
    """(classes,) load of each class of devices with this unit alone."""
    column = stock_of(units).column
    made = slice(units.made[u], units.made[u + 1])
    read = units.inputs[units.input_start[u] : units.input_start[u + 1]]
    total: Floats = (
        units.compute[u, column]
        + units.leave[made][:, column].sum(axis=0)
        + units.enter[read][:, column].sum(axis=0)
    )
    return total


def _set_model(units: StageUnits, device: int) -> Live:
    """Minimise the load of a set of units on a device: columns 0..u-1 say what is in it. Its
    matrix is totally unimodular: the optimum is a set."""
    model, terms = _set_columns(units, device, False)
    for column, seconds in terms.items():
        model.cost[column] = seconds
    return Live(model)


def _set_columns(
    units: StageUnits, device: int, integer: bool
) -> tuple[MixedIntegerProgram, dict[int, float]]:
    """Columns of a set of units on a device, the rows of its transfers, and the terms of its
    load."""
    model = MixedIntegerProgram()
    model.columns(units.count, upper=1.0, integer=integer)
    terms: dict[int, float] = {}
    for u, seconds in enumerate(units.compute[:, device].tolist()):
        if np.isfinite(seconds):
            terms[u] = seconds
        else:
            model.upper[u] = 0.0
    for t, maker in enumerate(units.maker.tolist()):
        readers = units.readers_of(t).tolist()
        if units.enter[t, device] > 0.0:
            enters = model.columns(1)
            terms[enters] = float(units.enter[t, device])
            for r in readers:
                model.row({enters: 1.0, maker: 1.0, r: -1.0}, lower=0.0)
        if units.leave[t, device] > 0.0:
            leaves = model.columns(1)
            terms[leaves] = float(units.leave[t, device])
            for r in readers:
                model.row({leaves: 1.0, maker: -1.0, r: 1.0}, lower=0.0)
    return model, terms


@dataclass
class Cover:
    """The test whether devices can hold all units in fractions of sets, each of a load below a
    limit.

    Only the dearest units must be held, at least once; the others may be where they help.

    Args:
        units: what is to be held.
        pivots: to make in all; `effort` nodes of search for each set.
        most: how many units must be held; default: fewer where there are many units, since every
            set is dearer there.
    """

    units: StageUnits
    pivots: int
    effort: int = 100
    most: int = 0
    deadline: float = np.inf
    stock: Stock = field(init=False)
    pools: list[dict[bytes, float]] = field(init=False)
    held: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.stock = stock_of(self.units)
        self.pools = [{} for _ in self.stock.members]
        least = self.units.compute.min(axis=1)
        most = self.most or (64 if self.units.count <= 100 else 16)
        dearest = np.argsort(-least, kind="stable")[:most]
        self.held = np.sort(dearest[least[dearest] > 0.0])
        self._live: list[tuple[Live, int]] = []
        self._terms: list[dict[int, float]] = []
        for p in self.stock.column.tolist():
            model, terms = _set_columns(self.units, p, True)
            row = model.row(terms, upper=np.inf)
            memory = {u: float(m) for u, m in enumerate(self.units.memory.tolist()) if m > 0}
            if np.isfinite(self.units.capacity[p]) and memory:
                model.row(memory, upper=float(self.units.capacity[p]))
            self._live.append((Live(model), row))
            self._terms.append(terms)

    def learn(self, splits: Iterable[Ints]) -> None:
        """Sets of known splits, to begin with."""
        for where in splits:
            loads = self.units.loads(where)
            for c, members in enumerate(self.stock.members):
                for p in members:
                    self.pools[c][(where == p).tobytes()] = float(loads[p])

    def excludes(self, limit: float) -> bool:
        """Return True if it is proven that no split has a max load of `limit` or less.

        Column generation: the master program covers the units by fractions of the sets that are
        known, and prices say which further set would help.
        """
        master = self._master(limit)
        for (one, row), terms in zip(self._live, self._terms, strict=True):
            one.row_upper(row, limit)
            for column, seconds in terms.items():  # all or nothing
                one.bounds(column, 0.0, float(seconds <= limit))
        gap = GAPS[0]
        while self.pivots > 0:
            found = master.solve()
            if found.duals is None or found.objective < 1e-7:
                return False
            priced = self._price(master, found.duals, gap)
            if priced is None:
                return False
            missing, is_new = priced
            if missing > 1e-6:
                return True
            if not is_new:
                finer = [g for g in GAPS if g < gap]
                if not finer:
                    return False
                gap = finer[0]
        return False

    def _master(self, limit: float) -> Live:
        """Minimise what the known sets within a limit leave uncovered: a row for
        each unit, and one for the devices of a kind."""
        count = len(self.held)
        model = MixedIntegerProgram()
        model.columns(count, cost=1.0)
        for i in range(count):
            model.row({i: 1.0}, lower=1.0)
        for members in self.stock.members:
            model.row({}, upper=float(len(members)))
        live = Live(model)
        for c, pool in enumerate(self.pools):
            for key, load in pool.items():
                if load <= limit:
                    self._enter(live, c, np.frombuffer(key, dtype=bool))
        return live

    def _price(
        self, master: Live, duals: NDArray[np.float64], gap: float
    ) -> tuple[float, bool] | None:
        """Return a lower bound of what stays uncovered, whatever the sets, and whether one was
        found that covers more; None: time is up."""
        count = len(self.held)
        worth = np.zeros(self.units.count)
        worth[self.held] = duals[:count]
        missing, is_new = float(worth.sum()), False
        for c, members in enumerate(self.stock.members):
            one = self._live[c][0]
            one.costs(0, -worth)
            left = self.deadline - monotonic()
            if left <= 0.0:
                self.pivots = 0
                return None
            best = one.solve(nodes=self.effort, gap=gap, seconds=left)
            self.pivots -= best.pivots + LEAST_SPENT
            missing -= len(members) * max(0.0, -best.bound)
            if best.values is None or -best.objective + duals[count + c] <= 1e-9:
                continue
            chosen = best.values[: self.units.count] > 0.5
            key = chosen.tobytes()
            if key not in self.pools[c]:
                is_new = True
                self.pools[c][key] = self._load(c, chosen)
                self._enter(master, c, chosen)
        return missing, is_new

    def _load(self, c: int, chosen: NDArray[np.bool_]) -> float:
        other = 1 - np.asarray(chosen, dtype=np.int64)
        p = int(self.stock.column[c])
        load = float(self.units.compute[chosen, p].sum())
        for t, maker in enumerate(self.units.maker.tolist()):
            readers = self.units.readers_of(t)
            if chosen[maker]:
                load += float(self.units.leave[t, p]) if other[readers].any() else 0.0
            elif chosen[readers].any():
                load += float(self.units.enter[t, p])
        return load

    def _enter(self, live: Live, c: int, chosen: NDArray[np.bool_]) -> None:
        rows = np.append(np.flatnonzero(chosen[self.held]), len(self.held) + c)
        live.add(0.0, rows, np.ones(len(rows)))


def cover_bound(
    units: StageUnits,
    low: float,
    high: float,
    splits: Iterable[Ints],
    pivots: int,
    seconds: float = np.inf,
) -> float:
    """The greatest limit between `low` and `high` that `Cover` excludes, within so many `pivots`
    (or `seconds`)."""
    cover = Cover(units, pivots, deadline=monotonic() + seconds)
    cover.learn(splits)
    least, most = low, high
    while most - least > FINE * high and cover.pivots > 0:
        middle = (least + most) / 2
        if cover.excludes(middle):
            least = middle
        else:
            most = middle
    return least


def _subtract_margin(bound: float) -> float:
    return bound * (1 - SAFE)

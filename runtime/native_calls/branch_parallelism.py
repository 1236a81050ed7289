"""Wide: kernels that do not wait for each other run beside each other on a device's threads.

Most kernels are shared by the threads already, row by row. Those too small for that, in branches
that come together late (towers, heads, ensembles), are where a second thread would idle.
`stretches` finds them before a program's memory is planned, so that branches get memory of their
own; `groups` cuts the calls of a segment into strands of which none touches memory of another. When
and where a kernel runs changes no bits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.jit.thread_pool import current_pool
from graphflow.runtime.memory.arena_planner import Arena, Block, plan_arena
from graphflow.runtime.native_calls.native_segments import Call, Segment, Slot

LEAST = 120_000.0
"""Nanoseconds of work from which branches are looked for (a hand-over takes 10 to 20 thousand)."""
_BRANCH = 30_000.0
"""Nanoseconds of work from which two branches that meet are the end of a stretch."""
_GAIN = 0.75
"""Of the whole, at most so much may be the work of one thread of two."""
_MOST = 4000
"""Calls of a segment that are looked at."""


@dataclass(frozen=True)
class Unit:
    """A kernel on its way: where it stands, its work, and which units it waits for."""

    position: int
    nanoseconds: float
    waits_for: tuple[int, ...]


@dataclass(frozen=True)
class Stretch:
    """Positions from `first` to `last` in which branches should run beside each other.

    Attributes:
        branches: the number of the branch that the kernel at a position belongs to.
    """

    first: int
    last: int
    branches: Mapping[int, int]


class _Branches:
    """Sets of units (by number) that wait for each other, with the work of each."""

    def __init__(self) -> None:
        self._above: list[int] = []
        self.work: dict[int, float] = {}

    def find(self, unit: int) -> int:
        above = self._above
        while above[unit] != unit:
            above[unit] = above[above[unit]]
            unit = above[unit]
        return unit

    def add(self, work: float) -> int:
        unit = len(self._above)
        self._above.append(unit)
        self.work[unit] = work
        return unit

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self._above[b] = a
            self.work[a] += self.work.pop(b)

    def meet(self, units: Sequence[int]) -> bool:
        """Whether these belong to several branches that are worth a thread each."""
        found = {self.find(unit) for unit in units}
        return sum(self.work[each] >= _BRANCH for each in found) > 1

    def pays(self) -> bool:
        """Whether two threads would be much faster than one."""
        total = sum(self.work.values())
        return total >= LEAST and max(_bins(list(self.work.values()), 2)[1]) <= _GAIN * total


def _bins(work: Sequence[float], count: int) -> tuple[list[int], list[float]]:
    """A bin for each piece of work, the largest first into the emptiest; and what is in them.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    filled = [0.0] * count
    chosen = [0] * len(work)
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        chosen[i] = filled.index(min(filled))
        filled[chosen[i]] += work[i]
    return chosen, filled


def stretches(units: Sequence[Unit | None]) -> list[Stretch]:
    """Where branches should run beside each other.

    Args:
        units: in order; None for what is no kernel and ends a stretch.
    """
    result: list[Stretch] = []
    branches = _Branches()
    mine: dict[int, int] = {}
    members: dict[int, int] = {}  # position, unit
    for number, unit in enumerate([*units, None]):
        before = [mine[i] for i in unit.waits_for if i in mine] if unit is not None else []
        if unit is None or branches.meet(before):
            if members and branches.pays():
                found = {at: branches.find(each) for at, each in members.items()}
                result.append(Stretch(min(found), max(found), found))
            branches, mine, members, before = _Branches(), {}, {}, []
        if unit is not None:
            mine[number] = branches.add(unit.nanoseconds)
            members[unit.position] = mine[number]
            for other in before:
                branches.join(other, mine[number])
    return result


def plan_branches(lives: Sequence[Block], wide: Sequence[Stretch]) -> Arena:
    """As `plan_arena`, where no two branches of a stretch share memory: what lives in one branch
    alone is planned by itself, and takes one block."""
    outer: list[Block] = []
    places: list[tuple[int, int | None]] = []  # among the outer blocks; and within that one
    inner: dict[tuple[int, int], list[Block]] = {}
    for block in lives:
        home = stretch_at(wide, block.birth)
        if home is not None and block.death <= home.last and block.birth in home.branches:
            own = inner.setdefault((home.first, home.branches[block.birth]), [])
            places.append((id(own), len(own)))
            own.append(block)
        else:
            places.append((len(outer), None))
            start = block.birth if home is None else home.first
            outer.append(Block(start, _end(wide, block.death), block.nbytes))
    arenas = {id(own): plan_arena(own) for own in inner.values()}
    of = {}
    for (first, _), own in inner.items():
        of[id(own)] = len(outer)
        outer.append(Block(first, _end(wide, first), arenas[id(own)].nbytes))
    whole = plan_arena(outer)
    offsets = [
        whole.offsets[at] if place is None else whole.offsets[of[at]] + arenas[at].offsets[place]
        for at, place in places
    ]
    return Arena(tuple(offsets), whole.nbytes)


def stretch_at(wide: Sequence[Stretch], at: int) -> Stretch | None:
    """The one that a position is in."""
    i = bisect_right(wide, at, key=attrgetter("first")) - 1
    return wide[i] if i >= 0 and at <= wide[i].last else None


def _end(wide: Sequence[Stretch], at: int) -> int:
    """The position, or the end of the stretch that it is in."""
    home = stretch_at(wide, at)
    return at if home is None else home.last


# Calls ------------------------------------------------------------------------------------------


def groups(calls: Sequence[Call], threads: int) -> list[list[list[Call]]]:
    """Calls as groups to run one after the other, each as strands to run beside each other: what is
    in two of them never touches the same memory, unless both only read it."""
    total = sum(call.task.nanoseconds for call in calls)
    if threads < 2 or total < LEAST or len(calls) > _MOST:
        return [[list(calls)]]
    result: list[list[list[Call]]] = []
    group = _Group()
    for call in calls:
        touched = group.touched(call)
        if group.branches.meet(touched):
            result.append(group.strands(threads))
            group = _Group()
            touched = []
        group.add(call, touched)
    result.append(group.strands(threads))
    return _merged(result)


def _merged(found: Sequence[list[list[Call]]]) -> list[list[list[Call]]]:
    """Neighbours of one strand as one group."""
    result: list[list[list[Call]]] = []
    for strands in found:
        if result and len(strands) == len(result[-1]) == 1:
            result[-1][0] += strands[0]
        else:
            result.append(strands)
    return result


class _Group:
    """Calls, and which memory they use."""

    def __init__(self) -> None:
        self.branches = _Branches()
        self._calls: list[Call] = []
        self._used = np.zeros((64, 4), np.int64)  # first byte, end, whether written, unit
        self._count = 0

    def touched(self, call: Call) -> list[int]:
        """The units that must not run beside a call."""
        table = self._used[: self._count]
        result: set[int] = set()
        for start, end, written in _uses(call):
            clash = (table[:, 0] < end) & (table[:, 1] > start)
            if not written:
                clash &= table[:, 2] > 0
            result.update(table[clash, 3].tolist())
        return list(result)

    def add(self, call: Call, touched: Sequence[int]) -> None:
        unit = self.branches.add(call.task.nanoseconds)
        self._calls.append(call)
        for other in touched:
            self.branches.join(other, unit)
        for start, end, written in _uses(call):
            if self._count == len(self._used):
                self._used = np.concatenate([self._used, np.zeros_like(self._used)])
            self._used[self._count] = start, end, written, unit
            self._count += 1

    def strands(self, threads: int) -> list[list[Call]]:
        """What each thread runs, in order."""
        if not self._calls or not self.branches.pays():
            return [self._calls]
        roots = list(self.branches.work)
        chosen, filled = _bins([self.branches.work[root] for root in roots], threads)
        where = dict(zip(roots, chosen, strict=True))
        result: list[list[Call]] = [[] for _ in filled]
        for unit, call in enumerate(self._calls):
            result[where[self.branches.find(unit)]].append(call)
        return [strand for strand in result if strand]


def _uses(call: Call) -> list[tuple[int, int, bool]]:
    """The memory at fixed places that a call uses: what is fed is only read. Where that is not
    known, all memory."""
    if not call.nbytes:
        return [(0, 1 << 62, True)]
    found = []
    for i, place in enumerate(call.places):
        nbytes = call.nbytes[i]
        if isinstance(place, int) and nbytes:
            found.append((place, place + nbytes, i >= call.written))
    return found


class Strands:
    """Segments that run beside each other; as a line of a program it is like one of them."""

    def __init__(self, parts: Sequence[Sequence[Call]]) -> None:
        self.segments = tuple(Segment(part) for part in parts)
        self.calls = tuple(call for segment in self.segments for call in segment.calls)
        self._runs: tuple[Callable[[], None], ...] = tuple(s.freely for s in self.segments)

    @property
    def slots(self) -> set[Slot]:
        return {slot for segment in self.segments for slot in segment.slots}

    def run(self) -> None:
        """All of them, on the threads of the current pool."""
        pool = current_pool()
        if pool is None:
            for run in self._runs:
                run()
        else:
            pool.run(self._part, len(self._runs))

    def _part(self, i: int) -> None:
        self._runs[i]()

    def one(self, i: int) -> None:
        """Run one of the calls."""
        for segment in self.segments:
            if i < len(segment.calls):
                segment.one(i)
                return
            i -= len(segment.calls)

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
from graphflow.runtime.memory.arena_planner import ArenaPlan, BufferLifetime, plan_arena
from graphflow.runtime.native_calls.native_segments import KernelCall, NativeSegment, RuntimeOperand

MIN_PARALLEL_NANOSECONDS = 120_000.0
"""Nanoseconds of work from which branches are looked for (a hand-over takes 10 to 20 thousand)."""
_MIN_BRANCH_NANOSECONDS = 30_000.0
"""Nanoseconds of work from which two branches that meet are the end of a stretch."""
_MAX_LOAD_SHARE = 0.75
"""Of the whole, at most so much may be the work of one thread of two."""
_MAX_CALLS = 4000
"""Calls of a segment that are looked at."""


@dataclass(frozen=True)
class ScheduledKernel:
    """A kernel on its way: where it stands, its work, and which units it waits for."""

    position: int
    nanoseconds: float
    depends_on: tuple[int, ...]


@dataclass(frozen=True)
class ParallelSection:
    """Positions from `first` to `last` in which branches should run beside each other.

    Attributes:
        branches: the number of the branch that the kernel at a position belongs to.
    """

    first: int
    last: int
    branches: Mapping[int, int]


class BranchSets:
    """Sets of units (by number) that wait for each other, with the work of each."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self.work: dict[int, float] = {}

    def find(self, unit: int) -> int:
        above = self._parent
        while above[unit] != unit:
            above[unit] = above[above[unit]]
            unit = above[unit]
        return unit

    def add(self, work: float) -> int:
        unit = len(self._parent)
        self._parent.append(unit)
        self.work[unit] = work
        return unit

    def merge(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parent[b] = a
            self.work[a] += self.work.pop(b)

    def span_large_branches(self, units: Sequence[int]) -> bool:
        """Whether these belong to several branches that are worth a thread each."""
        found = {self.find(unit) for unit in units}
        return sum(self.work[each] >= _MIN_BRANCH_NANOSECONDS for each in found) > 1

    def is_worth_two_threads(self) -> bool:
        """Whether two threads would be much faster than one."""
        total = sum(self.work.values())
        return (
            total >= MIN_PARALLEL_NANOSECONDS
            and max(balance(list(self.work.values()), 2)[1]) <= _MAX_LOAD_SHARE * total
        )


def balance(work: Sequence[float], count: int) -> tuple[list[int], list[float]]:
    """A bin for each piece of work, the largest first into the emptiest; and what is in them.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    filled = [0.0] * count
    chosen = [0] * len(work)
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        chosen[i] = filled.index(min(filled))
        filled[chosen[i]] += work[i]
    return chosen, filled


def find_parallel_sections(units: Sequence[ScheduledKernel | None]) -> list[ParallelSection]:
    """Where branches should run beside each other.

    Args:
        units: in order; None for what is no kernel and ends a stretch.
    """
    result: list[ParallelSection] = []
    branches = BranchSets()
    mine: dict[int, int] = {}
    members: dict[int, int] = {}  # position, unit
    for number, unit in enumerate([*units, None]):
        before = [mine[i] for i in unit.depends_on if i in mine] if unit is not None else []
        if unit is None or branches.span_large_branches(before):
            if members and branches.is_worth_two_threads():
                found = {at: branches.find(each) for at, each in members.items()}
                result.append(ParallelSection(min(found), max(found), found))
            branches, mine, members, before = BranchSets(), {}, {}, []
        if unit is not None:
            mine[number] = branches.add(unit.nanoseconds)
            members[unit.position] = mine[number]
            for other in before:
                branches.merge(other, mine[number])
    return result


def plan_branches(lives: Sequence[BufferLifetime], wide: Sequence[ParallelSection]) -> ArenaPlan:
    """As `plan_arena`, where no two branches of a stretch share memory: what lives in one branch
    alone is planned by itself, and takes one block."""
    outer: list[BufferLifetime] = []
    places: list[tuple[int, int | None]] = []  # among the outer blocks; and within that one
    inner: dict[tuple[int, int], list[BufferLifetime]] = {}
    for block in lives:
        home = section_at(wide, block.birth)
        if home is not None and block.death <= home.last and block.birth in home.branches:
            own = inner.setdefault((home.first, home.branches[block.birth]), [])
            places.append((id(own), len(own)))
            own.append(block)
        else:
            places.append((len(outer), None))
            start = block.birth if home is None else home.first
            outer.append(BufferLifetime(start, _section_end(wide, block.death), block.nbytes))
    arenas = {id(own): plan_arena(own) for own in inner.values()}
    of = {}
    for (first, _), own in inner.items():
        of[id(own)] = len(outer)
        outer.append(BufferLifetime(first, _section_end(wide, first), arenas[id(own)].nbytes))
    whole = plan_arena(outer)
    offsets = [
        whole.offsets[at] if place is None else whole.offsets[of[at]] + arenas[at].offsets[place]
        for at, place in places
    ]
    return ArenaPlan(tuple(offsets), whole.nbytes)


def section_at(wide: Sequence[ParallelSection], at: int) -> ParallelSection | None:
    """The one that a position is in."""
    i = bisect_right(wide, at, key=attrgetter("first")) - 1
    return wide[i] if i >= 0 and at <= wide[i].last else None


def _section_end(wide: Sequence[ParallelSection], at: int) -> int:
    """The position, or the end of the stretch that it is in."""
    home = section_at(wide, at)
    return at if home is None else home.last


# Calls ------------------------------------------------------------------------------------------


def schedule_branches(calls: Sequence[KernelCall], threads: int) -> list[list[list[KernelCall]]]:
    """Calls as groups to run one after the other, each as strands to run beside each other: what is
    in two of them never touches the same memory, unless both only read it."""
    total = sum(call.task.nanoseconds for call in calls)
    if threads < 2 or total < MIN_PARALLEL_NANOSECONDS or len(calls) > _MAX_CALLS:
        return [[list(calls)]]
    result: list[list[list[KernelCall]]] = []
    group = _CallGroup()
    for call in calls:
        touched = group.conflicting_calls(call)
        if group.branches.span_large_branches(touched):
            result.append(group.split_into_strands(threads))
            group = _CallGroup()
            touched = []
        group.add(call, touched)
    result.append(group.split_into_strands(threads))
    return _merge_sequential(result)


def _merge_sequential(found: Sequence[list[list[KernelCall]]]) -> list[list[list[KernelCall]]]:
    """Neighbours of one strand as one group."""
    result: list[list[list[KernelCall]]] = []
    for strands in found:
        if result and len(strands) == len(result[-1]) == 1:
            result[-1][0] += strands[0]
        else:
            result.append(strands)
    return result


class _CallGroup:
    """Calls, and which memory they use."""

    def __init__(self) -> None:
        self.branches = BranchSets()
        self._calls: list[KernelCall] = []
        self._used = np.zeros((64, 4), np.int64)  # first byte, end, whether written, unit
        self._count = 0

    def conflicting_calls(self, call: KernelCall) -> list[int]:
        """The units that must not run beside a call."""
        table = self._used[: self._count]
        result: set[int] = set()
        for start, end, written in _memory_ranges(call):
            clash = (table[:, 0] < end) & (table[:, 1] > start)
            if not written:
                clash &= table[:, 2] > 0
            result.update(table[clash, 3].tolist())
        return list(result)

    def add(self, call: KernelCall, touched: Sequence[int]) -> None:
        unit = self.branches.add(call.task.nanoseconds)
        self._calls.append(call)
        for other in touched:
            self.branches.merge(other, unit)
        for start, end, written in _memory_ranges(call):
            if self._count == len(self._used):
                self._used = np.concatenate([self._used, np.zeros_like(self._used)])
            self._used[self._count] = start, end, written, unit
            self._count += 1

    def split_into_strands(self, threads: int) -> list[list[KernelCall]]:
        """What each thread runs, in order."""
        if not self._calls or not self.branches.is_worth_two_threads():
            return [self._calls]
        roots = list(self.branches.work)
        chosen, filled = balance([self.branches.work[root] for root in roots], threads)
        where = dict(zip(roots, chosen, strict=True))
        result: list[list[KernelCall]] = [[] for _ in filled]
        for unit, call in enumerate(self._calls):
            result[where[self.branches.find(unit)]].append(call)
        return [strand for strand in result if strand]


def _memory_ranges(call: KernelCall) -> list[tuple[int, int, bool]]:
    """The memory at fixed places that a call uses: what is fed is only read. Where that is not
    known, all memory."""
    if not call.nbytes:
        return [(0, 1 << 62, True)]
    found = []
    for i, place in enumerate(call.pointers):
        nbytes = call.nbytes[i]
        if isinstance(place, int) and nbytes:
            found.append((place, place + nbytes, i >= call.first_written))
    return found


class ParallelBranches:
    """Segments that run beside each other; as a line of a program it is like one of them."""

    def __init__(self, parts: Sequence[Sequence[KernelCall]]) -> None:
        self.segments = tuple(NativeSegment(part) for part in parts)
        self.calls = tuple(call for segment in self.segments for call in segment.calls)
        self._runs: tuple[Callable[[], None], ...] = tuple(s.run_without_gil for s in self.segments)

    @property
    def runtime_pointers(self) -> set[RuntimeOperand]:
        return {slot for segment in self.segments for slot in segment.runtime_pointers}

    def run(self) -> None:
        """All of them, on the threads of the current pool."""
        pool = current_pool()
        if pool is None:
            for run in self._runs:
                run()
        else:
            pool.run(self._run_segment, len(self._runs))

    def _run_segment(self, i: int) -> None:
        self._runs[i]()

    def run_call(self, i: int) -> None:
        """Run one of the calls."""
        for segment in self.segments:
            if i < len(segment.calls):
                segment.run_call(i)
                return
            i -= len(segment.calls)

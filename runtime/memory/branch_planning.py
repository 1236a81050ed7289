"""Independent branches of small kernels: where they lie, and memory that keeps them independent.

Large kernels are split over threads row by row. Kernels too small for that leave the other threads
idle, although a program often has branches that meet late: towers, heads, ensembles.
`find_parallel_sections` finds such branches before memory is planned. `plan_branches` then gives
no two branches of a section the same memory, since sharing would make one wait for the other.
`runtime/native_calls/branch_parallelism.py` runs them. Results have the same bits either way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import attrgetter

from graphflow.base.lazy_dataclass import dataclass
from graphflow.runtime.memory.arena_planner import ArenaPlan, BufferLifetime, plan_arena

MIN_PARALLEL_NANOSECONDS = 120_000.0
"""Work below which branches stay on one thread: waking another takes 10 to 20 thousand ns."""

MIN_BRANCH_NANOSECONDS = 30_000.0
"""Work of a large branch. A section ends at the first kernel that joins two large branches."""

MAX_LOAD_SHARE = 0.75
"""With two threads, the busier one may have at most this share of a section's work."""


@dataclass(frozen=True)
class ScheduledKernel:
    """A kernel in program order.

    Attributes:
        position: the index of its node in the partition's graph.
        nanoseconds: its estimated work.
        depends_on: indices, in the list of kernels, of those whose results it reads.
    """

    position: int
    nanoseconds: float
    depends_on: tuple[int, ...]


@dataclass(frozen=True)
class ParallelSection:
    """Positions `first` to `last`, both included, whose branches should run in parallel.

    Attributes:
        branches: position of each kernel -> number of its branch.
    """

    first: int
    last: int
    branches: Mapping[int, int]


class BranchSets:
    """Disjoint sets (union-find) of kernels that depend on each other, with the work of each set.

    Kernels are numbered in the order of `add`. Attribute `work`: root of a set -> nanoseconds.
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self.work: dict[int, float] = {}

    def find(self, kernel: int) -> int:
        """Return the root of a kernel's set."""
        parent = self._parent
        while parent[kernel] != kernel:
            parent[kernel] = parent[parent[kernel]]  # halves the path for later calls
            kernel = parent[kernel]
        return kernel

    def add(self, work: float) -> int:
        """Add a set of one kernel and return the kernel's number."""
        kernel = len(self._parent)
        self._parent.append(kernel)
        self.work[kernel] = work
        return kernel

    def merge(self, a: int, b: int) -> None:
        """Make one set of the sets of two kernels."""
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parent[b] = a
            self.work[a] += self.work.pop(b)

    def span_large_branches(self, kernels: Sequence[int]) -> bool:
        """Return True if kernels belong to two or more sets that are each worth a thread."""
        found = {self.find(kernel) for kernel in kernels}
        return sum(self.work[each] >= MIN_BRANCH_NANOSECONDS for each in found) > 1

    def is_worth_two_threads(self) -> bool:
        """Return True if two threads would finish all sets much sooner than one."""
        total = sum(self.work.values())
        if total < MIN_PARALLEL_NANOSECONDS:
            return False
        return max(balance(list(self.work.values()), 2)[1]) <= MAX_LOAD_SHARE * total


def balance(work: Sequence[float], count: int) -> tuple[list[int], list[float]]:
    """Assign pieces of work to `count` threads: the largest piece first, to the least loaded.

    Returns:
        The thread of each piece, and the load of each thread.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    loads = [0.0] * count
    chosen = [0] * len(work)
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        chosen[i] = loads.index(min(loads))
        loads[chosen[i]] += work[i]
    return chosen, loads


def find_parallel_sections(kernels: Sequence[ScheduledKernel | None]) -> list[ParallelSection]:
    """Find the sections of a program whose branches should run in parallel, in program order.

    Args:
        kernels: in program order; None for an operation that ends a section, such as a receive.
    """
    sections: list[ParallelSection] = []
    branches = BranchSets()
    numbers: dict[int, int] = {}  # index of a kernel -> its number in `branches`
    members: dict[int, int] = {}  # position of a kernel -> its number in `branches`
    for index, kernel in enumerate([*kernels, None]):
        before = [numbers[i] for i in kernel.depends_on if i in numbers] if kernel else []
        if kernel is None or branches.span_large_branches(before):
            if members and branches.is_worth_two_threads():
                found = {position: branches.find(each) for position, each in members.items()}
                sections.append(ParallelSection(min(found), max(found), found))
            branches, numbers, members, before = BranchSets(), {}, {}, []
        if kernel is not None:
            numbers[index] = branches.add(kernel.nanoseconds)
            members[kernel.position] = numbers[index]
            for other in before:
                branches.merge(other, numbers[index])
    return sections


def plan_branches(
    lifetimes: Sequence[BufferLifetime], sections: Sequence[ParallelSection]
) -> ArenaPlan:
    """Plan an arena as `plan_arena` does, but let no two branches of a section share memory.

    Buffers that live in one branch only are planned as an arena of their own. That arena is one
    buffer of the outer plan, which lives as long as the section.
    """
    outer: list[BufferLifetime] = []
    places: list[
        tuple[int, int | None]
    ] = []  # (outer index or id of a branch, index in the branch)
    inner: dict[tuple[int, int], list[BufferLifetime]] = {}
    for buffer in lifetimes:
        home = section_at(sections, buffer.birth)
        if home is not None and buffer.death <= home.last and buffer.birth in home.branches:
            own = inner.setdefault((home.first, home.branches[buffer.birth]), [])
            places.append((id(own), len(own)))
            own.append(buffer)
        else:
            places.append((len(outer), None))
            start = buffer.birth if home is None else home.first
            end = _section_end(sections, buffer.death)
            outer.append(BufferLifetime(start, end, buffer.nbytes))
    arenas = {id(own): plan_arena(own) for own in inner.values()}
    outer_index = {}
    for (first, _), own in inner.items():
        outer_index[id(own)] = len(outer)
        end = _section_end(sections, first)
        outer.append(BufferLifetime(first, end, arenas[id(own)].nbytes))
    whole = plan_arena(outer)
    offsets = [
        whole.offsets[at]
        if place is None
        else whole.offsets[outer_index[at]] + arenas[at].offsets[place]
        for at, place in places
    ]
    return ArenaPlan(tuple(offsets), whole.nbytes)


def section_at(sections: Sequence[ParallelSection], position: int) -> ParallelSection | None:
    """Return the section that contains a position; None if no section does."""
    i = bisect_right(sections, position, key=attrgetter("first")) - 1
    return sections[i] if i >= 0 and position <= sections[i].last else None


def _section_end(sections: Sequence[ParallelSection], position: int) -> int:
    """Return the end of the section that contains a position, else the position itself."""
    home = section_at(sections, position)
    return position if home is None else home.last

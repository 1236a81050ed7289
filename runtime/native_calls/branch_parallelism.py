"""Independent branches of small kernels run in parallel on a device's threads.

`runtime/memory/branch_planning.py` gives each branch memory of its own when a program's memory is
planned. `schedule_branches` then cuts the calls of a segment into strands, none of which touches
memory that another strand writes, and `ParallelBranches` runs one strand on each thread. Results
have the same bits on any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphflow.ops.kernels.jit.thread_pool import current_pool
from graphflow.runtime.memory.branch_planning import (
    MIN_PARALLEL_NANOSECONDS,
    BranchSets,
    balance,
)
from graphflow.runtime.native_calls.native_segments import NativeSegment
from graphflow.runtime.native_calls.pointer_table import KernelCall, RuntimeOperand

_MAX_CALLS = 4000
"""Calls of a segment above which it is not analysed: conflicts are found in quadratic time."""


def schedule_branches(calls: Sequence[KernelCall], threads: int) -> list[list[list[KernelCall]]]:
    """Cut calls into groups that run in sequence, each a list of strands to run in parallel.

    Two strands of a group never touch the same memory, unless both only read it.
    """
    total = sum(call.task.nanoseconds for call in calls if not call.task.is_divisible)
    if threads < 2 or total < MIN_PARALLEL_NANOSECONDS or len(calls) > _MAX_CALLS:
        return [[list(calls)]]
    result: list[list[list[KernelCall]]] = []
    group = _CallGroup()
    for call in calls:
        if call.task.is_divisible or call.recording is not None:
            result += [group.split_into_strands(threads), [[call]]]
            group = _CallGroup()
            continue
        conflicts = group.conflicting_calls(call)
        if group.branches.span_large_branches(conflicts):
            result.append(group.split_into_strands(threads))
            group = _CallGroup()
            conflicts = []
        group.add(call, conflicts)
    result.append(group.split_into_strands(threads))
    return _merge_sequential(result)


def _merge_sequential(found: Sequence[list[list[KernelCall]]]) -> list[list[list[KernelCall]]]:
    """Join neighbouring groups that have one strand each."""
    result: list[list[list[KernelCall]]] = []
    for strands in found:
        if strands == [[]]:
            continue
        if result and len(strands) == len(result[-1]) == 1:
            result[-1][0] += strands[0]
        else:
            result.append(strands)
    return result


class _CallGroup:
    """Calls in program order, the memory that they use, and the branches that follow from it."""

    def __init__(self) -> None:
        self.branches = BranchSets()
        self._calls: list[KernelCall] = []
        self._used = np.zeros((64, 4), np.int64)  # first byte, end, whether written, call
        self._count = 0

    def conflicting_calls(self, call: KernelCall) -> list[int]:
        """Return the numbers of the calls so far that must not run in parallel with a call."""
        table = self._used[: self._count]
        result: set[int] = set()
        for start, end, written in _memory_ranges(call):
            clash = (table[:, 0] < end) & (table[:, 1] > start)
            if not written:
                clash &= table[:, 2] > 0
            result.update(table[clash, 3].tolist())
        return list(result)

    def add(self, call: KernelCall, conflicts: Sequence[int]) -> None:
        """Append a call to the branch of the calls that it conflicts with."""
        number = self.branches.add(call.task.nanoseconds)
        self._calls.append(call)
        for other in conflicts:
            self.branches.merge(other, number)
        for start, end, written in _memory_ranges(call):
            if self._count == len(self._used):
                self._used = np.concatenate([self._used, np.zeros_like(self._used)])
            self._used[self._count] = start, end, written, number
            self._count += 1

    def split_into_strands(self, threads: int) -> list[list[KernelCall]]:
        """Assign whole branches to threads; return each thread's calls in program order."""
        if not self._calls or not self.branches.is_worth_two_threads():
            return [self._calls]
        roots = list(self.branches.work)
        chosen, loads = balance([self.branches.work[root] for root in roots], threads)
        thread_of = dict(zip(roots, chosen, strict=True))
        strands: list[list[KernelCall]] = [[] for _ in loads]
        for number, call in enumerate(self._calls):
            strands[thread_of[self.branches.find(number)]].append(call)
        return [strand for strand in strands if strand]


def _memory_ranges(call: KernelCall) -> list[tuple[int, int, bool]]:
    """Return (first byte, end, is written) of the memory at fixed addresses that a call uses.

    Feeds and received tensors are left out: they are only read. A call of unknown sizes counts as
    writing all memory.
    """
    if not call.nbytes:
        return [(0, 1 << 62, True)]
    found = []
    for i, start in enumerate(call.pointers):
        nbytes = call.nbytes[i]
        if isinstance(start, int) and nbytes:
            found.append((start, start + nbytes, i >= call.first_written))
    return found


class ParallelBranches:
    """Segments that run in parallel; a line of a program, as a single `NativeSegment` is."""

    def __init__(self, parts: Sequence[Sequence[KernelCall]]) -> None:
        self.segments = tuple(NativeSegment(part) for part in parts)
        self.calls = tuple(call for segment in self.segments for call in segment.calls)
        self._entries = np.array([segment.entry for segment in self.segments], np.uint64)

    @property
    def runtime_pointers(self) -> set[RuntimeOperand]:
        """The operands whose addresses are known only when the program runs."""
        return {operand for segment in self.segments for operand in segment.runtime_pointers}

    def run(self) -> None:
        """Run all segments, on the threads of the current pool if there is one."""
        pool = current_pool()
        if pool is None:
            for segment in self.segments:
                segment.run()
        else:
            pool.run_entries(self._entries, len(self.segments))
            for segment in self.segments:
                segment.look_at_checks()

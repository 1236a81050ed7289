"""Parts: the compute and the commit part of a program while they are written, line by line.

Generated kernels that stand together become one line, a native call; how many that are is a matter
of their work (`native_segments.py`), and of which of them may run beside each other
(`branch_parallelism.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.ir.op import Node
from graphflow.runtime.native_calls.branch_parallelism import ParallelBranches, schedule_branches
from graphflow.runtime.native_calls.native_segments import (
    CANCEL_CHECK_NANOSECONDS,
    KernelCall,
    NativeSegment,
)

Line = tuple[Node, str] | NativeSegment | ParallelBranches
"""A line of Python and the node that it is of; or native calls."""


class ProgramSection:
    """The compute or the commit part while it is written: lines, and the calls of the next one."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.lines: list[Line] = []
        self.calls: list[KernelCall] = []
        self.work = 0.0

    def add_calls(self, calls: Sequence[KernelCall]) -> None:
        self.calls += calls
        self.work += sum(call.task.nanoseconds for call in calls)
        if (
            self.work > CANCEL_CHECK_NANOSECONDS and not self.calls[-1].task.blocks
        ):  # what follows goes with it
            self.flush()

    def add_line(self, node: Node, text: str) -> None:
        self.flush()
        self.lines.append((node, text))

    def flush(self) -> None:
        if self.calls:
            for strands in schedule_branches(self.calls, self._threads):
                self.lines.append(
                    NativeSegment(strands[0]) if len(strands) == 1 else ParallelBranches(strands)
                )
            self.calls, self.work = [], 0.0

    @property
    def segments(self) -> list[NativeSegment]:
        """All of them, also those that run beside each other."""
        result: list[NativeSegment] = []
        for line in self.lines:
            if isinstance(line, ParallelBranches):
                result += line.segments
            elif isinstance(line, NativeSegment):
                result.append(line)
        return result

"""The compute or commit section of a program while its lines are written.

Consecutive generated kernels become one line, a native call. A line ends when its kernels' work is
long enough that a cancelled step should be noticed (`native_segments.py`). Independent branches
among its kernels run in parallel (`branch_parallelism.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.ir.op import Node
from graphflow.runtime.native_calls.branch_parallelism import ParallelBranches, schedule_branches
from graphflow.runtime.native_calls.native_segments import CANCEL_CHECK_NANOSECONDS, NativeSegment
from graphflow.runtime.native_calls.pointer_table import KernelCall
from graphflow.runtime.native_calls.work_sharing import WorkSharing

Line = tuple[Node, str] | NativeSegment | ParallelBranches
"""A node and its line of Python, or native calls."""


class ProgramSection:
    """Finished lines, and the native calls of the next line.

    Args:
        sharing: the threads for long kernels and independent branches; None: one thread.
    """

    def __init__(self, sharing: WorkSharing | None) -> None:
        self._sharing = sharing
        self._threads = 1 if sharing is None else sharing.team.threads
        self.lines: list[Line] = []
        self.calls: list[KernelCall] = []
        self.work = 0.0

    def add_calls(self, calls: Sequence[KernelCall]) -> None:
        """Append native calls to the current line; end the line if its work is long enough."""
        self.calls += calls
        self.work += sum(call.task.nanoseconds for call in calls)
        if (
            self.work > CANCEL_CHECK_NANOSECONDS and not self.calls[-1].task.blocks
        ):  # an epilogue may follow
            self.flush()

    def add_line(self, node: Node, text: str) -> None:
        """End the current native line, and append a line of Python for a node."""
        self.flush()
        self.lines.append((node, text))

    def flush(self) -> None:
        """End the current native line."""
        if self.calls:
            for strands in schedule_branches(self.calls, self._threads):
                self.lines.append(
                    NativeSegment(strands[0], self._sharing)
                    if len(strands) == 1
                    else ParallelBranches(strands)
                )
            self.calls, self.work = [], 0.0

    @property
    def segments(self) -> list[NativeSegment]:
        """All native segments, also those inside parallel branches."""
        result: list[NativeSegment] = []
        for line in self.lines:
            if isinstance(line, ParallelBranches):
                result += line.segments
            elif isinstance(line, NativeSegment):
                result.append(line)
        return result

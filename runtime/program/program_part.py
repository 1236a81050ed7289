"""Parts: the compute and the commit part of a program while they are written, line by line.

Generated kernels that stand together become one line, a native call; how many that are is a matter
of their work (`native_segments.py`), and of which of them may run beside each other
(`branch_parallelism.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.ir.op import Node
from graphflow.runtime.native_calls.branch_parallelism import Strands, groups
from graphflow.runtime.native_calls.native_segments import LONGEST, Call, Segment

Line = tuple[Node, str] | Segment | Strands
"""A line of Python and the node that it is of; or native calls."""


class Part:
    """The compute or the commit part while it is written: lines, and the calls of the next one."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.lines: list[Line] = []
        self.calls: list[Call] = []
        self.work = 0.0

    def add(self, calls: Sequence[Call]) -> None:
        self.calls += calls
        self.work += sum(call.task.nanoseconds for call in calls)
        if self.work > LONGEST and not self.calls[-1].task.blocks:  # what follows goes with it
            self.flush()

    def line(self, node: Node, text: str) -> None:
        self.flush()
        self.lines.append((node, text))

    def flush(self) -> None:
        if self.calls:
            for strands in groups(self.calls, self._threads):
                self.lines.append(Segment(strands[0]) if len(strands) == 1 else Strands(strands))
            self.calls, self.work = [], 0.0

    @property
    def segments(self) -> list[Segment]:
        """All of them, also those that run beside each other."""
        result: list[Segment] = []
        for line in self.lines:
            if isinstance(line, Strands):
                result += line.segments
            elif isinstance(line, Segment):
                result.append(line)
        return result

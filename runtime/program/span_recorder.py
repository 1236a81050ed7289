"""Records how long each node of a traced step takes.

Native calls are timed inside the native code, so that a traced step runs them as an untraced one
does. Lines of Python are timed between two readings of a clock. The cost of the readings is left
out of the spans, and whatever else tracing needs is computed after the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from statistics import median

from graphflow.ir.op import Node
from graphflow.runtime.memory.memory_use import WorkspaceMeter
from graphflow.runtime.native_calls.native_segments import NativeSegment

Span = tuple[str, str, int, int]
"""Track, name, start and end, in nanoseconds of the monotonic clock."""
Clock = Callable[[], int]
clock: ContextVar[Clock] = ContextVar("clock", default=time.monotonic_ns)
"""The clock, in nanoseconds, that times the nodes of traced steps."""
_SYSTEM_CLOCKS: Mapping[Clock, int] = {
    time.monotonic_ns: time.CLOCK_MONOTONIC,
    time.thread_time_ns: time.CLOCK_THREAD_CPUTIME_ID,
}
_EMPTY_LINES = 500


class SpanRecorder:
    """The times of one traced step, by line and by native call.

    Args:
        nodes: the node of each line.
        synchronize: waits for the device.
        meter: measures the workspace of lines; None if nobody asks for it.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        synchronize: Callable[[], None],
        meter: WorkspaceMeter | None = None,
    ) -> None:
        self._nodes = nodes
        self._synchronize = synchronize
        self._meter = meter
        self._now = clock.get()
        self._clock = _SYSTEM_CLOCKS.get(self._now)
        self._reading = round(reading_nanoseconds(self._now)) if self._clock is not None else 0
        self._times: list[tuple[Node, int, int]] = []
        self._start = self._now()

    def __call__(self, line: int) -> None:
        """Note that a line has run."""
        self._synchronize()
        self._add_span(self._nodes[line])
        if self._meter is not None:
            self._meter.record_line(self._nodes[line])
        self._start = self._now()

    def _add_span(self, node: Node) -> None:
        """Append the span of a node that has just run."""
        end = self._now()
        self._times.append((node, self._start, max(self._start, end - self._reading)))

    def run_segment(self, segment: NativeSegment) -> None:
        """Run native calls, and note the time of each."""
        if self._clock is None:  # native code cannot read this clock
            for i, call in enumerate(segment.calls):
                segment.run_call(i)
                self._add_span(call.node)
                self._start = self._now()
        else:
            began = self._now()
            took = segment.run_timed(self._clock)
            for call, nanoseconds in zip(segment.calls, took.tolist(), strict=True):
                end = began + round(nanoseconds)
                self._times.append((call.node, began, end))
                began = end
        if self._meter is not None:
            self._meter.restart()
        self._start = self._now()

    def node_times(self) -> list[tuple[Node, int, int]]:
        """Return node, start and end of what has run; consecutive spans of a node are joined."""
        joined: list[tuple[Node, int, int]] = []
        for node, start, end in self._times:
            if joined and joined[-1][0] is node:
                start = joined.pop()[1]
            joined.append((node, start, end))
        return joined


@cache
def reading_nanoseconds(now: Clock) -> float:
    """Return the nanoseconds of a clock that a span contains if its line does nothing."""
    times: list[int] = []
    start = now()

    def mark() -> None:
        nonlocal start
        end = now()
        times.append(end - start)
        start = now()

    for _ in range(_EMPTY_LINES):
        mark()
    return median(times)

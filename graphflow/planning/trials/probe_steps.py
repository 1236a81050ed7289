"""Run steps that only measure: the session neither counts nor records them, and keeps no state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from statistics import median
from time import perf_counter
from typing import Any

from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.execution.step_executor import StepExecutor
from graphflow.runtime.host.host_interface import Hosts
from graphflow.runtime.tracing.events import TraceStep
from graphflow.runtime.tracing.trace import Trace

ROUND_STEPS = 4
"""Untraced steps of a round."""


class StepProbe:
    """Measures steps of a session's hosts, between the session's own steps."""

    def __init__(self, hosts: Hosts, steps: StepExecutor) -> None:
        self._hosts = hosts
        self._steps = steps

    @contextmanager
    def load_program(
        self, compiled: CompiledFetches, variables: Mapping[int, Sequence[str]] | None = None
    ) -> Iterator[None]:
        """Give the workers the partitions of fetches for the duration of a block.

        Args:
            variables: names of variables by worker, which are dropped at the end.
        """
        steps = self._steps
        compiled.program = steps.add(compiled)
        before = steps.committed, steps.last, steps.trace
        steps.trace, steps.aligns_clocks = None, False
        try:
            yield
        finally:
            steps.committed, steps.last, steps.trace = before
            steps.aligns_clocks = True
            self._hosts.forget([compiled.program], variables or {})

    def trace_steps(self, run: Callable[[], Any]) -> list[TraceStep]:
        """Return two traced steps; the second has the commit of the first.

        The times of a commit arrive with the next traced step.
        """
        trace = self._steps.trace = Trace()
        try:
            run()
            run()
        finally:
            self._steps.trace = None
        first, step = trace.steps
        names = {event.name for event in step.events}
        commit = [event for event in first.events if event.name not in names]
        return [first, replace(step, events=(*commit, *step.events))]

    def measure_rounds(
        self, run: Callable[[], Any], limit: float, most: int
    ) -> tuple[list[float], list[TraceStep]]:
        """Run rounds of untraced and traced steps; return the seconds of an untraced step in each
        round, and the traced steps.

        Taking turns, both see the same machine. The pause for the trace is like what a program
        does between steps: waiting workers sleep, and caches lose some of their content.

        Args:
            limit: seconds after which no further round begins; one runs at least, and `most` at
                most.
        """
        times: list[float] = []
        traced: list[TraceStep] = []
        start = perf_counter()
        while not times or (len(times) < most and perf_counter() - start < limit):
            run()  # wakes the workers up
            begun = perf_counter()
            ran = len(time_calls(run, limit, ROUND_STEPS))
            times.append((perf_counter() - begun) / ran)
            traced += self.trace_steps(run)
        return times, traced


def time_calls(call: Callable[[], Any], limit: float, most: int) -> list[float]:
    """Return the seconds of calls, of one at least and `most` at most.

    Args:
        limit: seconds after which no further call begins.
    """
    times: list[float] = []
    start = perf_counter()
    while not times or (len(times) < most and perf_counter() - start < limit):
        begun = perf_counter()
        call()
        times.append(perf_counter() - begun)
    return times


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of some calls, after one that warms up."""
    call()
    return median(time_calls(call, inf, repeats))

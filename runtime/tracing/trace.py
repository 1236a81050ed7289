"""Traces: the spans that the runtime reports for each traced step -> events, tables and files.

    spans ─add_step→ Trace ─save→ a file for Perfetto
                     Trace ─measured→ MeasuredSteps, for plans

A span is (track, name, start_ns, end_ns) on the coordinator's monotonic clock. Its track is a
device, or "departure" or "arrival" with the key of a cut edge as its name. An arrival may have "/"
and its bytes behind the key. A departure and an arrival with the same key become a transfer on the
link between the devices.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from graphflow.base.atomic_write import check_atomic_write, write_atomically
from graphflow.base.formatting import show_count, show_seconds
from graphflow.base.html_escape import escape
from graphflow.base.process.interrupts import passes_interrupts
from graphflow.errors import ArgumentError, SessionError
from graphflow.runtime.tracing.edge_traffic import EdgeTable, ExchangeTable
from graphflow.runtime.tracing.events import (
    Exchange,
    TraceEvent,
    TraceStep,
    link_track,
    parse_number,
)
from graphflow.runtime.tracing.perfetto_export import trace_events
from graphflow.runtime.tracing.turn_events import WindowEdge, add_turns, without_windows
from graphflow.runtime.wire.step_values import EDGE_BITS, SEND_PREFIX, WAIT_PREFIX

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_records import MeasuredSteps

Span = tuple[str, str, int, int]
Edge = tuple[str, str, str, int]  # tensor, source device, target device, bytes

DEPARTURE, ARRIVAL = "departure", "arrival"


class Trace:
    """The traced steps of a session, in the order they ran. Printing it shows the tables."""

    def __init__(self) -> None:
        self.steps: list[TraceStep] = []

    def add_step(
        self,
        step: int,
        start_ns: int,
        end_ns: int,
        spans: Iterable[Span],
        edges: Mapping[int, Edge],
        peak: Mapping[str, int] | None = None,
        errors: Mapping[int, float] | None = None,
        exchanges: Mapping[tuple[str, str], Exchange] | None = None,
        windows: Mapping[int, WindowEdge] | None = None,
    ) -> None:
        """Add the spans of one step. Spans from before the step are the last step's commit.

        Args:
            step: number of the step.
            start_ns, end_ns: begin and end of the step as the session saw it.
            edges: edge -> (tensor, source device, target device, bytes). Departures and arrivals of
                other edges, and those without a counterpart, are left out.
            peak: device -> the most bytes in use.
            errors: worker -> bound, in seconds, of the error of its times, if its clock is not the
                coordinator's.
            exchanges: (device, name of the start span) -> the collective.
            windows: the edges between parties of windows of turns.
        """
        exchanges = exchanges or {}
        left: dict[int, int] = {}
        came: dict[int, int] = {}
        carried: dict[int, int] = {}
        events = []
        before = []
        uses: Counter[tuple[str, int]] = Counter()
        for track, name, start, end in spans:
            if track in (DEPARTURE, ARRIVAL):
                number, _, size = name.partition("/")
                key = parse_number(number)
                (left if track == DEPARTURE else came)[key] = start
                if size:
                    carried[key] = max(parse_number(size), 0)
            elif end <= start_ns:
                before.append(TraceEvent(track, name, "compute", start, end))
            else:
                exchange = exchanges.get((track, f"start/{name.removeprefix('start/')}"))
                if exchange is not None:
                    events.append(
                        TraceEvent(track, name, "compute", start, end, None, exchange.bytes,
                              exchange=exchange)
                    )  # fmt: skip
                else:
                    events.append(_device_event(track, name, start, end, edges, uses))
        for key in left.keys() & came.keys():
            edge, use = key & (2**EDGE_BITS - 1), key >> EDGE_BITS
            if edge in edges:
                tensor, source, target, most = edges[edge]
                moved = tensor, source, target, carried.get(key, most)
                events.append(_transfer_event(edge, use, moved, left[key], came[key]))
        if before and self.steps and self.steps[-1].start <= before[0].start:
            last = self.steps[-1]
            self.steps[-1] = replace(last, events=tuple(_sort_events((*last.events, *before))))
        events = _sort_events(add_turns(events, windows) if windows else events)
        self.steps.append(
            TraceStep(step, start_ns, end_ns, tuple(events), dict(peak or {}), dict(errors or {}))
        )

    @property
    def edges(self) -> EdgeTable:
        """For each cut edge: bytes, latency (median and 95 %), rate, and the wait of its reader;
        longest waits first."""
        return EdgeTable.from_steps(self.steps)

    @property
    def exchanges(self) -> ExchangeTable:
        """For each collective over several devices: bytes, and its time once all devices have
        started; longest first."""
        return ExchangeTable.from_steps(self.steps)

    def _parts(self) -> list[EdgeTable | ExchangeTable]:
        """Return the tables to show; of two empty tables only one."""
        found: list[EdgeTable | ExchangeTable] = [self.edges] if self.steps else []
        if self.exchanges:
            found = [*(part for part in found if part), self.exchanges]
        return found

    def __str__(self) -> str:
        return "\n".join([self._headline, *map(str, self._parts())])

    def __repr__(self) -> str:
        return f"<Trace: {self._headline}>"

    def _repr_html_(self) -> str:
        body = "".join(part._repr_html_() for part in self._parts())
        return f"<p>{escape(self._headline)}</p>{body}"

    @property
    def _headline(self) -> str:
        if not self.steps:
            return "no step was traced"
        took = median(step.end - step.start for step in self.steps) * 1e-9
        count = len(self.steps)
        known = [error for step in self.steps for error in step.errors.values() if error > 0]
        worst = max(known, default=0.0)
        clocks = ""
        if worst:
            bound = "unknown bounds" if math.isinf(worst) else f"± {show_seconds(worst)}"
            clocks = f", times of workers on one clock to {bound}"
        return f"{show_count(count, 'traced step')}, median {show_seconds(took)}{clocks}"

    def measured(self, peak_memory: Mapping[str, int] | None = None) -> MeasuredSteps:
        """Summarise the traced steps for a plan: the median step, and its timeline from its start.

        Args:
            peak_memory: device -> bytes; default: the most that any traced step reported.

        Raises:
            SessionError: no step was traced.
        """
        from graphflow.placement.plans.plan_records import Interval, MeasuredSteps

        if not self.steps:
            raise SessionError("nothing was measured: no step ran while the trace was on")
        ranked = sorted(self.steps, key=lambda step: (step.end - step.start, step.number))
        middle = ranked[(len(ranked) - 1) // 2]
        other = ranked[len(ranked) // 2]
        peak: dict[str, int] = dict(peak_memory or {})
        if peak_memory is None:
            for step in self.steps:
                for device, size in step.peak.items():
                    peak[device] = max(size, peak.get(device, 0))
        timeline = tuple(
            Interval(
                event.track,
                event.name,
                max(0.0, (event.start - middle.start) * 1e-9),
                max(0.0, (event.end - middle.start) * 1e-9),
                event.kind,
            )
            for event in without_windows(middle.events)
        )
        makespan = (middle.end - middle.start + other.end - other.start) / 2 * 1e-9
        return MeasuredSteps(makespan, timeline, peak, len(self.steps))

    def to_dict(self) -> dict[str, Any]:
        """Return the trace in the Trace Event Format; times are µs from the first step's start."""
        return trace_events(self.steps)

    @passes_interrupts
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON for https://ui.perfetto.dev and chrome://tracing.

        The file is written whole or not at all.

        Raises:
            SessionError: the file cannot be written.
        """
        target = Path(path)
        text = json.dumps(self.to_dict(), allow_nan=False)
        try:
            write_atomically(target, text)
        except OSError as error:
            raise _unwritable(target, error) from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check, before steps run, that a trace can be written to a file.

    Raises:
        ArgumentError: `path` is no path.
        SessionError: the file cannot be written.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in str(path) or not os.fspath(path):
        raise ArgumentError(f"a trace needs a path such as 'trace.json', got {path!r}")
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        check_atomic_write(target)
    except OSError as error:
        raise _unwritable(target, error) from None


def _unwritable(target: Path, error: OSError) -> SessionError:
    return SessionError(
        f"cannot write the trace to {str(target)!r}: {error.strerror or error}; "
        "give a path in a folder that exists and is writable"
    )


def _sort_events(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    return sorted(events, key=lambda event: (event.start, event.end, event.track, event.name))


def _device_event(
    track: str,
    name: str,
    start: int,
    end: int,
    edges: Mapping[int, Edge],
    uses: Counter[tuple[str, int]],
) -> TraceEvent:
    """Make the event of a device's span; a send or a wait gets its edge."""
    kind = (
        "wait"
        if name.startswith(WAIT_PREFIX)
        else "send"
        if name.startswith(SEND_PREFIX)
        else "compute"
    )
    edge = parse_number(name.rpartition("/")[2])
    if kind == "compute" or edge not in edges:
        return TraceEvent(track, name, "compute" if kind == "send" else kind, start, end)
    tensor, source, target, size = edges[edge]
    if name.count("/") == 1:  # in a loop, where spans have only the edge's number
        name = f"{name.partition('/')[0]}/{tensor}/{edge}"
    use = uses[kind, edge]
    uses[kind, edge] += 1
    return TraceEvent(track, name, kind, start, end, edge, size, source, target, use)


def _transfer_event(number: int, use: int, edge: Edge, left: int, came: int) -> TraceEvent:
    tensor, source, target, size = edge
    return TraceEvent(
        link_track(source, target), tensor, "transfer", left, max(left, came),
        number, size, source, target, use,
    )  # fmt: skip

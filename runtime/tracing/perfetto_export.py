"""The file that Perfetto and chrome://tracing open: a trace in the Trace Event Format.

A process for each worker with a thread for each device, one for all links, one for the steps. A
tensor's way is an arrow from the slice that sends it to the slice that receives it.

Source: Trace Event Format, Google, 2016.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from graphflow.runtime.tracing.events import TraceEvent, TraceStep, parse_number

LINKS = 1_000_000  # the process number of the track group that holds the links


_BEFORE_ALL = -(1 << 63)  # before all times

Place = tuple[int, int]  # process, thread


def trace_events(steps: Iterable[TraceStep]) -> dict[str, Any]:
    """The steps as one JSON object: times in µs from the start of the first."""
    steps = tuple(steps)
    origin = min((step.start for step in steps), default=0)
    lanes = _ThreadAssignment({event.track for step in steps for event in step.events})
    events: list[dict[str, Any]] = []
    for step in steps:
        known = {str(w): round(e * 1e6, 3) for w, e in step.errors.items() if math.isfinite(e)}
        place = lanes.place("", step.start, step.end)
        events.append(
            _complete(f"step {step.number}", "step", place, step.start, step.end, origin)
            | {"args": {"step": step.number, "clock_error_us": known}}
        )
        placed = [
            (event, lanes.place(event.track, event.start, event.end)) for event in step.events
        ]
        events += [_slice(event, step, place, origin) for event, place in placed]
        ends = {(each[0].kind, each[0].edge, each[0].use): each for each in placed}
        for number, (event, _) in enumerate(placed):
            if event.kind == "transfer":
                events += _arrow(event, f"{step.number}.{step.start}.{number}", lanes, ends, origin)
    return {"traceEvents": [*lanes.names(), *events], "displayTimeUnit": "ms"}


class _ThreadAssignment:
    """Where slices are drawn. Those of one thread may not overlap: where they do, as two tensors on
    one link, the track gets another thread of the same name."""

    def __init__(self, tracks: Iterable[str]) -> None:
        self._tracks = {track: order for order, track in enumerate(sorted(tracks, key=_rank), 1)}
        self._tracks[""] = 0
        self._ends: dict[str, list[list[int]]] = {track: [] for track in self._tracks}
        self._threads = 0
        for track in sorted(self._tracks, key=self._tracks.__getitem__):
            self.place(track, _BEFORE_ALL, _BEFORE_ALL)  # each has its first thread, in order

    def place(self, track: str, start: int, end: int) -> Place:
        """A place for a slice of a track."""
        process = _process(track)
        for lane in self._ends[track]:
            if lane[1] <= start:
                lane[1] = end
                return process, lane[0]
        self._threads += 1
        self._ends[track].append([self._threads, end])
        return process, self._threads

    def first(self, track: str) -> Place | None:
        """The track's first thread; None if it has no slices."""
        return (_process(track), self._ends[track][0][0]) if track in self._ends else None

    def names(self) -> list[dict[str, Any]]:
        """Metadata events: names of processes and threads, and the order to show them."""
        processes = {_process(track): _group(track) for track in self._tracks}
        events = []
        for process, name in processes.items():
            events.append(_meta("process_name", process, 0, {"name": name}))
            events.append(_meta("process_sort_index", process, 0, {"sort_index": process}))
        for track, order in self._tracks.items():
            for thread, _ in self._ends[track]:
                process, name = _process(track), track or "steps"
                events.append(_meta("thread_name", process, thread, {"name": name}))
                events.append(_meta("thread_sort_index", process, thread, {"sort_index": order}))
        return events


def _meta(kind: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def _process(track: str) -> int:
    """A process for each worker, one for all links, one for the steps."""
    if not track:
        return 0
    worker = parse_number(track.removeprefix("/worker:").partition("/")[0])
    return LINKS if "→" in track or worker < 0 else worker + 1


def _group(track: str) -> str:
    process = _process(track)
    return "steps" if not process else "links" if process == LINKS else f"/worker:{process - 1}"


def _rank(track: str) -> tuple[bool, str]:
    """Devices before links."""
    return "→" in track, track


def _complete(
    name: str, kind: str, place: tuple[int, int], start: int, end: int, origin: int
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": place[0],
        "tid": place[1],
        "ts": (start - origin) / 1000,
        "dur": (end - start) / 1000,
    }


def _slice(event: TraceEvent, step: TraceStep, place: Place, origin: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": step.number}
    if event.edge is not None:
        args |= {
            "edge": event.edge, "bytes": event.bytes, "from": event.source, "to": event.target,
        }  # fmt: skip
    if event.exchange is not None:
        devices = list(event.exchange.devices)
        args |= {"exchange": event.exchange.kind, "bytes": event.bytes, "devices": devices}
    drawn = _complete(event.name, event.kind, place, event.start, event.end, origin)
    return drawn | {"args": args}


def _arrow(
    event: TraceEvent,
    name: str,
    lanes: _ThreadAssignment,
    slices: Mapping[tuple[str, int | None, int], tuple[TraceEvent, Place]],
    origin: int,
) -> list[dict[str, Any]]:
    """From the source's track to the target's. Its ends lie in the slices that send and receive:
    an end between two slices would not be drawn."""
    at = event.start
    written: list[dict[str, Any]] = []
    ends = (("s", "send", event.source, event.start), ("f", "wait", event.target, event.end))
    for phase, kind, track, moment in ends:
        slice_, place = slices.get((kind, event.edge, event.use), (None, lanes.first(track)))
        if place is None:
            return []
        inside = moment if slice_ is None else min(max(moment, slice_.start), slice_.end)
        at = max(at, inside) if phase == "f" else inside
        arrow = {
            "ph": phase, "name": event.name, "cat": "transfer", "id": name,
            "pid": place[0], "tid": place[1], "ts": (at - origin) / 1000,
        }  # fmt: skip
        written.append(arrow | ({"bp": "e"} if phase == "f" else {}))
    return written

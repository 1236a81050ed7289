"""Export of a trace to the Trace Event Format, for Perfetto and chrome://tracing.

Each worker is a process with a thread for each device. All links are one process, the steps
another. A transfer is an arrow from the slice that sends the tensor to the slice that receives it.

Source: Trace Event Format, Google, 2016.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from graphflow.runtime.tracing.events import TraceEvent, TraceStep, parse_number

LINKS = 1_000_000
"""Process number of the links."""

_BEFORE_ALL = -(1 << 63)  # earlier than all times

Place = tuple[int, int]  # process, thread


def trace_events(steps: Iterable[TraceStep]) -> dict[str, Any]:
    """Convert steps to one JSON object. Times are in µs from the start of the first step."""
    steps = tuple(steps)
    origin = min((step.start for step in steps), default=0)
    threads = _ThreadAssignment({event.track for step in steps for event in step.events})
    events: list[dict[str, Any]] = []
    for step in steps:
        known = {str(w): round(e * 1e6, 3) for w, e in step.errors.items() if math.isfinite(e)}
        place = threads.place("", step.start, step.end)
        events.append(
            _complete(f"step {step.number}", "step", place, step.start, step.end, origin)
            | {"args": {"step": step.number, "clock_error_us": known}}
        )
        placed = [
            (event, threads.place(event.track, event.start, event.end)) for event in step.events
        ]
        events += [_slice(event, step, place, origin) for event, place in placed]
        ends = {(each[0].kind, each[0].edge, each[0].use): each for each in placed}
        for number, (event, _) in enumerate(placed):
            if event.kind == "transfer":
                events += _arrow(
                    event, f"{step.number}.{step.start}.{number}", threads, ends, origin
                )
    return {"traceEvents": [*threads.names(), *events], "displayTimeUnit": "ms"}


class _ThreadAssignment:
    """Assigns slices to processes and threads.

    The format allows no overlapping slices in one thread. If slices of a track overlap, such as two
    tensors on one link, the track gets a further thread of the same name.
    """

    def __init__(self, tracks: Iterable[str]) -> None:
        self._tracks = {track: order for order, track in enumerate(sorted(tracks, key=_rank), 1)}
        self._tracks[""] = 0
        self._ends: dict[str, list[list[int]]] = {track: [] for track in self._tracks}
        self._threads = 0
        for track in sorted(self._tracks, key=self._tracks.__getitem__):
            self.place(
                track, _BEFORE_ALL, _BEFORE_ALL
            )  # its first thread, so that threads are in order

    def place(self, track: str, start: int, end: int) -> Place:
        """Return the process and thread for a slice of a track."""
        process = _process(track)
        for thread in self._ends[track]:
            if thread[1] <= start:
                thread[1] = end
                return process, thread[0]
        self._threads += 1
        self._ends[track].append([self._threads, end])
        return process, self._threads

    def first(self, track: str) -> Place | None:
        """Return the track's first thread; None if the track has no slices."""
        return (_process(track), self._ends[track][0][0]) if track in self._ends else None

    def names(self) -> list[dict[str, Any]]:
        """Return metadata events: names and display order of processes and threads."""
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
    """Return the process number of a track: 0 for steps, 1 + the worker, or `LINKS`."""
    if not track:
        return 0
    worker = parse_number(track.removeprefix("/worker:").partition("/")[0])
    return LINKS if "→" in track or worker < 0 else worker + 1


def _group(track: str) -> str:
    process = _process(track)
    return "steps" if not process else "links" if process == LINKS else f"/worker:{process - 1}"


def _rank(track: str) -> tuple[bool, str]:
    """Sort key of a track: devices before links."""
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
    threads: _ThreadAssignment,
    slices: Mapping[tuple[str, int | None, int], tuple[TraceEvent, Place]],
    origin: int,
) -> list[dict[str, Any]]:
    """Return the two ends of an arrow from the source's track to the target's.

    Each end is moved into the slice that sends or receives: an end between slices is not drawn.
    """
    at = event.start
    written: list[dict[str, Any]] = []
    ends = (("s", "send", event.source, event.start), ("f", "wait", event.target, event.end))
    for phase, kind, track, moment in ends:
        slice_, place = slices.get((kind, event.edge, event.use), (None, threads.first(track)))
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

"""What happened in the traced steps: spans → Trace → a file for Perfetto, or a Measured.

    runtime spans ─add_step→ Trace ─save→ trace.json;   Trace ─measured→ Plan.with_measured

A span is (track, name, start_ns, end_ns) in one monotonic clock; the track is a device, or
"departure" or "arrival" with the number of a cut edge as its name: a tensor left, a tensor came.
The two are matched into a transfer on the link between the devices.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphflow.errors import SessionError

if TYPE_CHECKING:
    from graphflow.placement.plan import Measured

Span = tuple[str, str, int, int]
Edge = tuple[str, str, str, int]  # tensor, source device, target device, bytes

DEPARTURE, ARRIVAL, WAIT = "departure", "arrival", "recv/"
LINKS = 1_000_000  # the process number of the track group that holds the links


@dataclass(frozen=True)
class Event:
    """Something that took time: computing a node, waiting for a tensor, moving one.

    Args:
        track: the device, or "source → target" for a link.
        kind: "compute", "wait" or "transfer".
        start, end: ns of the monotonic clock.
        edge: number of the cut edge; None for nodes.
        bytes: moved; 0 for nodes.
    """

    track: str
    name: str
    kind: str
    start: int
    end: int
    edge: int | None = None
    bytes: int = 0
    source: str = ""
    target: str = ""


@dataclass(frozen=True)
class Step:
    """One traced step; events are ordered by start."""

    number: int
    start: int
    end: int
    events: tuple[Event, ...]
    peak: Mapping[str, int]


class Trace:
    """The traced steps of a session, in the order they ran."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def add_step(
        self,
        step: int,
        start_ns: int,
        end_ns: int,
        spans: Iterable[Span],
        edges: Mapping[int, Edge],
        peak: Mapping[str, int] | None = None,
    ) -> None:
        """Add what one step reported, and with it what the commit of the step before took.

        Args:
            start_ns, end_ns: as its caller saw the step.
            edges: of the cut edges (tensor, source device, target device, bytes). A point span of
                an edge that is not there, or that left and never came, is left out.
            peak: bytes per device at most in use.
        """
        left: dict[int, int] = {}
        came: dict[int, int] = {}
        events = []
        before = []
        for track, name, start, end in spans:
            if end <= start_ns:
                before.append(Event(track, name, "compute", start, end))
            elif track in (DEPARTURE, ARRIVAL):
                (left if track == DEPARTURE else came)[int(name)] = start
            else:
                kind = "wait" if name.startswith(WAIT) else "compute"
                events.append(Event(track, name, kind, start, end))
        for edge in left.keys() & came.keys() & edges.keys():
            events.append(_transfer(edge, edges[edge], left[edge], came[edge]))
        if before and self.steps and self.steps[-1].start <= before[0].start:
            last = self.steps[-1]
            self.steps[-1] = replace(last, events=tuple(_sorted((*last.events, *before))))
        events = _sorted(events)
        self.steps.append(Step(step, start_ns, end_ns, tuple(events), dict(peak or {})))

    def measured(self, peak_memory: Mapping[str, int] | None = None) -> Measured:
        """The traced steps as a plan shows them: the median step, its timeline from its own start.

        Args:
            peak_memory: bytes per device; default: the most that any traced step reported.

        Raises:
            SessionError: no step was traced.
        """
        from graphflow.placement.plan import Interval, Measured

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
            for event in middle.events
        )
        makespan = (middle.end - middle.start + other.end - other.start) / 2 * 1e-9
        return Measured(makespan, timeline, peak, len(self.steps))

    def to_dict(self) -> dict[str, Any]:
        """The Trace Event Format: times in µs from the start of the first traced step."""
        tracks = sorted({event.track for step in self.steps for event in step.events}, key=_rank)
        places = _places(tracks)
        origin = min((step.start for step in self.steps), default=0)
        events = _names(places)
        for step in self.steps:
            events.append(
                _complete(f"step {step.number}", "step", (0, 0), step.start, step.end, origin)
                | {"args": {"step": step.number}}
            )
            for number, event in enumerate(step.events):
                events += _written(event, step, number, places, origin)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON that https://ui.perfetto.dev and chrome://tracing open; whole or not at all.

        Raises:
            SessionError: the file cannot be written.
        """
        target = Path(path)
        scratch = None
        try:
            handle, scratch = tempfile.mkstemp(
                dir=target.parent, prefix=f".{target.name}.", suffix=".part"
            )
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(self.to_dict(), file, ensure_ascii=True, allow_nan=False)
            os.chmod(scratch, 0o666 & ~_umask())
            os.replace(scratch, target)
        except OSError as error:
            if scratch is not None:
                with contextlib.suppress(OSError):
                    os.unlink(scratch)
            raise SessionError(
                f"cannot write the trace to {str(target)!r}: {error.strerror or error}; "
                "give a path in a folder that exists and is writable"
            ) from None


def _umask() -> int:
    """What new files of this process lack; only setting it tells."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def link(source: str, target: str) -> str:
    """Name of the track of a link."""
    return f"{source} → {target}"


def _sorted(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: (event.start, event.end, event.track, event.name))


def _transfer(number: int, edge: Edge, left: int, came: int) -> Event:
    tensor, source, target, size = edge
    return Event(
        link(source, target), tensor, "transfer", left, max(left, came),
        number, size, source, target,
    )  # fmt: skip


def _rank(track: str) -> tuple[bool, str]:
    """Devices before links."""
    return "→" in track, track


def _places(tracks: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Track → (process, thread): a process for each worker, one for all links."""
    places: dict[str, tuple[int, int]] = {}
    for number, track in enumerate(tracks, 1):
        worker = track.removeprefix("/worker:").partition("/")[0]
        if "→" in track or not worker.isdigit():
            places[track] = (LINKS, number)
        else:
            places[track] = (int(worker) + 1, number)
    return places


def _names(places: Mapping[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """Metadata events: names of Perfetto's processes and threads, and the order to show them."""

    def meta(kind: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}

    processes = {0: "steps"} | {
        process: "links" if process == LINKS else f"/worker:{process - 1}"
        for process, _ in places.values()
    }
    events = []
    for process, name in processes.items():
        events.append(meta("process_name", process, 0, {"name": name}))
        events.append(meta("process_sort_index", process, 0, {"sort_index": process}))
    events.append(meta("thread_name", 0, 0, {"name": "steps"}))
    for track, (process, thread) in places.items():
        events.append(meta("thread_name", process, thread, {"name": track}))
        events.append(meta("thread_sort_index", process, thread, {"sort_index": thread}))
    return events


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


def _written(
    event: Event, step: Step, number: int, places: Mapping[str, tuple[int, int]], origin: int
) -> list[dict[str, Any]]:
    """The event; for a transfer also an arrow from the source's track to the target's."""
    args: dict[str, Any] = {"step": step.number}
    if event.kind == "transfer":
        args |= {"bytes": event.bytes, "edge": event.edge}
    written = [
        _complete(event.name, event.kind, places[event.track], event.start, event.end, origin)
        | {"args": args}
    ]
    ends = (event.source, event.target)
    if event.kind == "transfer" and all(end in places for end in ends):
        for phase, end, at in zip("sf", ends, (event.start, event.end), strict=True):
            arrow = {
                "ph": phase, "name": event.name, "cat": "transfer",
                "id": f"{step.number}.{step.start}.{number}",
                "pid": places[end][0], "tid": places[end][1], "ts": (at - origin) / 1000,
            }  # fmt: skip
            written.append(arrow | ({"bp": "e"} if phase == "f" else {}))
    return written

"""The events of traced steps: what each device and link did, on the coordinator's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from graphflow.base.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Exchange:
    """A device's part in a collective over several devices.

    Attributes:
        group: the number of the collective in its graph.
        kind: its op, such as "all_reduce".
        bytes: size of the tensor that this device contributes.
    """

    group: int
    kind: str
    devices: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class TraceEvent:
    """An interval on a device or a link: a node, a send, a wait, or a transfer.

    Args:
        track: the device, or "source → target" for a link.
        kind: "compute", "send", "wait" or "transfer".
        start, end: ns of the coordinator's monotonic clock.
        edge: number of the cut edge; None for nodes.
        bytes: moved; 0 for nodes.
        source, target: the devices that the edge connects; "" for nodes.
        use: how often the edge was used in the step before, in a loop.
        exchange: the collective that the device takes part in. The name of the event is
            "start/" and the node's name where the device contributes its tensor. It is the node's
            name where the device waits for the result.
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
    use: int = 0
    exchange: Exchange | None = None


@dataclass(frozen=True)
class TraceStep:
    """One traced step; events are ordered by start.

    Attributes:
        start, end: ns of the coordinator's monotonic clock, as the session saw the step.
        peak: device -> the most bytes in use.
        errors: worker -> bound, in seconds, of the error of its times. Workers that share the
            coordinator's clock are left out.
    """

    number: int
    start: int
    end: int
    events: tuple[TraceEvent, ...]
    peak: Mapping[str, int]
    errors: Mapping[int, float] = field(default_factory=dict)

    def error_between(self, one: str, other: str) -> float:
        """Return the bound, in seconds, of the error of a time from one device to another."""
        workers = {_worker(one), _worker(other)}
        return sum(self.errors.get(w, 0.0) for w in workers) if len(workers) == 2 else 0.0


def link_track(source: str, target: str) -> str:
    """Return the name of the track of a link between two devices."""
    return f"{source} → {target}"


def parse_number(text: str) -> int:
    """Return the number that a text spells; -1 for any other text, since workers may send any."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1


def _worker(device: str) -> int:
    """Return the index in "/worker:1/cpu:0"; -1 for a device that is on no worker."""
    return parse_number(device.removeprefix("/worker:").partition("/")[0])

"""Traffic: what the cut edges of traced steps carried, how long it took, and who waited for it.

Trace.steps → Traffic → a table
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from graphflow.placement.tables import Table
from graphflow.placement.view.text import seconds, size

if TYPE_CHECKING:
    from graphflow.runtime.trace import Event, Step


@dataclass(frozen=True)
class EdgeTraffic:
    """What one cut edge did in the traced steps. Times are in seconds.

    Attributes:
        bytes: of its tensor.
        count: tensors that arrived.
        latency: median time from departure to arrival; p95: what 95 of 100 did not exceed.
        sending: median time for which the source's device was busy with the send.
        waiting: median time for which the target's device waited for it.
        error: by how much the latencies may be off because the two ends have clocks of their own;
            0 where they share one, infinite where nothing is known.
    """

    edge: int
    tensor: str
    source: str
    target: str
    bytes: int
    count: int
    latency: float
    p95: float
    sending: float
    waiting: float
    error: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second at the median latency; infinite where it is 0."""
        return self.bytes / self.latency if self.latency > 0 else math.inf


class Traffic(tuple[EdgeTraffic, ...]):
    """The edges of a trace, those first that were waited for longest. Print it."""

    __slots__ = ()

    @staticmethod
    def of(steps: Iterable[Step]) -> Traffic:
        """The edges over which something arrived in these steps."""
        moved: dict[int, list[Event]] = {}
        busy: dict[tuple[str, int], list[float]] = {}
        errors: dict[int, float] = {}
        for step in steps:
            for event in step.events:
                if event.edge is None:
                    continue
                took = (event.end - event.start) * 1e-9
                if event.kind == "transfer":
                    moved.setdefault(event.edge, []).append(event)
                    error = step.error_between(event.source, event.target)
                    errors[event.edge] = max(error, errors.get(event.edge, 0.0))
                else:
                    busy.setdefault((event.kind, event.edge), []).append(took)
        found = (_summed(edge, events, busy, errors[edge]) for edge, events in moved.items())
        return Traffic(sorted(found, key=lambda each: (-each.waiting, -each.latency, each.edge)))

    def table(self) -> Table:
        """A line for each edge."""
        heads = (
            "tensor", "from", "to", "size", "times", "latency", "95 %", "rate", "wait", "clocks ±",
        )  # fmt: skip
        rows = tuple(
            (
                each.tensor, each.source, each.target, size(each.bytes), str(each.count),
                seconds(each.latency), seconds(each.p95), _rate(each.bandwidth),
                seconds(each.waiting), _error(each.error),
            )
            for each in self
        )  # fmt: skip
        return Table("Edges between devices: medians of the traced steps", heads, rows, left=3)

    def __str__(self) -> str:
        return str(self.table()) if self else "no tensor went from device to device"

    def _repr_html_(self) -> str:
        return self.table().html() if self else "<p>no tensor went from device to device</p>"


def _summed(
    edge: int,
    events: list[Event],
    busy: Mapping[tuple[str, int], list[float]],
    error: float,
) -> EdgeTraffic:
    first = events[0]
    latencies = sorted((event.end - event.start) * 1e-9 for event in events)
    return EdgeTraffic(
        edge, first.name, first.source, first.target, max(event.bytes for event in events),
        len(events), median(latencies), latencies[math.ceil(0.95 * len(latencies)) - 1],
        median(busy.get(("send", edge), [0.0])), median(busy.get(("wait", edge), [0.0])), error,
    )  # fmt: skip


def _rate(value: float) -> str:
    return f"{size(value)}/s" if math.isfinite(value) else "–"


def _error(value: float) -> str:
    return "unknown" if math.isinf(value) else seconds(value) if value else "–"

"""Tables of a trace: tensors over cut edges, and collectives, with latencies and waits.

Trace.steps → EdgeTable, ExchangeTable
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean, median

from graphflow.base.formatting import show_bytes, show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.plans.reports.tables import TextTable
from graphflow.runtime.tracing.events import TraceEvent, TraceStep


@dataclass(frozen=True)
class EdgeTraffic:
    """The traffic of one cut edge in the traced steps. Times are in seconds.

    Attributes:
        edge: number of the edge.
        tensor: name of the tensor.
        source, target: the devices.
        bytes: size of the tensor; the mean, if only the rows in use travel.
        count: tensors that arrived.
        latency: median time from departure to arrival.
        p95: 95th percentile of the latency.
        sending: median time for which the source's device was busy with the send.
        waiting: median time for which the target's device waited for the tensor. In loops, these
            waits lie within the loop's own span.
        error: bound of the latencies' error, since the two ends may have different clocks: 0 if
            they share one, infinite if the bound is unknown.
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
        """Bytes per second at the median latency; infinite if the latency is 0."""
        return self.bytes / self.latency if self.latency > 0 else math.inf


class EdgeTable(tuple[EdgeTraffic, ...]):
    """The edges of a trace, longest waits first. Printing it shows a table."""

    __slots__ = ()

    @staticmethod
    def from_steps(steps: Iterable[TraceStep]) -> EdgeTable:
        """Return the edges over which tensors arrived in these steps."""
        moved: dict[int, list[TraceEvent]] = {}
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
        found = (
            _summarise_edge(edge, events, busy, errors[edge]) for edge, events in moved.items()
        )
        return EdgeTable(sorted(found, key=lambda each: (-each.waiting, -each.latency, each.edge)))

    def table(self) -> TextTable:
        """Return a table with a line for each edge."""
        heads = (
            "tensor", "from", "to", "size", "times", "latency", "95 %", "rate", "wait", "clocks ±",
        )  # fmt: skip
        rows = tuple(
            (
                each.tensor, each.source, each.target, show_bytes(each.bytes), str(each.count),
                show_seconds(each.latency), show_seconds(each.p95), _rate(each.bandwidth),
                show_seconds(each.waiting) if each.waiting else "–", _error(each.error),
            )
            for each in self
        )  # fmt: skip
        return TextTable("Edges between devices: medians of the traced steps", heads, rows, left=3)

    def __str__(self) -> str:
        return str(self.table()) if self else "no tensor went from device to device"

    def _repr_html_(self) -> str:
        return self.table().html() if self else "<p>no tensor went from device to device</p>"


@dataclass(frozen=True)
class ExchangeTraffic:
    """One collective in the traced steps. Times are in seconds.

    Attributes:
        name: name of its node.
        kind: its op, such as "all_reduce".
        bytes: the largest tensor that a device contributes; sizes differ if shares are uneven.
        count: steps in which it ran.
        taking: median time from the last device's start until the last device has its result.
        p95: 95th percentile of `taking`.
        apart: median time from the first device's start to the last device's.
        error: bound of these times' error, since devices may have different clocks.
    """

    name: str
    kind: str
    devices: tuple[str, ...]
    bytes: int
    count: int
    taking: float
    p95: float
    apart: float
    error: float

    @property
    def bandwidth(self) -> float:
        """Contributed bytes of a device per second; infinite if the collective took no time."""
        return self.bytes / self.taking if self.taking > 0 else math.inf


class ExchangeTable(tuple[ExchangeTraffic, ...]):
    """The collectives of a trace, longest first. Printing it shows a table."""

    __slots__ = ()

    @staticmethod
    def from_steps(steps: Iterable[TraceStep]) -> ExchangeTable:
        """Return the collectives in which all devices took part in these steps."""
        runs: dict[int, list[tuple[TraceStep, list[TraceEvent]]]] = {}
        for step in steps:
            groups: dict[int, list[TraceEvent]] = {}
            for event in step.events:
                if event.exchange is not None:
                    groups.setdefault(event.exchange.group, []).append(event)
            for group, events in groups.items():
                runs.setdefault(group, []).append((step, events))
        found = filter(None, (_summarise_exchange(each) for each in runs.values()))
        return ExchangeTable(sorted(found, key=lambda each: (-each.taking, each.name)))

    def table(self) -> TextTable:
        """Return a table with a line for each collective."""
        heads = (
            "exchange", "what", "devices", "gives", "times", "takes", "95 %", "rate", "apart",
            "clocks ±",
        )  # fmt: skip
        rows = tuple(
            (
                each.name, each.kind, str(len(each.devices)), show_bytes(each.bytes),
                str(each.count), show_seconds(each.taking), show_seconds(each.p95),
                _rate(each.bandwidth), show_seconds(each.apart), _error(each.error),
            )
            for each in self
        )  # fmt: skip
        return TextTable(
            "Exchanges between devices: medians of the traced steps", heads, rows, left=2
        )

    def __str__(self) -> str:
        return str(self.table()) if self else "no collective ran over several devices"

    def _repr_html_(self) -> str:
        return self.table().html() if self else "<p>no collective ran over several devices</p>"


def _summarise_exchange(runs: list[tuple[TraceStep, list[TraceEvent]]]) -> ExchangeTraffic | None:
    exchange = runs[0][1][0].exchange
    assert exchange is not None
    taking, apart, error, name = [], [], 0.0, ""
    for step, events in runs:
        gave = [event for event in events if event.name.startswith("start/")]
        if {event.track for event in gave} != set(exchange.devices):
            continue
        last = max(event.start for event in gave)
        taking.append((max(event.end for event in events) - last) * 1e-9)
        apart.append((last - min(event.start for event in gave)) * 1e-9)
        name = name or gave[0].name.removeprefix("start/")
        pairs = ((one, other) for one in exchange.devices for other in exchange.devices)
        error = max([error, *(step.error_between(*pair) for pair in pairs)])
    if not taking:
        return None
    given = max(event.bytes for _, events in runs for event in events)
    return ExchangeTraffic(
        name, exchange.kind, exchange.devices, given, len(taking), median(taking), _p95(taking),
        median(apart), error,
    )  # fmt: skip


def _p95(times: list[float]) -> float:
    return sorted(times)[math.ceil(0.95 * len(times)) - 1]


def _summarise_edge(
    edge: int,
    events: list[TraceEvent],
    busy: Mapping[tuple[str, int], list[float]],
    error: float,
) -> EdgeTraffic:
    first = events[0]
    latencies = [(event.end - event.start) * 1e-9 for event in events]
    return EdgeTraffic(
        edge, first.name, first.source, first.target,
        round(fmean(event.bytes for event in events)),
        len(events), median(latencies), _p95(latencies),
        median(busy.get(("send", edge), [0.0])), median(busy.get(("wait", edge), [0.0])), error,
    )  # fmt: skip


def _rate(value: float) -> str:
    return f"{show_bytes(value)}/s" if math.isfinite(value) else "–"


def _error(value: float) -> str:
    return "unknown" if math.isinf(value) else show_seconds(value) if value else "–"

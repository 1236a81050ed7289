"""Metrics of a process or a session, for `graphflow status` and Prometheus.

    Meters.add, .set, .observe, .watch → Meters.samples → `metrics_endpoint.py` → Prometheus

Distributed sessions always count: a step costs a hundred times more than counting it. A step inside
one process counts nothing. `METRICS` declares every metric. Names of sessions are no labels: they
are random, so each would make a series that never comes back.
"""

from __future__ import annotations

import platform
import resource
import sys
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphflow._version import __version__
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError

BUCKETS = (
    1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0,
)  # fmt: skip
"""Upper bounds of the histograms' buckets, in seconds."""
MAX_PENDING = 64
"""Deferred counts after which they are processed, even if nobody reads the metrics."""
MAX_SERIES = 500
"""Combinations of labels of a metric; further ones are counted as "other"."""

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


@dataclass(frozen=True)
class Instrument:
    """A metric that processes report. A counter only grows, a gauge is a current value."""

    kind: str
    meaning: str
    labels: tuple[str, ...] = ()


METRICS: Mapping[str, Instrument] = {
    # Of workers and of distributed sessions
    "graphflow_info": Instrument(GAUGE, "always 1", ("role", "address", "version", "python")),
    "graphflow_uptime_seconds": Instrument(GAUGE, "time since the process or session began"),
    "graphflow_resident_bytes": Instrument(GAUGE, "resident memory of the process"),
    "graphflow_resident_peak_bytes": Instrument(GAUGE, "peak resident memory of the process"),
    "graphflow_steps_total": Instrument(COUNTER, "steps by outcome", ("outcome",)),
    "graphflow_step_seconds": Instrument(HISTOGRAM, "duration of steps; on a worker, of its part"),
    "graphflow_queued_messages": Instrument(GAUGE, "messages that wait for their socket"),
    "graphflow_refused_messages_total": Instrument(COUNTER, "invalid messages"),
    "graphflow_resent_messages_total": Instrument(COUNTER, "retransmitted messages", ("peer",)),
    # Of a worker
    "graphflow_sessions": Instrument(GAUGE, "open sessions"),
    "graphflow_queued_jobs": Instrument(GAUGE, "jobs that wait for earlier jobs"),
    "graphflow_arena_bytes": Instrument(GAUGE, "memory for the buffers of programs", ("device",)),
    "graphflow_forbidden_messages_total": Instrument(
        COUNTER, "messages that the sender's key does not allow"
    ),
    "graphflow_variable_bytes": Instrument(GAUGE, "memory for variables", ("device",)),
    "graphflow_connections": Instrument(GAUGE, "connections to the worker's address"),
    "graphflow_sent_bytes_total": Instrument(
        COUNTER, "bytes of tensors sent to other workers", ("peer", "edge")
    ),
    "graphflow_sent_tensors_total": Instrument(
        COUNTER, "tensors sent to other workers", ("peer", "edge")
    ),
    "graphflow_received_bytes_total": Instrument(
        COUNTER, "bytes of tensors received from other workers", ("peer", "edge")
    ),
    "graphflow_received_tensors_total": Instrument(
        COUNTER, "tensors received from other workers", ("peer", "edge")
    ),
    # Of a session
    "graphflow_workers": Instrument(GAUGE, "workers by state", ("state",)),
    "graphflow_workers_lost_total": Instrument(COUNTER, "workers that were lost"),
    "graphflow_recoveries_total": Instrument(COUNTER, "recoveries of the session"),
    "graphflow_feed_bytes_total": Instrument(COUNTER, "bytes fed to steps"),
    "graphflow_fetch_bytes_total": Instrument(COUNTER, "bytes fetched from steps"),
    "graphflow_round_trip_seconds": Instrument(
        GAUGE, "shortest round trip of the last pings", ("worker",)
    ),
    "graphflow_clock_error_seconds": Instrument(
        GAUGE, "bound of the error of a worker's times in traces", ("worker",)
    ),
    "graphflow_checkpoints_total": Instrument(COUNTER, "checkpoints by outcome", ("outcome",)),
    "graphflow_checkpoint_age_seconds": Instrument(
        GAUGE, "time since the last complete checkpoint"
    ),
}


@dataclass
class Histogram:
    """Counts by bucket, the last one for values above all bounds, and the sum in seconds."""

    counts: list[int]
    total: float = 0.0


Values = float | Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class MetricSample:
    """The values of one metric at a moment, by labels."""

    name: str
    metric: Instrument
    values: Mapping[tuple[str, ...], float | Histogram]


class Meters:
    """The metrics of one process, or of one session. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, Histogram] = {}
        self._watched: dict[str, Callable[[], Values]] = {}
        self._pending: deque[tuple[Callable[[list[Any]], None], Any]] = deque()

    def add_later(self, count: Callable[[list[Any]], None], what: Any) -> None:
        """Call `count` later with a list of such items: when metrics are read, or after many items.

        Callers on the critical path of a step use this, since counting takes longer than appending.
        """
        self._pending.append((count, what))
        if len(self._pending) >= MAX_PENDING:
            self._process_pending()

    def _process_pending(self) -> None:
        found: dict[Callable[[list[Any]], None], list[Any]] = {}
        with suppress(IndexError):
            while True:
                count, what = self._pending.popleft()
                found.setdefault(count, []).append(what)
        for count, all_of_it in found.items():
            count(all_of_it)

    def add(self, name: str, value: float = 1, *labels: str) -> None:
        """Add to a counter. Labels come in the order in which the metric declares them.

        Raises:
            ArgumentError: the counter is not declared, or has other labels.
        """
        with self._lock:
            series = self._values.get(name)
            if (
                series is not None and labels in series
            ):  # nearly always, and on the path of each step
                series[labels] += value
                return
        _check_declared(name, COUNTER, labels)
        with self._lock:
            series = self._values.setdefault(name, {})
            if labels not in series and len(series) >= MAX_SERIES:
                labels = ("other",) * len(labels)
            series[labels] = series.get(labels, 0) + value

    def add_all(self, counts: Mapping[str, float], *labels: str) -> None:
        """Add to several counters with the same labels; raises as `add` does."""
        with self._lock:
            for name, value in counts.items():
                series = self._values.get(name)
                if series is None or labels not in series:
                    break
                series[labels] += value
            else:
                return
        counted = list(counts).index(name)
        for left in list(counts)[counted:]:
            self.add(left, counts[left], *labels)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge.

        Raises:
            ArgumentError: the gauge is not declared, or has other labels.
        """
        _check_declared(name, GAUGE, labels)
        with self._lock:
            self._values.setdefault(name, {})[labels] = value

    def observe(self, name: str, *seconds: float) -> None:
        """Add durations to a histogram.

        Raises:
            ArgumentError: the histogram is not declared.
        """
        found = self._histograms.get(name)
        if found is None:
            _check_declared(name, HISTOGRAM, ())
            with self._lock:
                empty = Histogram([0] * (len(BUCKETS) + 1))
                found = self._histograms.setdefault(name, empty)
        with self._lock:
            for each in seconds:
                found.counts[bisect_left(BUCKETS, each)] += 1
            found.total += sum(seconds)

    def watch(self, name: str, read: Callable[[], Values]) -> None:
        """Compute a metric by `read` whenever metrics are read; this replaces an earlier `read`.

        Args:
            read: returns a number, or a number for each tuple of labels. If it raises OSError, the
                metric is left out.

        Raises:
            ArgumentError: the metric is not declared.
        """
        _check_declared(name, None, None)
        with self._lock:
            self._watched[name] = read

    def value(self, name: str, *labels: str) -> float:
        """Return a counter's value, summed over all labels if none are given."""
        self._process_pending()
        with self._lock:
            series = self._values.get(name, {})
            return series.get(labels, 0) if labels else sum(series.values())

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        """Return a counter's values by labels."""
        self._process_pending()
        with self._lock:
            return dict(self._values.get(name, {}))

    def samples(self) -> Iterator[MetricSample]:
        """Yield the current values of all metrics, in the order of `METRICS`."""
        self._process_pending()
        with self._lock:
            values: dict[str, dict[tuple[str, ...], float | Histogram]] = {
                name: dict(series) for name, series in self._values.items()
            }
            for name, found in self._histograms.items():
                values[name] = {(): Histogram(list(found.counts), found.total)}
            watched = dict(self._watched)
        for name, read in watched.items():
            with suppress(OSError):
                now = read()
                values[name] = {(): now} if isinstance(now, int | float) else dict(now)
        for name, metric in METRICS.items():
            if values.get(name):
                yield MetricSample(name, metric, values[name])


def _check_declared(name: str, kind: str | None, labels: tuple[str, ...] | None) -> None:
    metric = METRICS.get(name)
    if metric is None or (kind is not None and metric.kind != kind):
        raise ArgumentError(f"{name} is not declared as a {kind or 'metric'} in METRICS")
    if labels is not None and len(labels) != len(metric.labels):
        raise ArgumentError(f"{name} has the labels {metric.labels}, not {labels}")


def watch_process(meters: Meters, role: str, address: str) -> None:
    """Add the metrics of this process: its role and versions, uptime, and memory."""
    started = time.monotonic()
    labels = (role, address, __version__, platform.python_version())
    meters.set("graphflow_info", 1, *labels)
    meters.watch("graphflow_uptime_seconds", lambda: time.monotonic() - started)
    meters.watch("graphflow_resident_bytes", resident_bytes)
    meters.watch("graphflow_resident_peak_bytes", peak_resident_bytes)


def resident_bytes() -> int:
    """Return this process's resident bytes; its peak if the system does not report them."""
    return _statm_bytes() or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return this process's peak resident bytes. The kernel updates the peak with a delay."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(most if sys.platform == "darwin" else most << 10, _statm_bytes())


def _statm_bytes() -> int:
    """Return the resident bytes from /proc; 0 on systems without it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()

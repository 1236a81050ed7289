"""Metrics: what is counted, declared, documented and bounded."""

from __future__ import annotations

import threading

import pytest

from graphflow.errors import ArgumentError
from graphflow.runtime.telemetry.metrics import (
    BUCKETS,
    MAX_SERIES,
    METRICS,
    Histogram,
    Meters,
    peak_resident_bytes,
    resident_bytes,
    watch_process,
)
from tests.house.sources import ROOT

SENT = "graphflow_sent_bytes_total"


def values(meters: Meters) -> dict[str, dict[tuple[str, ...], float | Histogram]]:
    return {sample.name: dict(sample.values) for sample in meters.samples()}


def test_counters_add_up_by_labels_and_over_them() -> None:
    meters = Meters()
    meters.add(SENT, 10, "a", "1")
    meters.add(SENT, 5, "a", "1")
    meters.add(SENT, 1, "b", "1")
    assert values(meters)[SENT] == {("a", "1"): 15, ("b", "1"): 1}
    assert meters.value(SENT) == 16 and meters.value(SENT, "a", "1") == 15
    assert meters.value("graphflow_workers_lost_total") == 0
    assert meters.series(SENT) == {("a", "1"): 15, ("b", "1"): 1}


def test_gauges_are_what_they_were_set_to_last() -> None:
    meters = Meters()
    meters.set("graphflow_checkpoint_age_seconds", 3.0)
    meters.set("graphflow_checkpoint_age_seconds", 1.0)
    assert values(meters)["graphflow_checkpoint_age_seconds"] == {(): 1.0}


def test_durations_fall_into_buckets_whose_bounds_belong_to_them() -> None:
    meters = Meters()
    for seconds in (0.0, BUCKETS[0], 2e-5, 0.5, 1e6):
        meters.observe("graphflow_step_seconds", seconds)
    found = values(meters)["graphflow_step_seconds"][()]
    assert isinstance(found, Histogram)
    assert sum(found.counts) == 5 and found.total == pytest.approx(1e6 + 0.50003)
    assert (found.counts[0], found.counts[1], found.counts[-1]) == (2, 1, 1)


def test_watched_metrics_are_read_when_somebody_asks() -> None:
    meters, now = Meters(), {("cpu:0",): 1.0}
    meters.watch("graphflow_arena_bytes", lambda: dict(now))
    meters.watch("graphflow_sessions", lambda: len(now))
    now["cpu:1",] = 2.0
    assert values(meters)["graphflow_arena_bytes"] == {("cpu:0",): 1.0, ("cpu:1",): 2.0}
    assert values(meters)["graphflow_sessions"] == {(): 2}


def test_what_cannot_be_read_now_is_left_out() -> None:
    meters = Meters()

    def raise_os_error() -> float:
        raise OSError("no /proc here")

    meters.watch("graphflow_sessions", raise_os_error)
    meters.add("graphflow_workers_lost_total")
    assert list(values(meters)) == ["graphflow_workers_lost_total"]


def test_the_number_of_series_is_bounded_whatever_labels_come() -> None:
    meters = Meters()
    for edge in range(MAX_SERIES + 100):
        meters.add(SENT, 1, "a", str(edge))
    found = values(meters)[SENT]
    assert len(found) == MAX_SERIES + 1 and found["other", "other"] == 100
    assert meters.value(SENT) == MAX_SERIES + 100


def test_threads_count_together() -> None:
    meters = Meters()

    def count() -> None:
        for _ in range(2000):
            meters.add("graphflow_workers_lost_total")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert meters.value("graphflow_workers_lost_total") == 8000


def test_a_process_tells_what_it_is_and_its_memory() -> None:
    meters = Meters()
    watch_process(meters, "worker", "tcp://127.0.0.1:1")
    found = values(meters)
    ((role, address, *_),) = found["graphflow_info"]
    assert (role, address) == ("worker", "tcp://127.0.0.1:1")
    assert found["graphflow_resident_bytes"][()] > 1 << 20  # type: ignore[operator]
    assert resident_bytes() > 1 << 20 and peak_resident_bytes() >= resident_bytes()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda m: m.add("graphflow_step_total"),
        lambda m: m.add("graphflow_step_seconds"),
        lambda m: m.add("graphflow_steps_total"),
        lambda m: m.add("graphflow_steps_total", 1, "a", "b"),
        lambda m: m.set("graphflow_steps_total", 1, "a"),
        lambda m: m.observe("graphflow_sessions", 1.0),
        lambda m: m.watch("graphflow_nothing", lambda: 1),
    ],
)
def test_a_metric_that_is_not_declared_so_is_a_mistake(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="graphflow_"):
        wrong(Meters())  # type: ignore[operator]


def test_every_metric_is_counted_somewhere_and_named_as_prometheus_wants_it() -> None:
    files = {*(ROOT / "graphflow").rglob("*.py"), *(ROOT / "runtime").rglob("*.py")}
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    for name, metric in METRICS.items():
        assert text.count(f'"{name}"') >= 2, f"{name} is declared, but nothing counts it"
        assert name.endswith("_total") == (metric.kind == "counter"), name


def test_the_docs_list_every_metric_with_its_kind_meaning_and_labels() -> None:
    page = (ROOT / "docs" / "operations" / "observability.md").read_text(encoding="utf-8")
    for name, metric in METRICS.items():
        row = f"| `{name}` | {metric.kind} | {metric.meaning} | {' '.join(metric.labels)} |"
        assert row in page, row

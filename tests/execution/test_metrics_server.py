"""Metrics of sessions: counted where they are asked for, over HTTP, here and over workers."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, InsecureAddress, NonFiniteError
from graphflow.execution.metrics_server import MeteredStepExecutor
from graphflow.execution.step_executor import StepExecutor

pytest.importorskip("prometheus_client")

X = np.ones(4, np.float32)


def read(session: gf.Session) -> dict[str, float]:
    """Every series of the session's endpoint, as Prometheus' own parser reads it."""
    from prometheus_client.parser import text_string_to_metric_families

    server = session._life.server
    assert server is not None
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10) as page:
        text = page.read().decode()
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_steps_in_this_process_are_counted_by_what_became_of_them() -> None:
    x = gf.placeholder("float32", (4,), name="x")
    y, bad = x + 1.0, gf.log(-x)
    with gf.Session(metrics="127.0.0.1:*", check_finite=True) as session:
        for _ in range(7):
            session.run(y, {x: X})
        with pytest.raises(NonFiniteError):
            session.run(bad, {x: X})
        found = read(session)
    assert found["graphflow_steps_total committed"] == 7
    assert found["graphflow_steps_total aborted"] == 1
    assert found["graphflow_step_seconds_count"] == 7
    assert 0 < found["graphflow_step_seconds_sum"] < 60
    assert found["graphflow_resident_bytes"] > 1 << 20


def test_what_nobody_asks_for_is_not_counted_at_all() -> None:
    with gf.Session() as session:
        assert type(session._steps) is StepExecutor and session._life.server is None
    with gf.Session(metrics="127.0.0.1:*") as session:
        assert type(session._steps) is MeteredStepExecutor


def test_over_workers_steps_bytes_clocks_and_checkpoints_are_counted(tmp_path: Path) -> None:
    x = gf.placeholder("float32", (4,), name="x")
    with gf.device("/worker:0"):
        a = x + gf.assign(gf.variable(X, name="v"), x)
    with gf.device("/worker:1"):
        b = a * 2.0
    cluster = gf.Cluster.local(workers=2)
    options = {"checkpoint": tmp_path / "kept", "every": 2, "trial": False}
    with gf.Session(cluster, metrics="127.0.0.1:*", **options) as session:
        for _ in range(4):
            session.run(b, {x: X})
        with session.trace():
            session.run(b, {x: X})
        found = read(session)
        until = time.monotonic() + 30
        while "graphflow_checkpoints_total written" not in read(session):
            assert time.monotonic() < until
            session.run(b, {x: X})  # a checkpoint that is written shows at the next step
        found |= {name: v for name, v in read(session).items() if "checkpoint" in name}
    assert found["graphflow_steps_total committed"] == 5
    assert found["graphflow_feed_bytes_total"] >= 5 * X.nbytes
    assert found["graphflow_fetch_bytes_total"] == 5 * X.nbytes
    assert found["graphflow_workers up"] == 2 and found["graphflow_workers lost"] == 0
    assert {found[f"graphflow_clock_error_seconds {w}"] for w in (0, 1)} == {0.0}
    assert all(0 < found[f"graphflow_round_trip_seconds {w}"] < 5 for w in (0, 1))
    assert found["graphflow_checkpoints_total written"] >= 1
    assert 0 <= found["graphflow_checkpoint_age_seconds"] < 60


def test_the_environment_asks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFLOW_METRICS", "127.0.0.1:*")
    with gf.Session() as session:
        assert read(session)["graphflow_uptime_seconds"] >= 0


@pytest.mark.parametrize(
    ("address", "error"),
    [("0.0.0.0:9100", InsecureAddress), ("nowhere", ArgumentError), (9100, ArgumentError)],
)
def test_an_address_that_cannot_be_is_refused_before_anything_runs(
    address: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"127\.0\.0\.1"):
        gf.Session(metrics=address)


def test_the_port_is_free_again_when_the_session_is_closed() -> None:
    with gf.Session(metrics="127.0.0.1:*") as session:
        assert session._life.server is not None
        address = session._life.server.address
    with gf.Session(metrics=address):
        pass

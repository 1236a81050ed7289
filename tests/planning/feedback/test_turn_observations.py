"""Traced windows teach what their turns take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.ops.control_flow.concurrent import parties_of
from graphflow.placement.calibration.calibrate import profile
from graphflow.placement.calibration.cluster_rates import device_classes, rates
from graphflow.placement.calibration.profile_file import profile_path
from graphflow.placement.calibration.trace_corrections import TraceCorrections, median_ratio
from graphflow.placement.cost_model.window_costs import party_works, turn_bucket
from graphflow.placement.plans.reports.window_lines import measured_seconds
from graphflow.planning.feedback.turn_observations import observe_turns
from graphflow.runtime.program import program
from graphflow.runtime.tracing.events import TraceEvent, TraceStep
from tests.faults import hazards
from tests.ops.communication.servers import server_and_workers, window_rules

DELAYS = (0.002, 0.02, 0.04)
"""Seconds of an update, and of a turn of each worker."""


def delay(party: int, turn: object, x: Tensor) -> Tensor:
    return hazards.sleep(x, seconds=DELAYS[party])


@pytest.fixture
def nothing_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the calibration, and forget what traces taught."""
    profile({"cpu"})
    known = profile_path().read_bytes()
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    profile_path().parent.mkdir(parents=True, exist_ok=True)
    profile_path().write_bytes(known)


def test_a_traced_window_is_predicted(nothing_learned: None) -> None:
    """Before, nothing is known of what a user's function takes."""
    pins = [f"/worker:{i}" for i in range(3)]
    weights, order, _ = server_and_workers(np.ones(5), [9, 5], pins=pins, disturb=delay)
    cluster = gf.Cluster.local(3, threads=1)
    (before,) = gf.plan([weights, order], cluster).windows
    assert before.seconds < 0.1
    with gf.Session(cluster, trial=False, ops=["tests.faults.hazards"]) as session:
        session.run([weights, order])
        with session.trace():
            for _ in range(4):
                session.run([weights, order])
        measured = session.plan().measured
    plan = gf.plan([weights, order], cluster).with_measured(measured)
    (window,) = plan.windows
    took = measured_seconds(plan, window)
    assert took is not None and took > 9 * sum(DELAYS[:2])
    assert window.seconds == pytest.approx(took, rel=0.15)
    (line,) = [line for line in str(plan).splitlines() if "window concurrent" in line]
    assert ", measured " in line


def test_the_latest_window_says_which_worker_is_slow() -> None:
    """A slow worker of a pool takes few turns, and was quick in windows before."""
    turns = (4, 4)
    rules = window_rules(turns, consistency="pool")
    weights, order, _ = server_and_workers(np.ones(5), turns, rules=rules)
    cluster = gf.Cluster.local(3, threads=1)
    graph = Graph([weights, order])
    (node,) = graph.of_op("concurrent")
    home = cluster.devices[0]
    compiled: Any = SimpleNamespace(graph=graph, devices={node: home})
    learned = TraceCorrections()

    def window(took: Mapping[int, Sequence[float]]) -> TraceStep:
        events = [
            TraceEvent(
                home, f"{graph.names[node]}/{party}/T{number}", "compute", 0, int(each * 1e9)
            )
            for party, seconds in took.items()
            for number, each in enumerate(seconds)
        ]
        return TraceStep(0, 0, 1, tuple(events), {})

    def seconds_of(party: int) -> float:
        rate = rates(cluster, None, True)[home]
        work = party_works(node, {}, [rate] * 3)[party]
        body = parties_of(node.attrs)[party]
        bucket = turn_bucket(body, party, device_classes(cluster)[home], True, work.turn)
        return median_ratio(learned.evidence(bucket).ratios) * work.turn

    for slow, quick in ((1, 2), (2, 1), (1, 2)):
        step = window({slow: [0.06] * 2, quick: [0.02] * 6})
        observe_turns(learned, cluster, None, compiled, {}, [step])
        assert seconds_of(slow) == pytest.approx(0.06)
        assert seconds_of(quick) == pytest.approx(0.02)


def test_a_long_window_has_a_bounded_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MAX_LOOP_SPANS", 50)
    pins = ["/worker:0/cpu:0", "/worker:0/cpu:1"]
    weights, order, _ = server_and_workers(np.ones(5) * 1e-3, [60], pins=pins)
    cluster = gf.Cluster.here(["cpu:0", "cpu:1"])
    with gf.Session(cluster, trial=False) as session, session.trace() as trace:
        session.run([weights, order])
    waits = [e.track for e in trace.steps[0].events if e.kind in ("send", "wait")]
    assert [waits.count(device) for device in pins] == [50, 50]

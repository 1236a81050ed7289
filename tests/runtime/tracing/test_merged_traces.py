"""Traces of workers whose clocks differ: real processes, one of them on a clock of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import monotonic_ns

import numpy as np
import pytest

import graphflow as gf
from graphflow.runtime.client.remote_hosts import RemoteHosts
from graphflow.runtime.tracing.events import TraceEvent, TraceStep
from graphflow.runtime.tracing.trace import Trace
from tests.runtime.workers import serve_worker

SCRIPT = Path(__file__).with_name("shifted_worker.py")
X = np.ones((64, 32), np.float32)
WORKER = """
[[workers]]
address = "{}"
devices = [{{ name = "cpu:0", flops = 5e10, bandwidth = 1e10, launch = 1e-6 }}]
"""


@pytest.fixture(params=[(0.0, 0.0), (-50_000.0, 60.0)], ids=str)
def traced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Trace, float, Path]]:
    """Steps over a worker on our clock and one on a clock of its own; by how many seconds that is
    ahead; the file of the trace."""
    seconds, ppm = request.param
    plain, shifted = ("-m", "graphflow.runtime.worker"), (SCRIPT, str(seconds), str(ppm))
    with serve_worker(command=plain) as first, serve_worker(command=shifted) as second:
        file, path = tmp_path / "cluster.toml", tmp_path / "trace.json"
        file.write_text("".join(WORKER.format(address) for address in (first, second)))
        yield trace_round_trips(file, path), seconds, path


def trace_round_trips(file: Path, path: Path) -> Trace:
    """Some traced steps in which a tensor goes to the other worker and another one back."""
    x = gf.placeholder("float32", X.shape, name="x")
    with gf.device("/worker:0"):
        a = gf.tanh(x)
    with gf.device("/worker:1"):
        b = gf.tanh(a @ a.T)
    with gf.device("/worker:0"):
        c = gf.sum(b)
    with gf.Session(file, trial=False) as session:
        session.run(c, {x: X})
        with session.trace(path) as trace:
            for _ in range(5):
                session.run(c, {x: X})
    return trace


def find_event(step: TraceStep, kind: str, track: str) -> TraceEvent:
    (found,) = (e for e in step.events if e.kind == kind and e.track.startswith(track))
    return found


@pytest.mark.every(2)
def test_the_spans_of_all_workers_lie_in_their_step_in_the_order_in_which_things_happened(
    traced: tuple[Trace, float, Path],
) -> None:
    trace, seconds, path = traced
    assert len(trace.steps) == 5
    for step in trace.steps:
        slack = 1e9 * step.errors[1]
        assert (step.errors[1] == 0.0) == (seconds == 0.0) and step.errors[1] < 0.1
        assert step.errors[0] == 0.0
        for event in step.events:
            assert step.start - slack <= event.start <= event.end <= step.end + slack, event
        sends = [find_event(step, "send", f"/worker:{w}") for w in (0, 1)]
        waits = [find_event(step, "wait", f"/worker:{w}") for w in (1, 0)]
        for send, wait in zip(sends, waits, strict=True):
            assert send.edge == wait.edge and send.source == wait.source != wait.track
            assert send.start - slack <= wait.end  # nothing comes before it was sent
        assert waits[0].end - slack <= sends[1].start  # it computes what it sends of what came
    assert {edge.count for edge in trace.edges} == {5}
    for edge in trace.edges:
        assert edge.error == max(step.errors[1] for step in trace.steps)
        assert edge.latency < 0.5 and edge.bytes in (64 * 32 * 4, 64 * 64 * 4)
    assert "tanh" in str(trace) and len(str(trace).splitlines()) == 3 + len(trace.edges)
    assert ("on one clock to ±" in str(trace)) == (seconds != 0.0)
    events = json.loads(path.read_text())["traceEvents"]
    arrows = {phase: [e for e in events if e["ph"] == phase] for phase in "sf"}
    assert len(arrows["s"]) == len(arrows["f"]) == 10


def test_a_traced_step_begins_when_the_clocks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for before it is no part of what it took."""
    known: list[int] = []
    meet = RemoteHosts.wait_for_clocks

    def record_meeting(self: RemoteHosts) -> None:
        meet(self)
        known.append(monotonic_ns())

    monkeypatch.setattr(RemoteHosts, "wait_for_clocks", record_meeting)
    with gf.Session(gf.Cluster.local(1)) as session, session.trace() as trace:
        session.run(gf.exp(gf.constant([1.0, 2.0])) + gf.variable([0.0, 0.0]))
    (step,) = trace.steps
    assert len(known) == 1 and known[0] <= step.start

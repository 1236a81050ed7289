"""Traces of several hosts on one clock, checked against one that all of them can read.

Hosts in network namespaces share their kernel's clock. Workers are given others, and the truth is
what an op reads past them: so it is known when each of them really computed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.network.network import Hosts
from tests.faults.running import ROOT, Running, cluster_file

SHIFTS = ((0.0, 0.0), (50_000.0, 60.0), (-7_000.0, -90.0))
"""By how many seconds the clock of each worker is ahead, and by how many ppm it is too fast."""

TRACED = """
import json, sys, time, numpy as np, graphflow as gf
from tests.faults import hazards
x = gf.placeholder("float32", (64, 32), name="x")
flow, stamps = x, []
for worker in (0, 1, 2, 0):
    with gf.device(f"/worker:{worker}"):
        flow = gf.tanh(flow)
        stamps.append(hazards.stamp(flow))
        flow = flow + gf.astype(stamps[-1] * 0, "float32")
fetches = [*stamps, gf.sum(flow)]
feed = {x: np.ones((64, 32), "float32")}
with gf.Session(sys.argv[1], trial=False, ops=["tests.faults.hazards"]) as s:
    s.run(fetches, feed)
    time.sleep(float(sys.argv[2]))
    truth, trips = [], []
    clock = s._life.hosts._loop._machine.clock
    with s.trace() as trace:
        for _ in range(20):
            trips.append([clock(worker).round_trip for worker in range(3)])
            truth.append([int(told[0]) for told in s.run(fetches, feed)[:4]])
    steps = [
        {
            "errors": [step.errors[worker] for worker in range(3)],
            "events": [
                [e.track, e.kind, e.name, e.start, e.end, e.edge, e.source] for e in step.events
            ],
        }
        for step in trace.steps
    ]
    print(json.dumps({"truth": truth, "steps": steps, "trips": np.max(trips, 0).tolist()}))
"""


@pytest.mark.slow  # clocks that have drifted for some seconds
def test_traces_of_hosts_whose_clocks_differ_agree_with_the_clock_that_is_outside(
    hosts: Hosts, keys: Mapping[str, str], tmp_path: Path, running: list[Running]
) -> None:
    script = ROOT / "tests" / "runtime" / "tracing" / "shifted_worker.py"
    addresses = []
    for host, (seconds, ppm) in zip(hosts.hosts, SHIFTS, strict=True):
        addresses.append(f"tcp://{host.address}:7001")
        command = [sys.executable, str(script), str(seconds), str(ppm), "--threads", "1"]
        command += ["--listen", addresses[-1], "--key", "box"]
        command += ["--allow-ops", "tests.faults.hazards", "--ops-path", str(ROOT)]
        running.append(Running(command, inside=host.enter, env=keys))
    for worker in running:
        worker.line("graphflow worker")
    file = cluster_file(tmp_path, addresses, 'key = "boss"', key="box")
    command = [sys.executable, "-c", TRACED, str(file), "4"]
    run = Running(command, inside=hosts.hosts[0].enter, env=keys)
    running.append(run)
    assert run.wait() == 0, run.describe_output()
    told = json.loads(run.lines[-1])
    assert len(told["steps"]) == len(told["truth"]) == 20
    trips = [1e9 * trip for trip in told["trips"]]
    for truth, step in zip(told["truth"], told["steps"], strict=True):
        errors = [1e9 * each for each in step["errors"]]
        assert errors[0] == 0, "it has the client's own clock"
        assert truth == sorted(truth)
        spans = {(e[0], e[2]): (e[3], e[4]) for e in step["events"] if e[1] == "compute"}
        for number, (at, worker) in enumerate(zip(truth, (0, 1, 2, 0), strict=True)):
            node = "hazards.stamp" + (f"_{number}" if number else "")
            start, end = spans[f"/worker:{worker}/cpu:0", node]
            off = max(start - at, at - end, 0)
            assert off <= errors[worker], "no further off than the trace says"
            assert off <= trips[worker] / 2, "of the quickest lately"
        _check_edges(step["events"], errors)


def _check_edges(events: list[list[Any]], errors: list[float]) -> None:
    """Nothing has come before it left."""
    sent = {edge: start for _, kind, _, start, _, edge, _ in events if kind == "send"}
    waits = [(edge, end) for _, kind, _, _, end, edge, _ in events if kind == "wait"]
    assert len(waits) >= 3
    for edge, end in waits:
        assert sent[edge] - sum(errors) <= end

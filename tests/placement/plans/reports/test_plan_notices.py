"""What a report names besides nodes: shared ports, constraints, fallbacks."""

from __future__ import annotations

import dataclasses

import pytest

import graphflow as gf
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.reports.plan_notices import constraints, ports

CLUSTER = gf.Cluster.hypothetical("2x2xt4", network="10gbe")


def plan_pinned_graph() -> Plan:
    """Two tensors of 256 KiB cross the network, from one GPU to one other."""
    x = gf.placeholder("float32", (256, 256), name="x")
    w = gf.variable([[1.0] * 256] * 256, name="w")
    with gf.device("/worker:0/gpu:0"):
        a, b = gf.tanh(x), gf.exp(x)
    with gf.device("/worker:1/gpu:1"):
        y = a @ b
    return gf.plan([y, gf.assign(w, w * 2.0)], CLUSTER)


def test_ports_tell_the_bytes_the_time_and_the_share_of_their_bandwidth() -> None:
    plan = plan_pinned_graph()
    uses = {use.title: use for use in ports(plan)}
    out, into = uses["host 0 nic, out"], uses["host 1 nic, in"]
    devices = set(CLUSTER.devices)
    sent = [t for t in plan.transfers if {t.source, t.target} <= devices]
    crossing = [t for t in sent if t.source.split("/")[1] != t.target.split("/")[1]]
    assert out.bytes == into.bytes == sum(t.bytes for t in crossing) == 2 * 256 * 1024
    assert out.transfers == len(crossing) == 2
    assert out.bandwidth == pytest.approx(CLUSTER.ports[0].bandwidth)
    first, last = min(t.start for t in crossing), max(t.finish for t in crossing)
    assert 0 < out.busy <= last - first + 1e-12  # what overlaps counts once
    assert out.used == pytest.approx(out.bytes / out.bandwidth / plan.makespan)
    assert "host 1 nic, out" not in uses  # nothing goes back


def test_a_plan_without_ports_or_transfers_shares_nothing() -> None:
    plan = plan_pinned_graph()
    assert ports(dataclasses.replace(plan, transfers=())) == ()
    x = gf.placeholder("float32", (4,))
    assert ports(gf.plan(gf.tanh(x), gf.Cluster.local(workers=2, threads=1))) == ()


def test_pins_and_variables_are_named_with_an_example_and_its_line() -> None:
    rows = {row.why: row for row in constraints(plan_pinned_graph())}
    assert rows["pinned by gf.device('/worker:0/gpu:0')"].nodes == 2
    assert rows["pinned by gf.device('/worker:1/gpu:1')"].nodes == 1
    assert rows["lives with its variable"].example.startswith("assign (test_plan_notices.py:")
    text = str(plan_pinned_graph().report())
    assert "Constraints" in text and "pinned by gf.device('/worker:1/gpu:1')" in text
    assert "Ports that links share" in text and "host 0 nic, out" in text


def test_constraints_are_named_without_the_problem_behind_the_plan() -> None:
    plan = plan_pinned_graph()
    assert constraints(dataclasses.replace(plan, model=None)) == constraints(plan)


def test_a_clock_and_what_fits_in_no_memory_are_named() -> None:
    plan = plan_pinned_graph()
    alone = {name: s for name, s in plan.baselines.items() if name != "round robin"}
    hurried = dataclasses.replace(plan, reproducible=False, baselines=alone)
    whys = [row.why for row in constraints(hurried)]
    assert "round robin does not fit in memory" in whys
    assert "a clock ended the search; planning again may differ" in whys
    assert "not reproducible" in str(hurried.report())
    assert "greedy, reproducible" in str(plan.report())


def test_one_device_takes_no_choice_away() -> None:
    x = gf.placeholder("float32", (4,))
    with gf.device("/worker:0"):
        y = gf.tanh(x)
    assert constraints(gf.plan(y, gf.Cluster.hypothetical("t4"))) == ()

"""Reports, differences and comparisons: what they say of plans whose numbers are known."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import PlanError
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.plan_records import (
    Interval,
    MeasuredSteps,
    PlannedNode,
    PlannedTransfer,
)
from graphflow.placement.plans.reports.comparison import summary
from graphflow.placement.plans.reports.critical_path import critical_path
from graphflow.placement.plans.reports.tables import TextTable
from tests.placement.view.view_plans import HOSTILE, towers

A, B = "/worker:0/cpu:0", "/worker:1/cpu:0"


def node(name: str, device: str, start: float, finish: float, *inputs: str) -> PlannedNode:
    return PlannedNode(
        name, "add", device, start, finish, "float32(2,)", 8, inputs, f"train.py:{len(name)}",
        "because", {A: finish - start, B: finish - start},
    )  # fmt: skip


def make_transfer(
    tensor: str, source: str, target: str, start: float, finish: float
) -> PlannedTransfer:
    return PlannedTransfer(tensor, source, target, start, finish, 1000, 0)


def plan_small_graph(measured: MeasuredSteps | None = None) -> Plan:
    """a runs on A for 2 s, travels 3 s, c runs on B for 1 s; b keeps B busy for 4 s before."""
    return Plan(
        cluster=gf.Cluster.local(workers=2, threads=1),
        placer="greedy",
        nodes=(node("a", A, 0, 2), node("b", B, 0, 4), node("c", B, 5, 6, "a", "b")),
        transfers=(make_transfer("a", A, B, 2, 5),),
        makespan=6.0,
        peak_memory={A: 100, B: 300},
        baselines={},
        shapes={},
        fingerprint="0",
        measured=measured,
    )


MEASURED = MeasuredSteps(
    makespan=7.0,
    timeline=(
        Interval(A, "a", 0.0, 2.5, "compute"),
        Interval(B, "b", 0.0, 4.5, "compute"),
        Interval(f"{A} → {B}", "a", 2.5, 6.0, "transfer"),
        Interval(B, "c", 6.0, 7.0, "compute"),
    ),
    peak_memory={A: 110, B: 310},
    steps=3,
)


def test_a_report_tells_busy_and_idle_time_memory_and_bytes() -> None:
    made = plan_small_graph().report()
    first, second = made.devices
    assert (first.nodes, first.busy, first.peak_memory) == (1, 2.0, 100)
    assert (second.nodes, second.busy, second.idle) == (2, 5.0, pytest.approx(1 / 6))
    assert first.busy_measured is None and first.peak_measured is None
    (link,) = made.links
    assert (link.source, link.target, link.transfers, link.bytes) == (A, B, 1, 1000)
    assert made.idle == pytest.approx(1 - 7 / 12)


def test_a_report_puts_what_was_measured_beside_it() -> None:
    made = plan_small_graph(MEASURED).report()
    assert [use.busy_measured for use in made.devices] == [2.5, 5.5]
    assert [use.peak_measured for use in made.devices] == [110, 310]
    assert made.links[0].busy_measured == 3.5 and made.measured == 7.0
    assert "measured 7 s" in str(made)


def test_the_critical_path_goes_back_through_the_transfer_that_came_last() -> None:
    path = critical_path(plan_small_graph())
    assert [(part.kind, part.name, part.start, part.finish) for part in path] == [
        ("computing", "a", 0, 2), ("moving", "a", 2, 5), ("computing", "c", 5, 6),
    ]  # fmt: skip
    assert [part.location for part in path] == ["train.py:1", "train.py:1", "train.py:1"]


def test_the_critical_path_goes_through_a_busy_device_and_tells_of_gaps() -> None:
    plan = plan_small_graph()
    busy = dataclasses.replace(
        plan, nodes=(node("a", A, 0, 2), node("b", B, 1, 5), node("c", B, 5, 6, "b")), transfers=()
    )
    assert [part.name for part in critical_path(busy)] == ["b", "c"]
    late = dataclasses.replace(busy, nodes=(node("a", A, 0, 2), node("c", A, 5, 6, "a")))
    assert [part.kind for part in critical_path(late)] == ["computing", "waiting", "computing"]
    assert critical_path(dataclasses.replace(plan, nodes=(), transfers=())) == ()


def test_the_parts_of_a_critical_path_follow_each_other_to_the_end() -> None:
    y = _model()
    for placer in ("greedy", "round_robin", "heft"):
        plan = gf.plan(y, gf.Cluster.hypothetical("2x2xt4", network="10gbe"), placer=placer)
        path = critical_path(plan)
        assert path[-1].finish == pytest.approx(plan.makespan)
        assert path[0].start == pytest.approx(0.0, abs=1e-12)
        for before, after in pairwise(path):
            assert after.start == pytest.approx(before.finish, rel=1e-9)


def test_reports_print_columns_that_line_up_and_names_and_lines() -> None:
    text = str(plan_small_graph(MEASURED).report())
    rows = [line for line in text.splitlines() if "/cpu:0" in line and "→" not in line]
    assert re.search(r"/worker:1/cpu:0 +2 +5 s +5\.5 s +\+10 % +17 % +300 B +310 B", text)
    assert len({line.index(" s ") for line in rows[:2]}) == 1
    assert "Critical path: 3 parts, 3 s computing, 3 s moving" in text
    assert "train.py:1" in text


def test_a_long_critical_path_shows_its_longest_parts_in_order() -> None:
    nodes = [node("n0", A, 0, 1)]
    for i in range(1, 60):
        start = nodes[-1].finish
        nodes.append(node(f"n{i}", A, start, start + i % 7 + 1, f"n{i - 1}"))
    plan = dataclasses.replace(
        plan_small_graph(), nodes=tuple(nodes), transfers=(), makespan=nodes[-1].finish
    )
    text = str(plan.report())
    assert "60 parts" in text and "; the longest 20" in text
    shown = [int(m) for m in re.findall(r"^ +n(\d+) ", text, re.M)]
    assert len(shown) == 20 and shown == sorted(shown)


def _model() -> gf.Tensor:
    x = gf.placeholder("float32", (512, 1024), name="x")
    sides = []
    for i in range(3):
        h = x
        for j in range(2):
            h = gf.tanh(h @ gf.variable(gf.init.zeros((1024, 1024)), name=f"w{i}{j}"))
        sides.append(gf.sum(h))
    return sides[0] + sides[1] + sides[2]


def test_a_difference_names_what_moved_and_what_each_move_alone_costs() -> None:
    y, cluster = _model(), gf.Cluster.hypothetical("3xh100")
    good, poor = gf.plan(y, cluster), gf.plan(y, cluster, placer="round_robin")
    made = good.diff(poor)
    assert made and made.makespans == (good.makespan, poor.makespan)
    assert {m.name for m in made.moved} == {
        name for name in good.placement if good.placement[name] != poor.placement[name]
    }
    for each in made.moved:
        assert (each.source, each.target) == (good.placement[each.name], poor.placement[each.name])
        assert each.location.startswith("test_report.py:")
        assert each.cost is not None
        if each.op == "matmul":
            told = good.explain(each.name)
            assert f"on {each.target}" in told
    assert any(each.cost > 0 for each in made.moved if each.cost is not None)
    total = sum(other for _, other in made.links.values())
    assert total == sum(t.bytes for t in poor.transfers)
    text = str(made)
    assert "nodes moved" in text and "alone, the step takes" in text and "+" in text


def test_a_plan_does_not_differ_from_itself() -> None:
    made = plan_small_graph().diff(plan_small_graph())
    assert not made and not made.moved
    assert "0 of 3 nodes moved" in str(made)


def test_a_difference_says_how_much_faster_and_of_what_graphs() -> None:
    first = plan_small_graph()
    assert "; these are plans of different graphs" not in str(first.diff(first))
    assert "Bytes a step" not in str(first.diff(first))
    other = dataclasses.replace(first, makespan=first.makespan / 250, fingerprint="1" * 16)
    assert "(250× as fast)" in str(first.diff(other))
    assert "(250× as long)" in str(other.diff(first))
    assert "; these are plans of different graphs" in str(first.diff(other))


def test_plans_for_other_hardware_differ_without_costs_where_a_device_is_missing() -> None:
    y = _model()
    one, two = (gf.plan(y, gf.Cluster.hypothetical(name)) for name in ("h100", "3xh100"))
    made = one.diff(two)
    assert made.moved and all(each.cost is None for each in made.moved)
    assert "?" in str(made)
    other = gf.plan(
        gf.sum(gf.placeholder("float32", (4,), name="z")), gf.Cluster.hypothetical("t4")
    )
    assert set(one.diff(other).only_other) == {"z", "sum"} - set(one.placement)
    with pytest.raises(PlanError, match=r"compared with another gf\.Plan, not 3"):
        one.diff(3)  # type: ignore[arg-type]


def test_plans_side_by_side_tell_speed_ups_and_hardware() -> None:
    y = _model()
    plans = {name: gf.plan(y, gf.Cluster.hypothetical(name)) for name in ("t4", "h100", "3xh100")}
    made = gf.placement.compare(plans)
    assert made.best == "3xh100"
    text = str(made)
    assert "3 × h100-sxm" in text and "1.00×" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("speed-up"))
    ratios = [float(r) for r in re.findall(r"([\d.]+)×", row)]
    assert ratios == [
        pytest.approx(plans["t4"].makespan / p.makespan, abs=0.01) for p in plans.values()
    ]
    html = made._repr_html_()
    assert "<table" in html and "3 × h100-sxm" in html
    assert summary(plans["3xh100"]) == "3 × h100-sxm"


def test_a_list_of_plans_is_numbered_and_measured_steps_appear() -> None:
    made = gf.placement.compare([plan_small_graph(), plan_small_graph(MEASURED)])
    assert made.names == ("plan 1", "plan 2")
    assert "measured step" in str(made) and "7 s" in str(made)


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([], "at least one plan"),
        ({}, "at least one plan"),
        (3, "a list of plans"),
        ([1], r"plan 1 is no gf\.Plan: 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(plans: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        gf.placement.compare(plans)  # type: ignore[arg-type]


def test_hostile_names_are_escaped_in_html_and_keep_to_their_line_in_text() -> None:
    hostile = dataclasses.replace(
        plan_small_graph(), nodes=(node(HOSTILE + "\n\n", A, 0, 6),), transfers=()
    )
    made = hostile.report()
    assert "<script" not in made._repr_html_() and "&lt;script&gt;" in made._repr_html_()
    assert "\x00" not in str(made) and "<script>" in str(made)
    assert len(str(made).splitlines()) == len(str(plan_small_graph().report()).splitlines()) - 3


def test_tables_on_a_page_scroll_and_keep_a_number_beside_its_unit() -> None:
    html = TextTable("", ("device", "busy"), (("a", "5.44 ms"),)).html()
    assert "overflow-x:auto" in html and "white-space:nowrap" in html


def test_tables_align_wide_letters() -> None:
    lines = str(TextTable("t", ("name", "n"), (("語語", "1"), ("abcd", "22")))).splitlines()
    assert lines == ["t", "  name   n", "  語語   1", "  abcd  22"]


def test_a_large_plan_s_report_is_quick_and_whole() -> None:
    plan = towers(workers=4, count=40, layers=8)
    made = plan.report()
    assert sum(use.nodes for use in made.devices) == sum(n.device != "/client" for n in plan.nodes)
    assert made.critical_path[-1].finish == pytest.approx(plan.makespan)


def test_explaining_a_scope_a_tensor_or_nonsense_says_what_is_meant() -> None:
    x = gf.placeholder("float32", (4, 4), name="x")
    with gf.name_scope("block"):
        values, places = gf.top_k(x, 2)
        y = [values * 2.0, places]
    plan = gf.plan(y, gf.Cluster.local(workers=2, threads=1))
    assert plan.explain("block/top_k:1").startswith("block/top_k: top_k on ")
    with pytest.raises(PlanError, match=r"'block' is a scope of 2 nodes: .* such as 'block/"):
        plan.explain("block")
    for nonsense in (["block"], 3, None):
        with pytest.raises(PlanError, match="takes the name of a node, or a tensor, not"):
            plan.explain(nonsense)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"give its path, such as 'plan\.json', not 3"):
        plan.save(3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"give its path, such as 'plan\.json', not None"):
        gf.Plan.load(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["2x2xt4", "3xh100"])
def test_a_plan_as_a_networkx_graph_is_the_problem_that_was_placed(name: str) -> None:
    plan = gf.plan(_model(), gf.Cluster.hypothetical(name, network="10gbe"))
    graph = plan.to_networkx()
    problem = gf.placement.Problem.from_networkx(graph)
    names = {name: i for i, name in enumerate(graph.graph["devices"])}
    device = np.array([names[node.device] for node in plan.nodes])
    order = np.arange(len(plan.nodes))
    timeline = gf.placement.simulate(problem, gf.placement.Assignment(device, order))
    assert timeline.makespan == pytest.approx(plan.makespan - plan.overhead)
    assert [graph.nodes[node.name]["memory"] for node in plan.nodes if node.op == "variable"] == [
        node.bytes for node in plan.nodes if node.op == "variable"
    ]


def test_a_plan_is_short_in_messages() -> None:
    assert repr(towers()).startswith("<Plan of 151 nodes on 2 devices by greedy: ")

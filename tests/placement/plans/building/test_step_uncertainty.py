"""Plans whose predictions are uncertain: intervals, and gains that may be chance."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow import init
from graphflow.execution.replan_policy import Replanned
from graphflow.frontend.builders import placeholder, variable
from graphflow.frontend.pytree import bind
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, Node, device
from graphflow.passes import optimize
from graphflow.placement.calibration.cluster_rates import device_classes
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.node_times import NodeTimes
from graphflow.placement.plans.building.plan_builder import plan_graph
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.plan_records import ON_ONE
from graphflow.placement.view.page.html import render
from graphflow.placement.view.page.payload import payload
from graphflow.placement.view.scene import headlines
from tests.placement.speeds import profile, scatter

TWO = Cluster.local(workers=2, threads=1)
SURE, UNSURE = 0.01, 0.6
CLOSE = {"process": [6e-4, 1e9], "client": [1e-4, 1e9], "thread": [1e-5, None]}
"""Links over which the second device saves a little."""


def towers(pinned: bool = False) -> Graph:
    """A sum over two equal towers."""
    x = placeholder("float32", (64, 256), name="x")
    sums = []
    for i in range(2):
        with device(f"/worker:{i}" if pinned else "cpu"):
            w = variable(init.zeros((256, 1024)), name=f"w{i}")
            sums.append(FUNCTIONS["sum"](FUNCTIONS["tanh"](FUNCTIONS["matmul"](x, w))))
    return optimize(Graph([sums[0] + sums[1]]))


def make_plan(
    deviation: float | None,
    links: dict[str, Any] | None = None,
    graph: Graph | None = None,
    cluster: Cluster = TWO,
    **options: Any,
) -> Plan:
    graph = towers() if graph is None else graph
    changes = {} if deviation is None else {"scatter": scatter(deviation)}
    profiles = {worker.index: profile(links, **changes) for worker in cluster.workers}
    shapes: dict[Node, tuple[int, ...]] = {
        node: tuple(int(s) for s in node.specs[0].shape) for node in graph.placeholders
    }
    return plan_graph(graph, cluster, shapes, bind(graph, shapes), profiles=profiles, **options)


def list_used_devices(made: Plan) -> set[str]:
    return {node.device for node in made.nodes if node.finish > node.start} - {"/client"}


def best_single(made: Plan) -> float:
    return min(v for name, v in made.baselines.items() if name.startswith("one device"))


# Intervals ------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.floats(0.01, 2.0), st.sampled_from(["greedy", "round_robin", "single"]))
def test_intervals_contain_what_they_are_about(deviation: float, placer: str) -> None:
    made = make_plan(deviation, placer=placer)
    assert made.low is not None and made.high is not None
    assert made.low < made.makespan < made.high
    timed = [node for node in made.nodes if node.finish > node.start]
    assert timed
    for node in timed:
        assert node.low is not None and node.high is not None and node.basis
        assert node.low <= (node.finish - node.start) * (1 + 1e-9)
        assert node.high >= (node.finish - node.start) * (1 - 1e-9)


def test_what_takes_no_time_has_no_interval() -> None:
    made = make_plan(SURE)
    assert all(
        node.low is None and not node.basis for node in made.nodes if node.finish == node.start
    )


def test_the_less_calibration_is_sure_the_wider_is_the_step() -> None:
    widths = []
    for deviation in (0.01, 0.1, 0.5):
        made = make_plan(deviation, placer="single")
        assert made.low is not None and made.high is not None
        widths.append(made.high / made.low)
    assert widths == sorted(widths) and widths[0] < widths[-1]


def test_traced_steps_narrow_the_interval_of_nodes_and_of_the_step() -> None:
    graph = towers()
    times, learned = NodeTimes(graph, TWO, {}), TraceCorrections()
    name = next(n.name for n in make_plan(UNSURE, graph=graph).nodes if n.op == "matmul")
    before = make_plan(UNSURE, graph=graph, placer="single")
    for node in times.nodes:
        if node.op.name not in ("placeholder", "variable"):
            bucket = times.bucket(node, device_classes(TWO)[TWO.devices[0]], False, 1e-4)
            for _ in range(9):
                learned.observe(bucket, 1e-4, 1e-4)
    after = make_plan(UNSURE, graph=graph, placer="single", learned=learned)
    told = after.explain(name)
    assert "from calibration of similar ops" in before.explain(name)
    assert "observations in traced steps" in told
    assert None not in (before.low, before.high, after.low, after.high)
    assert after.high / after.low < before.high / before.low  # type: ignore[operator]


@pytest.mark.parametrize("cluster", ["described", "older"])
def test_without_a_measured_scatter_there_is_no_interval(cluster: str) -> None:
    made = make_plan(None)
    if cluster == "described":
        described = Cluster.hypothetical(
            2, ("cpu:0",), flops=1e11, bandwidth=1e10, memory=1 << 30, link_latency=1e-5,
            link_bandwidth=1e9,
        )  # fmt: skip
        made = make_plan(None, cluster=described)
    assert (made.low, made.high, made.rival, made.no_gain) == (None, None, None, "")
    assert all(node.low is None and node.basis == "" for node in made.nodes)
    assert " to " not in str(made.report()).splitlines()[0]


# Gains ----------------------------------------------------------------------------------------


def test_several_devices_are_taken_where_they_surely_gain() -> None:
    made = make_plan(SURE)
    assert list_used_devices(made) == set(TWO.devices)
    assert made.rival is not None and made.rival.where == ON_ONE
    assert made.rival.seconds == pytest.approx(best_single(made))
    assert made.no_gain == ""
    assert "no gain expected" not in str(made) + str(made.report())


@pytest.mark.parametrize("placer", ["greedy", "auto"])
def test_one_device_is_taken_where_the_gain_may_be_chance(placer: str) -> None:
    sure = make_plan(SURE, links=CLOSE, placer=placer)
    assert list_used_devices(sure) == set(TWO.devices)  # as without any uncertainty
    assert list_used_devices(make_plan(None, links=CLOSE, placer=placer)) == set(TWO.devices)
    made = make_plan(UNSURE, links=CLOSE, placer=placer)
    assert len(list_used_devices(made)) == 1
    assert made.makespan == pytest.approx(best_single(made))
    assert made.rival is not None and made.rival.seconds < made.makespan
    assert made.no_gain.startswith("no gain expected: ")
    assert made.no_gain.endswith(" over 2 devices")


def test_a_gain_of_equal_nodes_is_sure_however_unsure_their_times_are() -> None:
    """Half of the same nodes are left out: only what is new can take the gain away."""
    made = make_plan(0.5, links={"process": [1e-9, 1e12], "client": [1e-9, 1e12]})
    assert list_used_devices(made) == set(TWO.devices) and made.no_gain == ""


@pytest.mark.parametrize("placer", ["round_robin", "heft"])
def test_other_placers_are_taken_at_their_word_and_told(placer: str) -> None:
    made = make_plan(UNSURE, links={"process": [1e-2, 1e6]}, placer="round_robin")
    assert list_used_devices(made) == set(TWO.devices)
    assert made.no_gain.endswith(ON_ONE)


def test_pinned_placements_are_untouched() -> None:
    made = make_plan(UNSURE, links=CLOSE, graph=towers(pinned=True))
    assert list_used_devices(made) == set(TWO.devices)
    assert made.no_gain == ""  # no single device may run it


def test_placements_that_memory_forces_are_untouched() -> None:
    workers = TWO.workers
    scarce = replace(
        TWO,
        workers=tuple(
            replace(w, devices=tuple(replace(d, memory=1_700_000) for d in w.devices))
            for w in workers
        ),
    )
    made = make_plan(UNSURE, links=CLOSE, cluster=scarce)
    assert not [name for name in made.baselines if name.startswith("one device")]
    assert list_used_devices(made) == set(TWO.devices) and made.no_gain == ""


# What is told ---------------------------------------------------------------------------------


def doubtful() -> Plan:
    return make_plan(UNSURE, links=CLOSE)


def test_reports_explanations_and_pages_tell_the_interval_and_the_doubt() -> None:
    made = doubtful()
    name = next(node.name for node in made.nodes if node.op == "matmul")
    for text in (str(made), str(made.report()), made.explain(name)):
        assert made.no_gain in text
    assert "predicted step: " in str(made.report()) and " ms (" in str(made.report())
    assert "calibration of similar ops" in made.explain(name)
    tiles = {title: (number, remark) for title, number, remark in headlines(made)}
    number, remark = tiles["No gain expected"]
    assert "±" in number and remark.startswith("here, ") and "over 2 devices" in remark
    assert " in 4 of 5 cases" in tiles["Predicted step"][1]
    svg = made._repr_html_()
    assert "No gain expected" in svg and "known from: calibration of similar ops" in svg


def test_a_move_that_gains_less_than_the_interval_is_told_as_no_gain() -> None:
    made = make_plan(UNSURE, placer="round_robin")

    def gains(width: float | None) -> list[str]:
        """Return what is told of moves that save time, with a step known to a share of it."""
        ends = (None, None) if width is None else (1 - width, 1 + width)
        low, high = (None if end is None else end * made.makespan for end in ends)
        plan = replace(made, low=low, high=high)
        told = "\n".join(plan.explain(node.name) for node in plan.nodes).splitlines()
        assert not [line for line in told if "(+" in line and ": no gain" in line]
        return [line for line in told if " to compute" in line and "(-" in line]

    assert gains(0.9)
    assert all(": no gain expected" in line for line in gains(0.9))
    for width in (1e-9, None):
        assert not [line for line in gains(width) if ": no gain expected" in line]


def test_the_data_of_the_page_holds_the_interval_of_each_node() -> None:
    made = doubtful()
    nodes = payload(made)["nodes"]
    for i, name in enumerate(nodes["name"]):
        node = made.by_name[name]
        told = nodes["low"][i], nodes["high"][i], nodes["bases"][nodes["basis"][i]]
        if node.low is None:
            assert told == (-1, -1, "")
        else:
            assert told == (pytest.approx(node.low), pytest.approx(node.high), node.basis)


def test_the_page_tells_the_doubt_without_a_script() -> None:
    pytest.importorskip("bokeh")
    page = render(doubtful())
    assert "<h3>No gain expected</h3>" in page and "over 2 devices" in page


def test_replanning_tells_the_doubt_only_if_there_is_one() -> None:
    doubt = doubtful().no_gain
    assert str(Replanned((), 1e-3, 1e-3, doubt)).endswith(f"predicted; {doubt}")
    assert str(Replanned(("w",), 2e-3, 1e-3, doubt)).endswith(f"; {doubt}")
    assert "gain" not in str(Replanned((), 1e-3, 1e-3))


# On disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("deviation", [None, SURE, UNSURE])
def test_uncertainty_survives_the_disk(deviation: float | None, tmp_path: Path) -> None:
    made = make_plan(deviation, links=CLOSE)
    loaded = Plan.load(made.save(tmp_path / "plan.json"))
    assert loaded == made and loaded.no_gain == made.no_gain
    assert str(loaded.report()) == str(made.report())


def test_plans_that_were_saved_without_uncertainty_are_read(tmp_path: Path) -> None:
    path = doubtful().save(tmp_path / "plan.json")
    data = json.loads(path.read_text())
    for name in ("low", "high", "rival"):
        del data[name]
    for node in data["nodes"]:
        for name in ("low", "high", "basis"):
            del node[name]
    path.write_text(json.dumps(data))
    older = Plan.load(path)
    assert older.low is None and older.no_gain == ""
    assert older.explain(older.nodes[-1].name)

"""Plans: what they decide, that they tell why, and that they survive the disk."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphflow import init
from graphflow.errors import (
    ClusterError,
    DeviceError,
    FetchError,
    MemoryLimitError,
    PlacementError,
    PlanError,
    ShapeError,
)
from graphflow.frontend.builders import assign, constant, placeholder, variable
from graphflow.frontend.pytree import bind
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, device
from graphflow.passes import optimize
from graphflow.placement.calibration.cluster_rates import device_classes
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.node_times import NodeTimes
from graphflow.placement.cost_model.problem_builder import build_problems
from graphflow.placement.placers.auto import Auto
from graphflow.placement.plans.building.plan_builder import plan_graph
from graphflow.placement.plans.building.plan_fetches import plan
from graphflow.placement.plans.plan import Plan, devices_of, order_of
from graphflow.placement.plans.plan_records import Interval, MeasuredSteps
from graphflow.runtime.partitioning.partition import partition
from tests.placement.speeds import profile

TWO = Cluster.local(workers=2, threads=1)
SLOW = {"process": [0.1, 1e6]}


@pytest.fixture(autouse=True)
def fixed_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning reads a made-up profile: nothing is measured."""
    monkeypatch.setattr(
        "graphflow.placement.calibration.calibrate.profile", lambda *a, **k: profile()
    )


def two_towers(width: int = 1024) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A loss of two equal towers, and what trains them."""
    from graphflow.optim import SGD

    x = placeholder("float32", ("n", 32), name="x")
    outputs = []
    for i in range(2):
        w = variable(init.normal((32, width)), name=f"w{i}")
        v = variable(init.normal((width, width)), name=f"v{i}")
        hidden = FUNCTIONS["tanh"](FUNCTIONS["matmul"](x, w))
        outputs.append(FUNCTIONS["sum"](FUNCTIONS["matmul"](hidden, v), axis=1))
    loss = FUNCTIONS["sum"](outputs[0] + outputs[1], name="loss")
    return x, loss, [loss, SGD(0.1).minimize(loss)]


def make_plan(cluster: Cluster = TWO, links: dict[str, Any] | None = None, **options: Any) -> Plan:
    x, _, fetches = two_towers()
    graph = optimize(Graph(fetches))
    shapes: dict[Node, tuple[int, ...]] = {x.node: (64, 32)}
    profiles = {worker.index: profile(links) for worker in cluster.workers}
    return plan_graph(graph, cluster, shapes, bind(graph, shapes), profiles=profiles, **options)


def _list_used_devices(made: Plan) -> set[str]:
    return {node.device for node in made.nodes if node.finish > node.start}


# Decisions ------------------------------------------------------------------------------------


def test_towers_are_shared_out_where_that_is_predicted_to_pay() -> None:
    made = make_plan()
    assert _list_used_devices(made) == set(TWO.devices)
    best = min(v for name, v in made.baselines.items() if name.startswith("one device"))
    assert made.makespan < 0.75 * best
    for i in range(2):
        team = {n.device for n in made.nodes if n.name in (f"w{i}", f"v{i}") or n.op == "assign"}
        assert team <= set(TWO.devices)


def test_towers_stay_together_where_transfers_are_dear() -> None:
    made = make_plan(links=SLOW)
    assert len(_list_used_devices(made)) == 1
    assert {t.target for t in made.transfers} <= {*_list_used_devices(made), "/client"}
    assert made.makespan == min(made.baselines.values())


@pytest.mark.parametrize("placer", ["greedy", "auto"])
def test_a_plan_is_never_slower_than_one_device_or_round_robin(placer: str) -> None:
    for links in (None, SLOW, {"process": [1e-3, 1e8]}):
        made = make_plan(links=links, placer=placer)
        assert made.makespan <= min(made.baselines.values()) * (1 + 1e-9)


@pytest.mark.parametrize("placer", ["greedy", "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_no_lesson_of_a_busy_machine_makes_a_plan_slower_than_a_baseline(
    placer: str, seed: int
) -> None:
    random, learned = np.random.default_rng(seed), TraceCorrections()
    x, _, fetches = two_towers()
    graph = optimize(Graph(fetches))
    sizes = bind(graph, {x.node: (64, 32)})
    predictions = NodeTimes(graph, TWO, sizes)
    for node in predictions.nodes:
        if node.op.name not in ("placeholder", "variable"):
            for busy in (False, True):
                bucket = predictions.bucket(node, device_classes(TWO)[TWO.devices[0]], busy, 1e-4)
                learned.observe(bucket, 1e-4 * random.choice([0.3, 1.0, 4.0]), 1e-4)
    for lone in (1, 1000):  # a step on one worker costs nothing on top, or by far the most
        learned.observe_step("process", 1, 1e-3, 1e-3 * lone)
        learned.observe_step("process", 2, 1e-3, 1e-3)
        made = make_plan(links={"process": [1e-2, 1e8]}, placer=placer, learned=learned)
        assert made.makespan <= min(made.baselines.values()) * (1 + 1e-9)
    quiet, busy = build_problems(graph, TWO, sizes, learned=learned)
    assert (quiet.problem.compute <= busy.problem.compute).all()


def test_with_pins_on_several_devices_baselines_have_busy_neighbours_too() -> None:
    for pinned in itertools.product(("/worker:0", "/worker:1", "cpu"), repeat=4):
        graph = optimize(Graph(_build_pinned_sums(*pinned)))
        made = plan_graph(graph, TWO, {}, {}, profiles={0: profile(), 1: profile()})
        assert made.makespan <= min(made.baselines.values()) * (1 + 1e-9), pinned


def _build_pinned_sums(*names: str) -> list[Tensor]:
    sums = []
    for i, name in enumerate(names):
        with device(name):
            w = variable(init.zeros((64, 64)), name=f"w{i}")
            sums.append(FUNCTIONS["sum"](FUNCTIONS["matmul"](w, w)))
    return sums


def test_on_one_device_the_step_takes_the_sum_of_its_nodes() -> None:
    made = make_plan(Cluster.here(threads=1))
    assert made.makespan == pytest.approx(sum(n.finish - n.start for n in made.nodes))
    assert made.makespan == pytest.approx(
        sum(n.candidates.get("/worker:0/cpu:0", 0.0) for n in made.nodes)
    )
    assert all(n.why in ("the only device", "fed by the client") for n in made.nodes)


def test_one_device_is_predicted_without_a_busy_neighbour() -> None:
    alone = make_plan(Cluster.local(workers=1, threads=1))
    assert make_plan().baselines["one device: /worker:0/cpu:0"] == pytest.approx(alone.makespan)


def test_planning_twice_gives_the_same_plan() -> None:
    def rounds(made: Plan) -> str:
        return str(dataclasses.asdict(dataclasses.replace(made, model=None, nodes=())))

    first, second = make_plan(), make_plan()
    assert rounds(first) == rounds(second)
    assert [dataclasses.replace(n, location="") for n in first.nodes] == [
        dataclasses.replace(n, location="") for n in second.nodes
    ]


def test_other_placers_are_taken_at_their_word() -> None:
    made = make_plan(links=SLOW, placer="round_robin")
    assert _list_used_devices(made) == set(TWO.devices)
    assert made.makespan == pytest.approx(made.baselines["round robin"])
    with pytest.raises(PlacementError, match="greedy"):
        make_plan(placer="gready")


def test_pins_and_homes_are_kept() -> None:
    x = placeholder("float32", (8, 8), name="x")
    w = variable(init.zeros((8, 8)), name="w")
    with device("/worker:1"):
        y = FUNCTIONS["matmul"](x, w)
    update = assign(w, w * 0.5, name="update")
    graph = optimize(Graph([y, update]))
    made = plan_graph(
        graph, TWO, {x.node: (8, 8)}, {}, homes={w.node: TWO.devices[0]}, profiles={0: profile()}
    )
    assert made.placement["matmul"] == "/worker:1/cpu:0"
    assert made.placement["w"] == made.placement["update"] == "/worker:0/cpu:0"
    whys = {node.name: node.why for node in made.nodes}
    assert whys["matmul"] == "pinned by gf.device('/worker:1')"
    assert whys["w"] == "lives here already"
    assert whys["update"] == "beside its variable 'w'"


def test_one_device_is_compared_with_as_if_it_held_the_variables_too() -> None:
    x, _, fetches = two_towers()
    graph = optimize(Graph(fetches))
    shapes: dict[Node, tuple[int, ...]] = {x.node: (64, 32)}
    options: dict[str, Any] = {"profiles": {0: profile(), 1: profile()}}
    free = plan_graph(graph, TWO, shapes, bind(graph, shapes), **options)
    homes = {
        node: device
        for node, device in devices_of(free, graph).items()
        if node.op.name == "variable"
    }
    settled = plan_graph(graph, TWO, shapes, bind(graph, shapes), homes=homes, **options)
    assert settled.baselines == free.baselines
    assert settled.placement == free.placement


def test_names_with_colons_are_names() -> None:
    with device("/worker:0"):
        w = variable(init.zeros((8, 8)), name="a:1")
    with device("/worker:1"):
        made = plan(FUNCTIONS["exp"](w), _make_small_cluster(1 << 20))
    assert made.to_networkx().edges["a:1", "exp"]["transfer"] > 0
    assert "waited for: input 'a:1' from /worker:0/cpu:0" in made.explain("exp")


def test_a_gpu_pin_without_a_gpu_is_an_error_of_planning() -> None:
    x = placeholder("float32", (8, 8), name="x")
    with device("gpu:0"):
        y = x + 1
    with pytest.raises(DeviceError, match=r"add 'add' \(made at .*test_plan.py:\d+\).*'gpu:0'"):
        plan(y, TWO)


def _make_small_cluster(memory: int, workers: int = 2) -> Cluster:
    return Cluster.hypothetical(
        workers, ("cpu:0",), flops=1e11, bandwidth=1e10, memory=memory, link_latency=1e-5,
        link_bandwidth=1e9,
    )  # fmt: skip


def _weights(count: int = 4) -> list[Tensor]:
    ws = [variable(init.zeros((256, 256)), name=f"big{i}") for i in range(count)]
    return [FUNCTIONS["sum"](w) for w in ws]


def test_variables_that_no_device_holds_alone_are_spread() -> None:
    made = plan(_weights(), _make_small_cluster(600 << 10))
    homes = [made.placement[f"big{i}"] for i in range(4)]
    assert sorted(map(homes.count, set(homes))) == [2, 2]
    assert all(peak <= 600 << 10 for peak in made.peak_memory.values())


def test_baselines_that_do_not_fit_in_memory_are_not_compared_with() -> None:
    made = plan(_weights(), _make_small_cluster(600 << 10))
    assert not [name for name in made.baselines if name.startswith("one device")]
    assert "one device: /worker:0/cpu:0: does not fit in memory" in str(made)
    assert "one device: /worker:0/cpu:0" in plan(_weights(), _make_small_cluster(8 << 20)).baselines


def test_a_graph_that_fits_nowhere_is_an_error_with_names_lines_sizes_and_a_remedy() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        plan(_weights(), _make_small_cluster(300 << 10))
    told = str(caught.value)
    assert "variable 'big0' 256 KiB (made at" in told and "test_plan.py:" in told
    assert "/worker:1/cpu:0 has 300 KiB" in told
    assert "keep 1 MiB" in told
    assert "smaller batches" in told


def test_sizes_that_no_machine_has_are_too_large_and_no_accident() -> None:
    x = placeholder("float32", (None, 4), name="x")
    total = FUNCTIONS["sum"](x + 1.0)
    with pytest.raises(MemoryLimitError, match="134217728 TiB"):
        plan([total], TWO, shapes={x: (2**62, 4)})
    with pytest.raises(PlanError, match=r"axis 0 is at most 2\*\*63 - 1"):
        plan([total], TWO, shapes={x: (2**63, 4)})
    with pytest.raises(ShapeError, match=r"below 2\*\*63"):
        placeholder("float32", (2**63,))


# What a plan tells ----------------------------------------------------------------------------


def test_placeholders_are_with_the_client_and_constants_and_groups_have_no_place() -> None:
    made = make_plan()
    assert made.placement["x"] == "/client"
    assert {n.op for n in made.nodes}.isdisjoint({"constant", "group"})
    assert set(made.peak_memory) == set(TWO.devices)
    assert made.shapes == {"x": (64, 32)}


def test_nodes_come_in_order_and_devices_do_one_thing_at_a_time() -> None:
    made = make_plan()
    seen: set[str] = set()
    for node in made.nodes:
        assert seen.issuperset(node.inputs)
        seen.add(node.name)
    tracks: dict[str, float] = {}
    for row in made.timeline:
        if row.kind == "compute":
            assert row.start >= tracks.get(row.track, 0.0) - 1e-12
            tracks[row.track] = row.finish
    assert max(tracks.values()) <= made.makespan + 1e-12


def test_transfers_are_numbered_as_the_partition_numbers_its_edges() -> None:
    x, _, fetches = two_towers()
    graph = optimize(Graph(fetches))
    shapes: dict[Node, tuple[int, ...]] = {x.node: (64, 32)}
    made = plan_graph(graph, TWO, shapes, bind(graph, shapes), "round_robin")
    parts = partition(graph, devices_of(made, graph), order_of(made, graph))
    cut = {
        (
            n.attrs["edge"],
            part.graph.names[n].removeprefix("recv/").rpartition("/")[0],
            n.attrs["source"],
            part.device,
        )
        for part in parts.values()
        for n in part.graph.of_op("recv")
    }
    assert cut == {(t.edge, t.tensor, t.source, t.target) for t in made.transfers if t.edge >= 0}
    rest = [t for t in made.transfers if t.edge < 0]
    assert rest and all("/client" in (t.source, t.target) for t in rest)


def test_explaining_tells_place_times_waits_and_what_moving_would_do() -> None:
    made = make_plan()
    name = next(n.name for n in made.nodes if n.op == "matmul" and n.device == TWO.devices[1])
    told = made.explain(name)
    assert f"{name}: matmul on {TWO.devices[1]}, made at test_plan.py:" in told
    assert "why here:" in told and "waited for:" in told
    assert f"on {TWO.devices[0]}:" in told and "the step would take" in told


def test_explaining_a_pinned_node_tells_what_took_the_choice_away() -> None:
    x = placeholder("float32", (8, 8), name="x")
    with device("/worker:1"):
        y = FUNCTIONS["matmul"](x, x)
    told = plan(y, TWO).explain("matmul")
    assert "on /worker:0/cpu:0: not possible (pinned by gf.device('/worker:1'))" in told


def test_every_node_can_be_explained() -> None:
    made = make_plan()
    for node in made.nodes:
        assert made.explain(node.name).startswith(f"{node.name}: {node.op} on {node.device}")
        assert node.why


def test_an_unknown_name_is_an_error_with_near_ones() -> None:
    with pytest.raises(PlanError, match=r"'matmull'.*did you mean.*'matmul'"):
        make_plan().explain("matmull")


def test_comparing_plans_lists_what_moved() -> None:
    made, other = make_plan(), make_plan(links=SLOW)
    told = made.compare(other)
    moved = [n for n, d in made.placement.items() if other.placement[n] != d]
    assert f"{len(moved)} of {len(made.nodes)} nodes" in told
    assert made.compare(made).count("0 of ") == 1


def test_a_plan_becomes_a_networkx_graph() -> None:
    made = make_plan()
    graph = made.to_networkx()
    assert set(graph.nodes) == set(made.placement)
    assert graph.nodes["x"]["device"] == "/client"
    assert sum(1 for *_, data in graph.edges(data=True) if data["transfer"] > 0) >= 1
    assert graph.edges["x", next(iter(graph.successors("x")))]["bytes"] == 64 * 32 * 4


def test_the_short_text_names_devices_and_baselines() -> None:
    text = str(make_plan())
    assert all(name in text for name in (*TWO.devices, "round robin", "one device"))


def test_of_many_devices_without_nodes_only_the_number_is_told(tmp_path: Path) -> None:
    x = placeholder("float32", (8, 8), name="x")
    made = plan([x @ x], Cluster.hypothetical("64xh100"))
    page = made.save(tmp_path / "plan.html").read_text()
    table = page[page.index("<tr><td>") : page.index("</table>")]
    for text in (str(made), str(made.report()), made._repr_html_(), table):
        assert made.placement["matmul"] in text and "63 more devices have no nodes" in text
    assert made._repr_html_().count("peak memory") == 1
    assert not [text for text in (str(made), str(made.report()), table) if "gpu:63" in text]


# Disk -----------------------------------------------------------------------------------------


def test_a_saved_plan_equals_the_loaded_one_to_the_last_bit(tmp_path: Path) -> None:
    measured = MeasuredSteps(0.1, (Interval("/worker:0/cpu:0", "n", 0.1 + 0.2, 1 / 3, "compute"),),
                        {"/worker:0/cpu:0": 7}, 3)  # fmt: skip
    made = make_plan().with_measured(measured)
    loaded = Plan.load(made.save(tmp_path / "plan.json"))
    assert loaded == made
    assert loaded.timeline == made.timeline
    name = made.nodes[-1].name
    assert loaded.explain(name) == made.explain(name)
    assert loaded.save(tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()


def test_nodes_come_after_their_inputs_whatever_the_plan_says_when_they_begin() -> None:
    x, _, fetches = two_towers()
    graph = optimize(Graph(fetches))
    shapes: dict[Node, tuple[int, ...]] = {x.node: (64, 32)}
    made = plan_graph(graph, TWO, shapes, bind(graph, shapes))
    order = order_of(made, graph)
    assert [graph.names[n] for n in order if graph.names[n] in made.by_name] == [
        n.name for n in made.nodes
    ]
    backwards = dataclasses.replace(made, nodes=made.nodes[::-1])
    found = order_of(backwards, graph)
    assert sorted(found, key=order.index) == order
    place = {node: i for i, node in enumerate(found)}
    assert all(place[t.node] < place[n] for n in found for t in n.inputs if t.node in place)


def test_a_loaded_plan_places_the_same_graph_and_no_other(tmp_path: Path) -> None:
    x, _, fetches = two_towers()
    graph = optimize(Graph(fetches))
    shapes: dict[Node, tuple[int, ...]] = {x.node: (64, 32)}
    made = plan_graph(graph, TWO, shapes, bind(graph, shapes))
    loaded = Plan.load(made.save(tmp_path / "plan.json"))
    _, _, again = two_towers()
    rebuilt = optimize(Graph(again))
    devices = devices_of(loaded, rebuilt)
    assert {rebuilt.names[n]: d for n, d in devices.items()} == {
        n.name: n.device for n in made.nodes if n.device != "/client"
    }
    assert len(order_of(loaded, rebuilt)) == len(rebuilt.nodes)
    _, _, other = two_towers(width=512)
    with pytest.raises(PlanError, match="another graph"):
        devices_of(loaded, optimize(Graph(other)))
    with pytest.raises(PlanError, match="another graph"):
        order_of(loaded, optimize(Graph(again[:1])))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "is no plan"),
        ('{"format": "graphflow plan", "version": 9}', "version 9"),
        ('{"format": "graphflow plan", "version": 1}', "is missing"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=told):
        Plan.load(path)


def _list_damaged_plans(data: dict[str, Any]) -> list[dict[str, Any]]:
    nodes, model = data["nodes"], data["model"]
    return [
        {**data, "nodes": [{**nodes[0], "device": 3}, *nodes[1:]]},
        {**data, "makespan": "soon"},
        {**data, "placer": list(range(10_000))},
        {**data, "cluster": {"workers": []}},
        {**data, "peak_memory": 5},
        {**data, "model": {**model, "order": model["order"][:-1]}},
        {**data, "model": {**model, "device": [99] * len(model["device"])}},
        {**data, "transfers": [3]},
        {k: v for k, v in data.items() if k != "model"},
    ]


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    path = make_plan().save(tmp_path / "plan.json")
    for damaged in _list_damaged_plans(json.loads(path.read_text())):
        path.write_text(json.dumps(damaged))
        with pytest.raises(PlanError, match="damaged") as refused:
            Plan.load(path)
        assert len(str(refused.value)) < 1000


def test_a_missing_file_and_an_unknown_suffix_are_errors(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match=r"\.html, \.svg, \.json, \.dot"):
        make_plan().save(tmp_path / "plan.pdf")
    with pytest.raises(PlanError, match="cannot write"):
        make_plan().save(tmp_path / "none" / "plan.json")


# gf.plan --------------------------------------------------------------------------------------


def test_plan_takes_nested_fetches_and_shapes_of_what_is_unknown() -> None:
    x = placeholder("float32", ("n", 4), name="x")
    y = placeholder("float32", (4,), name="y")
    made = plan({"a": [x * 2, (y + 1,)]}, shapes={x: (3, 4)})
    assert made.shapes == {"x": (3, 4), "y": (4,)}
    assert made.by_name["multiply"].output == "float32(3, 4)"
    assert made.by_name["multiply"].bytes == 48


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        (None, r"'x' .*takes \(n, 4\): give its sizes"),
        ({"x": (3, 4)}, "no placeholder"),
        ([3, 4], "are a dict"),
    ],
)
def test_missing_and_misplaced_shapes_are_errors(shapes: Any, told: str) -> None:
    x = placeholder("float32", ("n", 4), name="x")
    with pytest.raises(PlanError, match=told):
        plan(x * 2, shapes=shapes)


def test_wrong_shapes_are_errors_that_name_the_placeholder() -> None:
    x = placeholder("float32", ("n", 4), name="x")
    other = placeholder("float32", ("n", 4), name="other")
    y = x * 2
    for shapes, told in (
        ({x: (3, 5)}, "axis 1 must be 4"),
        ({x: (3,)}, "rank 2"),
        ({x: "three"}, "tuple of ints"),
        ({x: (3, 4), other: (3, 4)}, "nothing fetched depends on it"),
        ({x: (3, 4), y: (3, 4)}, "no placeholder"),
    ):
        with pytest.raises(PlanError, match=told):
            plan(y, shapes=shapes)


def test_fetches_and_clusters_that_are_none_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FetchError):
        plan("loss")
    x = placeholder("float32", (4,), name="x")
    with pytest.raises(ClusterError):
        plan(x + 1, tmp_path / "none.toml")
    with pytest.raises(PlanError, match=r"gf\.Cluster or the path of a file, not 5"):
        plan(x + 1, 5)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"another gf\.Plan, not None"):
        plan(x + 1).compare(None)  # type: ignore[arg-type]


def test_a_graph_without_work_has_a_plan() -> None:
    x = placeholder("float32", (4,), name="x")
    made = plan([x, constant(1.0)], TWO)
    assert made.makespan == 0.0
    assert made.placement == {"x": "/client"}
    w = variable(np.zeros(3, "float32"), name="w")
    only = plan(REGISTRY["group"](assign(w, w)), TWO)
    assert set(only.placement) == {"w", "assign"}


# A clock --------------------------------------------------------------------------------------


def test_a_plan_made_against_a_clock_says_so_and_keeps_saying_so(tmp_path: Path) -> None:
    limited = make_plan(placer=Auto(seconds=0.01))
    assert not limited.reproducible and "not reproducible" in str(limited)
    read = Plan.load(limited.save(tmp_path / "plan.json"))
    assert not read.reproducible and read == limited
    free = make_plan(placer="auto")
    assert free.reproducible and "reproducible" not in str(free)
    older = json.loads(free.save(tmp_path / "free.json").read_text())
    del older["reproducible"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert Plan.load(tmp_path / "older.json").reproducible

"""Learning: traced steps correct a calibration that is wrong, and a step's own cost is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.frontend.pytree import bind
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ops.kernels.jit.object_cache import cache_folder
from graphflow.passes import optimize
from graphflow.placement.calibration import calibrate, profile_file
from graphflow.placement.calibration.calibrate import step_overhead
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.calibration.worker_speeds import with_speeds
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.trace_observations import trace_observations
from graphflow.placement.plans.building.plan_builder import plan_graph
from graphflow.placement.plans.plan import Plan, devices_of
from graphflow.planning import planner
from graphflow.planning.feedback.node_observations import observe_steps
from graphflow.planning.feedback.trace_feedback import learn
from graphflow.planning.trials.step_cost import (
    client_link,
    measure_client,
    probe_fetches,
    step_cost,
)
from graphflow.runtime.client import cluster_survey as survey
from graphflow.runtime.client.cluster_survey import ClusterSurvey
from tests.placement.speeds import profile

ONE, TWO = Cluster.here(threads=1), Cluster.local(workers=2, threads=1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is measured, not even how busy the machine is, and nothing is kept where users keep
    it."""
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "profile", lambda *a, **k: profile())
    monkeypatch.setattr(survey, "profile", profile)
    monkeypatch.setattr(planner, "speeds_of_workers", lambda *a: {})
    yield


def mlp() -> tuple[Tensor, list[Tensor]]:
    x = gf.placeholder("float32", (None, 96), name="x")
    h = x
    for i in range(3):
        h = gf.nn.relu(h @ gf.variable(np.eye(96, dtype="float32"), name=f"w{i}"))
    loss = gf.mean(gf.square(h))
    return x, [loss, gf.optim.SGD(0.1, momentum=0.9).minimize(loss)]


def recurrent() -> tuple[Tensor, list[Tensor]]:
    x = gf.placeholder("float32", (None, 16, 96), name="x")
    w = gf.variable(np.eye(96, dtype="float32"), name="w")

    def body(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = gf.tanh(carry @ w + row)
        return new, new

    last, rows = gf.scan(body, gf.zeros((16, 96)), x)
    return x, [gf.sum(last), gf.mean(rows)]


def scale_machine(factor: float) -> dict[str, Any]:
    """The made-up machine, all of it too fast by a factor."""
    right = profile()["devices"]["cpu"]

    def faster(points: Sequence[Sequence[float]]) -> list[list[float]]:
        return [[amount, seconds / factor] for amount, seconds in points]

    def entries(known: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        return {
            name: {**e, "launch": e["launch"] / factor, "rate": e["rate"] * factor}
            for name, e in known.items()
        }

    return profile(
        links={"process": [1e-4 / factor, 1e9 * factor], "thread": [1e-5 / factor, None]},
        launch=right["launch"] / factor,
        traffic=faster(right["traffic"]),
        matmul={name: faster(points) for name, points in right["matmul"].items()},
        ops=entries(right["ops"]),
        classes=entries(right["classes"]),
    )


def trace_fetches(
    model: Callable[[], tuple[Tensor, list[Tensor]]], size: int, cluster: Cluster
) -> Any:
    """A set of fetches whose traced steps took what the right profile says."""
    x, fetches = model()
    source = Graph(fetches)
    compiled = CompiledFetches(tuple(fetches), source, optimize(source))
    shapes: dict[Node, tuple[int, ...]] = {
        x.node: (size, *(s for s in x.shape[1:] if isinstance(s, int)))
    }
    compiled.sizes = shapes
    bindings = bind(source, shapes)
    truth = plan_graph(compiled.graph, cluster, shapes, bindings)
    compiled.devices = devices_of(truth, compiled.graph)
    spans = [
        (n.device, n.name, round(n.start * 1e9), round(n.finish * 1e9))
        for n in truth.nodes
        if n.finish > n.start and n.op != "assign"
    ]
    edges = {}
    for t in truth.transfers:
        if t.edge >= 0:
            edges[t.edge] = (t.tensor, t.source, t.target, t.bytes)
            took = (t.start, t.finish)
            for track, at in zip(("departure", "arrival"), took, strict=True):
                spans.append((track, str(t.edge), round(at * 1e9), round(at * 1e9)))
    for number in range(3):
        compiled.trace.add_step(number, 0, round(truth.makespan * 1e9), spans, edges)
        compiled.traced.append(bindings)

    def make_plan(learned: TraceCorrections, profiles: Mapping[int, Any]) -> Plan:
        return plan_graph(
            compiled.graph, cluster, shapes, bindings, profiles=profiles, learned=learned
        )

    return compiled, truth, make_plan


@pytest.mark.parametrize("cluster", [ONE, TWO], ids=["embedded", "two workers"])
@pytest.mark.parametrize(("model", "size"), [(mlp, 4), (mlp, 512), (recurrent, 20)])
@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_calibration_wrong_by_three_is_put_right_by_traced_steps(
    cluster: Cluster, model: Any, size: int, factor: float
) -> None:
    compiled, truth, planned = trace_fetches(model, size, cluster)
    profiles = {worker.index: scale_machine(factor) for worker in cluster.workers}
    before = planned(TraceCorrections(), profiles).makespan
    known = TraceCorrections()
    learn(known, cluster, ClusterSurvey(profiles), compiled)
    after = planned(known, profiles).makespan
    assert abs(after - truth.makespan) < abs(before - truth.makespan)
    assert after == pytest.approx(truth.makespan, rel=0.2)


def test_a_node_with_bodies_is_one_op_with_a_bucket_of_its_own() -> None:
    compiled, _, _ = trace_fetches(recurrent, 20, ONE)
    known = TraceCorrections()
    learn(known, ONE, ClusterSurvey({0: scale_machine(3.0)}), compiled)
    scans = [b for b in known._nodes if b.op == "scan"]
    assert len(scans) == 1
    assert known.factor(scans[0]) == pytest.approx(3.0, rel=0.1)


def test_a_worker_that_traces_find_slow_teaches_its_speed_and_nothing_else() -> None:
    def towers() -> tuple[Tensor, list[Tensor]]:
        x = gf.placeholder("float32", (None, 256), name="x")
        sums = []
        for i in range(8):
            w = gf.variable(np.eye(256, dtype="float32"), name=f"w{i}")
            sums.append(gf.sum(gf.tanh(x @ w)))
        return x, sums

    compiled, truth, planned = trace_fetches(towers, 512, with_speeds(TWO, {1: 0.5}))
    assert len({n.device for n in truth.nodes if n.op == "matmul"}) == 2
    known = TraceCorrections()
    assert learn(known, TWO, ClusterSurvey(), compiled) == {0: 1.0, 1: pytest.approx(0.5, rel=0.1)}
    taught = planned(known, {0: profile(), 1: profile()})
    assert taught.makespan == pytest.approx(truth.makespan, rel=0.1)
    for bucket in known._nodes:
        assert known.factor(bucket) == pytest.approx(1.0, rel=0.1)


# What a step costs ----------------------------------------------------------------------------


def test_each_further_worker_costs_what_the_second_did() -> None:
    assert [step_overhead((1.0, 1.5), units) for units in (0, 1, 2, 4)] == [1.0, 1.0, 1.5, 2.5]


def devices_that_compute(compiled: CompiledFetches) -> set[str]:
    return {d for n, d in compiled.devices.items() if n.op.name == "add"}


def test_what_links_take_is_not_counted_again_in_a_steps_own_cost() -> None:
    asked = []

    def time_echo(compiled: CompiledFetches, node: Node, shape: tuple[int, ...]) -> float:
        asked.append(devices_that_compute(compiled))
        return 1e-3 * len(asked[-1])

    one, two = step_cost(TWO, time_echo, 2e-4)
    assert asked == [set(TWO.devices[:1]), set(TWO.devices)]
    assert (one, two) == pytest.approx((1e-3 - 2e-4, 2e-3 - 2e-4))  # twice the client's latency
    assert step_cost(ONE, time_echo, 0.0) == pytest.approx((1e-3, 1e-3))


def test_the_clients_link_follows_from_echoed_messages() -> None:
    def time_echo(compiled: CompiledFetches, node: Node, shape: tuple[int, ...]) -> float:
        assert node.specs[0].shape == shape
        return 2 * (1e-4 + 4 * shape[0] / 1e9)  # there and back

    assert client_link(time_echo, TWO.devices[0]) == pytest.approx((1e-4, 1e9))


@pytest.mark.parametrize("keep", [True, False])
def test_a_steps_own_cost_is_kept_with_the_calibration_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    real = {**profile(), "links": {}, "key": profile_file.machine_key()}
    saved: list[Any] = []
    monkeypatch.setattr(calibrate, "profile", lambda *a, **k: saved[-1] if saved else real)
    monkeypatch.setattr(profile_file, "write_json", lambda path, made, indent: saved.append(made))
    times = [1e-4, 2e-4, 4e-4, 5e-3, 6e-3]
    found = measure_client(TWO, ClusterSurvey(), lambda *a: times.pop(0), keep)
    assert not times and found.steps is not None and found.steps[0] < found.steps[1]
    if not keep:  # a worker is slow at the moment: this session alone counts with that
        assert not saved and found.links is not None and len(found.links) == 4
        return
    assert saved[-1]["steps"] == {"process": list(found.steps)}
    assert set(saved[-1]["links"]) == {"client"} and not found.links
    again = measure_client(TWO, ClusterSurvey(), lambda *a: pytest.fail("measured again"), keep)
    assert again == found


def test_a_steps_own_cost_is_part_of_the_prediction_and_of_every_baseline() -> None:
    compiled, bare, _ = trace_fetches(mlp, 64, TWO)
    given = (compiled.graph, TWO, compiled.sizes, bind(compiled.source, compiled.sizes))
    made = plan_graph(*given, steps=(1e-3, 3e-3))
    assert made.overhead in (1e-3, 3e-3)
    assert made.makespan - made.overhead == pytest.approx(made.model.timeline.makespan)
    for name in TWO.devices:
        key = f"one device: {name}"
        assert made.baselines[key] == pytest.approx(bare.baselines[key] + 1e-3)
    assert made.makespan <= min(made.baselines.values()) * (1 + 1e-9)
    assert Plan.load(made.save(Path(cache_folder()) / "p.json")).overhead == made.overhead


def test_a_second_worker_must_save_more_than_it_costs() -> None:
    x = gf.placeholder("float32", (512, 256), name="x")
    fetches = []
    for i in range(2):
        h = x
        for j in range(4):
            h = gf.tanh(h @ gf.variable(np.eye(256, dtype="float32"), name=f"w{i}{j}"))
        fetches.append(gf.sum(h))
    graph = optimize(Graph(fetches))
    shapes: dict[Node, tuple[int, ...]] = {x.node: (512, 256)}
    cheap = plan_graph(graph, TWO, shapes, {}, steps=(1e-5, 2e-5))
    dear = plan_graph(graph, TWO, shapes, {}, steps=(1e-5, 1.0))
    assert len({n.device for n in cheap.nodes if n.finish > n.start}) == 2
    assert len({n.device for n in dear.nodes if n.finish > n.start}) == 1
    assert dear.overhead == 1e-5


@pytest.mark.parametrize(("shape", "fills_cache"), [((3,), False), ((), True)])
def test_probe_steps_run_on_each_device_and_return_what_they_were_fed(
    shape: tuple[int, ...], fills_cache: bool
) -> None:
    compiled, node = probe_fetches(TWO.devices, shape, fills_cache)
    assert set(compiled.devices.values()) == set(TWO.devices)
    assert node.op.name == "placeholder" and len(compiled.outputs) == 2
    with gf.Session(ONE) as s:
        for value in s.run(list(compiled.fetches), {node.outputs[0]: np.zeros(shape, "float32")}):
            assert np.array_equal(value, np.ones(shape))


def test_nodes_of_a_traced_step_take_no_longer_than_an_untraced_step() -> None:
    compiled, truth, planned = trace_fetches(mlp, 64, ONE)
    bindings = bind(compiled.source, compiled.sizes)
    known = trace_observations(compiled.graph, ONE, bindings, compiled.devices)
    took = {n.name: 2 * (n.finish - n.start) for n in truth.nodes if n.name in known}
    learned = TraceCorrections()
    step = truth.makespan - truth.overhead
    assert observe_steps(learned, known, [took] * 3, step) == pytest.approx(step)
    assert planned(learned, {}).makespan == pytest.approx(truth.makespan, rel=0.05)
    free = TraceCorrections()
    assert observe_steps(free, known, [took] * 3, float("inf")) == pytest.approx(sum(took.values()))


def test_a_session_measures_its_steps_without_using_up_any_random_number() -> None:
    draws = gf.random.normal((4,))
    with gf.Session(ONE) as plain:
        expected = [plain.run(draws) for _ in range(3)]
    with gf.Session(ONE) as s:
        seen = [s.run(draws)]
        made = s.plan()
        seen += [s.run(draws), s.run(draws)]
        assert made.overhead > 0
    assert [v.tobytes() for v in seen] == [v.tobytes() for v in expected]


def test_a_traced_block_teaches_the_next_plan_and_the_next_session() -> None:
    x, fetches = mlp()
    feeds = {x: np.ones((8, 96), "float32")}
    with gf.Session(ONE) as s:
        s.run(fetches, feeds)
        naive = s.plan()
        for _ in range(10):  # steps that others have disturbed teach nothing
            with s.trace():
                for _ in range(3):
                    s.run(fetches, feeds)
            assert s._planner.learned
            taught = s._planner.plan(s._steps.last)
            if taught.makespan != naive.makespan:
                break
        assert taught.makespan != naive.makespan
    with gf.Session(ONE) as later:
        later.run(fetches, feeds)
        assert later.plan().makespan - later.plan().overhead == pytest.approx(
            taught.makespan - taught.overhead
        )


def test_a_plan_without_a_session_knows_what_sessions_learned() -> None:
    x, fetches = mlp()
    shapes = {x: (8, 96)}
    naive = gf.plan(fetches, ONE, shapes=shapes)
    with gf.Session(ONE) as s:
        s.run(fetches, {x: np.ones((8, 96), "float32")})
        s.plan()
        with s.trace():
            s.run(fetches, {x: np.ones((8, 96), "float32")})
    assert gf.plan(fetches, ONE, shapes=shapes).makespan != naive.makespan


def test_calibration_keeps_what_steps_cost_in_this_process_and_over_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphflow.cli.machine import _keep_step_costs

    state = {**profile(), "key": profile_file.machine_key()}
    monkeypatch.setattr(calibrate, "profile", lambda *a, **k: state)
    monkeypatch.setattr(survey, "profile", lambda: state)
    monkeypatch.setattr(profile_file, "write_json", lambda path, made, indent: state.update(made))
    _keep_step_costs()
    assert set(state["steps"]) == {"here", "process"}
    assert all(0 < one <= two < 1 for one, two in state["steps"].values())

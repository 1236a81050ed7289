"""The cost model: rates, pins, homes, memory, links, and the problem they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from graphflow import init
from graphflow.errors import DeviceError
from graphflow.frontend.builders import assign, placeholder, variable
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Op, Tensor, device, origin_scope
from graphflow.ir.spec import TensorSpec, spec
from graphflow.placement.calibration.cluster_rates import is_described, link_matrices, rates
from graphflow.placement.calibration.roofline import (
    Rates,
    contention_factor,
    interpolate_seconds,
    speeds_from_numbers,
)
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import Device, Link, Worker
from graphflow.placement.cost_model.problem_builder import GraphProblem, build_problem
from tests.placement.speeds import profile, speeds

TWO = Cluster.local(workers=2, threads=1)
PROFILES = {0: profile(), 1: profile()}
SAMPLED = [op for op in REGISTRY.values() if op.samples]


def build(graph: Graph, cluster: Cluster = TWO, **options: Any) -> GraphProblem:
    profiles = {worker.index: profile() for worker in cluster.workers}
    return build_problem(graph, cluster, options.pop("bindings", {}), profiles=profiles, **options)


def _outputs(op: Op, inputs: tuple[TensorSpec, ...], attrs: Mapping[str, Any]) -> Any:
    specs = op.infer(*inputs, **attrs)
    return (specs,) if isinstance(specs, TensorSpec) else specs


@pytest.mark.parametrize("op", SAMPLED, ids=lambda op: op.name)
@pytest.mark.parametrize("described", [False, True], ids=["measured", "given"])
def test_every_op_costs_something_and_more_when_it_is_larger(op: Op, described: bool) -> None:
    rate = Rates(speeds_from_numbers(1e12, 1e11, 1e-6) if described else speeds())
    grown = 0
    for sample in op.samples:
        before = 0.0
        for scale in (1, 8, 64):
            inputs = tuple(
                s.with_shape(n * scale if isinstance(n, int) and n > 2 else n for n in s.shape)
                for s in sample.inputs
            )
            try:
                outputs = _outputs(op, inputs, sample.attrs)
            except Exception:
                break  # attributes speak of the sample's own sizes
            seconds = rate.seconds(op, inputs, outputs, sample.attrs)
            assert np.isfinite(seconds) and seconds > 0
            assert seconds >= before
            before = seconds
            grown += 1
    assert grown


def test_times_between_measured_products_rise_and_keep_their_rate_beyond() -> None:
    points = speeds()["matmul"]["float32"]
    assert interpolate_seconds(points, 1e6) == pytest.approx(1e-5)
    assert interpolate_seconds(points, 4e9) == pytest.approx(4e-2)
    assert interpolate_seconds(points, 5e3) == pytest.approx(5e-7)
    times = [interpolate_seconds(points, f) for f in np.logspace(2, 11, 60)]
    assert times == sorted(times)


def test_threads_share_a_large_product_and_leave_a_small_one_alone() -> None:
    op, large, small = REGISTRY["matmul"], spec("float32", (1024, 1024)), spec("float32", (8, 8))
    one, two = Rates(speeds()), Rates(speeds(), threads=2)
    product = 2 * 1024**3 / 1e11
    moved = one.seconds(op, (large, large), (large,), {}) - product
    assert two.seconds(op, (large, large), (large,), {}) == pytest.approx(
        moved + product / 2 * 1.1 + 10e-6
    )
    assert two.seconds(op, (small, small), (small,), {}) == one.seconds(
        op, (small, small), (small,), {}
    )
    add = REGISTRY["add"]
    assert two.seconds(add, (large, large), (large,), {}) == one.seconds(
        add, (large, large), (large,), {}
    )


def test_an_op_that_was_measured_goes_by_its_own_rate_and_wider_elements_take_longer() -> None:
    exp, narrow, wide = REGISTRY["exp"], spec("float32", (1000,)), spec("float64", (1000,))
    rate = Rates(speeds())
    short = rate.seconds(exp, (narrow,), (narrow,), {}) - 2e-6
    assert short == pytest.approx(1e4 / 5e9)
    assert rate.seconds(exp, (wide,), (wide,), {}) - 2e-6 == pytest.approx(2 * short)


def test_beyond_the_cache_the_memory_sets_the_pace_and_neighbours_slow_it() -> None:
    add, x = REGISTRY["add"], spec("float32", (1 << 24,))
    alone = Rates(speeds()).seconds(add, (x, x), (x,), {})
    busy = Rates(speeds(), memory=1.6).seconds(add, (x, x), (x,), {})
    assert alone == pytest.approx(1e-6 + 3 * 2**26 / 4e9)
    assert busy - 1e-6 == pytest.approx(1.6 * (alone - 1e-6))


def test_products_of_16_bits_go_by_their_own_rate_where_a_library_computes_them() -> None:
    x, f = spec("float16", (256, 256)), spec("float32", (256, 256))
    tables = {**speeds()["matmul"], "float16": [[1e4, 1e-7], [1e9, 1e-3]]}
    cpu, gpu = Rates(speeds()), Rates(speeds(matmul=tables))

    def seconds(rate: Rates, name: str, x: TensorSpec, **attrs: Any) -> float:
        return rate.seconds(REGISTRY[name], (x, x), (x,), attrs)

    for dtype in ("float16", "bfloat16"):
        half = spec(dtype, (256, 256))
        assert seconds(gpu, "matmul", half) < seconds(cpu, "matmul", half) / 3
    assert seconds(gpu, "matmul", f) == seconds(cpu, "matmul", f)
    grams = [rate.seconds(REGISTRY["gram"], (x,), (x,), {"columns": True}) for rate in (cpu, gpu)]
    assert grams[0] == grams[1], "no library computes it"


def test_products_of_bfloat16_go_by_their_own_rate_where_amx_computes_them() -> None:
    x, f = spec("bfloat16", (256, 256)), spec("float16", (256, 256))
    tables = {**speeds()["matmul"], "bfloat16": [[1e4, 1e-7], [1e9, 1e-3]]}
    plain, amx = Rates(speeds()), Rates(speeds(matmul=tables))

    def seconds(rate: Rates, name: str, x: TensorSpec) -> float:
        return rate.seconds(REGISTRY[name], (x, x), (x,), {})

    assert seconds(amx, "matmul", x) < seconds(plain, "matmul", x) / 3
    assert seconds(amx, "matmul", f) == seconds(plain, "matmul", f)


def test_an_op_that_was_not_measured_is_called_unless_its_kernel_is_generated() -> None:
    x = spec("float32", (4,))
    plain, gpu = Rates(speeds()), Rates(speeds(call=1e-3))
    for name, attrs, called in (("tanh", {}, False), ("cumsum", {"axis": 0}, True)):
        beyond = [
            rate.seconds(REGISTRY[name], (x,), (x,), attrs) - rate.speeds["launch"]
            for rate in (plain, gpu)
        ]
        assert beyond[1] - beyond[0] == pytest.approx(1e-3 - 1e-6 if called else 0.0, abs=1e-9)


def test_more_busy_threads_than_cores_take_turns() -> None:
    contention = speeds()["contention"]
    assert contention_factor(contention, "compute", 1) == 1.0
    assert contention_factor(contention, "compute", 2) == pytest.approx(1.1)
    assert contention_factor(contention, "compute", 4) == pytest.approx(2.2)


def test_contention_slows_devices_of_one_machine_only_when_asked() -> None:
    quiet, busy = rates(TWO, PROFILES, False), rates(TWO, PROFILES, True)
    name = TWO.devices[0]
    assert (quiet[name].compute, quiet[name].memory) == (1.0, 1.0)
    assert (busy[name].compute, busy[name].memory) == pytest.approx((1.1, 1.6))
    in_process = rates(Cluster.here(devices=["cpu:0", "cpu:1"], threads=1), {0: profile()}, True)
    assert in_process["/worker:0/cpu:1"].launch == 2.0


def test_given_numbers_replace_measured_ones() -> None:
    def cluster(**given: float) -> Cluster:
        worker = Worker(0, None, (Device("/worker:0/cpu:0", "cpu", 1 << 30, 1, **given),))
        return Cluster((worker,))

    x = spec("float32", (1024, 1024))
    matmul = REGISTRY["matmul"]

    def seconds(**given: float) -> float:
        found = rates(cluster(**given), {0: profile()}, False)["/worker:0/cpu:0"]
        return found.seconds(matmul, (x, x), (x,), {})

    flops = 2 * 1024**3
    moved = interpolate_seconds(speeds()["traffic"], 3 * 2**22)
    assert seconds() == pytest.approx(1e-6 + flops / 1e11 + moved)
    assert seconds(flops=2e11) == pytest.approx(1e-6 + flops / 2e11 + moved)
    assert seconds(launch=5e-6) == pytest.approx(5e-6 + flops / 1e11 + moved)
    assert seconds(bandwidth=8e9) == pytest.approx(1e-6 + flops / 1e11 + moved / 2)
    full = seconds(flops=1e12, bandwidth=1e12, launch=0.0)
    assert full == pytest.approx(flops / 1e12 + 3 * 2**22 / 1e12)


def test_a_described_cluster_needs_no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **rest: object) -> None:
        raise AssertionError("calibrated")

    monkeypatch.setattr("graphflow.placement.calibration.calibrate.profile", fail)
    cluster = Cluster.hypothetical(
        workers=2, flops=1e13, bandwidth=1e12, memory=1 << 34, link_bandwidth=1e10
    )
    assert is_described(cluster)
    x = variable(init.zeros((64, 64)), name="x")
    made = build_problem(Graph([x @ x]), cluster, {})
    assert made.problem.devices == 3


def test_a_gpu_that_nobody_measured_or_described_is_an_error_that_says_what_to_do() -> None:
    worker = Worker(0, None, (Device("/worker:0/gpu:0", "gpu", 1 << 30),))
    with pytest.raises(DeviceError, match=r"/worker:0/gpu:0 is unknown.*flops, bandwidth"):
        rates(Cluster((worker,)), {0: profile()}, True)


# The problem ----------------------------------------------------------------------------------


def _step() -> tuple[Tensor, Tensor, Tensor, Graph]:
    x = placeholder("float32", ("n", 8), name="x")
    w = variable(init.zeros((8, 4)), name="w")
    y = FUNCTIONS["matmul"](x, w)
    update = assign(w, w * 0.5 + FUNCTIONS["sum"](y), name="update")
    return x, w, y, Graph([y, REGISTRY["group"](update)])


def test_placeholders_live_with_the_client_and_fetches_go_there() -> None:
    x, _, y, graph = _step()
    made = build(graph, bindings={"n": 16})
    problem = made.problem
    assert made.devices == ("/worker:0/cpu:0", "/worker:1/cpu:0", "/client")
    row = problem.compute[made.index[x.node]]
    assert row.tolist() == [np.inf, np.inf, 0.0]
    (sink,) = range(len(made.nodes), problem.nodes)
    assert made.sinks == (y,)
    assert problem.compute[sink].tolist() == [np.inf, np.inf, 0.0]
    (edge,) = problem.predecessors.edges_of(sink).tolist()
    assert problem.bytes[edge] == 16 * 4 * 4
    assert {node.op.name for node in made.nodes}.isdisjoint({"constant", "group"})


def test_a_variable_its_slots_and_its_assigns_are_one_group() -> None:
    from graphflow.optim import Adam

    x = placeholder("float32", (4, 8), name="x")
    a, b = (variable(init.zeros((8, 8)), name=name) for name in "ab")
    loss = FUNCTIONS["sum"](FUNCTIONS["matmul"](FUNCTIONS["matmul"](x, a), b))
    made = build(Graph([Adam(0.1).minimize(loss)]))
    groups: dict[int, set[str]] = {}
    for i, node in enumerate(made.nodes):
        if node.op.name == "variable":
            groups.setdefault(int(made.problem.groups[i]), set()).add(made.name(i))
        elif node.op.name == "assign":
            of = made.index[node.inputs[0].node]
            assert made.problem.groups[i] == made.problem.groups[of]
        else:
            assert made.problem.groups[i] == -1
    members = [names for names in groups.values() if {"a", "b"} & names]
    assert len(members) == 2
    assert all(len(names) >= 3 for names in members)


def test_memory_counts_variables_between_steps_and_outputs_within() -> None:
    _, w, y, graph = _step()
    made = build(graph, bindings={"n": 16})
    problem = made.problem
    assert problem.memory[made.index[w.node]] == 8 * 4 * 4
    assert problem.output_memory is not None
    assert problem.output_memory[made.index[y.node]] == 16 * 4 * 4
    assert problem.output_memory[made.index[w.node]] == 0


def test_an_alias_counts_only_if_it_outlives_its_input() -> None:
    x = placeholder("float32", (8, 8), name="x")
    y = x * 2
    shape = FUNCTIONS["reshape"](y, (64,))
    long = build(Graph([shape + 1, FUNCTIONS["sum"](shape)]))
    assert long.problem.output_memory is not None
    assert long.problem.output_memory[long.index[shape.node]] == 256
    early = FUNCTIONS["sum"](shape)
    late = y + 1
    short = build(Graph([early, late]))
    assert short.problem.output_memory is not None
    assert short.problem.output_memory[short.index[shape.node]] == 0


def test_a_pin_forbids_other_devices() -> None:
    x = placeholder("float32", (4, 4), name="x")
    with device("/worker:1"):
        y = x * 2
    made = build(Graph([y]))
    assert np.isfinite(made.problem.compute[made.index[y.node]]).tolist() == [False, True, False]


def test_a_pin_that_fits_no_device_names_node_line_pin_and_devices() -> None:
    x = placeholder("float32", (4, 4), name="x")
    with device("gpu"):
        y = FUNCTIONS["matmul"](x, x)
    with pytest.raises(DeviceError) as caught:
        build(Graph([y]))
    told = str(caught.value)
    assert "matmul 'matmul'" in told and "test_problem_builder.py:" in told
    assert "'gpu'" in told and "/worker:0/cpu:0, /worker:1/cpu:0" in told


def test_a_pin_to_a_device_without_a_kernel_is_an_error() -> None:
    x = placeholder("float32", (4, 4), name="x")
    add = dataclasses.replace(REGISTRY["add"], device_kinds=("gpu",))
    node = Node(
        add, (x, x), {}, (x.spec,), name="add", device=DeviceName.parse("/worker:0"),
        location=x.node.location,
    )  # fmt: skip
    with pytest.raises(DeviceError, match=r"pinned to '/worker:0'.*kernel for gpu only"):
        build(Graph(node.outputs))


def test_a_home_pins_a_variable_and_what_assigns_it() -> None:
    _, w, _, graph = _step()
    home = TWO.devices[1]
    made = build(graph, bindings={"n": 2}, homes={w.node: home})
    update = next(node for node in made.nodes if node.op.name == "assign")
    for node in (w.node, update):
        assert made.problem.allowed[made.index[node]].tolist() == [False, True, False]


def test_a_home_that_contradicts_a_pin_or_is_gone_is_an_error() -> None:
    with device("/worker:0"):
        w = variable(init.zeros((2,)), name="w")
    with pytest.raises(DeviceError, match=r"'w' .*lives on /worker:1/cpu:0 already.*'/worker:0'"):
        build(Graph([w + 1]), homes={w.node: "/worker:1/cpu:0"})
    with pytest.raises(DeviceError, match=r"lives on /worker:7/cpu:0, which is not in the cluster"):
        build(Graph([w + 1]), homes={w.node: "/worker:7/cpu:0"})


def test_a_variable_and_its_assign_with_different_pins_are_an_error_that_names_both() -> None:
    with device("/worker:0"):
        w = variable(init.zeros((2,)), name="w")
    with device("/worker:1"):
        update = assign(w, w + 1, name="update")
    chain = (
        r"variable 'w' \(made at .*test_problem_builder\.py:\d+\) may be on /worker:0/cpu:0 only "
        r"\(pinned by gf\.device\('/worker:0'\)\); assign 'update' "
        r"\(made at .*test_problem_builder\.py:\d+\) "
        r"may be on /worker:1/cpu:0 only .*and assigns to it.*one pin"
    )
    with pytest.raises(DeviceError, match=chain):
        build(Graph([update]))


def test_contradictory_pins_of_a_slot_and_an_assignment_are_told_as_a_chain_with_lines() -> None:
    with device("/worker:0"):
        w = variable(init.zeros((2,)), name="w")
    with origin_scope(w.node):
        slot = variable(init.zeros((2,)), name="slot", trainable=False)
    with device("/worker:1"):
        update = assign(slot, slot + w, name="update")
    with pytest.raises(DeviceError) as caught:
        build(Graph([update]))
    text = str(caught.value)
    assert "no device is left for variable 'w'" in text
    assert (
        "'update'" in text
        and "assigns to variable 'gradients/slot'" in text
        and "made for it" in text
    )
    assert text.count("test_problem_builder.py:") >= 4


def test_gradients_prefer_to_be_near_what_they_differentiate() -> None:
    from graphflow.transforms.reverse_mode import gradients

    w = variable(init.ones((4, 4)), name="w")
    y = FUNCTIONS["tanh"](w)
    (g,) = gradients(y, [w])
    made = build(Graph([g]))
    near = made.problem.prefer[made.index[g.node]]
    assert near >= 0 and made.nodes[near].op.name in ("tanh", "variable")


def test_a_value_computed_straight_into_its_variable_is_not_copied() -> None:
    w = variable(init.zeros((64, 64)), name="w")
    value = w * 0.5
    direct = assign(w, value, name="direct")
    made = build(Graph([REGISTRY["group"](direct)]))
    assert made.problem.compute[made.index[direct.node], 0] == 0.0
    both = build(Graph([REGISTRY["group"](direct), value]))
    assert both.problem.compute[both.index[direct.node], 0] > 0.0


# Links ----------------------------------------------------------------------------------------


def test_links_come_from_the_file_then_from_measurements_then_from_the_profile() -> None:
    described = dataclasses.replace(TWO, links=(Link("/worker:0", "/worker:1", 1e-3, 5e8),))
    measured = {("/worker:1", "/worker:0"): (2e-3, 6e8)}
    latency, bandwidth = link_matrices(described, PROFILES, measured)
    assert (latency[0, 1], bandwidth[0, 1]) == (1e-3, 5e8)
    assert (latency[1, 0], bandwidth[1, 0]) == (2e-3, 6e8)
    assert (latency[2, 0], bandwidth[2, 0]) == (1e-4, 1e9)


def test_devices_of_one_process_pass_references_and_its_client_pays_nothing() -> None:
    cluster = Cluster.here(devices=["cpu:0", "cpu:1"])
    latency, bandwidth = link_matrices(cluster, {0: profile()})
    assert (latency[0, 1], bandwidth[0, 1]) == (1e-5, np.inf)
    assert (latency[2, 0], bandwidth[2, 0]) == (0.0, np.inf)


def test_the_way_to_a_gpu_of_a_process_is_that_measured_there_for_its_client_too() -> None:
    kinds = ("cpu", 1), ("gpu", None)
    one, other = (
        Worker(i, None, tuple(Device(f"/worker:{i}/{k}:0", k, 1 << 30, n) for k, n in kinds))
        for i in range(2)
    )
    known = profile({"gpu": [5e-6, 25e9]})
    here = Cluster((one,), kind="here")
    latency, bandwidth = link_matrices(here, {0: known})
    pace = (5e-6, 25e9)
    for a, b in ((0, 1), (1, 0), (1, 2), (2, 1)):
        assert (latency[a, b], bandwidth[a, b]) == pace
    assert latency[0, 2] == 0 and np.isinf(bandwidth[0, 2])
    two = Cluster((one, other), kind="local")
    latency, bandwidth = link_matrices(two, {0: profile(), 1: known})
    assert (latency[2, 3], bandwidth[2, 3]) == pace != (latency[0, 1], bandwidth[0, 1])


def test_other_hosts_are_a_network_away() -> None:
    device_of = "/worker:{}/cpu:0"
    workers = tuple(
        Worker(i, address, (Device(device_of.format(i), "cpu", 1 << 30, 1),))
        for i, address in enumerate(
            ("tcp://10.0.0.1:5000", "tcp://10.0.0.1:5001", "tcp://10.0.0.2:5000")
        )
    )
    cluster = Cluster(workers, kind="remote", insecure=True)
    profiles = dict.fromkeys(range(3), profile({"network": [5e-4, 1e8]}))
    latency, bandwidth = link_matrices(cluster, profiles)
    assert bandwidth[0, 1] == 1e9
    assert bandwidth[0, 2] == bandwidth[3, 2] == 1e8
    assert latency[2, 0] == 5e-4

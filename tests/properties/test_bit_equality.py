"""Promise 1: wherever, however and in how many pieces a graph runs, it gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.frontend.pytree import bind
from graphflow.ir.graph import Graph, bind_attrs
from graphflow.ir.op import Node
from graphflow.passes import optimize
from graphflow.runtime.host.host_interface import LocalHosts
from graphflow.runtime.host.session_state import DRAWS
from graphflow.runtime.partitioning.partition import UNPLACED_OPS, Partition, partition
from graphflow.runtime.wire.graph_codec import decode, encode
from tests.properties.random_graphs import (
    Array,
    Case,
    Outcome,
    assert_same_bits,
    random_case,
    reference,
    to_array,
)

STEPS = 3
ONE = ("/worker:0/cpu:0",)
TWO = ("/worker:0/cpu:0", "/worker:0/cpu:1")
seeds = st.integers(0, 2**32 - 1)


def scatter_nodes(graph: Graph, devices: Sequence[str], seed: int) -> dict[Node, str]:
    """Any device for any node; assigns go with their variable."""
    rng = np.random.default_rng(seed)
    placement: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op.name == "assign":
            placement[node] = placement[node.inputs[0].node]
        elif node.op.name not in UNPLACED_OPS:
            placement[node] = devices[int(rng.integers(len(devices)))]
    return placement


def send_over_wire(parts: Mapping[str, Partition]) -> list[Partition]:
    """The partitions after a journey over the wire."""
    header, buffers = encode(list(parts.values()))
    return decode(header, [np.frombuffer(b.tobytes(), b.dtype).reshape(b.shape) for b in buffers])


def run(
    case: Case,
    devices: Sequence[str] = ONE,
    threads: int = 1,
    optimized: bool = False,
    wire: bool = False,
) -> Outcome:
    """The case as a session would run it, on devices of this process."""
    graph = optimize(case.graph) if optimized else case.graph
    parts = partition(graph, scatter_nodes(graph, devices, case.seed))
    hosts = LocalHosts(devices, threads)
    try:
        hosts.add("p", {0: send_over_wire(parts) if wire else list(parts.values())})
        fetched = [step(case, graph, hosts, i) for i in range(STEPS)]
        variables = {v.name: hosts.read(0, v.name) for v in case.graph.variables}
    finally:
        hosts.close()
    return Outcome(fetched, variables)


def step(case: Case, graph: Graph, hosts: LocalHosts, number: int) -> list[Array | None]:
    feeds = {t.node: a for t, a in case.feeds(number).items()}
    needed = {n: feeds[n] for n in case.graph.placeholders}
    bindings = bind(case.graph, {n: a.shape for n, a in needed.items()})
    named = {graph.names[n]: a for n, a in needed.items() if n in graph.names}
    result = hosts.step(
        "p", number + 1, {**bindings, DRAWS: number}, {0: named}, False, deadline=60.0
    )
    return [
        to_array(
            fetch, result.fetches[str(i)] if str(i) in result.fetches else at_client(output, feeds)
        )
        for i, (fetch, output) in enumerate(zip(case.fetches, graph.outputs, strict=True))
    ]


def at_client(output: gf.Tensor, feeds: Mapping[Node, Array]) -> Any:
    """What no device computes: constants, feeds, groups."""
    match output.node.op.name:
        case "constant":
            return output.node.attrs["value"]
        case "placeholder":
            return feeds[output.node]
    return None


@given(seeds)
@settings(max_examples=25)
def test_a_program_gives_the_bits_of_the_interpreter(seed: int) -> None:
    case = random_case(seed)
    assert_same_bits(run(case), reference(case, STEPS), case)


@given(seeds)
@settings(max_examples=12)  # and so many more over the wire and optimised
def test_two_devices_give_the_bits_of_the_interpreter(seed: int) -> None:
    case = random_case(seed)
    assert_same_bits(run(case, TWO), reference(case, STEPS), case)


@given(seeds)
@settings(max_examples=12)
def test_a_graph_that_came_over_the_wire_gives_the_same_bits(seed: int) -> None:
    case = random_case(seed)
    assert_same_bits(run(case, TWO, wire=True), reference(case, STEPS), case)


@given(seeds)
@settings(max_examples=15)
def test_an_optimized_graph_gives_the_same_bits(seed: int) -> None:
    case = random_case(seed)
    assert_same_bits(run(case, TWO, optimized=True), reference(case, STEPS), case)


@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    for seed in range(10):
        case = large_case(seed)
        assert_same_bits(run(case, threads=threads), run(case, threads=1), case)


def large_case(seed: int) -> Case:
    """A random graph and products large enough to be split between threads."""
    small = random_case(seed, nodes=5)
    rng = np.random.default_rng(seed)
    a = gf.variable(rng.standard_normal((300, 310)).astype("float32"), name="a")
    b = gf.constant(rng.standard_normal((310, 290)).astype("float32"))
    c = gf.nn.softmax(a @ b)
    update = gf.assign(a, a * 0.99 + gf.matmul(c, b, transpose_b=True))
    fetches = (*small.fetches, c, gf.sum(c, axis=0), update)
    return Case(seed, fetches, (*small.variables, a), small.feeds)


@given(seeds)
@settings(max_examples=30)
def test_plain_kernels_give_the_bits_of_the_plain_interpreter(seed: int) -> None:
    case = random_case(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHFLOW_JIT", "off")
        assert_same_bits(run(case, TWO), reference(case, STEPS), case)


@given(seeds)
@settings(max_examples=30)
def test_generated_kernels_give_nearly_what_plain_ones_do(seed: int) -> None:
    """Node by node: a comparison further on may turn a last bit into anything."""
    case = random_case(seed)
    graph = case.graph
    feeds = {t: a for t, a in case.feeds(0).items() if t.node in graph.placeholders}
    nodes = [n for n in graph.nodes if n.op.elementwise]
    needed = list(dict.fromkeys(t for n in nodes for t in (*n.inputs, *n.outputs)))
    values = dict(zip(needed, evaluate(needed, feeds), strict=True)) if needed else {}
    bindings = bind(graph, {t.node: a.shape for t, a in feeds.items()})
    for node in nodes:
        given = [values[t] for t in node.inputs]
        with np.errstate(all="ignore"):
            (plain,) = node.op.run(np, given, bind_attrs(node.attrs, bindings), plain=True)
        have = np.asarray(values[node.outputs[0]])
        if have.dtype in (np.float32, np.float64):
            digits = 20 * np.finfo(have.dtype).eps
            np.testing.assert_allclose(have, plain, rtol=digits, atol=digits, err_msg=node.op.name)
        else:
            assert np.array_equal(have, plain), node.op.name


def test_two_worker_processes_give_the_bits_of_the_interpreter() -> None:
    with gf.Session(gf.Cluster.local(workers=2)) as session:
        for number in range(8):
            case = random_case(number, pin=anywhere(number))
            used = [v for v in case.variables if v.node in case.graph.variables]
            needed = set(case.graph.placeholders)
            fetched = []
            for i in range(STEPS):
                feeds = {t: a for t, a in case.feeds(i).items() if t.node in needed}
                fetched.append(session.run(list(case.fetches), feeds))
            have = Outcome(fetched, {v.name: session.get(v) for v in used})
            assert_same_bits(have, reference(case, STEPS, first=number * STEPS), case)


def anywhere(seed: int) -> Callable[[], Any]:
    """Pins to either of two workers."""
    rng = np.random.default_rng(seed)
    return lambda: gf.device(f"/worker:{rng.integers(2)}")

"""Which elementwise nodes run as one kernel, what of them takes memory, and that it changes no
bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import Graph
from graphflow.ir.op import Op, Tensor
from graphflow.passes import optimize
from graphflow.runtime.memory.backend import CpuBackend
from graphflow.runtime.memory.memory_layout import MemoryLayout, plan_layout
from graphflow.runtime.partitioning.partition import partition
from graphflow.runtime.program.program import Program
from graphflow.runtime.program.span_recorder import Span
from tests.runtime.programs import CPU, NoChannel, initial_state, make_partition, place_nodes

X = np.random.default_rng(0).normal(size=(6, 40)).astype("float32")


class Alone(NoChannel):
    """A channel of a step that nobody gives up."""

    def check_cancelled(self, step: int, loop: str, done: int, of: str) -> None:
        """Go on."""


def layout_of(*fetches: Tensor) -> MemoryLayout:
    return plan_layout(make_partition(*fetches), {})


def describe_regions(layout: MemoryLayout) -> list[str]:
    """Each region as its ops, with a star at those whose value is kept."""
    regions = {id(f): f for f in layout.regions.values()}
    return [
        " ".join(
            n.op.name + "*" * any(n is result.node for result in fused.results)
            for n in fused.nodes
        )
        for fused in regions.values()
    ]  # fmt: skip


def x_of(shape: tuple[int, ...] = (6, 40)) -> Tensor:
    return gf.placeholder("float32", shape, name="x")


def ran(*fetches: Tensor, x: np.ndarray = X, threads: int = 1) -> list[np.ndarray]:
    part = make_partition(*fetches)
    program = Program(part, {}, initial_state(part), CpuBackend(threads), Alone())
    feeds = dict.fromkeys(part.feeds, x)
    for _ in range(2):  # the second step uses the buffers of the first
        values = program.compute(feeds, 1, 0)
    return [values[str(i)] for i in range(len(fetches))]


def same_as_reference(x: Tensor, *fetches: Tensor) -> None:
    for have, want in zip(ran(*fetches), evaluate(fetches, {x: X}), strict=True):
        assert have.tobytes() == np.asarray(want).tobytes()


def test_a_chain_is_one_region_and_only_its_end_takes_memory() -> None:
    x = x_of()
    y = gf.tanh(gf.exp(x * 0.5) + 1.0)
    layout = layout_of(y)
    assert describe_regions(layout) == ["multiply exp add tanh*"]
    assert layout.arena.nbytes == X.nbytes
    same_as_reference(x, y)


def test_rows_columns_and_scalars_broadcast_into_a_region() -> None:
    x = x_of()
    row, column = gf.constant(X[0]), gf.constant(X[:, :1])
    y = gf.nn.gelu((x + row) * column - 3.0)
    assert describe_regions(layout_of(y)) == ["add multiply subtract gelu*"]
    same_as_reference(x, y)


def test_what_something_else_reads_ends_a_region() -> None:
    x = x_of()
    h = gf.exp(x * 2.0)
    y = h / gf.matmul(h, gf.constant(np.ones((40, 40), "f")))
    assert describe_regions(layout_of(y)) == ["multiply exp*", "divide*"]
    same_as_reference(x, y)


@pytest.mark.parametrize(
    ("build", "regions"),
    [
        (lambda x: gf.nn.softmax(x * 0.5 + 1.0) * 2.0, ["multiply add softmax multiply*"]),
        (lambda x: x - gf.mean(x, axis=1, keepdims=True), ["mean subtract*"]),
        (lambda x: x - gf.expand_dims(gf.mean(x, axis=1), 1), ["mean* subtract*"]),
        (lambda x: gf.sum(gf.exp(x), axis=0), ["exp sum*"]),
        (lambda x: gf.exp(x) / gf.sum(gf.exp(x), axis=0), ["exp divide*", "exp sum*"]),
        (lambda x: gf.sum(x * x, axis=0) + gf.mean(x, axis=0), ["multiply sum mean add*"]),
        (
            lambda x: gf.concat([gf.sum(x, axis=1), gf.max(x, axis=1)]),
            ["sum* max*"],
        ),
        (
            lambda x: gf.concat([gf.nn.softmax(x), gf.nn.log_softmax(x) * 2.0]),
            ["softmax* log_softmax multiply*"],
        ),
        (lambda x: gf.broadcast_to(gf.constant(X[:1]), (6, 40)) * x, ["broadcast_to multiply*"]),
        (lambda x: gf.sqrt(gf.sum(x * x, axis=1)) + 1.0, ["multiply sum sqrt add*"]),
        (lambda x: gf.tanh(gf.sum(x * x)), ["multiply sum tanh*"]),
        (
            lambda x: gf.sum(gf.sum(x, axis=1, keepdims=True) * x, axis=0),
            ["sum multiply*", "sum*"],
        ),
        (lambda x: gf.sum(x, axis=0) + gf.constant(X[:, 0][:1]), ["sum add*"]),
        (
            lambda x: gf.nn.layer_norm(gf.nn.gelu(x), X[0], X[1]) + x,
            ["gelu affine_norm add*"],
        ),
    ],
)
def test_what_goes_along_rows_is_part_of_a_region(
    build: Callable[[Tensor], Tensor], regions: list[str]
) -> None:
    x = x_of()
    y = build(x)
    assert describe_regions(layout_of(y)) == regions
    same_as_reference(x, y)


def test_a_value_a_row_that_is_seen_along_rows_is_read_from_memory() -> None:
    x = gf.placeholder("float32", (40, 40), name="x")
    total = gf.sum(x * 2.0, axis=1)
    y = x + total  # along rows, though it has one value for each of them
    value = np.resize(X, (40, 40))
    assert describe_regions(layout_of(y)) == ["multiply sum*", "add*"]
    assert ran(y, x=value)[0].tobytes() == evaluate([y], {x: value})[0].tobytes()


def test_a_row_result_is_not_written_over_an_operand_that_all_rows_read() -> None:
    bias = gf.exp(gf.placeholder("float32", (40,), name="x"))  # dies where the sum is computed
    y = gf.sum(gf.constant(np.resize(X, (40, 40))) * bias, axis=1) + 1.0
    have = ran(y, x=X[0])[0]
    node = bias.node.inputs[0]
    assert have.tobytes() == evaluate([y], {node: X[0]})[0].tobytes()


def test_labels_that_are_no_class_are_refused_in_a_region() -> None:
    x = x_of()
    labels = gf.placeholder("int64", (6,), name="labels")
    y = gf.nn.cross_entropy(x * 2.0 + 1.0, labels) * 3.0
    assert describe_regions(layout_of(y)) == ["multiply add cross_entropy multiply*"]
    part = make_partition(y)
    program = Program(part, {}, {}, CpuBackend(1), Alone())
    good = np.arange(6)
    have = program.compute({"x": X, "labels": good}, 1, 0)["0"]
    assert have.tobytes() == evaluate([y], {x: X, labels: good})[0].tobytes()
    with pytest.raises(gf.errors.OpError, match=r"cross_entropy.*test_fusion.*\[0, 40\).*to 40"):
        program.compute({"x": X, "labels": good + 35}, 1, 0)


def test_a_value_read_inside_and_outside_is_kept() -> None:
    x = x_of()
    h = gf.exp(x)
    y = h * 2.0
    assert describe_regions(layout_of(y, h)) == ["exp* multiply*"]
    same_as_reference(x, y, h)


def test_two_branches_of_one_shape_meet_in_one_region() -> None:
    x = x_of()
    y = gf.sin(x) * gf.cos(x) + gf.abs(x)
    assert describe_regions(layout_of(y)) == ["sin cos multiply abs add*"]
    same_as_reference(x, y)


def test_a_value_that_comes_back_in_another_shape_is_read_from_memory() -> None:
    x = x_of()
    h = x + 1.0
    y = gf.reshape(gf.reshape(h, (240,)), (6, 40)) * h
    assert describe_regions(layout_of(y)) == ["add*", "multiply*"]
    same_as_reference(x, y)


def test_a_block_that_is_also_read_along_rows_is_not_written_over() -> None:
    x = x_of((1, 40))
    h = gf.exp(x)  # dies where y is computed, which reads it in two ways
    y = gf.reshape(h, (40, 1)) * gf.ones((40, 40)) + h
    have = ran(y, x=X[:1])[0]
    assert have.tobytes() == np.asarray(evaluate([y], {x: X[:1]})[0]).tobytes()


def test_an_op_without_a_trace_runs_its_plain_kernel_between_regions() -> None:
    x = x_of()
    y = gf.exp(gf.tan(gf.exp(x)))
    assert describe_regions(layout_of(y)) == ["exp*", "exp*"]
    same_as_reference(x, y)


def test_a_users_op_that_is_not_registered_is_part_of_a_region() -> None:
    cube = Op("cube", infer=lambda x: x, expr=lambda xp, x: x * x * x, elementwise=True)
    x = x_of()
    y = gf.tanh(cube(x))
    assert describe_regions(layout_of(y)) == ["cube tanh*"]
    same_as_reference(x, y)


def test_long_chains_are_cut_into_regions_of_bounded_size() -> None:
    x = x_of()
    y = x
    for i in range(300):
        y = y + gf.sin(y) if i % 3 else y * 0.5
    regions = {id(f): f for f in layout_of(y).regions.values()}.values()
    assert 1 < len(regions) < 20 and all(len(f.nodes) <= 64 for f in regions)
    same_as_reference(x, y)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_chain_of_halves_is_one_region_with_its_conversions(half: str) -> None:
    x = gf.placeholder("float32", (6, 40), name="x")
    y = (gf.tanh(x.astype(half)) * 3 + 1).astype("float32")
    layout = layout_of(y)
    (region,) = {id(r): r for r in layout.regions.values()}.values()
    assert [n.op.name for n in region.nodes] == ["astype", "tanh", "multiply", "add", "astype"]
    with gf.Session(gf.Cluster.here(threads=1)) as session:
        found = session.run(y, {x: X})
    np.testing.assert_array_equal(found, evaluate([y], {x: X})[0])


def test_complex_numbers_and_other_devices_have_no_regions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = gf.exp(gf.placeholder("complex64", (3,), name="x"))
    assert not layout_of(numbers).regions
    y = gf.tanh(x_of())
    monkeypatch.setenv("GRAPHFLOW_JIT", "off")
    assert not layout_of(y).regions


@pytest.mark.parametrize(
    ("optimizer", "sweep"),
    [
        (gf.optim.SGD(0.1), 1),
        (gf.optim.SGD(0.1, momentum=0.9), 2),
        (gf.optim.Adam(1e-3), 3),
        (gf.optim.AdamW(1e-3), 3),
        (gf.optim.RMSProp(1e-3, momentum=0.5), 3),
    ],
    ids=["sgd", "momentum", "adam", "adamw", "rmsprop"],
)
def test_an_optimisers_update_of_a_parameter_is_one_sweep_in_place(
    optimizer: gf.optim.Optimizer, sweep: int
) -> None:
    w = gf.variable(X, name="w")
    g = gf.placeholder("float32", X.shape, name="x")
    graph = optimize(Graph([optimizer.apply([g @ gf.constant(np.eye(40, dtype="f"))], [w])]))
    layout = plan_layout(partition(graph, place_nodes(graph))[CPU], {})
    (fused,) = {id(f): f for f in layout.regions.values() if f.sizes == (240,)}.values()
    assert len(fused.results) == sweep
    assert all(t.node in layout.deferred for t in fused.results)


def test_what_comes_late_keeps_nothing_large_for_a_value_a_row() -> None:
    """A bias's update would keep the cotangent whose columns it sums, and a sum over micro-batches
    those of all of them."""
    x = x_of((6, 1000))
    total = None
    for i in range(4):
        h = gf.exp(gf.matmul(gf.constant(np.eye(6, dtype="f") * i), x))
        columns = gf.sum(h, axis=0)
        total = columns if total is None else total + columns
    layout = layout_of(total * 2.0)
    assert describe_regions(layout) == [
        "exp sum*",
        "exp sum add*",
        "exp sum add*",
        "exp sum add multiply*",
    ]
    assert layout.arena.nbytes < 2 * 6 * 1000 * 4
    value = np.resize(X, (6, 1000))
    have, want = ran(total, x=value)[0], evaluate([total], {x: value})[0]
    assert have.tobytes() == np.asarray(want).tobytes()


def test_regions_run_inside_the_bodies_of_loops() -> None:
    x = x_of()

    def body(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = gf.tanh(carry * 0.5 + row)
        return new, gf.exp(new) * row

    last, ys = gf.scan(body, X[0], x)
    same_as_reference(x, last, ys)


BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a * gf.nn.sigmoid(b),
    gf.maximum,
    lambda a, b: gf.where(a > b, a, gf.sum(b, axis=0)),
    lambda a, b: a - gf.mean(b, axis=1, keepdims=True),
    lambda a, b: gf.reshape(gf.reshape(a, (240,)), (6, 40)) + b,
    lambda a, b: gf.matmul(a, gf.tanh(b), transpose_b=True) @ b,
]


@given(st.lists(st.tuples(st.sampled_from(BINARY), st.integers(0, 9), st.integers(0, 9)),
                min_size=1, max_size=14), st.integers(0, 9))  # fmt: skip
@settings(max_examples=60)
def test_any_graph_cut_into_regions_gives_the_bits_of_single_ops(
    steps: list[tuple[Callable[[Tensor, Tensor], Tensor], int, int]], fetched: int
) -> None:
    x = x_of()
    values = [x, gf.tanh(x)]
    for build, i, j in steps:
        values.append(build(values[i % len(values)], values[j % len(values)]))
    with CpuBackend(1).active():
        want = evaluate([values[-1], values[fetched % len(values)]], {x: X})
    have = ran(values[-1], values[fetched % len(values)] + 0.0, threads=1)
    assert have[0].tobytes() == np.asarray(want[0]).tobytes()
    assert np.array_equal(have[1], want[1] + np.float32(0), equal_nan=True)


def test_a_traced_region_shares_its_time_among_its_nodes() -> None:
    x = x_of()
    part = make_partition(gf.exp(gf.negative(x, name="n"), name="e"))
    program = Program(part, {}, {}, CpuBackend(1), Alone())
    spans: list[Span] = []
    program.compute({"x": X}, 1, 0, spans)
    names, starts, ends = zip(*((name, a, b) for _, name, a, b in spans), strict=True)
    assert names == ("x", "n", "e") and starts[1] >= ends[0] and starts[2] == ends[1]
    assert ends[1] - starts[1] < ends[2] - starts[2]  # one flop, and ten

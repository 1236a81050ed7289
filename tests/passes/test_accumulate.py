"""Sums of products: which are accumulated, and that it changes no bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ops.kernels.gemm.gemm import is_supported
from graphflow.passes import AccumulateProducts, optimize
from graphflow.runtime.memory.memory_layout import plan_layout
from graphflow.runtime.partitioning.partition import Partition

pytestmark = pytest.mark.skipif(not is_supported("float32"), reason="made for AVX2 and up")


@pytest.fixture(scope="module", autouse=True)
def _generated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # also where a whole run has GRAPHFLOW_JIT=off
        patch.delenv("GRAPHFLOW_JIT", raising=False)
        yield


def _fed(*shapes: tuple[int, ...], dtype: str = "float32") -> dict[gf.Tensor, Any]:
    random = np.random.default_rng(0)
    return {gf.placeholder(dtype, s): random.normal(size=s).astype(dtype) for s in shapes}


def _sums(outputs: list[gf.Tensor]) -> int:
    return len(optimize(gf.Graph(outputs)).of_op("accumulate_product"))


def _check(outputs: list[gf.Tensor], feeds: dict[gf.Tensor, Any], count: int) -> None:
    graph = optimize(gf.Graph(outputs))
    assert len(graph.of_op("accumulate_product")) == count
    with gf.Session() as session:
        values = session.run(outputs, feeds)
    for value, plain in zip(values, evaluate(outputs, feeds), strict=True):
        np.testing.assert_array_equal(value, plain)


def test_weight_gradients_of_micro_batches_are_one_sum() -> None:
    feeds = _fed((16, 80), (16, 80), (16, 80))
    w = gf.constant(np.random.default_rng(1).normal(size=(80, 90)).astype("f4"))
    losses = [gf.sum(gf.tanh(x @ w)) for x in feeds]
    (gradient,) = gf.gradients(losses[0] + losses[1] + losses[2], [w])
    _check([gradient * 0.5], feeds, 2)


def test_gradients_of_batches_of_open_size_are_one_sum() -> None:
    """Also where, as of the last sizes, a library multiplies, which adds to nothing."""
    xs = [gf.placeholder("float32", (None, 96)) for _ in range(3)]
    w = gf.constant(np.random.default_rng(1).normal(size=(96, 96)).astype("f4"))
    (gradient,) = gf.gradients(sum(gf.sum(gf.tanh(x @ w)) for x in xs), [w])
    assert _sums([gradient]) == 2
    random = np.random.default_rng(0)
    with gf.Session() as session:
        for sizes in ((16, 16, 16), (1, 7, 300), (2, 1, 33_000)):
            feeds = {
                x: random.normal(size=(n, 96)).astype("f4") for x, n in zip(xs, sizes, strict=True)
            }
            value = session.run(gradient, feeds)
            np.testing.assert_array_equal(value, evaluate([gradient], feeds)[0])


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_bits_are_those_of_a_product_and_a_sum(flags: tuple[bool, bool], dtype: str) -> None:
    shapes = [(30, 70) if flags[0] else (70, 30), (71, 30) if flags[1] else (30, 71)]
    feeds = _fed((70, 71), *shapes, dtype=dtype)
    c, x, y = feeds
    product = gf.matmul(x, y, transpose_a=flags[0], transpose_b=flags[1])
    _check([c + product], feeds, 1)
    _check([gf.matmul(x, y, transpose_a=flags[0], transpose_b=flags[1]) + c], feeds, 1)


def test_a_variable_takes_the_sum_where_it_is() -> None:
    start = np.random.default_rng(1).normal(size=(80, 90)).astype("f4")
    total = gf.variable(start, name="total")
    feeds = _fed((16, 80), (16, 90))
    x, g = feeds
    update = gf.assign(total, total + gf.matmul(x, g, transpose_a=True))
    expected = start
    with gf.Session() as session:
        for _ in range(3):
            session.run(update, feeds)
            step = evaluate([gf.constant(expected) + gf.matmul(x, g, transpose_a=True)], feeds)
            expected = step[0]
        np.testing.assert_array_equal(session.get(total), expected)


def test_what_a_scan_carries_takes_the_sum() -> None:
    feeds = _fed((5, 16, 80), (5, 16, 90))
    x, g = feeds

    def step(total: gf.Tensor, pair: Any) -> Any:
        return total + gf.matmul(pair[0], pair[1], transpose_a=True), ()

    total, _ = gf.scan(step, gf.zeros((80, 90)), (x, g))
    assert "accumulate_product" in {n.op.name for n in optimize(gf.Graph([total])).walk()}
    with gf.Session() as session:
        value = session.run(total, feeds)
    expected = np.zeros((80, 90), "f4")
    a, b = gf.placeholder("float32", (16, 80)), gf.placeholder("float32", (16, 90))
    for one, other in zip(feeds[x], feeds[g], strict=True):
        product = evaluate([gf.matmul(a, b, transpose_a=True)], {a: one, b: other})[0]
        expected = expected + product
    np.testing.assert_array_equal(value, expected)


def test_the_sum_takes_the_memory_of_what_it_is_added_to() -> None:
    feeds = _fed(*[(16, 256)] * 6)
    xs = list(feeds)
    total = gf.matmul(xs[0], xs[0], transpose_a=True)
    for x in xs[1:]:
        total = total + gf.matmul(x, x, transpose_a=True)
    graph = optimize(gf.Graph([total]))
    sums = [node.outputs[0] for node in graph.of_op("accumulate_product")]
    names = tuple(graph.names[node] for node in graph.placeholders)
    layout = plan_layout(Partition("/worker:0/cpu:0", graph, names, {"total": sums[-1]}), {})
    first = graph.of_op("matmul")[0].outputs[0]
    assert {layout.offset(s) for s in sums} == {layout.offset(first)}
    _check([total], feeds, 5)


@pytest.mark.parametrize(
    "case", ["read twice", "broadcast", "small", "of ints", "elementwise", "of a vector"]
)
def test_other_sums_stay(case: str) -> None:
    x, y = gf.placeholder("float32", (80, 80)), gf.placeholder("float32", (80, 80))
    product = x @ y
    match case:
        case "read twice":
            outputs = [x + product, product]
        case "broadcast":
            outputs = [gf.placeholder("float32", (80,)) + product]
        case "small":
            small = gf.placeholder("float32", (8, 8))
            outputs = [small + small @ small]
        case "of a vector":  # which has a kernel of its own
            x = gf.placeholder("float32", (1, 4096))
            outputs = [x + x @ gf.placeholder("float32", (4096, 4096))]
        case "of ints":
            whole = gf.placeholder("int32", (80, 80))
            outputs = [whole + whole @ whole]
        case _:
            outputs = [gf.tanh(x) + product]
    assert _sums(outputs) == 0


def test_without_generated_kernels_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFLOW_JIT", "off")
    x = gf.placeholder("float32", (80, 80))
    graph = gf.Graph([x + x @ x])
    assert AccumulateProducts()(graph) is graph

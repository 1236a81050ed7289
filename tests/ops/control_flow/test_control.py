"""Control flow against the same computation unrolled: values, gradients to second order, passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import FeedError, ShapeError
from graphflow.frontend.interpreter import evaluate, run
from graphflow.ir.graph import Graph, bodies
from graphflow.ops.control_flow.control import fold_in
from graphflow.passes import optimize

X = np.random.default_rng(0).normal(size=(5, 3))
W = np.random.default_rng(1).normal(size=(3, 3)) * 0.4


def inputs() -> tuple[gf.Tensor, gf.Tensor]:
    return gf.placeholder("float64", (5, 3), "x"), gf.variable(W, "w")


def recurrence(x: gf.Tensor, w: gf.Tensor, loop: bool) -> gf.Tensor:
    def body(c: gf.Tensor, row: gf.Tensor) -> Any:
        c = gf.tanh(c @ w + row)
        return c, c * 2

    if loop:
        c, ys = gf.scan(body, gf.zeros((3,), dtype="float64"), x)
        return gf.sum(ys**2) + gf.sum(c**3)
    c, parts = gf.zeros((3,), dtype="float64"), []
    for i in range(5):
        c, y = body(c, x[i])
        parts.append(y)
    return gf.sum(gf.stack(parts) ** 2) + gf.sum(c**3)


def backwards(x: gf.Tensor, w: gf.Tensor, loop: bool) -> gf.Tensor:
    def body(c: Any, row: gf.Tensor) -> Any:
        a, n = c
        return (gf.sin(a) * row + gf.sum(w), n + 1), a * gf.astype(n, "float64")

    start = (gf.sum(x, axis=0), gf.constant(0, "int64"))
    if loop:
        (a, _), ys = gf.scan(body, start, x, reverse=True)
        return gf.sum(ys**2) + gf.sum(a)
    state, parts = start, []
    for i in reversed(range(5)):
        state, y = body(state, x[i])
        parts.append(y)
    return gf.sum(gf.stack(parts[::-1]) ** 2) + gf.sum(state[0])


def build_growing_loop(x: gf.Tensor, w: gf.Tensor, loop: bool) -> gf.Tensor:
    def step(v: gf.Tensor) -> gf.Tensor:
        return v * 1.5 + gf.sum(w) * 0.01 + gf.sin(v)

    v = gf.sum(x, axis=0)
    if loop:
        v = gf.while_loop(lambda v: gf.sum(v**2) < 300.0, step, v, max_iterations=12)
        return gf.sum(v**2)
    value = X.sum(axis=0)
    while (value**2).sum() < 300.0:
        v, value = step(v), value * 1.5 + W.sum() * 0.01 + np.sin(value)
    return gf.sum(v**2)


def build_branches(sign: float) -> Callable[[gf.Tensor, gf.Tensor, bool], gf.Tensor]:
    def build(x: gf.Tensor, w: gf.Tensor, loop: bool) -> gf.Tensor:
        def yes(a: gf.Tensor) -> gf.Tensor:
            return gf.sum(gf.sin(a) @ w)

        def no(a: gf.Tensor) -> gf.Tensor:
            return gf.sum(a**3) * gf.sum(w)

        if loop:
            return gf.cond(gf.constant(sign) > 0, yes, no, x)
        return yes(x) if sign > 0 else no(x)

    return build


def build_nested_body(x: gf.Tensor, w: gf.Tensor, loop: bool) -> gf.Tensor:
    def choose(c: gf.Tensor, row: gf.Tensor) -> gf.Tensor:
        def yes(c: gf.Tensor) -> gf.Tensor:
            return c * gf.sin(row)

        def no(c: gf.Tensor) -> gf.Tensor:
            return c + row * gf.sum(w)

        if loop:
            return gf.cond(gf.sum(c) > 0, yes, no, c)
        return gf.where(gf.sum(c) > 0, yes(c), no(c))

    def inner(c: gf.Tensor, row: gf.Tensor) -> Any:
        return choose(c, row), None

    def outer(c: gf.Tensor, row: gf.Tensor) -> Any:
        rows = gf.stack([row, row * 2, row * 3])
        if loop:
            c, _ = gf.scan(inner, c, rows)
        else:
            for i in range(3):
                c, _ = inner(c, rows[i])
        return c, gf.sum(c)

    c = gf.ones((3,), dtype="float64")
    if loop:
        c, ys = gf.scan(outer, c, x)
        return gf.sum(c**2) + gf.sum(ys)
    total: Any = 0.0
    for i in range(5):
        c, y = outer(c, x[i])
        total = total + y
    return gf.sum(c**2) + total


def build_calls(x: gf.Tensor, w: gf.Tensor, loop: bool) -> gf.Tensor:
    def layer(a: gf.Tensor) -> gf.Tensor:
        return gf.tanh(a @ w) * gf.exp(-a)

    f: Any = gf.function(layer) if loop else layer
    g: Any = gf.checkpoint(layer) if loop else layer
    return gf.sum(g(f(f(x))) ** 2)


CASES: dict[str, Callable[[gf.Tensor, gf.Tensor, bool], gf.Tensor]] = {
    "scan": recurrence,
    "reverse": backwards,
    "while": build_growing_loop,
    "cond_true": build_branches(1.0),
    "cond_false": build_branches(-1.0),
    "nested": build_nested_body,
    "call": build_calls,
}


def derivatives(build: Any, loop: bool) -> tuple[gf.Tensor, list[gf.Tensor]]:
    x, w = inputs()
    y = build(x, w, loop)
    first = gf.gradients(y, [x, w])
    second = gf.gradients(gf.sum(first[0] ** 2) + gf.sum(gf.cos(first[1])), [x, w])
    return x, [y, *first, *second]


@pytest.mark.parametrize("name", CASES)
def test_values_and_two_orders_of_gradients_equal_those_unrolled(name: str) -> None:
    x, looped = derivatives(CASES[name], True)
    x2, unrolled = derivatives(CASES[name], False)
    for a, b in zip(evaluate(looped, {x: X}), evaluate(unrolled, {x2: X}), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("jit", ["on", "off"])
def test_programs_give_the_bits_of_the_reference(
    name: str, jit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_JIT", jit)
    x, outputs = derivatives(CASES[name], True)
    graph = optimize(Graph(outputs))
    expected = run(graph, {x.node: X}, {}, 0, np)
    with gf.Session(gf.Cluster.here(threads=1)) as s:
        for _ in range(2):  # the second step uses the buffers of the first
            for a, b in zip(expected, s.run(outputs, {x: X}), strict=True):
                assert np.asarray(a).tobytes() == b.tobytes()


@pytest.mark.parametrize("name", CASES)
def test_passes_keep_values_and_run_each_body_once(name: str) -> None:
    x, outputs = derivatives(CASES[name], True)
    graph = optimize(Graph(outputs))
    for a, b in zip(
        evaluate(outputs, {x: X}), run(graph, {x.node: X}, {}, 0, np), strict=True
    ):  # fmt: skip
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    runs = [(n.inputs, tuple(body.root for body in bodies(n))) for n in graph.nodes if bodies(n)]
    assert len(set(runs)) == len(runs)


def test_a_forward_loop_and_its_gradient_are_two_loops() -> None:
    x, w = inputs()
    y = recurrence(x, w, True)
    graph = optimize(Graph([y, *gf.gradients(y, [x, w])]))
    assert [n.op.name for n in graph.nodes if bodies(n)] == ["scan", "scan"]


def test_what_no_iteration_changes_is_not_stacked() -> None:
    x, w = inputs()
    c, _ = gf.scan(lambda c, row: (gf.tanh(c @ gf.exp(w) + row), None), x[0], x)
    (g,) = gf.gradients(gf.sum(c), [w])
    forward = next(n for n in optimize(Graph([g])).nodes if n.op.name == "scan")
    assert (5, 3, 3) not in [spec.shape for spec in forward.specs]


@given(
    length=st.integers(1, 6),
    count=st.integers(-1, 8),
    reverse=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_a_bounded_while_loop_equals_a_loop_in_python(
    length: int, count: int, reverse: bool, seed: int
) -> None:
    value = np.random.default_rng(seed).normal(size=3)
    v = gf.placeholder("float64", (3,))
    sign = -1.0 if reverse else 1.0
    _, last = gf.while_loop(
        lambda s: s[0] < count,
        lambda s: (s[0] + 1, gf.sin(s[1] * sign) + s[1]),
        (0, v),
        max_iterations=length,
    )
    (g,) = gf.gradients(gf.sum(last**2), [v])
    expected, slope = value, np.ones(3)
    for _ in range(max(0, min(length, count))):
        slope = slope * (sign * np.cos(expected * sign) + 1)
        expected = np.sin(expected * sign) + expected
    found, grad = evaluate([last, g], {v: value})
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(grad, 2 * expected * slope, rtol=1e-9, atol=1e-12)


@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=30, unique=True))
def test_iterations_of_different_steps_draw_from_different_counters(steps: Sequence[int]) -> None:
    drawn = {fold_in(step, i) for step in steps for i in range(20)}
    assert len(drawn) == 20 * len(steps)
    assert all(0 <= d < 2**48 for d in drawn)


def test_dropout_in_a_loop_is_the_same_forwards_and_backwards() -> None:
    x = gf.placeholder("float64", (5, 3))
    with gf.random.seed(1):
        _, ys = gf.scan(lambda c, row: (c, gf.nn.dropout(row, 0.5)), gf.constant(0.0), x)
    (g,) = gf.gradients(gf.sum(ys), [x])
    with gf.Session() as s:
        for _ in range(3):
            value, grad = s.run([ys, g], {x: X})
            np.testing.assert_array_equal(value != 0, grad != 0)
            np.testing.assert_allclose(value, grad * X)


def test_a_loop_needs_memory_for_one_iteration_only() -> None:
    def peak(length: int) -> int:
        x = gf.placeholder("float32", (64, 64))
        y, _ = gf.scan(lambda c, _: (gf.sin(gf.cos(c) @ c), None), x, length=length)
        with gf.Session() as s, s.trace() as trace:
            s.run(y, {x: np.ones((64, 64), np.float32)})
        return max(trace.steps[-1].peak.values())

    assert peak(50) == peak(2)


def _of_two_batches() -> tuple[Any, Any]:
    return gf.placeholder("float32", (None, 4)), gf.placeholder("float32", (None, 4))


@pytest.mark.parametrize("loop", [
    lambda x, y: gf.scan(lambda h, e: (y, h), x, length=3),
    lambda x, y: gf.while_loop(lambda h: gf.sum(h) > 0, lambda h: y, x),
    lambda x, y: gf.cond(gf.placeholder("bool"), lambda: x, lambda: y),
])  # fmt: skip
def test_two_sizes_without_a_name_are_told_apart(loop: Any) -> None:
    with pytest.raises(ShapeError) as told:
        loop(*_of_two_batches())
    assert "placeholder#1.shape[0]" in str(told.value)
    assert "placeholder#2.shape[0]" in str(told.value)


def test_a_carry_of_another_batch_names_the_remedy() -> None:
    x, y = _of_two_batches()
    with pytest.raises(
        ShapeError, match=r"one name, as in gf.placeholder\(dtype, \('batch', 4\)\)"
    ):
        gf.scan(lambda h, e: (y, h), x, length=3)


def test_a_feed_of_two_batches_tells_them_apart() -> None:
    x, y = _of_two_batches()
    with gf.Session() as s, pytest.raises(FeedError) as told:
        s.run(x + y, {x: np.zeros((3, 4), "float32"), y: np.zeros((2, 4), "float32")})
    assert "placeholder#1.shape[0] == placeholder#2.shape[0]" in str(told.value)
    assert "placeholder#2.shape[0] = 2 from" in str(told.value)


@pytest.mark.every(2)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_what_a_loop_reads_sums_its_gradient_in_float32(half: str) -> None:
    xs, w = gf.placeholder(half, (4096,)), gf.placeholder(half, ())
    _, ys = gf.scan(lambda c, x: (c, gf.sin(w * x)), gf.zeros((), half), xs)
    (slope,) = gf.gradients(gf.sum(ys), [w])
    feeds = {xs: np.ones(4096, half), w: np.asarray(0, half)}
    (found,) = evaluate([slope], feeds)
    assert found.dtype == half and float(found) == 4096  # 256 in bfloat16, one by one

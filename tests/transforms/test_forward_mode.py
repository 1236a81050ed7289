"""Tangents: every op against finite differences and gradients; functions, nests, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DifferentiationError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import Op, Sample
from graphflow.transforms.op_testing import check_tangents, is_differentiable
from tests.ops.test_registry import CASES


@pytest.mark.parametrize("op, sample", [c for c in CASES if is_differentiable(*c.values)])
def test_tangents_match_finite_differences(op: Op, sample: Sample) -> None:
    check_tangents(op, sample)


def test_only_what_the_tangent_needs_is_in_its_graph() -> None:
    x, t = (gf.placeholder("float32", (3, 4)) for _ in range(2))
    graph = gf.Graph(gf.jvp(gf.sum(x * 3.0, axis=1), [x], [t]))
    assert x.node not in graph.nodes
    assert len(graph.of_op("sum")) == 1
    assert "fill" not in [node.op.name for node in graph.nodes]


def test_a_function_gives_its_value_and_its_tangent() -> None:
    def f(x: gf.Tensor, rest: dict[str, Any]) -> tuple[gf.Tensor, dict[str, gf.Tensor]]:
        return gf.sin(x) * rest["scale"], {"same": rest["scale"]}

    x = gf.placeholder("float64", (3,))
    value, tangent = gf.jvp(f, (x, {"scale": x}), (np.ones(3), None))
    at = np.array([0.1, 0.2, 0.3])
    y, y_dot, same_dot = evaluate([value[0], tangent[0], tangent[1]["same"]], {x: at})
    np.testing.assert_allclose(y, np.sin(at) * at)
    np.testing.assert_allclose(y_dot, np.cos(at) * at)  # not of the scale, though it is x as well
    assert not same_dot.any()


def test_arrays_and_numbers_are_inputs_of_a_function() -> None:
    value, tangent = gf.jvp(lambda x, k: gf.square(x) * k, (1.0, 3.0), (1.0, None))
    assert [float(v) for v in evaluate([value, tangent])] == [3.0, 6.0]


def test_it_is_the_sum_of_gradients_times_tangents_for_inputs_that_depend_on_each_other() -> None:
    x = gf.placeholder("float64", ())
    y = gf.sin(x)
    z = y * x
    (tangent,) = gf.jvp([z], [x, y], [1.0, 2.0])
    gx, gy = gf.gradients(z, [x, y])
    have, want = evaluate([tangent, gx + gy * 2.0], {x: 0.7})
    assert have == pytest.approx(want, rel=1e-14)


def test_symbolic_sizes_stay_symbolic() -> None:
    x, t = (gf.placeholder("float64", ("n", 3)) for _ in range(2))
    tangent = gf.jvp(gf.mean(gf.nn.softmax(x) * x, axis=0), [x], [t])
    for rows in (1, 5):
        rng = np.random.default_rng(rows)
        a, d = rng.normal(size=(rows, 3)), rng.normal(size=(rows, 3))

        def f(x: np.ndarray) -> Any:
            e = np.exp(x)
            return (e / e.sum(1, keepdims=True) * x).mean(0)

        (have,) = evaluate([tangent], {x: a, t: d})
        np.testing.assert_allclose(have, (f(a + 1e-6 * d) - f(a - 1e-6 * d)) / 2e-6, rtol=1e-6)


def test_tangents_can_be_differentiated_both_ways() -> None:
    x = gf.placeholder("float64", ())
    first = gf.jvp(gf.exp(x * 2.0), [x], [1.0])
    second = gf.jvp(first, [x], [1.0])
    (third,) = gf.gradients(second, [x])
    assert [float(v) for v in evaluate([first, second, third], {x: 0.0})] == [2.0, 4.0, 8.0]


def test_a_tangent_does_not_pass_a_stop_or_an_int() -> None:
    x = gf.placeholder("float64", (3,))
    stopped, counted = gf.jvp((gf.stop_gradient(x) * 2.0, gf.argmax(x)), [x], [np.ones(3)])
    assert not evaluate([stopped], {x: np.ones(3)})[0].any()
    assert counted.dtype == np.int64


def test_a_deep_graph_takes_no_recursion_and_linear_work() -> None:
    x = gf.placeholder("float64", ())
    y = x
    for _ in range(3000):
        y = y * 1.0001
    tangent = gf.jvp(y, [x], [1.0])
    assert len(gf.Graph(tangent)) < 10_000
    assert evaluate([tangent], {x: 1.0})[0] == pytest.approx(1.0001**3000)


HERE = r"jvp at .*test_forward_mode\.py:\d+: .*"


def test_wrong_arguments_are_told_with_the_users_line() -> None:
    x, n = gf.placeholder("float32", (3,)), gf.placeholder("int32", (3,))
    y = x * 2.0
    with pytest.raises(ArgumentError, match=HERE + "give lists"):
        gf.jvp(y, x, np.ones(3))
    with pytest.raises(ArgumentError, match=HERE + "as many tangents as inputs are needed: 1"):
        gf.jvp(y, [x], [])
    with pytest.raises(ShapeError, match=HERE + r"tangent \(2,\) for .* of shape \(3,\)"):
        gf.jvp(y, [x], [np.ones(2)])
    with pytest.raises(DTypeError, match=HERE + r"tangent float64 .*\.astype\('float32'\)"):
        gf.jvp(y, [x], [gf.zeros((3,), "float64")])
    with pytest.raises(DifferentiationError, match=HERE + "int32, which has no tangent"):
        gf.jvp(y, [n], [np.ones(3)])
    with pytest.raises(DifferentiationError, match=HERE + "not a tensor of the graph"):
        gf.jvp(y, [1.0], [1.0])
    with pytest.raises(ArgumentError, match="a dict of the same keys"):
        gf.jvp(lambda d: d["a"], ({"a": x},), (np.ones(3),))


def test_an_op_without_gradient_is_refused_by_name_and_line() -> None:
    opaque = Op("opaque", infer=lambda x: x, kernel=lambda xp, x: x)
    x = gf.placeholder("float32", (3,))
    told = r"opaque.*test_forward_mode\.py:\d+.*stop_gradient"
    with pytest.raises(DifferentiationError, match=told):
        gf.jvp(opaque(x), [x], [np.ones(3)])


def test_tangents_pass_through_bodies() -> None:
    xs, c = gf.placeholder("float64", (4, 2)), gf.placeholder("float64", (2,))

    @gf.function
    def inner(x: gf.Tensor) -> gf.Tensor:
        return gf.sin(x) * c

    def scan_backwards() -> gf.Tensor:
        last, ys = gf.scan(lambda s, x: (gf.tanh(s * x + c), s * s), c, xs, reverse=True)
        return gf.sum(last) + gf.sum(ys * xs)

    def loop_until_large() -> gf.Tensor:
        return gf.sum(
            gf.while_loop(lambda v: gf.sum(v) < 40.0, lambda v: v * v + c, c, max_iterations=9)
        )

    def choose_branch() -> gf.Tensor:
        return gf.cond(gf.sum(c) < 0.0, gf.sum, lambda v: gf.sum(gf.exp(v) * xs), c)

    rng = np.random.default_rng(0)
    at = {xs: rng.uniform(0.5, 1.5, (4, 2)), c: rng.uniform(0.5, 1.5, (2,))}
    along = {t: rng.normal(size=a.shape) for t, a in at.items()}
    outputs = [
        scan_backwards(),
        loop_until_large(),
        choose_branch(),
        gf.sum(gf.checkpoint(inner)(c)),
    ]
    tangents = gf.jvp(outputs, [xs, c], [along[xs], along[c]])
    (second,) = gf.jvp(tangents[:1], [xs, c], [along[xs], along[c]])

    def evaluate_at(by: float, what: list[gf.Tensor]) -> Any:
        return np.array(evaluate(what, {t: at[t] + by * along[t] for t in at}))

    numeric = (evaluate_at(1e-6, outputs) - evaluate_at(-1e-6, outputs)) / 2e-6
    np.testing.assert_allclose(evaluate_at(0.0, tangents), numeric, rtol=1e-7)
    numeric = (evaluate_at(1e-6, tangents[:1]) - evaluate_at(-1e-6, tangents[:1])) / 2e-6
    np.testing.assert_allclose(evaluate_at(0.0, [second]), numeric, rtol=1e-6)

"""Activations that torch and ONNX have: against plain formulas, and refusing bad parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ops import nn

X = np.linspace(-7, 7, 57)


def value(tensor: Any) -> Any:
    return evaluate([tensor])[0]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_activations_follow_their_formulas() -> None:
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    negative = np.expm1(np.minimum(X, 0))
    ramp = np.clip(X / 6 + 0.5, 0, 1)
    far = np.abs(X) > 0.6
    for have, want in (
        (nn.selu(X), scale * np.where(X > 0, X, alpha * negative)),
        (nn.selu(X, 2.0, 3.0), 3 * np.where(X > 0, X, 2 * negative)),
        (nn.celu(X, 0.5), np.where(X > 0, X, 0.5 * np.expm1(np.minimum(X, 0) / 0.5))),
        (nn.mish(X), X * np.tanh(np.log1p(np.exp(X)))),
        (nn.softsign(X), X / (1 + np.abs(X))),
        (nn.log_sigmoid(X), np.log(sigmoid(X))),
        (nn.swish(X, 1.5), X * sigmoid(1.5 * X)),
        (nn.swish(X), X * sigmoid(X)),
        (nn.relu6(X), np.clip(X, 0, 6)),
        (nn.hard_tanh(X, -2.0, 3.0), np.clip(X, -2, 3)),
        (nn.hard_sigmoid(X), ramp),
        (nn.hard_sigmoid(X, 0.2, 0.4), np.clip(0.2 * X + 0.4, 0, 1)),
        (nn.hard_swish(X), X * ramp),
        (nn.hard_shrink(X, 0.6), X * far),
        (nn.soft_shrink(X, 0.6), np.sign(X) * np.maximum(np.abs(X) - 0.6, 0)),
        (nn.shrink(X, 0.6, -0.2), np.where(far, X + 0.2 * np.sign(X), 0)),
        (nn.thresholded_relu(X, 0.6), np.where(X > 0.6, X, 0)),
        (nn.prelu(X, np.array(0.3)), np.where(X > 0, X, 0.3 * X)),
        (nn.log_sigmoid(np.array([-1e4])), np.array([-1e4])),
        (nn.thresholded_relu(np.array([-np.inf, np.inf])), np.array([0, np.inf])),
    ):
        np.testing.assert_allclose(value(have), want, rtol=1e-10, atol=1e-14)


def test_gates_halve_an_axis() -> None:
    x = np.random.default_rng(0).normal(size=(4, 6))
    a, b = np.split(x, 2, 0)
    np.testing.assert_allclose(value(nn.glu(x, 0)), a * sigmoid(b), rtol=1e-12)
    a, b = np.split(x, 2, 1)
    np.testing.assert_allclose(value(nn.swiglu(x)), a * sigmoid(a) * b, rtol=1e-12)


def test_hardmax_marks_the_first_largest() -> None:
    x = np.array([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]])
    assert value(nn.hardmax(x)).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert value(nn.hardmax(x, 0)).tolist() == [[0, 1, 1], [1, 0, 0]]


def test_slopes_of_prelu_broadcast_and_are_learnt() -> None:
    x, a = gf.placeholder("float64", (2, 3, 4)), gf.placeholder("float64", (3, 1))
    slopes = gf.gradients(gf.sum(nn.prelu(x, a)), [x, a])
    data = np.random.default_rng(0).normal(size=(2, 3, 4))
    dx, da = evaluate(slopes, {x: data, a: np.array([[1.0], [2.0], [3.0]])})
    np.testing.assert_allclose(dx, np.where(data > 0, 1, np.arange(1.0, 4)[:, None]))
    np.testing.assert_allclose(da[:, 0], np.minimum(data, 0).sum((0, 2)))


def test_parameters_out_of_range_are_refused() -> None:
    x = gf.placeholder("float32", (2, 3))
    for wrong, told in (
        (lambda: nn.celu(x, 0), "celu at .*test_activations.*alpha must be a number other than 0"),
        (lambda: nn.selu(x, scale=float("nan")), "scale must be a number, not nan"),
        (lambda: nn.shrink(x, -1), "shrink at .*a number >= 0, got -1"),
        (lambda: nn.hard_tanh(x, 1, 0), "low 1.0 is above high 0.0"),
        (lambda: nn.swish(x, "1"), "beta must be a number, not "),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError, match=told):
            wrong()
    with pytest.raises(
        ShapeError,
        match=r"glu at .*test_activations.*size of axis -1 must be known and even, got 3",
    ):
        nn.glu(x)
    with pytest.raises(DTypeError, match="expected float"):
        nn.hardmax(np.zeros(3, "int32"))


INF = np.inf
ENDS = {  # function: points and slopes there, as in torch
    "relu6": (nn.relu6, [0, 6, 3, INF, -INF, np.nan], [0, 0, 1, 0, 0, 0]),
    "hard_tanh": (nn.hard_tanh, [-1, 1, 0.5, INF, -INF, np.nan], [0, 0, 1, 0, 0, 0]),
    "hard_sigmoid": (nn.hard_sigmoid, [-3, 3, 0, INF, -INF], [0, 0, 1 / 6, 0, 0]),
    "hard_swish": (nn.hard_swish, [-3, 3, 0, INF, -INF], [0, 1, 0.5, 1, 0]),
    "clip": (lambda x: gf.clip(x, -1.0, 1.0), [-1, 1, 0.5, INF, -INF, np.nan], [1, 1, 1, 0, 0, 0]),
    "clip below": (lambda x: gf.clip(x, -1.0), [-1, 1, INF, -INF], [1, 1, 1, 0]),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("function, points, slopes", ENDS.values(), ids=ENDS)
def test_limits_cut_the_gradient_off_at_their_ends_as_in_torch(
    function: Any, points: list[float], slopes: list[float], dtype: str
) -> None:
    x, at = gf.placeholder(dtype, (len(points),)), np.array(points, dtype)
    for cotangent in (1.0, INF, np.nan):
        g = gf.gradients(function(x), [x], [np.full(len(points), cotangent, dtype)])[0]
        want = [cotangent * slope if slope else 0 for slope in slopes]
        with gf.Session() as session:
            np.testing.assert_allclose(session.run(g, {x: at}), want, rtol=1e-6)

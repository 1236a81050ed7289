"""Softmax, cross entropy, layer normalisation, activations, dropout: against plain formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import Tensor
from graphflow.ops import nn
from graphflow.ops.randomness import random
from graphflow.ops.reductions.reduce import mean, sum
from graphflow.transforms.reverse_mode import gradients


def value(tensor: Tensor) -> Any:
    return evaluate([tensor])[0]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 9), st.floats(0.1, 300))
def test_softmax_and_its_logarithm_follow_their_formulas(
    rows: int, classes: int, seed: int, scale: float
) -> None:
    x = np.random.default_rng(seed).normal(size=(rows, classes)) * scale
    np.testing.assert_allclose(value(nn.softmax(x)), softmax(x), rtol=1e-12, atol=1e-300)
    logs = value(nn.log_softmax(x.T, axis=0)).T
    shifted = x - x.max(-1, keepdims=True)
    np.testing.assert_allclose(
        logs, shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)), rtol=1e-12, atol=1e-12
    )


def test_softmax_wants_an_axis_with_elements() -> None:
    with pytest.raises(ShapeError, match=r"softmax at .*axis -1 .*rank 0"):
        nn.softmax(placeholder("float32", ()))
    with pytest.raises(ShapeError, match="no elements"):
        nn.log_softmax(placeholder("float32", (2, 0)))
    with pytest.raises(DTypeError):
        nn.softmax(placeholder("int32", (2,)))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_cross_entropy_is_the_negative_log_probability_of_the_label(
    dtype: str, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=(*shape, 5)) * 30, rng.integers(0, 5, shape).astype(dtype)
    have = value(nn.cross_entropy(logits, labels))
    want = -np.take_along_axis(np.log(softmax(logits)), labels[..., None].astype(int), -1)[..., 0]
    assert have.shape == shape
    np.testing.assert_allclose(have, want, rtol=1e-9)


def test_the_gradient_of_cross_entropy_is_softmax_less_one_hot_also_for_unknown_sizes() -> None:
    x, y = placeholder("float64", (None, 4)), placeholder("int32", (None,))
    (g,) = gradients(mean(nn.cross_entropy(x, y)), [x])
    logits, labels = np.random.default_rng(0).normal(size=(3, 4)), np.array([0, 3, 3], "int32")
    have = evaluate([g], {x: logits, y: labels})[0]
    np.testing.assert_allclose(have, (softmax(logits) - np.eye(4)[labels]) / 3, rtol=1e-12)


@pytest.mark.parametrize("bad", [-1, 4, 127])
def test_a_label_that_is_no_class_is_an_error_also_where_only_the_gradient_is_computed(
    bad: int,
) -> None:
    x, y = placeholder("float32", (2, 4)), placeholder("int8", (2,))
    loss = nn.cross_entropy(x, y)
    fed = {x: np.zeros((2, 4), "f"), y: np.array([1, bad], "int8")}
    for wanted in ([loss], gradients(loss, [x])):
        with pytest.raises(IndexError, match=rf"in \[0, 4\), got values from .*{bad}"):
            evaluate(wanted, fed)


def test_cross_entropy_of_no_rows_is_empty() -> None:
    x, y = placeholder("float32", (None, 4)), placeholder("int8", (None,))
    loss = nn.cross_entropy(x, y)
    fed = {x: np.zeros((0, 4), "f"), y: np.zeros(0, "int8")}
    values = evaluate([loss, *gradients(loss, [x])], fed)
    assert [v.shape for v in values] == [(0,), (0, 4)]


def test_cross_entropy_refuses_labels_of_another_shape_or_kind() -> None:
    x = placeholder("float32", (3, 4))
    with pytest.raises(ShapeError, match=r"logits \(3, 4\), labels \(2,\)"):
        nn.cross_entropy(x, placeholder("int64", (2,)))
    with pytest.raises(ShapeError, match="without the last axis"):
        nn.cross_entropy(x, placeholder("int64", (3, 4)))
    with pytest.raises(DTypeError, match=r"labels must be ints.*astype\('int64'\)"):
        nn.cross_entropy(x, placeholder("float32", (3,)))


@pytest.mark.parametrize("axis, axes", [(-1, (2,)), ((1, 2), (1, 2)), (1, (1,)), ((0, -1), (0, 2))])
def test_layer_norm_standardises_scales_and_shifts(axis: Any, axes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(3, 2, (2, 3, 4))
    scale, bias = rng.normal(size=(2, *(x.shape[a] for a in axes)))
    broadcast = [n if a in axes else 1 for a, n in enumerate(x.shape)]
    unit = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
    want = unit * scale.reshape(broadcast) + bias.reshape(broadcast)
    np.testing.assert_allclose(value(nn.layer_norm(x, scale, bias, axis)), want, rtol=1e-10)


def test_layer_norm_of_float16_does_not_overflow() -> None:
    x = np.array([[-1000, 1000, -1000, 1000]], "float16")
    one, zero = np.ones(4, "float16"), np.zeros(4, "float16")
    assert value(nn.layer_norm(x, one, zero)).tolist() == [[-1, 1, -1, 1]]


def test_layer_norm_refuses_what_does_not_fit() -> None:
    x, v = placeholder("float32", (2, 3)), placeholder("float32", (3,))
    with pytest.raises(ShapeError, match=r"scale \(2,\) is not of the normalised shape \(3,\)"):
        nn.layer_norm(x, placeholder("float32", (2,)), v)
    with pytest.raises(DTypeError, match="bias is float64"):
        nn.layer_norm(x, v, placeholder("float64", (3,)))
    with pytest.raises(ArgumentError, match="epsilon"):
        nn.layer_norm(x, v, v, epsilon=-1)


def test_activations_follow_their_formulas() -> None:
    x = np.linspace(-4, 4, 33)
    phi = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
    cubic = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    logistic = 1 / (1 + np.exp(-x))
    for have, want in (
        (nn.relu(x), np.maximum(x, 0)),
        (nn.sigmoid(x), logistic),
        (nn.silu(x), x * logistic),
        (nn.softplus(x), np.log1p(np.exp(x))),
        (nn.elu(x, 0.5), np.where(x > 0, x, 0.5 * np.expm1(x))),
        (nn.leaky_relu(x, 0.2), np.where(x > 0, x, 0.2 * x)),
        (nn.gelu(x), x * phi),
        (nn.gelu(x, approximate="tanh"), 0.5 * x * (1 + cubic)),
        (nn.tanh(x), np.tanh(x)),
    ):
        np.testing.assert_allclose(value(have), want, rtol=1e-12, atol=1e-13)


def test_activations_refuse_parameters_that_are_no_numbers() -> None:
    x = placeholder("float32", (2,))
    for wrong in (
        lambda: nn.gelu(x, approximate="fast"),
        lambda: nn.elu(x, alpha=None),
        lambda: nn.leaky_relu(x, slope=math.inf),
        lambda: nn.dropout(x, 1.0),
        lambda: nn.dropout(x, -0.1),
    ):
        with pytest.raises(ArgumentError, match=r"at .*test_nn\.py:\d+"):
            wrong()


def test_float32_stays_float32_through_every_activation() -> None:
    x = np.linspace(-1, 1, 5).astype("float32")
    for f in (nn.relu, nn.sigmoid, nn.silu, nn.softplus, nn.elu, nn.leaky_relu, nn.gelu, nn.tanh):
        t = placeholder("float32", (5,))
        y = f(t)
        (g,) = gradients(sum(y), [t])
        assert [v.dtype for v in evaluate([y, g], {t: x})] == [np.float32] * 2


def test_dropout_keeps_the_mean_and_the_gradient_follows_the_mask() -> None:
    x = placeholder("float32", (None,))
    with random.seed(3):
        y = nn.dropout(x, 0.25)
    (g,) = gradients(y, [x])
    ones = {x: np.ones(20_000, "f")}
    first, slope = evaluate([y, g], ones)
    assert np.unique(first).tolist() == [0, pytest.approx(4 / 3)]
    assert first.mean() == pytest.approx(1, abs=0.02)
    assert slope.tolist() == first.tolist()
    assert (evaluate([y], ones, step=1)[0] != first).any()


def test_two_dropouts_draw_different_masks_and_rate_0_draws_none() -> None:
    x = placeholder("float32", (1000,))
    a, b = evaluate([nn.dropout(x, 0.5), nn.dropout(x, 0.5)], {x: np.ones(1000, "f")})
    assert (a != b).any()
    assert nn.dropout(x, 0) is x

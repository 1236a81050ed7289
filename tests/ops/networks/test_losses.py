"""Losses: against plain formulas, and refusing what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ops import nn


def value(tensor: Any) -> Any:
    return evaluate([tensor])[0]


def log_softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    shifted = x - x.max(axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


@pytest.fixture
def pair() -> Any:
    return np.random.default_rng(0).normal(0, 2, (2, 3, 4))


def test_losses_of_numbers_follow_their_formulas(pair: Any) -> None:
    a, b = pair
    d = np.abs(a - b)
    huber = np.where(d <= 0.7, d * d / 2, 0.7 * (d - 0.35))
    for have, want in (
        (nn.mse_loss(a, b), d**2),
        (nn.l1_loss(a, b), d),
        (nn.huber_loss(a, b, 0.7), huber),
        (nn.smooth_l1_loss(a, b, 0.7), huber / 0.7),
        (nn.smooth_l1_loss(a, b, 0), d),
    ):
        np.testing.assert_allclose(value(have), want, rtol=1e-12)


def test_reductions_are_over_the_weighted_losses(pair: Any) -> None:
    a, b = pair
    weights = np.arange(4.0)
    want = (a - b) ** 2 * weights
    for reduction, reduced in (("none", want), ("mean", want.mean()), ("sum", want.sum())):
        np.testing.assert_allclose(value(nn.mse_loss(a, b, weights, reduction)), reduced)


def test_losses_of_probabilities_follow_their_formulas(pair: Any) -> None:
    x, y = pair[0], np.random.default_rng(1).random((3, 4))
    p = 1 / (1 + np.exp(-x))
    want = -(y * np.log(p) + (1 - y) * np.log(1 - p))
    np.testing.assert_allclose(value(nn.binary_cross_entropy(p, y)), want, rtol=1e-10)
    have = value(nn.binary_cross_entropy_with_logits(x, y))
    np.testing.assert_allclose(have, want, rtol=1e-10)
    weighted = -(3 * y * np.log(p) + (1 - y) * np.log(1 - p))
    have = value(nn.binary_cross_entropy_with_logits(x, y, positive_weight=3.0))
    np.testing.assert_allclose(have, weighted, rtol=1e-10)
    y[0] = 0
    want = np.where(y > 0, y * np.log(np.where(y > 0, y, 1)), 0) - y * x
    np.testing.assert_allclose(value(nn.kl_div(x, y)), want, rtol=1e-10)
    have = value(nn.kl_div(x, pair[1], log_target=True))
    np.testing.assert_allclose(have, np.exp(pair[1]) * (pair[1] - x), rtol=1e-10)


def test_certainty_and_huge_logits_give_finite_losses() -> None:
    assert value(nn.binary_cross_entropy([0.0, 1.0], [1.0, 0.0])).tolist() == [100, 100]
    have = value(nn.binary_cross_entropy_with_logits([1e4, -1e4], [0.0, 1.0]))
    assert have.tolist() == [1e4, 1e4]


@given(
    labels=st.lists(st.sampled_from([-1, 0, 1, 2]), min_size=1, max_size=6),
    weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 9),
)
@settings(max_examples=40)
def test_cross_entropy_with_weights_ignored_labels_and_smoothing(
    labels: list[int], weighted: bool, smoothing: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(len(labels), 3)), np.array(labels)
    w = rng.uniform(0.5, 2, 3) if weighted else np.ones(3)
    seen, safe = y != -1, np.where(y == -1, 0, y)
    hot = np.eye(3)[safe] * (1 - smoothing) + smoothing / 3
    want = -(log_softmax(x) * w * hot).sum(-1) * seen
    attrs: dict[str, Any] = {"ignore_index": -1, "label_smoothing": smoothing}
    if weighted:
        attrs["weights"] = w
    np.testing.assert_allclose(value(nn.cross_entropy(x, y, **attrs)), want, atol=1e-12)
    if seen.any():
        have = value(nn.cross_entropy(x, y, reduction="mean", **attrs))
        assert have == pytest.approx(want.sum() / (w[safe] * seen).sum())


def test_classes_may_be_on_any_axis_and_labels_probabilities() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 4, 3)), rng.integers(0, 4, (2, 3))
    logs = log_softmax(x, 1)
    want = -np.take_along_axis(logs, y[:, None], 1)[:, 0]
    np.testing.assert_allclose(value(nn.cross_entropy(x, y, axis=1)), want, rtol=1e-10)
    np.testing.assert_allclose(value(nn.nll_loss(logs, y, axis=1)), want, rtol=1e-10)
    p = rng.random((2, 4, 3))
    have = value(nn.cross_entropy(x, p, axis=1))
    np.testing.assert_allclose(have, -(p * logs).sum(1), rtol=1e-10)


@pytest.mark.parametrize("bad", [-1, 4])
def test_a_label_that_is_no_class_is_an_error(bad: int) -> None:
    x, y = np.zeros((2, 4), "f"), np.array([0, bad])
    for loss in (nn.nll_loss, nn.cross_entropy):
        with pytest.raises(IndexError, match=rf"in \[0, 4\), got values from .*{bad}"):
            value(loss(x, y))
        with pytest.raises(IndexError, match=r"in \[0, 4\)"):
            value(loss(x, y, ignore_index=-100))
    assert value(nn.nll_loss(x, y, ignore_index=bad)).tolist() == [0, 0]


def test_distances_and_margins_follow_their_formulas(pair: Any) -> None:
    a, b = pair
    norms = np.linalg.norm(a, axis=0) * np.linalg.norm(b, axis=0)
    have = value(nn.cosine_similarity(a, b, 0))
    np.testing.assert_allclose(have, (a * b).sum(0) / norms, rtol=1e-10)
    assert value(nn.cosine_similarity([0.0, 0.0], [1.0, 2.0])) == 0
    sign = np.sign(b)
    have = value(nn.hinge_embedding_loss(a, sign, 0.5))
    np.testing.assert_allclose(have, np.where(sign > 0, a, np.maximum(0, 0.5 - a)))
    have = value(nn.margin_ranking_loss(a, b, sign, 0.5))
    np.testing.assert_allclose(have, np.maximum(0, 0.5 - sign * (a - b)))
    far = np.linalg.norm(a - b + 1e-6, axis=-1)
    have = value(nn.triplet_margin_loss(a, a, b))
    np.testing.assert_allclose(have, np.maximum(0, 1 + 2e-6 - far), atol=1e-9)


def test_losses_refuse_what_does_not_fit() -> None:
    x, y = gf.placeholder("float32", (3, 4)), gf.placeholder("float32", (3,))
    with pytest.raises(ShapeError, match=r"mse_loss at .*test_losses.*\(3, 4\) and .*\(3,\)"):
        nn.mse_loss(x, y)
    with pytest.raises(ShapeError, match="differ in shape"):
        nn.l1_loss(x, np.zeros((3, 1), "f"))
    with pytest.raises(ArgumentError, match="reduction is 'none', 'mean' or 'sum', not 'avg'"):
        nn.mse_loss(x, x, reduction="avg")
    with pytest.raises(ArgumentError, match="delta is above 0"):
        nn.huber_loss(x, x, 0)
    with pytest.raises(DTypeError):
        nn.mse_loss(np.zeros(3, "int32"), np.zeros(3, "int32"))
    labels = gf.placeholder("int64", (3,))
    with pytest.raises(ShapeError, match=r"weights \(3,\) are one for each of 4 classes"):
        nn.cross_entropy(x, labels, weights=np.ones(3, "f"))
    with pytest.raises(ArgumentError, match="label_smoothing is a share"):
        nn.cross_entropy(x, labels, label_smoothing=2)
    with pytest.raises(ArgumentError, match="ignore_index is an int"):
        nn.cross_entropy(x, labels, ignore_index=0.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="ignore_index is for int labels"):
        nn.cross_entropy(x, x, ignore_index=0)
    with pytest.raises(ShapeError, match="labels have the shape"):
        nn.nll_loss(x, gf.placeholder("int64", (3, 4)))

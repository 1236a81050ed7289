"""Losses: against plain formulas, and refusing what does not fit."""

from __future__ import annotations

from functools import partial
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


# Rows that do not count, and classes of probability 0 ---------------------------------------------

BAD = [np.nan, np.inf, -np.inf]
OF_PAIRS = {
    "mse": nn.mse_loss,
    "l1": nn.l1_loss,
    "huber": nn.huber_loss,
    "smooth l1": nn.smooth_l1_loss,
    "bce": nn.binary_cross_entropy,
    "bce of logits": nn.binary_cross_entropy_with_logits,
    "weighted bce of logits": lambda *a, **kw: nn.binary_cross_entropy_with_logits(
        *a, positive_weight=2.0, **kw
    ),
    "kl": nn.kl_div,
    "kl of logarithms": lambda *a, **kw: nn.kl_div(*a, log_target=True, **kw),
}
OF_CLASSES = {
    "nll": lambda x, w: nn.nll_loss(x, [0, 9, 2], weights=w, ignore_index=9),
    "cross entropy": lambda x, w: nn.cross_entropy(x, [0, 9, 2], weights=w, ignore_index=9),
    "smoothed": lambda x, w: nn.cross_entropy(
        x, [0, 9, 2], weights=w, ignore_index=9, label_smoothing=0.1
    ),
    "mean": lambda x, w: nn.cross_entropy(
        x, [0, 9, 2], weights=w, ignore_index=9, reduction="mean"
    ),
    "weight 0": lambda x, w: nn.cross_entropy(x, [0, 1, 2], weights=[1.0, 0.0, 2.0, 1.0]),
    "probabilities": lambda x, w: nn.cross_entropy(
        x, [[0.2, 0.8, 0, 0], [0, 0, 0, 0], [0, 0, 1.0, 0]], weights=w
    ),
}


def loss_and_slopes(build: Any, *arrays: Any) -> list[Any]:
    """A loss, its gradients, and theirs."""
    xs = [gf.placeholder(a.dtype, a.shape) for a in arrays]
    loss = build(*xs)
    first = gf.gradients(gf.sum(loss), xs)
    second = gf.gradients([gf.sum(gf.sin(g)) for g in first], xs)
    with np.errstate(all="ignore"):
        return list(evaluate([loss, *first, *second], dict(zip(xs, arrays, strict=True))))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("loss", OF_PAIRS.values(), ids=OF_PAIRS)
def test_what_has_the_weight_0_may_be_nan(loss: Any, reduction: str, bad: float) -> None:
    rng = np.random.default_rng(0)
    w = np.array([[1.0], [0.0], [2.0]])
    inputs = [rng.uniform(0.1, 0.9, (3, 4)) for _ in range(2)]

    def build(x: Any, y: Any) -> Any:
        return loss(x, y, weights=w, reduction=reduction)

    want = loss_and_slopes(build, *inputs)
    assert all(np.isfinite(a).all() for a in want)
    for i in range(2):
        spoilt = [np.where((w == 0) & (i == j), bad, a) for j, a in enumerate(inputs)]
        for have, wanted in zip(loss_and_slopes(build, *spoilt), want, strict=True):
            np.testing.assert_array_equal(have, wanted)


def test_a_weight_of_0_has_the_loss_for_a_gradient(pair: Any) -> None:
    a, b = pair
    slope = loss_and_slopes(lambda w: nn.mse_loss(a, b, w), np.zeros((3, 4)))[1]
    np.testing.assert_allclose(slope, (a - b) ** 2)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", OF_CLASSES.values(), ids=OF_CLASSES)
def test_rows_that_are_ignored_may_be_nan(loss: Any, weighted: bool, bad: float) -> None:
    x = np.random.default_rng(0).normal(size=(3, 4))
    spoilt = x.copy()
    spoilt[1] = bad
    w = [0.5, 1.0, 2.0, 0.3] if weighted else None
    have, want = (loss_and_slopes(lambda x: loss(x, w), a) for a in (spoilt, x))
    assert (want[1][1] == 0).all()
    for a, b in zip(have, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_class_of_probability_0_may_have_a_logarithm_of_minus_infinity() -> None:
    logs, p = np.array([-np.inf, np.log(0.4), np.log(0.6)]), np.array([0.0, 0.5, 0.5])
    some = -0.5 * (logs[1:]).sum()
    for loss, want in (
        (lambda x: nn.cross_entropy(x, p), some),
        (lambda x: nn.cross_entropy(x, [1.0, 0.5, 0.5], weights=[0.0, 1.0, 1.0]), some),
        (lambda x: nn.kl_div(x, p, reduction="sum"), some + np.log(0.5)),
        (lambda x: nn.kl_div(x, logs, log_target=True, reduction="sum"), 0.0),
    ):
        value, slope, curvature = loss_and_slopes(loss, logs)
        assert value == pytest.approx(want)
        assert slope[0] == 0 and np.isfinite(curvature).all()
    found = loss_and_slopes(lambda p: nn.kl_div(logs, p), p)
    assert found[0][0] == found[1][0] == 0
    _, *slopes = loss_and_slopes(nn.binary_cross_entropy, np.array([0.0, 1]), np.array([0.0, 1]))
    assert slopes[0].tolist() == [0, 0] and all(np.isfinite(s).all() for s in slopes)
    for loss in ("bce of logits", "weighted bce of logits"):
        of_logits = partial(OF_PAIRS[loss], target=[0.0, 1.0])
        found = loss_and_slopes(of_logits, np.array([-np.inf, np.inf]))
        assert [f.tolist() for f in found] == [[0, 0]] * 3


def test_a_triplet_without_epsilon_has_the_gradient_0_where_two_vectors_are_one() -> None:
    a, b = np.zeros((1, 2)), np.full((1, 2), 0.3)
    slopes = loss_and_slopes(lambda *x: nn.triplet_margin_loss(*x, epsilon=0.0), a, a, b)
    assert slopes[2].tolist() == [[0, 0]] and np.isfinite(slopes[1]).all()


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
    with pytest.raises(ArgumentError, match="reduction must be 'none', 'mean' or 'sum', got 'avg'"):
        nn.mse_loss(x, x, reduction="avg")
    with pytest.raises(ArgumentError, match="delta must be a positive number"):
        nn.huber_loss(x, x, 0)
    with pytest.raises(DTypeError):
        nn.mse_loss(np.zeros(3, "int32"), np.zeros(3, "int32"))
    labels = gf.placeholder("int64", (3,))
    with pytest.raises(ShapeError, match=r"weights \(3,\) are one for each of 4 classes"):
        nn.cross_entropy(x, labels, weights=np.ones(3, "f"))
    with pytest.raises(ArgumentError, match="label_smoothing must be a share"):
        nn.cross_entropy(x, labels, label_smoothing=2)
    with pytest.raises(ArgumentError, match="ignore_index must be an int"):
        nn.cross_entropy(x, labels, ignore_index=0.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="ignore_index is for int labels"):
        nn.cross_entropy(x, x, ignore_index=0)
    with pytest.raises(ShapeError, match="labels have the shape"):
        nn.nll_loss(x, gf.placeholder("int64", (3, 4)))

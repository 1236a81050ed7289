"""Losses that are likelihoods, focal and cosine embedding losses: formulas, slopes, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ops import nn

RANDOM = np.random.default_rng(0)
A, B = RANDOM.normal(0, 2, (2, 3, 4))
POSITIVE, COUNTS = RANDOM.uniform(0.5, 3, (3, 4)), RANDOM.poisson(2, (3, 4)).astype(float)
SIDES = np.array([1.0, -1.0, 1.0])


def value(tensor: Any) -> Any:
    return evaluate([tensor])[0]


def test_a_gaussian_loss_is_the_negative_log_of_the_density() -> None:
    want = -stats.norm.logpdf(B, A, np.sqrt(POSITIVE))
    np.testing.assert_allclose(value(nn.gaussian_nll_loss(A, B, POSITIVE, full=True)), want)
    have = value(nn.gaussian_nll_loss(A, B, POSITIVE))
    np.testing.assert_allclose(have, want - np.log(2 * np.pi) / 2, rtol=1e-10)
    for variance in (POSITIVE[:, :1], POSITIVE[0], 0.7):  # one for each row, each column, for all
        want = -stats.norm.logpdf(B, A, np.sqrt(np.broadcast_to(variance, A.shape))).mean()
        have = value(nn.gaussian_nll_loss(A, B, variance, full=True, reduction="mean"))
        np.testing.assert_allclose(have, want, rtol=1e-12)


def test_a_variance_below_epsilon_counts_as_epsilon_and_can_rise() -> None:
    v = gf.placeholder("float64", (3,))
    loss = nn.gaussian_nll_loss(np.ones(3), np.zeros(3), v, epsilon=0.1)
    (slope,) = gf.gradients(loss, [v])
    have, rise = evaluate([loss, slope], {v: np.array([0.0, -5.0, 0.1])})
    np.testing.assert_allclose(have, (np.log(0.1) + 10) / 2, rtol=1e-12)
    np.testing.assert_allclose(rise, (10 - 100) / 2, rtol=1e-12)


def test_a_poisson_loss_is_the_negative_log_of_the_probability() -> None:
    want = -stats.poisson.logpmf(COUNTS, np.exp(A))
    np.testing.assert_allclose(value(nn.poisson_nll_loss(A, COUNTS, full=True)), want, rtol=1e-9)
    have = value(nn.poisson_nll_loss(np.exp(A), COUNTS, log_input=False, full=True))
    np.testing.assert_allclose(have, want, rtol=1e-5)
    assert value(nn.poisson_nll_loss([-np.inf], [0.0])).tolist() == [0.0]
    assert value(nn.poisson_nll_loss([0.0], [0.0], log_input=False)).tolist() == [0.0]
    have = value(nn.poisson_nll_loss(A, COUNTS, reduction="sum"))
    np.testing.assert_allclose(have, (np.exp(A) - COUNTS * A).sum(), rtol=1e-12)


@pytest.mark.parametrize("alpha", [0.25, None])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("target", [(B > 0).astype(float), 1 / (1 + np.exp(-B))])
def test_a_focal_loss_weighs_the_cross_entropy(
    alpha: float | None, gamma: float, target: np.ndarray
) -> None:
    p = 1 / (1 + np.exp(-A))
    entropy = -(target * np.log(p) + (1 - target) * np.log(1 - p))
    right = p * target + (1 - p) * (1 - target)
    factor = 1.0 if alpha is None else alpha * target + (1 - alpha) * (1 - target)
    have = value(nn.focal_loss(A, target, alpha, gamma))
    np.testing.assert_allclose(have, factor * (1 - right) ** gamma * entropy, rtol=1e-9)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_a_focal_loss_of_certain_logits_is_finite_and_so_is_its_slope(gamma: float) -> None:
    x = gf.placeholder("float32", (4,))
    loss = nn.focal_loss(x, np.array([1, 0, 0, 1], "f"), None, gamma)
    feeds = {x: np.array([1e4, -1e4, 1e4, -1e4], "f")}
    have, slope = evaluate([loss, *gf.gradients(loss, [x])], feeds)
    assert have.tolist() == [0, 0, 1e4, 1e4] and slope.tolist() == [0, 0, 1, -1]


def test_a_cosine_embedding_loss_is_of_the_angle() -> None:
    cos = (A * B).sum(-1) / np.linalg.norm(A, axis=-1) / np.linalg.norm(B, axis=-1)
    for margin in (0.0, 0.3):
        want = np.where(SIDES > 0, 1 - cos, np.maximum(0, cos - margin))
        have = value(nn.cosine_embedding_loss(A, B, SIDES, margin))
        np.testing.assert_allclose(have, want, rtol=1e-12)
    assert value(nn.cosine_embedding_loss(A * 0, B, SIDES)).tolist() == [1, 0, 1]
    have = value(nn.cosine_embedding_loss(A[0], B[0], 1.0))
    np.testing.assert_allclose(have, 1 - cos[0], rtol=1e-12)


@pytest.mark.parametrize(
    ("loss", "arrays"),
    [
        (nn.gaussian_nll_loss, [A, B, POSITIVE]),
        (nn.gaussian_nll_loss, [A, B, POSITIVE[:, :1]]),
        (lambda x, y: nn.poisson_nll_loss(x, y, full=True), [A, POSITIVE]),
        (lambda x: nn.poisson_nll_loss(x, COUNTS, log_input=False), [POSITIVE]),
        (lambda x, y: nn.focal_loss(x, y, gamma=1.5), [A, POSITIVE / 4]),
        (lambda a, b: nn.cosine_embedding_loss(a, b, -SIDES, -1.5), [A, B]),
    ],
    ids=["gaussian", "gaussian of rows", "poisson", "poisson of rates", "focal", "cosine"],
)
def test_slopes_are_those_of_differences(loss: Any, arrays: list[np.ndarray]) -> None:
    xs = [gf.placeholder("float64", a.shape) for a in arrays]
    total = gf.sum(loss(*xs))
    slopes = evaluate(gf.gradients(total, xs), dict(zip(xs, arrays, strict=True)))
    for i, slope in enumerate(slopes):
        direction = np.random.default_rng(i).normal(size=arrays[i].shape)
        feeds = dict(zip(xs, arrays, strict=True))
        ends = [
            evaluate([total], feeds | {xs[i]: arrays[i] + step * direction})[0]
            for step in (1e-6, -1e-6)
        ]
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx((slope * direction).sum(), rel=1e-6)


def test_weights_of_zero_hide_what_is_no_number() -> None:
    x = gf.placeholder("float32", (2,))
    for loss in (
        nn.gaussian_nll_loss(x, np.ones(2, "f"), np.ones(2, "f"), weights=[0.0, 1.0]),
        nn.poisson_nll_loss(x, np.ones(2, "f"), weights=[0.0, 1.0]),
        nn.focal_loss(x, np.ones(2, "f"), weights=[0.0, 1.0]),
    ):
        have, slope = evaluate([loss, *gf.gradients(loss, [x])], {x: np.array([np.nan, 0.5], "f")})
        assert have[0] == slope[0] == 0 and np.isfinite([*have, *slope]).all()


def test_16_bit_losses_round_once() -> None:
    x, y = A.astype("float16"), np.abs(B).astype("float16")
    for loss in (
        lambda x, y: nn.gaussian_nll_loss(x, y, y), nn.poisson_nll_loss, nn.focal_loss,
        lambda x, y: nn.cosine_embedding_loss(x, y, SIDES.astype(x.dtype)),
    ):  # fmt: skip
        have, want = value(loss(x, y)), value(loss(x.astype("f"), y.astype("f")))
        assert have.dtype == np.float16 and have.tolist() == want.astype("float16").tolist()


@pytest.mark.parametrize(
    ("mistake", "error", "told"),
    [
        (lambda: nn.gaussian_nll_loss(A, B[:2], POSITIVE), ShapeError, "nll_loss at .*dif"),
        (lambda: nn.gaussian_nll_loss(A, B, np.ones((5, 3, 4))), ShapeError, r"\(5, 3, 4\)"),
        (lambda: nn.gaussian_nll_loss(A, B, A, epsilon=0), ArgumentError, "epsilon must be a pos"),
        (lambda: nn.poisson_nll_loss(A, COUNTS, epsilon=-1), ArgumentError, "epsilon must be"),
        (lambda: nn.poisson_nll_loss([1], [2]), DTypeError, "float"),
        (lambda: nn.focal_loss(A, B, 1.5), ArgumentError, r"alpha in \[0, 1\], got 2.0 and 1.5"),
        (lambda: nn.focal_loss(A, B, gamma=-1), ArgumentError, "gamma >= 0"),
        (lambda: nn.focal_loss(A, B, reduction="avg"), ArgumentError, "reduction must be"),
        (lambda: nn.cosine_embedding_loss(A, B, B), ShapeError, "differ in shape"),
        (lambda: nn.cosine_embedding_loss(A, B, SIDES, np.nan), ArgumentError, "margin"),
    ],
)  # fmt: skip
def test_mistakes_are_told(mistake: Callable[[], Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        mistake()

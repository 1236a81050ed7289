"""Losses against torch, on random shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.ops import nn

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree  # noqa: E402

F = torch.nn.functional
REDUCTIONS = st.sampled_from(["none", "mean", "sum"])
SEEDS = st.integers(0, 99)
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)

OF_NUMBERS: dict[str, tuple[Any, Any]] = {
    "mse": (nn.mse_loss, F.mse_loss),
    "l1": (nn.l1_loss, F.l1_loss),
    "huber": (
        lambda a, b, reduction: nn.huber_loss(a, b, 0.7, reduction=reduction),
        lambda a, b, reduction: F.huber_loss(a, b, delta=0.7, reduction=reduction),
    ),
    "smooth_l1": (
        lambda a, b, reduction: nn.smooth_l1_loss(a, b, 0.7, reduction=reduction),
        lambda a, b, reduction: F.smooth_l1_loss(a, b, beta=0.7, reduction=reduction),
    ),
    "with_logits": (nn.binary_cross_entropy_with_logits, F.binary_cross_entropy_with_logits),
}


@pytest.mark.parametrize("name", OF_NUMBERS)
@given(SHAPES, SEEDS, REDUCTIONS)
@settings(max_examples=15)
def test_losses_of_numbers(name: str, shape: tuple[int, ...], seed: int, reduction: str) -> None:
    rng = np.random.default_rng(seed)
    ours, theirs = OF_NUMBERS[name]
    agree(
        lambda a, b: ours(a, b, reduction=reduction),
        lambda a, b: theirs(a, b, reduction=reduction),
        [rng.normal(size=shape), rng.normal(size=shape)],
    )


@pytest.mark.filterwarnings("ignore:reduction. .mean. divides")
@given(SHAPES, SEEDS, REDUCTIONS)
@settings(max_examples=15)
def test_losses_of_probabilities(shape: tuple[int, ...], seed: int, reduction: str) -> None:
    rng = np.random.default_rng(seed)
    p, y, w = rng.random(shape), rng.random(shape), rng.random(shape[-1])
    agree(
        lambda p, y: nn.binary_cross_entropy(p, y, w, reduction),
        lambda p, y: F.binary_cross_entropy(p, y, torch.tensor(w), reduction=reduction),
        [p, y],
    )
    agree(
        lambda x, y: nn.binary_cross_entropy_with_logits(x, y, w, w * 3, reduction),
        lambda x, y: F.binary_cross_entropy_with_logits(
            x, y, torch.tensor(w), pos_weight=torch.tensor(w * 3), reduction=reduction
        ),
        [rng.normal(size=shape), y],
    )
    y = y * (y > 0.3)
    agree(
        lambda x: nn.kl_div(x, y, reduction=reduction),
        lambda x: F.kl_div(x, torch.tensor(y), reduction=reduction),
        [np.log(p)],
    )
    agree(
        lambda x, t: nn.kl_div(x, t, log_target=True, reduction=reduction),
        lambda x, t: F.kl_div(x, t, log_target=True, reduction=reduction),
        [np.log(p), rng.normal(size=shape)],
    )


def test_binary_cross_entropy_of_certainty_is_finite() -> None:
    p, y = np.array([0.0, 1.0, 0.0, 1.0]), np.array([0.0, 1.0, 1.0, 0.0])
    agree(
        lambda p: nn.binary_cross_entropy(p, y),
        lambda p: F.binary_cross_entropy(p, torch.tensor(y), reduction="none"),
        [p],
        rtol=1e-7,  # torch's 1e-12 is a float32
    )


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(2, 5)),
    places=st.lists(st.integers(1, 3), max_size=2),
    seed=SEEDS,
    reduction=REDUCTIONS,
    weighted=st.booleans(),
    ignored=st.sampled_from([None, 0, -100]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
)
@settings(max_examples=60)
def test_losses_of_classes(
    shape: tuple[int, int], places: list[int], seed: int, reduction: str, weighted: bool,
    ignored: int | None, smoothing: float,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    n, classes = shape
    x = rng.normal(size=(n, classes, *places))
    labels = rng.integers(0, classes, (n, *places))
    labels.reshape(-1)[0] = 1  # not all are ignored
    if ignored is not None:
        labels[rng.random(labels.shape) < 0.3] = ignored
        labels.reshape(-1)[0] = 1
    weights = rng.uniform(0.2, 2, classes) if weighted else None
    given_weights = None if weights is None else torch.tensor(weights)
    there: dict[str, Any] = {
        "weight": given_weights,
        "ignore_index": -1 if ignored is None else ignored,
        "reduction": reduction,
    }
    here: dict[str, Any] = {
        "weights": weights, "ignore_index": ignored, "reduction": reduction, "axis": 1,
    }  # fmt: skip
    agree(
        lambda x: nn.cross_entropy(x, labels, label_smoothing=smoothing, **here),
        lambda x: F.cross_entropy(x, torch.tensor(labels), label_smoothing=smoothing, **there),
        [x],
    )
    agree(
        lambda x: nn.nll_loss(x, labels, **here),
        lambda x: F.nll_loss(x, torch.tensor(labels), **there),
        [x],
    )


@given(st.integers(1, 3), st.integers(1, 4), SEEDS, st.sampled_from([0.0, 0.2]))
@settings(max_examples=20)
def test_cross_entropy_of_probabilities(n: int, classes: int, seed: int, smoothing: float) -> None:
    rng = np.random.default_rng(seed)
    w = rng.uniform(0.2, 2, classes)
    for reduction in ("none", "sum"):
        agree(
            lambda x, t, r=reduction: nn.cross_entropy(
                x, t, weights=w, label_smoothing=smoothing, axis=1, reduction=r
            ),
            lambda x, t, r=reduction: F.cross_entropy(
                x, t, torch.tensor(w), label_smoothing=smoothing, reduction=r
            ),
            [rng.normal(size=(n, classes, 2)), rng.random((n, classes, 2))],
        )


@given(st.integers(1, 3), st.integers(1, 4), SEEDS, REDUCTIONS)
@settings(max_examples=20)
def test_distances_and_margins(n: int, d: int, seed: int, reduction: str) -> None:
    rng = np.random.default_rng(seed)
    a, b, c = rng.normal(size=(3, n, d))
    sign = rng.choice([-1.0, 1.0], n)
    agree(nn.cosine_similarity, lambda a, b: F.cosine_similarity(a, b, -1), [a, b])
    agree(
        lambda a, b, c: nn.triplet_margin_loss(a, b, c, reduction=reduction),
        lambda a, b, c: F.triplet_margin_loss(a, b, c, reduction=reduction),
        [a, b, c],
    )
    agree(
        lambda a, b: nn.margin_ranking_loss(a, b, sign, 0.1, reduction),
        lambda a, b: F.margin_ranking_loss(a, b, torch.tensor(sign), 0.1, reduction=reduction),
        [a[:, 0], b[:, 0]],
    )
    agree(
        lambda x: nn.hinge_embedding_loss(x, sign, reduction=reduction),
        lambda x: F.hinge_embedding_loss(x, torch.tensor(sign), reduction=reduction),
        [np.abs(a[:, 0])],
    )

"""Penalties: prox against the minimum that scipy finds, values, rows that stay at 0, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

import graphflow as gf
from graphflow.errors import ArgumentError

PENALTIES = [
    gf.linear.L1(0.7), gf.linear.L2(0.9), gf.linear.L1L2(0.5, 0.8), gf.linear.GroupL1(0.6),
    gf.linear.Bounds(-0.3, 0.5), gf.linear.Bounds(low=0.0),
]  # fmt: skip


def evaluate(tensor: gf.Tensor) -> Any:
    with gf.Session() as s:
        return s.run(tensor)


def value(penalty: gf.linear.Penalty, weights: Any) -> float:
    """The penalty of some weights, by hand."""
    match penalty:
        case gf.linear.L1():
            return float(penalty.strength * abs(weights).sum())
        case gf.linear.L2():
            return float(penalty.strength / 2 * (weights**2).sum())
        case gf.linear.L1L2():
            return float(penalty.l1 * abs(weights).sum() + penalty.l2 / 2 * (weights**2).sum())
        case gf.linear.GroupL1():
            return float(penalty.strength * np.sqrt((weights**2).sum(1)).sum())
        case gf.linear.Bounds():
            return 0.0 if np.all((penalty.low <= weights) & (weights <= penalty.high)) else np.inf
    raise AssertionError(penalty)


@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
def test_a_prox_is_the_minimum_of_penalty_and_distance(penalty: gf.linear.Penalty) -> None:
    random = np.random.default_rng(0)
    weights, step = random.normal(size=(6, 2)), random.uniform(0.2, 2, size=(6, 1))
    found = evaluate(penalty.prox(gf.constant(weights), gf.constant(step)))

    def total(v: Any) -> float:
        moved = v.reshape(6, 2)
        return value(penalty, moved) + float((((moved - weights) ** 2) / (2 * step)).sum())

    best = total(found.ravel())
    assert np.isfinite(best)
    for scale in (1e-1, 1e-3):  # no point nearby is better
        for _ in range(200):
            assert total(found.ravel() + scale * random.normal(size=12)) >= best
    if not isinstance(penalty, gf.linear.Bounds):
        nearby = minimize(total, found.ravel(), method="Powell", options={"xtol": 1e-9})
        assert nearby.fun >= best - 1e-9


@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
def test_values_are_those_by_hand(penalty: gf.linear.Penalty) -> None:
    weights = np.random.default_rng(1).normal(size=(6, 2))
    for each in (weights, np.clip(weights, 0, 0.5)):
        assert evaluate(penalty.value(gf.constant(each))) == pytest.approx(value(penalty, each))


@pytest.mark.parametrize("penalty", [PENALTIES[0], PENALTIES[2], PENALTIES[3]], ids=repr)
@pytest.mark.parametrize("outputs", [(), (2,)])
def test_rows_that_can_be_skipped_stay_at_zero(penalty: Any, outputs: tuple[int, ...]) -> None:
    random = np.random.default_rng(2)
    weights = random.normal(size=(40, *outputs)) * (random.random((40, *(1,) * len(outputs))) < 0.3)
    gradient = random.normal(size=weights.shape)
    w, g = gf.constant(weights), gf.constant(gradient)
    step = np.full((40, *(1,) * len(outputs)), 0.4)
    with gf.Session() as s:
        moved, skipped, careful = s.run(
            [
                penalty.prox(w - step * g, gf.constant(step)),
                penalty.can_skip(w, g, 0.0),
                penalty.can_skip(w, g, 0.2),
            ]
        )
    rests = (moved == 0) & (weights == 0)
    assert skipped.tolist() == (rests if not outputs else rests.all(1)).tolist()
    assert 0 < careful.sum() < skipped.sum() < 40 and not (careful & ~skipped).any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gf.linear.L1(-1), "strength must be a finite number from 0, not -1"),
        (lambda: gf.linear.L2(np.nan), "not nan"),
        (lambda: gf.linear.L1L2(1, True), "l2 must be a finite number"),
        (lambda: gf.linear.Bounds(1, 0), "low=1.0 is above high=0.0"),
        (lambda: gf.linear.Penalty().prox(gf.constant(1.0), gf.constant(1.0)), "has no prox"),
    ],
)
def test_bad_numbers_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()

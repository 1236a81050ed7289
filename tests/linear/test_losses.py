"""Losses: slopes are derivatives, curvatures those of slopes, and conjugates are conjugate."""

from __future__ import annotations

import numpy as np
import pytest

from graphflow.linear.losses import Loss
from tests.linear.problems import LOSSES, SMOOTH


def draw(loss: Loss, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    y = random.choice([-1.0, 1.0], size=200) if loss.classifies else random.normal(size=200)
    return random.normal(size=200) * 3.0, y, random.uniform(0.1, 3.0, size=200)


@pytest.mark.parametrize("loss", SMOOTH, ids=lambda loss: loss.name)
def test_slopes_and_curvatures_are_derivatives(loss: Loss) -> None:
    f, y, _ = draw(loss)
    step = 1e-6
    slope = (loss.values(f + step, y) - loss.values(f - step, y)) / (2 * step)
    np.testing.assert_allclose(loss.slopes(f, y), slope, atol=1e-6)
    bend = (loss.slopes(f + step, y) - loss.slopes(f - step, y)) / (2 * step)
    np.testing.assert_allclose(loss.curvatures(f, y), bend, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_loss_and_conjugate_bound_each_other(loss: Loss) -> None:
    """Fenchel and Young: c ℓ(f) + c ℓ*(-β/c) ≥ -β f, with equality for the slope's β."""
    f, y, c = draw(loss)
    random = np.random.default_rng(1)
    for _ in range(20):
        beta = random.normal(size=200) * 10.0 ** random.uniform(-2, 1)
        both = c * loss.values(f, y) + loss.conjugates(beta, y, c)
        assert (both >= -beta * f - 1e-9).all()
    if loss.slope is not None:
        beta = -c * loss.slopes(f, y)
        both = c * loss.values(f, y) + loss.conjugates(beta, y, c)
        np.testing.assert_allclose(both, -beta * f, atol=1e-9)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_values_far_away_are_finite(loss: Loss) -> None:
    f, y = np.array([-1e4, 1e4, 0.0]), np.array([1.0, -1.0, 1.0])
    assert np.isfinite(loss.values(f, y)).all()
    if loss.slope is not None:
        assert np.isfinite(loss.slopes(f, y)).all() and np.isfinite(loss.curvatures(f, y)).all()

"""Losses of `gf.nn` that are likelihoods or weigh them, and the loss of angles."""

from __future__ import annotations

import math
from typing import Any

from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, autocast_inputs, function, promote_inputs
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import product_or_zero, require_finite
from graphflow.ops.networks.losses.losses import (
    binary_cross_entropy_with_logits,
    cosine_similarity,
    matching_pair,
    reduce_loss,
    require_positive,
    weighted_loss,
)
from graphflow.ops.pointwise.activations import sigmoid
from graphflow.ops.pointwise.arithmetic import square
from graphflow.ops.pointwise.comparison import equal, greater
from graphflow.ops.pointwise.convert import stop_gradient
from graphflow.ops.pointwise.select import maximum, where
from graphflow.ops.pointwise.transcendental import exp, log


@composite("prediction", "target", "variance", to="high")
@function
def gaussian_nll_loss(
    prediction: Any, target: Any, variance: Any, full: bool = False, epsilon: float = 1e-6,
    weights: Any = None, reduction: str = "none",
) -> Tensor:  # fmt: skip
    """Compute (log v + (prediction - target)²/v)/2, the negative log of a normal density.

    Args:
        prediction, target: floats of one shape.
        variance: v, floats that broadcast to this shape; values below epsilon count as epsilon, and
            get the gradient of epsilon, so that training can raise them.
        full: add the constant log(2π)/2.
        epsilon: a positive number.
        weights, reduction: as for `mse_loss`.

    Raises:
        DTypeError, ShapeError: as `mse_loss`; or the variance does not broadcast to the shape.
        ArgumentError: the reduction is unknown, or epsilon is not a positive number.
    """
    given = promote_inputs("gaussian_nll_loss", (prediction, target, variance))
    *pair, v = autocast_inputs(given, "high")
    x, y = matching_pair(*pair)
    least = require_positive("gaussian_nll_loss", "epsilon", epsilon)
    fixed = stop_gradient(v)
    v = FUNCTIONS["broadcast_to"](maximum(fixed, least) + (v - fixed), x.shape)
    constant = math.log(2 * math.pi) / 2 if full else 0.0

    def loss_of(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        result: Tensor = (log(v) + square(x - y) / v) * 0.5 + constant
        return result

    return weighted_loss(loss_of, (x, y, v), weights, reduction)


@composite("prediction", "target", to="high")
@function
def poisson_nll_loss(
    prediction: Any, target: Any, log_input: bool = True, full: bool = False,
    epsilon: float = 1e-8, weights: Any = None, reduction: str = "none",
) -> Tensor:  # fmt: skip
    """Compute rate - target·log(rate), the negative log of a Poisson probability.

    Args:
        prediction, target: floats of one shape.
        log_input: the prediction is log(rate); otherwise the rate, to which the logarithm adds
            epsilon.
        full: add the term of the target, log(target!), exactly.
        epsilon: a positive number.
        weights, reduction: as for `mse_loss`.

    Raises:
        DTypeError, ShapeError: as `mse_loss`.
        ArgumentError: the reduction is unknown, or epsilon is not a positive number.
    """
    epsilon = require_positive("poisson_nll_loss", "epsilon", epsilon)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        rate, logarithm = (exp(x), x) if log_input else (x, log(x + epsilon))
        loss: Tensor = rate - product_or_zero(y, logarithm)
        return loss + FUNCTIONS["lgamma"](y + 1) if full else loss

    return weighted_loss(loss_of, matching_pair(prediction, target), weights, reduction)


@composite("logits", "target", to="high")
@function
def focal_loss(
    logits: Any, target: Any, alpha: float | None = 0.25, gamma: float = 2.0, weights: Any = None,
    reduction: str = "none",
) -> Tensor:  # fmt: skip
    """Compute the binary cross entropy of logits, weighed down where the prediction is right.

    The factor is (1 - q)^gamma of q = p·target + (1 - p)·(1 - target) for p = sigmoid(logits).

    Args:
        logits, target: floats of one shape.
        alpha: factor of target 1; 1 - alpha is that of target 0. None: neither has one.
        gamma: a number of at least 0; 0 gives the cross entropy.
        weights, reduction: as for `mse_loss`.

    Raises:
        DTypeError, ShapeError: as `mse_loss`.
        ArgumentError: the reduction is unknown, alpha is outside [0, 1], or gamma is negative.

    Source: Lin et al., Focal Loss for Dense Object Detection, ICCV 2017.
    """
    gamma = require_finite("focal_loss", "gamma", gamma)
    share = None if alpha is None else require_finite("focal_loss", "alpha", alpha)
    if gamma < 0 or not (share is None or 0 <= share <= 1):
        raise ArgumentError(f"expected gamma >= 0 and alpha in [0, 1], got {gamma} and {alpha}")

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = binary_cross_entropy_with_logits(x, y)
        if gamma:
            wrong = sigmoid(-x) * y + sigmoid(x) * (1 - y)
            none = equal(wrong, 0)  # a power below 1 has an infinite slope there
            loss = loss * where(none, 0, FUNCTIONS["pow"](where(none, 1, wrong), gamma))
        return loss if share is None else loss * (share * y + (1 - share) * (1 - y))

    return weighted_loss(loss_of, matching_pair(logits, target), weights, reduction)


@composite("a", "b", "target", to="high")
@function
def cosine_embedding_loss(
    a: Any, b: Any, target: Any, margin: float = 0.0, reduction: str = "none"
) -> Tensor:
    """Return 1 - cos of the angle of vectors for target 1, and max(0, cos - margin) for -1.

    Args:
        a, b: floats of one shape (…, n); vectors lie on the last axis. Each norm counts as at least
            1e-8.
        target: floats (…) of 1 and -1.
        margin: a number, usually in [0, 1].

    Raises:
        DTypeError, ShapeError, ArgumentError: as `mse_loss`; or margin is not a finite number.
    """
    a, b = matching_pair(a, b)
    margin = require_finite("cosine_embedding_loss", "margin", margin)
    cos, y = matching_pair(cosine_similarity(a, b), target)
    apart = FUNCTIONS["relu"](cos - margin)
    return reduce_loss(where(greater(y, 0), 1 - cos, apart), reduction)


__all__ = ["cosine_embedding_loss", "focal_loss", "gaussian_nll_loss", "poisson_nll_loss"]

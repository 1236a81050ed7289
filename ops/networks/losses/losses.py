"""Losses of `gf.nn` between predictions and targets, other than those of classes.

Each gives one number for each element (or row), unless `reduction` is "mean" or "sum".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import (
    FUNCTIONS,
    Op,
    Tensor,
    as_tensor,
    autocast_inputs,
    function,
    promote_inputs,
    sample,
)
from graphflow.ir.spec import equate, show_shape
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import (
    product_or_zero,
    require_finite,
    require_kind,
    same_float,
)
from graphflow.ops.pointwise.activations import sigmoid
from graphflow.ops.pointwise.arithmetic import square
from graphflow.ops.pointwise.comparison import equal, not_equal
from graphflow.ops.pointwise.elementwise import SCALAR, F, elementwise
from graphflow.ops.pointwise.select import clip, maximum, stop_gradient_unless, where
from graphflow.ops.pointwise.transcendental import exp, log, sqrt
from graphflow.ops.reductions.reduce import mean, sum

_REDUCTIONS = ("none", "mean", "sum")


def reduce_loss(loss: Tensor, reduction: Any) -> Tensor:
    """Reduce a loss; "mean" divides by the number of its elements."""
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
    if reduction == "none":
        return loss
    return mean(loss) if reduction == "mean" else sum(loss)


def weighted_loss(
    loss_of: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Any, reduction: Any
) -> Tensor:
    """Return the weighted and reduced loss of inputs, which may hold NaN where the weight is 0."""
    if weights is None:
        return reduce_loss(loss_of(*inputs), reduction)
    factor = as_weights(weights, inputs[0])
    counts = not_equal(factor, 0)
    loss = loss_of(*(stop_gradient_unless(counts, x) for x in inputs))
    return reduce_loss(product_or_zero(factor, loss), reduction)


def as_weights(weights: Any, like: Tensor) -> Tensor:
    given = weights if isinstance(weights, Tensor) else as_tensor(weights, like.dtype)
    require_kind(given.spec, "float")
    result: Tensor = FUNCTIONS["astype"](given, like.dtype)
    return result


def matching_pair(prediction: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Return prediction and target in one float dtype; refuse shapes that differ.

    Shapes that merely broadcast are refused, too, since such a loss is usually a mistake.
    """
    a, b = autocast_inputs(promote_inputs("loss", (prediction, target)), "high")
    require_kind(a.spec, "float")
    text = f"prediction {show_shape(a.shape)} and target {show_shape(b.shape)} differ in shape"
    if a.ndim != b.ndim:
        raise ShapeError(f"{text}; reshape one")
    for m, n in zip(a.shape, b.shape, strict=True):
        equate(m, n, f"{text}; reshape one")
    return a, b


# Of numbers -------------------------------------------------------------------------------------


@composite("prediction", "target", to="high")
@function
def mse_loss(prediction: Any, target: Any, weights: Any = None, reduction: str = "none") -> Tensor:
    """Compute (prediction - target)² for each element.

    Args:
        prediction, target: floats of one shape.
        weights: factors of the losses, which broadcast to them. Where one is 0, loss and gradient
            are 0, even of NaN or infinity.
        reduction: "none", or "mean" or "sum" of the weighted losses.

    Raises:
        DTypeError: prediction or target is not float.
        ShapeError: prediction and target differ in shape.
        ArgumentError: the reduction is unknown.
    """
    a, b = matching_pair(prediction, target)
    return weighted_loss(lambda a, b: square(a - b), (a, b), weights, reduction)


@composite("prediction", "target", to="high")
@function
def l1_loss(prediction: Any, target: Any, weights: Any = None, reduction: str = "none") -> Tensor:
    """Compute |prediction - target| for each element; arguments and errors as for `mse_loss`."""
    a, b = matching_pair(prediction, target)
    return weighted_loss(lambda a, b: FUNCTIONS["abs"](a - b), (a, b), weights, reduction)


def _huber_of(xp: Any, x: Any, delta: float) -> Any:
    size = xp.abs(x)
    inner = xp.minimum(size, delta)
    return inner * (size - inner * 0.5)


# x²/2 where |x| <= delta, beyond it delta·(|x| - delta/2).
_huber: Op = elementwise(
    "huber",
    _huber_of,
    vjp=lambda g, y, x, delta: (g * clip(x, -delta, delta),),
    infer=lambda x, delta: same_float(x),
    samples=(
        sample(F, low=-0.6, high=0.6, delta=0.7),
        sample(F, low=0.8, high=3.0, delta=0.7),
        sample(SCALAR, low=-3.0, high=-0.8, delta=0.7),
    ),
    flops=5,
    into=lambda xp, out, x, delta: xp.copyto(out, _huber_of(xp, x, delta)),
)


def require_positive(op_name: str, what: str, value: Any) -> float:
    """Return a finite number above 0 as a float; refuse others."""
    number = require_finite(op_name, what, value)
    if number <= 0:
        raise ArgumentError(f"{what} must be a positive number, got {value!r}")
    return number


@composite("prediction", "target", to="high")
@function
def huber_loss(
    prediction: Any, target: Any, delta: float = 1.0, weights: Any = None, reduction: str = "none"
) -> Tensor:
    """Compute d²/2 of the difference d up to `delta`, and delta·(|d| - delta/2) beyond it.

    Other arguments as for `mse_loss`.

    Raises:
        DTypeError, ShapeError: as `mse_loss`.
        ArgumentError: the reduction is unknown, or delta is not a positive number.

    Source: Huber, Ann. Math. Statist. 35, 1964.
    """
    inputs = matching_pair(prediction, target)
    delta = require_positive("huber_loss", "delta", delta)
    return weighted_loss(lambda a, b: _huber(a - b, delta=delta), inputs, weights, reduction)


@composite("prediction", "target", to="high")
@function
def smooth_l1_loss(
    prediction: Any, target: Any, beta: float = 1.0, weights: Any = None, reduction: str = "none"
) -> Tensor:
    """Compute `huber_loss` with delta = beta, divided by beta; `l1_loss` for beta 0.

    Beyond beta the slope is ±1. Other arguments and errors as for `huber_loss`.
    """
    if beta == 0:
        return l1_loss(prediction, target, weights, reduction)
    inputs = matching_pair(prediction, target)
    beta = require_positive("smooth_l1_loss", "beta", beta)
    return weighted_loss(lambda a, b: _huber(a - b, delta=beta) / beta, inputs, weights, reduction)


# Of probabilities -------------------------------------------------------------------------------


def _log_loss(xp: Any, p: Any, y: Any) -> Any:
    """Compute the loss of probabilities; logarithms of at least -100 keep it finite at 0 and 1."""
    yes, no = xp.maximum(xp.log(p), -100), xp.maximum(xp.log1p(-p), -100)
    return -(y * yes + (1 - y) * no)


def _log_loss_vjp(g: Tensor, loss: Tensor, p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    slope = (p - y) / maximum(p * (1 - p), 1e-12)
    return g * slope, g * (_bounded_log(1 - p) - _bounded_log(p))


def _bounded_log(p: Tensor) -> Tensor:
    """Return log p, at least -100, with slope 0 at p = 0."""
    is_zero = equal(p, 0)
    return where(is_zero, -100.0, maximum(log(where(is_zero, 1, p)), -100.0))


_binary_cross_entropy = elementwise(
    "binary_cross_entropy",
    _log_loss,
    _log_loss_vjp,
    same_float,
    samples=(sample(F, F, low=0.1, high=0.9), sample(SCALAR, SCALAR, low=0.1, high=0.9)),
    flops=30,
    into=lambda xp, out, p, y: xp.copyto(out, _log_loss(xp, p, y)),
)


@composite("prediction", "target", to="high")
@function
def binary_cross_entropy(
    prediction: Any, target: Any, weights: Any = None, reduction: str = "none"
) -> Tensor:
    """Compute -(target·log p + (1 - target)·log(1 - p)) for probabilities p = prediction.

    Logarithms are at least -100. For logits, `binary_cross_entropy_with_logits` is more accurate.
    Arguments and errors as for `mse_loss`.
    """
    return weighted_loss(
        _binary_cross_entropy, matching_pair(prediction, target), weights, reduction
    )


def _logit_loss(xp: Any, x: Any, y: Any) -> Any:
    """Weigh |x| by the share of the class that the sign of x contradicts, so nothing overflows."""
    size, share = xp.abs(x), xp.where(x > 0, 1 - y, y)
    return xp.where(share == 0, 0, size * share) + xp.log1p(xp.exp(-size))  # x may be infinite


_binary_cross_entropy_with_logits = elementwise(
    "binary_cross_entropy_with_logits",
    _logit_loss,
    vjp=lambda g, loss, x, y: (g * (sigmoid(x) - y), -(g * x)),
    infer=same_float,
    samples=(sample(F, F), sample(SCALAR, SCALAR)),
    flops=25,
    into=lambda xp, out, x, y: xp.copyto(out, _logit_loss(xp, x, y)),
)


@composite("logits", "target", to="high")
@function
def binary_cross_entropy_with_logits(
    logits: Any, target: Any, weights: Any = None, positive_weight: Any = None,
    reduction: str = "none",
) -> Tensor:  # fmt: skip
    """Compute `binary_cross_entropy` of sigmoid(logits), without overflow.

    Args:
        logits, target: floats of one shape.
        weights, reduction: as for `mse_loss`.
        positive_weight: factor of the term of the target (not of 1 - target); broadcasts.

    Raises:
        DTypeError, ShapeError, ArgumentError: as `mse_loss`.
    """
    x, y = matching_pair(logits, target)
    if positive_weight is None:
        return weighted_loss(_binary_cross_entropy_with_logits, (x, y), weights, reduction)
    factor, softplus = as_weights(positive_weight, x), FUNCTIONS["softplus"]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = product_or_zero(factor * y, softplus(-x)) + product_or_zero(
            1 - y, softplus(x)
        )
        return result

    return weighted_loss(loss_of, (x, y), weights, reduction)


@composite("log_prediction", "target", to="high")
@function
def kl_div(
    log_prediction: Any, target: Any, log_target: bool = False, weights: Any = None,
    reduction: str = "none",
) -> Tensor:  # fmt: skip
    """Compute target·(log target - log_prediction) for each element.

    Where the target is 0, loss and gradient are 0, even at a log_prediction of -inf.

    Args:
        log_prediction, target: floats of one shape.
        log_target: the target is given as its logarithm.
        weights, reduction: as for `mse_loss`.

    Raises:
        DTypeError, ShapeError, ArgumentError: as `mse_loss`.
    """

    def loss_of(x: Tensor, t: Tensor) -> Tensor:
        p = exp(t) if log_target else t
        absent = equal(p, 0)
        log_p = t if log_target else log(where(absent, 1, p))
        loss: Tensor = p * where(absent, 0, log_p - x)
        return loss

    return weighted_loss(loss_of, matching_pair(log_prediction, target), weights, reduction)


# Of distances and margins -----------------------------------------------------------------------


@composite("a", "b", to="high")
@function
def cosine_similarity(a: Any, b: Any, axis: int = -1, epsilon: float = 1e-8) -> Tensor:
    """Compute a·b / (|a|·|b|) along an axis; each norm counts as at least epsilon.

    Args:
        a, b: floats whose shapes broadcast.
        epsilon: a positive number.

    Raises:
        DTypeError: a or b is not float.
        ShapeError: the shapes do not broadcast, or axis is outside them.
        ArgumentError: epsilon is not a positive number.
    """
    a, b = promote_inputs("cosine_similarity", (a, b))
    require_kind(a.spec, "float")
    least = require_positive("cosine_similarity", "epsilon", epsilon) ** 2
    norms = (sqrt(maximum(sum(square(x), axis), least)) for x in (a, b))
    lengths = next(norms) * next(norms)
    result: Tensor = sum(a * b, axis) / lengths
    return result


@composite("distance", "target", to="high")
@function
def hinge_embedding_loss(
    distance: Any, target: Any, margin: float = 1.0, reduction: str = "none"
) -> Tensor:
    """Return the distance where the target is 1, and max(0, margin - distance) where it is -1.

    Raises:
        DTypeError, ShapeError, ArgumentError: as `mse_loss`; or margin is not a finite number.
    """
    x, y = matching_pair(distance, target)
    margin = require_finite("hinge_embedding_loss", "margin", margin)
    alike = FUNCTIONS["greater"](y, 0)
    return reduce_loss(where(alike, x, FUNCTIONS["relu"](margin - x)), reduction)


@composite("a", "b", "target", to="high")
@function
def margin_ranking_loss(
    a: Any, b: Any, target: Any, margin: float = 0.0, reduction: str = "none"
) -> Tensor:
    """Compute max(0, margin - target·(a - b)): a should exceed b for target 1, b should for -1.

    Raises:
        DTypeError, ShapeError, ArgumentError: as `mse_loss`; or margin is not a finite number.
    """
    x, y = matching_pair(a, b)
    x, y = matching_pair(x - y, target)
    margin = require_finite("margin_ranking_loss", "margin", margin)
    return reduce_loss(FUNCTIONS["relu"](margin - x * y), reduction)


@composite("anchor", "positive", "negative", to="high")
@function
def triplet_margin_loss(
    anchor: Any, positive: Any, negative: Any, margin: float = 1.0, epsilon: float = 1e-6,
    reduction: str = "none",
) -> Tensor:  # fmt: skip
    """Compute max(0, margin + |anchor - positive| - |anchor - negative|) for vectors.

    Args:
        anchor, positive, negative: floats of one shape; vectors lie on the last axis.
        epsilon: is added to each difference, so that the norm has a nonzero gradient.

    Raises:
        DTypeError, ShapeError, ArgumentError: as `mse_loss`; or margin is not a finite number.
    """
    a, p = matching_pair(anchor, positive)
    a, n = matching_pair(a, negative)
    margin = require_finite("triplet_margin_loss", "margin", margin)
    near, far = (FUNCTIONS["vector_norm"](a - x + epsilon, -1) for x in (p, n))
    return reduce_loss(FUNCTIONS["relu"](near - far + margin), reduction)


__all__ = [
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_similarity",
    "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss",
    "smooth_l1_loss", "triplet_margin_loss",
]  # fmt: skip

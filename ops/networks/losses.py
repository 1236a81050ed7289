"""Losses of `gf.nn`: how far predictions are from targets.

Each gives one number an element (or row), unless `reduction` is "mean" or "sum".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import (
    FUNCTIONS,
    Cost,
    Op,
    Tensor,
    as_tensor,
    autocast_inputs,
    function,
    promote_inputs,
    register,
    sample,
)
from graphflow.ir.spec import TensorSpec, equate, kind, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import (
    normalize_axis,
    product_or_zero,
    require_kind,
    same_float,
)
from graphflow.ops.pointwise.activations import finite_number, sigmoid
from graphflow.ops.pointwise.arithmetic import (
    SCALAR,
    F,
    elementwise,
    equal,
    not_equal,
    square,
)
from graphflow.ops.pointwise.select import clip, maximum, stop_gradient_unless, where
from graphflow.ops.pointwise.transcendental import exp, log, sqrt
from graphflow.ops.reductions.reduce import mean, sum
from graphflow.ops.reductions.softmax import (
    cross_entropy_op,
    label_places,
    log_softmax,
    require_labels,
)
from graphflow.ops.sharding import row_ops as row_sharding

_REDUCTIONS = ("none", "mean", "sum")


def _reduce_loss(loss: Tensor, reduction: Any) -> Tensor:
    """The loss reduced; means are over the number of elements."""
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"reduction is 'none', 'mean' or 'sum', not {reduction!r}")
    if reduction == "none":
        return loss
    return mean(loss) if reduction == "mean" else sum(loss)


def _weighted_loss(
    loss_of: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Any, reduction: Any
) -> Tensor:
    """The losses of inputs by their weights, reduced. Inputs whose weight is 0 may hold NaN."""
    if weights is None:
        return _reduce_loss(loss_of(*inputs), reduction)
    factor = _as_weights(weights, inputs[0])
    counts = not_equal(factor, 0)
    loss = loss_of(*(stop_gradient_unless(counts, x) for x in inputs))
    return _reduce_loss(product_or_zero(factor, loss), reduction)


def _as_weights(weights: Any, like: Tensor) -> Tensor:
    given = weights if isinstance(weights, Tensor) else as_tensor(weights, like.dtype)
    require_kind(given.spec, "float")
    result: Tensor = FUNCTIONS["astype"](given, like.dtype)
    return result


def _matching_pair(prediction: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Both of one float dtype and shape: a loss of shapes that broadcast is a mistake."""
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
    """(prediction - target)².

    Args:
        weights: factors of the losses, which broadcast to them. Where one is 0, the loss and the
            gradient are 0, even of NaN or infinity.
        reduction: "none", "mean" or "sum" of the weighted losses.

    Raises:
        DTypeError: not floats.
        ShapeError: prediction and target differ in shape.
        ArgumentError: another reduction.
    """
    a, b = _matching_pair(prediction, target)
    return _weighted_loss(lambda a, b: square(a - b), (a, b), weights, reduction)


@composite("prediction", "target", to="high")
@function
def l1_loss(prediction: Any, target: Any, weights: Any = None, reduction: str = "none") -> Tensor:
    """|prediction - target|; arguments and errors as for `mse_loss`."""
    a, b = _matching_pair(prediction, target)
    return _weighted_loss(lambda a, b: FUNCTIONS["abs"](a - b), (a, b), weights, reduction)


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


def _require_positive(op_name: str, what: str, value: Any) -> float:
    number = finite_number(op_name, what, value)
    if number <= 0:
        raise ArgumentError(f"{what} is above 0, not {value!r}")
    return number


@composite("prediction", "target", to="high")
@function
def huber_loss(
    prediction: Any, target: Any, delta: float = 1.0, weights: Any = None, reduction: str = "none"
) -> Tensor:
    """d²/2 of the difference d up to `delta`, beyond it delta·(|d| - delta/2).

    Raises:
        DTypeError, ShapeError: as for `mse_loss`.
        ArgumentError: another reduction; delta is no number above 0.

    Source: Huber, Ann. Math. Statist. 35, 1964.
    """
    inputs = _matching_pair(prediction, target)
    delta = _require_positive("huber_loss", "delta", delta)
    return _weighted_loss(lambda a, b: _huber(a - b, delta=delta), inputs, weights, reduction)


@composite("prediction", "target", to="high")
@function
def smooth_l1_loss(
    prediction: Any, target: Any, beta: float = 1.0, weights: Any = None, reduction: str = "none"
) -> Tensor:
    """`huber_loss` of delta = beta, over beta: of slope 1 far out; `l1_loss` for beta 0."""
    if beta == 0:
        return l1_loss(prediction, target, weights, reduction)
    inputs = _matching_pair(prediction, target)
    beta = _require_positive("smooth_l1_loss", "beta", beta)
    return _weighted_loss(lambda a, b: _huber(a - b, delta=beta) / beta, inputs, weights, reduction)


# Of probabilities -------------------------------------------------------------------------------


def _log_loss(xp: Any, p: Any, y: Any) -> Any:
    """Logarithms are at least -100, so that p of 0 and 1 give a finite loss."""
    yes, no = xp.maximum(xp.log(p), -100), xp.maximum(xp.log1p(-p), -100)
    return -(y * yes + (1 - y) * no)


def _log_loss_vjp(g: Tensor, loss: Tensor, p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    slope = (p - y) / maximum(p * (1 - p), 1e-12)
    return g * slope, g * (_bounded_log(1 - p) - _bounded_log(p))


def _bounded_log(p: Tensor) -> Tensor:
    """log p, at least -100, of slope 0 at 0."""
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
    """-(target·log p + (1 - target)·log(1 - p)) of probabilities p; logarithms are at least -100.

    From logits, `binary_cross_entropy_with_logits` is more accurate. Arguments and errors as for
    `mse_loss`.
    """
    return _weighted_loss(
        _binary_cross_entropy, _matching_pair(prediction, target), weights, reduction
    )


def _logit_loss(xp: Any, x: Any, y: Any) -> Any:
    """|x| counts by the share of the class that the sign of x speaks against."""
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
    """`binary_cross_entropy` of sigmoid(logits), without overflow.

    Args:
        positive_weight: factor of the part of the target (not of 1 - target); broadcasts.

    Raises:
        DTypeError, ShapeError, ArgumentError: as for `mse_loss`.
    """
    x, y = _matching_pair(logits, target)
    if positive_weight is None:
        return _weighted_loss(_binary_cross_entropy_with_logits, (x, y), weights, reduction)
    factor, softplus = _as_weights(positive_weight, x), FUNCTIONS["softplus"]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = product_or_zero(factor * y, softplus(-x)) + product_or_zero(
            1 - y, softplus(x)
        )
        return result

    return _weighted_loss(loss_of, (x, y), weights, reduction)


@composite("log_prediction", "target", to="high")
@function
def kl_div(
    log_prediction: Any, target: Any, log_target: bool = False, weights: Any = None,
    reduction: str = "none",
) -> Tensor:  # fmt: skip
    """target·(log target - log_prediction); `log_target`: the target is given as its logarithm.

    Where the target is 0, the loss and its gradient are 0, even of a log_prediction of -inf.

    Raises:
        DTypeError, ShapeError, ArgumentError: as for `mse_loss`.
    """

    def loss_of(x: Tensor, t: Tensor) -> Tensor:
        p = exp(t) if log_target else t
        absent = equal(p, 0)
        log_p = t if log_target else log(where(absent, 1, p))
        loss: Tensor = p * where(absent, 0, log_p - x)
        return loss

    return _weighted_loss(loss_of, _matching_pair(log_prediction, target), weights, reduction)


# Of classes -------------------------------------------------------------------------------------


def _nll_into(xp: Any, out: Any, x: Any, labels: Any) -> None:
    rows = x.reshape(-1, x.shape[-1]) if x.size else x.reshape(0, 1)
    xp.negative(rows[label_places(xp, x, labels)], out=out.reshape(-1))


def _nll_kernel(xp: Any, x: Any, labels: Any) -> Any:
    out = xp.empty(labels.shape, x.dtype)
    _nll_into(xp, out, x, labels)
    return out


def _infer_nll(x: TensorSpec, labels: TensorSpec) -> TensorSpec:
    require_labels(x, labels)
    return x.with_shape(x.shape[:-1])


def _nll_vjp(g: Tensor, y: Tensor, x: Tensor, labels: Tensor) -> tuple[Tensor, None]:
    hot = FUNCTIONS["one_hot"](labels, x.shape[-1], "bool")
    return where(hot, -FUNCTIONS["expand_dims"](g, -1), 0), None


# -x[label] of each row.
_nll: Op = register(
    Op(
        "nll",
        infer=_infer_nll,
        kernel=_nll_kernel,
        into=_nll_into,
        vjp=_nll_vjp,
        batch=batching.rows,
        sharding=row_sharding.nll_rule,
        cost=lambda x, labels: Cost(flops=labels.size),
        autocast="high",
        samples=(
            sample(F, spec("int64", (3,))),
            sample(spec("float32", (2, 3, 4)), spec("uint8", (2, 3))),
        ),
    )
)


def _class_losses(
    loss_of: Callable[..., Tensor], x: Tensor, labels: Tensor, weights: Any, ignored: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses by their weights, the weights, and which labels are not ignored.

    Args:
        loss_of: of x, labels and which rows count (None: all).
    """
    seen = factor = None
    if ignored is not None:
        if isinstance(ignored, bool) or not isinstance(ignored, int):
            raise ArgumentError(f"ignore_index is an int, not {ignored!r}")
        require_labels(x.spec, labels.spec)
        seen = not_equal(FUNCTIONS["astype"](labels, "int64"), ignored)
        labels = where(seen, labels, 0)
    if weights is not None:
        table = _as_weights(weights, x)
        if table.shape != (x.shape[-1],):
            raise ShapeError(
                f"weights {show_shape(table.shape)} are one for each of {x.shape[-1]} classes"
            )
        factor = FUNCTIONS["take"](table, labels, 0)
    if seen is not None:
        factor = FUNCTIONS["astype"](seen, x.dtype) if factor is None else where(seen, factor, 0)
    if factor is None:
        return loss_of(x, labels, None), None, None
    return product_or_zero(factor, loss_of(x, labels, not_equal(factor, 0))), factor, seen


def _stop_uncounted_rows(counts: Tensor | None, x: Tensor) -> Tensor:
    """x, whose rows pass a gradient on only where they count."""
    if counts is None:
        return x
    return stop_gradient_unless(FUNCTIONS["expand_dims"](counts, -1), x)


def _reduce_by_class(loss: Tensor, factor: Tensor | None, reduction: Any) -> Tensor:
    """Weighted losses, their sum, or their sum over that of the weights."""
    if factor is None or reduction != "mean":
        return _reduce_loss(loss, reduction)
    return sum(loss) / sum(factor)  # type: ignore[no-any-return]


def _classes_last(x: Tensor, axis: Any) -> Tensor:
    require_kind(x.spec, "float")
    at = normalize_axis(axis, x.ndim)
    last: Tensor = x if at == x.ndim - 1 else FUNCTIONS["moveaxis"](x, at, -1)
    return last


@composite("log_probabilities", to="high")
@function
def nll_loss(
    log_probabilities: Any, labels: Any, weights: Any = None, ignore_index: int | None = None,
    reduction: str = "none", axis: int = -1,
) -> Tensor:  # fmt: skip
    """-log_probabilities[label] for each row; arguments and errors as for `cross_entropy`."""
    x = _classes_last(as_tensor(log_probabilities), axis)

    def loss_of(x: Tensor, labels: Tensor, counts: Tensor | None) -> Tensor:
        loss: Tensor = _nll(x, labels)  # its gradient reads no row
        return loss

    loss, factor, _ = _class_losses(loss_of, x, as_tensor(labels), weights, ignore_index)
    return _reduce_by_class(loss, factor, reduction)


@composite("logits", "labels", to="high")
@function
def cross_entropy(
    logits: Any, labels: Any, name: str | None = None, *, weights: Any = None,
    ignore_index: int | None = None, label_smoothing: float = 0.0, reduction: str = "none",
    axis: int = -1,
) -> Tensor:  # fmt: skip
    """-log softmax(logits)[label] for each row: logits (…, classes), int labels (…), losses (…).

    A label outside [0, classes) is an error when the step runs.

    Args:
        labels: ints; or floats of the shape of the logits, the probability of each class. A class
            of probability 0 counts nothing, even at a logit of -inf.
        weights: (classes,), factors of the losses by class.
        ignore_index: a label whose rows count nothing, not in the mean either; they may hold NaN.
        label_smoothing: share of the label's probability that is spread over all classes.
        reduction: "none", "mean" (over the sum of the weights, if there are any) or "sum".
        axis: that of the classes, such as 1 for logits (N, C, …) and labels (N, …).

    Raises:
        DTypeError: logits are not float, or labels neither ints nor floats.
        ShapeError: labels have not the shape of the rows, or weights not that of the classes.
        ArgumentError: another reduction, a share outside [0, 1].
    """
    x, labels = as_tensor(logits), as_tensor(labels)
    smoothing = finite_number("cross_entropy", "label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ArgumentError(f"label_smoothing is a share in [0, 1], not {smoothing}")
    if kind(labels.dtype) == "float" and x.ndim == labels.ndim:
        return _soft_cross_entropy(x, labels, weights, ignore_index, smoothing, reduction, axis)
    x = _classes_last(x, axis)

    def loss_of(x: Tensor, labels: Tensor, counts: Tensor | None) -> Tensor:
        result: Tensor = cross_entropy_op(_stop_uncounted_rows(counts, x), labels, name=name)
        return result

    loss, factor, seen = _class_losses(loss_of, x, labels, weights, ignore_index)
    hard = _reduce_by_class(loss, factor, reduction)
    if smoothing == 0:
        return hard
    logs = log_softmax(_stop_uncounted_rows(seen, x))
    spread = -mean(logs if weights is None else product_or_zero(_as_weights(weights, x), logs), -1)
    if seen is not None:
        spread = where(seen, spread, 0)
    if reduction == "mean" and factor is not None:
        smooth = sum(spread) / sum(factor)
    else:
        smooth = _reduce_loss(spread, reduction)
    result: Tensor = hard * (1 - smoothing) + smooth * smoothing
    return result


def _soft_cross_entropy(
    x: Tensor, target: Tensor, weights: Any, ignored: Any, smoothing: float, reduction: Any,
    axis: Any,
) -> Tensor:  # fmt: skip
    """Cross entropy of probabilities; the mean is over the rows, whatever the weights.

    A class of probability 0 adds 0, and a row without any passes no gradient on.
    """
    if ignored is not None:
        raise ArgumentError("ignore_index is for int labels; give rows a target of zeros instead")
    x, target = _matching_pair(_classes_last(x, axis), _classes_last(target, axis))
    if smoothing:
        share = as_tensor(x.shape[-1], x.dtype)
        target = target * (1 - smoothing) + smoothing / share
    if weights is not None:
        target = target * _as_weights(weights, x)
    logs = log_softmax(_stop_uncounted_rows(FUNCTIONS["any"](not_equal(target, 0), -1), x))
    return _reduce_loss(-sum(product_or_zero(target, logs), -1), reduction)


# Of distances and margins -----------------------------------------------------------------------


@composite("a", "b", to="high")
@function
def cosine_similarity(a: Any, b: Any, axis: int = -1, epsilon: float = 1e-8) -> Tensor:
    """a·b / (|a|·|b|) along an axis; each norm counts as at least epsilon.

    Raises:
        DTypeError: not floats.
        ShapeError, ArgumentError: shapes do not broadcast, not an axis, epsilon not above 0.
    """
    a, b = promote_inputs("cosine_similarity", (a, b))
    require_kind(a.spec, "float")
    least = _require_positive("cosine_similarity", "epsilon", epsilon) ** 2
    norms = (sqrt(maximum(sum(square(x), axis), least)) for x in (a, b))
    lengths = next(norms) * next(norms)
    result: Tensor = sum(a * b, axis) / lengths
    return result


@composite("distance", "target", to="high")
@function
def hinge_embedding_loss(
    distance: Any, target: Any, margin: float = 1.0, reduction: str = "none"
) -> Tensor:
    """The distance where the target is 1; max(0, margin - distance) where it is -1."""
    x, y = _matching_pair(distance, target)
    margin = finite_number("hinge_embedding_loss", "margin", margin)
    alike = FUNCTIONS["greater"](y, 0)
    return _reduce_loss(where(alike, x, FUNCTIONS["relu"](margin - x)), reduction)


@composite("a", "b", "target", to="high")
@function
def margin_ranking_loss(
    a: Any, b: Any, target: Any, margin: float = 0.0, reduction: str = "none"
) -> Tensor:
    """max(0, margin - target·(a - b)): a is to be above b where the target is 1, below for -1."""
    x, y = _matching_pair(a, b)
    x, y = _matching_pair(x - y, target)
    margin = finite_number("margin_ranking_loss", "margin", margin)
    return _reduce_loss(FUNCTIONS["relu"](margin - x * y), reduction)


@composite("anchor", "positive", "negative", to="high")
@function
def triplet_margin_loss(
    anchor: Any, positive: Any, negative: Any, margin: float = 1.0, epsilon: float = 1e-6,
    reduction: str = "none",
) -> Tensor:  # fmt: skip
    """max(0, margin + |anchor - positive| - |anchor - negative|), of the vectors on the last axis.

    Args:
        epsilon: is added to each difference, so that the norm has a gradient that is not 0.
    """
    a, p = _matching_pair(anchor, positive)
    a, n = _matching_pair(a, negative)
    margin = finite_number("triplet_margin_loss", "margin", margin)
    near, far = (FUNCTIONS["vector_norm"](a - x + epsilon, -1) for x in (p, n))
    return _reduce_loss(FUNCTIONS["relu"](near - far + margin), reduction)


__all__ = [
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_similarity",
    "cross_entropy", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss",
    "margin_ranking_loss", "mse_loss", "nll_loss", "smooth_l1_loss", "triplet_margin_loss",
]  # fmt: skip

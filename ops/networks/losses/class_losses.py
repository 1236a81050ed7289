"""Losses of class predictions: nll_loss and cross_entropy. Public in `gf.nn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import (
    FUNCTIONS,
    Cost,
    Op,
    Tensor,
    as_tensor,
    function,
    register,
    sample,
)
from graphflow.ir.spec import TensorSpec, kind, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import (
    normalize_axis,
    product_or_zero,
    require_finite,
    require_kind,
)
from graphflow.ops.networks.losses.losses import as_weights, matching_pair, reduce_loss
from graphflow.ops.pointwise.comparison import not_equal
from graphflow.ops.pointwise.elementwise import F
from graphflow.ops.pointwise.select import stop_gradient_unless, where
from graphflow.ops.reductions.reduce import mean, sum
from graphflow.ops.reductions.softmax import (
    cross_entropy_op,
    label_places,
    log_softmax,
    require_labels,
)
from graphflow.ops.sharding import row_ops as row_sharding


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


# -x[label] for each row.
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
    """Return weighted losses, the weight of each row, and a mask of labels that are not ignored.

    Args:
        loss_of: the loss of x, labels and a mask of rows that count (None: all).
    """
    seen = factor = None
    if ignored is not None:
        if isinstance(ignored, bool) or not isinstance(ignored, int):
            raise ArgumentError(f"ignore_index must be an int, got {ignored!r}")
        require_labels(x.spec, labels.spec)
        seen = not_equal(FUNCTIONS["astype"](labels, "int64"), ignored)
        labels = where(seen, labels, 0)
    if weights is not None:
        table = as_weights(weights, x)
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
    """Return x, whose rows pass gradients on only where they count."""
    if counts is None:
        return x
    return stop_gradient_unless(FUNCTIONS["expand_dims"](counts, -1), x)


def _reduce_by_class(loss: Tensor, factor: Tensor | None, reduction: Any) -> Tensor:
    """Return weighted losses, their sum, or their sum over the sum of the weights."""
    if factor is None or reduction != "mean":
        return reduce_loss(loss, reduction)
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
    """Compute -log_probabilities[label] for each row; other arguments as for `cross_entropy`.

    Raises:
        DTypeError, ShapeError, ArgumentError: as `cross_entropy`.
    """
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
    """Compute -log softmax(logits)[label] for each row.

    A label outside [0, classes) is an OpError in the step.

    Args:
        logits: floats (…, classes).
        labels: ints (…); or floats of the shape of the logits, the probability of each class. A
            class of probability 0 adds nothing, even at a logit of -inf.
        weights: (classes,), factors of the losses by class.
        ignore_index: rows with this label have loss 0, do not count in the mean, and may hold NaN.
        label_smoothing: share of the label's probability that is spread over all classes.
        reduction: "none", "mean" (over the sum of the weights, if there are any) or "sum".
        axis: the axis of the classes, such as 1 for logits (N, C, …) and labels (N, …).

    Returns:
        Losses (…), or one number for "mean" and "sum".

    Raises:
        DTypeError: logits are not float, or labels are neither ints nor floats.
        ShapeError: labels do not have the shape of the rows, or weights not that of the classes.
        ArgumentError: the reduction is unknown, or label_smoothing is outside [0, 1].
    """
    x, labels = as_tensor(logits), as_tensor(labels)
    smoothing = require_finite("cross_entropy", "label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ArgumentError(f"label_smoothing must be a share in [0, 1], got {smoothing}")
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
    spread = -mean(logs if weights is None else product_or_zero(as_weights(weights, x), logs), -1)
    if seen is not None:
        spread = where(seen, spread, 0)
    if reduction == "mean" and factor is not None:
        smooth = sum(spread) / sum(factor)
    else:
        smooth = reduce_loss(spread, reduction)
    result: Tensor = hard * (1 - smoothing) + smooth * smoothing
    return result


def _soft_cross_entropy(
    x: Tensor, target: Tensor, weights: Any, ignored: Any, smoothing: float, reduction: Any,
    axis: Any,
) -> Tensor:  # fmt: skip
    """Compute the cross entropy of probabilities; its mean is over the rows, whatever the weights.

    A class of probability 0 adds 0, and a row of zeros passes no gradient on.
    """
    if ignored is not None:
        raise ArgumentError("ignore_index is for int labels; give rows a target of zeros instead")
    x, target = matching_pair(_classes_last(x, axis), _classes_last(target, axis))
    if smoothing:
        share = as_tensor(x.shape[-1], x.dtype)
        target = target * (1 - smoothing) + smoothing / share
    if weights is not None:
        target = target * as_weights(weights, x)
    logs = log_softmax(_stop_uncounted_rows(FUNCTIONS["any"](not_equal(target, 0), -1), x))
    return reduce_loss(-sum(product_or_zero(target, logs), -1), reduction)


__all__ = ["cross_entropy", "nll_loss"]

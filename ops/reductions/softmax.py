"""Softmax, its logarithm, and cross entropy of integer labels.

Each is one op with a numerically stable expression along rows; its gradient is another op.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import DTypeError, ShapeError
from graphflow.ir.op import (
    FUNCTIONS,
    Cost,
    Op,
    Rows,
    Tensor,
    as_tensor,
    error_location,
    function,
    register,
    sample,
)
from graphflow.ir.spec import TensorSpec, broadcast_shapes, equate, kind, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import normalize_axis, require_kind
from graphflow.ops.kernels.fusion.row_ops import check_first, over_axes, row_kernel
from graphflow.ops.pointwise.transcendental import exp
from graphflow.ops.reductions.reduce import CUBE, F, per_element, require_elements, sum
from graphflow.ops.sharding import row_ops as row_sharding


def _infer_along(x: TensorSpec, *others: TensorSpec, axis: int) -> TensorSpec:
    require_kind(x, "float")
    require_elements(x, (axis,))
    return TensorSpec(broadcast_shapes(x.shape, *(o.shape for o in others)), x.dtype)


def _softmax_of(xp: Any, x: Any, axis: int = -1) -> Any:
    powers = xp.exp(x - xp.max(x))
    return powers * xp.reciprocal(xp.sum(powers))


def _log_softmax_of(xp: Any, x: Any, axis: int) -> Any:
    shifted = x - xp.max(x)
    return shifted - xp.log(xp.sum(xp.exp(shifted)))


def _softmax_grad_of(xp: Any, g: Any, y: Any, axis: int) -> Any:
    return y * (g - xp.sum(g * y))


def _log_softmax_grad_of(xp: Any, g: Any, y: Any, axis: int) -> Any:
    return g - xp.exp(y) * xp.sum(g)


def _softmax_grad_vjp(
    h: Tensor, _: Tensor, g: Tensor, y: Tensor, axis: int
) -> tuple[Tensor, Tensor]:
    dy = h * (g - sum(g * y, axis, True)) - g * sum(h * y, axis, True)
    return softmax_grad(h, y, axis=axis), dy


# y·(g - Σ g·y): the gradient of softmax, from its output y.
softmax_grad = register(
    Op(
        "softmax_grad",
        infer=_infer_along,
        kernel=row_kernel(_softmax_grad_of, over_axes),
        expr=_softmax_grad_of,
        rows=over_axes,
        vjp=_softmax_grad_vjp,
        batch=batching.along("axis"),
        sharding=row_sharding.same_shape_rule(row_sharding.softmax_grad),
        cost=per_element(4),
        samples=(sample(F, F, axis=1), sample(CUBE, CUBE, axis=0)),
    )
)
_softmax = register(
    Op(
        "softmax",
        infer=_infer_along,
        kernel=row_kernel(_softmax_of, over_axes),
        expr=_softmax_of,
        rows=over_axes,
        vjp=lambda g, y, x, axis: (softmax_grad(g, y, axis=axis),),
        batch=batching.along("axis"),
        sharding=row_sharding.same_shape_rule(row_sharding.softmax),
        cost=per_element(13),
        autocast="high",
        samples=(sample(F, axis=1), sample(F, axis=0), sample(CUBE, axis=1)),
    )
)


def _log_softmax_grad_vjp(
    h: Tensor, _: Tensor, g: Tensor, y: Tensor, axis: int
) -> tuple[Tensor, Tensor]:
    weighted = h * exp(y)
    return h - sum(weighted, axis, True), -(weighted * sum(g, axis, True))


# g - exp(y)·Σ g: the gradient of log_softmax, from its output y.
log_softmax_grad = register(
    Op(
        "log_softmax_grad",
        infer=_infer_along,
        kernel=row_kernel(_log_softmax_grad_of, over_axes),
        expr=_log_softmax_grad_of,
        rows=over_axes,
        vjp=_log_softmax_grad_vjp,
        batch=batching.along("axis"),
        sharding=row_sharding.same_shape_rule(row_sharding.log_softmax_grad),
        cost=per_element(12),
        samples=(sample(F, F, axis=1), sample(CUBE, CUBE, axis=0)),
    )
)
_log_softmax = register(
    Op(
        "log_softmax",
        infer=_infer_along,
        kernel=row_kernel(_log_softmax_of, over_axes),
        expr=_log_softmax_of,
        rows=over_axes,
        vjp=lambda g, y, x, axis: (log_softmax_grad(g, y, axis=axis),),
        batch=batching.along("axis"),
        sharding=row_sharding.same_shape_rule(row_sharding.log_softmax),
        cost=per_element(13),
        autocast="high",
        samples=(sample(F, axis=1), sample(F, axis=0), sample(CUBE, axis=1)),
    )
)


@function
def softmax(x: Any, axis: int = -1, name: str | None = None) -> Tensor:
    """Compute exp(x) / Σ exp(x) along an axis, without overflow; NaN for a row of -inf.

    Raises:
        DTypeError: x is not float.
        ShapeError: axis is outside x, or x has no elements along it.
    """
    x = as_tensor(x)
    with error_location("softmax"):
        axis = normalize_axis(axis, x.ndim)
    result: Tensor = _softmax(x, axis=axis, name=name)
    return result


@function
def log_softmax(x: Any, axis: int = -1, name: str | None = None) -> Tensor:
    """Compute the logarithm of `softmax`, without overflow or loss of small probabilities.

    Raises:
        DTypeError: x is not float.
        ShapeError: axis is outside x, or x has no elements along it.
    """
    x = as_tensor(x)
    with error_location("log_softmax"):
        axis = normalize_axis(axis, x.ndim)
    result: Tensor = _log_softmax(x, axis=axis, name=name)
    return result


# Cross entropy ----------------------------------------------------------------------------------


def require_labels(logits: TensorSpec, labels: TensorSpec) -> None:
    """Refuse labels whose dtype or shape does not fit rows of logits."""
    require_kind(logits, "float")
    if kind(labels.dtype) != "int":
        raise DTypeError(
            f"labels must be ints, the classes, got {labels.dtype}; convert with .astype('int64')"
        )
    shapes = f"logits {show_shape(logits.shape)}, labels {show_shape(labels.shape)}"
    if logits.rank != labels.rank + 1:
        raise ShapeError(
            f"{shapes}: labels have the shape of the logits without the last axis (the classes)"
        )
    for a, b in zip(logits.shape, labels.shape, strict=False):
        equate(a, b, shapes)


def _infer_cross_entropy(logits: TensorSpec, labels: TensorSpec) -> TensorSpec:
    require_labels(logits, labels)
    return logits.with_shape(logits.shape[:-1])


def _infer_cross_entropy_grad(g: TensorSpec, logits: TensorSpec, labels: TensorSpec) -> TensorSpec:
    require_labels(logits, labels)
    return logits


def refuse_labels(xp: Any, *inputs: Any) -> None:
    """Refuse labels, the last input, that are no class of the logits before them."""
    logits, labels = inputs[-2:]
    # Read as unsigned, negative labels are large, so one comparison finds both errors.
    if labels.size and int(labels.view(_UNSIGNED[labels.dtype.itemsize]).max()) >= logits.shape[-1]:
        low, high = int(labels.min()), int(labels.max())
        raise IndexError(
            f"labels are class numbers in [0, {logits.shape[-1]}), got values from {low} to "
            f"{high}; logits have {logits.shape[-1]} classes"
        )


def _label_bounds(*specs: TensorSpec) -> tuple[int, int, int]:
    return len(specs) - 1, 0, int(specs[-2].shape[-1])


_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def label_places(xp: Any, logits: Any, labels: Any) -> tuple[Any, Any]:
    """Return the row and column of each label in the logits as a matrix; refuse invalid labels."""
    refuse_labels(xp, logits, labels)
    return xp.arange(labels.size), labels.reshape(-1).astype("int64")


def _along_classes(logits: Any, labels: Any) -> Rows:
    return Rows((len(logits) - 1,), (logits, (*labels, 1)))


def _grad_along_classes(g: Any, logits: Any, labels: Any) -> Rows:
    return Rows((len(logits) - 1,), ((*g, 1), logits, (*labels, 1)))


def _cross_entropy_of(xp: Any, logits: Any, labels: Any) -> Any:
    shifted = logits - xp.max(logits)
    is_label = xp.place(logits) == labels.astype("int32")
    picked = xp.sum(xp.where(is_label, shifted, 0.0))
    return xp.log(xp.sum(xp.exp(shifted))) - picked


def _cross_entropy_grad_of(xp: Any, g: Any, logits: Any, labels: Any) -> Any:
    share = _softmax_of(xp, logits)
    is_label = xp.place(logits) == labels.astype("int32")
    return xp.where(is_label, share - 1.0, share) * g


def _cross_entropy_grad_vjp(
    h: Tensor, y: Tensor, g: Tensor, logits: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, None]:
    slope = cross_entropy_grad(FUNCTIONS["full_like"](g, 1), logits, labels)
    spread = FUNCTIONS["expand_dims"](g, -1)
    return sum(h * slope, -1), spread * softmax_grad(h, softmax(logits), axis=logits.ndim - 1), None


# (softmax(logits) - one_hot(labels))·g. It checks the labels, too, since a step may compute the
# gradient without the loss.
cross_entropy_grad = register(
    Op(
        "cross_entropy_grad",
        infer=_infer_cross_entropy_grad,
        kernel=check_first(refuse_labels, row_kernel(_cross_entropy_grad_of, _grad_along_classes)),
        expr=_cross_entropy_grad_of,
        rows=_grad_along_classes,
        refuse=refuse_labels,
        bounds=_label_bounds,
        vjp=_cross_entropy_grad_vjp,
        batch=batching.rows,
        sharding=row_sharding.cross_entropy_grad_rule,
        cost=lambda g, logits, labels: Cost(flops=logits.size * 14),
        samples=(
            sample(spec("float32", (3,)), F, spec("int64", (3,))),
            sample(spec("float32", (2, 3)), spec("float32", (2, 3, 4)), spec("uint8", (2, 3))),
        ),
    )
)
cross_entropy_op = register(
    Op(
        "cross_entropy",
        infer=_infer_cross_entropy,
        kernel=check_first(
            refuse_labels, row_kernel(_cross_entropy_of, _along_classes, squeezed=True)
        ),
        expr=_cross_entropy_of,
        rows=_along_classes,
        refuse=refuse_labels,
        bounds=_label_bounds,
        vjp=lambda g, y, logits, labels: (cross_entropy_grad(g, logits, labels), None),
        batch=batching.rows,
        sharding=row_sharding.cross_entropy_rule,
        cost=lambda logits, labels: Cost(flops=logits.size * 13),
        autocast="high",
        samples=(
            sample(F, spec("int64", (3,))),
            sample(spec("float32", (2, 3, 4)), spec("uint8", (2, 3))),
            sample(spec("float32", (4,)), spec("int32")),
        ),
    )
)

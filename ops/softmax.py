"""Softmax, its logarithm, and cross entropy of integer labels.

Each is one op with one numerically stable kernel that writes to its buffer, and a gradient that is
one more.
"""

from __future__ import annotations

from typing import Any

from graphflow.errors import DTypeError, ShapeError
from graphflow.op import FUNCTIONS, Cost, Op, Tensor, as_tensor, function, located, register, sample
from graphflow.ops import batching
from graphflow.ops.reduce import CUBE, F, require_elements, sum
from graphflow.ops.rules import like_first, normalize_axis, require_kind
from graphflow.ops.transcendental import exp
from graphflow.spec import TensorSpec, broadcast_shapes, equate, kind, show_shape, spec


def _per_element(flops: int) -> Any:
    return lambda x, *others, **attrs: Cost(flops=x.size * flops)


def _infer_along(x: TensorSpec, *others: TensorSpec, axis: int) -> TensorSpec:
    require_kind(x, "float")
    require_elements(x, (axis,))
    return TensorSpec(broadcast_shapes(x.shape, *(o.shape for o in others)), x.dtype)


def _softmax_into(xp: Any, out: Any, x: Any, axis: int) -> None:
    xp.subtract(x, xp.max(x, axis=axis, keepdims=True), out=out)
    xp.exp(out, out=out)
    xp.divide(out, xp.sum(out, axis=axis, keepdims=True), out=out)


def _log_softmax_into(xp: Any, out: Any, x: Any, axis: int) -> None:
    xp.subtract(x, xp.max(x, axis=axis, keepdims=True), out=out)
    total = xp.sum(xp.exp(out), axis=axis, keepdims=True)
    xp.subtract(out, xp.log(total), out=out)


def _softmax_grad_into(xp: Any, out: Any, g: Any, y: Any, axis: int) -> None:
    inner = xp.sum(g * y, axis=axis, keepdims=True)
    xp.multiply(y, g - inner, out=out)


def _log_softmax_grad_into(xp: Any, out: Any, g: Any, y: Any, axis: int) -> None:
    total = xp.sum(g, axis=axis, keepdims=True)
    xp.subtract(g, xp.exp(y) * total, out=out)


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
        kernel=like_first(_softmax_grad_into),
        into=_softmax_grad_into,
        vjp=_softmax_grad_vjp,
        batch=batching.along("axis"),
        cost=_per_element(4),
        samples=(sample(F, F, axis=1), sample(CUBE, CUBE, axis=0)),
    )
)
_softmax = register(
    Op(
        "softmax",
        infer=_infer_along,
        kernel=like_first(_softmax_into),
        into=_softmax_into,
        vjp=lambda g, y, x, axis: (softmax_grad(g, y, axis=axis),),
        batch=batching.along("axis"),
        cost=_per_element(13),
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
        kernel=like_first(_log_softmax_grad_into),
        into=_log_softmax_grad_into,
        vjp=_log_softmax_grad_vjp,
        batch=batching.along("axis"),
        cost=_per_element(12),
        samples=(sample(F, F, axis=1), sample(CUBE, CUBE, axis=0)),
    )
)
_log_softmax = register(
    Op(
        "log_softmax",
        infer=_infer_along,
        kernel=like_first(_log_softmax_into),
        into=_log_softmax_into,
        vjp=lambda g, y, x, axis: (log_softmax_grad(g, y, axis=axis),),
        batch=batching.along("axis"),
        cost=_per_element(13),
        autocast="high",
        samples=(sample(F, axis=1), sample(F, axis=0), sample(CUBE, axis=1)),
    )
)


@function
def softmax(x: Any, axis: int = -1, name: str | None = None) -> Tensor:
    """exp(x) / Σ exp(x) along an axis, without overflow; NaN for a row of -inf.

    Raises:
        DTypeError: x is not float.
        ShapeError, ArgumentError: not an axis of x, or no elements along it.
    """
    x = as_tensor(x)
    with located("softmax"):
        axis = normalize_axis(axis, x.ndim)
    result: Tensor = _softmax(x, axis=axis, name=name)
    return result


@function
def log_softmax(x: Any, axis: int = -1, name: str | None = None) -> Tensor:
    """The logarithm of `softmax`, without overflow or loss of small probabilities.

    Raises:
        DTypeError: x is not float.
        ShapeError, ArgumentError: not an axis of x, or no elements along it.
    """
    x = as_tensor(x)
    with located("log_softmax"):
        axis = normalize_axis(axis, x.ndim)
    result: Tensor = _log_softmax(x, axis=axis, name=name)
    return result


# Cross entropy ----------------------------------------------------------------------------------


def require_labels(logits: TensorSpec, labels: TensorSpec) -> None:
    """Refuse what are no labels of rows of logits."""
    require_kind(logits, "float")
    if kind(labels.dtype) != "int":
        raise DTypeError(
            f"labels are ints (class numbers), not {labels.dtype}; convert with .astype('int64')"
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


def label_places(xp: Any, logits: Any, labels: Any) -> tuple[Any, Any]:
    """Row and column of each label in the logits as a matrix; refuses labels that are no class."""
    classes = logits.shape[-1]
    flat = labels.reshape(-1)
    # As unsigned numbers, negative ones are large: one comparison finds both.
    if flat.size and int(flat.view(f"u{flat.dtype.itemsize}").max()) >= classes:
        low, high = int(flat.min()), int(flat.max())
        raise IndexError(
            f"labels are class numbers in [0, {classes}), got values from {low} to {high}; "
            f"logits have {classes} classes"
        )
    return xp.arange(flat.size), flat.astype("int64")


def _matrix(logits: Any) -> Any:
    """A view with one row for each label."""
    return logits.reshape(-1, logits.shape[-1]) if logits.size else logits.reshape(0, 1)


def _cross_entropy_into(xp: Any, out: Any, logits: Any, labels: Any) -> None:
    picks = label_places(xp, logits, labels)
    matrix = _matrix(logits)
    shifted = xp.subtract(matrix, xp.max(matrix, axis=1, keepdims=True))
    picked = shifted[picks]
    xp.exp(shifted, out=shifted)
    total = xp.sum(shifted, axis=1)
    xp.subtract(xp.log(total), picked, out=out.reshape(-1))


def _cross_entropy_kernel(xp: Any, logits: Any, labels: Any) -> Any:
    out = xp.empty(labels.shape, logits.dtype)
    _cross_entropy_into(xp, out, logits, labels)
    return out


def _cross_entropy_grad_into(xp: Any, out: Any, g: Any, logits: Any, labels: Any) -> None:
    picks = label_places(xp, logits, labels)
    rows = _matrix(out)
    _softmax_into(xp, rows, _matrix(logits), axis=1)
    rows[picks] -= 1
    xp.multiply(rows, g.reshape(-1, 1), out=rows)


def _cross_entropy_grad_kernel(xp: Any, g: Any, logits: Any, labels: Any) -> Any:
    out = xp.empty(logits.shape, logits.dtype)
    _cross_entropy_grad_into(xp, out, g, logits, labels)
    return out


def _cross_entropy_grad_vjp(
    h: Tensor, y: Tensor, g: Tensor, logits: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, None]:
    slope = cross_entropy_grad(FUNCTIONS["full_like"](g, 1), logits, labels)
    spread = FUNCTIONS["expand_dims"](g, -1)
    return sum(h * slope, -1), spread * softmax_grad(h, softmax(logits), axis=logits.ndim - 1), None


# (softmax(logits) - one_hot(labels))·g. It checks the labels too:
# the loss itself may not be computed.
cross_entropy_grad = register(
    Op(
        "cross_entropy_grad",
        infer=_infer_cross_entropy_grad,
        kernel=_cross_entropy_grad_kernel,
        into=_cross_entropy_grad_into,
        vjp=_cross_entropy_grad_vjp,
        batch=batching.rows,
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
        kernel=_cross_entropy_kernel,
        into=_cross_entropy_into,
        vjp=lambda g, y, logits, labels: (cross_entropy_grad(g, logits, labels), None),
        batch=batching.rows,
        cost=lambda logits, labels: Cost(flops=logits.size * 13),
        autocast="high",
        samples=(
            sample(F, spec("int64", (3,))),
            sample(spec("float32", (2, 3, 4)), spec("uint8", (2, 3))),
            sample(spec("float32", (4,)), spec("int32")),
        ),
    )
)

"""Elementwise choices: maximum, minimum, where, clip.

Gradients select, too: an infinite cotangent on the side that was not chosen gives 0. Its product
with a truth value would be NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import Op, Tensor, as_tensor, error_location, function, promote_inputs, sample
from graphflow.ir.spec import TensorSpec, kind, show_shape, spec
from graphflow.ops.base.shape_rules import same, same_float, same_numeric
from graphflow.ops.pointwise.convert import stop_gradient
from graphflow.ops.pointwise.elementwise import (
    BINARY_INT,
    BOOL,
    COLUMN,
    INT,
    ROW,
    SCALAR,
    F,
    elementwise,
)


def _greater_grad_of(xp: Any, g: Any, a: Any, b: Any) -> Any:
    return xp.where(a > b, g, xp.where(a == b, g * 0.5, 0))


# The share of g that goes to a if the result is the larger of a and b; half of it at a tie.
greater_grad: Op = elementwise(
    "greater_grad",
    _greater_grad_of,
    vjp=lambda h, y, g, a, b: (greater_grad(h, a, b), None, None),
    infer=same_float,
    samples=(sample(F, F, F), sample(F, ROW, COLUMN)),
    flops=5,
    into=lambda xp, out, g, a, b: xp.copyto(out, _greater_grad_of(xp, g, a, b)),
)
maximum = elementwise(
    "maximum",
    "maximum",
    vjp=lambda g, y, a, b: (greater_grad(g, a, b), greater_grad(g, b, a)),
    samples=BINARY_INT,
    doc="The larger of a and b, NaN if one is; at a tie each has half of the gradient.",
)
minimum = elementwise(
    "minimum",
    "minimum",
    vjp=lambda g, y, a, b: (greater_grad(g, b, a), greater_grad(g, a, b)),
    samples=BINARY_INT,
    doc="The smaller of a and b, NaN if one is; at a tie each has half of the gradient.",
)


def _infer_where(condition: TensorSpec, a: TensorSpec, b: TensorSpec) -> TensorSpec:
    if condition.dtype != bool:
        raise DTypeError(
            f"the condition must be bool, got {condition.dtype}; compare it, e.g. condition != 0"
        )
    return same(condition, a, b).with_dtype(a.dtype)


def _where_vjp(
    g: Tensor, y: Tensor, condition: Tensor, a: Tensor, b: Tensor
) -> tuple[None, Tensor, Tensor]:
    return None, where(condition, g, 0), where(condition, 0, g)


_where = elementwise(
    "where",
    lambda xp, condition, a, b: xp.where(condition, a, b),
    _where_vjp,
    _infer_where,
    samples=(
        sample(BOOL, F, F),
        sample(BOOL, SCALAR, ROW),
        sample(spec("bool", (3, 1)), ROW, F),
        sample(BOOL, INT, INT),
    ),
    promotes=False,
    halves=True,
)


@function
def where(condition: Any, a: Any, b: Any, name: str | None = None) -> Tensor:
    """Return a where the condition holds, else b; the three shapes broadcast.

    Raises:
        DTypeError: the condition is not bool, or the kinds of a and b mix.
        ShapeError: the shapes do not broadcast.
    """
    a, b = promote_inputs("where", (a, b))
    result: Tensor = _where(condition, a, b, name=name)
    return result


@function
def masked_fill(x: Any, mask: Any, value: Any) -> Tensor:
    """Return x, with a value where the mask holds.

    Args:
        mask: bool, of a shape that broadcasts to that of x.
        value: a number, or a tensor of the dtype of x whose shape broadcasts to that of x.

    Raises:
        DTypeError: the mask is not bool, or the value does not fit the dtype of x.
        ShapeError: the mask or the value does not broadcast to the shape of x.
    """
    x = as_tensor(x)
    wide, value = promote_inputs("masked_fill", (x, value))
    if wide.dtype != x.dtype:
        raise DTypeError(f"value {value.dtype} for x of {x.dtype}; convert it with .astype")
    result: Tensor = _where(mask, value, x)
    if result.shape != x.shape:
        raise ShapeError(
            f"mask and value broadcast with x to {show_shape(result.shape)}, which is not its "
            f"shape {show_shape(x.shape)}"
        )
    return result


def stop_gradient_unless(condition: Tensor, x: Tensor) -> Tensor:
    """Return x, with gradient 0 where the condition does not hold, even for a NaN cotangent."""
    return where(condition, x, stop_gradient(x))


def _infer_clip(x: TensorSpec, *others: TensorSpec, min: Any, max: Any, ends: bool) -> TensorSpec:
    for bound in (min, max):
        if bound is not None and kind(x.dtype) == "int":
            limits = np.iinfo(x.dtype)
            if isinstance(bound, float) or not limits.min <= bound <= limits.max:
                raise DTypeError(
                    f"limit {bound!r} does not fit {x.dtype}; give an int in its range"
                )
    return same_numeric(x, *others)


def _clip_grad_of(xp: Any, g: Any, x: Any, min: Any, max: Any, ends: bool) -> Any:
    """Return g where x is in [min, max], or strictly between them without `ends`."""
    above = None if min is None else x >= min if ends else x > min
    below = None if max is None else x <= max if ends else x < max
    inside = below if above is None else above if below is None else above & below
    return xp.where(inside, g, 0)


_LIMITS: tuple[dict[str, Any], ...] = (
    {"min": -5.0, "max": 5.0, "ends": True},
    {"min": -5.0, "max": None, "ends": False},
    {"min": None, "max": -3.0, "ends": True},
)
clip_grad: Op = elementwise(
    "clip_grad",
    _clip_grad_of,
    vjp=lambda h, y, g, x, **limits: (clip_grad(h, x, **limits), None),
    infer=_infer_clip,
    samples=tuple(sample(F, F, **limits) for limits in _LIMITS),
    flops=3,
    into=lambda xp, out, g, x, **limits: xp.copyto(out, _clip_grad_of(xp, g, x, **limits)),
)
# `ends`: the gradient passes where x equals a limit.
clip_op: Op = elementwise(
    "clip",
    lambda xp, x, min, max, ends: xp.clip(x, min, max),
    vjp=lambda g, y, x, **limits: (clip_grad(g, x, **limits),),
    infer=_infer_clip,
    samples=(*(sample(F, **limits) for limits in _LIMITS), sample(INT, min=1, max=2, ends=True)),
    flops=2,
    into=lambda xp, out, x, min, max, ends: xp.clip(x, min, max, out=out),
)


@function
def clip(x: Any, min: Any = None, max: Any = None, name: str | None = None) -> Tensor:
    """Limit x to [min, max], which are numbers or tensors; None is no limit.

    The gradient is that of x where min <= x <= max, else 0 (for tensors as limits: see `maximum`).

    Raises:
        DTypeError: a limit does not fit the dtype of x.
        ArgumentError: a limit is NaN.
    """
    tensor = as_tensor(x)
    if all(bound is None or type(bound) in (int, float) for bound in (min, max)):
        with error_location("clip"):
            for bound in (min, max):
                if bound is not None and bound != bound:
                    raise ArgumentError("a limit is NaN; give a number, or None for no limit")
        if min is None and max is None:
            return tensor
        result: Tensor = clip_op(tensor, min=min, max=max, ends=True, name=name)
        return result
    if min is not None:
        tensor = maximum(tensor, min, name=name)
    return tensor if max is None else minimum(tensor, max, name=name)

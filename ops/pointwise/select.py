"""Elementwise choices: the larger, the smaller, where, clip.

Gradients select, too: an infinite cotangent on the side that was not chosen gives 0. Its product
with a truth value would be NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, DTypeError
from graphflow.ir.op import Op, Tensor, as_tensor, function, located, promoted, sample
from graphflow.ir.spec import TensorSpec, kind, spec
from graphflow.ops.base.shape_rules import same, same_float, same_numeric
from graphflow.ops.pointwise.arithmetic import (
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


# The share of g that goes to a, where the larger of a and b was taken: half at a tie.
greater_grad: Op = elementwise(
    "greater_grad",
    _greater_grad_of,
    vjp=lambda h, y, g, a, b: (greater_grad(h, a, b), None, None),
    infer=same_float,
    samples=(sample(F, F, F), sample(F, ROW, COLUMN)),
    flops=5,
    into=lambda xp, out, g, a, b: xp.copyto(out, _greater_grad_of(xp, g, a, b)),
)
# At a tie half of the gradient goes to each.
maximum = elementwise(
    "maximum",
    "maximum",
    vjp=lambda g, y, a, b: (greater_grad(g, a, b), greater_grad(g, b, a)),
    samples=BINARY_INT,
)
minimum = elementwise(
    "minimum",
    "minimum",
    vjp=lambda g, y, a, b: (greater_grad(g, b, a), greater_grad(g, a, b)),
    samples=BINARY_INT,
)


def _infer_where(condition: TensorSpec, a: TensorSpec, b: TensorSpec) -> TensorSpec:
    if condition.dtype != bool:
        raise DTypeError(
            f"the condition is bool, not {condition.dtype}; compare it, e.g. condition != 0"
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
    """a where the condition holds, else b; the three broadcast.

    Raises:
        DTypeError: the condition is not bool, or the kinds of a and b mix.
        ShapeError: the shapes do not broadcast.
    """
    a, b = promoted("where", (a, b))
    result: Tensor = _where(condition, a, b, name=name)
    return result


def _infer_clip(x: TensorSpec, *others: TensorSpec, min: Any = None, max: Any = None) -> TensorSpec:
    for bound in (min, max):
        if bound is not None and kind(x.dtype) == "int":
            limits = np.iinfo(x.dtype)
            if isinstance(bound, float) or not limits.min <= bound <= limits.max:
                raise DTypeError(
                    f"limit {bound!r} does not fit {x.dtype}; give an int in its range"
                )
    return same_numeric(x, *others)


def _within(x: Any, min: Any, max: Any) -> Any:
    if min is None or max is None:
        return x >= min if max is None else x <= max
    return (x >= min) & (x <= max)


_LIMITS = ({"min": -5.0, "max": 5.0}, {"min": -5.0, "max": None}, {"min": None, "max": -3.0})
clip_grad: Op = elementwise(
    "clip_grad",
    lambda xp, g, x, min, max: xp.where(_within(x, min, max), g, 0),
    vjp=lambda h, y, g, x, min, max: (clip_grad(h, x, min=min, max=max), None),
    infer=_infer_clip,
    samples=tuple(sample(F, F, **limits) for limits in _LIMITS),
    flops=3,
    into=lambda xp, out, g, x, min, max: xp.copyto(out, xp.where(_within(x, min, max), g, 0)),
)
_clip = elementwise(
    "clip",
    lambda xp, x, min, max: xp.clip(x, min, max),
    vjp=lambda g, y, x, min, max: (clip_grad(g, x, min=min, max=max),),
    infer=_infer_clip,
    samples=(*(sample(F, **limits) for limits in _LIMITS), sample(INT, min=1, max=2)),
    flops=2,
    into=lambda xp, out, x, min, max: xp.clip(x, min, max, out=out),
)


@function
def clip(x: Any, min: Any = None, max: Any = None, name: str | None = None) -> Tensor:
    """x limited to [min, max]: numbers or tensors, None for no limit.

    The gradient is that of x where min <= x <= max, else 0 (between tensors: see `maximum`).

    Raises:
        DTypeError: a limit does not fit the dtype of x.
        ArgumentError: a limit is NaN.
    """
    tensor = as_tensor(x)
    if all(bound is None or type(bound) in (int, float) for bound in (min, max)):
        with located("clip"):
            for bound in (min, max):
                if bound is not None and bound != bound:
                    raise ArgumentError("a limit is NaN; give a number, or None for no limit")
        if min is None and max is None:
            return tensor
        result: Tensor = _clip(tensor, min=min, max=max, name=name)
        return result
    if min is not None:
        tensor = maximum(tensor, min, name=name)
    return tensor if max is None else minimum(tensor, max, name=name)

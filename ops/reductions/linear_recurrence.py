"""Running products, and linear recurrences along an axis.

The gradients of both are recurrences in the opposite direction, so nothing is divided by an element
that may be 0.
"""

from __future__ import annotations

import math
from typing import Any

from graphflow.ir.op import FUNCTIONS, Op, Tensor, error_location, function, register, sample
from graphflow.ir.spec import TensorSpec, equate, is_inexact
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import conj, require_kind
from graphflow.ops.reductions.cumulative import require_one_axis
from graphflow.ops.reductions.reduce import COMPLEX, CUBE, INT, F, per_element, sum_dtype
from graphflow.ops.sharding import along_axis as axis_sharding
from graphflow.ops.sharding import rules as sharding


def _axis_indices(axis: int, *which: Any) -> list[tuple[Any, ...]]:
    """Return full indices that select positions along an axis."""
    return [((slice(None),) * axis + (each,)) for each in which]


def _shifted_into(xp: Any, out: Any, x: Any, axis: int, by: int, value: float) -> None:
    here, there = slice(1, None), slice(None, -1)
    to, edge, come = _axis_indices(axis, *((here, 0, there) if by > 0 else (there, -1, here)))
    if x.shape[axis]:
        out[to] = x[come]
        out[edge] = value


def _shifted_kernel(xp: Any, x: Any, axis: int, by: int, value: float) -> Any:
    out = xp.empty(x.shape, x.dtype)
    _shifted_into(xp, out, x, axis, by, value)
    return out


# Moves each element one position forward (by = 1) or back (-1); `value` fills the gap.
shifted: Op = register(
    Op(
        "shifted",
        infer=lambda x, axis, by, value: x,
        kernel=_shifted_kernel,
        into=_shifted_into,
        vjp=lambda g, y, x, axis, by, value: (shifted(g, axis=axis, by=-by, value=0.0),),
        batch=batching.along("axis"),
        sharding=sharding.row_rule("axis"),
        cost=per_element(0),
        samples=(sample(F, axis=1, by=1, value=1.0), sample(CUBE, axis=0, by=-1, value=0.0)),
    )
)


def _infer_recurrence(a: TensorSpec, b: TensorSpec, axis: int, reverse: bool) -> TensorSpec:
    require_kind(a, "float", "complex")
    sizes = zip(a.shape, b.shape, strict=True)
    return b.with_shape(tuple(equate(n, m, "sizes of a recurrence") for n, m in sizes))


def _recurrence_into(xp: Any, out: Any, a: Any, b: Any, axis: int, reverse: bool) -> None:
    count = range(b.shape[axis])
    before: Any = None
    for here in _axis_indices(axis, *(reversed(count) if reverse else count)):
        out[here] = b[here] if before is None else a[here] * out[before] + b[here]
        before = here


def _recurrence_kernel(xp: Any, a: Any, b: Any, axis: int, reverse: bool) -> Any:
    out = xp.empty(b.shape, b.dtype)
    _recurrence_into(xp, out, a, b, axis, reverse)
    return out


def _recurrence_vjp(
    g: Tensor, y: Tensor, a: Tensor, b: Tensor, axis: int, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Propagate the cotangent of each step to the step before it, times the later step's factor."""
    by = -1 if reverse else 1
    factors = shifted(conj(a), axis=axis, by=-by, value=0.0)
    total = linear_recurrence(factors, g, axis=axis, reverse=not reverse)
    # The first step uses no factor. Shifting drops it; multiplying by y[-1] = 0 would give NaN for
    # an infinite total.
    behind = shifted(total, axis=axis, by=-by, value=0.0) * conj(y)
    return shifted(behind, axis=axis, by=by, value=0.0), total


# y[i] = a[i]·y[i - 1] + b[i] along an axis, from its front or its end, with 0 before the first.
linear_recurrence: Op = register(
    Op(
        "linear_recurrence",
        infer=_infer_recurrence,
        kernel=_recurrence_kernel,
        into=_recurrence_into,
        vjp=_recurrence_vjp,
        batch=batching.along("axis"),
        sharding=sharding.row_rule("axis"),
        cost=lambda a, b, **attrs: per_element(2)(b),
        samples=(
            sample(F, F, axis=1, reverse=False),
            sample(CUBE, CUBE, axis=0, reverse=True),
            sample(COMPLEX, COMPLEX, axis=1, reverse=True),
        ),
    )
)


def _cumprod_vjp(g: Tensor, y: Tensor, x: Tensor, axis: int) -> tuple[Tensor | None]:
    """Multiply the product before an element by the recurrence of the cotangents behind it."""
    if not is_inexact(x.dtype):
        return (None,)
    factors = shifted(conj(x), axis=axis, by=-1, value=0.0)
    behind = linear_recurrence(factors, g, axis=axis, reverse=True)
    return (behind * conj(shifted(y, axis=axis, by=1, value=1.0)),)


_cumprod = register(
    Op(
        "cumprod",
        infer=lambda x, axis: x.with_dtype(sum_dtype(x, None)),
        kernel=lambda xp, x, axis: xp.cumprod(x, axis=axis, dtype=sum_dtype(x, None)),
        into=lambda xp, out, x, axis: xp.cumprod(x, axis=axis, dtype=out.dtype, out=out),
        vjp=_cumprod_vjp,
        batch=batching.along("axis"),
        sharding=axis_sharding.cumulative_rule("multiply"),
        cost=per_element(1),
        autocast="high",
        samples=(
            sample(F, axis=1),
            sample(CUBE, axis=0),
            sample(INT, axis=0),
            sample(COMPLEX, axis=1),
        ),
    )
)


@composite("x")
@function
def cumprod(x: Any, axis: int | None = None, name: str | None = None) -> Tensor:
    """Multiply the elements up to each position along an axis; the gradient is exact at zeros.

    Args:
        axis: may be left out if x has one axis.

    Returns:
        A tensor of the shape of x; dtypes as for `sum`.

    Raises:
        ShapeError: axis is outside x.
        ArgumentError: axis is left out and x does not have one axis.
    """
    with error_location("cumprod"):
        x, axis = require_one_axis(x, axis)
    result: Tensor = _cumprod(x, axis=axis, name=name)
    return result


@composite("x", to="high")
@function
def logcumsumexp(x: Any, axis: int | None = None) -> Tensor:
    """Compute log(Σ exp(x)) of the elements up to each position along an axis.

    Each sum is relative to the largest element up to there, so that no element overflows, and small
    ones before large ones keep their digits.

    Args:
        x: floats.
        axis: may be left out if x has one axis.

    Raises:
        DTypeError: x is not float.
        ShapeError: axis is outside x.
        ArgumentError: axis is left out and x does not have one axis.
    """
    x, axis = require_one_axis(x, axis)
    require_kind(x.spec, "float")
    where, equal, minimum = FUNCTIONS["where"], FUNCTIONS["equal"], FUNCTIONS["minimum"]
    top = FUNCTIONS["cummax"](FUNCTIONS["stop_gradient"](x), axis)
    top = where(FUNCTIONS["isfinite"](top), top, 0)
    before = shifted(top, axis=axis, by=1, value=0.0)
    factors = FUNCTIONS["exp"](minimum(before - top, 0))  # above 0 only where a 0 stands for -inf
    total = linear_recurrence(factors, FUNCTIONS["exp"](x - top), axis=axis, reverse=False)
    none = equal(total, 0)
    result: Tensor = where(none, -math.inf, top + FUNCTIONS["log"](where(none, 1, total)))
    return result

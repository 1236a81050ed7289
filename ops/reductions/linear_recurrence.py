"""Running products, and what their gradients are made of: linear recurrences along an axis, whose
gradients are recurrences that run the other way, so that nothing is divided by what may be zero."""

from __future__ import annotations

from typing import Any

from graphflow.ir.op import Op, Tensor, error_location, function, register, sample
from graphflow.ir.spec import TensorSpec, equate, is_inexact
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import conj, require_kind
from graphflow.ops.reductions.cumulative import require_one_axis
from graphflow.ops.reductions.reduce import COMPLEX, CUBE, INT, F, per_element, sum_dtype
from graphflow.ops.sharding import along_axis as axis_sharding
from graphflow.ops.sharding import rules as sharding


def _axis_indices(axis: int, *which: Any) -> list[tuple[Any, ...]]:
    """Indices along an axis."""
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


# Each element goes one place on (by = 1) or back (-1); `value` fills what is left.
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
    """What a step's result is asked for reaches the step before it by the next step's factor."""
    by = -1 if reverse else 1
    factors = shifted(conj(a), axis=axis, by=-by, value=0.0)
    total = linear_recurrence(factors, g, axis=axis, reverse=not reverse)
    # The first step reads no factor. The shift selects; y[-1] = 0 times an infinite total is NaN.
    behind = shifted(total, axis=axis, by=-by, value=0.0) * conj(y)
    return shifted(behind, axis=axis, by=by, value=0.0), total


# y[i] = a[i]·y[i - 1] + b[i] along an axis, from its front or its end; before it there is 0.
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
    """What stands before an element, times what is asked of all that stands behind it."""
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
    """Running product along an axis (which only a 1-d x may leave out); dtypes as for `sum`. The
    gradient is exact at zeros.

    Raises:
        ShapeError, ArgumentError: not an axis of x.
    """
    with error_location("cumprod"):
        x, axis = require_one_axis(x, axis)
    result: Tensor = _cumprod(x, axis=axis, name=name)
    return result

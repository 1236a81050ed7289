"""Products over axes, and running sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ArgumentError
from graphflow.ir.op import (
    FUNCTIONS,
    Op,
    Tensor,
    as_tensor,
    error_location,
    function,
    register,
    sample,
)
from graphflow.ir.spec import Shape, is_inexact, kind
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import conj, normalize_axis
from graphflow.ops.kernels.fusion.row_ops import over_axes
from graphflow.ops.kernels.sparse.prefix_sum import try_running_sum
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.pointwise.select import where
from graphflow.ops.reductions.reduce import (
    COMPLEX,
    CUBE,
    INT,
    F,
    infer_sum,
    normalize_arguments,
    per_element,
    sum,
    sum_dtype,
)
from graphflow.ops.sharding import along_axis as axis_sharding
from graphflow.ops.sharding import rules as sharding


def _prod_vjp(
    g: Tensor, y: Tensor, x: Tensor, axis: int, dtype: str | None = None
) -> tuple[Tensor | None]:
    return (g * conj(prod_others(x, axis=axis)),) if is_inexact(x.dtype) else (None,)


# Multiplies along one axis, which stays with size 1.
_prod = register(
    Op(
        "prod",
        infer=lambda x, axis, dtype=None: infer_sum(x, (axis,), True, dtype),
        kernel=lambda xp, x, axis, dtype=None: xp.prod(
            x, axis=axis, keepdims=True, dtype=sum_dtype(x, dtype)
        ),
        into=lambda xp, out, x, axis, dtype=None: xp.prod(
            x, axis=axis, keepdims=True, dtype=out.dtype, out=out
        ),
        expr=lambda xp, x, axis, dtype=None: xp.prod(x.astype(sum_dtype(x, dtype))),
        rows=over_axes,
        vjp=_prod_vjp,
        batch=batching.along("axis"),
        sharding=sharding.prod_rule,
        cost=per_element(1),
        autocast="high",
        samples=(
            sample(F, axis=1),
            sample(CUBE, axis=0),
            sample(INT, axis=0),
            sample(COMPLEX, axis=0),
        ),
    )
)


def _prod_others_kernel(xp: Any, x: Any, axis: int) -> Any:
    """Multiply the elements before each element by those after it, which is exact for zeros."""
    ahead = (slice(None),) * axis
    first, but_first = (*ahead, slice(0, 1)), (*ahead, slice(1, None))
    but_last = (*ahead, slice(None, -1))

    def before(values: Any) -> Any:
        result = xp.empty(values.shape, values.dtype)
        result[first] = 1
        result[but_first] = xp.cumprod(values, axis=axis)[but_last]
        return result

    return before(x) * xp.flip(before(xp.flip(x, axis)), axis)


def _prod_others_vjp(g: Tensor, y: Tensor, x: Tensor, axis: int) -> tuple[Tensor]:
    """Differentiate by a matrix along (axis, axis + 1) whose row i holds x with 1 in place of x[i].

    It needs memory of the square of the axis, as there are that many second derivatives of a
    product.
    """
    others = (*x.shape[: axis + 1], x.shape[axis], *x.shape[axis + 1 :])
    size = x.shape[axis]
    square: Shape = (*(1,) * axis, size, size, *(1,) * (x.ndim - axis - 1))
    diagonal = FUNCTIONS["reshape"](FUNCTIONS["eye"](size, dtype="bool"), square)
    rows = FUNCTIONS["broadcast_to"](FUNCTIONS["expand_dims"](x, axis), others)
    pairs = prod_others(where(diagonal, 1, rows), axis=axis + 1)
    spread = FUNCTIONS["expand_dims"](g, axis + 1)
    return (sum(where(diagonal, 0, spread * conj(pairs)), axis),)


prod_others = register(
    Op(
        "prod_others",
        infer=lambda x, axis: x,
        kernel=_prod_others_kernel,
        vjp=_prod_others_vjp,
        batch=batching.along("axis"),
        sharding=sharding.row_rule("axis"),
        cost=per_element(3),
        samples=(sample(F, axis=1), sample(CUBE, axis=0), sample(COMPLEX, axis=1)),
    )
)


@function
def prod(
    x: Any, axis: Any = None, keepdims: bool = False, dtype: Any = None, name: str | None = None
) -> Tensor:
    """Multiply the elements over axes (None: all); the gradient is exact at zeros.

    Args:
        x: bools, ints, floats or complex numbers.
        dtype: dtype of the result; default as for `sum`.

    Raises:
        ShapeError: an axis is outside x.
        ArgumentError: an axis is given twice.
    """
    x, axes = normalize_arguments("prod", x, axis, keepdims)
    if dtype is None:
        dtype = sum_dtype(x.spec, None)
    product_of = astype(x, dtype)
    wanted = {"dtype": product_of.dtype.name} if kind(product_of.dtype) == "int" else {}
    product_of = (_over_axes if len(axes) > 1 else _prod_along)(product_of, axes, name, **wanted)
    if keepdims or not axes:
        return product_of
    result: Tensor = FUNCTIONS["squeeze"](product_of, axes)
    return result


def _prod_along(x: Tensor, axes: tuple[int, ...], name: str | None, **wanted: str) -> Tensor:
    for a in axes:
        x = _prod(x, axis=a, name=name, **wanted)
    return x


_over_axes = composite("x")(_prod_along)


_WIDER = {"float32": "float64", "complex64": "complex128"}


def _running_dtype(xp: Any, dtype: Any) -> Any:
    """Return the dtype in which a running sum runs.

    numpy adds strictly in order: in float32 it would lose a tenth of ten million equal numbers.
    CuPy adds in a tree.
    """
    return _WIDER.get(dtype.name, dtype) if xp is np else dtype


def _cumsum_into(xp: Any, out: Any, x: Any, axis: int, reverse: bool) -> None:
    if xp is np and try_running_sum(out, x, axis, reverse):
        return
    dtype = _running_dtype(xp, out.dtype)
    if reverse:
        xp.copyto(out, xp.flip(xp.cumsum(xp.flip(x, axis), axis=axis, dtype=dtype), axis))
    else:
        xp.cumsum(x, axis=axis, dtype=dtype, out=out)


def _cumsum_kernel(xp: Any, x: Any, axis: int, reverse: bool) -> Any:
    out = xp.empty(x.shape, sum_dtype(x, None))
    _cumsum_into(xp, out, x, axis, reverse)
    return out


_cumsum: Op = register(
    Op(
        "cumsum",
        infer=lambda x, axis, reverse: x.with_dtype(sum_dtype(x, None)),
        kernel=_cumsum_kernel,
        into=_cumsum_into,
        vjp=lambda g, y, x, axis, reverse: (
            _cumsum(g, axis=axis, reverse=not reverse) if is_inexact(x.dtype) else None,
        ),
        batch=batching.along("axis"),
        sharding=axis_sharding.cumulative_rule("add", linear=True),
        cost=per_element(1),
        autocast="high",
        samples=(
            sample(F, axis=1, reverse=False),
            sample(CUBE, axis=0, reverse=True),
            sample(INT, axis=0, reverse=False),
            sample(COMPLEX, axis=1, reverse=True),
        ),
    )
)


def require_one_axis(x: Any, axis: int | None) -> tuple[Tensor, int]:
    """Return x as a tensor, and the axis counted from the front along which something runs."""
    x = as_tensor(x)
    if axis is None and x.ndim != 1:
        raise ArgumentError(f"x has rank {x.ndim}; give the axis")
    return x, normalize_axis(0 if axis is None else axis, x.ndim)


@function
def cumsum(
    x: Any, axis: int | None = None, name: str | None = None, *, reverse: bool = False
) -> Tensor:
    """Sum the elements up to each position along an axis.

    Args:
        axis: may be left out if x has one axis.
        reverse: sum from each position to the end instead.

    Returns:
        A tensor of the shape of x; dtypes as for `sum`.

    Raises:
        ShapeError: axis is outside x.
        ArgumentError: axis is left out and x does not have one axis, or reverse is not a bool.
    """
    with error_location("cumsum"):
        x, axis = require_one_axis(x, axis)
        if not isinstance(reverse, bool):
            raise ArgumentError(f"reverse must be True or False, got {reverse!r}")
    result: Tensor = _cumsum(x, axis=axis, reverse=reverse, name=name)
    return result

"""Functions whose signature in the array API standard is not that of graphflow."""

from __future__ import annotations

from typing import Any, NoReturn

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.source_location import user_location
from graphflow.errors import ArgumentError, GraphError
from graphflow.ir.op import Tensor, as_tensor
from graphflow.ir.spec import kind
from graphflow.ops.pointwise.arithmetic import round as round_real
from graphflow.ops.pointwise.complex import complex as make_complex
from graphflow.ops.reductions.cumulative import cumsum, require_one_axis
from graphflow.ops.reductions.linear_recurrence import cumprod
from graphflow.ops.tensors.creation import full
from graphflow.ops.tensors.shape import reshape as change_shape
from graphflow.ops.tensors.slicing import concat
from graphflow.ops.tensors.slicing import diff as differences
from graphflow.ops.tensors.slicing import unstack as split_axis


def _cumulate(function: Any, start: int, x: Any, axis: Any, dtype: Any, initial: Any) -> Tensor:
    tensor, axis = require_one_axis(x, axis)
    result: Tensor = function(tensor if dtype is None else tensor.astype(dtype), axis)
    if dtype is not None:
        result = result.astype(dtype)  # sums of short ints have 64 bits
    if not initial:
        return result
    shape = (*result.shape[:axis], 1, *result.shape[axis + 1 :])
    return concat([full(shape, result.dtype.type(start).item(), result.dtype), result], axis)


@checks_argument_names(ArgumentError)
def cumulative_sum(
    x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: Any = False
) -> Tensor:
    """Sum the elements up to each position along an axis, as `gf.cumsum`.

    Args:
        include_initial: begin with a 0, so that the axis is longer by one.
    """
    return _cumulate(cumsum, 0, x, axis, dtype, include_initial)


@checks_argument_names(ArgumentError)
def cumulative_prod(
    x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: Any = False
) -> Tensor:
    """Multiply the elements up to each position along an axis, as `gf.cumprod`.

    Args:
        include_initial: begin with a 1, so that the axis is longer by one.
    """
    return _cumulate(cumprod, 1, x, axis, dtype, include_initial)


@checks_argument_names(ArgumentError)
def diff(
    x: Any, /, *, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None
) -> Tensor:
    """Take differences of neighbours along an axis, n times, as `gf.diff`.

    Args:
        prepend, append: tensors to join to x before and after, along the axis.
    """
    parts = [as_tensor(part) for part in (prepend, x, append) if part is not None]
    return differences(concat(parts, axis) if len(parts) > 1 else parts[0], n, axis)


@checks_argument_names(ArgumentError)
def round(x: Any, /) -> Tensor:
    """Round to the nearest integer, halves to even numbers; of complex numbers both parts."""
    tensor = as_tensor(x)
    if kind(tensor.dtype) == "complex":
        return make_complex(round_real(tensor.real), round_real(tensor.imag))
    result: Tensor = round_real(tensor)
    return result


@checks_argument_names(ArgumentError)
def reshape(x: Any, /, shape: Any, *, copy: Any = None) -> Tensor:
    """Return x in another shape; `copy` is without effect, since tensors never change."""
    return change_shape(x, shape)


@checks_argument_names(ArgumentError)
def unstack(x: Any, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """Return the slices of x along an axis."""
    return tuple(split_axis(x, axis))


def _no_shape_error(name: str) -> GraphError:
    return GraphError(
        f"{name} at {user_location()}: the result's shape depends on values, and a graph's shapes "
        f"are fixed before them; use gf.{name}(x, size), which fills up to a size"
    )


@checks_argument_names(ArgumentError)
def nonzero(x: Any, /) -> NoReturn:
    """Raise an error that names `gf.nonzero(x, size)`: the shape would depend on values."""
    raise _no_shape_error("nonzero")


@checks_argument_names(ArgumentError)
def unique_all(x: Any, /) -> NoReturn:
    """Raise an error that names `gf.unique_all(x, size)`: the shape would depend on values."""
    raise _no_shape_error("unique_all")


@checks_argument_names(ArgumentError)
def unique_counts(x: Any, /) -> NoReturn:
    """Raise an error that names `gf.unique_counts(x, size)`: the shape would depend on values."""
    raise _no_shape_error("unique_counts")


@checks_argument_names(ArgumentError)
def unique_inverse(x: Any, /) -> NoReturn:
    """Raise an error that names `gf.unique_inverse(x, size)`: the shape would depend on values."""
    raise _no_shape_error("unique_inverse")


@checks_argument_names(ArgumentError)
def unique_values(x: Any, /) -> NoReturn:
    """Raise an error that names `gf.unique_values(x, size)`: the shape would depend on values."""
    raise _no_shape_error("unique_values")


__all__ = [
    "cumulative_prod", "cumulative_sum", "diff", "nonzero", "reshape", "round", "unique_all",
    "unique_counts", "unique_inverse", "unique_values", "unstack",
]  # fmt: skip

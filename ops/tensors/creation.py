"""Creation of tensors: filled, counted, evenly spaced, the identity.

Shapes may hold symbolic sizes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.base.argument_kinds import is_number
from graphflow.errors import ArgumentError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, promote_inputs, register, sample
from graphflow.ir.spec import (
    Dim,
    Shape,
    Size,
    TensorSpec,
    as_dtype,
    floordiv,
    kind,
    maximum,
    normalize_shape,
    product,
)
from graphflow.ops.base.shape_rules import require_buildable, require_int
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.repetition import broadcast_to


def _fill_into(xp: Any, out: Any, shape: Shape, value: Any, dtype: str) -> None:
    out[...] = value


fill = register(
    Op(
        "fill",
        infer=lambda shape, value, dtype: TensorSpec(shape, as_dtype(dtype)),
        kernel=lambda xp, shape, value, dtype: xp.full(shape, value, dtype),
        into=_fill_into,
        sharding=sharding.creation_rule,
        cost=lambda shape, value, dtype: Cost(
            flops=0, bytes=product(shape) * as_dtype(dtype).itemsize
        ),
        samples=(
            sample(shape=(3, 4), value=1.5, dtype="float32"),
            sample(shape=(), value=7, dtype="int64"),
            sample(shape=(0, 2), value=True, dtype="bool"),
        ),
    )
)


@function
def full(shape: Any, value: Any, dtype: Any = None) -> Tensor:
    """Return a tensor filled with one value.

    Args:
        shape: ints, or sizes of other tensors.
        value: a Python scalar, a size, or a scalar tensor.
        dtype: default: int64, float32 or bool for Python scalars, else the dtype of the value.

    Raises:
        ShapeError: shape is no shape.
        DTypeError: the value does not fit the dtype.
        ArgumentError: the value is no scalar.
    """
    if isinstance(value, Tensor | Dim):
        scalar = as_tensor(value)
        return broadcast_to(scalar if dtype is None else astype(scalar, dtype), shape)
    sizes = normalize_shape(shape, "full")
    if dtype is None:
        dtype = as_tensor(value).dtype
    wanted = as_dtype(dtype)
    if isinstance(value, list | tuple) or np.ndim(value):
        raise ArgumentError(f"the value must be a scalar, got {value!r}; use broadcast_to")
    promote_inputs("full", (as_tensor(0, wanted), value))  # refuses a value that does not fit
    result: Tensor = fill(shape=sizes, value=np.asarray(value).item(), dtype=wanted.name)
    return result


@function
def zeros(shape: Any, dtype: Any = "float32") -> Tensor:
    """Return a tensor of zeros.

    Args:
        shape: ints, or sizes of other tensors.

    Raises:
        ShapeError, DTypeError: shape is no shape, or dtype no dtype.
    """
    dtype = as_dtype(dtype)
    return full(shape, dtype.type(0).item(), dtype)


@function
def ones(shape: Any, dtype: Any = "float32") -> Tensor:
    """Return a tensor of ones.

    Args:
        shape: ints, or sizes of other tensors.

    Raises:
        ShapeError, DTypeError: shape is no shape, or dtype no dtype.
    """
    dtype = as_dtype(dtype)
    return full(shape, dtype.type(1).item(), dtype)


# Counting ---------------------------------------------------------------------------------------


def _arange_kernel(xp: Any, start: Any, step: Any, size: int, dtype: str) -> Any:
    exact = "float64" if kind(as_dtype(dtype)) == "float" else dtype
    return (
        xp.arange(size).astype(exact) * exact_scalar(exact, step) + exact_scalar(exact, start)
    ).astype(dtype, copy=False)


def exact_scalar(dtype: str, value: Any) -> Any:
    """Return a numpy scalar of the dtype, so that arithmetic with it stays in that dtype."""
    return np.dtype(dtype).type(value)


arange_op = register(
    Op(
        "arange",
        infer=lambda start, step, size, dtype: TensorSpec((size,), as_dtype(dtype)),
        kernel=_arange_kernel,
        sharding=sharding.arange_rule,
        cost=lambda start, step, size, dtype: Cost(
            flops=size * 2, bytes=size * as_dtype(dtype).itemsize
        ),
        samples=(
            sample(start=0, step=1, size=5, dtype="int64"),
            sample(start=0.5, step=-0.25, size=4, dtype="float32"),
        ),
    )
)


@function
def arange(start: Any, stop: Any = None, step: Any = 1, *, dtype: Any = None) -> Tensor:
    """Return start, start + step, … before `stop`; `arange(stop)` starts at 0.

    Args:
        start, stop: numbers, or sizes of tensors.
        step: a number other than 0.
        dtype: default: int64 for ints and sizes, float32 for floats.

    Raises:
        ArgumentError: step is 0, a bound is no finite number, or sizes and floats mix.
    """
    if stop is None:
        start, stop = 0, start
    numbers = (start, stop, step)
    if not all(is_number(b) or isinstance(b, Dim) for b in numbers):
        raise ArgumentError(f"bounds and step must be numbers, got {numbers}")
    if not all(isinstance(b, Dim) or math.isfinite(b) for b in numbers):
        raise ArgumentError(f"bounds and step must be finite numbers, got {numbers}")
    if isinstance(step, Dim) or step == 0:
        raise ArgumentError(f"the step must be a number other than 0, got {step!r}")
    symbolic = any(isinstance(b, Dim) for b in numbers)
    floats = any(isinstance(b, float | np.floating) for b in numbers)
    if symbolic and floats:
        raise ArgumentError("sizes and floats do not mix; convert the result with .astype")
    size: Size
    if symbolic:
        sign = 1 if step > 0 else -1
        size = floordiv((stop - start) * sign + (abs(int(step)) - 1), abs(int(step)))
        size = size if start == 0 and sign > 0 else maximum(size, 0)
    else:
        size = max(0, int(np.ceil((stop - start) / step)))
    wanted = as_dtype(("float32" if floats else "int64") if dtype is None else dtype).name
    plain = [b if isinstance(b, Dim) else np.asarray(b).item() for b in (start, step)]
    result: Tensor = arange_op(start=plain[0], step=plain[1], size=size, dtype=wanted)
    return result


@function
def linspace(
    start: float, stop: float, num: int, *, dtype: Any = "float32", endpoint: bool = True
) -> Tensor:
    """Return `num` evenly spaced numbers from start to stop, which is left out without `endpoint`.

    Args:
        dtype: a dtype; default float32.

    Raises:
        ArgumentError: num is no int >= 0 or too large for a graph, or start or stop is no number.
    """
    for bound in (start, stop):
        if not is_number(bound):
            raise ArgumentError(f"start and stop must be numbers, got {bound!r}")
    if isinstance(num, bool) or not isinstance(num, int | np.integer) or num < 0:
        raise ArgumentError(f"the number of points must be an int >= 0, got {num!r}")
    require_buildable(int(num))
    points = np.linspace(float(start), float(stop), int(num), endpoint=endpoint)
    return as_tensor(points.astype(as_dtype(dtype)))


# Diagonals --------------------------------------------------------------------------------------


def _eye_into(xp: Any, out: Any, rows: int, columns: int, k: int, dtype: str) -> None:
    out[...] = xp.arange(rows)[:, None] + k == xp.arange(columns)


def _eye_kernel(xp: Any, rows: int, columns: int, k: int, dtype: str) -> Any:
    out = xp.empty((rows, columns), dtype)
    _eye_into(xp, out, rows, columns, k, dtype)
    return out


eye_op = register(
    Op(
        "eye",
        infer=lambda rows, columns, k, dtype: TensorSpec((rows, columns), as_dtype(dtype)),
        kernel=_eye_kernel,
        into=_eye_into,
        sharding=sharding.eye_rule,
        cost=lambda rows, columns, k, dtype: Cost(
            flops=0, bytes=rows * columns * as_dtype(dtype).itemsize
        ),
        samples=(
            sample(rows=3, columns=3, k=0, dtype="float32"),
            sample(rows=2, columns=4, k=1, dtype="int32"),
        ),
    )
)


@function
def eye(n_rows: Any, n_cols: Any = None, *, k: int = 0, dtype: Any = "float32") -> Tensor:
    """Return a matrix with ones on diagonal number k (above the main one if positive), else 0.

    Args:
        n_rows, n_cols: ints, or sizes of other tensors; n_cols defaults to n_rows.

    Raises:
        ShapeError, ArgumentError, DTypeError: a number of rows or columns is no size, k no int, or
            dtype no dtype.
    """
    rows, columns = normalize_shape((n_rows, n_rows if n_cols is None else n_cols), "eye")
    result: Tensor = eye_op(
        rows=rows, columns=columns, k=require_int("k", k), dtype=as_dtype(dtype).name
    )
    return result

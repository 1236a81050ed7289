"""Conversion of dtypes, stop_gradient, sizes as tensors, and constants like a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, DTypeError
from graphflow.ir.op import (
    FUNCTIONS,
    Cost,
    Op,
    Tensor,
    as_tensor,
    error_location,
    function,
    register,
    sample,
)
from graphflow.ir.op import device as device_scope
from graphflow.ir.spec import TensorSpec, as_dtype, is_inexact, kind, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.pointwise.elementwise import BOOL, COMPLEX, INT, F, elementwise, no_gradient
from graphflow.ops.sharding import rules as sharding


def _infer_astype(x: TensorSpec, dtype: str) -> TensorSpec:
    wanted = as_dtype(dtype)
    if kind(x.dtype) == "complex" and kind(wanted) in ("int", "float"):
        raise DTypeError(
            f"{x.dtype} does not convert to {wanted}; take gf.real, gf.imag or gf.abs first"
        )
    return x.with_dtype(wanted)


def _astype_vjp(g: Tensor, y: Tensor, x: Tensor, dtype: str) -> tuple[Tensor | None]:
    if not (is_inexact(x.dtype) and is_inexact(y.dtype)):
        return (None,)
    if kind(x.dtype) == "float":
        g = FUNCTIONS["real"](g)
    return (astype(g, x.dtype),)


_astype = elementwise(
    "astype",
    lambda xp, x, dtype: x.astype(dtype),
    _astype_vjp,
    infer=_infer_astype,
    samples=(
        sample(F, dtype="complex64"),
        sample(COMPLEX, dtype="complex128"),
        sample(COMPLEX, dtype="bool"),
        sample(F, dtype="float64"),
        sample(INT, dtype="bool"),
        sample(F, dtype="int64"),
        sample(BOOL, dtype="float32"),
        sample(F, dtype="bfloat16"),
        sample(spec("bfloat16", (3, 4)), dtype="float16"),
        sample(spec("float16", (3, 4)), dtype="float64"),
    ),
    into=lambda xp, out, x, dtype: xp.copyto(out, x, casting="unsafe"),
    promotes=False,
    halves=True,
)


@function
def astype(x: Any, dtype: Any, name: str | None = None) -> Tensor:
    """Convert x to another dtype; floats become ints by truncation towards zero.

    Raises:
        DTypeError: the dtype is not supported, or x is complex and the dtype is not.
    """
    with error_location("astype"):
        wanted = as_dtype(dtype)
    tensor = as_tensor(x)
    if tensor.dtype == wanted:
        return tensor
    result: Tensor = _astype(tensor, dtype=wanted.name, name=name)
    return result


@function
def to_device(x: Any, device: str, *, stream: None = None) -> Tensor:
    """Return x on a device: a node that is pinned there.

    Args:
        device: a name or a part of one, as for `gf.device`.
        stream: None; sessions choose streams themselves.

    Raises:
        DeviceError: the name is malformed.
        ArgumentError: a stream is given.
    """
    if stream is not None:
        raise ArgumentError("sessions choose streams themselves; leave stream out")
    tensor = as_tensor(x)
    with device_scope(device):
        result: Tensor = _astype(tensor, dtype=tensor.dtype.name)
    return result


# Passes no gradient. Its sample is of ints, since finite differences would see one of floats.
stop_gradient = register(
    Op(
        "stop_gradient",
        doc="Return x as a constant for gradients, in its shape and dtype.",
        infer=lambda x: x,
        kernel=lambda xp, x: x,
        into=lambda xp, out, x: xp.copyto(out, x),
        vjp=no_gradient,
        batch=batching.rows,
        sharding=sharding.view_rule,
        cost=lambda x: Cost(flops=0),
        halves=True,
        samples=(sample(INT),),
    )
)

# A size as a scalar tensor, for factors that depend on a size known only when a step is fed.
size_of = register(
    Op(
        "size_of",
        infer=lambda size, dtype: TensorSpec((), as_dtype(dtype)),
        kernel=lambda xp, size, dtype: xp.asarray(size, dtype),
        into=lambda xp, out, size, dtype: xp.copyto(out, np.asarray(size, dtype)),
        cost=lambda size, dtype: Cost(flops=0),
        samples=(sample(size=5, dtype="float32"),),
    )
)


@function
def full_like(x: Any, value: Any, dtype: Any = None) -> Tensor:
    """Return a tensor of the shape (and, by default, dtype) of x, filled with a number.

    It does not depend on x itself.

    Raises:
        DTypeError: the value does not fit the dtype.
    """
    x = as_tensor(x)
    result: Tensor = FUNCTIONS["full"](x.shape, value, dtype=x.dtype if dtype is None else dtype)
    return result


@function
def zeros_like(x: Any, dtype: Any = None) -> Tensor:
    """Return a tensor of the shape (and, by default, dtype) of x, filled with 0."""
    x = as_tensor(x)
    wanted = x.dtype if dtype is None else as_dtype(dtype)
    return full_like(x, wanted.type(0).item(), wanted)


@function
def ones_like(x: Any, dtype: Any = None) -> Tensor:
    """Return a tensor of the shape (and, by default, dtype) of x, filled with 1."""
    x = as_tensor(x)
    wanted = x.dtype if dtype is None else as_dtype(dtype)
    return full_like(x, wanted.type(1).item(), wanted)

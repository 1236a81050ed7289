"""Creation of tensors with the signatures of the array API standard.

A device is a name as `gf.device` takes it. An empty name or None leaves the choice to the planner.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.array_conversion import is_foreign
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import constant
from graphflow.ir.op import Tensor, as_tensor
from graphflow.ir.op import device as device_scope
from graphflow.ops.pointwise import convert
from graphflow.ops.tensors import creation as ours
from graphflow.ops.tensors.slicing import stack


def pin_to(device: Any) -> AbstractContextManager[None]:
    """Return the block that pins nodes to a device; to none if it is None or an empty name."""
    return nullcontext() if device is None or device == "" else device_scope(device)


@checks_argument_names(ArgumentError)
def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: Any = None) -> Tensor:
    """Return a tensor of an array, a number or nested lists, which may hold tensors of one shape;
    a tensor stays as it is.

    Args:
        copy: False refuses values that are no tensors yet, since constants are copies. Tensors
            never change, so that True copies nothing.

    Raises:
        DTypeError: the value has no supported dtype.
        ArgumentError: copy is False, and the value must be copied.
    """
    if isinstance(obj, Tensor):
        return astype(obj, obj.dtype if dtype is None else dtype, copy=copy, device=device)
    if copy is False:
        raise ArgumentError("asarray: a constant is a copy of its value; leave copy=False out")
    with pin_to(device):
        if _holds_tensors(obj):
            stacked = stack([asarray(each) for each in obj])
            return stacked if dtype is None else astype(stacked, dtype)
        return constant(obj, dtype)


def _holds_tensors(obj: Any) -> bool:
    """Return True for nested lists with a tensor among their leaves."""
    if isinstance(obj, list | tuple):
        return any(isinstance(each, Tensor) or _holds_tensors(each) for each in obj)
    return False


@checks_argument_names(ArgumentError)
def from_dlpack(x: Any, /, *, device: Any = None, copy: Any = None) -> Tensor:
    """Return a constant with the elements of another library's array; as `asarray`."""
    if not is_foreign(x):
        raise ArgumentError(f"from_dlpack: {type(x).__name__} has no __dlpack__; use asarray")
    return asarray(x, device=device, copy=copy)


@checks_argument_names(ArgumentError)
def astype(x: Any, dtype: Any, /, *, copy: Any = True, device: Any = None) -> Tensor:
    """Convert a tensor to another dtype; complex to real is refused.

    Args:
        copy: without effect, since tensors never change.

    Raises:
        DTypeError: the dtype is not supported, or x is complex and the dtype is not.
    """
    result = convert.astype(as_tensor(x), dtype)
    return result if device is None or device == "" else convert.to_device(result, device)


@checks_argument_names(ArgumentError)
def arange(
    start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None
) -> Tensor:
    """Return start, start + step, … before `stop`; `arange(stop)` starts at 0."""
    with pin_to(device):
        return ours.arange(start, stop, step, dtype=dtype)


@checks_argument_names(ArgumentError)
def linspace(
    start: Any, stop: Any, /, num: int, *, dtype: Any = None, device: Any = None,
    endpoint: Any = True,
) -> Tensor:  # fmt: skip
    """Return `num` evenly spaced numbers from start to stop, which may be complex."""
    if not isinstance(start, complex) and not isinstance(stop, complex):
        with pin_to(device):
            return ours.linspace(start, stop, num, dtype=dtype or "float32", endpoint=endpoint)
    points = np.linspace(start, stop, num, endpoint=endpoint)
    return asarray(points, dtype=dtype or "complex64", device=device)


@checks_argument_names(ArgumentError)
def eye(
    n_rows: Any, n_cols: Any = None, /, *, k: int = 0, dtype: Any = None, device: Any = None
) -> Tensor:
    """Return a matrix with ones on a diagonal, `k` columns above the main one."""
    with pin_to(device):
        return ours.eye(n_rows, n_cols, k=k, dtype=dtype or "float32")


@checks_argument_names(ArgumentError)
def full(shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Return a tensor filled with one value."""
    with pin_to(device):
        return ours.full(shape, fill_value, dtype)


@checks_argument_names(ArgumentError)
def full_like(x: Any, /, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Return a tensor of the shape of x, filled with one value."""
    with pin_to(device):
        return convert.full_like(x, fill_value, dtype)


@checks_argument_names(ArgumentError)
def zeros(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Return a tensor of zeros; default: float32."""
    with pin_to(device):
        return ours.zeros(shape, dtype or "float32")


@checks_argument_names(ArgumentError)
def ones(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Return a tensor of ones; default: float32."""
    with pin_to(device):
        return ours.ones(shape, dtype or "float32")


@checks_argument_names(ArgumentError)
def zeros_like(x: Any, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Return zeros of the shape and dtype of x."""
    with pin_to(device):
        return convert.zeros_like(x, dtype)


@checks_argument_names(ArgumentError)
def ones_like(x: Any, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Return ones of the shape and dtype of x."""
    with pin_to(device):
        return convert.ones_like(x, dtype)


empty, empty_like = zeros, zeros_like

__all__ = [
    "arange", "asarray", "astype", "empty", "empty_like", "eye", "from_dlpack", "full",
    "full_like", "linspace", "ones", "ones_like", "pin_to", "zeros", "zeros_like",
]  # fmt: skip

"""The kinds of values that ONNX names have while a model is read, and ONNX's dtypes.

The value of a name is one of
- `Tensor`: an output of a node of the graph that is being built;
- `Known`: an array whose values are known, or symbolic sizes;
- `Fixed`: any other value that is known (strings, a sequence, a dtype that tensors lack);
- `OnHost`: a value that exists only while the model runs, and that no tensor can hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from graphflow.errors import DTypeError
from graphflow.ir.op import Tensor, as_tensor
from graphflow.ir.spec import Dim, as_dtype

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Known:
    """Values that are known before the model runs.

    Attributes:
        array: an array of `dtype`, or of objects if some values are `Dim`s.
        parameter: the name of the weight, if it is one; its tensor is then a variable.
    """

    array: Array
    dtype: np.dtype[Any]
    parameter: str | None = None

    @property
    def symbolic(self) -> bool:
        """True if some value is a symbolic size."""
        return bool(self.array.dtype.kind == "O")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def tensor(self) -> Tensor:
        """Return the values as a constant, or as a stack of symbolic sizes."""
        if not self.symbolic:
            return as_tensor(self.array)
        from graphflow.ops.tensors.shape import reshape
        from graphflow.ops.tensors.slicing import stack

        sizes = [as_tensor(item, self.dtype) for item in self.array.reshape(-1).tolist()]
        return reshape(stack(sizes), self.array.shape)


def make_known(value: Any, dtype: Any = None) -> Known:
    """Make a `Known` of an array, or of nested lists of ints and Dims (int64 by default)."""
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return Known(value, value.dtype)
    array = np.array(value, dtype=object)
    wanted = np.dtype(dtype or "int64")
    if not any(isinstance(item, Dim) for item in array.reshape(-1)):
        array = array.astype(wanted)
    return Known(array, wanted)


@dataclass(frozen=True, eq=False)
class Fixed:
    """A known value that no tensor can hold."""

    value: Any


@dataclass(frozen=True)
class OnHost:
    """A value that exists only while the model runs, and the reason why no tensor holds it."""

    reason: str


Value = Tensor | Known | Fixed | OnHost


@cache
def onnx_dtype(code: int) -> np.dtype[Any] | None:
    """Return numpy's dtype of a `TensorProto.DataType`; None for strings and unknown codes."""
    if code in (TensorProto.UNDEFINED, TensorProto.STRING):
        return None
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(code))
    except (KeyError, ValueError):
        return None


def is_native(dtype: Any) -> bool:
    """Return True if tensors can have the dtype."""
    try:
        as_dtype(dtype)
    except DTypeError:
        return False
    return True


def dtype_name(code: int) -> str:
    """Return the name of a type code, for messages."""
    try:
        return str(TensorProto.DataType.Name(code)).lower()
    except ValueError:
        return f"type {code}"


def classify(value: Any) -> Value:
    """Wrap a value computed on the host: an array of a tensor dtype as `Known`, else `Fixed`."""
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcV" and is_native(value.dtype):
        return Known(value, value.dtype)
    return Fixed(value)

"""What an ONNX name stands for while a model is read, and how ONNX's types map to ours.

A name is one of
- `Tensor`: a node of the graph that is being built;
- `Known`: ints, floats or bools whose values are known, where sizes may still be symbolic;
- `Fixed`: any other value that is known (strings, a sequence, a dtype that numpy lacks);
- `OnHost`: a value that exists only while the model runs and that no tensor can hold.
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
    """Values known before the model runs: an array of `dtype`, or of objects if some are `Dim`s.

    `parameter` names the initializer that it is; such a value turns into a variable where it is
    used as a tensor.
    """

    array: Array
    dtype: np.dtype[Any]
    parameter: str | None = None

    @property
    def symbolic(self) -> bool:
        """Whether some value is a size that is not known yet."""
        return bool(self.array.dtype.kind == "O")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def tensor(self) -> Tensor:
        """The values as a constant, or as a stack of sizes."""
        if not self.symbolic:
            return as_tensor(self.array)
        from graphflow.ops.tensors.shape import reshape
        from graphflow.ops.tensors.slicing import stack

        sizes = [as_tensor(item, self.dtype) for item in self.array.reshape(-1).tolist()]
        return reshape(stack(sizes), self.array.shape)


def make_known(value: Any, dtype: Any = None) -> Known:
    """A `Known` from an array, or from sizes (nested lists of ints and Dims: int64)."""
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return Known(value, value.dtype)
    array = np.array(value, dtype=object)
    wanted = np.dtype(dtype or "int64")
    if not any(isinstance(item, Dim) for item in array.reshape(-1)):
        array = array.astype(wanted)
    return Known(array, wanted)


@dataclass(frozen=True, eq=False)
class Fixed:
    """A value that is known, but that no tensor can hold."""

    value: Any


@dataclass(frozen=True)
class OnHost:
    """A value that only exists while the model runs, and why no tensor holds it."""

    reason: str


Value = Tensor | Known | Fixed | OnHost


@cache
def onnx_dtype(code: int) -> np.dtype[Any] | None:
    """Numpy's dtype for a code of `TensorProto.DataType`; None for strings and unknown codes."""
    if code in (TensorProto.UNDEFINED, TensorProto.STRING):
        return None
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(code))
    except (KeyError, ValueError):
        return None


def is_native(dtype: Any) -> bool:
    """Whether our tensors can have a dtype."""
    try:
        as_dtype(dtype)
    except DTypeError:
        return False
    return True


def dtype_name(code: int) -> str:
    """The name of a type code, for messages."""
    try:
        return str(TensorProto.DataType.Name(code)).lower()
    except ValueError:
        return f"type {code}"


def classify(value: Any) -> Value:
    """A value that a step on the host gave, as what the graph after it can use.

    Numeric arrays come as `Known`; whoever continues decides whether their values matter.
    """
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcV" and is_native(value.dtype):
        return Known(value, value.dtype)
    return Fixed(value)

"""Conversion of inputs to tensors, and to the dtype that an op computes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from graphflow.base.argument_checks import format_value
from graphflow.base.array_conversion import NoArrayError, array_of, cast_in_range, is_foreign
from graphflow.base.source_location import with_location
from graphflow.errors import DTypeError
from graphflow.ir.declarations.registry import FUNCTIONS, REGISTRY
from graphflow.ir.nodes.node import Tensor
from graphflow.ir.nodes.scopes import current_scope
from graphflow.ir.nodes.tensor_operators import is_operand
from graphflow.ir.spec import Dim, as_dtype, complex_dtype, is_inexact, kind, limits, promote

# The dtype of constants made of Python numbers and lists, by the dtype that numpy gives them.
DEFAULT_DTYPES = {"float64": "float32", "complex128": "complex64"}
_PLAIN_DTYPES = {np.dtype(given): np.dtype(taken) for given, taken in DEFAULT_DTYPES.items()}


def as_tensor(value: Any, dtype: Any = None) -> Tensor:
    """Convert a value to a tensor.

    A tensor stays as it is. Arrays (also those of other libraries that have DLPack), lists and
    Python scalars become constants; without a dtype, Python floats become float32 and complex
    numbers complex64. A symbolic size becomes an int64
    tensor.

    Raises:
        DTypeError: the value has no supported dtype.
    """
    if isinstance(value, Tensor):
        return value
    if not is_operand(value):
        raise DTypeError(
            f"cannot make a tensor of {type(value).__name__} {value!r}; give a tensor, a number, a "
            "list of numbers or an array"
        )
    if isinstance(value, Dim):
        size: Tensor = REGISTRY["size_of"](size=value, dtype=as_dtype(dtype or "int64").name)
        return size
    try:
        array = array_of(value)
    except NoArrayError as error:
        why = f"no regular array: {error.__cause__}" if error.__cause__ is not None else error
        raise DTypeError(f"{format_value(value)} is {why}") from None
    if dtype is None and not is_foreign(value):
        dtype = _PLAIN_DTYPES.get(array.dtype)
    given = as_dtype(array.dtype)
    wanted = given if dtype is None else as_dtype(dtype)
    if kind(given) == "complex" and kind(wanted) != "complex":
        raise DTypeError(f"complex numbers do not fit {wanted}; take gf.real or gf.abs of them")
    try:
        array = cast_in_range(array, wanted)
    except OverflowError as error:
        raise DTypeError(f"a constant: {error}; give dtype={given.name!r}, or scale it") from None
    array.flags.writeable = False
    constant: Tensor = REGISTRY["constant"](value=array)
    return constant


def promote_inputs(op_name: str, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Convert the inputs of an op to their common dtype.

    Python scalars take the dtype of the tensors; a complex scalar makes the complex dtype of float
    tensors.

    Raises:
        DTypeError: kinds of dtypes mix, or a scalar does not fit.
    """
    try:
        strong: Sequence[Tensor] = [as_tensor(x) for x in inputs if type(x) not in _SCALAR_KINDS]
        if op_name in REGISTRY and current_scope.get().autocast is not None:
            strong = autocast_inputs(strong, REGISTRY[op_name].autocast)
        if not strong:
            strong = [as_tensor(max(inputs, key=lambda x: list(_SCALAR_KINDS).index(type(x))))]
        dtype = strong[0].dtype
        same = True
        for tensor in strong[1:]:
            if tensor.dtype is not dtype:
                same = False
                dtype = promote(dtype, tensor.dtype)
        if same and len(strong) == len(inputs):
            return tuple(strong)
        if kind(dtype) == "float" and any(type(x) is complex for x in inputs):
            dtype = complex_dtype(dtype)
        scalars = iter(strong)
        converted = (_convert_scalar(x, dtype) if _is_scalar(x) else next(scalars) for x in inputs)
        return tuple(t if t.dtype == dtype else FUNCTIONS["astype"](t, dtype) for t in converted)
    except DTypeError as error:
        raise with_location(op_name, error) from None


def autocast_inputs(
    tensors: Sequence[Tensor], to: Literal["low", "high"] | None
) -> Sequence[Tensor]:
    """Convert tensors as an open `gf.autocast` block does for ops that declare `to`."""
    scope = current_scope.get().autocast
    if scope is None or to is None:
        return tensors
    return [scope.cast(t, to) for t in tensors]


def _is_scalar(value: Any) -> bool:
    """Return True for a Python scalar or a size, but not for np.float64, which keeps its dtype."""
    return type(value) in _SCALAR_KINDS


_SCALAR_KINDS = {bool: "bool", int: "int", Dim: "int", float: "float", complex: "complex"}


def _convert_scalar(scalar: Any, dtype: np.dtype[Any]) -> Tensor:
    rank = ("bool", "int", "float", "complex")
    scalar_kind = _SCALAR_KINDS[type(scalar)]
    if rank.index(scalar_kind) > rank.index(kind(dtype)) or (
        not is_inexact(dtype) and scalar_kind != kind(dtype)
    ):
        raise DTypeError(
            f"Python scalar {scalar!r} does not fit {dtype}; convert the tensor with .astype first"
        )
    if not isinstance(scalar, Dim) and not _is_in_range(scalar, dtype):
        raise DTypeError(f"Python scalar {scalar!r} is outside the range of {dtype}")
    if scalar_kind == "int" and is_inexact(dtype) and not isinstance(scalar, Dim):
        scalar = float(scalar)  # a Python int may exceed every dtype of numpy
    return as_tensor(scalar, dtype)


def _is_in_range(scalar: Any, dtype: np.dtype[Any]) -> bool:
    """Return True if a dtype can represent a number, at least approximately.

    Floats represent infinities and NaN.
    """
    if kind(dtype) == "bool":
        return True
    low, high = limits(dtype)
    if is_inexact(dtype):
        return not any(high < abs(part) < np.inf for part in (scalar.real, scalar.imag))
    return bool(low <= scalar <= high)

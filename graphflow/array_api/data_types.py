"""Dtypes of the array API standard: their names, kinds, limits and promotion."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from graphflow.base.argument_checks import checks_argument_names, did_you_mean
from graphflow.base.array_conversion import array_of, is_foreign
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, DTypeError
from graphflow.ir.op import Tensor
from graphflow.ir.spec import as_dtype, complex_dtype, kind, promote, real_dtype

Dtype = np.dtype[Any]

bool = np.dtype("bool")
int8, int16, int32, int64 = (np.dtype(f"int{bits}") for bits in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64))
float32, float64 = np.dtype("float32"), np.dtype("float64")
complex64, complex128 = np.dtype("complex64"), np.dtype("complex128")

DTYPES = {
    found.name: found
    for found in (
        bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float32, float64,
        complex64, complex128,
    )
}  # fmt: skip
"""The dtypes of the standard by name; graphflow has float16 and bfloat16 beside them."""
_KINDS = {
    "bool": "b", "signed integer": "i", "unsigned integer": "u", "integral": "iu",
    "real floating": "fV", "complex floating": "c", "numeric": "iufVc",
}  # fmt: skip
"""Kinds of the standard, and numpy's letters of their dtypes; bfloat16 has the letter V."""
_SCALARS = ("bool", "int", "float", "complex")


@dataclass(frozen=True)
class FloatInfo:
    """Limits of a float dtype; those of its parts for a complex one."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: Dtype


def _dtype_of(given: Any) -> Dtype:
    """Return the dtype of a tensor or an array, or a dtype itself."""
    return given.dtype if isinstance(given, Tensor) else _dtype_of_value(given)


def _dtype_of_value(given: Any) -> Dtype:
    return as_dtype(array_of(given).dtype if is_foreign(given) else given)


@checks_argument_names(ArgumentError)
def finfo(type: Any, /) -> FloatInfo:
    """Return the limits of a float or complex dtype, or of the dtype of a tensor.

    Raises:
        DTypeError: the dtype is neither float nor complex.
    """
    dtype = _dtype_of(type)
    if kind(dtype) not in ("float", "complex"):
        raise DTypeError(f"finfo: {dtype} is neither float nor complex; use iinfo for ints")
    found = ml_dtypes.finfo(real_dtype(dtype))  # type: ignore[no-untyped-call]
    return FloatInfo(
        bits=int(found.bits),
        eps=float(found.eps),
        max=float(found.max),
        min=float(found.min),
        smallest_normal=float(found.smallest_normal),
        dtype=real_dtype(dtype),
    )


@checks_argument_names(ArgumentError)
def iinfo(type: Any, /) -> Any:
    """Return the limits of an int dtype, or of the dtype of a tensor, as `np.iinfo`.

    Raises:
        DTypeError: the dtype is no int.
    """
    dtype = _dtype_of(type)
    if kind(dtype) != "int":
        raise DTypeError(f"iinfo: {dtype} is no int; use finfo for floats")
    return np.iinfo(dtype)


@checks_argument_names(ArgumentError)
def isdtype(dtype: Any, kind: Any) -> Any:
    """Return True if a dtype is of a kind, such as "integral", or of one of several.

    Args:
        kind: a word of the standard, a dtype, or a tuple of these.

    Raises:
        ArgumentError: a word is no kind.
    """
    given = as_dtype(dtype)
    for each in kind if isinstance(kind, tuple) else (kind,):
        if not isinstance(each, str):
            found = given == as_dtype(each)
        elif each in _KINDS:
            found = given.kind in _KINDS[each]
        else:
            hint = did_you_mean(each, _KINDS) or f"use one of {', '.join(_KINDS)}"
            raise ArgumentError(f"isdtype: {each!r} is no kind of dtype; {hint}")
        if found:
            return True
    return False


@checks_argument_names(ArgumentError)
def can_cast(from_: Any, to: Any, /) -> Any:
    """Return True if promotion of the dtype of `from_` (or a tensor) with `to` gives `to`."""
    given, wanted = _dtype_of(from_), as_dtype(to)
    try:
        return promote(given, wanted) == wanted
    except DTypeError:
        return False


@checks_argument_names(ArgumentError)
def result_type(*arrays_and_dtypes: Any) -> Dtype:
    """Return the dtype that tensors, arrays, dtypes and Python numbers have together.

    Raises:
        ArgumentError: there are only Python numbers, or nothing.
        DTypeError: their kinds do not mix.
    """
    numbers = [type(x).__name__ for x in arrays_and_dtypes if type(x).__name__ in _SCALARS]
    others = [_dtype_of(x) for x in arrays_and_dtypes if type(x).__name__ not in _SCALARS]
    if not others:
        raise ArgumentError("result_type: give at least one tensor or dtype")
    result = others[0]
    for other in others[1:]:
        result = promote(result, other)
    for number in numbers:
        if number == "complex" and kind(result) == "float":
            result = complex_dtype(result)
        elif _SCALARS.index(number) > _SCALARS.index(kind(result)):
            raise DTypeError(f"result_type: a Python {number} does not fit {result}; use .astype")
    return result


__all__ = [
    "DTYPES", "FloatInfo", "bool", "can_cast", "complex64", "complex128", "finfo", "float32",
    "float64", "iinfo", "int8", "int16", "int32", "int64", "isdtype", "result_type", "uint8",
    "uint16", "uint32", "uint64",
]  # fmt: skip

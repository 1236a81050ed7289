"""The supported dtypes, their kinds, and their promotion."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes  # 6 ms; with it numpy knows "bfloat16" by name
import numpy as np

from graphflow.base.argument_checks import did_you_mean
from graphflow.errors import DTypeError

_SIGNED = ("int8", "int16", "int32", "int64")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *_SIGNED, *_UNSIGNED, *_FLOATS, *_COMPLEX)
BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the supported numpy dtype of a name, type or dtype, in native byte order.

    Raises:
        DTypeError: not one of `DTYPES`.
    """
    known = _NATIVE.get(dtype) if isinstance(dtype, str | np.dtype) else None
    if known is not None:
        return known
    try:
        result = np.dtype(dtype)
    except (TypeError, ValueError):
        result = None
    if result is not None and result.hasobject:
        raise DTypeError(
            "Python objects (None, sets, ints beyond 64 bits…) are not supported; use one of "
            f"{', '.join(DTYPES)}"
        )
    if result is None or dtype is None or result.name not in DTYPES:
        hint = did_you_mean(dtype, DTYPES) if isinstance(dtype, str) else ""
        if isinstance(dtype, int | np.integer):
            hint = "a shape is one argument, such as (4, 2), and before the dtype it is a tuple;"
        remedy = f"{hint} use" if hint else "use"
        raise DTypeError(f"dtype {dtype!r} is not supported; {remedy} one of {', '.join(DTYPES)}")
    native: np.dtype[Any] = result.newbyteorder("=")
    return native


_NATIVE: dict[str | np.dtype[Any], np.dtype[Any]] = {
    key: np.dtype(name) for name in DTYPES for key in (name, np.dtype(name))
}
"""Dtypes by name and by dtype: `dtype.name` of numpy takes microseconds."""


def kind(dtype: np.dtype[Any]) -> str:
    """Return the kind of a dtype: "bool", "int" (signed or not), "float" or "complex"."""
    return _KINDS[dtype.kind]


# bfloat16 is an extension type (ml_dtypes), so numpy gives it the kind of raw memory.
_KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float", "V": "float", "c": "complex"}


def is_inexact(dtype: np.dtype[Any]) -> bool:
    """Return True for float and complex dtypes, through which gradients flow."""
    return dtype.kind in "fcV"


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return True for 16-bit floats, which kernels store but do not compute in."""
    return dtype.itemsize == 2 and dtype.kind in "fV"


@cache
def limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the least and the largest finite number of a dtype (of its parts if complex)."""
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    high = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return -high, high


def real_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the parts of a complex dtype; other dtypes stay."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def complex_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the complex dtype whose parts can hold a float dtype; complex dtypes stay."""
    if dtype.kind == "c":
        return dtype
    return np.dtype("complex128" if dtype.itemsize == 8 else "complex64")


def promote(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """Return the result dtype of two dtypes, as the array API defines it.

    Only float and complex mix; other kinds are promoted among themselves. float16 with bfloat16
    gives float32, which can represent both.

    Raises:
        DTypeError: the kinds differ, or the pair is uint64 with a signed int.

    Source: Python array API standard 2024.12, "Type Promotion Rules".
    """
    if a == b:
        return a
    if is_inexact(a) and is_inexact(b):
        if "c" in (a.kind, b.kind):
            a, b = complex_dtype(a), complex_dtype(b)
        elif is_half(a) and is_half(b):
            return np.dtype("float32")
        return np.promote_types(a, b)
    mixed = "uint64" in (a.name, b.name) and "i" in (a.kind, b.kind)
    if kind(a) != kind(b) or mixed:
        raise DTypeError(f"dtypes {a} and {b} do not mix; convert one with .astype({a.name!r})")
    return np.promote_types(a, b)

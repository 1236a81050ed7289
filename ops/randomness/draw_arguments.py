"""Checks of what random tensors are drawn with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.base.argument_kinds import is_number
from graphflow.errors import ArgumentError, DTypeError
from graphflow.ir.spec import as_dtype, kind


def require_finite(what: str, value: Any) -> float:
    """Return a finite number as a float."""
    if not is_number(value) or not math.isfinite(value):
        raise ArgumentError(f"{what} must be a finite number, got {value!r}")
    return float(value)


def require_scale(what: str, value: Any) -> float:
    """Return a finite number that is not negative."""
    number = require_finite(what, value)
    if number < 0:
        raise ArgumentError(f"{what} must not be negative, got {number}")
    return number


def require_bound(what: str, value: Any) -> float:
    """Return a number that may be infinite."""
    if is_number(value) and math.isinf(value):
        return float(value)
    return require_finite(what, value)


def float_dtype(dtype: Any) -> str:
    """Return the name of a float dtype; refuse others."""
    result = as_dtype(dtype)
    if kind(result) != "float":
        raise DTypeError(
            f"random floats must be bfloat16, float16, float32 or float64, got {result}"
        )
    return result.name


def bounds_in(low: float, high: float, dtype: str) -> tuple[float, float]:
    """Return the least and the largest value of a dtype in [low, high]."""
    of = as_dtype(dtype).type
    with np.errstate(over="ignore"):
        least, most = of(low), of(high)
    if float(least) < low:
        least = np.nextafter(least, of(math.inf))
    if float(most) > high:
        most = np.nextafter(most, of(-math.inf))
    if not least <= most:
        raise ArgumentError(f"no {dtype} is between {low} and {high}; give a wider dtype")
    return float(least), float(most)


__all__ = ["bounds_in", "float_dtype", "require_bound", "require_finite", "require_scale"]

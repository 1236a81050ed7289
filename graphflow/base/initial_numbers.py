"""Numbers that initial values need, computed alike by every process.

Sums are in a fixed order and use no BLAS, whose last bits depend on threads and processors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

NEAR_ERFINV = (
    3.1905586173417536e-21, -1.062661045960373e-21, -3.4715307676023003e-19,
    1.1472892499658116e-18, 1.5506009496679205e-17, -1.301058090875769e-16,
    -3.933508641199522e-17, 6.5955746141136816e-15, -4.0020617748552674e-14,
    -8.117720363510667e-14, 2.6305301926231066e-12, -1.2976921089952883e-11,
    -5.4143045472080583e-11, 1.0512182736096884e-09, -4.1126604066482585e-09,
    -2.9070382513851824e-08, 4.2347881677716927e-07, -1.365469184753234e-06,
    -1.3882523393920442e-05, 0.00018673420802445552, -0.0007407025341546572,
    -0.006033670871427803, 0.24015818242558834, 1.6536545626831027,
)  # fmt: skip
"""erf⁻¹(x) / x as a polynomial of w - 3.125, w = -log(1 - x²) < 6.25; highest power first."""
_WITHIN_TWO = math.erf(math.sqrt(2.0))
"""The probability that a normal number is within 2 standard deviations; w is 2.4 there."""
_CHUNK = 1 << 15  # numbers of a chunk of rows, which fits a core's cache


def truncated_normal(uniform: Array) -> Array:
    """Return standard normal numbers within [-2, 2], one for each number uniform on [0, 1)."""
    x = (2 * uniform - 1) * uniform.dtype.type(_WITHIN_TWO)
    shift = -np.log((1 - x) * (1 + x)) - uniform.dtype.type(3.125)
    found = np.full_like(x, NEAR_ERFINV[0])
    for coefficient in NEAR_ERFINV[1:]:
        found *= shift
        found += uniform.dtype.type(coefficient)
    found *= x * uniform.dtype.type(math.sqrt(2.0))
    within: Array = np.clip(found, -2, 2)
    return within


def orthonormalize_rows(rows: Array) -> None:
    """Make rows orthonormal in place by Gram and Schmidt's process, modified.

    Rows of normal numbers become rows of a uniformly distributed orthogonal matrix.

    Args:
        rows: float64 (count, size), count at most size; linearly independent.
    """
    count, size = rows.shape
    step = max(1, _CHUNK // max(1, size))
    for i, row in enumerate(rows):
        row /= np.sqrt((row * row).sum())
        for first in range(i + 1, count, step):
            rest = rows[first : first + step]
            rest -= (rest * row).sum(1, keepdims=True) * row


__all__ = ["NEAR_ERFINV", "orthonormalize_rows", "truncated_normal"]

"""Vectors whose sign (phase) is a library's choice, in one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.ir.op import Op

# Of which results the columns are such vectors, and of which the rows.
_COLUMNS, _ROWS = {"eigh": (1,), "svd": (0,)}, {"svd": (2,)}


def fix_signs(op: Op, results: Sequence[Any]) -> list[Any]:
    """Results of an op on the host, with the largest entry of each such vector positive."""
    fixed = list(results)
    for i in _COLUMNS.get(op.name, ()):
        fixed[i] = _turn_to_positive(fixed[i], -2)
    for i in _ROWS.get(op.name, ()):
        fixed[i] = _turn_to_positive(fixed[i], -1)
    return fixed


def _turn_to_positive(vectors: np.ndarray[Any, Any], axis: int) -> np.ndarray[Any, Any]:
    largest = np.abs(vectors).argmax(axis, keepdims=True)
    pivot = np.take_along_axis(vectors, largest, axis)
    turned: np.ndarray[Any, Any] = (vectors * (np.abs(pivot) / pivot)).astype(vectors.dtype)
    return turned

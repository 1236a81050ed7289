"""Shapes and checks that the ops on parts of a table share.

A part of a matrix has a row for each coordinate. It is one dense array, or the values, columns and
row offsets of a matrix in CSR form.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import DTypeError, ShapeError
from graphflow.ir.spec import TensorSpec, equate, floordiv

F64, I64 = np.dtype("float64"), np.dtype("int64")


def check_part(own: TensorSpec, width: Any, matrix: tuple[TensorSpec, ...]) -> None:
    """Check the specs of a part: a row for each element of `own`, and `width` columns.

    Raises:
        ShapeError, DTypeError: they do not fit.
    """
    if len(matrix) not in (1, 3):
        raise ShapeError(f"a part is one array, or three of a CSR matrix, not {len(matrix)}")
    values = matrix[0]
    if values.dtype.name not in ("float32", "float64"):
        raise DTypeError(f"the matrix is of float32 or float64, not {values.dtype}")
    if len(matrix) == 1:
        if values.rank != 2:
            raise ShapeError(f"a dense part is a matrix, not {values}")
        equate(values.shape[0], own.shape[0], f"{values} with a row for each of {own}")
        equate(values.shape[1], width, f"{values} with {width} columns")
        return
    _, places, offsets = matrix
    for each in (places, offsets):
        if each.dtype.name not in ("int32", "int64"):
            raise DTypeError(f"columns and row offsets are of int32 or int64, not {each.dtype}")
    if any(each.rank != 1 for each in matrix):
        raise ShapeError("values, columns and row offsets have one axis each")
    equate(values.shape[0], places.shape[0], f"values {values} and columns {places}")
    equate(offsets.shape[0], own.shape[0] + 1, f"row offsets {offsets}: one more than {own}")


def check_vectors(**vectors: TensorSpec) -> None:
    """Check that specs are vectors of float64.

    Raises:
        DTypeError: one is not.
    """
    for name, given in vectors.items():
        if given.dtype != F64 or given.rank != 1:
            raise DTypeError(f"{name} must be a vector of float64, not {given}")


def count_entries(rows: Any, matrix: tuple[TensorSpec, ...]) -> Any:
    """Return the entries of some rows of a part, about."""
    if len(matrix) == 1:
        return rows * matrix[0].shape[1]
    return rows * (floordiv(matrix[0].shape[0], matrix[2].shape[0]) + 1)


__all__ = ["F64", "I64", "check_part", "check_vectors", "count_entries"]

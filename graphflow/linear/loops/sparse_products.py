"""Products of a sparse matrix and a vector, of some rows: what threads share."""

from __future__ import annotations

from typing import Any

from graphflow.linear.loops.dot_products import sparse_add, sparse_dot


def multiply_rows(
    first: int, last: int, values: Any, places: Any, offsets: Any, w: Any, out: Any
) -> None:
    """Write the product of each row from `first` to `last` with `w` to `out`."""
    for i in range(first, last):
        out[i] = sparse_dot(values, places, int(offsets[i]), int(offsets[i + 1]), w)


def add_rows(
    first: int, last: int, values: Any, places: Any, offsets: Any, factors: Any, out: Any
) -> None:
    """Add `factors[i]` times each row from `first` to `last` to `out`."""
    for i in range(first, last):
        sparse_add(values, places, int(offsets[i]), int(offsets[i + 1]), factors[i], out)

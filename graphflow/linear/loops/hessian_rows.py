"""Products of a sparse table, its transpose and weights of its rows, in one pass over the rows."""

from __future__ import annotations

from typing import Any

from graphflow.linear.loops.dot_products import sparse_add, sparse_dot


def sparse_products(
    n: int, values: Any, places: Any, offsets: Any, h: Any, p: Any, beside: float, image: Any
) -> None:
    """Add Xᵀ H (X p - beside) to `image`.

    Args:
        n: the number of rows.
        values, places, offsets: X in CSR form.
        h: (n,) weights of the rows.
        p: (columns,) the vector.
        beside: what is taken from each row's product.
        image: (columns,) follows.
    """
    for i in range(n):
        first, stop = int(offsets[i]), int(offsets[i + 1])
        along = h[i] * (sparse_dot(values, places, first, stop, p) - beside)
        sparse_add(values, places, first, stop, along, image)


def column_squares(n: int, values: Any, places: Any, squares: Any) -> None:
    """Add the squares of n entries to those of their columns."""
    for k in range(n):
        squares[places[k]] += float(values[k]) * float(values[k])

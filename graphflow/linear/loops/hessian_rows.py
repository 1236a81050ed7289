"""Products of a table, its transpose and weights of its rows, in one pass over the rows."""

from __future__ import annotations

from math import exp
from typing import Any

from graphflow.linear.loops.dot_products import dense_add, sparse_add, sparse_dot, streamed_dot


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


def dense_products(n: int, d: int, x: Any, h: Any, p: Any, beside: float, image: Any) -> None:
    """Add Xᵀ H (X p - beside) to `image`; otherwise as `sparse_products`.

    Args:
        d: the number of columns.
        x: (n * d,) X, row by row.
    """
    for i in range(n):
        along = h[i] * (streamed_dot(x, i * d, p, d) - beside)
        dense_add(x, i * d, along, image, d)


def dense_slopes(
    n: int, d: int, x: Any, y: Any, c: Any, is_squared: bool, p: Any, f: Any, beta: Any, image: Any
) -> None:
    """Move predictions by X p; write the negative slopes of the losses there, and add Xᵀβ.

    Args:
        x: (n * d,) X, row by row.
        y, c: (n,) targets, and weights of the rows' losses.
        is_squared: True for the squared loss, False for the logistic loss.
        p: (d,) the step.
        f: (n,) predictions; follow.
        beta: (n,) receives the slopes, times -c.
        image: (d,) follows.
    """
    for i in range(n):
        f[i] += streamed_dot(x, i * d, p, d)
        if is_squared:
            beta[i] = c[i] * (y[i] - f[i])
        else:
            beta[i] = c[i] * y[i] / (1.0 + exp(y[i] * f[i]))
        dense_add(x, i * d, beta[i], image, d)


def column_squares(n: int, values: Any, places: Any, squares: Any) -> None:
    """Add the squares of n entries to those of their columns."""
    for k in range(n):
        squares[places[k]] += float(values[k]) * float(values[k])


def row_squares(n: int, d: int, x: Any, squares: Any) -> None:
    """Add the squares of n rows `x[i * d : i * d + d]` to those of their columns."""
    for i in range(n):
        for j in range(d):
            squares[j] += float(x[i * d + j]) * float(x[i * d + j])

"""Passes of threads that share the weights of a linear SVM: the variants of the literature.

Written as the loops of `graphflow/linear/loops`, and compiled by the same compiler. "wild" is the
loop of one thread itself (`row_passes.sparse_rows`).
"""

from __future__ import annotations

from typing import Any

from graphflow.linear.loops.dot_products import sparse_dot
from graphflow.linear.loops.dual_steps import best_dual
from graphflow.ops.kernels.compiled_loops.atomics import atomic_add


def atomic_rows(
    order: Any, values: Any, places: Any, offsets: Any, squares: Any, y: Any, c: Any, loss: int,
    inverse: float, beta: Any, w: Any,
) -> None:  # fmt: skip
    """Add each step to the weights by atomic operations: no write is lost (PASSCoDe-Atomic)."""
    for k in range(len(order)):
        i = order[k]
        first, stop = int(offsets[i]), int(offsets[i + 1])
        u = sparse_dot(values, places, first, stop, w)
        new = best_dual(loss, beta[i], u, squares[i] * inverse, y[i], c[i], 0.0)
        step = (new - beta[i]) * inverse
        beta[i] = new
        if step != 0.0:
            for p in range(first, stop):
                atomic_add(w, int(places[p]), step * float(values[p]))


def locked_rows(
    order: Any, values: Any, places: Any, offsets: Any, squares: Any, y: Any, c: Any, loss: int,
    inverse: float, beta: Any, w: Any, locks: Any,
) -> None:  # fmt: skip
    """Lock all weights of a row, in order of columns, before a step (PASSCoDe-Lock)."""
    for k in range(len(order)):
        i = order[k]
        first, stop = int(offsets[i]), int(offsets[i + 1])
        for p in range(first, stop):
            while atomic_add(locks, int(places[p]), 1) != 0:
                atomic_add(locks, int(places[p]), -1)
        u = sparse_dot(values, places, first, stop, w)
        new = best_dual(loss, beta[i], u, squares[i] * inverse, y[i], c[i], 0.0)
        step = (new - beta[i]) * inverse
        beta[i] = new
        for p in range(first, stop):
            w[places[p]] += step * float(values[p])
            atomic_add(locks, int(places[p]), -1)


def recomputing_rows(
    order: Any, values: Any, places: Any, offsets: Any, squares: Any, y: Any, c: Any, loss: int,
    inverse: float, beta: Any, row: Any,
) -> None:  # fmt: skip
    """Compute a row's prediction from all dual variables, and go half of the way (AsySCD).

    Args:
        row: (columns,) zeros, of this thread.
    """
    for k in range(len(order)):
        i = order[k]
        for p in range(int(offsets[i]), int(offsets[i + 1])):
            row[places[p]] = float(values[p])
        u = 0.0
        for j in range(len(beta)):
            if beta[j] != 0.0:
                u += beta[j] * sparse_dot(values, places, int(offsets[j]), int(offsets[j + 1]), row)
        for p in range(int(offsets[i]), int(offsets[i + 1])):
            row[places[p]] = 0.0
        new = best_dual(loss, beta[i], u * inverse, squares[i] * inverse, y[i], c[i], 0.0)
        beta[i] += 0.5 * (new - beta[i])

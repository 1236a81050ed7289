"""The kernels of the ops on parts, which load when the first of them runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, LinearModelError
from graphflow.linear import losses
from graphflow.linear.loops import column_passes, coordinate_orders, row_passes
from graphflow.linear.losses import Floats, Loss
from graphflow.linear.problem import multiply
from graphflow.linear.tables.svmlight import byte_range, read_blocks
from graphflow.linear.tables.svmlight_loops import MOST_COLUMNS
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

_LOSSES: tuple[Callable[[float], Loss], ...] = (
    lambda _: losses.squared, lambda _: losses.logistic, lambda _: losses.hinge,
    lambda _: losses.squared_hinge, losses.huber, losses.epsilon_insensitive,
    losses.squared_epsilon_insensitive,
)  # fmt: skip
"""Losses by their codes."""


def _matrix(rows: int, width: int, matrix: tuple[Any, ...]) -> Any:
    """Return a part as a matrix that multiplies vectors."""
    if len(matrix) == 1:
        return matrix[0]
    from scipy.sparse import csr_matrix

    _require_inside(np.arange(rows), rows, width, matrix)
    return csr_matrix(matrix, shape=(rows, width), copy=False)


def order_coordinates(position: Any, steps: Any, count: int, seed: int) -> tuple[Any, Any]:
    """Compute `coordinate_order`."""
    order = np.zeros(steps.shape[0], np.int64)
    if count < 1 and len(order):
        raise ArgumentError("there are no coordinates to visit")
    if int(position) < 0:
        raise ArgumentError(f"the position is a number of steps, not {int(position)}")
    native(coordinate_orders, "write_order")(order, int(position), max(count, 1), seed)
    return order, np.asarray(position + len(order))


def pass_coordinates(
    own: Any, shared: Any, order: Any, target: Any, weight: Any, square: Any,
    *matrix: Any, axis: str, loss: int, parameter: float, l1: float, l2: float, sigma: float,
    bias: float, is_positive: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Compute `coordinate_pass`."""
    own, shared = np.array(own), np.array(shared)
    width = len(shared) - (axis == "rows")
    _require_inside(order, len(own), width, matrix)
    form = "dense" if len(matrix) == 1 else "sparse"
    arrays = (matrix[0].reshape(-1),) if form == "dense" else matrix
    if axis == "rows":
        native(row_passes, f"{form}_rows")(
            order, *arrays, width, square, target, weight, loss, parameter, sigma / l2, bias,
            own, shared,
        )  # fmt: skip
        return own, shared
    # Curvatures are σ' times as large: weights grow by σ', and the residual is kept divided by it.
    shared /= sigma
    scaled = (square * sigma, target, weight * sigma, shared)
    ends = (own, l1, l2, is_positive)
    if form == "dense":
        native(column_passes, "dense_columns")(order, *arrays, width, *scaled, *ends)
    else:
        shift = np.zeros(1)
        native(column_passes, "sparse_columns")(order, *arrays, *scaled, shift, *ends)
        shared += shift
    return own, shared * sigma


def multiply_part(own: Any, *matrix: Any, width: int, axis: str, bias: float) -> Any:
    """Compute `part_product`."""
    found = multiply(_matrix(len(own), width, matrix).T, own)
    return np.append(found, bias * own.sum()) if axis == "rows" else found


def square_part(*matrix: Any) -> Any:
    """Compute `part_squares`."""
    if len(matrix) == 1:
        return np.einsum("ij,ij->i", *matrix, *matrix, dtype=np.float64)
    values, _, offsets = matrix
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return np.bincount(rows, values[: len(rows)] ** 2.0, minlength=len(offsets) - 1)


def add_certificate(
    own: Any, shared: Any, target: Any, weight: Any, *matrix: Any, axis: str, loss: int,
    parameter: float, l1: float, bias: float, is_positive: bool,
) -> Any:  # fmt: skip
    """Compute `part_sums`."""
    x = _matrix(len(own), len(shared) - (axis == "rows"), matrix)
    if axis == "rows":
        kind = _LOSSES[loss](parameter)
        f = multiply(x, shared[:-1]) + bias * shared[-1]
        found = weight @ kind.values(f, target), kind.conjugates(own, target, weight).sum()
        return np.array(found)
    beta = weight * shared
    own_sums = _column_sums(own, multiply(x, beta), l1, is_positive)
    losses_and_dual = 0.5 * float(beta @ shared), float(beta @ shared), float(beta @ target)
    return np.array((*own_sums, *losses_and_dual))


def _column_sums(w: Floats, v: Floats, l1: float, is_positive: bool) -> tuple[float, ...]:
    sizes = v if is_positive else np.abs(v)
    beyond = np.maximum(sizes - l1, 0.0)
    return (
        float(np.abs(w).sum()),
        float(w @ w),
        float(sizes.max(initial=0.0)),
        float(beyond @ beyond),
    )


def _require_inside(order: Any, count: int, width: int, matrix: tuple[Any, ...]) -> None:
    """Refuse steps that would read or write outside of arrays.

    Raises:
        IndexError: a step visits no row, or a row with an entry in no column.
    """
    if len(matrix) == 1:
        if len(order) and not 0 <= order.min() <= order.max() < count:
            raise IndexError(f"the order goes from {order.min()} to {order.max()}, of {count} rows")
        return
    wrong = native(coordinate_orders, "find_wrong_row")(order, count, *matrix[1:], width)
    if wrong >= 0:
        raise IndexError(
            f"step {wrong} visits row {order[wrong]} of {count}: there is no such row, or it has "
            f"entries outside of {width} columns"
        )


def measure_file(path: str, part: int, parts: int) -> Any:
    """Compute `svmlight_sizes`."""
    rows, entries, lowest, highest = 0, 0, MOST_COLUMNS, -1
    for block in read_blocks(path, *byte_range(path, part, parts)):
        rows, entries = rows + len(block.targets), entries + len(block.values)
        lowest, highest = min(lowest, block.lowest), max(highest, block.highest)
    return np.array([rows, entries, lowest, highest])


def read_file(
    path: str, part: int, parts: int, rows: int, entries: int, first: int
) -> tuple[Any, ...]:
    """Compute `svmlight_rows`.

    Raises:
        LinearModelError: the file has other sizes now.
    """
    targets, values = np.empty(rows), np.empty(entries)
    places, offsets = np.empty(entries, np.int32), np.zeros(rows + 1, np.int64)
    row = entry = 0
    for block in read_blocks(path, *byte_range(path, part, parts)):
        after, end = row + len(block.targets), entry + len(block.values)
        if after > rows or end > entries:
            row = after
            break
        targets[row:after], values[entry:end] = block.targets, block.values
        places[entry:end] = block.columns - np.int32(first)
        offsets[row + 1 : after + 1] = block.offsets[1:] + entry
        row, entry = after, end
    if row != rows or entry != entries:
        raise LinearModelError(
            f"{path} has changed since it was opened: part {part} of {parts} had {rows:,} rows; "
            "fit again"
        )
    return targets, values, places, offsets


__all__ = [
    "add_certificate", "measure_file", "multiply_part", "order_coordinates", "pass_coordinates",
    "read_file", "square_part",
]  # fmt: skip

"""The ops of a round: an order of coordinates, and steps along them on a part of the table.

Coordinates are rows of the table, with dual variables, or columns, with coefficients. A part has a
row of its matrix for each coordinate, and `shared` stands for all parts:

| axis | own | shared | row of a part |
|---|---|---|---|
| "rows" | dual variables β | w = Xᵀβ / l2, then the coefficient of the bias's column | a row of X |
| "columns" | coefficients | the residual y - Xw - b | a column of X |
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import DTypeError, ShapeError
from graphflow.ir.op import Cost, Op, register, sample
from graphflow.ir.spec import TensorSpec, equate, spec
from graphflow.linear.cocoa.part_rules import (
    I64,
    check_part,
    check_vectors,
    count_entries,
)
from graphflow.linear.losses import LOGISTIC


def _infer_order(position: TensorSpec, steps: TensorSpec, **_: Any) -> tuple[TensorSpec, ...]:
    if position.rank or position.dtype != I64 or steps.rank != 2:
        raise ShapeError(
            f"position is an int64 scalar, and steps has two axes; not {position} and {steps}"
        )
    return TensorSpec((steps.shape[0],), I64), position


def _order_kernel(xp: Any, *arrays: Any, **attrs: Any) -> Any:
    from graphflow.linear.cocoa import part_kernels

    return part_kernels.order_coordinates(*arrays, **attrs)


def _order_cost(position: TensorSpec, steps: TensorSpec, count: int, **_: Any) -> Cost:
    """Count the places of a permutation of a power of two, of which some are no coordinate."""
    places = 1 << max(count - 1, 0).bit_length()
    return Cost(flops=steps.shape[0] * (40 * places // max(count, 1)))


# The coordinates of as many steps as `steps` (n, 0) is long, and the position after them. They go
# through one permutation of `count` coordinates after the other.
coordinate_order: Op = register(
    Op(
        "coordinate_order",
        infer=_infer_order,
        kernel=_order_kernel,
        cost=_order_cost,
        samples=(
            sample(spec("int64", ()), spec("float32", (5, 0)), count=3, seed=1),
            sample(spec("int64", ()), spec("float32", (4, 2)), count=1, seed=0),
        ),
        device_kinds=("cpu",),
    )
)


def _infer_pass(
    own: TensorSpec, shared: TensorSpec, order: TensorSpec, target: TensorSpec, weight: TensorSpec,
    square: TensorSpec, *matrix: TensorSpec, axis: str, **_: Any,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    check_vectors(own=own, shared=shared, target=target, weight=weight, square=square)
    if order.dtype != I64 or order.rank != 1:
        raise DTypeError(f"order must be a vector of int64, not {order}")
    for each in (target, square):
        equate(each.shape[0], own.shape[0], f"{each} with an element for each of {own}")
    rows = own if axis == "rows" else shared
    equate(weight.shape[0], rows.shape[0], f"weights {weight} with an element for each row")
    check_part(own, shared.shape[0] - 1 if axis == "rows" else shared.shape[0], matrix)
    return own, shared


def _pass_kernel(xp: Any, *arrays: Any, **attrs: Any) -> Any:
    from graphflow.linear.cocoa import part_kernels

    return part_kernels.pass_coordinates(*arrays, **attrs)


def _pass_cost(
    own: TensorSpec, shared: TensorSpec, order: TensorSpec, target: TensorSpec, weight: TensorSpec,
    square: TensorSpec, *matrix: TensorSpec, loss: int, **_: Any,
) -> Cost:  # fmt: skip
    # Operations stand for what was measured beside a dense entry's 0.5 ns: a sparse entry takes
    # four times as long, a step 15 ns (a logistic one 150 more), and both vectors are copied.
    steps = order.shape[0]
    entries = count_entries(steps, matrix)
    each = matrix[0].dtype.itemsize + (matrix[1].dtype.itemsize if len(matrix) == 3 else 0)
    return Cost(
        flops=(3 if len(matrix) == 1 else 13) * entries
        + steps * (1050 if loss == LOGISTIC else 100)
        + 25 * own.shape[0]
        + 10 * shared.shape[0],
        bytes=entries * each + steps * 48 + 2 * own.nbytes + 4 * shared.nbytes,
    )


def _make_weights_positive(arrays: list[Any]) -> list[Any]:
    """Make weights and squared norms positive."""
    for i in (4, 5):
        arrays[i] = abs(arrays[i]) + 0.1
    return arrays


def _make_sparse(arrays: list[Any]) -> list[Any]:
    """Make the last array row offsets of three rows, and weights positive."""
    arrays[-1] = np.array([0, 2, 2, 4], arrays[-1].dtype)
    return _make_weights_positive(arrays)


def _samples() -> tuple[Any, ...]:
    attrs: dict[str, Any] = {
        "loss": 0, "parameter": 0.0, "l1": 0.1, "l2": 1.0, "sigma": 2.0, "bias": 0.5,
        "is_positive": False,
    }  # fmt: skip
    v, more, order = spec("float64", (3,)), spec("float64", (4,)), spec("int64", (5,))
    csr = (more, spec("int32", (4,)), spec("int32", (4,)))
    dense, sparse = _make_weights_positive, _make_sparse
    rows, columns = {**attrs, "axis": "rows"}, {**attrs, "axis": "columns"}
    return (
        sample(v, v, order, v, v, v, spec("float64", (3, 3)), make=dense, **columns),
        sample(v, more, order, v, v, v, spec("float32", (3, 3)), make=dense, **rows),
        sample(v, more, order, v, more, v, *csr, make=sparse, **columns),
        sample(v, more, order, v, v, v, *csr, make=sparse, **rows),
    )


# Steps along the coordinates of `order`: each sets its element of `own` to the best value, and
# moves `shared` by σ' times the change that follows. The results are both.
#   target: y of each row; or the mean of each column, 0 without an intercept.
#   weight: the weight of each row of the table.
#   square: of each coordinate, the squared norm with the bias; or the curvature without l2.
# Source: Ma et al., ICML 2015 (CoCoA+); Smith et al., JMLR 18, 2018.
coordinate_pass: Op = register(
    Op(
        "coordinate_pass",
        infer=_infer_pass,
        kernel=_pass_kernel,
        cost=_pass_cost,
        samples=_samples(),
        device_kinds=("cpu",),
    )
)


__all__ = ["coordinate_order", "coordinate_pass"]

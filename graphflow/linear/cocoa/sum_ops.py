"""Sums over a part of the table, in float64: what parts add to `shared`, and to a certificate."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.ir.op import Cost, Op, register, sample
from graphflow.ir.spec import TensorSpec, equate, require_nonnegative, spec
from graphflow.linear.cocoa.part_rules import (
    F64,
    check_part,
    check_vectors,
    count_entries,
)

ROW_SUMS, COLUMN_SUMS = 2, 7
"""The numbers that a part adds to a certificate; see `part_sums`."""

# What a part adds -------------------------------------------------------------------------------


def _infer_product(own: TensorSpec, *matrix: TensorSpec, width: int, axis: str, **_: Any) -> Any:
    check_vectors(own=own)
    check_part(own, width, matrix)
    return TensorSpec((width + (axis == "rows"),), F64)


def _product_kernel(xp: Any, *arrays: Any, **attrs: Any) -> Any:
    from graphflow.linear.cocoa import part_kernels

    return part_kernels.multiply_part(*arrays, **attrs)


def _make_offsets(arrays: list[Any]) -> list[Any]:
    """Make the last array row offsets of three rows."""
    arrays[-1] = np.array([0, 2, 2, 4], arrays[-1].dtype)
    return arrays


_V, _MORE = spec("float64", (3,)), spec("float64", (4,))
_CSR = (_MORE, spec("int32", (4,)), spec("int32", (4,)))

# The rows of a part, each times its element of `own`, added up; along "rows" with bias times the
# sum of `own` as last element.
part_product: Op = register(
    Op(
        "part_product",
        infer=_infer_product,
        kernel=_product_kernel,
        cost=lambda own, *matrix, **_: Cost(flops=2 * count_entries(own.shape[0], matrix)),
        samples=(
            sample(_V, spec("float64", (3, 3)), width=3, axis="columns", bias=0.0),
            sample(_V, spec("float32", (3, 2)), width=2, axis="rows", bias=0.5),
            sample(_V, *_CSR, width=3, axis="rows", bias=0.0, make=_make_offsets),
        ),
        device_kinds=("cpu",),
    )
)


def _infer_squares(*matrix: TensorSpec) -> TensorSpec:
    rows = matrix[0].shape[0] if len(matrix) == 1 else matrix[-1].shape[0] - 1
    require_nonnegative(rows, "row offsets need at least one element")
    found = TensorSpec((rows,), F64)
    check_part(found, matrix[0].shape[-1] if len(matrix) == 1 else None, matrix)
    return found


def _squares_kernel(xp: Any, *matrix: Any) -> Any:
    from graphflow.linear.cocoa import part_kernels

    return part_kernels.square_part(*matrix)


# The squared norm of each row of a part.
part_squares: Op = register(
    Op(
        "part_squares",
        infer=_infer_squares,
        kernel=_squares_kernel,
        cost=lambda *matrix: Cost(flops=2 * matrix[0].size),
        samples=(
            sample(spec("float64", (3, 3))),
            sample(spec("float32", (2, 3))),
            sample(*_CSR, make=_make_offsets),
        ),
        device_kinds=("cpu",),
    )
)

# Certificates -----------------------------------------------------------------------------------


def _infer_sums(
    own: TensorSpec, shared: TensorSpec, target: TensorSpec, weight: TensorSpec,
    *matrix: TensorSpec, axis: str, **_: Any,
) -> TensorSpec:  # fmt: skip
    check_vectors(own=own, shared=shared, target=target, weight=weight)
    rows = own if axis == "rows" else shared
    for each in (target, weight):
        equate(each.shape[0], rows.shape[0], f"{each} with an element for each row")
    check_part(own, shared.shape[0] - 1 if axis == "rows" else shared.shape[0], matrix)
    return TensorSpec((ROW_SUMS if axis == "rows" else COLUMN_SUMS,), F64)


def _sums_kernel(xp: Any, *arrays: Any, **attrs: Any) -> Any:
    from graphflow.linear.cocoa import part_kernels

    return part_kernels.add_certificate(*arrays, **attrs)


def _sums_samples() -> tuple[Any, ...]:
    attrs: dict[str, Any] = {"parameter": 0.0, "l1": 0.1, "bias": 0.5, "is_positive": False}
    return (
        sample(_V, _V, _V, _V, spec("float64", (3, 3)), axis="columns", loss=0, **attrs),
        sample(_V, _MORE, _V, _V, spec("float32", (3, 3)), axis="rows", loss=0, low=0.1, **attrs),
        sample(
            _V, _MORE, _V, _V, *_CSR, axis="rows", loss=6, low=0.1, make=_make_offsets, **attrs
        ),
    )  # fmt: skip


# What a part adds to a certificate.
#   rows: the losses of its rows; their conjugates.
#   columns: |w|₁; |w|²; the greatest size of v = Xᵀβ, where β is weight · residual; |soft(v, l1)|².
#       Then of all rows, the same from each part: the losses; Σ β²/c; Σ β y.
part_sums: Op = register(
    Op(
        "part_sums",
        infer=_infer_sums,
        kernel=_sums_kernel,
        cost=lambda own, *others, **_: Cost(
            flops=2 * count_entries(own.shape[0], others[3:]) + 20 * own.shape[0]
        ),
        samples=_sums_samples(),
        device_kinds=("cpu",),
    )
)

__all__ = ["COLUMN_SUMS", "ROW_SUMS", "part_product", "part_squares", "part_sums"]

"""Rows of a piece of a table that a window of turns uses: which they are, and those of each turn.

`graphflow/parallel/served_tables` writes this op into the loops of parameter servers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ShapeError
from graphflow.ir.op import Cost, Op, register, sample
from graphflow.ir.spec import Size, TensorSpec, as_dtype, minimum, spec
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.kernels.sparse.distinct_numbers import find_distinct
from graphflow.ops.kernels.sparse.scatter_rows import normalize_indices
from graphflow.ops.tensors.table_rows import fill_front, into_kernel, key_dtype

I64 = "int64"


def _infer_window(
    ids: TensorSpec,
    *first: TensorSpec,
    start: int,
    stop: int,
    rows: int,
    most: Size,
    width: int = 0,
) -> tuple[TensorSpec, ...]:
    require_kind(ids, "int")
    turns, lookups = ids.shape
    dtype = as_dtype(key_dtype(stop - start))
    size = minimum(lookups, stop - start)
    return TensorSpec((most,), dtype), spec(I64), TensorSpec((turns, size), dtype)


def _window_into(
    xp: Any, outs: Any, ids: Any, *first: Any, start: int, stop: int, rows: int, most: int,
    width: int = 0,
) -> None:  # fmt: skip
    keys, number, turns = outs
    parts = []
    for own in ids:
        places = normalize_indices(xp, own, rows, 0)
        if first:
            places = first[0][places // width] + places % width
        own_places = places[(places >= start) & (places < stop)] - start
        parts.append(find_distinct(xp, own_places, stop - start)[0])
    joined = xp.concatenate(parts) if parts else xp.zeros(0, np.int64)
    every = find_distinct(xp, joined, stop - start)[0]
    if every.shape[0] > keys.shape[0]:
        raise ShapeError(f"{every.shape[0]} distinct rows, there is room for {keys.shape[0]}")
    number[...] = every.shape[0]
    fill_front(keys, every + 1)
    for out, own in zip(turns, parts, strict=True):
        fill_front(out, xp.searchsorted(every, own) + 1)


# For the owner of rows start to stop of a table of `rows`, given the ids of each turn, (turns, k):
# the keys of all its rows that turns look up, padded to `most`; their number; and for each turn,
# the keys of its rows among these, padded. Rows are positions, if the table is stored in ranges of
# `width` rows whose first positions are a second input.
window_rows = register(
    Op(
        "window_rows",
        infer=_infer_window,
        kernel=into_kernel(_infer_window, _window_into),
        into=_window_into,
        cost=lambda ids, *first, **attrs: Cost(flops=ids.size * 16, bytes=ids.size * 64),
        samples=(
            sample(spec(I64, (2, 3)), start=1, stop=4, rows=4, most=3),
            sample(
                spec("int32", (2, 2)), spec(I64, (2,)), start=0, stop=2, rows=4, most=2, width=2,
                make=lambda xs: [xs[0], np.array([2, 0])],
            ),
        ),
    )
)  # fmt: skip


__all__ = ["window_rows"]

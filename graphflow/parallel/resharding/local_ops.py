"""Nodes that a place builds from shards that it has: slices, concatenations and combinations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from graphflow.errors import ShardingError
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor
from graphflow.ir.spec import Outer

_COMBINING_OPS: dict[str, str] = {
    "max": "maximum", "min": "minimum", "prod": "multiply", "any": "logical_or",
    "all": "logical_and",
}  # fmt: skip


def combine_all(kind: str, parts: Sequence[Tensor]) -> Tensor:
    """Combine partial results by their kind ("sum", "mean", "max", "moments", …)."""
    if kind == "mean":
        mean: Tensor = combine_all("sum", parts) / len(parts)
        return mean
    if kind == "moments":
        return _combine_moments(parts) if len(parts) > 1 else parts[0]
    return reduce(lambda a, b: combine(kind, a, b), parts)


def _combine_moments(parts: Sequence[Tensor]) -> Tensor:
    """Combine the moments of parts of a set into those of the whole set, without large
    cancellation.

    The rows of each part are its share of all values, its mean and its variance (see
    `ops/reductions/sharded_moments.py`).

    Source: Chan, Golub & LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample
        Variances, Stanford STAN-CS-79-773, 1979.
    """
    each = FUNCTIONS["stack"](parts, axis=1)
    share, mean, variance = (each[row] for row in range(3))
    part = FUNCTIONS["sum"](share, 0)
    centre = FUNCTIONS["sum"](share * mean, 0) / part
    about = mean - centre
    around = FUNCTIONS["sum"](share * (variance + about * about), 0) / part
    found: Tensor = FUNCTIONS["stack"]([part, centre, around])
    return found


def combine(kind: str, a: Tensor, b: Tensor) -> Tensor:
    """Combine two partial results.

    Raises:
        ShardingError: unknown kind.
    """
    if kind == "sum":
        result: Tensor = a + b
        return result
    if kind not in _COMBINING_OPS:
        raise ShardingError(f"partial results cannot be combined by {kind!r}")
    result = FUNCTIONS[_COMBINING_OPS[kind]](a, b)
    return result


def slice_rows(x: Tensor, d: int, outer: Outer, start: Any, size: Any) -> Tensor:
    """Take `size` elements from `start` on of each row of axis `d` (times a row's length, if they
    differ)."""
    if outer == 1:
        return slice_axis(x, d, start, size)
    if not isinstance(outer, tuple):
        return _merge_rows(slice_axis(_split_rows(x, d, outer), d + 1, start, size), d)
    each = x.shape[d] // sum(outer)
    found, before = [], 0
    for length in outer:
        found.append(slice_axis(x, d, before * each + length * start, length * size))
        before += length
    row: Tensor = FUNCTIONS["concat"](found, axis=d)
    return row


def concat_rows(parts: Sequence[Tensor], d: int, outer: Outer = 1) -> Tensor:
    """Concatenate pieces of an axis, row by row."""
    if outer == 1:
        whole_one: Tensor = FUNCTIONS["concat"](parts, axis=d)
        return whole_one
    if not isinstance(outer, tuple):
        return _merge_rows(
            FUNCTIONS["concat"]([_split_rows(x, d, outer) for x in parts], axis=d + 1), d
        )
    found, before = [], 0
    for length in outer:
        for part in parts:
            each = part.shape[d] // sum(outer)
            found.append(slice_axis(part, d, before * each, length * each))
        before += length
    row: Tensor = FUNCTIONS["concat"](found, axis=d)
    return row


def _split_rows(x: Tensor, d: int, rows: Any) -> Tensor:
    """Reshape axis `d` to two axes: rows, and the elements of each."""
    shape = (*x.shape[:d], rows, x.shape[d] // rows, *x.shape[d + 1 :])
    apart: Tensor = FUNCTIONS["reshape"](x, shape)
    return apart


def _merge_rows(x: Tensor, d: int) -> Tensor:
    """Undo `_split_rows`."""
    shape = (*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :])
    one: Tensor = FUNCTIONS["reshape"](x, shape)
    return one


def slice_axis(x: Tensor, d: int, start: Any, size: Any) -> Tensor:
    """Take elements of a tensor along axis `d`. A constant is sliced at once, without a node."""
    if x.shape[d] == size and isinstance(start, int) and start == 0:
        return x
    if x.node.op.name == "constant" and isinstance(start, int) and isinstance(size, int):
        index = (slice(None),) * d + (slice(start, start + size),)
        piece: Tensor = REGISTRY["constant"](value=x.node.attrs["value"][index].copy())
        return piece
    starts = tuple(start if i == d else 0 for i in range(x.ndim))
    sizes = tuple(size if i == d else s for i, s in enumerate(x.shape))
    part: Tensor = REGISTRY["slice"](x, start=starts, size=sizes, step=(1,) * x.ndim)
    return part

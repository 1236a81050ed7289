"""What a place does with parts of tensors that it has: it cuts, joins and combines them."""

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
    """Partial results as one."""
    if kind == "mean":
        mean: Tensor = combine_all("sum", parts) / len(parts)
        return mean
    if kind == "moments":
        return _combine_moments(parts) if len(parts) > 1 else parts[0]
    return reduce(lambda a, b: combine(kind, a, b), parts)


def _combine_moments(parts: Sequence[Tensor]) -> Tensor:
    """The moments of all values by those of parts of them: in rows, what part of all these are,
    their mean and their variance (see `ops/reductions/sharded_moments.py`). Nothing large cancels.

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
    """Two partial results as one."""
    if kind == "sum":
        result: Tensor = a + b
        return result
    if kind not in _COMBINING_OPS:
        raise ShardingError(f"partial results cannot be combined by {kind!r}")
    result = FUNCTIONS[_COMBINING_OPS[kind]](a, b)
    return result


def slice_rows(x: Tensor, d: int, outer: Outer, start: Any, size: Any) -> Tensor:
    """Of each stretch of an axis so many elements (times its length, where these are unlike)."""
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
    """Pieces along an axis as one, stretch by stretch."""
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
    """An axis as two, rows and what is in each."""
    shape = (*x.shape[:d], rows, x.shape[d] // rows, *x.shape[d + 1 :])
    apart: Tensor = FUNCTIONS["reshape"](x, shape)
    return apart


def _merge_rows(x: Tensor, d: int) -> Tensor:
    """What `_in_rows` did, undone."""
    shape = (*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :])
    one: Tensor = FUNCTIONS["reshape"](x, shape)
    return one


def slice_axis(x: Tensor, d: int, start: Any, size: Any) -> Tensor:
    """Elements of a tensor along an axis; a constant is cut here and now."""
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

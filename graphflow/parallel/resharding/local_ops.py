"""What a place does with parts of tensors that it has: it cuts, joins and combines them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from graphflow.errors import ShardingError
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor
from graphflow.ir.spec import Outer

_COMBINED: dict[str, str] = {
    "max": "maximum", "min": "minimum", "prod": "multiply", "any": "logical_or",
    "all": "logical_and",
}  # fmt: skip


def combined_all(kind: str, parts: Sequence[Tensor]) -> Tensor:
    """Partial results as one."""
    if kind == "mean":
        mean: Tensor = combined_all("sum", parts) / len(parts)
        return mean
    if kind == "moments":
        return _moments(parts) if len(parts) > 1 else parts[0]
    return reduce(lambda a, b: combined(kind, a, b), parts)


def _moments(parts: Sequence[Tensor]) -> Tensor:
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


def combined(kind: str, a: Tensor, b: Tensor) -> Tensor:
    """Two partial results as one."""
    if kind == "sum":
        result: Tensor = a + b
        return result
    if kind not in _COMBINED:
        raise ShardingError(f"partial results cannot be combined by {kind!r}")
    result = FUNCTIONS[_COMBINED[kind]](a, b)
    return result


def taken(x: Tensor, d: int, outer: Outer, start: Any, size: Any) -> Tensor:
    """Of each stretch of an axis so many elements (times its length, where these are unlike)."""
    if outer == 1:
        return cut(x, d, start, size)
    if not isinstance(outer, tuple):
        return _flat(cut(_in_rows(x, d, outer), d + 1, start, size), d)
    each = x.shape[d] // sum(outer)
    found, before = [], 0
    for length in outer:
        found.append(cut(x, d, before * each + length * start, length * size))
        before += length
    row: Tensor = FUNCTIONS["concat"](found, axis=d)
    return row


def joined(parts: Sequence[Tensor], d: int, outer: Outer = 1) -> Tensor:
    """Pieces along an axis as one, stretch by stretch."""
    if outer == 1:
        whole_one: Tensor = FUNCTIONS["concat"](parts, axis=d)
        return whole_one
    if not isinstance(outer, tuple):
        return _flat(FUNCTIONS["concat"]([_in_rows(x, d, outer) for x in parts], axis=d + 1), d)
    found, before = [], 0
    for length in outer:
        for part in parts:
            each = part.shape[d] // sum(outer)
            found.append(cut(part, d, before * each, length * each))
        before += length
    row: Tensor = FUNCTIONS["concat"](found, axis=d)
    return row


def _in_rows(x: Tensor, d: int, rows: Any) -> Tensor:
    """An axis as two, rows and what is in each."""
    shape = (*x.shape[:d], rows, x.shape[d] // rows, *x.shape[d + 1 :])
    apart: Tensor = FUNCTIONS["reshape"](x, shape)
    return apart


def _flat(x: Tensor, d: int) -> Tensor:
    """What `_in_rows` did, undone."""
    shape = (*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :])
    one: Tensor = FUNCTIONS["reshape"](x, shape)
    return one


def cut(x: Tensor, d: int, start: Any, size: Any) -> Tensor:
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

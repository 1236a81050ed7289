"""Regions: ops over one shape that one generated kernel computes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Op

Attributes = tuple[tuple[str, Any, str], ...]
"""Names and values of attributes, and the values as text, since 0.0 == -0.0."""
Ref = tuple[bool, int]
"""The number of a region's operand (False, i), or of one of its ops (True, i)."""


@dataclass(frozen=True)
class Operand:
    """A region's operand: its dtype, and along which collapsed axes it has elements."""

    dtype: str
    axes: tuple[bool, ...]


@dataclass(frozen=True)
class RegionOp:
    """An op of a region.

    Attributes:
        inputs: operands of the region, or values of its ops.
        whole: whether it has a value for each element; False: for each row.
    """

    op: Op
    attrs: Attributes
    inputs: tuple[Ref, ...]
    whole: bool = True


@dataclass(frozen=True)
class Region:
    """Ops over one shape, up to names and sizes: equal regions share a kernel.

    Attributes:
        rank: collapsed axes, at least one.
        results: the ops whose values are stored.
        over: the reduced axis: "rows" (the last one), "columns" (the last but one), "" for none. At
            least one axis comes before it.
    """

    rank: int
    operands: tuple[Operand, ...]
    ops: tuple[RegionOp, ...]
    results: tuple[int, ...]
    over: str = ""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Cache the hash, since a region of a large graph is looked up often."""
        return hash((self.rank, self.operands, self.ops, self.results, self.over))


@dataclass
class KernelSource:
    """The LLVM IR of a region's kernel.

    Attributes:
        body: the function's text after its name.
        needs: declarations, and functions that it calls.
        flops: steps an element, for the cost.
        dtypes: of the results.
        axes: along which collapsed axes each result has elements.
        kept: values that wait in scratch memory for a later pass over their row.
        passes: over a row.
    """

    body: str
    needs: str
    flops: int
    dtypes: tuple[np.dtype[Any], ...]
    axes: tuple[tuple[bool, ...], ...]
    kept: int = 0
    passes: int = 1


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def freeze_attributes(attrs: Mapping[str, Any]) -> Attributes | None:
    """Return an op's attributes as part of a region; None if they are not plain values."""
    items = sorted(attrs.items())
    if not all(_is_plain(v) for _, v in items):
        return None
    return tuple((k, v, repr(v)) for k, v in items)

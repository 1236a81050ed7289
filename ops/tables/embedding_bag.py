"""Bags of rows: rows of a table, looked up by number and reduced bag by bag. Public in `gf.nn`.

The gradient of the table is that of one lookup of all ids, so it stays sparse: an optimiser reads
and writes only the rows that occur.
"""

from __future__ import annotations

import math
from typing import Any

from graphflow import init
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, error_location, function
from graphflow.ir.spec import equate, is_half, show_shape
from graphflow.ops.base.composite import round_to, widen
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.networks.layers.layer_base import (
    Layer,
    parameter,
    require_sizes,
    set_attributes,
)
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.pointwise.select import where
from graphflow.ops.tensors.embedding import embedding, is_not_padding
from graphflow.ops.tensors.scatter import scatter_rows
from graphflow.ops.tensors.take import as_indices, take_grad

MODES = ("sum", "mean", "max")

G = FUNCTIONS


@function
def embedding_bag(
    ids: Any,
    table: Any,
    offsets: Any = None,
    mode: str = "mean",
    weights: Any = None,
    padding_id: int | None = None,
) -> Tensor:
    """Reduce the rows of a table whose numbers are `ids`, bag by bag; an empty bag gives 0.

    An id outside [-rows, rows) is an OpError in the step.

    Args:
        ids: ints (bags, length), a bag in each row; or (n,), with `offsets`.
        table: floats (rows, size).
        offsets: ints (bags,), ascending from 0: the position in `ids` at which each bag begins.
        mode: "sum", "mean" or "max" of the rows of a bag. Equal maxima share the gradient equally.
        weights: floats of the shape of `ids`: factors of the rows, for "sum".
        padding_id: ids of this row are left out, whether they count it from the front or from the
            end; a mean does not count them.

    Returns:
        A tensor (bags, size).

    Raises:
        DTypeError: ids or offsets are not ints, the table or the weights are not float.
        ShapeError: ids are not (bags, length), or (n,) with offsets; weights have another shape
            than ids; the table has not two axes, or no row padding_id.
        ArgumentError: the mode is unknown, weights are given for another mode than "sum", or
            padding_id is no int >= 0.
        CheckError: in the step: offsets do not ascend from 0 to at most n.
    """
    ids, table = as_indices(ids), as_tensor(table)
    offsets = None if offsets is None else as_indices(offsets)
    weights = None if weights is None else as_tensor(weights)
    _check_arguments(ids, table, offsets, mode, weights)
    rows = embedding(ids, table, padding_id)
    if mode != "max":
        rows = widen(rows)  # the result is rounded once
    keep = None if padding_id is None else is_not_padding(ids, table, padding_id)
    if weights is not None:
        rows = rows * G["expand_dims"](astype(weights, rows.dtype), -1)
    if keep is not None:
        rows = where(G["expand_dims"](keep, -1), rows, -math.inf if mode == "max" else 0)
    if offsets is None:
        bags = _reduce_matrix(rows, keep, mode)
    else:
        bags = _reduce_segments(rows, keep, _bags_of(ids, offsets), offsets.shape[0], mode)
    result: Tensor = round_to(bags, table.dtype) if is_half(table.dtype) else bags
    return result


def _check_arguments(
    ids: Tensor, table: Tensor, offsets: Tensor | None, mode: Any, weights: Tensor | None
) -> None:
    """Check the arguments of `embedding_bag`; raises as it."""
    require_kind(ids.spec, "int")
    require_kind(table.spec, "float")
    if table.ndim != 2:
        raise ShapeError(f"expected a table of (rows, size), got {show_shape(table.shape)}")
    if mode not in MODES:
        raise ArgumentError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if offsets is None and ids.ndim != 2:
        raise ShapeError(
            f"without offsets, ids must be (bags, length), got {show_shape(ids.shape)}; give "
            "offsets=, the position at which each bag begins"
        )
    if offsets is not None:
        require_kind(offsets.spec, "int")
        if ids.ndim != 1 or offsets.ndim != 1:
            raise ShapeError(
                "with offsets, ids and offsets must have one axis each, got "
                f"{show_shape(ids.shape)} and {show_shape(offsets.shape)}"
            )
    if weights is not None:
        require_kind(weights.spec, "float")
        if mode != "sum":
            raise ArgumentError(f'weights are for mode "sum", not {mode!r}')
        what = (
            f"expected a weight for each id, got weights {show_shape(weights.shape)} for ids "
            f"{show_shape(ids.shape)}"
        )
        if weights.ndim != ids.ndim:
            raise ShapeError(what)
        for have, want in zip(weights.shape, ids.shape, strict=True):
            equate(have, want, what)


def _bags_of(ids: Tensor, offsets: Tensor) -> Tensor:
    """Return the bag of each id: int64 (n,)."""
    offsets = astype(offsets, "int64")
    n = G["size_of"](size=ids.shape[0], dtype="int64")
    ends = G["concat"]([offsets, G["expand_dims"](n, 0)])
    ascends = G["all"](G["diff"](ends) >= 0)
    good = G["logical_and"](ascends, G["all"](ends[:1] == 0))
    offsets = G["check"](offsets, good, message="offsets must ascend from 0 to the number of ids")
    bags: Tensor = G["searchsorted"](offsets, G["arange"](ids.shape[0]), side="right") - 1
    return bags


def _reduce_segments(
    rows: Tensor, keep: Tensor | None, bags: Tensor, count: Any, mode: str
) -> Tensor:
    """Reduce rows (n, size) to (bags, size), given the bag of each row."""
    shape = (count, rows.shape[1])
    ones = G["ones"](bags.shape, rows.dtype) if keep is None else astype(keep, rows.dtype)
    top: Tensor
    if mode == "max":
        low = G["full"](shape, -math.inf, rows.dtype)
        top = scatter_rows(low, bags, rows, reduction="max")
    else:
        top = take_grad(rows, bags, shape=shape, axis=0)
    if mode == "sum":
        return top
    sizes = take_grad(ones, bags, shape=shape[:1], axis=0)
    return _finish(top, sizes, mode)


def _reduce_matrix(rows: Tensor, keep: Tensor | None, mode: str) -> Tensor:
    """Reduce rows (bags, length, size) along the length."""
    bags, length, size = rows.shape
    if mode == "sum":
        total: Tensor = G["sum"](rows, 1)
        return total
    if keep is None:
        sizes = G["broadcast_to"](G["size_of"](size=length, dtype=rows.dtype.name), (bags,))
    else:
        sizes = G["sum"](astype(keep, rows.dtype), 1)
    if mode == "mean":
        return _finish(G["sum"](rows, 1), sizes, mode)
    if not isinstance(length, int) or not length:  # a maximum needs an element
        low = G["full"]((bags, 1, size), -math.inf, rows.dtype)
        rows = G["concat"]([rows, low], axis=1)
    return _finish(G["max"](rows, 1), sizes, mode)


def _finish(top: Tensor, sizes: Tensor, mode: str) -> Tensor:
    """Divide sums by the sizes of bags, or give the maxima of empty bags the value 0."""
    sizes = G["expand_dims"](sizes, 1)
    if mode == "mean":
        mean: Tensor = top / G["maximum"](sizes, 1)
        return mean
    return where(sizes > 0, top, 0)


@dataclass(frozen=True, eq=False, init=False)
class EmbeddingBag(Layer):
    """A table whose rows are looked up by number and reduced bag by bag, by `gf.nn.embedding_bag`.

    Called as `bag(ids, offsets=None, weights=None)`, on ids (bags, length), or (n,) with offsets.

    Args:
        rows: rows of the table.
        dim: elements of a row.
        mode: "sum", "mean" or "max".
        padding_id: ids of this row are left out.

    Variables: `weight` (rows, dim), standard normal; the row of padding_id begins as the others do
    and stays as it is.
    """

    weight: Tensor
    mode: str
    padding_id: int | None

    def __init__(
        self, rows: int, dim: int, mode: str = "mean", padding_id: int | None = None, *,
        dtype: Any = "float32", name: str = "embedding_bag",
    ) -> None:  # fmt: skip
        require_sizes(self, rows=rows, dim=dim)
        with error_location("EmbeddingBag"):
            if mode not in MODES:
                raise ArgumentError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        set_attributes(self, mode=mode, padding_id=padding_id)
        with self.scope(name):
            set_attributes(
                self, weight=parameter("weight", init.normal((rows, dim), 0.0, 1.0, dtype))
            )

    def __call__(self, ids: Any, offsets: Any = None, weights: Any = None) -> Tensor:
        result: Tensor = embedding_bag(
            ids, self.weight, offsets, self.mode, weights, self.padding_id
        )
        return result

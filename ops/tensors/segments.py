"""`gf.segment_sum`: sums of the rows that have the same id."""

from __future__ import annotations

from typing import Any

from graphflow.errors import ShapeError
from graphflow.ir.op import Tensor, as_tensor, function
from graphflow.ir.spec import equate, normalize_shape, show_shape
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.tensors.creation import zeros
from graphflow.ops.tensors.take import scatter_add


@function
def segment_sum(x: Any, ids: Any, count: Any) -> Tensor:
    """Sum the rows of x by their ids, which need no order.

    An id outside the count is an OpError in the step; negative ones count from the end.

    Args:
        x: ints, floats or complex numbers (…ids, …row).
        ids: ints, the segment of each row, as (rows,) for x (rows, …).
        count: the number of segments, an int or the size of a tensor.

    Returns:
        (count, …row); a segment without rows is 0.

    Raises:
        ShapeError: x does not begin with the shape of the ids, or the count is no size.
        DTypeError: ids are not ints, or x is bool.
    """
    x, ids = as_tensor(x), as_tensor(ids)
    require_kind(ids.spec, "int")
    text = f"x {show_shape(x.shape)} does not begin with the shape of ids {show_shape(ids.shape)}"
    if x.ndim < ids.ndim:
        raise ShapeError(text)
    for n, m in zip(ids.shape, x.shape, strict=False):
        equate(n, m, text)
    start = zeros(normalize_shape((count, *x.shape[ids.ndim :]), "segment_sum"), dtype=x.dtype)
    result: Tensor = scatter_add(start, ids, x)
    return result


__all__ = ["segment_sum"]

"""`gf.histogram` and `gf.interp`: numbers among the sorted edges of intervals."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Tensor, as_tensor, error_location, function, promote_inputs
from graphflow.ir.spec import show_shape
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import require_finite, require_int, require_kind
from graphflow.ops.ordering.search import bincount, searchsorted
from graphflow.ops.pointwise.bitwise import bitwise_and
from graphflow.ops.pointwise.comparison import equal, greater, less, less_equal
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.pointwise.select import clip, where
from graphflow.ops.reductions.extrema import max as largest
from graphflow.ops.reductions.extrema import min as least
from graphflow.ops.tensors.creation import arange
from graphflow.ops.tensors.shape import reshape
from graphflow.ops.tensors.take import take


@composite("x", "weights")
@function
def histogram(
    x: Any, bins: Any = 10, range: Any = None, weights: Any = None
) -> tuple[Tensor, Tensor]:
    """Count the numbers of x in intervals, as numpy does: the last interval holds both its ends.

    Numbers outside, and NaN, are not counted.

    Args:
        x: floats of any shape.
        bins: the number of equal intervals, or their edges, (n + 1,), ascending.
        range: the ends of equal intervals; default: the least and the largest of x, which must
            then differ.
        weights: of the numbers, of the shape of x; their sums are returned instead of counts.

    Returns:
        The counts, int64 (n,), or the sums of the weights; and the edges, (n + 1,).

    Raises:
        DTypeError: x is not float.
        ShapeError: edges are not one axis of two or more numbers.
        ArgumentError: bins is below 1, or the ends of the range do not ascend.
    """
    x = as_tensor(x)
    require_kind(x.spec, "float")
    x = reshape(x, (-1,))
    edges = _make_edges(x, bins, range)
    count = edges.shape[0] - 1
    last = edges[-1]
    place = where(equal(x, last), count - 1, searchsorted(edges, x, side="right") - 1)
    inside = bitwise_and(less_equal(edges[0], x), less_equal(x, last))
    place = where(inside, place, count)  # one more interval for all the rest
    if weights is not None:
        weights = reshape(as_tensor(weights), (-1,))
    return bincount(place, count + 1, weights)[:-1], edges


def _make_edges(x: Tensor, bins: Any, range: Any) -> Tensor:
    """Return the edges of the intervals of a histogram."""
    is_count = isinstance(bins, int | np.integer) and not isinstance(bins, bool)
    if not is_count:
        given = as_tensor(bins, x.dtype)
        if given.ndim != 1 or (isinstance(given.shape[0], int) and given.shape[0] < 2):
            raise ShapeError(
                f"bins are a number, or a line of two edges or more, not {show_shape(given.shape)}"
            )
        return given
    with error_location("histogram"):
        if require_int("bins", bins) < 1:
            raise ArgumentError(f"bins must be 1 or more, got {bins}")
        low, high = (least(x), largest(x)) if range is None else _require_ends(range)
    low, high = as_tensor(low, x.dtype), as_tensor(high, x.dtype)
    steps = arange(bins + 1, dtype=x.dtype) / float(bins)
    edges: Tensor = low * (1.0 - steps) + high * steps
    return edges


def _require_ends(range: Any) -> tuple[float, float]:
    """Return the two ends of a range."""
    if not isinstance(range, tuple | list) or len(range) != 2:
        raise ArgumentError(f"range is a pair of numbers, not {range!r}")
    low, high = (require_finite("histogram", "range", end) for end in range)
    if low >= high:
        raise ArgumentError(f"range must ascend, got {low!r} to {high!r}")
    return low, high


@composite("x", "xp", "fp")
@function
def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None) -> Tensor:
    """Return the values at x of the function that is linear between the points (xp, fp).

    Args:
        x: floats of any shape.
        xp: (n,) ascending.
        fp: (n,) values there.
        left, right: the values below the first and above the last point; default: theirs.

    Raises:
        DTypeError: x, xp and fp are not floats.
        ShapeError: xp and fp are not one axis of the same size.
    """
    x, xp, fp = promote_inputs("interp", (x, xp, fp))
    require_kind(x.spec, "float")
    if xp.ndim != 1 or xp.shape != fp.shape:
        raise ShapeError(
            f"interp takes xp and fp of one axis and the same size, not {show_shape(xp.shape)} and "
            f"{show_shape(fp.shape)}"
        )
    upper = clip(searchsorted(xp, x, side="right"), 1, as_tensor(xp.shape[0], "int64") - 1)
    x0, x1 = take(xp, upper - 1), take(xp, upper)
    y0, y1 = take(fp, upper - 1), take(fp, upper)
    width = x1 - x0
    share = (x - x0) / where(equal(width, 0), 1, width)
    inside = y0 + share * (y1 - y0)
    below = fp[0] if left is None else astype(as_tensor(left), fp.dtype)
    above = fp[-1] if right is None else astype(as_tensor(right), fp.dtype)
    inside = where(less(x, xp[0]), below, inside)
    result: Tensor = where(greater(x, xp[-1]), above, inside)
    return result


__all__ = ["histogram", "interp"]

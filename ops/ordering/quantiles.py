"""Quantiles and the median, read off sorted elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError
from graphflow.ir.op import Tensor, as_tensor, error_location, function
from graphflow.ir.spec import product
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import reduced_shape, require_kind
from graphflow.ops.ordering.sort import sort
from graphflow.ops.pointwise.arithmetic import ceil, floor
from graphflow.ops.pointwise.comparison import equal, isnan
from graphflow.ops.pointwise.convert import astype, size_of
from graphflow.ops.pointwise.select import where
from graphflow.ops.reductions.reduce import Axes, normalize_arguments, require_elements
from graphflow.ops.tensors.shape import moveaxis, permute_dims, reshape
from graphflow.ops.tensors.take import take

Array = np.ndarray[Any, Any]


@composite("x")
@function
def quantile(x: Any, q: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Compute the values below which shares q of the elements over axes (None: all) lie.

    Between two elements it interpolates linearly. The result is NaN if an element is NaN.

    Args:
        x: floats.
        q: a number from 0 to 1, or an array of them, whose axes come first in the result.

    Raises:
        DTypeError: x is not float.
        ShapeError: an axis is outside x, or there are no elements.
        ArgumentError: an axis is given twice, or q is outside [0, 1].
    """
    x, axes = normalize_arguments("quantile", x, axis, keepdims)
    with error_location("quantile"):
        shares = _require_shares(q)
        require_kind(x.spec, "float")
        require_elements(x.spec, axes)
    return _interpolate_sorted(x, shares, axes, keepdims)


@composite("x")
@function
def median(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Compute the middle element over axes (None: all), or the mean of the two middle ones.

    The result is NaN if an element is NaN.

    Args:
        x: floats.

    Raises:
        DTypeError: x is not float.
        ShapeError: an axis is outside x, or there are no elements.
        ArgumentError: an axis is given twice.
    """
    x, axes = normalize_arguments("median", x, axis, keepdims)
    with error_location("median"):
        require_kind(x.spec, "float")
        require_elements(x.spec, axes)
    return _interpolate_sorted(x, np.asarray(0.5), axes, keepdims)


def _require_shares(q: Any) -> Array:
    try:
        shares = np.asarray(q, "float64")
    except (TypeError, ValueError):
        shares = np.asarray(math.nan)
    if not ((shares >= 0) & (shares <= 1)).all():
        raise ArgumentError(f"q must be a number from 0 to 1, or an array of them, got {q!r}")
    return shares


def _interpolate_sorted(x: Tensor, shares: Array, axes: Axes, keepdims: bool) -> Tensor:
    """Sort the elements over axes and interpolate between them at the shares."""
    kept = [d for d in range(x.ndim) if d not in axes]
    size = product(x.shape[a] for a in axes)
    front = tuple(x.shape[d] for d in kept)
    ordered = sort(reshape(permute_dims(x, [*kept, *axes]), (*front, size)))
    last = as_tensor(size_of(size=size, dtype="float64")) - 1.0
    place = last * shares.reshape(-1)
    below, above = (
        take(ordered, astype(rounded(place), "int64"), axis=-1) for rounded in (floor, ceil)
    )
    share = astype(place - floor(place), x.dtype)
    found = where(equal(below, above), below, below * (1.0 - share) + above * share)
    largest = ordered[..., -1:]  # NaN sorts last, so this is NaN if any element is
    found = moveaxis(where(isnan(largest), largest, found), -1, 0)
    shape = reduced_shape(x.shape, axes, keepdims)
    return reshape(found, (*shares.shape, *shape))

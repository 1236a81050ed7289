"""`gf.nextafter`: the next float of a dtype, by its bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.ir.op import Tensor, as_tensor, function, promote_inputs
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.pointwise.arithmetic import add, copysign
from graphflow.ops.pointwise.bitwise import bitcast, bitwise_or
from graphflow.ops.pointwise.comparison import equal, greater, isnan
from graphflow.ops.pointwise.convert import astype, stop_gradient
from graphflow.ops.pointwise.select import where
from graphflow.ops.tensors.repetition import broadcast_arrays

_INTS = {2: "int16", 4: "int32", 8: "int64"}


@function
def nextafter(x: Any, y: Any) -> Tensor:
    """Return the float next to x in the direction of y; y where they are equal, NaN where one is.

    It has no gradient.

    Args:
        x, y: floats whose shapes broadcast.

    Raises:
        DTypeError: x and y are no floats.
        ShapeError: the shapes do not broadcast.
    """
    x, y = (stop_gradient(each) for each in broadcast_arrays(*promote_inputs("nextafter", (x, y))))
    require_kind(x.spec, "float")
    ints = _INTS[np.dtype(x.dtype).itemsize]
    leaves_zero = equal(greater(y, x), greater(x, 0))  # then the bits of its size grow
    step = astype(where(leaves_zero, 1, -1), ints)
    moved = bitcast(add(bitcast(x, ints), step), x.dtype)
    least = bitcast(as_tensor(np.ones((), ints)), x.dtype)
    moved = where(equal(x, 0), copysign(least, y), moved)
    moved = where(equal(x, y), y, moved)
    result: Tensor = where(bitwise_or(isnan(x), isnan(y)), x * y, moved)
    return result


__all__ = ["nextafter"]

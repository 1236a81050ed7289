"""`gf.isin`: which elements are among some values."""

from __future__ import annotations

from typing import Any

from graphflow.ir.op import Tensor, function, promote_inputs
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.ordering.search import searchsorted
from graphflow.ops.ordering.sort import sort
from graphflow.ops.pointwise.bitwise import bitwise_and
from graphflow.ops.pointwise.comparison import equal, less
from graphflow.ops.tensors.shape import reshape


@function
def isin(x: Any, values: Any) -> Tensor:
    """Return, for each element of x, whether it is among the values.

    The values are sorted and searched, so x may be large and the values many. NaN is among none.

    Args:
        x: ints or floats of any shape.
        values: numbers of the same kind, of any shape; there may be none.

    Returns:
        bool, of the shape of x.

    Raises:
        DTypeError: x is neither int nor float, or the kinds of x and the values mix.
    """
    x, values = promote_inputs("isin", (x, values))
    require_kind(x.spec, "int", "float")
    line = sort(reshape(values, (-1,)))
    found = less(searchsorted(line, x, "left"), searchsorted(line, x, "right"))
    result: Tensor = bitwise_and(found, equal(x, x))
    return result


__all__ = ["isin"]

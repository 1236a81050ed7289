"""Vectors of one length, and distances of all pairs of vectors. Public in `gf.nn`."""

from __future__ import annotations

from typing import Any

from graphflow.errors import ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, function, promote_inputs
from graphflow.ir.spec import equate, show_shape
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.networks.losses.losses import require_positive
from graphflow.ops.pointwise.select import maximum


@composite("x", to="high")
@function
def normalize(x: Any, axis: int = -1, ord: float = 2, epsilon: float = 1e-12) -> Tensor:
    """Divide vectors along an axis by their norms, each of which counts as at least epsilon.

    Args:
        x: floats.
        ord: as for `gf.linalg.vector_norm`.
        epsilon: a positive number.

    Raises:
        DTypeError: x is not float.
        ShapeError: axis is outside x.
        ArgumentError: ord is no number, or epsilon is not a positive number.
    """
    x = as_tensor(x)
    require_kind(x.spec, "float")
    least = require_positive("normalize", "epsilon", epsilon)
    result: Tensor = x / maximum(FUNCTIONS["vector_norm"](x, axis, True, ord), least)
    return result


@composite("a", "b", to="high")
@function
def cdist(a: Any, b: Any, ord: float = 2) -> Tensor:
    """Compute the distance of each vector of a to each vector of b.

    It is the norm of differences, which is exact for near vectors, too. Where no kernel fuses it,
    it holds m·n·d numbers.

    Args:
        a, b: floats (…, m, d) and (…, n, d), whose axes before the last two broadcast.
        ord: as for `gf.linalg.vector_norm`.

    Returns:
        (…, m, n). The gradient of a distance of 0 is 0.

    Raises:
        DTypeError: a or b is not float.
        ShapeError: a or b has fewer than two axes, or sizes do not fit.
        ArgumentError: ord is no number.
    """
    a, b = promote_inputs("cdist", (a, b))
    require_kind(a.spec, "float")
    text = f"expected vectors (…, m, d) and (…, n, d), got {show_shape(a.shape)} and "
    text += show_shape(b.shape)
    if a.ndim < 2 or b.ndim < 2:
        raise ShapeError(text)
    equate(a.shape[-1], b.shape[-1], text)
    expand = FUNCTIONS["expand_dims"]
    result: Tensor = FUNCTIONS["vector_norm"](expand(a, -2) - expand(b, -3), -1, ord=ord)
    return result


__all__ = ["cdist", "normalize"]

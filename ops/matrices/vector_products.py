"""Products of vectors: outer and vecdot."""

from __future__ import annotations

from graphflow.errors import ShapeError
from graphflow.ir.op import (
    FUNCTIONS,
    Tensor,
    function,
    promote_inputs,
)
from graphflow.ir.spec import (
    equate,
    show_shape,
)
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import (
    conj,
    normalize_axis,
)
from graphflow.ops.tensors.shape import (
    expand_dims,
)


@function
def outer(a: Tensor, b: Tensor) -> Tensor:
    """Multiply all pairs of elements of two vectors (m,) and (n,); the result is (m, n).

    Raises:
        ShapeError: a or b is no vector.
    """
    a, b = promote_inputs("outer", (a, b))
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"expected vectors, got {show_shape(a.shape)} and {show_shape(b.shape)}")
    return expand_dims(a, 1) * expand_dims(b, 0)  # type: ignore[no-any-return]


@composite("a", "b")
@function
def vecdot(a: Tensor, b: Tensor, *, axis: int = -1) -> Tensor:
    """Sum conj(a)·b along an axis that both have; the other axes broadcast.

    Raises:
        ShapeError: the sizes differ.
    """
    a, b = promote_inputs("vecdot", (a, b))
    if not a.ndim or not b.ndim:
        raise ShapeError("expected vectors, got scalars")
    n, n2 = a.shape[normalize_axis(axis, a.ndim)], b.shape[normalize_axis(axis, b.ndim)]
    equate(n, n2, f"vecdot along axis {axis}")
    result: Tensor = FUNCTIONS["sum"](conj(a) * b, axis=axis, dtype=a.dtype)
    return result

"""Gradients at 0 of roots of sums of squares: norms, hypot, std, the size of a complex number.

By convention the gradient of a root at 0 is 0. It has no second derivative there, so that one is
NaN. A function of a root may have one: the root's square, or its maximum with a positive number.
Vjps here therefore look whether the cotangent has the root as a factor, and cancel it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.ir.spec import is_half
from graphflow.ops.base.shape_rules import constant_value

_MAX_DEPTH = 8
"""Depth of nested products in which `divide_out` looks for a factor."""


def divide_out(g: Tensor, y: Tensor, deep: int = _MAX_DEPTH) -> Tensor | None:
    """Return g / y without a division if g is a product with the factor y, else None.

    The factor may be broadcast, reshaped or converted, as long as g has y's shape and dtype again.
    """
    g = _before_half_rounding(g)
    name, inputs = g.node.op.name, g.node.inputs
    if _is_same(g, y):
        return FUNCTIONS["full_like"](y, 1)  # type: ignore[no-any-return]
    if not deep or g.node.serial <= max(
        _before_half_rounding(t).node.serial for t in y.node.inputs
    ):
        return None

    def divide(i: int, by: Tensor = y) -> Tensor | None:
        return divide_out(inputs[i], by, deep - 1)

    if name in ("square", "pow"):
        exponent, part = 2 if name == "square" else constant_value(inputs[1]), divide(0)
        if part is None or not exponent or exponent < 2:
            return None
        rest: Tensor = FUNCTIONS["pow"](_before_half_rounding(inputs[0]), exponent - 1)
        return rest if constant_value(part) == 1 else part * rest
    if name in ("multiply", "divide", "negative", "positive"):
        for i in range(1 if name == "divide" else len(inputs)):
            part = divide(i)
            if part is not None:
                return FUNCTIONS[name](*inputs[:i], part, *inputs[i + 1 :])  # type: ignore[no-any-return]
        return None
    if name in ("add", "subtract"):
        parts = [divide(i) if inputs[i].shape == g.shape else None for i in (0, 1)]
        return FUNCTIONS[name](*parts) if all(p is not None for p in parts) else None
    if name not in _INVERSES and name != "sum":
        return None
    found = (divide(0, by) for by in _equivalent_forms(g, y))
    part = next((part for part in found if part is not None), None)
    if part is None:
        return None
    whole = FUNCTIONS["broadcast_to"](part, inputs[0].shape)
    return g.node.op(whole, **g.node.attrs)  # type: ignore[no-any-return]


_INVERSES: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "astype": lambda y, t, attrs: FUNCTIONS["astype"](y, t.dtype),
    "reshape": lambda y, t, attrs: FUNCTIONS["reshape"](y, t.shape),
    "squeeze": lambda y, t, attrs: FUNCTIONS["expand_dims"](y, attrs["axes"]),
    "expand_dims": lambda y, t, attrs: FUNCTIONS["squeeze"](y, attrs["axes"]),
}


def _equivalent_forms(g: Tensor, y: Tensor) -> Iterator[Tensor]:
    """Yield the forms of y in the input of g, if g reshapes, converts or sums that input."""
    t, name, attrs = g.node.inputs[0], g.node.op.name, g.node.attrs
    if name == "sum":
        if _broadcasts_along(y, t, attrs["axis"]):
            yield y
            yield FUNCTIONS["broadcast_to"](y, t.shape)
    elif name == "astype" or g.shape == y.shape:
        if t.shape == (*(1,) * (t.ndim - y.ndim), *y.shape):
            yield y
        yield _INVERSES[name](y, t, attrs)


def _broadcasts_along(y: Tensor, x: Tensor, axes: tuple[int, ...]) -> bool:
    """Return True if y broadcasts to x and is constant along the axes."""
    shape = (1,) * (x.ndim - y.ndim) + y.shape
    fits = len(shape) == x.ndim and all(a in (1, b) for a, b in zip(shape, x.shape, strict=True))
    return fits and all(shape[a] == 1 for a in axes)


def _before_half_rounding(x: Tensor) -> Tensor:
    """Return the tensor that conversions from and to 16-bit floats start from."""
    while x.node.op.name == "astype" and any(is_half(t.dtype) for t in (x, x.node.inputs[0])):
        x = x.node.inputs[0]
    return x


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Return True if x is y, or the same op of the same inputs, in 16 bits or in float32."""
    a, b = x.node, y.node
    return x is y or (
        a.op is b.op
        and len(a.outputs) == 1
        and len(a.inputs) > 0
        and all(
            _before_half_rounding(s) is _before_half_rounding(t)
            for s, t in zip(a.inputs, b.inputs, strict=True)
        )
        and a.attrs == b.attrs
    )


_MASKING_OPS = ("clip_grad", "greater_grad", "past_threshold", "relu_grad")
"""Ops that keep their first input, a cotangent, where a condition on the others holds, else 0."""


def one_where_masked(g: Tensor, y: Tensor, deep: int = _MAX_DEPTH) -> Tensor:
    """Return y, and 1 where a selection made its cotangent g 0, since y does not matter there."""
    off = _find_mask(g, deep)
    return y if off is None else FUNCTIONS["where"](off, 1, y)


def _find_mask(g: Tensor, deep: int) -> Tensor | None:
    """Return a bool tensor that is true where a selection made g 0, or None if none did."""
    op, inputs = g.node.op, g.node.inputs
    if op.name in _MASKING_OPS:
        kept = op(FUNCTIONS["full_like"](inputs[0], 1), *inputs[1:], **g.node.attrs)
        return FUNCTIONS["equal"](kept, 0)  # type: ignore[no-any-return]
    if op.name == "where" and constant_value(inputs[1]) == 0:
        return inputs[0]
    if op.name == "where" and constant_value(inputs[2]) == 0:
        return FUNCTIONS["logical_not"](inputs[0])  # type: ignore[no-any-return]
    if op.name in ("multiply", "divide", "negative") and deep:
        found = (_find_mask(t, deep - 1) for t in inputs[: 1 if op.name == "divide" else 2])
        return next((off for off in found if off is not None), None)
    return None


def divide_by_root(
    g: Tensor, y: Tensor, x: Tensor, widen: Callable[[Tensor], Tensor] = lambda t: t
) -> Tensor:
    """Return x·g/y for the cotangent g of a root y of a sum of squares of x; 0 where y is 0.

    The derivative of this result is NaN where y is 0. If g has y as a factor, as the cotangent of
    y² has, the factor is cancelled and derivatives of any order exist.

    Args:
        widen: gives g and y the axes of x.
    """
    quotient = divide_out(g, y)
    if quotient is not None:
        product: Tensor = x * widen(quotient)
        return product
    where, y = FUNCTIONS["where"], one_where_masked(g, y)
    # a NaN comes from a derivative of `bend`
    bend = where(FUNCTIONS["isnan"](g), g, _zero_of_infinite_slope(y))
    result: Tensor = x * widen(where(y == 0, bend, g / where(y == 0, 1, y)))
    return result


def zero_at_root(y: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    """Return the slope of a root y along x, and 0 where y is 0; derivatives of that 0 are NaN."""
    result: Tensor = FUNCTIONS["where"](y == 0, x * _zero_of_infinite_slope(y), slope)
    return result


def _zero_of_infinite_slope(y: Tensor) -> Tensor:
    """Return 0 where y is 0, with an infinite slope there."""
    result: Tensor = FUNCTIONS["sqrt"](FUNCTIONS["where"](y == 0, y, 1))
    return result

"""Rotary position embeddings: pairs of elements rotated by angles proportional to position.

Source: Su et al., arXiv:2104.09864.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import Size, TensorSpec, equate, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import require_buildable, require_kind, unbroadcast
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.pointwise.transcendental import cos as cos_of
from graphflow.ops.pointwise.transcendental import sin as sin_of
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.creation import arange
from graphflow.ops.tensors.shape import expand_dims


def _pair_slices(size: Size, interleaved: bool) -> tuple[slice, slice]:
    """Return slices of the first and second elements of `size` pairs."""
    n = int(size)
    return (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(n), slice(n, 2 * n))


def _infer_rotate(x: TensorSpec, cos: TensorSpec, sin: TensorSpec, interleaved: bool) -> TensorSpec:
    require_kind(x, "float")
    text = f"x {show_shape(x.shape)}, cos {show_shape(cos.shape)}, sin {show_shape(sin.shape)}"
    if not x.dtype == cos.dtype == sin.dtype:
        raise DTypeError(f"x is {x.dtype}, cos {cos.dtype}, sin {sin.dtype}; convert with .astype")
    alike = f"{text}: cos and sin have one shape, which broadcasts to that of x"
    if cos.rank != sin.rank or not 1 <= cos.rank <= x.rank:
        raise ShapeError(alike)
    for have, want in zip(cos.shape, sin.shape, strict=True):
        equate(have, want, alike)
    for have, want in zip(cos.shape[-2::-1], x.shape[-2::-1], strict=False):
        if have != 1:
            equate(want, have, text)
    pairs, size = cos.shape[-1], x.shape[-1]
    if not isinstance(pairs, int) or not isinstance(size, int) or 2 * pairs > size:
        raise ShapeError(f"{text}: the last axis of x holds two elements for each angle")
    return x


def _rotate_into(xp: Any, out: Any, x: Any, cos: Any, sin: Any, interleaved: bool) -> None:
    a, b = _pair_slices(cos.shape[-1], interleaved)
    xp.multiply(x[..., a], cos, out=out[..., a])
    out[..., a] -= x[..., b] * sin
    xp.multiply(x[..., b], cos, out=out[..., b])
    out[..., b] += x[..., a] * sin
    rest = slice(2 * cos.shape[-1], None)
    out[..., rest] = x[..., rest]


def _rotate_kernel(xp: Any, x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    out = xp.empty(x.shape, x.dtype)
    _rotate_into(xp, out, x, cos, sin, interleaved)
    return out


def _rotate_vjp(
    g: Tensor, y: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    a, b = _pair_slices(cos.shape[-1], interleaved)
    (ga, gb), (xa, xb) = ((t[..., a], t[..., b]) for t in (g, x))
    d_cos, d_sin = ga * xa + gb * xb, gb * xa - ga * xb
    back: Tensor = rotate_op(g, cos, -sin, interleaved=interleaved)
    return back, unbroadcast(d_cos, cos.shape), unbroadcast(d_sin, sin.shape)


_X, _ANGLES = spec("float32", (2, 3, 6)), spec("float32", (3, 2))
rotate_op: Op = register(
    Op(
        "rotate_pairs",
        infer=_infer_rotate,
        kernel=_rotate_kernel,
        into=_rotate_into,
        vjp=_rotate_vjp,
        batch=batching.rotate_pairs,
        sharding=sharding.rotate_rule,
        cost=lambda x, cos, sin, interleaved: Cost(flops=x.size * 3),
        samples=(
            sample(_X, _ANGLES, _ANGLES, interleaved=False),
            sample(_X, _ANGLES, _ANGLES, interleaved=True),
            sample(_X, spec("float32", (2, 1, 3)), spec("float32", (2, 1, 3)), interleaved=False),
        ),
    )
)


@function
def rotate(
    x: Any, cos: Any, sin: Any, interleaved: bool = False, name: str | None = None
) -> Tensor:
    """Rotate pairs (a, b) of elements of the last axis: (a·cos - b·sin, b·cos + a·sin).

    Args:
        x: floats (…, T, d).
        cos, sin: (…, T, p), which broadcast to the first axes of x. If p < d/2, the elements of x
            after the first 2·p stay as they are.
        interleaved: pairs are neighbours; otherwise element i goes with element i + p.

    Raises:
        DTypeError: the tensors are not floats of one dtype.
        ShapeError: the shapes do not fit each other.
        ArgumentError: interleaved is no bool.
    """
    if not isinstance(interleaved, bool):
        raise ArgumentError(f"interleaved must be True or False, got {interleaved!r}")
    result: Tensor = rotate_op(x, cos, sin, interleaved=interleaved, name=name)
    return result


@composite("x")
@function
def rotary(
    x: Any, positions: Any = None, *, base: float = 10000.0, size: int | None = None,
    interleaved: bool = False, name: str | None = None,
) -> Tensor:  # fmt: skip
    """Rotate pair i of the vector at position t by the angle t·base^(-2i / size).

    Queries and keys that are encoded so have products that depend on relative positions.

    Args:
        x: floats (…, T, d).
        positions: (…, T) of ints or floats, which broadcast to the first axes of x; default 0, 1,
            ….
        base: a positive number.
        size: number of elements of d that are rotated, even; default: all.
        interleaved: pairs are neighbours; otherwise element i goes with element i + size/2.

    Raises:
        DTypeError: x is not float.
        ShapeError: x has fewer than two axes, or positions have another shape.
        ArgumentError: size is odd or unknown, or base is not positive.
    """
    x = as_tensor(x)
    require_kind(x.spec, "float")
    if x.ndim < 2:
        raise ShapeError(f"x must be (…, T, d), got {show_shape(x.shape)}")
    number = isinstance(base, int | float) and not isinstance(base, bool)
    if not number or not 0 < base < math.inf:
        raise ArgumentError(f"base must be a positive finite number, got {base!r}")
    turned: Any = x.shape[-1] if size is None else size
    whole = isinstance(turned, int) and not isinstance(turned, bool)
    if not whole or turned < 2 or turned % 2:
        raise ArgumentError(
            f"the number of rotated elements must be an even int >= 2, got {turned!r}"
        )
    require_buildable(turned)
    wide = "float64" if x.dtype == np.float64 else "float32"
    places = astype(arange(x.shape[-2]) if positions is None else as_tensor(positions), wide)
    slopes = as_tensor((float(base) ** (-np.arange(0, turned, 2) / turned)).astype(wide))
    angles = expand_dims(places, -1) * slopes
    cos, sin = (astype(f(angles), x.dtype) for f in (cos_of, sin_of))
    return rotate(x, cos, sin, interleaved, name)

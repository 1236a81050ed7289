"""Parts that pooling ops share: attributes, shape rules, costs, sample calls.

Every op has the attributes kernel, stride, padding, dilation and ceil_mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from graphflow.errors import ShapeError
from graphflow.ir.op import Cost
from graphflow.ir.spec import Shape, TensorSpec, equate, show_shape, spec
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.kernels.jit.thread_pool import run_parts
from graphflow.ops.windows.window_arguments import Ints, Pairs, Windows, position_count


def pooled_shape(
    x: TensorSpec, kernel: Ints, stride: Ints, padding: Pairs, dilation: Ints, ceil_mode: bool
) -> Shape:
    """Return (batch, channels, *positions)."""
    if x.rank != len(kernel) + 2:
        raise ShapeError(f"expected x of (batch, channels, *space), got {show_shape(x.shape)}")
    axes = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    return (*x.shape[:2], *(position_count(*axis, ceil_mode) for axis in axes))


def windows_of(
    out: Any, kernel: Ints, stride: Ints, padding: Any, dilation: Ints, **attrs: Any
) -> Windows:
    """Return the windows of an op from its attributes and its array of positions."""
    return Windows.from_attributes(kernel, stride, padding, dilation, out.shape[2:])


def require_pooled(x: TensorSpec, y: TensorSpec, attrs: Any) -> TensorSpec:
    """Return y; refuse it unless it has a value for each window of x."""
    shape = pooled_shape(x, **attrs)
    if len(shape) != y.rank:
        raise ShapeError(
            f"expected a value for each window of {show_shape(x.shape)}, {show_shape(shape)}, got "
            f"{show_shape(y.shape)}"
        )
    for have, want in zip(y.shape, shape, strict=True):
        equate(have, want, f"{show_shape(y.shape)}, windows {show_shape(shape)}")
    return y


def infer_put(g: TensorSpec, chosen: TensorSpec, sizes: Shape, **attrs: Any) -> TensorSpec:
    """Infer the spec with spatial `sizes` that the transpose of pooling gives."""
    whole = g.with_shape((*g.shape[:2], *sizes))
    require_pooled(whole, g, attrs)
    return whole


def pooling_cost(x: TensorSpec, *others: TensorSpec, kernel: Ints, **attrs: Any) -> Cost:
    return Cost(flops=(others[0] if others else x).size * math.prod(kernel))


def infer_pooling(x: TensorSpec, **attrs: Any) -> TensorSpec:
    """Infer the spec of a pooling result."""
    require_kind(x, "int", "float")
    return x.with_shape(pooled_shape(x, **attrs))


def repeat_on_axes(
    rank: int,
    kernel: int,
    stride: int = 1,
    padding: Any = (0, 0),
    dilation: int = 1,
    ceil_mode: bool = False,
) -> dict[str, Any]:
    """Return attributes that are the same on each of `rank` axes."""
    return {
        "kernel": (kernel,) * rank,
        "stride": (stride,) * rank,
        "padding": (tuple(padding),) * rank,
        "dilation": (dilation,) * rank,
        "ceil_mode": ceil_mode,
    }


LINE, IMAGE = spec("float32", (3, 2, 7)), spec("float32", (2, 2, 5, 4))
OVERLAP = repeat_on_axes(2, 3, stride=2, padding=(1, 1))
CEIL = repeat_on_axes(1, 2, stride=3, padding=(0, 1), dilation=2, ceil_mode=True)
CASES = ((IMAGE, (2, 2, 3, 2), OVERLAP), (LINE, (3, 2, 3), CEIL))


_PIECE_ELEMENTS = 1 << 16


def run_in_pieces(into: Callable[..., None]) -> Callable[..., None]:
    """Return a version of `into` that runs on pieces of (batch, channels).

    Pieces stay in the cache, and threads share them.
    """

    def pieces(xp: Any, out: Any, *arrays: Any, **attrs: Any) -> None:
        planes = out.shape[0] * out.shape[1]
        largest = max(math.prod(a.shape[2:]) for a in (out, *arrays))
        each = max(1, _PIECE_ELEMENTS // max(1, largest))
        if xp is not np or planes <= each:
            into(xp, out, *arrays, **attrs)
            return
        flat = [a.reshape(1, planes, *a.shape[2:]) for a in (out, *arrays)]

        def part(i: int) -> None:
            cut = slice(i * each, (i + 1) * each)
            into(xp, *(a[:, cut] for a in flat), **attrs)

        run_parts(part, -(-planes // each))

    return pieces

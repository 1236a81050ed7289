"""Maximum pooling, and the taps of the largest elements.

`max_pool_taps` gives the tap of each window's largest element. Given the taps, reading these
elements and putting cotangents back are linear ops, each the other's gradient.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.ir.op import Cost, Op, register, sample
from graphflow.ir.spec import TensorSpec, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import kernel_from_into
from graphflow.ops.kernels.images import pooling as native
from graphflow.ops.windows import sharding_rules as window_sharding
from graphflow.ops.windows.pooling_rules import (
    CASES,
    infer_pooling,
    infer_put,
    pooling_cost,
    repeat_on_axes,
    require_pooled,
    run_in_pieces,
    windows_of,
)
from graphflow.ops.windows.window_arguments import Ints, Windows, taps

# The largest element ----------------------------------------------------------------------------


def _smallest_value(dtype: Any) -> Any:
    return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def _max_into(xp: Any, out: Any, x: Any, **attrs: Any) -> None:
    windows = windows_of(out, **attrs)
    if native.is_supported(xp, x, windows):
        native.max_pool(out, x, windows)
    else:
        _plain_max(xp, out, x, **attrs)


@run_in_pieces
def _plain_max(xp: Any, out: Any, x: Any, **attrs: Any) -> None:
    windows = windows_of(out, **attrs)
    rank = len(windows.kernel)
    # One axis after the other: the work grows with the sum of kernel sizes, not their product.
    source = x
    for axis in reversed(range(rank)):
        at = 2 + axis
        shape = (*source.shape[:at], out.shape[at], *source.shape[at + 1 :])
        target = out if axis == 0 else xp.empty(shape, x.dtype)
        _max_along(xp, target, source, at, windows.on_axis(axis))
        source = target


def _max_along(xp: Any, out: Any, x: Any, at: int, windows: Windows) -> None:
    lead = (slice(None),) * at
    begun = False
    for _, where, elements in taps((x.shape[at],), windows):
        place, element = lead + where[1:], lead + elements[1:]
        whole = where[1] == slice(0, out.shape[at])
        if whole and not begun:
            xp.copyto(out, x[element])
            begun = True
            continue
        if not begun:
            out[...] = _smallest_value(out.dtype)
            begun = True
        view = out[place]
        xp.maximum(view, x[element], out=view)
    if not begun:
        out[...] = _smallest_value(out.dtype)


def _tap_dtype(kernel: Ints) -> np.dtype[Any]:
    return np.dtype("uint8" if math.prod(kernel) <= 256 else "int32")


def _infer_taps(x: TensorSpec, y: TensorSpec, **attrs: Any) -> TensorSpec:
    return require_pooled(x, y, attrs).with_dtype(_tap_dtype(attrs["kernel"]))


def _taps_into(xp: Any, out: Any, x: Any, y: Any, **attrs: Any) -> None:
    windows = windows_of(out, **attrs)
    if native.is_supported(xp, x, windows):
        native.max_taps(out, x, y, windows)
    else:
        _plain_taps(xp, out, x, y, **attrs)


@run_in_pieces
def _plain_taps(xp: Any, out: Any, x: Any, y: Any, **attrs: Any) -> None:
    windows = windows_of(out, **attrs)
    # On a GPU, reading the results back would cost more than one more comparison.
    unordered = x.dtype.kind == "f" and (xp is not np or bool(np.isnan(y).any()))
    out[...] = 0
    # From the last tap to the first, so that the first of equal elements stays.
    for number, where, elements in reversed(list(taps(x.shape[2:], windows))):
        found = x[elements] == y[where]
        if unordered:
            found |= xp.isnan(x[elements])
        # chosen += (number - chosen)·found in wrapping arithmetic, which is fast for small ints.
        chosen = out[where]
        change = out.dtype.type(number) - chosen
        xp.multiply(change, found, out=change)
        xp.add(chosen, change, out=chosen)


@run_in_pieces
def _take_into(xp: Any, out: Any, x: Any, chosen: Any, **attrs: Any) -> None:
    out[...] = 0
    for number, where, elements in taps(x.shape[2:], windows_of(out, **attrs)):
        xp.copyto(out[where], x[elements], where=chosen[where] == number)


def _put_into(xp: Any, out: Any, g: Any, chosen: Any, sizes: Ints, **attrs: Any) -> None:
    windows = windows_of(g, **attrs)
    if native.is_supported(xp, g, windows):
        native.scatter_to_taps(out, g, chosen, windows)
    else:
        _plain_put(xp, out, g, chosen, sizes=sizes, **attrs)


@run_in_pieces
def _plain_put(xp: Any, out: Any, g: Any, chosen: Any, sizes: Ints, **attrs: Any) -> None:
    out[...] = 0
    for number, where, elements in taps(sizes, windows_of(g, **attrs)):
        view = out[elements]
        # Select instead of multiplying by 0: an infinite gradient would make other elements NaN.
        xp.add(view, xp.where(chosen[where] == number, g[where], g.dtype.type(0)), out=view)


max_pool_op: Op = register(
    Op(
        "max_pool",
        infer=infer_pooling,
        kernel=kernel_from_into(infer_pooling, _max_into),
        into=_max_into,
        records=True,
        vjp=lambda g, y, x, **attrs: (
            pool_put_op(g, max_pool_taps_op(x, y, **attrs), sizes=x.shape[2:], **attrs),
        ),
        batch=batching.merge_batches,
        sharding=window_sharding.pool(),
        cost=pooling_cost,
        samples=(
            *(sample(x, **attrs) for x, _, attrs in CASES),
            sample(spec("int32", (1, 2, 3, 2, 3)), **repeat_on_axes(3, 2)),
        ),
    )
)
# The number of the tap, in row-major order, at which each window of x has its largest element y;
# the first of equals.
max_pool_taps_op: Op = register(
    Op(
        "max_pool_taps",
        infer=_infer_taps,
        kernel=kernel_from_into(_infer_taps, _taps_into),
        into=_taps_into,
        records=True,
        batch=batching.merge_batches,
        sharding=window_sharding.pool(),
        cost=pooling_cost,
        samples=tuple(sample(x, spec("float32", shape), **attrs) for x, shape, attrs in CASES),
    )
)
# The element of each window at a tap.
pool_take_op: Op = register(
    Op(
        "pool_take",
        infer=lambda x, chosen, **attrs: x.with_shape(require_pooled(x, chosen, attrs).shape),
        kernel=lambda xp, x, chosen, **attrs: _take_kernel(xp, x, chosen, attrs),
        into=_take_into,
        vjp=lambda g, y, x, chosen, **attrs: (
            pool_put_op(g, chosen, sizes=x.shape[2:], **attrs),
            None,
        ),
        batch=batching.merge_batches,
        sharding=window_sharding.pool(),
        cost=pooling_cost,
        samples=tuple(
            sample(x, spec("uint8", shape), **attrs, classes=2) for x, shape, attrs in CASES
        ),
    )
)
# Its transpose: for each element the sum of the windows' values whose tap lies on it.
pool_put_op: Op = register(
    Op(
        "pool_put",
        infer=infer_put,
        kernel=kernel_from_into(infer_put, _put_into),
        into=_put_into,
        records=True,
        vjp=lambda h, y, g, chosen, sizes, **attrs: (pool_take_op(h, chosen, **attrs), None),
        batch=batching.merge_batches,
        sharding=window_sharding.pool_transpose(2),
        cost=pooling_cost,
        samples=tuple(
            sample(
                spec("float32", shape),
                spec("uint8", shape),
                sizes=x.shape[2:],
                **attrs,
                classes=2,
            )
            for x, shape, attrs in CASES
        ),
    )
)


def _take_kernel(xp: Any, x: Any, chosen: Any, attrs: Any) -> Any:
    out = xp.empty(chosen.shape, x.dtype)
    _take_into(xp, out, x, chosen, **attrs)
    return out


# Positions of the largest elements, for users


def _positions_into(xp: Any, out: Any, chosen: Any, sizes: Ints, **attrs: Any) -> None:
    windows = windows_of(out, **attrs)
    rest = chosen.astype(np.int64)
    out[...] = 0
    step = 1
    for axis in reversed(range(len(sizes))):
        kernel = windows.kernel[axis]
        shape = (-1,) + (1,) * (len(sizes) - axis - 1)
        first = (xp.arange(windows.out[axis]) * windows.stride[axis]).reshape(shape)
        out += (first + rest % kernel * windows.dilation[axis] - windows.before[axis]) * step
        rest //= kernel
        step *= sizes[axis]


def _positions_kernel(xp: Any, chosen: Any, **attrs: Any) -> Any:
    out = xp.empty(chosen.shape, np.int64)
    _positions_into(xp, out, chosen, **attrs)
    return out


# Taps as positions in the flattened spatial axes.
tap_positions_op: Op = register(
    Op(
        "tap_positions",
        infer=lambda chosen, **attrs: chosen.with_dtype("int64"),
        kernel=_positions_kernel,
        into=_positions_into,
        batch=batching.merge_batches,
        cost=lambda chosen, **attrs: Cost(flops=chosen.size * 6 * len(attrs["sizes"])),
        samples=tuple(
            sample(spec("uint8", shape), sizes=x.shape[2:], **attrs) for x, shape, attrs in CASES
        ),
    )
)

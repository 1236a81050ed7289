"""Means and sums of windows, and their transpose: each is the other's gradient."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from graphflow.ir.op import Op, register, sample
from graphflow.ir.spec import Shape, TensorSpec, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import kernel_from_into, require_kind
from graphflow.ops.kernels.images import pooling as native
from graphflow.ops.windows import sharding_rules as window_sharding
from graphflow.ops.windows.pooling_rules import (
    CASES,
    IMAGE,
    OVERLAP,
    infer_put,
    pooled_shape,
    pooling_cost,
    run_in_pieces,
    windows_of,
)
from graphflow.ops.windows.window_arguments import Ints, Windows, taps

# Means ------------------------------------------------------------------------------------------


def _infer_mean(x: TensorSpec, divisor: Any, **attrs: Any) -> TensorSpec:
    require_kind(x, "float")
    return x.with_shape(pooled_shape(x, **attrs))


def _factors(n: int, windows: Windows, after: int, divisor: str) -> list[float]:
    """Return 1 / the number of elements that each window of one axis counts."""
    ((kernel,), (stride,), (before,), (dilation,), (out,)) = windows
    low, high = (0, n) if divisor == "inside" else (-before, n + after)
    return [
        1.0 / max(1, sum(low <= o * stride - before + k * dilation < high for k in range(kernel)))
        for o in range(out)
    ]


def _all_factors(sizes: Ints, windows: Windows, padding: Any, divisor: Any) -> Any:
    """Return the factor of each window's sum, in float64."""
    if not isinstance(divisor, str):
        return np.full(windows.out, 1.0 / divisor)
    total: Any = 1.0
    for axis, n in enumerate(sizes):
        one = windows.on_axis(axis)
        factors = np.asarray(_factors(n, one, padding[axis][1], divisor))
        total = np.multiply.outer(total, factors)
    return total


@lru_cache(maxsize=64)
def _cached_factors(sizes: Ints, windows: Windows, padding: Any, divisor: Any) -> Any:
    """Return the factors in float32, for kernels."""
    return np.ascontiguousarray(_all_factors(sizes, windows, padding, divisor), np.float32)


def _scale_sums(xp: Any, y: Any, sizes: Ints, windows: Windows, padding: Any, divisor: Any) -> None:
    """Multiply sums over windows, in place, by their factors."""
    if divisor == 1:
        return
    total = _all_factors(sizes, windows, padding, divisor)
    if total.size and (total == total.flat[0]).all():
        total = total.reshape(-1)[0]
    xp.multiply(y, xp.asarray(total, y.dtype), out=y)


def _mean_into(xp: Any, out: Any, x: Any, divisor: Any, **attrs: Any) -> None:
    windows = windows_of(out, **attrs)
    if native.is_supported(xp, x, windows):
        padding = tuple(map(tuple, attrs["padding"]))
        native.mean_pool(out, x, _cached_factors(x.shape[2:], windows, padding, divisor), windows)
    else:
        _plain_mean(xp, out, x, divisor=divisor, **attrs)


@run_in_pieces
def _plain_mean(xp: Any, out: Any, x: Any, divisor: Any, **attrs: Any) -> None:
    windows = windows_of(out, **attrs)
    source = x
    for axis in reversed(range(len(windows.kernel))):
        at = 2 + axis
        lead = (slice(None),) * at
        one = windows.on_axis(axis)
        shape = (*source.shape[:at], out.shape[at], *source.shape[at + 1 :])
        target = out if axis == 0 else xp.empty(shape, x.dtype)
        begun = False
        for _, where, elements in taps((source.shape[at],), one):
            view = target[lead + where[1:]]
            if not begun and where[1] == slice(0, out.shape[at]):
                xp.copyto(view, source[lead + elements[1:]])
            else:
                if not begun:
                    target[...] = 0
                xp.add(view, source[lead + elements[1:]], out=view)
            begun = True
        if not begun:
            target[...] = 0
        source = target
    _scale_sums(xp, out, x.shape[2:], windows, attrs["padding"], divisor)


def _infer_spread(g: TensorSpec, sizes: Shape, divisor: Any, **attrs: Any) -> TensorSpec:
    return infer_put(g, g, sizes, **attrs)


def _spread_into(xp: Any, out: Any, g: Any, sizes: Ints, divisor: Any, **attrs: Any) -> None:
    windows = windows_of(g, **attrs)
    if native.is_supported(xp, g, windows):
        padding = tuple(map(tuple, attrs["padding"]))
        native.scatter_means(
            out, g, _cached_factors(tuple(sizes), windows, padding, divisor), windows
        )
    else:
        _plain_spread(xp, out, g, sizes=sizes, divisor=divisor, **attrs)


@run_in_pieces
def _plain_spread(xp: Any, out: Any, g: Any, sizes: Ints, divisor: Any, **attrs: Any) -> None:
    windows = windows_of(g, **attrs)
    source = g.copy()
    _scale_sums(xp, source, sizes, windows, attrs["padding"], divisor)
    for axis, n in enumerate(sizes):
        at = 2 + axis
        lead = (slice(None),) * at
        one = windows.on_axis(axis)
        shape = (*source.shape[:at], n, *source.shape[at + 1 :])
        target = out if axis == len(sizes) - 1 else xp.empty(shape, g.dtype)
        target[...] = 0
        for _, where, elements in taps((n,), one):
            view = target[lead + elements[1:]]
            xp.add(view, source[lead + where[1:]], out=view)
        source = target


_MEANS = [(*case, divisor) for case, divisor in zip(CASES, ("padded", "inside"), strict=True)]
_SUM = (IMAGE, (2, 2, 3, 2), OVERLAP, 1)

avg_pool_op: Op = register(
    Op(
        "avg_pool",
        infer=_infer_mean,
        kernel=kernel_from_into(_infer_mean, _mean_into),
        into=_mean_into,
        records=True,
        vjp=lambda g, y, x, **attrs: (avg_spread_op(g, sizes=x.shape[2:], **attrs),),
        batch=batching.merge_batches,
        sharding=window_sharding.pool(),
        cost=pooling_cost,
        samples=tuple(
            sample(x, **attrs, divisor=divisor) for x, _, attrs, divisor in (*_MEANS, _SUM)
        ),
    )
)
avg_spread_op: Op = register(
    Op(
        "avg_pool_grad",
        infer=_infer_spread,
        kernel=kernel_from_into(_infer_spread, _spread_into),
        into=_spread_into,
        records=True,
        vjp=lambda h, y, g, sizes, **attrs: (avg_pool_op(h, **attrs),),
        batch=batching.merge_batches,
        sharding=window_sharding.pool_transpose(1),
        cost=pooling_cost,
        samples=tuple(
            sample(spec("float32", shape), **attrs, sizes=x.shape[2:], divisor=divisor)
            for x, shape, attrs, divisor in (*_MEANS, _SUM)
        ),
    )
)

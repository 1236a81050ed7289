"""Convolution as matrix products: windows are copied side by side into columns, block by block.

A block is some images, or some rows of one image. Its size depends on the shapes alone, so threads
do not change bits, and its columns stay in the cache. Arrays are (images, channels, *space),
weights (outputs, inputs of a group, *kernel).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.jit.kernel_recording import ArrayStandIn
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import run_parts
from graphflow.ops.windows.window_arguments import Ints, Windows

_BLOCK_ELEMENTS = 1 << 18  # elements of a block's columns
_GPU_BLOCK_ELEMENTS = 1 << 26
_NARROW_COLUMNS = 256  # columns below which products are slow; several images then share a block


class ColumnBlock(NamedTuple):
    """Images and rows (positions on the first spatial axis) that are computed together."""

    images: slice
    rows: slice


def plan_blocks(xp: Any, images: int, height: int, out: Ints) -> list[ColumnBlock]:
    """Return the blocks for columns of `height` elements each."""
    rest, rows = math.prod(out[1:]), out[0]
    width = max(
        _NARROW_COLUMNS, (_BLOCK_ELEMENTS if xp is np else _GPU_BLOCK_ELEMENTS) // max(1, height)
    )
    if rest * rows >= width:
        parts = -(-rows // max(1, width // max(1, rest)))
        edges = [rows * i // parts for i in range(parts + 1)]
        cuts = [slice(a, b) for a, b in pairwise(edges)]
        return [ColumnBlock(slice(n, n + 1), cut) for n in range(images) for cut in cuts]
    together = max(1, width // max(1, rest * rows))
    parts = -(-images // together)
    edges = [images * i // max(1, parts) for i in range(parts + 1)]
    return [ColumnBlock(slice(a, b), slice(0, rows)) for a, b in pairwise(edges)]


def padded_slab(xp: Any, x: Any, windows: Windows, block: ColumnBlock) -> Any:
    """Return the elements that the windows of a block see, (images, channels, *elements).

    Padding is zeros; without padding the result is a view.
    """
    rows = block.rows
    inside: list[slice] = []  # of x
    target: list[slice] = []  # of the slab
    shape: list[int] = []
    for axis, n in enumerate(x.shape[2:]):
        first, last = (rows.start, rows.stop - 1) if axis == 0 else (0, windows.out[axis] - 1)
        stride, before = windows.stride[axis], windows.before[axis]
        low = first * stride - before
        span = (windows.kernel[axis] - 1) * windows.dilation[axis] + 1
        high = last * stride - before + span
        shape.append(high - low)
        start, stop = min(max(low, 0), n), max(min(high, n), 0)
        inside.append(slice(start, max(start, stop)))
        target.append(slice(start - low, max(start, stop) - low))
    part = x[(block.images, slice(None), *inside)]
    if part.shape[2:] == tuple(shape):
        return part
    result = scratch(xp, "slab", (*part.shape[:2], *shape), x.dtype)
    result[...] = 0
    result[(slice(None), slice(None), *target)] = part
    return result


def gather_columns(xp: Any, x: Any, windows: Windows, block: ColumnBlock) -> Any:
    """Return the windows of a block as a matrix (channels·taps, images·positions).

    It is in scratch memory, or x itself if a window is one element.
    """
    source = padded_slab(xp, x, windows, block)
    out = (block.rows.stop - block.rows.start, *windows.out[1:])
    if source.shape[0] == 1 and source.shape[2:] == out and set(windows.kernel) == {1}:
        return source.reshape(source.shape[1], math.prod(out))
    shape = (source.shape[1], *windows.kernel, source.shape[0], *out)
    result = scratch(xp, "columns", shape, x.dtype)
    if not isinstance(source, ArrayStandIn):
        xp.copyto(result, _window_view(xp, source, windows, shape))
    height = source.shape[1] * math.prod(windows.kernel)
    return result.reshape(height, source.shape[0] * math.prod(out))


def _window_view(xp: Any, x: Any, windows: Windows, shape: Ints) -> Any:
    """Return a view of the windows of x, (channels, *kernel, images, *positions)."""
    n, c, *space = x.strides
    by_taps = (s * d for s, d in zip(space, windows.dilation, strict=True))
    by_positions = (s * d for s, d in zip(space, windows.stride, strict=True))
    return xp.lib.stride_tricks.as_strided(x, shape, (c, *by_taps, n, *by_positions))


def run_on_device(xp: Any, part: Callable[[int], None], parts: int) -> None:
    """Run all parts, on the threads of the device if it is a CPU."""
    if xp is np:
        run_parts(part, parts)
    else:
        for i in range(parts):
            part(i)


# Correlation ------------------------------------------------------------------------------------


def convolve(xp: Any, out: Any, x: Any, w: Any, windows: Windows, groups: int) -> None:
    """Write out[n, o, p] = Σ w[o, c, k] · x[n, c, p·stride - before + k·dilation]."""
    images, outputs = out.shape[:2]
    size = math.prod(windows.out)
    height = math.prod(w.shape[1:])
    matrix = w.reshape(groups, outputs // groups, height)
    plan = plan_blocks(xp, images, groups * height, windows.out)
    flat = out.reshape(images, groups, outputs // groups, size)
    rest = size // max(1, windows.out[0])

    def part(i: int) -> None:
        block = plan[i]
        stacked = gather_columns(xp, x, windows, block).reshape(groups, height, -1)
        first = block.images.start
        if block.images.stop - first == 1:
            cut = slice(block.rows.start * rest, block.rows.stop * rest)
            if xp is np:
                np.matmul(matrix, stacked, out=flat[first, :, :, cut])
            else:  # CuPy takes no strided `out`
                flat[first, :, :, cut] = xp.matmul(matrix, stacked)
            return
        shape = (groups, outputs // groups, stacked.shape[2])
        products = scratch(xp, "products", shape, out.dtype)
        xp.matmul(matrix, stacked, out=products)
        several = products.reshape(outputs, -1, size).swapaxes(0, 1)
        xp.copyto(out[block.images].reshape(-1, outputs, size), several)

    run_on_device(xp, part, len(plan))


# Its adjoint in x -------------------------------------------------------------------------------


def input_gradient(xp: Any, out: Any, g: Any, w: Any, windows: Windows, groups: int) -> None:
    """Write out[n, c, p·stride - before + k·dilation] += w[o, c, k] · g[n, o, p], from zeros.

    A part owns some channels of some images, whose sums no other part touches.
    """
    images, channels = out.shape[:2]
    taps, size = math.prod(windows.kernel), math.prod(windows.out)
    inputs, outputs = channels // groups, g.shape[1] // groups
    together = min(images, max(1, _NARROW_COLUMNS // max(1, size)))
    limit = _BLOCK_ELEMENTS if xp is np else _GPU_BLOCK_ELEMENTS
    wanted = max(1, limit // max(1, taps * size * together))
    # Either some whole groups, or some channels of one group.
    several, each = max(1, wanted // inputs), min(inputs, max(wanted, 16))
    plan = [
        (slice(n, n + together), slice(q, q + several), slice(c, c + each))
        for n in range(0, images, together)
        for q in range(0, groups, several)
        for c in range(0, inputs, each)
    ]
    weights = w.reshape(groups, outputs, inputs, taps)
    cotangents = g.reshape(images, groups, outputs, size)
    result = out.reshape(images, groups, inputs, *out.shape[2:])

    def part(i: int) -> None:
        some, group, channel = plan[i]
        left = weights[group, :, channel]
        count, width = left.shape[0], left.shape[2]
        left = left.reshape(count, outputs, width * taps).swapaxes(1, 2)
        right = cotangents[some, group]
        number = right.shape[0]
        if number == 1:
            right = right[0]
        else:
            right = scratch(xp, "products", (count, outputs, number, size), out.dtype)
            xp.copyto(right, cotangents[some, group].transpose(1, 2, 0, 3))
            right = right.reshape(count, outputs, number * size)
        products = scratch(xp, "columns", (count, width * taps, number * size), out.dtype)
        xp.matmul(left, right, out=products)
        stacked = products.reshape(count, width, taps, number, *windows.out)
        target = xp.moveaxis(result[some, group, channel], 0, 2)
        add_windows(xp, target, xp.moveaxis(stacked, 2, 3), windows)

    run_on_device(xp, part, len(plan))


def add_windows(xp: Any, out: Any, stacked: Any, windows: Windows) -> None:
    """Add out[…, elements of tap k] += stacked[…, k, positions], from zeros, taps in order."""
    lead = out.ndim - len(windows.kernel)
    sizes = out.shape[lead:]
    low = [-b for b in windows.before]
    high = [(o - 1) * s + (k - 1) * d + 1 - b for k, s, b, d, o in zip(*windows, strict=True)]
    starts = [min(0, a) for a in low]
    total = [max(n, b) - a for n, a, b in zip(sizes, starts, high, strict=True)]
    inside = tuple(slice(-a, n - a) for a, n in zip(starts, sizes, strict=True))
    whole = tuple(total) == tuple(sizes)
    sums = out if whole else scratch(xp, "slab", (*out.shape[:lead], *total), out.dtype)
    sums[...] = 0
    for number, tap in enumerate(np.ndindex(*windows.kernel)):
        where = tuple(
            slice(k * d + a - s0, k * d + a - s0 + (o - 1) * s + 1, s)
            for k, d, a, s0, o, s in zip(
                tap, windows.dilation, low, starts, windows.out, windows.stride, strict=True
            )
        )
        view = sums[(..., *where)]
        xp.add(view, stacked[(slice(None),) * lead + (number,)], out=view)
    if not whole:
        xp.copyto(out, sums[(..., *inside)])


# Its adjoint in w -------------------------------------------------------------------------------

_MOST_PARTS = 8  # parts into which the channels, or else the blocks, are split
_LEAST_COLUMNS = 128


def weight_gradient(xp: Any, out: Any, x: Any, g: Any, windows: Windows, groups: int) -> None:
    """Write out[o, c, k] = Σ g[n, o, p] · x[n, c, p·stride - before + k·dilation].

    Parts take channels of their own. If there are few channels, parts take blocks of their own,
    whose sums are added in order at the end.
    """
    outputs, inputs = out.shape[:2]
    taps = math.prod(windows.kernel)
    each = inputs
    if groups == 1 and xp is np:
        each = min(inputs, max(-(-_LEAST_COLUMNS // taps), -(-inputs // _MOST_PARTS)))
    cuts = [slice(c, min(c + each, inputs)) for c in range(0, inputs, each)]
    plan = plan_blocks(xp, x.shape[0], groups * each * taps, windows.out)
    shares = (
        1 if len(cuts) >= _MOST_PARTS // 2 else max(1, min(_MOST_PARTS // len(cuts), len(plan)))
    )
    result = out.reshape(groups, outputs // groups, inputs, taps)
    several = (shares, *result.shape)
    sums = scratch(xp, "sums of shares", several, out.dtype) if shares > 1 else result[None]

    def part(i: int) -> None:
        share, cut = divmod(i, len(cuts))
        channels = cuts[cut]
        source = x if len(cuts) == 1 else x[:, channels]
        mine = plan[len(plan) * share // shares : len(plan) * (share + 1) // shares]
        total = _weight_sum(xp, source, g, windows, groups, mine)
        target = sums[share, :, :, channels]
        xp.copyto(target, 0 if total is None else total.reshape(target.shape))

    run_on_device(xp, part, shares * len(cuts))
    if shares > 1:
        xp.sum(sums, axis=0, out=result)


def _weight_sum(
    xp: Any, x: Any, g: Any, windows: Windows, groups: int, plan: list[ColumnBlock]
) -> Any:
    """Return Σ over blocks of g @ columnsᵀ: (groups, outputs of a group, channels·taps)."""
    images, outputs = g.shape[:2]
    size = math.prod(windows.out)
    rest = size // max(1, windows.out[0])
    flat = g.reshape(images, groups, outputs // groups, size)
    total = None
    for block in plan:
        stacked = gather_columns(xp, x, windows, block)
        stacked = stacked.reshape(groups, -1, stacked.shape[1]).swapaxes(1, 2)
        first = block.images.start
        if block.images.stop - first == 1:
            left = flat[first, :, :, block.rows.start * rest : block.rows.stop * rest]
        else:
            view = flat[block.images].transpose(1, 2, 0, 3)
            left = scratch(xp, "products", view.shape, g.dtype)
            xp.copyto(left, view)
            left = left.reshape(groups, outputs // groups, -1)
        shape = (groups, left.shape[1], stacked.shape[2])
        added = scratch(xp, "total" if total is None else "added", shape, g.dtype)
        xp.matmul(left, stacked, out=added)
        if total is None:
            total = added
        else:
            xp.add(total, added, out=total)
    return total

"""Depthwise convolution (each channel by itself): small products on pieces that stay in the cache.

With stride 1 a tap is a shift of the flattened padded image, so that numpy copies long runs; what
is computed between the rows is dropped. Arrays as in `columns`, weights (channels·m, 1, *kernel).
"""

from __future__ import annotations

import math
from typing import Any

from graphflow.ops.kernels.conv.im2col import ColumnBlock, add_windows, padded_slab, run_on_device
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.windows.window_arguments import Ints, Windows

_CACHED = 1 << 17  # elements of a piece's columns


def _plan_parts(images: int, channels: int, elements: int) -> list[tuple[int, slice]]:
    """(image, channels) of each piece; a channel has so many elements."""
    each = max(1, min(channels, _CACHED // max(1, elements)))
    return [
        (n, slice(c, min(c + each, channels)))
        for n in range(images)
        for c in range(0, channels, each)
    ]


def _gather_taps(xp: Any, x: Any, n: int, cut: slice, windows: Windows) -> tuple[Any, Ints]:
    """What each tap sees, (channels, taps, run), and how positions are strided in a run."""
    source = padded_slab(
        xp, x[:, cut], windows, ColumnBlock(slice(n, n + 1), slice(0, windows.out[0]))
    )
    space = source.shape[2:]
    count = source.shape[1]
    _, channel, *steps = source.strides
    taps = tuple(s * d for s, d in zip(steps, windows.dilation, strict=True))
    if set(windows.stride) == {1} and source.flags.c_contiguous:
        strides = tuple(math.prod(space[i + 1 :]) for i in range(len(space)))
        length = 1 + sum((o - 1) * s for o, s in zip(windows.out, strides, strict=True))
        shape: Ints = (count, *windows.kernel, length)
        view_strides = (channel, *taps, source.itemsize)
    else:
        strides = tuple(math.prod(windows.out[i + 1 :]) for i in range(len(space)))
        shape = (count, *windows.kernel, *windows.out)
        moves = tuple(s * d for s, d in zip(steps, windows.stride, strict=True))
        view_strides = (channel, *taps, *moves)
    view = xp.lib.stride_tricks.as_strided(source, shape, view_strides)
    result = scratch(xp, "columns", shape, x.dtype)
    xp.copyto(result, view)
    return result.reshape(count, math.prod(windows.kernel), -1), strides


def _view_positions(xp: Any, runs: Any, strides: Ints, out: Ints) -> Any:
    """The elements at the positions, (channels, m, *out), of runs (channels, m, run)."""
    steps = tuple(s * runs.itemsize for s in strides)
    return xp.lib.stride_tricks.as_strided(
        runs, (*runs.shape[:2], *out), (*runs.strides[:2], *steps)
    )


def convolve(xp: Any, out: Any, x: Any, w: Any, windows: Windows) -> None:
    """out[n, c·m + j, p] = Σ w[c·m + j, 0, k] · x[n, c, p·stride - before + k·dilation]."""
    images, channels = x.shape[:2]
    many, taps = out.shape[1] // channels, math.prod(windows.kernel)
    weights = w.reshape(channels, many, taps)
    result = out.reshape(images, channels, many, *windows.out)
    plan = _plan_parts(images, channels, taps * math.prod(windows.out))

    def part(i: int) -> None:
        n, cut = plan[i]
        stacked, strides = _gather_taps(xp, x, n, cut, windows)
        shape = (stacked.shape[0], many, stacked.shape[2])
        sums = scratch(xp, "products", shape, out.dtype)
        xp.matmul(weights[cut], stacked, out=sums)
        xp.copyto(result[n, cut], _view_positions(xp, sums, strides, windows.out))

    run_on_device(xp, part, len(plan))


def input_gradient(xp: Any, out: Any, g: Any, w: Any, windows: Windows) -> None:
    """out[n, c, p·stride - before + k·dilation] += w[c·m + j, 0, k] · g[n, c·m + j, p]."""
    images, channels = out.shape[:2]
    many, taps = g.shape[1] // channels, math.prod(windows.kernel)
    size = math.prod(windows.out)
    weights = w.reshape(channels, many, taps)
    cotangents = g.reshape(images, channels, many, size)
    plan = _plan_parts(images, channels, taps * size)

    def part(i: int) -> None:
        n, cut = plan[i]
        mine = cotangents[n, cut]
        stacked = scratch(xp, "columns", (mine.shape[0], taps, size), out.dtype)
        if many == 1:
            xp.multiply(weights[cut].swapaxes(1, 2), mine, out=stacked)
        else:
            xp.matmul(weights[cut].swapaxes(1, 2), mine, out=stacked)
        add_windows(xp, out[n, cut], stacked.reshape(-1, taps, *windows.out), windows)

    run_on_device(xp, part, len(plan))


def weight_gradient(xp: Any, out: Any, x: Any, g: Any, windows: Windows) -> None:
    """out[c·m + j, 0, k] = Σ g[n, c·m + j, p] · x[n, c, p·stride - before + k·dilation].

    A part does all images of its channels.
    """
    images, channels = x.shape[:2]
    many, taps = g.shape[1] // channels, math.prod(windows.kernel)
    result = out.reshape(channels, many, taps)
    cotangents = g.reshape(images, channels, many, *windows.out)
    plan = [cut for _, cut in _plan_parts(1, channels, taps * math.prod(windows.out))]

    def part(i: int) -> None:
        cut = plan[i]
        for n in range(images):
            stacked, strides = _gather_taps(xp, x, n, cut, windows)
            shape = (stacked.shape[0], many, stacked.shape[2])
            runs = scratch(xp, "products", shape, out.dtype)
            if math.prod(shape[2:]) != math.prod(windows.out):
                runs[...] = 0
            xp.copyto(_view_positions(xp, runs, strides, windows.out), cotangents[n, cut])
            sums = xp.matmul(runs, stacked.swapaxes(1, 2))
            if n:
                xp.add(result[cut], sums, out=result[cut])
            else:
                xp.copyto(result[cut], sums)

    run_on_device(xp, part, len(plan))

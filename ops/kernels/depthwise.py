"""Depthwise convolution (each channel by itself): tap by tap, on pieces that stay in the cache.

With stride 1 a tap is a shift of the flattened padded image, so that numpy works on long runs; what
is computed between the rows is dropped. Arrays as in `columns`, weights (channels·m, 1, *kernel).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.ops.kernels.columns import Block, add_windows, slab
from graphflow.ops.kernels.scratch import scratch
from graphflow.ops.kernels.threads import run_parts
from graphflow.ops.sliding import Ints, Windows

_CACHED = 1 << 16  # elements of a piece


def _pieces(images: int, channels: int, elements: int) -> list[tuple[int, slice]]:
    """(image, channels) of each piece."""
    each = max(1, min(channels, _CACHED // max(1, elements)))
    return [
        (n, slice(c, min(c + each, channels)))
        for n in range(images)
        for c in range(0, channels, each)
    ]


def _views(xp: Any, source: Any, windows: Windows) -> tuple[list[Any], Ints]:
    """For each tap, what it sees of a slab (images, channels, *elements), and in which shape.

    With stride 1 this is one run for each channel, whose elements at the positions, as strided in
    the slab, are the result.
    """
    space = source.shape[2:]
    if set(windows.stride) == {1} and source.flags.c_contiguous:
        flat = source.reshape(source.shape[1], -1)
        steps = [math.prod(space[i + 1 :]) for i in range(len(space))]
        run = 1 + sum((o - 1) * s for o, s in zip(windows.out, steps, strict=True))
        return [
            flat[:, at : at + run]
            for tap in np.ndindex(*windows.kernel)
            for at in [sum(k * d * s for k, d, s in zip(tap, windows.dilation, steps, strict=True))]
        ], (run,)
    views = []
    for tap in np.ndindex(*windows.kernel):
        where = tuple(
            slice(k * d, k * d + (o - 1) * s + 1, s)
            for k, d, o, s in zip(tap, windows.dilation, windows.out, windows.stride, strict=True)
        )
        views.append(source[(0, slice(None), *where)])
    return views, windows.out


def _padded_size(windows: Windows) -> int:
    return math.prod(
        (o - 1) * s + (k - 1) * d + 1
        for k, s, d, o in zip(
            windows.kernel, windows.stride, windows.dilation, windows.out, strict=True
        )
    )


def _at_positions(xp: Any, runs: Any, source: Any, windows: Windows) -> Any:
    """The elements at the positions, of runs (channels, run) laid out as the slab."""
    if runs.ndim == 1 + len(windows.out) and runs.shape[1:] == windows.out:
        return runs
    steps = [s // source.itemsize * runs.itemsize for s in source.strides[2:]]
    return xp.lib.stride_tricks.as_strided(
        runs, (runs.shape[0], *windows.out), (runs.strides[0], *steps)
    )


def _whole(n: int, windows: Windows) -> Block:
    return Block(slice(n, n + 1), slice(0, windows.out[0]))


def _run(xp: Any, part: Any, parts: int) -> None:
    if xp is np:
        run_parts(part, parts)
    else:
        for i in range(parts):
            part(i)


def depthwise(xp: Any, out: Any, x: Any, w: Any, windows: Windows) -> None:
    """out[n, c·m + j, p] = Σ w[c·m + j, 0, k] · x[n, c, p·stride - before + k·dilation]."""
    images, channels = x.shape[:2]
    many = out.shape[1] // channels
    weights = w.reshape(channels, many, -1)
    result = out.reshape(images, channels, many, *windows.out)
    plan = _pieces(images, channels, _padded_size(windows))

    def part(i: int) -> None:
        n, cut = plan[i]
        source = slab(xp, x[:, cut], windows, _whole(n, windows))
        views, shape = _views(xp, source, windows)
        sums = scratch(xp, "sums", (source.shape[1], *shape), out.dtype)
        product = scratch(xp, "product", sums.shape, out.dtype)
        for j in range(many):
            for number, view in enumerate(views):
                factor = weights[cut, j, number].reshape((-1,) + (1,) * len(shape))
                xp.multiply(view, factor, out=product if number else sums)
                if number:
                    xp.add(sums, product, out=sums)
            xp.copyto(result[n, cut, j], _at_positions(xp, sums, source, windows))

    _run(xp, part, len(plan))


def spread_depthwise(xp: Any, out: Any, g: Any, w: Any, windows: Windows) -> None:
    """out[n, c, p·stride - before + k·dilation] += w[c·m + j, 0, k] · g[n, c·m + j, p]."""
    images, channels = out.shape[:2]
    many, taps = g.shape[1] // channels, math.prod(windows.kernel)
    weights = w.reshape(channels, many, taps)
    cotangents = g.reshape(images, channels, many, *windows.out)
    plan = _pieces(images, channels, taps * math.prod(windows.out))
    ones = (1,) * len(windows.out)

    def part(i: int) -> None:
        n, cut = plan[i]
        mine = cotangents[n, cut]
        shape = (mine.shape[0], taps, *windows.out)
        stacked = scratch(xp, "sums", shape, out.dtype)
        for j in range(many):
            factors = weights[cut, j].reshape(-1, taps, *ones)
            if j == 0:
                xp.multiply(mine[:, None, j], factors, out=stacked)
            else:
                xp.add(stacked, mine[:, None, j] * factors, out=stacked)
        add_windows(xp, out[n, cut], stacked, windows)

    _run(xp, part, len(plan))


def depthwise_weights(xp: Any, out: Any, x: Any, g: Any, windows: Windows) -> None:
    """out[c·m + j, 0, k] = Σ g[n, c·m + j, p] · x[n, c, p·stride - before + k·dilation].

    A part does all images of its channels.
    """
    images, channels = x.shape[:2]
    many = g.shape[1] // channels
    result = out.reshape(channels, many, -1)
    cotangents = g.reshape(images, channels, many, *windows.out)
    elements = _padded_size(windows)
    plan = [cut for _, cut in _pieces(1, channels, elements)]

    def part(i: int) -> None:
        cut = plan[i]
        result[cut] = 0
        for n in range(images):
            source = slab(xp, x[:, cut], windows, _whole(n, windows))
            views, shape = _views(xp, source, windows)
            count, length = source.shape[1], math.prod(shape)
            padded = scratch(xp, "sums", (count, *shape), out.dtype)
            for j in range(many):
                padded[...] = 0
                xp.copyto(_at_positions(xp, padded, source, windows), cotangents[n, cut, j])
                row = padded.reshape(count, 1, length)
                for number, view in enumerate(views):
                    if view.ndim > 2:
                        seen = scratch(xp, "product", view.shape, out.dtype)
                        xp.copyto(seen, view)
                        view = seen.reshape(count, length)
                    result[cut, j, number] += xp.matmul(row, view[:, :, None])[:, 0, 0]

    _run(xp, part, len(plan))

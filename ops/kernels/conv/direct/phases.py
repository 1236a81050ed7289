"""Gradients in the input of strided convolutions of few channels in a group.

Forward steps of transposed convolutions are such gradients, too.

With stride s, positions r, r + s, r + 2s, … of the input (a phase) see the same taps of the weight,
every s-th one. So a phase is a convolution of stride 1 of the cotangent with these taps: a direct
one, without products with zeros and without columns. Its results are then written s apart.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.direct import direct, masked_input_gradient
from graphflow.ops.kernels.conv.direct.direct_text import copy_rows
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import run_native_parts
from graphflow.ops.windows.window_arguments import Ints, Windows


class StridePhase(NamedTuple):
    """Positions of one axis that see the same taps.

    Attributes:
        first: the first position; the next ones are a stride apart.
        out: number of positions.
        tap, kernel: the first tap that they see, and how many; these are a stride apart, too.
        before: padding of the cotangent for a window of these taps, turned round.
    """

    first: int
    out: int
    tap: int
    kernel: int
    before: int


def has_phases(windows: Windows) -> bool:
    """Return whether each position sees a tap, as the phases need it."""
    axes = zip(windows.kernel, windows.stride, windows.dilation, strict=True)
    return all(math.gcd(s, d) == 1 and k >= s for k, s, d in axes)


def axis_phases(n: int, kernel: int, stride: int, before: int, dilation: int) -> list[StridePhase]:
    """Return the phases of an axis of n positions."""
    found = []
    for first in range(min(stride, n)):
        seen = [k for k in range(kernel) if (first + before - k * dilation) % stride == 0]
        padding = (seen[-1] * dilation - first - before) // stride
        found.append(StridePhase(first, -(-(n - first) // stride), seen[0], len(seen), padding))
    return found


def input_gradient(out: Any, g: Any, w: Any, windows: Windows, groups: int) -> None:
    """Write out[n, c, p·stride - before + k·dilation] += w[o, c, k] · g[n, o, p], from zeros.

    With groups, c counts the input's channels in the group of o.
    """
    g, w = as_contiguous(g), as_contiguous(w)
    if masked_input_gradient.write_input_gradient(out, g, w, windows, groups):
        return
    kernel, stride, before, dilation, _ = windows
    axes = zip(out.shape[2:], kernel, stride, before, dilation, strict=True)
    for phases in product(*(axis_phases(*axis) for axis in axes)):
        taps = _turned_taps(w, groups, phases, stride)
        sizes = tuple(phase.out for phase in phases)
        results = scratch(np, "phase", (*out.shape[:2], *sizes), out.dtype)
        own = Windows(
            tuple(phase.kernel for phase in phases), (1,) * len(phases),
            tuple(phase.before for phase in phases), dilation, sizes,
        )  # fmt: skip
        direct.convolve(results, g, taps, own, groups)
        _spread(out, results, phases, stride)


def _turned_taps(w: Any, groups: int, phases: tuple[StridePhase, ...], stride: Ints) -> Any:
    """Return a phase's taps (c, o, *kernel), turned round, in scratch memory.

    With groups, c counts all channels and o those of its group.
    """
    outputs, inputs, *kernel = w.shape
    outputs //= groups
    sizes = [phase.kernel for phase in phases]
    taps, seen = math.prod(kernel) * 4, math.prod(sizes) * 4
    result = scratch(np, "phase taps", (groups * inputs, outputs, *sizes), w.dtype)
    rows, columns = (1, *sizes)[-2:]
    down, right = (1, *stride)[-2:]
    last = [phase.tap + (phase.kernel - 1) * s for phase, s in zip(phases, stride, strict=True)]
    y, x = (0, *last)[-2:]
    width = kernel[-1] * 4
    # One call copies the channels of a group, or those of all groups if each has one.
    calls, units, apart = (1, groups, outputs * taps) if inputs == 1 else (groups, inputs, taps)
    counts = (
        outputs, rows, columns, -down * width, inputs * taps, apart,
        columns * 4, seen, outputs * seen, -right * 4, 0,
    )  # fmt: skip
    for group in range(calls):
        source = operand_place(w) + group * outputs * inputs * taps + y * width + x * 4
        target = operand_place(result) + group * outputs * inputs * seen
        call_native(copy_rows("gather"), (source, target, target), counts, 0, units)
    return result


def _spread(out: Any, results: Any, phases: tuple[StridePhase, ...], stride: Ints) -> None:
    """Write a phase's results (images, channels, *positions) to its positions of `out`."""
    (rows, columns), (down, right) = ((1, *sizes)[-2:] for sizes in (results.shape[2:], stride))
    y, x = (0, *(phase.first for phase in phases))[-2:]
    width, plane, held = out.shape[-1] * 4, math.prod(out.shape[2:]) * 4, rows * columns * 4
    channels = out.shape[1]
    counts = (
        channels, rows, columns, columns * 4, held, channels * held,
        down * width, plane, channels * plane, right * 4, 0,
    )  # fmt: skip
    copy = copy_rows("scatter" if right > 1 else "rows")
    target = operand_place(out)
    places = operand_place(results), target + y * width + x * 4, target
    run_native_parts(lambda n: call_native(copy, places, counts, n, n + 1), len(out))

"""Direct convolutions, plane by plane: depthwise ones, and those of few channels.

Columns for products of matrices would then be larger than all other arrays. One or two spatial
axes, float32, on CPUs. A thread computes whole images, so threads do not change bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.direct import masked_direct
from graphflow.ops.kernels.conv.direct.direct_text import copy_rows, correlation, sum_registers
from graphflow.ops.kernels.conv.direct.padded_planes import (
    LEAST_PARTS,
    THREADING_ELEMENTS,
    PaddedPlanes,
    PlaneBuffer,
    as_2d_planes,
    as_2d_windows,
    equal_blocks,
    plan_planes,
)
from graphflow.ops.kernels.jit.compiler import KernelTask, vector_width
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import run_native_parts
from graphflow.ops.windows.window_arguments import Ints, Windows

FEW_CHANNELS = 8
"""Channels on one side up to which these kernels are faster than products of matrices."""
WIDEST = 6
"""Outputs of a block, whose sums are in registers together."""
_PLANE_BYTES = 1 << 22  # bytes of padded planes that a part holds


class _OutputBlocks(NamedTuple):
    """Blocks of outputs of one size, or groups, and their weights.

    Attributes:
        first: the first output.
        number: blocks.
        apart: outputs between blocks.
        weights: (number, inputs, taps, size), in scratch memory.
    """

    first: int
    size: int
    number: int
    apart: int
    weights: Any


def _split_outputs(w: Any, groups: int) -> list[_OutputBlocks]:
    outputs, inputs = w.shape[0] // groups, w.shape[1]
    taps = math.prod(w.shape[2:])
    output = inputs * taps * 4
    blocks = [(first, size, count, size) for first, size, count in equal_blocks(outputs, WIDEST)]
    if groups > 1:  # all groups' blocks at one place
        blocks = [
            (first + i * size, size, groups, outputs)
            for first, size, count, _ in blocks
            for i in range(count)
        ]
    result = []
    for i, (first, size, count, apart) in enumerate(blocks):
        weights = scratch(np, f"direct weights {i}", (count, inputs, taps, size), np.float32)
        source, target = operand_place(w) + first * output, operand_place(weights)
        sizes = (
            inputs, taps, size, 4, taps * 4, apart * output,
            size * 4, taps * size * 4, size * inputs * taps * 4, output, 0,
        )  # fmt: skip
        call_native(copy_rows("gather"), (source, target, target), sizes, 0, count)
        result.append(_OutputBlocks(first, size, count, apart, weights))
    return result


def convolve(
    out: Any, x: Any, w: Any, windows: Windows, groups: int, input_dilation: Ints | None = None
) -> None:
    """Write out[n, o, p] = Σ w[o, c, k] · x[n, c, p·stride - before + k·dilation].

    Args:
        input_dilation: distance between elements of x, with zeros between them; for gradients in
            the input of strided convolutions.
    """
    out, x, w = (
        as_2d_planes(out),
        as_2d_planes(as_contiguous(x)),
        as_2d_planes(as_contiguous(w)),
    )
    windows = as_2d_windows(windows)
    if set(input_dilation or ()) <= {1}:
        planned = masked_direct.plan(len(x), x.shape[1], len(w), x.shape[2:], windows, groups)
        if planned is not None:
            masked_direct.convolve(out, x, w, planned)
            return
    planes = plan_planes(windows, (1, 1, *(input_dilation or (1, 1)))[-2:])
    offsets, units = planes.offsets(windows), _split_outputs(w, groups)
    images, channels = x.shape[:2]
    each = max(1, THREADING_ELEMENTS // max(1, math.prod(out.shape[1:])), -(-images // LEAST_PARTS))
    each = min(each, max(1, _PLANE_BYTES // (channels * planes.nbytes)))

    def part(i: int) -> None:
        some = range(i * each, min((i + 1) * each, images))
        room = PlaneBuffer(planes, len(some) * channels)
        planes.fill(room.place, x, some, range(channels))
        for unit in units:
            _convolve_images(out, some, unit, room.place, offsets, planes, w.shape[1], channels)

    run_native_parts(part, -(-images // each))


def task(
    images: int, inputs: int, outputs: int, space: Ints, windows: Windows, groups: int
) -> KernelTask | None:
    """Return the kernel for operands x and w if one native call computes the convolution."""
    flat = (1, *space) if len(space) == 1 else space
    planned = masked_direct.plan(images, inputs, outputs, flat, as_2d_windows(windows), groups)
    return None if planned is None else planned.task


def _convolve_images(
    out: Any,
    images: range,
    unit: _OutputBlocks,
    x: int,
    offsets: Any,
    planes: PaddedPlanes,
    inputs: int,
    channels: int,
) -> None:
    """Compute the outputs of some blocks for some images."""
    height, width = out.shape[2:]
    plane = height * width * 4
    lanes = vector_width()
    # Without AVX-512 masks are slow, so a row's last strip begins early and is whole.
    vectors = min(2, -(-width // lanes) if lanes == 16 else max(1, width // lanes))
    most = max(1, min(6, height, sum_registers() // (unit.size * vectors)))
    most = next((r for r in range(most, most // 2, -1) if height % r == 0), most)
    goal = operand_place(out) + (images.start * out.shape[1] + unit.first) * plane
    row = planes.pitch * planes.stride[0]
    grouped = inputs < channels
    whole = height - height % most
    for start, high, blocks in ((0, most, height // most), (whole, height - whole, 1)):
        if not high:
            continue
        sizes = (
            blocks, width, inputs, len(offsets),
            channels * planes.nbytes, inputs * planes.nbytes if grouped else 0, planes.nbytes, row,
            unit.weights.nbytes // unit.number,
            out.shape[1] * plane, unit.apart * plane, plane, width * 4, unit.number,
        )  # fmt: skip
        pointers = (
            x + start * row, operand_place(unit.weights), goal + start * width * 4,
            operand_place(offsets),
        )  # fmt: skip
        call_native(correlation(unit.size, high, vectors), pointers, sizes, 0, len(images))

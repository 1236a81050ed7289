"""Direct convolutions, plane by plane: depthwise ones, and those of few channels.

Columns for products of matrices would then be larger than all other arrays. One or two spatial
axes, float32, on CPUs. A thread computes whole images, or whole channels of the weights' gradient,
so threads do not change bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.direct import masked_direct, masked_weight_gradient
from graphflow.ops.kernels.conv.direct.direct_text import (
    copy_rows,
    correlation,
    sum_registers,
    weight_sums,
)
from graphflow.ops.kernels.conv.direct.float_loops import clear_floats
from graphflow.ops.kernels.conv.direct.plane_copies import interleave_images
from graphflow.ops.kernels.jit.compiler import KernelTask, vector_width
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import run_native_parts
from graphflow.ops.windows.window_arguments import Ints, Windows

FEW_CHANNELS = 8
"""Channels on one side up to which these kernels are faster than products of matrices."""
WIDEST = 6
"""Outputs of a block, whose sums are in registers together."""
_WEIGHT_BLOCK = 5  # outputs of a block of the gradient in the weight
_SHORT_COLUMNS, _JOINED_IMAGES = (
    16,
    4,
)  # columns up to which, and images from which, rows are joined for the weight's gradient
_LEAST_PARTS = 8  # for threads, at least
_PLANE_BYTES = 1 << 22  # bytes of padded planes that a part holds
_THREADING_ELEMENTS = (
    1 << 13
)  # elements of results from which handing a part to another thread pays


class PaddedPlanes(NamedTuple):
    """The layout of planes with their padding, columns sorted by their remainder by the stride.

    Attributes:
        rows: of a plane.
        seen: columns that windows see.
        columns: memory for those of one remainder, a vector more than windows see.
        before: rows and columns of padding.
        stride: of the windows on both axes.
        input_dilation: distance between elements of the source.
    """

    rows: int
    seen: int
    columns: int
    before: Ints
    stride: Ints
    input_dilation: Ints

    @property
    def pitch(self) -> int:
        """Bytes of a row."""
        return self.columns * self.stride[1] * 4

    @property
    def nbytes(self) -> int:
        return self.rows * self.pitch

    def offsets(self, windows: Windows) -> np.ndarray[Any, Any]:
        """Return the offset of each tap from the first, in bytes."""
        y, x = (np.arange(k) * d for k, d in zip(windows.kernel, windows.dilation, strict=True))
        place = x % self.stride[1] * self.columns + x // self.stride[1]
        return (y[:, None] * self.pitch + place * 4).reshape(-1).astype(np.int64)

    def fill(self, target: int, x: Any, images: range, channels: range) -> None:
        """Copy some planes of x, with zeros around them."""
        (height, width), (down, right) = x.shape[2:], self.before
        first, last = _clip_range(height, down, self.input_dilation[0], self.rows)
        last = max(first, last)
        cleared = self.nbytes // 4
        for remainder in range(self.stride[1]):
            begin, end = _clip_range(width, right, self.input_dilation[1], self.seen)
            begin += (remainder - begin - right) % self.stride[1]
            count = max(0, -(-(end - begin) // self.stride[1]))
            kind, apart = "rows", 1
            if self.stride[1] > 1:
                kind, apart = "gather", self.stride[1]
            elif self.input_dilation[1] > 1:
                kind, apart = "scatter", self.input_dilation[1]
            plane = height * width * 4
            start = (images.start * x.shape[1] + channels.start) * plane
            start += (first * width + begin) * 4
            column = (right + begin * self.input_dilation[1]) // self.stride[1]
            goal = (down + first * self.input_dilation[0]) * self.pitch
            goal += (remainder * self.columns + column) * 4
            sizes = (
                len(channels), last - first, count,
                width * 4, plane, x.shape[1] * plane,
                self.pitch * self.input_dilation[0], self.nbytes, len(channels) * self.nbytes,
                4 * apart,
                cleared,
            )  # fmt: skip
            call_native(
                copy_rows(kind),
                (operand_place(x) + start, target + goal, target),
                sizes,
                0,
                len(images),
            )
            cleared = 0


def _clip_range(size: int, before: int, input_dilation: int, room: int) -> tuple[int, int]:
    """Return the range of an axis' elements that lie within `room` positions."""
    first = max(0, -(before // input_dilation)) if before < 0 else 0
    return first, min(size, -(-(room - before) // input_dilation))


def _plan_planes(windows: Windows, input_dilation: Ints) -> PaddedPlanes:
    """Return the layout of the planes that windows see."""
    (ky, kx), (sy, sx), before, (dy, dx), (oy, ox) = windows
    seen = (ox - 1) * sx + (kx - 1) * dx + 1
    width = vector_width()
    columns = -(-ox // (2 * width)) * 2 * width + (kx - 1) * dx // sx + 1
    rows = (oy - 1) * sy + (ky - 1) * dy + 1
    return PaddedPlanes(rows, seen, columns, before, (sy, sx), input_dilation)


def _as_2d_planes(array: Any) -> Any:
    """Return an array with two spatial axes."""
    return array.reshape(*array.shape[:2], 1, array.shape[2]) if array.ndim == 3 else array


def _as_2d_windows(windows: Windows) -> Windows:
    """Return windows with two spatial axes."""
    if len(windows.out) == 2:
        return windows
    ones = ((1,), (1,), (0,), (1,), (1,))
    return Windows(*(one + entry for one, entry in zip(ones, windows, strict=True)))


class _PlaneBuffer:
    """Scratch memory for planes of some images and channels, and for vectors beyond them."""

    def __init__(self, planes: PaddedPlanes, count: int) -> None:
        size = count * planes.nbytes // 4 + 4 * vector_width()
        self._array = scratch(np, "planar", (size,), np.float32)
        self.place = operand_place(self._array)
        clear_floats(self.place + 4 * (size - 4 * vector_width()), 4 * vector_width())


def _equal_blocks(outputs: int, most: int) -> list[tuple[int, int, int]]:
    """Return (first, size, count) of blocks of outputs; one size if there is one above 2."""
    for size in range(min(most, outputs), 2, -1):
        if outputs % size == 0:
            return [(0, size, outputs // size)]
    size = min(most, outputs)
    whole = outputs // size
    rest = outputs - whole * size
    return [(0, size, whole), *([(whole * size, rest, 1)] if rest else [])]


# Convolution ------------------------------------------------------------------------------------


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
    blocks = [(first, size, count, size) for first, size, count in _equal_blocks(outputs, WIDEST)]
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
        _as_2d_planes(out),
        _as_2d_planes(as_contiguous(x)),
        _as_2d_planes(as_contiguous(w)),
    )
    windows = _as_2d_windows(windows)
    if set(input_dilation or ()) <= {1}:
        planned = masked_direct.plan(len(x), x.shape[1], len(w), x.shape[2:], windows, groups)
        if planned is not None:
            masked_direct.convolve(out, x, w, planned)
            return
    planes = _plan_planes(windows, (1, 1, *(input_dilation or (1, 1)))[-2:])
    offsets, units = planes.offsets(windows), _split_outputs(w, groups)
    images, channels = x.shape[:2]
    each = max(
        1, _THREADING_ELEMENTS // max(1, math.prod(out.shape[1:])), -(-images // _LEAST_PARTS)
    )
    each = min(each, max(1, _PLANE_BYTES // (channels * planes.nbytes)))

    def part(i: int) -> None:
        some = range(i * each, min((i + 1) * each, images))
        room = _PlaneBuffer(planes, len(some) * channels)
        planes.fill(room.place, x, some, range(channels))
        for unit in units:
            _convolve_images(out, some, unit, room.place, offsets, planes, w.shape[1], channels)

    run_native_parts(part, -(-images // each))


def task(
    images: int, inputs: int, outputs: int, space: Ints, windows: Windows, groups: int
) -> KernelTask | None:
    """Return the kernel for operands x and w if one native call computes the convolution."""
    flat = (1, *space) if len(space) == 1 else space
    planned = masked_direct.plan(images, inputs, outputs, flat, _as_2d_windows(windows), groups)
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


# Its adjoint in w -------------------------------------------------------------------------------


def weight_gradient(out: Any, x: Any, g: Any, windows: Windows, groups: int) -> None:
    """Write out[o, c, k] = Σ g[n, o, p] · x[n, c, p·stride - before + k·dilation]."""
    x, g = _as_2d_planes(x), _as_2d_planes(g)
    windows = _as_2d_windows(windows)
    if groups == x.shape[1] > 1:
        planned = masked_weight_gradient.plan(len(x), g.shape[1], windows)
        if planned is not None:
            x, g = as_contiguous(x), as_contiguous(g)
            masked_weight_gradient.weight_gradient(out, x, g, windows, planned)
            return
    if windows.out[1] < _SHORT_COLUMNS and windows.stride[1] == 1 and len(x) >= _JOINED_IMAGES:
        x, g, windows = _join_images(x, g, windows)
    x, g = as_contiguous(x), as_contiguous(g)
    planes = _plan_planes(windows, (1, 1))
    offsets = planes.offsets(windows)
    images, channels = x.shape[:2]
    outputs, inputs = g.shape[1] // groups, channels // groups
    taps = math.prod(windows.kernel)
    height, width = g.shape[2:]
    plane = height * width * 4
    most = min(sum_registers(), 20)  # of sums: the factor of an output needs a register, too
    pieces = [
        (first, size, blocks, *piece)
        for first, size, blocks in _equal_blocks(outputs, _WEIGHT_BLOCK)
        for piece in _even_pieces(taps, max(1, most // size))
    ]

    def add(piece: tuple[int, ...], some: range, place: int, held: int) -> None:
        """Compute some taps of some outputs for some channels of the `held` ones at a place."""
        first, size, blocks, tap, several = piece
        sums = scratch(np, "planar sums", (sum_registers() * vector_width(),), np.float32)
        # A unit is a channel of x; with groups it has outputs of its own.
        sizes = (
            images, height, width, held * planes.nbytes, planes.nbytes,
            planes.pitch * planes.stride[0],
            g.shape[1] * plane, outputs * plane if groups > 1 else 0, plane, width * 4,
            outputs * taps * 4 if groups > 1 else taps * 4, inputs * taps * 4, blocks,
        )  # fmt: skip
        begin = some.start * outputs if groups > 1 else 0
        goal = begin * taps if groups > 1 else some.start * taps
        pointers = (
            place,
            operand_place(g) + (begin + first) * plane,
            operand_place(out) + (goal + first * inputs * taps + tap) * 4,
            operand_place(offsets) + tap * offsets.itemsize,
            operand_place(sums),
        )
        call_native(weight_sums(size, several), pointers, sizes, 0, len(some))

    each = max(
        1, _THREADING_ELEMENTS // max(1, images * height * width), -(-channels // _LEAST_PARTS)
    )
    cuts = [range(c, min(c + each, channels)) for c in range(0, channels, each)]

    def part(i: int) -> None:
        room = _PlaneBuffer(planes, images * len(cuts[i]))
        planes.fill(room.place, x, range(images), cuts[i])
        for piece in pieces:
            add(piece, cuts[i], room.place, len(cuts[i]))

    if len(cuts) >= _LEAST_PARTS // 2:
        run_native_parts(part, len(cuts))
        return
    # Too few parts: taps and outputs make more of them, after all planes are there.
    room = _PlaneBuffer(planes, images * channels)
    several = min(images, _LEAST_PARTS)

    def fill(i: int) -> None:
        some = range(images * i // several, images * (i + 1) // several)
        target = room.place + some.start * channels * planes.nbytes
        planes.fill(target, x, some, range(channels))

    run_native_parts(fill, several)

    def piece_part(i: int) -> None:
        some = cuts[i // len(pieces)]
        place = room.place + some.start * planes.nbytes
        add(pieces[i % len(pieces)], some, place, channels)

    run_native_parts(piece_part, len(cuts) * len(pieces))


def _join_images(x: Any, g: Any, windows: Windows) -> tuple[Any, Any, Windows]:
    """Interleave images, so that rows are long: elements at one place of all images become
    neighbours."""
    images = len(x)
    x, g = (interleave_images(a, name) for a, name in ((x, "joined x"), (g, "joined g")))
    kernel, stride, (down, right), (dy, dx), (height, width) = windows
    wide = Windows(
        kernel, stride, (down, right * images), (dy, dx * images), (height, width * images)
    )
    return x, g, wide


def _even_pieces(count: int, most: int) -> list[tuple[int, int]]:
    """Return (first, size) of pieces of nearly one size."""
    parts = -(-count // most)
    size = -(-count // parts)
    return [(i, min(size, count - i)) for i in range(0, count, size)]

"""Planes of images with their padding around them, as direct convolutions read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.direct.direct_text import copy_rows
from graphflow.ops.kernels.conv.direct.float_loops import clear_floats
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.kernel_recording import operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.windows.window_arguments import Ints, Windows

LEAST_PARTS = 8
"""Parts for threads, at least."""
THREADING_ELEMENTS = 1 << 13
"""Elements of results from which handing a part to another thread pays."""


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


def plan_planes(windows: Windows, input_dilation: Ints) -> PaddedPlanes:
    """Return the layout of the planes that windows see."""
    (ky, kx), (sy, sx), before, (dy, dx), (oy, ox) = windows
    seen = (ox - 1) * sx + (kx - 1) * dx + 1
    width = vector_width()
    columns = -(-ox // (2 * width)) * 2 * width + (kx - 1) * dx // sx + 1
    rows = (oy - 1) * sy + (ky - 1) * dy + 1
    return PaddedPlanes(rows, seen, columns, before, (sy, sx), input_dilation)


def as_2d_planes(array: Any) -> Any:
    """Return an array with two spatial axes."""
    return array.reshape(*array.shape[:2], 1, array.shape[2]) if array.ndim == 3 else array


def as_2d_windows(windows: Windows) -> Windows:
    """Return windows with two spatial axes."""
    if len(windows.out) == 2:
        return windows
    ones = ((1,), (1,), (0,), (1,), (1,))
    return Windows(*(one + entry for one, entry in zip(ones, windows, strict=True)))


class PlaneBuffer:
    """Scratch memory for planes of some images and channels, and for vectors beyond them."""

    def __init__(self, planes: PaddedPlanes, count: int) -> None:
        size = count * planes.nbytes // 4 + 4 * vector_width()
        self._array = scratch(np, "planar", (size,), np.float32)
        self.place = operand_place(self._array)
        clear_floats(self.place + 4 * (size - 4 * vector_width()), 4 * vector_width())


def equal_blocks(outputs: int, most: int) -> list[tuple[int, int, int]]:
    """Return (first, size, count) of blocks of outputs; one size if there is one above 2."""
    for size in range(min(most, outputs), 2, -1):
        if outputs % size == 0:
            return [(0, size, outputs // size)]
    size = min(most, outputs)
    whole = outputs // size
    rest = outputs - whole * size
    return [(0, size, whole), *([(whole * size, rest, 1)] if rest else [])]

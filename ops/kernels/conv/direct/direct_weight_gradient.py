"""Gradients in the weight of direct convolutions: depthwise ones, and those of few channels.

A call computes all taps of some channels, some rows at a time. A thread computes whole channels,
or some outputs or taps of them, so threads do not change bits.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.direct import masked_weight_gradient
from graphflow.ops.kernels.conv.direct.direct_text import sum_registers, weight_sums
from graphflow.ops.kernels.conv.direct.padded_planes import (
    LEAST_PARTS,
    THREADING_ELEMENTS,
    PlaneBuffer,
    as_2d_planes,
    as_2d_windows,
    equal_blocks,
    plan_planes,
)
from graphflow.ops.kernels.conv.direct.plane_copies import interleave_images
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import run_native_parts, run_native_ranges
from graphflow.ops.windows.window_arguments import Windows

_BLOCK = 5  # outputs of a block
_MOST_SUMS = 20  # in registers: the factor of an output needs a register, too
_BAND_BYTES = 28 << 10  # bytes of rows that all taps read in turn
_SHORT_COLUMNS, _JOINED_IMAGES = 16, 4
"""Columns up to which, and images from which, rows of all images are joined."""


def weight_gradient(out: Any, x: Any, g: Any, windows: Windows, groups: int) -> None:
    """Write out[o, c, k] = Σ g[n, o, p] · x[n, c, p·stride - before + k·dilation]."""
    x, g = as_2d_planes(x), as_2d_planes(g)
    windows = as_2d_windows(windows)
    is_depthwise = groups == x.shape[1] > 1
    if is_depthwise and masked_weight_gradient.write_depthwise_gradient(out, x, g, windows):
        return
    if windows.out[1] < _SHORT_COLUMNS and windows.stride[1] == 1 and len(x) >= _JOINED_IMAGES:
        x, g, windows = _join_images(x, g, windows)
    _PaddedWeightGradient(out, as_contiguous(x), as_contiguous(g), windows, groups).run()


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


class _TapSums(NamedTuple):
    """Taps of some outputs, whose gradient one call computes.

    Attributes:
        first, size, blocks: the first output, outputs of a block, and blocks.
        tap, taps: the first tap, and how many.
        together: taps whose sums are in registers together.
    """

    first: int
    size: int
    blocks: int
    tap: int
    taps: int
    together: int

    def divide(self, parts: int) -> list[_TapSums]:
        """Divide it into about so many parts: blocks of outputs, then taps."""
        pieces = -(-self.taps // self.together)
        by_blocks = min(parts, self.blocks)
        by_taps = min(-(-parts // by_blocks), pieces)
        blocks = [self.blocks * i // by_blocks for i in range(by_blocks + 1)]
        taps = [pieces * i // by_taps * self.together for i in range(by_taps)] + [self.taps]
        return [
            self._replace(
                first=self.first + start * self.size, blocks=stop - start,
                tap=self.tap + first, taps=last - first,
            )
            for start, stop in pairwise(blocks)
            for first, last in pairwise(taps)
        ]  # fmt: skip


class _PaddedWeightGradient:
    """The gradient of one convolution, from planes with padding around them."""

    def __init__(self, out: Any, x: Any, g: Any, windows: Windows, groups: int) -> None:
        self._out, self._x, self._g, self._groups = out, x, g, groups
        self._planes = plan_planes(windows, (1, 1))
        self._outputs, self._inputs = g.shape[1] // groups, x.shape[1] // groups
        self._taps = math.prod(windows.kernel)
        most = min(sum_registers(), _MOST_SUMS)
        # The last taps in registers may be fewer; sums of the others are left out.
        self._offsets = np.append(self._planes.offsets(windows), [0] * most)
        self._sums = []
        for first, size, blocks in equal_blocks(self._outputs, _BLOCK):
            pieces = -(-self._taps // max(1, most // size))
            together = -(-self._taps // pieces)
            self._sums.append(_TapSums(first, size, blocks, 0, self._taps, together))

    def run(self) -> None:
        (images, channels), elements = self._x.shape[:2], math.prod(self._g.shape[2:])
        each = max(1, THREADING_ELEMENTS // max(1, images * elements), -(-channels // LEAST_PARTS))
        cuts = [range(c, min(c + each, channels)) for c in range(0, channels, each)]
        if len(cuts) < LEAST_PARTS // 2:
            self._run_divided(cuts)
            return

        def part(i: int) -> None:
            room = PlaneBuffer(self._planes, images * len(cuts[i]))
            self._planes.fill(room.place, self._x, range(images), cuts[i])
            for sums in self._sums:
                self._add(sums, cuts[i], room.place, len(cuts[i]))

        run_native_parts(part, len(cuts))

    def _run_divided(self, cuts: list[range]) -> None:
        """Run few cuts of channels in more parts, after all planes are there."""
        planes, (images, channels) = self._planes, self._x.shape[:2]
        room = PlaneBuffer(planes, images * channels)

        def fill(start: int, stop: int) -> None:
            target = room.place + start * channels * planes.nbytes
            planes.fill(target, self._x, range(start, stop), range(channels))

        run_native_ranges(fill, images, LEAST_PARTS)
        parts = [part for sums in self._sums for part in sums.divide(-(-LEAST_PARTS // len(cuts)))]

        def compute(i: int) -> None:
            some = cuts[i // len(parts)]
            self._add(
                parts[i % len(parts)], some, room.place + some.start * planes.nbytes, channels
            )

        run_native_parts(compute, len(cuts) * len(parts))

    def _add(self, sums: _TapSums, some: range, place: int, held: int) -> None:
        """Compute taps of outputs for some channels of the `held` ones at a place."""
        planes, outputs, taps = self._planes, self._outputs, self._taps
        height, width = self._g.shape[2:]
        plane, is_grouped = height * width * 4, self._groups > 1
        pieces = -(-sums.taps // sums.together)
        vectors = pieces * sums.size * sums.together * vector_width()
        memory = scratch(np, "planar sums", (vectors,), np.float32)
        x_row = planes.pitch * planes.stride[0]
        band = max(1, _BAND_BYTES // (sums.size * width * 4 + x_row))
        # A unit is a channel of x; with groups it has outputs of its own.
        sizes = (
            len(self._x), height, band, width,
            held * planes.nbytes, planes.nbytes, x_row,
            self._g.shape[1] * plane, outputs * plane if is_grouped else 0, plane, width * 4,
            outputs * taps * 4 if is_grouped else taps * 4, self._inputs * taps * 4, sums.blocks,
            pieces, sums.taps,
        )  # fmt: skip
        begin = some.start * outputs if is_grouped else 0
        goal = begin * taps if is_grouped else some.start * taps
        pointers = (
            place,
            operand_place(self._g) + (begin + sums.first) * plane,
            operand_place(self._out) + (goal + sums.first * self._inputs * taps + sums.tap) * 4,
            operand_place(self._offsets) + sums.tap * self._offsets.itemsize,
            operand_place(memory),
        )
        call_native(weight_sums(sums.size, sums.together), pointers, sizes, 0, len(some))

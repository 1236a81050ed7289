"""Gradients in the weight of depthwise convolutions, from planes that are read in place.

Vectors lie along the rows of the cotangent, and masks take the place of padding, as in
`masked_direct.py`. A channel's sums stay in registers over all rows of all images. Windows with
many taps take some rows of taps at a time. Vectors of 16 lanes; float32, on CPUs.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from graphflow.ops.kernels.codegen.memory_loops import LoopNestWriter, call_native
from graphflow.ops.kernels.codegen.vector_writer import Floats
from graphflow.ops.kernels.conv.direct.masked_rows import (
    load_spaced,
    row_or_zeros,
    spanned_vectors,
    write_units,
    zero_row,
)
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, vector_width
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.thread_pool import run_native_ranges
from graphflow.ops.windows.window_arguments import Ints, Windows

_SUMS = 28
"""Registers that hold sums, at most."""
_MOST_COLUMNS = 9
"""Columns of taps, at most: each has masks of its own."""
_PART_STEPS = 1 << 17
"""Multiply-adds from which handing a part to another thread pays."""


class WeightForm(NamedTuple):
    """The specialisation of a kernel.

    Attributes:
        taps: rows and columns of taps whose sums are in registers.
        halves: vectors of x that hold what the results of one vector see from a tap.
    """

    taps: Ints
    stride: Ints
    dilation: Ints
    halves: int


@lru_cache(maxsize=1024)
def _plan(windows: Windows) -> tuple[tuple[int, WeightForm], ...]:
    """Return the first row and the form of the taps of each kernel; none if windows do not fit."""
    height, width = windows.kernel
    if vector_width() != 16 or windows.stride[1] > 2 or width > _MOST_COLUMNS:
        return ()
    parts = -(-height // max(1, _SUMS // width))
    halves = spanned_vectors(windows)
    return tuple(
        (first, WeightForm((last - first, width), windows.stride, windows.dilation, halves))
        for first, last in pairwise([height * i // parts for i in range(parts + 1)])
    )


def write_depthwise_gradient(out: Any, x: Any, g: Any, windows: Windows) -> bool:
    """Write out[o, 0, k] = Σ g[n, o, p] · x[n, o // each, p·stride - before + k·dilation].

    Returns:
        False, without a write, if the windows do not fit.
    """
    pieces = _plan(windows)
    if not pieces:
        return False
    x, g = as_contiguous(x), as_contiguous(g)
    outputs, taps = g.shape[1], math.prod(windows.kernel)
    space, (down, right) = x.shape[2:], windows.before
    plane, plane_out = math.prod(space) * 4, math.prod(windows.out) * 4
    steps = len(x) * outputs * math.prod(windows.out) * taps

    def part(start: int, stop: int) -> None:
        zeros = zero_row(space[1])
        for first, form in pieces:
            sizes = (
                len(x), *space, down - first * form.dilation[0], right, *windows.out,
                outputs // x.shape[1], x.shape[1] * plane, plane, outputs * plane_out, plane_out,
                taps * 4,
            )  # fmt: skip
            goal = operand_place(out) + first * form.taps[1] * 4
            pointers = operand_place(x), operand_place(g), goal, zeros
            call_native(_kernel(form), pointers, sizes, start, stop)

    run_native_ranges(part, outputs, steps // _PART_STEPS)
    return True


@cache
def _kernel(form: WeightForm) -> NativeFunction:
    """Write out[o, ky, kx] = Σ g[n, o, y, x] · x[n, o // each, y·stride + …].

    Pointers: x, g, out, memory for a row of zeros. Sizes: images; height and width of x, padding
    before both, height and width of g; outputs of each channel; bytes of x between images and
    channels, of g between images and channels, and of out between channels. The range is over
    outputs.
    """
    return compiler().function(*_WeightWriter(form).source())


class _WeightWriter:
    """Writes the kernel of a form."""

    def __init__(self, form: WeightForm) -> None:
        self.form = form
        self.nest = nest = LoopNestWriter(16, 4, 13)
        self.x, self.g, self.out, self.zeros = nest.pointers
        (
            self.images, self.height, self.width, self.down, self.right, self.high, self.wide,
            self.each, self.x_image, self.x_channel, self.g_image, self.g_channel, self.out_channel,
        ) = nest.sizes  # fmt: skip

    def source(self) -> tuple[str, str]:
        return write_units(self.nest, self.zeros, self.width, self._unit)

    def _unit(self, o: str) -> None:
        """Write the taps of an output."""
        nest = self.nest
        channel = nest.write(f"sdiv i64 {o}, {self.each}")
        x = nest.gep(self.x, nest.mul(channel, self.x_channel))
        g = nest.gep(self.g, nest.mul(o, self.g_channel))
        zero = [(nest.kind, nest.floats.const(0.0))] * math.prod(self.form.taps)
        sums = nest.loop(
            0, self.wide, lambda at, *v: self._strip(at, x, g, *v), zero, step=nest.width
        )
        goal = nest.gep(self.out, nest.mul(o, self.out_channel))
        for i, value in enumerate(sums):
            total = nest.lanes.reduce("float", value, Floats.add)
            nest.lines.append(f"  store float {total}, ptr {nest.gep(goal, 4 * i)}, align 4")

    def _strip(self, at: str, x: str, g: str, *so_far: str) -> list[str]:
        """Write the sums over the columns of a strip, from column `at` of g on."""
        nest, form = self.nest, self.form
        step = form.stride[1]
        count = nest.minimum(nest.sub(self.wide, at), nest.width)
        first = nest.sub(nest.mul(at, step), self.right)
        span = nest.add(nest.mul(nest.sub(count, 1), step), 1)
        masks = []
        for kx in range(form.taps[1]):
            start = nest.add(first, kx * form.dilation[1])
            # Columns that no window sees are left out: they may hold infinities.
            end = nest.minimum(self.width, nest.add(start, span))
            end = nest.write(f"select i1 {nest.write(f'icmp sgt i64 {end}, 0')}, i64 {end}, i64 0")
            masks.append(
                [
                    nest.in_range_mask(nest.indices(nest.add(start, half * nest.width)), end)
                    for half in range(form.halves)
                ]
            )
        given = nest.first_lanes(count)
        moved, blank = nest.mul(first, 4), nest.gep(self.zeros, nest.mul(first, 4))

        def image(n: str, *so_far: str) -> list[str]:
            here = nest.gep(x, nest.mul(n, self.x_image), moved)
            there = nest.gep(g, nest.mul(n, self.g_image), nest.mul(at, 4))

            def row(y: str, *so_far: str) -> list[str]:
                place = nest.gep(there, nest.mul(nest.mul(y, self.wide), 4))
                factor = nest.load(place, given)
                return self._row(y, here, blank, factor, masks, so_far)

            return nest.loop(0, self.high, row, [(nest.kind, v) for v in so_far])

        return nest.loop(0, self.images, image, [(nest.kind, v) for v in so_far])

    def _row(
        self, y: str, here: str, blank: str, factor: str, masks: Any, so_far: tuple[str, ...]
    ) -> list[str]:
        """Write what a row of g adds to the sums."""
        nest, form = self.nest, self.form
        top, pitch = nest.sub(nest.mul(y, form.stride[0]), self.down), nest.mul(self.width, 4)
        sums: list[str] = []
        for ky in range(form.taps[0]):
            number = nest.add(top, ky * form.dilation[0])
            source = row_or_zeros(nest, here, number, self.height, pitch, blank)
            for kx in range(form.taps[1]):
                start = 4 * kx * form.dilation[1]
                seen = load_spaced(nest, source, start, form.stride[1], masks[kx])
                sums.append(nest.floats.fma(factor, seen, so_far[len(sums)]))
        return sums

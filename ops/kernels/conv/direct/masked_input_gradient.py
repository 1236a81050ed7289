"""Gradients in the input of convolutions whose columns have stride 2, from planes read in place.

With stride 2, even and odd positions of the input see different taps. Vectors lie along every
second position, so that a tap sees neighbours in a row of the cotangent. The vectors of even and
odd positions are interleaved when they are stored. Masks take the place of padding, as in
`masked_direct.py`. Vectors of 16 lanes; float32, on CPUs.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

from graphflow.ops.kernels.codegen.memory_loops import LoopNestWriter, call_native
from graphflow.ops.kernels.conv.direct.masked_rows import (
    row_or_zeros,
    write_units,
    zero_row,
)
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, vector_width
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.thread_pool import run_native_ranges
from graphflow.ops.windows.window_arguments import Ints, Windows

_MOST_TAPS = 81
"""Taps of the unrolled code, at most."""
_PART_STEPS = 1 << 17
"""Multiply-adds from which handing a part to another thread pays."""


class InputForm(NamedTuple):
    """The specialisation of a kernel.

    Attributes:
        row_stride: 1 or 2.
        odd: remainders of the padding by the strides.
        halves: vectors of the result that a strip fills, 1 or 2.
    """

    kernel: Ints
    row_stride: int
    odd: Ints
    halves: int


@lru_cache(maxsize=1024)
def _plan(space: Ints, windows: Windows) -> InputForm | None:
    """Return the form for an input of these axes; None if the windows do not fit."""
    kernel, stride, before, dilation, _ = windows
    if vector_width() != 16 or len(space) != 2 or stride[1] != 2 or stride[0] > 2:
        return None
    if set(dilation) != {1} or math.prod(kernel) > _MOST_TAPS:
        return None
    odd = (before[0] % stride[0], before[1] % 2)
    return InputForm(kernel, stride[0], odd, 1 if space[1] <= 16 else 2)


def write_input_gradient(out: Any, g: Any, w: Any, windows: Windows, groups: int) -> bool:
    """Write out[n, c, p·stride - before + k] += w[o, c, k] · g[n, o, p], from zeros.

    Sums have the order and the bits of those by phases. With groups, c counts the input's channels
    in the group of o.

    Returns:
        False, without a write, if the windows do not fit.
    """
    form = _plan(tuple(out.shape[2:]), windows)
    if form is None:
        return False
    g, w = as_contiguous(g), as_contiguous(w)
    images, inputs = out.shape[:2]
    outputs, seen, taps = g.shape[1], inputs // groups, math.prod(windows.kernel)
    plane, plane_g = math.prod(out.shape[2:]) * 4, math.prod(windows.out) * 4
    each = outputs // groups
    steps = images * outputs * seen * taps * math.prod(windows.out)
    down, right = (b // s for b, s in zip(windows.before, windows.stride, strict=True))
    sizes = (
        *out.shape[2:], *windows.out, down, right, inputs, seen, each,
        plane, outputs * plane_g, each * plane_g, plane_g,
        each * seen * taps * 4, taps * 4, seen * taps * 4,
    )  # fmt: skip

    def part(start: int, stop: int) -> None:
        pointers = [*map(operand_place, (g, w, out)), zero_row(windows.out[1])]
        call_native(_kernel(form), pointers, sizes, start, stop)

    run_native_ranges(part, images * inputs, steps // _PART_STEPS)
    return True


@cache
def _kernel(form: InputForm) -> NativeFunction:
    """Write the kernel of a form.

    Pointers: g, w, out, memory for a row of zeros. Sizes: height and width of out, and of g; whole
    strides of padding before both; channels of out, of a group of them, and of its g; bytes of out
    between channels; of g between images, groups and channels; of w between groups, channels of
    out, and channels of g. The range is over images and channels of out.
    """
    return compiler().function(*_InputWriter(form).source())


class _InputWriter:
    """Writes the kernel of a form.

    A row of the result, and a column, is named by its phase: its remainder by the stride.
    """

    def __init__(self, form: InputForm) -> None:
        self.form = form
        self.nest = nest = LoopNestWriter(16, 4, 16)
        self.g, self.w, self.out, self.zeros = nest.pointers
        (
            self.height, self.width, self.high, self.wide, self.down, self.right, self.channels,
            self.group, self.each, self.out_channel, self.g_image, self.g_group, self.g_channel,
            self.w_group, self.w_channel, self.w_output,
        ) = nest.sizes  # fmt: skip
        self.rows = _readers(form.kernel[0], form.row_stride, form.odd[0])
        self.columns = _readers(form.kernel[1], 2, form.odd[1])

    def source(self) -> tuple[str, str]:
        return write_units(self.nest, self.zeros, self.wide, self._unit)

    def _unit(self, i: str) -> None:
        """Write a channel of an image."""
        nest = self.nest
        image = nest.write(f"sdiv i64 {i}, {self.channels}")
        channel = nest.sub(i, nest.mul(image, self.channels))
        group = nest.write(f"sdiv i64 {channel}, {self.group}")
        within = nest.sub(channel, nest.mul(group, self.group))
        g = nest.gep(self.g, nest.mul(image, self.g_image), nest.mul(group, self.g_group))
        w = nest.gep(self.w, nest.mul(group, self.w_group), nest.mul(within, self.w_channel))
        out = nest.gep(self.out, nest.mul(i, self.out_channel))
        half = nest.write(f"sdiv i64 {nest.add(self.width, 1)}, 2")
        nest.loop(0, half, lambda at: self._strip(at, g, w, out), step=nest.width)

    def _strip(self, at: str, g: str, w: str, out: str) -> None:
        """Write 32 columns of all rows, from twice `at` on."""
        nest, step = self.nest, self.form.row_stride
        first = nest.add(at, self.right)
        masks = {
            d: nest.in_range_mask(nest.indices(nest.add(first, d)), self.wide) for d in self.columns
        }
        left = nest.sub(self.width, nest.mul(at, 2))
        moved = nest.mul(first, 4)
        here, blank = nest.gep(g, moved), nest.gep(self.zeros, moved)
        goal = nest.gep(out, nest.mul(at, 8))
        blocks = nest.write(f"sdiv i64 {nest.add(self.height, step - 1)}, {step}")

        def block(t: str) -> None:
            sums = self._sums(t, here, blank, w, masks)
            for phase in range(step):
                number = nest.add(nest.mul(t, step), phase)
                inside = nest.write(f"icmp slt i64 {number}, {self.height}")
                count = nest.write(f"select i1 {inside}, i64 {left}, i64 0")
                row = nest.gep(goal, nest.mul(nest.mul(number, self.width), 4))
                for half in range(self.form.halves):
                    value = nest.interleave(sums[phase, 0], sums[phase, 1], half)
                    mask = nest.first_lanes(nest.sub(count, half * nest.width))
                    nest.store(value, nest.gep(row, half * nest.nbytes), mask)

        nest.loop(0, blocks, block)

    def _sums(
        self, t: str, here: str, blank: str, w: str, masks: dict[int, str]
    ) -> dict[tuple[int, int], str]:
        """Write the sums of row block `t`, by the phases of row and column."""
        nest, form = self.nest, self.form
        phases = [(row, column) for row in range(form.row_stride) for column in range(2)]
        top = nest.add(t, self.down)
        numbers = {d: nest.add(top, d) for d in self.rows}
        pitch = nest.mul(self.wide, 4)

        def channel(o: str, g: str, w: str, *so_far: str) -> list[str]:
            sums = dict(zip(phases, so_far, strict=True))
            for d, number in numbers.items():
                source = row_or_zeros(nest, g, number, self.high, pitch, blank)
                for e, mask in masks.items():
                    value = nest.load(nest.gep(source, 4 * e), mask)
                    for row, ky in self.rows[d]:
                        for column, kx in self.columns[e]:
                            tap = nest.broadcast(nest.gep(w, 4 * (ky * form.kernel[1] + kx)))
                            total = sums[row, column]
                            sums[row, column] = nest.floats.fma(tap, value, total)
            return [nest.gep(g, self.g_channel), nest.gep(w, self.w_output), *sums.values()]

        zero = (nest.kind, nest.floats.const(0.0))
        carried = [("ptr", here), ("ptr", w), *[zero] * len(phases)]
        found = nest.loop(0, self.each, channel, carried)[2:]
        return dict(zip(phases, found, strict=True))


def _readers(kernel: int, stride: int, odd: int) -> dict[int, list[tuple[int, int]]]:
    """Return which phases and taps of an axis read the cotangent at each distance from a block."""
    found: dict[int, list[tuple[int, int]]] = {}
    for phase in range(stride):
        for k in range(kernel):
            if (phase + odd - k) % stride == 0:
                found.setdefault((phase + odd - k) // stride, []).append((phase, k))
    return dict(sorted(found.items()))

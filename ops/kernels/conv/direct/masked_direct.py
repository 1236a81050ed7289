"""Direct convolutions that read planes in place: masks take the place of padding.

Vectors lie along the rows of planes, as in `direct.py`, whose sums have the same order and bits.
All taps are unrolled, so windows are small. A row that is read serves all results that see it.
Vectors of 16 lanes, whose masks cost nothing; float32, on CPUs.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

from graphflow.ops.kernels.codegen.memory_loops import LoopNestWriter, Value, call_native
from graphflow.ops.kernels.conv.direct.masked_rows import (
    load_spaced,
    row_or_zeros,
    spanned_vectors,
    write_units,
    zero_row,
    zero_row_bytes,
)
from graphflow.ops.kernels.jit.compiler import (
    KernelTask,
    compiler,
    vector_width,
)
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.thread_pool import run_native_ranges
from graphflow.ops.windows.window_arguments import Ints, Windows

_SUMS = 20
"""Registers that hold sums, at most."""
_MOST_STEPS = 700
"""Fused multiply-adds of the unrolled code, at most: what compiles in a tenth of a second."""
_WIDEST = 16
"""Outputs whose sums are in registers together."""
_FEW_STEPS = 1 << 21
"""Multiply-adds up to which the single call saves more than padded planes do."""
_MANY_SUMS = 400
"""Products with an element of x from which sorting columns of stride 2 pays, and with three times
as many multiply-adds."""
_PART_STEPS = 1 << 19
"""Multiply-adds from which handing a part to another thread pays."""


class DirectForm(NamedTuple):
    """The specialisation of a kernel.

    Attributes:
        outputs, rows, vectors: of a tile of results that is computed in registers.
        halves: vectors of x that hold what the results of one vector see from a tap.
    """

    kernel: Ints
    stride: Ints
    dilation: Ints
    outputs: int
    rows: int
    vectors: int
    halves: int


class DirectPlan(NamedTuple):
    """A kernel with its table of sizes; it runs from 0 to `units` over images and blocks of
    outputs."""

    form: DirectForm
    sizes: Ints
    units: int
    steps: int

    @property
    def task(self) -> KernelTask:
        """The convolution as an entry of a table of native calls."""
        nanoseconds = self.steps / 40
        width = self.sizes[1]
        return KernelTask(
            *_source(self.form), self.sizes, self.units, nanoseconds, zero_row_bytes(width)
        )


@lru_cache(maxsize=1024)
def plan(
    images: int, inputs: int, outputs: int, space: Ints, windows: Windows, groups: int
) -> DirectPlan | None:
    """Plan a convolution of two spatial axes; None if its windows or groups are too large, or
    padded planes are as fast.

    Args:
        inputs, outputs: channels of all groups.
    """
    taps, each, seen = math.prod(windows.kernel), outputs // groups, inputs // groups
    steps = images * outputs * seen * taps * math.prod(windows.out)
    if vector_width() != 16 or len(space) != 2 or windows.stride[1] > 2:
        return None
    if groups == 1 and _has_many_sums(steps, outputs * taps, windows.stride[1]):
        return None  # padded planes are faster, since there is little to copy for many sums
    limit = max(1, min(_WIDEST, each, _MOST_STEPS // taps))
    size = next(n for n in range(limit, 0, -1) if each % n == 0)
    height, width = windows.out
    vectors = 2 if width > 16 and size < 8 else 1
    tile = max(1, size * vectors)
    most = min(_SUMS // tile, _MOST_STEPS // (tile * taps), height)
    if most < 1:
        return None
    # As few rows as possible are computed twice.
    rows = min(range(max(1, most // 2), most + 1), key=lambda n: (-(-height // n) * n, -n))
    halves = spanned_vectors(windows)
    form = DirectForm(windows.kernel, windows.stride, windows.dilation, size, rows, vectors, halves)
    plane, plane_out = math.prod(space) * 4, math.prod(windows.out) * 4
    units = outputs // size
    sizes = (
        *space, *windows.before, *windows.out, seen, units, each // size,
        inputs * plane, seen * plane if groups > 1 else 0, plane, seen * taps * 4, plane_out,
    )  # fmt: skip
    return DirectPlan(form, sizes, images * units, steps)


def _has_many_sums(steps: int, uses: int, stride: int) -> bool:
    """Return whether padded planes are faster, by how often an element of x is used."""
    if stride == 1:
        return steps > _FEW_STEPS
    return steps > 3 * _FEW_STEPS and uses >= _MANY_SUMS


def convolve(out: Any, x: Any, w: Any, planned: DirectPlan) -> None:
    """Write out[n, o, p] = Σ w[o, c, k] · x[n, c, p·stride - before + k·dilation]."""
    x, w = as_contiguous(x), as_contiguous(w)
    function = compiler().function(*_source(planned.form))

    def part(start: int, stop: int) -> None:
        pointers = [*map(operand_place, (x, w, out)), zero_row(x.shape[3])]
        call_native(function, pointers, planned.sizes, start, stop)

    run_native_ranges(part, planned.units, planned.steps // _PART_STEPS)


@cache
def _source(form: DirectForm) -> tuple[str, str]:
    """Write out[n, o, y, x] = Σ w[o, c, ky, kx] · x[n, c, y·stride + …].

    Pointers: x, w, out, memory for a row of zeros. Sizes: height and width of x, padding before
    both, height and width of out, channels of a group, blocks of outputs, and those of a group;
    bytes of x between images, groups, channels; of w between outputs; of out between channels. The
    range is over images and blocks.
    """
    return _DirectWriter(form).source()


class _DirectWriter:
    """Writes the kernel of a form."""

    def __init__(self, form: DirectForm) -> None:
        self.form = form
        self.nest = nest = LoopNestWriter(16, 4, 14)
        self.x, self.w, self.out, self.zeros = nest.pointers
        (
            self.height, self.width, self.down, self.right, self.high, self.wide, self.channels,
            self.blocks, self.group_blocks, self.x_image, self.x_group, self.x_channel,
            self.w_output, self.plane_out,
        ) = nest.sizes  # fmt: skip

    def source(self) -> tuple[str, str]:
        return write_units(self.nest, self.zeros, self.width, self._unit)

    def _unit(self, i: str) -> None:
        """Write a block of outputs of an image."""
        nest, form = self.nest, self.form
        image = nest.write(f"sdiv i64 {i}, {self.blocks}")
        block = nest.sub(i, nest.mul(image, self.blocks))
        group = nest.write(f"sdiv i64 {block}, {self.group_blocks}")
        x = nest.gep(self.x, nest.mul(image, self.x_image), nest.mul(group, self.x_group))
        w = nest.gep(self.w, nest.mul(nest.mul(block, form.outputs), self.w_output))
        out = nest.gep(self.out, nest.mul(nest.mul(i, form.outputs), self.plane_out))
        nest.loop(
            0, self.wide, lambda at: self._strip(at, x, w, out), step=form.vectors * nest.width
        )

    def _strip(self, at: str, x: str, w: str, out: str) -> None:
        """Write the columns of a strip, from result `at` on, for all rows."""
        nest, form = self.nest, self.form
        first = nest.sub(nest.mul(at, form.stride[1]), self.right)
        masks = {}
        for v in range(form.vectors):
            for kx in range(form.kernel[1]):
                for half in range(form.halves):
                    moved = (v * form.stride[1] + half) * nest.width + kx * form.dilation[1]
                    columns = nest.indices(nest.add(first, moved))
                    masks[v, kx, half] = nest.in_range_mask(columns, self.width)
        writes = [
            nest.first_lanes(nest.sub(self.wide, nest.add(at, v * nest.width)))
            for v in range(form.vectors)
        ]
        here = nest.gep(x, nest.mul(first, 4))
        goal = nest.gep(out, nest.mul(at, 4))
        # The last rows begin early, and are computed twice.
        last = nest.sub(self.high, form.rows)

        def rows(y: str) -> None:
            self._tile(str(nest.minimum(y, last)), first, here, w, goal, masks, writes)

        nest.loop(0, self.high, rows, step=form.rows)

    def _tile(
        self, y: str, first: Value, here: str, w: str, goal: str, masks: Any, writes: list[str]
    ) -> None:
        """Write a tile of results: rows from `y` on, of all outputs of the block."""
        nest, form = self.nest, self.form
        top = nest.sub(nest.mul(y, form.stride[0]), self.down)
        pitch = nest.mul(self.width, 4)
        blank = nest.gep(self.zeros, nest.mul(first, 4))
        seen: dict[int, list[tuple[int, int]]] = {}  # by row of x: rows of results and of taps
        for row in range(form.rows):
            for ky in range(form.kernel[0]):
                place = row * form.stride[0] + ky * form.dilation[0]
                seen.setdefault(place, []).append((row, ky))
        numbers = {place: nest.add(top, place) for place in sorted(seen)}

        def channel(c: str, x: str, w: str, *so_far: str) -> list[str]:
            sums = list(so_far)
            for place, readers in sorted(seen.items()):
                source = row_or_zeros(nest, x, numbers[place], self.height, pitch, blank)
                for kx in range(form.kernel[1]):
                    for v in range(form.vectors):
                        value = self._load(source, v, kx, masks)
                        for o in range(form.outputs):
                            for r, ky in readers:
                                tap = nest.gep(
                                    w,
                                    nest.mul(self.w_output, o),
                                    4 * (ky * form.kernel[1] + kx),
                                )
                                i = (o * form.rows + r) * form.vectors + v
                                factor = nest.broadcast(tap)
                                sums[i] = nest.floats.fma(factor, value, sums[i])
            taps = math.prod(form.kernel)
            return [nest.gep(x, self.x_channel), nest.gep(w, 4 * taps), *sums]

        count = form.outputs * form.rows * form.vectors
        zero = nest.floats.const(0.0)
        carried = [("ptr", here), ("ptr", w), *[(nest.kind, zero)] * count]
        found = nest.loop(0, self.channels, channel, carried)[2:]
        start = nest.gep(goal, nest.mul(nest.mul(y, self.wide), 4))
        for i, value in enumerate(found):
            o, r, v = (
                i // (form.rows * form.vectors),
                i // form.vectors % form.rows,
                i % form.vectors,
            )
            moves = nest.mul(self.plane_out, o), nest.mul(self.wide, 4 * r), v * nest.nbytes
            nest.store(value, nest.gep(start, *moves), writes[v])

    def _load(self, row: str, v: int, kx: int, masks: Any) -> str:
        """Write the elements of a row of x that a tap sees from a vector of results."""
        nest, step = self.nest, self.form.stride[1]
        start = 4 * kx * self.form.dilation[1] + v * step * nest.nbytes
        return load_spaced(
            nest, row, start, step, [masks[v, kx, half] for half in range(self.form.halves)]
        )

"""Convolutions of one small image: columns of all windows, and one product, in one native call.

Other kernels repack the weights, which takes longer than the products if an image has few
positions. Here weights are read in place: out[o, p] = Σ w[o, j] · columns[j, p] over the channels
and taps j in order. float32, on CPUs.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import LoopNestWriter, call_native
from graphflow.ops.kernels.conv.implicit.tap_tables import WindowMap, seen_pixels
from graphflow.ops.kernels.gemm.gemm import MatrixProduct, plan_product
from graphflow.ops.kernels.jit.array_address import align_up
from graphflow.ops.kernels.jit.compiler import KernelTask, compiler, vector_width
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.windows.window_arguments import Ints, Windows

MOST_POSITIONS, MOST_PIXELS = 64, 4096
"""Positions of windows of several taps, and of one tap (sums are those of `pointwise`)."""
_SIZES = 8
_GATHER_NANOSECONDS = 6.0


class OneImagePlan(NamedTuple):
    """The product of the weights and the columns, and how columns are gathered.

    Attributes:
        sizes: channels, taps, vectors of a row of columns, bytes of a plane; the address of the
            product's function, its range, and the offset of its scratch memory; bytes of its table
            of sizes, this table, and the offset of the pixel that each tap of each position sees
            (i32 bytes, negative for padding).
        columns: bytes of the columns.
    """

    product: MatrixProduct
    sizes: Ints
    columns: int

    @property
    def task(self) -> KernelTask:
        """The convolution as an entry of a table of native calls."""
        channels, taps, vectors = self.sizes[:3]
        time = self.product.nanoseconds + channels * taps * vectors * _GATHER_NANOSECONDS
        return KernelTask(
            *_source(self.product.swapped), self.sizes, 1, time, self.columns + self.product.scratch
        )


@lru_cache(maxsize=256)
def plan(inputs: int, outputs: int, space: Ints, windows: Windows) -> OneImagePlan:
    """Plan the convolution of one image."""
    taps, positions, width = math.prod(windows.kernel), math.prod(windows.out), vector_width()
    vectors = -(-positions // width)
    pitch, depth = vectors * width * 4, inputs * taps
    product = plan_product(
        (), outputs, depth, positions, "float32", (positions * 4, 4), (depth * 4, 4), (pitch, 4)
    )
    assert product is not None  # each operand has a contiguous axis
    place, inside = seen_pixels(WindowMap(space, windows, False))
    offsets = np.full((taps, vectors * width), -1, np.int32)
    offsets[:, :positions] = np.where(inside, place * 4, -1).T
    columns = align_up(depth * pitch)
    sizes = (
        inputs, taps, vectors, math.prod(space) * 4, product.function.address, product.units,
        columns, 8 * len(product.sizes), *product.sizes,
        *offsets.reshape(-1).view(np.int64).tolist(),
    )  # fmt: skip
    return OneImagePlan(product, sizes, columns)


def convolve(out: Any, x: Any, w: Any, windows: Windows) -> None:
    """Write out[0, o, p] = Σ w[o, c, k] · x[0, c, p·stride - before + k·dilation]."""
    x, w = as_contiguous(x), as_contiguous(w)
    planned = plan(x.shape[1], len(w), x.shape[2:], windows)
    columns = operand_place(scratch(np, "columns", (planned.columns,), np.uint8))
    # Threads share the product, so it is no part of the call.
    sizes = (*planned.sizes[:5], 0, *planned.sizes[6:])
    call_native(
        compiler().function(*_source(planned.product.swapped)),
        (operand_place(x), 0, 0, columns),
        sizes,
        0,
        1,
    )
    planned.product.run(operand_place(out), operand_place(w), columns)


@cache
def _source(swapped: bool) -> tuple[str, str]:
    """Write the columns of an image, and call their product with the weights.

    Pointers: x, w, out, scratch memory. Sizes: as in `OneImagePlan`.

    Args:
        swapped: whether the product's first operand is the columns.
    """
    nest = LoopNestWriter(vector_width(), 4, _SIZES)
    x, w, out, columns = nest.pointers
    channels, taps, vectors, plane, function, units, apart, table = nest.sizes
    product_sizes = nest.gep("%sizes", 8 * _SIZES)
    offsets = nest.gep(product_sizes, table)
    row = nest.mul(vectors, nest.nbytes)
    indices = nest.lanes.vector("i32")

    def vector(v: str, pixels: str, seen: str, target: str) -> None:
        moved = nest.mul(v, nest.nbytes)
        index = nest.write(f"load {indices}, ptr {nest.gep(seen, moved)}, align 4")
        inside = nest.write(f"icmp sge {indices} {index}, zeroinitializer")
        nest.store(nest.gather_at(pixels, index, inside), nest.gep(target, moved))

    def tap(t: str, pixels: str, target: str) -> None:
        moved = nest.mul(t, row)
        seen, there = nest.gep(offsets, moved), nest.gep(target, moved)
        nest.loop(0, vectors, lambda v: vector(v, pixels, seen, there))

    def channel(c: str) -> None:
        pixels = nest.gep(x, nest.mul(c, plane))
        target = nest.gep(columns, nest.mul(c, nest.mul(taps, row)))
        nest.loop(0, taps, lambda t: tap(t, pixels, target))

    nest.loop(0, channels, channel)
    memory = nest.gep(columns, apart)
    operands = (columns, w) if swapped else (w, columns)
    given = nest.write("alloca [4 x ptr], align 8")
    for i, pointer in enumerate((*operands, out, memory)):
        nest.lines.append(f"  store ptr {pointer}, ptr {nest.gep(given, 8 * i)}, align 8")
    code = nest.write(f"inttoptr i64 {function} to ptr")
    nest.lines.append(f"  call void {code}(ptr {given}, ptr {product_sizes}, i64 0, i64 {units})")
    return nest.source()

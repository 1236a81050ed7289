"""Matrix products by generated kernels: plan a product of some sizes, and run it.

    gemm(out, a, b)                              # out = a @ b
    gemm(out, a, b, transpose_b=True)            # out = a @ b.T
    gemm(out, a, b, accumulate=True)             # out += a @ b

Arrays are float32 or float64 of nearly any strides (see `plan_product`). Axes of a batch before the
last two broadcast, and all matrices of a batch are one native call. An element is one chain of
fused multiply-adds in order. So its bits depend on its row, its column and their length alone,
never on the other sizes, strides, flags, threads, or the tiling.

Other generated code calls the native function itself. `plan_product` gives a `MatrixProduct` with
the function's address, its table of sizes, and its bytes of scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from functools import cache, lru_cache
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShapeError
from graphflow.ir.spec import broadcast_shapes
from graphflow.ops.kernels.gemm import macrokernel
from graphflow.ops.kernels.gemm.kernel_form import (
    ACCUMULATE,
    APART,
    COPIED,
    EXCHANGED,
    IN_PLACE,
    TRANSPOSED,
    GemmForm,
    GemmSize,
)
from graphflow.ops.kernels.gemm.native_product import NativeProduct
from graphflow.ops.kernels.gemm.tiling import ELEMENTS, choose_tiling, far_cycles
from graphflow.ops.kernels.jit.array_address import align_up
from graphflow.ops.kernels.jit.compiler import (
    TaskShare,
    cut_rows,
    name_module,
    vector_width,
)
from graphflow.ops.kernels.jit.kernel_recording import operand_place

_TURNED_ROWS = 128
"""Rows of a share below which transposing all columns of y costs more than reading all rows of x.
"""

Strides = tuple[int, ...]
"""Bytes from one element to the next along each axis."""


def is_supported(dtype: str) -> bool:
    """Return whether there are kernels for this dtype on this processor."""
    return dtype in ELEMENTS and vector_width() >= 8


@cache
def _kernel(form: GemmForm) -> tuple[str, str]:
    return name_module(*macrokernel.write_gemm(form))


# Products -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatrixProduct(NativeProduct):
    """A product of float32 or float64 matrices; `GemmSize` names its sizes.

    With the flag APART it is added to another array.
    """

    form: GemmForm = field(kw_only=True)

    @property
    def kernel(self) -> tuple[str, str]:
        """The kernel's name and the text of its module."""
        return _kernel(self.form)

    def cut(self, count: int) -> list[TaskShare]:
        """Cut the product into at most `count` shares: some tiles of all columns, or all tiles of
        some columns if tiles are few, or if each share would transpose all columns for few rows.
        """
        sizes, wide = self.sizes, self.form.columns
        panels = -(-sizes[GemmSize.COLUMNS] // wide)
        is_one = self.units == sizes[GemmSize.TILES]
        rows = self.units * self.form.height // count
        turned = sizes[GemmSize.Y_LAYOUT] == EXCHANGED and rows < _TURNED_ROWS
        if not is_one or panels < count or not (self.units < 4 * count or turned):
            return cut_rows(self.units, 1, count)
        ends = [panels * i // count * wide for i in range(count)]
        to = sizes[GemmSize.OUT_COLUMN]
        outs = (to, to) if sizes[GemmSize.FLAGS] & APART else (to,)
        steps = (0, sizes[GemmSize.Y_COLUMN], *outs)
        return self._cut_columns([*ends, sizes[GemmSize.COLUMNS]], GemmSize.COLUMNS, steps)


@lru_cache(maxsize=4096)
def plan_product(
    batch: tuple[int, ...],
    m: int,
    k: int,
    n: int,
    dtype: str,
    out: Strides,
    a: Strides,
    b: Strides,
    accumulate: bool = False,
) -> MatrixProduct | None:
    """Plan the product of a batch of (m, k) and (k, n) matrices.

    None if the axes of the batch do not join to two, or a matrix has no contiguous axis (one of the
    operands may lack one).

    Args:
        out, a, b: strides along the axes of the batch (0 for broadcast ones), rows and columns; of
            transposed operands in reverse.
    """
    axes = join_batch_axes(batch, (a, b, out))
    item = np.dtype(dtype).itemsize
    choices = []
    for swapped in (False, True):
        rows, columns = (n, m) if swapped else (m, n)
        x, y = (b[:-3:-1], a[:-3:-1]) if swapped else (a[-2:], b[-2:])
        to = out[:-3:-1] if swapped else out[-2:]
        exchanged = y[1] != item and columns > 1
        by_columns = to[1] != item and columns > 1
        if (exchanged and y[0] != item and k > 1) or (by_columns and to[0] != item and rows > 1):
            continue
        of_x = COPIED if x[0] == item else EXCHANGED if x[1] == item else IN_PLACE
        of_y = EXCHANGED if exchanged else COPIED
        cut = choose_tiling(rows, k, columns, dtype, of_x, of_y, accumulate or by_columns)
        cycles = cut.cycles
        if of_x == COPIED and cut.x == IN_PLACE:
            own = (b if swapped else a)[:-2]
            matrices = math.prod(n for n, by in zip(batch, own, strict=True) if by)
            cycles += far_cycles(x[1], rows * k * item, matrices)
        choices.append((cycles, cut, swapped, by_columns, x, y, to))
    if not choices or axes is None:
        return None
    _, cut, swapped, by_columns, x, y, to = min(choices, key=lambda choice: choice[0])
    form = cut.form
    packed = min(cut.block, cut.tiles) * (form.height * k + form.width) * item if cut.x else 0
    buffer = align_up(packed) + align_up(min(k, cut.chunk) + form.width) * form.columns * item
    end = buffer + min(cut.block, cut.tiles) * form.height * form.columns * item
    (inner, count), strides = axes
    if swapped:
        strides = (strides[1], strides[0], strides[2])
    sizes = {
        GemmSize.COLUMNS: m if swapped else n,
        GemmSize.K: k,
        GemmSize.TILES: cut.tiles,
        GemmSize.TALL: cut.tall,
        GemmSize.HEIGHT: form.height,
        GemmSize.PANEL_COLUMNS: form.columns,
        GemmSize.BLOCK: cut.block,
        GemmSize.GROUP: cut.group,
        GemmSize.CHUNK: cut.chunk,
        GemmSize.X_ROW: x[0],
        GemmSize.X_K: x[1],
        GemmSize.X_LAYOUT: cut.x,
        GemmSize.Y_K: y[0],
        GemmSize.Y_COLUMN: y[1],
        GemmSize.Y_LAYOUT: cut.y,
        GemmSize.OUT_ROW: to[0],
        GemmSize.OUT_COLUMN: to[1],
        GemmSize.FLAGS: accumulate * ACCUMULATE + by_columns * TRANSPOSED,
        GemmSize.INNER: inner,
        GemmSize.X_OUTER: strides[0][0],
        GemmSize.X_INNER: strides[0][1],
        GemmSize.Y_OUTER: strides[1][0],
        GemmSize.Y_INNER: strides[1][1],
        GemmSize.OUT_OUTER: strides[2][0],
        GemmSize.OUT_INNER: strides[2][1],
        GemmSize.PANEL: align_up(packed),
        GemmSize.BUFFER: buffer,
    }
    units = count * cut.tiles if m and n else 0
    time = count * (cut.cycles / 2.8 + 50)
    table = tuple(sizes[s] for s in GemmSize)
    return MatrixProduct(table, units, swapped, time, end, form=form)


def join_batch_axes(
    batch: Sequence[int], operands: Sequence[Strides]
) -> tuple[tuple[int, int], tuple[tuple[int, int], ...]] | None:
    """Join the axes of a batch to two; None if that is impossible.

    Returns:
        The size of the last axis and of both, and the strides of each operand along them.
    """
    sizes: list[int] = []
    steps: list[tuple[int, ...]] = []
    count = 1
    for axis, size in enumerate(batch):
        count *= size
        if size == 1:
            continue
        step = tuple(strides[axis] for strides in operands)
        if sizes and all(a == b * size for a, b in zip(steps[-1], step, strict=True)):
            sizes[-1] *= size
            steps[-1] = step
        else:
            sizes.append(size)
            steps.append(step)
    if len(sizes) > 2:
        return None
    none = (0,) * len(operands)
    first, last = [none, none, *steps][-2:]
    return (max(1, sizes[-1]) if sizes else 1, count), tuple(zip(first, last, strict=True))


# Arrays ---------------------------------------------------------------------------------------


def gemm(
    out: Any,
    a: Any,
    b: Any,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: bool = False,
) -> None:
    """Write out = a @ b, or out += a @ b, over the last two axes; those before them broadcast.

    Args:
        out: (…, m, n), which shares no memory with a and b.
        a, b: (…, m, k) and (…, k, n), or with their last two axes swapped if a flag says so.

    Raises:
        ShapeError: shapes, dtypes or strides do not fit.
    """
    key = (
        out.shape, a.shape, b.shape, out.strides, a.strides, b.strides, out.dtype, a.dtype,
        b.dtype, transpose_a, transpose_b, accumulate,
    )  # fmt: skip
    _plan_for_arrays(*key).run(operand_place(out), operand_place(a), operand_place(b))


@lru_cache(maxsize=4096)
def _plan_for_arrays(
    out: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], out_strides: Strides,
    a_strides: Strides, b_strides: Strides, dtype: Any, a_dtype: Any, b_dtype: Any,
    transpose_a: bool, transpose_b: bool, accumulate: bool,
) -> MatrixProduct:  # fmt: skip
    if transpose_a:
        a, a_strides = swap_last_two(a), swap_last_two(a_strides)
    if transpose_b:
        b, b_strides = swap_last_two(b), swap_last_two(b_strides)
    rank, (m, n), k = len(out), out[-2:], a[-1]
    product = None
    batch = out[:-2]
    if (
        dtype == a_dtype == b_dtype
        and is_supported(dtype.name)
        and (a[-2], k, b[-1]) == (m, b[-2], n)
        and broadcast_shapes(broadcast_shapes(a[:-2], b[:-2]), batch) == batch
    ):
        item = dtype.itemsize
        spread = [
            (0,) * (rank - len(shape)) + effective_strides(shape, strides, item)
            for shape, strides in ((a, a_strides), (b, b_strides))
        ]
        out_strides = effective_strides(out, out_strides, item)
        product = plan_product(batch, m, k, n, dtype.name, out_strides, *spread, accumulate)
    if product is None:
        raise ShapeError(
            f"no kernel for {a_dtype}{a} of strides {a_strides} times {b_dtype}{b} of strides "
            f"{b_strides} to {dtype}{out} of strides {out_strides}"
        )
    return product


def effective_strides(shape: tuple[int, ...], strides: Strides, item: int) -> Strides:
    """Return strides without those of axes that have no second element."""
    matrix = strides[-2:] if 0 not in shape else (shape[-1] * item, item)
    return (*(s if n > 1 else 0 for n, s in zip(shape[:-2], strides, strict=False)), *matrix)


def swap_last_two(axes: tuple[int, ...]) -> tuple[int, ...]:
    return (*axes[:-2], axes[-1], axes[-2])

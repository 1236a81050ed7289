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

import ctypes
import threading
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShapeError
from graphflow.ir.spec import broadcast_shapes
from graphflow.ops.kernels.codegen.memory_loops import call_native
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
from graphflow.ops.kernels.gemm.tiling import ELEMENTS, choose_tiling
from graphflow.ops.kernels.jit.array_address import address, align_up, empty_aligned
from graphflow.ops.kernels.jit.call_recorder import current_recorder
from graphflow.ops.kernels.jit.compiler import (
    KernelTask,
    NativeFunction,
    TaskShare,
    compiler,
    cut_rows,
    name_module,
    vector_width,
)
from graphflow.ops.kernels.jit.kernel_recording import operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import Pool, current_pool, run_native_parts

_THREADING_NANOSECONDS = 20_000
"""Nanoseconds of work from which threads share it."""
_TURNED_ROWS = 128
"""Rows of a share below which transposing all columns of y costs more than reading all rows of x.
"""
_GIL_RELEASE_NANOSECONDS = 20_000
"""Nanoseconds of work from which the GIL is released."""

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
class MatrixProduct:
    """A kernel with the sizes of a product; only addresses are left to give.

            void kernel(ptr* {x, y, out, scratch}, i64* sizes, i64 start, i64 stop)
            void kernel(ptr* {x, y, addend, out, scratch}, …)  # with the flag APART

    Attributes:
        sizes: as `GemmSize` names them.
        units: the kernel runs from 0 to this. Parts may run at once on any threads, each with
            scratch memory of its own.
        swapped: whether x is b, and y is a.
        nanoseconds: a rough estimate of one thread's time.
        scratch: bytes, 64-byte aligned.
        blocks: as in `KernelTask`, if the result is contiguous and larger than what stays in a
            cache.
    """

    form: GemmForm
    sizes: tuple[int, ...]
    units: int
    swapped: bool
    nanoseconds: float
    scratch: int
    blocks: tuple[tuple[int, int], ...] = ()

    @property
    def task(self) -> KernelTask:
        """The product as an entry of a table of native calls."""
        name, text = _kernel(self.form)
        order = (1, 0) if self.swapped else ()
        return KernelTask(
            name, text, self.sizes, self.units, self.nanoseconds, self.scratch, order,
            blocks=self.blocks, cut=self.cut,
            share=_THREADING_NANOSECONDS / 2,
        )  # fmt: skip

    @cached_property
    def function(self) -> NativeFunction:
        return compiler().function(*_kernel(self.form))

    @cached_property
    def table(self) -> np.ndarray[Any, Any]:
        """The sizes as the function takes them."""
        return np.array(self.sizes, np.int64)

    @cached_property
    def _table_pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(address(self.table))

    def run(self, out: int, a: int, b: int, addend: int | None = None) -> None:
        """Run the product for operands at these addresses, on the threads of the current pool.

        With the flag APART it is added to `addend`.
        """
        x, y = (b, a) if self.swapped else (a, b)
        given = (x, y, out) if addend is None else (x, y, addend, out)
        if current_recorder() is not None:
            self._record(given)
            return
        pool = current_pool() if self.nanoseconds > _THREADING_NANOSECONDS else None
        if pool is None or pool.threads < 2:
            function = (
                self.function.holding_gil
                if self.nanoseconds < _GIL_RELEASE_NANOSECONDS
                else self.function.releasing_gil
            )
            function(_Pointers(*given, _scratch(self.scratch)), self._table_pointer, 0, self.units)
            return
        self._run_shared(pool, given)

    def _record(self, given: Sequence[int]) -> None:
        """Add the product's shares to the current recorder."""
        recorder = current_recorder()
        assert recorder is not None
        count = 1 if recorder.recording is None else recorder.recording.threads
        is_long = self.nanoseconds > _THREADING_NANOSECONDS
        shares = self.cut(count) if is_long else [TaskShare(0, self.units)]

        def part(i: int) -> None:
            share = shares[i]
            own = operand_place(scratch(np, "product", (self.scratch,), np.uint8))
            places = [g + by for g, by in zip_longest(given, share.offsets, fillvalue=0)]
            call_native(
                self.function, (*places, own), share.sizes or self.sizes, share.start, share.stop
            )

        run_native_parts(part, len(shares))

    def _run_shared(self, pool: Pool, given: Sequence[int]) -> None:
        """Run the product on the threads of a pool."""
        shares = self.cut(pool.threads)
        own = align_up(self.scratch)
        memory = address(scratch(np, "shares of products", (len(shares) * own,), np.uint8))
        tables = [
            np.array([*(g + by for g, by in zip_longest(given, share.offsets, fillvalue=0)),
                      memory + i * own], np.int64)
            for i, share in enumerate(shares)
        ]  # fmt: skip
        sizes = [np.array(share.sizes or self.sizes, np.int64) for share in shares]
        words = [
            (self.function.address, address(table), address(size), share.start, share.stop)
            for table, size, share in zip(tables, sizes, shares, strict=True)
        ]
        pool.run_entries(np.array(words, np.int64), len(shares))

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
        shares = []
        for start, stop in pairwise([*ends, sizes[GemmSize.COLUMNS]]):
            own = list(sizes)
            own[GemmSize.COLUMNS] = stop - start
            to = start * sizes[GemmSize.OUT_COLUMN]
            outs = (to, to) if sizes[GemmSize.FLAGS] & APART else (to,)
            offsets = (0, start * sizes[GemmSize.Y_COLUMN], *outs)
            shares.append(TaskShare(0, self.units, tuple(own), offsets))
        return shares


_Pointers = ctypes.c_void_p * 5
_thread_local = threading.local()


def _scratch(nbytes: int) -> int:
    """Return the address of the calling thread's scratch memory."""
    if nbytes > getattr(_thread_local, "nbytes", -1):
        _thread_local.memory = empty_aligned(nbytes)
        _thread_local.place = address(_thread_local.memory)
        _thread_local.nbytes = nbytes
    place: int = _thread_local.place
    return place


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
    axes = _join_batch_axes(batch, (a, b, out))
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
        choices.append((cut, swapped, by_columns, x, y, to))
    if not choices or axes is None:
        return None
    cut, swapped, by_columns, x, y, to = min(choices, key=lambda choice: choice[0].cycles)
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
    return MatrixProduct(form, tuple(sizes[s] for s in GemmSize), units, swapped, time, end)


def _join_batch_axes(
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

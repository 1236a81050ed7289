"""Matrix products by generated kernels: how a product of some sizes is cut, and how it is run.

    gemm(out, a, b)                              # out = a @ b
    gemm(out, a, b, transpose_b=True)            # out = a @ b.T
    gemm(out, a, b, accumulate=True)             # out += a @ b

Arrays are float32 or float64 of nearly any strides (see `planned`), with axes of a batch before the
last two, which broadcast: all matrices of a batch are one native call. An element's bits depend on
its row, its column and their length alone, never on the other sizes, strides, flags, threads, or
how a product is cut: it is one chain of fused multiply-adds, in order.

Other generated code calls the native function itself: `planned(...)` gives a `Product`, which has
the function's address, the table of sizes that it takes, and how much scratch memory it wants.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShapeError
from graphflow.ir.spec import broadcast_shapes
from graphflow.ops.kernels.gemm import macrokernel as gemm_text
from graphflow.ops.kernels.gemm.kernel_form import (
    ACCUMULATE,
    APART,
    COPIED,
    EXCHANGED,
    IN_PLACE,
    TRANSPOSED,
    Form,
    Size,
)
from graphflow.ops.kernels.gemm.tiling import ELEMENTS, LONG
from graphflow.ops.kernels.gemm.tiling import cut as best_cut
from graphflow.ops.kernels.jit.array_address import address, aligned, fresh
from graphflow.ops.kernels.jit.compiler import Function, Task, compiler, named, vector_width
from graphflow.ops.kernels.jit.thread_pool import current_pool

_SHARED = 40_000
"""Nanoseconds of work from which threads share it."""
_FREED = 20_000
"""Nanoseconds of work from which the interpreter's lock is let go."""
_CACHED = 512 << 10
"""Bytes of a result that stay in a cache until they are read."""

Strides = tuple[int, ...]
"""Bytes from one element to the next along each axis."""


def available(dtype: str) -> bool:
    """Whether there are such kernels for this dtype and processor."""
    return dtype in ELEMENTS and vector_width() >= 8


@cache
def _kernel(form: Form) -> tuple[str, str]:
    return named(*gemm_text.write(form))


# Products -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A kernel with the sizes of a product: what is left to give is where the operands are.

        void kernel(ptr* {x, y, out, scratch}, i64* sizes, i64 start, i64 stop)
        void kernel(ptr* {x, y, addend, out, scratch}, …)  # with the flag APART

    Attributes:
        sizes: as `Size` names them.
        units: the kernel runs from 0 to this; parts of it may run at once, on any threads, with
            scratch memory of their own.
        swapped: x is b, and y is a.
        nanoseconds: a rough guess of one thread's time.
        scratch: bytes, 64-byte aligned.
        blocks: at which units how many of the result's first elements are done, where the result
            is larger than what stays in a cache, and contiguous.
    """

    form: Form
    sizes: tuple[int, ...]
    units: int
    swapped: bool
    nanoseconds: float
    scratch: int
    blocks: tuple[tuple[int, int], ...] = ()

    @property
    def task(self) -> Task:
        """The same as an entry of a table of native calls."""
        name, text = _kernel(self.form)
        order = (1, 0) if self.swapped else ()
        return Task(
            name, text, self.sizes, self.units, self.nanoseconds, self.scratch, order,
            blocks=self.blocks,
        )  # fmt: skip

    @cached_property
    def function(self) -> Function:
        return compiler().function(*_kernel(self.form))

    @cached_property
    def table(self) -> np.ndarray[Any, Any]:
        """The sizes as the function takes them."""
        return np.array(self.sizes, np.int64)

    @cached_property
    def _given(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(address(self.table))

    def run(self, out: int, a: int, b: int, addend: int | None = None) -> None:
        """For operands at these addresses, on the threads of the current pool; with the flag APART
        it is added to `addend`."""
        x, y = (b, a) if self.swapped else (a, b)
        given = (x, y, out) if addend is None else (x, y, addend, out)
        pool = current_pool() if self.nanoseconds > _SHARED else None
        if pool is None or pool.threads < 2:
            function = self.function.held if self.nanoseconds < _FREED else self.function.freed
            function(_Pointers(*given, _scratch(self.scratch)), self._given, 0, self.units)
            return
        shares = self._shares(pool.threads)

        def part(i: int) -> None:
            share = shares[i]
            moved = [g + by for g, by in zip(given, share.places, strict=False)]
            table = ctypes.c_void_p(address(share.table))
            pointers = _Pointers(*moved, _scratch(self.scratch))
            self.function.freed(pointers, table, share.start, share.stop)

        pool.run(part, len(shares))

    def _shares(self, threads: int) -> list[_Share]:
        """What each thread does: some tiles of all columns, or where these are few, all tiles of
        some columns."""
        found = self._known.get(threads)
        if found is None:
            found = self._known[threads] = self._shared(threads)
        return found

    @cached_property
    def _known(self) -> dict[int, list[_Share]]:
        return {}

    def _shared(self, threads: int) -> list[_Share]:
        sizes, wide = self.sizes, self.form.columns
        panels = -(-sizes[Size.COLUMNS] // wide)
        if self.units >= 4 * threads or self.units != sizes[Size.TILES] or panels < threads:
            parts = min(threads, max(1, self.units))
            ends = [self.units * i // parts for i in range(parts + 1)]
            return [_Share(self.table, start, stop) for start, stop in pairwise(ends)]
        ends = [panels * i // threads * wide for i in range(threads)]
        shares = []
        for start, stop in pairwise([*ends, sizes[Size.COLUMNS]]):
            table = self.table.copy()
            table[Size.COLUMNS] = stop - start
            to = start * sizes[Size.OUT_COLUMN]
            places = (0, start * sizes[Size.Y_COLUMN], to, to)
            shares.append(_Share(table, 0, self.units, places))
        return shares


@dataclass(frozen=True, eq=False)
class _Share:
    """A part of a product: its sizes, its units, and how far its operands are from the whole's."""

    table: np.ndarray[Any, Any]
    start: int
    stop: int
    places: tuple[int, int, int, int] = (0, 0, 0, 0)


_Pointers = ctypes.c_void_p * 5
_own = threading.local()


def _scratch(nbytes: int) -> int:
    """The address of memory of the calling thread's own."""
    if nbytes > getattr(_own, "nbytes", -1):
        _own.memory = fresh(nbytes)
        _own.place = address(_own.memory)
        _own.nbytes = nbytes
    place: int = _own.place
    return place


@lru_cache(maxsize=4096)
def planned(
    batch: tuple[int, ...],
    m: int,
    k: int,
    n: int,
    dtype: str,
    out: Strides,
    a: Strides,
    b: Strides,
    accumulate: bool = False,
) -> Product | None:
    """The product of a batch of (m, k) and (k, n) matrices.

    None where it cannot be walked: the axes of the batch do not join to two, or a matrix has no
    axis along which elements are next to each other (one of the two operands may have none).

    Args:
        out, a, b: their strides along the axes of the batch (0 where they broadcast), rows and
            columns; those of transposed operands are given the other way round.
    """  # fmt: skip
    axes = _joined(batch, (a, b, out))
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
        cut = best_cut(rows, k, columns, dtype, of_x, of_y, accumulate or by_columns)
        choices.append((cut, swapped, by_columns, x, y, to))
    if not choices or axes is None:
        return None
    cut, swapped, by_columns, x, y, to = min(choices, key=lambda choice: choice[0].cycles)
    form = cut.form
    packed = min(cut.block, cut.tiles) * (form.height * k + form.width) * item if cut.x else 0
    buffer = aligned(packed) + aligned(min(k, cut.chunk) + form.width) * form.columns * item
    end = buffer + min(cut.block, cut.tiles) * form.height * form.columns * item
    (inner, count), strides = axes
    if swapped:
        strides = (strides[1], strides[0], strides[2])
    sizes = {
        Size.COLUMNS: m if swapped else n, Size.K: k, Size.TILES: cut.tiles, Size.TALL: cut.tall,
        Size.HEIGHT: form.height, Size.PANEL_COLUMNS: form.columns,
        Size.BLOCK: cut.block, Size.GROUP: cut.group, Size.CHUNK: cut.chunk,
        Size.X_ROW: x[0], Size.X_K: x[1], Size.X_LAYOUT: cut.x,
        Size.Y_K: y[0], Size.Y_COLUMN: y[1], Size.Y_LAYOUT: cut.y,
        Size.OUT_ROW: to[0], Size.OUT_COLUMN: to[1],
        Size.FLAGS: accumulate * ACCUMULATE + by_columns * TRANSPOSED,
        Size.INNER: inner, Size.X_OUTER: strides[0][0], Size.X_INNER: strides[0][1],
        Size.Y_OUTER: strides[1][0], Size.Y_INNER: strides[1][1],
        Size.OUT_OUTER: strides[2][0], Size.OUT_INNER: strides[2][1],
        Size.PANEL: aligned(packed), Size.BUFFER: buffer,
    }  # fmt: skip
    units = count * cut.tiles if m and n else 0
    time = count * (cut.cycles / 2.8 + 50)
    return Product(form, tuple(sizes[s] for s in Size), units, swapped, time, end)


def _joined(
    batch: Sequence[int], operands: Sequence[Strides]
) -> tuple[tuple[int, int], tuple[tuple[int, int], ...]] | None:
    """The axes of a batch as two at most: the size of the last one and of both, and the strides of
    each operand along them."""
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


# Contiguous operands --------------------------------------------------------------------------

_LARGE = 1.2e9
"""Flops of one matrix from which BLAS, which packs both operands, is as fast or faster."""
_LARGE_APART = 6e8
"""The same where rows of a transposed first operand are read from far and wide."""
_FAR, _FEW = 32e6, 2048
"""Bytes of such operands, which no cache holds, from which it is quicker for any number of flops,
unless the result has so few elements that one pass over both gives it."""


@lru_cache(maxsize=4096)
def preferred(
    a: tuple[int, ...], b: tuple[int, ...], dtype: str, transpose_a: bool, transpose_b: bool,
    added: bool = False,
) -> Product | None:  # fmt: skip
    """The product of contiguous arrays of these shapes, where that is faster than BLAS; None where
    it is not. A function of shapes, flags and dtype alone, since bits follow from it.

    Args:
        added: it takes something of the result's shape to which the product is added.
    """
    if not available(dtype):
        return None
    m, k = a[:-3:-1] if transpose_a else a[-2:]
    n = b[-2] if transpose_b else b[-1]
    flops = 2.0 * m * k * n
    # Most of a register would be empty, which does not matter for a few elements.
    narrow = (n <= 4 or (m <= 4 and transpose_b)) and m * k * n > 4096
    is_apart = transpose_a and k > LONG
    is_far = is_apart and k * (m + n) * np.dtype(dtype).itemsize >= _FAR and m * n > _FEW
    if narrow or is_far or flops > (_LARGE_APART if is_apart else _LARGE):
        return None
    batch: tuple[int, ...] = broadcast_shapes(a[:-2], b[:-2])  # type: ignore[assignment]
    rank, item = len(batch) + 2, np.dtype(dtype).itemsize
    strides = []
    for shape, turn in ((a, transpose_a), (b, transpose_b), ((*batch, m, n), False)):
        steps = [item]
        for size in shape[:0:-1]:
            steps.insert(0, steps[0] * size)
        own = _steps(shape, tuple(steps), item)
        strides.append((0,) * (rank - len(shape)) + (_turned(own) if turn else own))
    found = planned(batch, m, k, n, dtype, strides[2], strides[0], strides[1], added)
    count = math.prod(batch)
    if found is not None and added:
        sizes = list(found.sizes)
        sizes[Size.FLAGS] |= APART
        found = replace(found, sizes=tuple(sizes))
    if found is None or count * m * n * item <= 2 * _CACHED:
        return found
    return replace(found, blocks=_blocks(found, count, m, n, item))


def _blocks(product: Product, count: int, m: int, n: int, item: int) -> tuple[tuple[int, int], ...]:
    """Where blocks of a product end: some tiles of a matrix, or some matrices."""
    tiles = product.units // count
    step, height = product.sizes[Size.BLOCK], product.form.height - 1
    if product.swapped or m * n * item <= _CACHED:
        some = max(1, _CACHED // (m * n * item))
        ends = [(tiles * i, m * n * i) for i in range(some, count, some)]
    else:
        tall = product.sizes[Size.TALL]
        ends = [
            (tiles * i + tile, m * n * i + n * (tile * height + min(tile, tall)))
            for i in range(count)
            for tile in (*range(step, tiles, step), tiles)
        ][:-1]
    return (*ends, (product.units, count * m * n))


# Arrays ---------------------------------------------------------------------------------------


def gemm(
    out: Any,
    a: Any,
    b: Any,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: bool = False,
) -> None:
    """out = a @ b, or out += a @ b, over the last two axes; those before them broadcast.

    Args:
        out: (…, m, n), which shares no memory with a and b.
        a, b: (…, m, k) and (…, k, n), or with their last two axes exchanged where a flag says so.

    Raises:
        ShapeError: shapes, dtypes or strides do not fit.
    """  # fmt: skip
    key = (
        out.shape, a.shape, b.shape, out.strides, a.strides, b.strides, out.dtype, a.dtype,
        b.dtype, transpose_a, transpose_b, accumulate,
    )  # fmt: skip
    _product(*key).run(address(out), address(a), address(b))


@lru_cache(maxsize=4096)
def _product(
    out: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], out_strides: Strides,
    a_strides: Strides, b_strides: Strides, dtype: Any, a_dtype: Any, b_dtype: Any,
    transpose_a: bool, transpose_b: bool, accumulate: bool,
) -> Product:  # fmt: skip
    if transpose_a:
        a, a_strides = _turned(a), _turned(a_strides)
    if transpose_b:
        b, b_strides = _turned(b), _turned(b_strides)
    rank, (m, n), k = len(out), out[-2:], a[-1]
    product = None
    batch = out[:-2]
    if (
        dtype == a_dtype == b_dtype
        and available(dtype.name)
        and (a[-2], k, b[-1]) == (m, b[-2], n)
        and broadcast_shapes(broadcast_shapes(a[:-2], b[:-2]), batch) == batch
    ):
        item = dtype.itemsize
        spread = [
            (0,) * (rank - len(shape)) + _steps(shape, strides, item)
            for shape, strides in ((a, a_strides), (b, b_strides))
        ]
        out_strides = _steps(out, out_strides, item)
        product = planned(batch, m, k, n, dtype.name, out_strides, *spread, accumulate)
    if product is None:
        raise ShapeError(
            f"no kernel for {a_dtype}{a} of strides {a_strides} times {b_dtype}{b} of strides "
            f"{b_strides} to {dtype}{out} of strides {out_strides}"
        )
    return product


def _steps(shape: tuple[int, ...], strides: Strides, item: int) -> Strides:
    """Strides that say nothing of axes without a second element."""
    matrix = strides[-2:] if 0 not in shape else (shape[-1] * item, item)
    return (*(s if n > 1 else 0 for n, s in zip(shape[:-2], strides, strict=False)), *matrix)


def _turned(axes: tuple[int, ...]) -> tuple[int, ...]:
    return (*axes[:-2], axes[-1], axes[-2])

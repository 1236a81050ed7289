"""Kernels of regions: from shapes and ops to a native function, and its launches.

Regions that are equal up to names and sizes share a kernel. Threads of the current pool share a
kernel's work if it is long enough; the cut changes no bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np

from graphflow.base.environment import is_on
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShapeError, Untraceable
from graphflow.ir.op import Op
from graphflow.ir.spec import TensorSpec, is_half
from graphflow.ops.kernels.codegen import elementwise_emitter
from graphflow.ops.kernels.codegen.expression_trace import (
    APPROXIMATE,
    DTYPES,
    ExpressionTrace,
)
from graphflow.ops.kernels.codegen.half_trace import record_op
from graphflow.ops.kernels.codegen.region import (
    KernelSource,
    Operand,
    Region,
    RegionOp,
    freeze_attributes,
)
from graphflow.ops.kernels.fusion import column_bands
from graphflow.ops.kernels.fusion.row_ops import collapsed_form
from graphflow.ops.kernels.fusion.row_passes import LANES
from graphflow.ops.kernels.jit.array_address import address, align_up, empty_aligned
from graphflow.ops.kernels.jit.compiler import (
    KernelTask,
    compiler,
    cut_rows,
    name_module,
    vector_width,
)
from graphflow.ops.kernels.jit.thread_pool import Pool, current_pool

THREADING_NANOSECONDS = 60_000
"""Nanoseconds of work from which threads share a kernel's rows. The estimate is high by up to four
for operands in the cache. A hand-over to a thread that polls takes 1,000 to 2,000; one that sleeps
comes later, and the caller goes on meanwhile."""
GIL_RELEASE_NANOSECONDS = 20_000
"""Nanoseconds of work from which a kernel releases the GIL."""


def is_jit_enabled() -> bool:
    """Return whether kernels are generated: unless GRAPHFLOW_JIT=off."""
    return is_on("GRAPHFLOW_JIT")


# What can be generated ------------------------------------------------------------------------


@dataclass(frozen=True)
class TracedOp:
    """Properties of an op's expression for some dtypes.

    Attributes:
        dtype: of its value.
        approximate: whether its last bits depend on the implementation.
    """

    dtype: np.dtype[Any]
    approximate: bool


_trace_cache: dict[Any, TracedOp | None] = {}


def trace_op(op: Op, dtypes: Sequence[np.dtype[Any]], attrs: Mapping[str, Any]) -> TracedOp | None:
    """Return the properties of an op's generated kernel; None if there is no such kernel."""
    if op.expr is None or not dtypes or not (op.elementwise or op.rows is not None):
        return None
    items = freeze_attributes(attrs)
    if items is None:
        return None
    key = (op, tuple(dtypes), items)
    if key not in _trace_cache:
        _trace_cache[key] = _trace_uncached(op, dtypes, attrs)
    return _trace_cache[key]


def _trace_uncached(
    op: Op, dtypes: Sequence[np.dtype[Any]], attrs: Mapping[str, Any]
) -> TracedOp | None:
    if not all(dtype in DTYPES or _is_convertible(dtype) for dtype in dtypes):
        return None
    trace = ExpressionTrace()
    inputs = [trace.input(i, dtype) for i, dtype in enumerate(dtypes)]
    try:
        result = record_op(trace, op, inputs, attrs)
    except Untraceable:
        return None
    if is_half(result.dtype) and not _is_convertible(result.dtype):
        return None
    kinds = {s.kind for s in trace.steps}
    reduces = any(kind.startswith("row_") for kind in kinds)
    return TracedOp(result.dtype, reduces or not kinds.isdisjoint(APPROXIMATE))


def _is_convertible(dtype: np.dtype[Any]) -> bool:
    """Return True for 16-bit floats that registers convert; float16 needs AVX2's instructions."""
    return is_half(dtype) and (dtype.name == "bfloat16" or vector_width() >= 8)


# Kernels --------------------------------------------------------------------------------------


class RegionKernel:
    """The native function of a region."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.source = self._write_source()
        self._tasks: dict[tuple[int, ...], KernelTask] = {}

    def _write_source(self, short: bool = False, streamed: bool = False) -> KernelSource:
        width = vector_width()
        wide = width == 16
        if self.region.over:
            return column_bands.write_reduction(self.region, wide)
        return elementwise_emitter.write_elementwise(self.region, width, wide, short, streamed)

    def task(self, sizes: tuple[int, ...]) -> KernelTask:
        """Return the kernel for these sizes of the collapsed axes."""
        found = self._tasks.get(sizes)
        if found is None:
            found = self._tasks[sizes] = self._task(sizes)
        return found

    def streamed_task(self, sizes: tuple[int, ...]) -> KernelTask | None:
        """Return the kernel whose stores bypass the caches; None if there is none.

        Results must be aligned to 64 bytes, and so must be what threads begin with.
        """
        if self.region.over or self.region.rank > 1:
            return None
        written = self._write_source(streamed=True)
        name, text = name_module(written.body, written.needs)
        return replace(self.task(sizes), name=name, text=text, row=0)

    def _task(self, sizes: tuple[int, ...]) -> KernelTask:
        region, source = self.region, self.source
        meta, rows, scratch = self._frame(sizes)
        for operand in region.operands:
            meta += _row_strides(sizes, operand.axes, np.dtype(operand.dtype).itemsize)
        for dtype, axes in zip(source.dtypes, source.axes, strict=True):
            meta += _row_strides(sizes, axes, dtype.itemsize)
        work = self.estimate_nanoseconds(prod(sizes), rows)
        row = sizes[-1] if region.rank > 1 or region.over else 1
        row = 0 if region.over == "columns" else row
        short = not region.over and 1 < row < elementwise_emitter.LONG_ROW
        written = self._write_source(short) if short else source
        name, text = name_module(written.body, written.needs)
        # Shares begin at cache lines, so that no two threads write to one.
        unit = _LINE_ELEMENTS if region.rank == 1 else 1
        return KernelTask(
            name, text, tuple(meta), rows, work, scratch, row=row, cut=partial(cut_rows, rows, unit)
        )

    def _frame(self, sizes: tuple[int, ...]) -> tuple[list[int], int, int]:
        """Return the sizes that the function takes, its units, and its bytes of scratch memory."""
        lanes, kept = LANES, self.source.kept
        if self.region.over == "rows":
            meta = [sizes[-1], *sizes[1:-1]]
            return meta, prod(sizes[:-1]), kept * (sizes[-1] // lanes + 1) * lanes * 8
        if self.region.over == "columns":
            *outer, length, width = sizes
            units = prod(outer) * -(-width // lanes)
            return [length, width, *outer[1:]], units, kept * length * lanes * 8
        size = prod(sizes)
        rows = size if self.region.rank == 1 or not size else size // sizes[-1]
        return [sizes[-1], *sizes[1:-1]], rows, 0

    def estimate_nanoseconds(self, size: int, rows: int = 0) -> float:
        """Estimate roughly one thread's time for `size` elements.

        Args:
            rows: rows that are reduced, or strips of columns.
        """
        source = self.source
        inner = -2 if self.region.over == "columns" else -1
        streams = [np.dtype(o.dtype).itemsize for o in self.region.operands if o.axes[inner]]
        results = zip(source.dtypes, source.axes, strict=True)
        moved = sum(streams) + sum(d.itemsize for d, axes in results if axes[inner])
        again = (
            0.01 * moved * (source.passes - 1) + 0.05 * source.kept
        )  # later passes read from the cache
        per_row = 6.0 + 12.0 * source.passes if self.region.over else 0.0
        return size * (0.03 * moved + again + 0.02 * source.flops) + rows * per_row


_kernels: dict[Region, RegionKernel] = {}


def kernel_of(region: Region) -> RegionKernel:
    """Return the kernel of a region; equal regions share one.

    Raises:
        Untraceable: an op has no trace.
    """
    if region not in _kernels:
        _kernels[region] = RegionKernel(region)
    return _kernels[region]


def _row_strides(sizes: Sequence[int], axes: Sequence[bool], itemsize: int) -> list[int]:
    """Return the bytes between rows along each axis but the last; 0 for broadcast axes."""
    strides, step = [0] * len(sizes), itemsize
    for axis in reversed(range(len(sizes))):
        if axes[axis]:
            strides[axis] = step
            step *= sizes[axis]
    return strides[:-1]


_LINE_ELEMENTS = 64
"""Elements of a line of bytes: shares of rows of one element begin at multiples of it."""
_MOST_PARTS = 63
"""Threads that share one launch at most, each with scratch memory of its own."""


class KernelLaunch:
    """A kernel with sizes and operands; calling it runs it on the threads of the current pool.

    Args:
        sizes: of the collapsed axes.
        addresses: of operands and results. A call takes arrays for those that are None.
        task: the kernel for these sizes, if it is not the usual one.
    """

    def __init__(
        self,
        kernel: RegionKernel,
        sizes: tuple[int, ...],
        addresses: Sequence[int | None],
        task: KernelTask | None = None,
    ) -> None:
        region = kernel.region
        task = task or kernel.task(sizes)
        work = task.nanoseconds
        self._unit = _LINE_ELEMENTS if region.rank == 1 else 1
        self._parts = (
            min(int(work / THREADING_NANOSECONDS * 2), task.rows // self._unit)
            if work > THREADING_NANOSECONDS
            else 1
        )
        given = [a or 0 for a in addresses]
        self._tables, self._scratch = _tables(given, task.scratch, self._parts)
        streams = [(operand.axes, np.dtype(operand.dtype)) for operand in region.operands]
        streams += zip(kernel.source.axes, kernel.source.dtypes, strict=True)
        self._moving = [
            (i, prod(s for s, has in zip(sizes, axes, strict=True) if has), dtype)
            for i, (a, (axes, dtype)) in enumerate(zip(addresses, streams, strict=True))
            if a is None
        ]
        self._meta = np.array(task.sizes, np.int64)
        self._rows = task.rows
        self._given = [(_pointer(table), _pointer(self._meta)) for table in self._tables]
        function = compiler().function(task.name, task.text)
        self._address = function.address
        self._function = (
            function.releasing_gil if work > GIL_RELEASE_NANOSECONDS else function.holding_gil
        )
        self._alone = partial(
            self._function, *self._given[0], ctypes.c_int64(0), ctypes.c_int64(self._rows)
        )

    def __call__(self, *arrays: Any, rows: int | None = None) -> None:
        """Run the kernel.

        Args:
            arrays: the operands and results without an address.
            rows: the first units of work to do; None for all.
        """
        rows = self._rows if rows is None else rows
        for (i, size, dtype), array in zip(self._moving, arrays, strict=True):
            # A native function does not check its pointers.
            if array.size != size or array.dtype != dtype:
                raise ShapeError(
                    f"an array of {array.size} elements of {array.dtype} was given to a kernel "
                    f"compiled for {size} of {dtype}"
                )
            place = address(array)
            for table in self._tables:
                table[i] = place
        if self._parts > 1:
            pool = current_pool()
            if pool is not None and pool.threads > 1:
                self._run_shared(pool, min(self._parts, pool.threads), rows)
                return
        if rows:
            self._function(*self._given[0], 0, rows)

    def callable(self) -> Callable[..., None]:
        """Return the launch as a function: the native one itself if nothing is left to decide."""
        if self._moving or self._parts > 1 or not self._rows:
            return self
        self._alone.__dict__["launch"] = self  # keeps the tables alive that it points to
        return self._alone

    def _run_shared(self, pool: Pool, parts: int, rows: int) -> None:
        words = [
            (self._address, *(p.value for p in self._given[i % len(self._given)]), s.start, s.stop)
            for i, s in enumerate(cut_rows(rows, self._unit, parts))
        ]
        pool.run_entries(np.array(words, np.uint64), len(words))


def _tables(
    given: Sequence[int], scratch: int, parts: int
) -> tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any] | None]:
    """Return tables of pointers, and scratch memory if the kernel needs it.

    With scratch memory there is a table for each part that may run at a time.
    """
    if not scratch:
        return [np.array(given, np.uint64)], None
    size = align_up(scratch)
    count = max(1, min(parts, _MOST_PARTS))
    memory = empty_aligned(count * size)
    start = address(memory)
    return [np.array([*given, start + i * size], np.uint64) for i in range(count)], memory


def _pointer(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(address(array))


# One op by itself -----------------------------------------------------------------------------


@cache
def _single_op_kernel(
    op: Op, dtypes: tuple[np.dtype[Any], ...], items: Any, axes: Any, over: str
) -> RegionKernel:
    operands = tuple(Operand(d.name, a) for d, a in zip(dtypes, axes, strict=True))
    inputs = tuple((False, i) for i in range(len(dtypes)))
    applied = RegionOp(op, items, inputs, not over)
    return kernel_of(Region(len(axes[0]), operands, (applied,), (0,), over))


def run_op(op: Op, xp: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Run an op by its generated kernel; None if numpy gives the same bits, or without one."""
    if xp is not np or not is_jit_enabled() or not (op.elementwise or op.rows is not None):
        return None
    arrays = [np.ascontiguousarray(a) if np.ndim(a) else np.asarray(a) for a in arrays]
    found = trace_op(op, [a.dtype for a in arrays], attrs)
    if found is None or not found.approximate:
        return None
    form = collapsed_form(op, [a.shape for a in arrays], attrs)
    if form is None:
        return None
    if op.refuse is not None:
        op.refuse(xp, *arrays, **attrs)
    dtypes = tuple(a.dtype for a in arrays)
    kernel = _single_op_kernel(op, dtypes, freeze_attributes(attrs), form.axes, form.over)
    out = np.empty(_result_shape(op, arrays, attrs), found.dtype)
    KernelLaunch(kernel, form.sizes, [*map(address, arrays), address(out)])()
    return out


def _result_shape(op: Op, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[int, ...]:
    if op.elementwise:
        return np.broadcast_shapes(*(a.shape for a in arrays))
    spec = op.infer(*(TensorSpec(a.shape, a.dtype) for a in arrays), **attrs)
    assert isinstance(spec, TensorSpec)
    return spec.shape  # type: ignore[return-value]

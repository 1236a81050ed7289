"""Chains of native calls that run step by step along a sequence, for LSTM and GRU.

All steps are one native call. Rows of the batch are independent, so threads share them. An element
of a product has the same bits however its rows are cut.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.codegen.control_flow import element_of
from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.fusion.parallel_call import native_function
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.gemm.gemm import MatrixProduct, gemm, is_supported, plan_product
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.call_recorder import CallRecorder, current_recorder
from graphflow.ops.kernels.jit.call_table_driver import copy_source, driver, loop_frame
from graphflow.ops.kernels.jit.compiler import NativeFunction, vector_width
from graphflow.ops.kernels.jit.kept_layouts import KeptLayouts, lay_out
from graphflow.ops.kernels.jit.kernel_recording import (
    NotRecordable,
    as_contiguous,
    operand_place,
)
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import run_native_parts, run_ranges
from graphflow.ops.kernels.moves.strided_copies import strided_text

_THREADING_NANOSECONDS = 200_000
"""Nanoseconds of work from which threads share the rows of a batch."""
_ROWS_PER_THREAD = 8
"""Rows of a batch for a thread, at least."""
_PANEL_COLUMNS, _NARROW_PANEL_COLUMNS = (64, 32, 16), (16,)
"""Columns of a panel of weights, with registers of 64 bytes and of 32; as wide as tiles are."""
_MOST_RECORDED_STEPS = 1024
"""Steps beyond which a recording would take more memory than Python around them takes time."""


def is_native(xp: Any, dtype: Any) -> bool:
    """Return whether native kernels compute a recurrent network of this dtype."""
    return xp is np and is_jit_enabled() and is_supported(np.dtype(dtype).name)


class StepOperand(NamedTuple):
    """An operand of a step: its address in step 0, and the bytes between steps."""

    start: int
    stride: int = 0


class CallChain:
    """Native calls that run in each of several steps, with operands that advance from step to step.

    It is built and run at once, and keeps the tables alive that it points to.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[NativeFunction, list[StepOperand], tuple[int, ...], int]] = []

    def add(
        self,
        function: NativeFunction,
        places: Sequence[StepOperand],
        sizes: Sequence[int],
        rows: int,
    ) -> None:
        self._calls.append((function, list(places), tuple(sizes), rows))

    def product(
        self, product: MatrixProduct, a: StepOperand, b: StepOperand, out: StepOperand, memory: int
    ) -> None:
        x, y = (b, a) if product.swapped else (a, b)
        self.add(product.function, [x, y, out, StepOperand(memory)], product.sizes, product.units)

    def run(self, first: int, last: int) -> None:
        """Run steps `first` to `last` in order, or add them to the current recorder.

        Raises:
            NotRecordable: there are too many steps to record.
        """
        if first >= last:
            return
        recorder = current_recorder()
        if recorder is not None:
            self._record(recorder, first, last)
            return
        pointers = np.zeros(max(1, sum(len(places) for _, places, _, _ in self._calls)), np.int64)
        sizes = np.array([s for call in self._calls for s in (*call[2], 0)], np.int64)
        where, meta = address(pointers), address(sizes)
        words: list[int] = []
        moves: list[int] = []
        at = size = 0
        for given, places, own, rows in self._calls:
            words += (given.address, where + 8 * at, meta + 8 * size, 0, rows)
            for i, place in enumerate(places):
                pointers[at + i] = place.start
                if place.stride:
                    moves += (where + 8 * (at + i), place.start, place.stride)
            at, size = at + len(places), size + len(own) + 1
        entries, table = np.array(words, np.int64), np.array([*moves, 0], np.int64)
        count = len(self._calls)
        steps = loop_frame(address(entries), 0, count, address(table), len(moves) // 3, 0)
        driver().loop.releasing_gil(ctypes.c_void_p(address(steps)), None, first, last)

    def _record(self, recorder: CallRecorder, first: int, last: int) -> None:
        if last - first > _MOST_RECORDED_STEPS:
            raise NotRecordable
        if not recorder.keeps_calls:
            return
        for step in range(first, last):
            for function, places, sizes, rows in self._calls:
                pointers = [place.start + step * place.stride for place in places]
                call_native(function, pointers, sizes, 0, rows)


class BatchRows(NamedTuple):
    """The rows of a batch that a thread computes, in steps that run forwards or backwards.

    Attributes:
        first, way: the first step, and 1 or -1 from each step to the next.
        start: the first row.
    """

    first: int
    way: int
    start: int

    @classmethod
    def in_order(cls, steps: int, reverse: bool, start: int) -> BatchRows:
        """Return rows from `start` in steps from the first to the last, or from the last one."""
        return cls(steps - 1, -1, start) if reverse else cls(0, 1, start)

    def at_step(self, array: Any, ahead: int = 0) -> StepOperand:
        """Return the rows of an array (T, B, …), `ahead` steps from the current one."""
        step, row = array.strides[:2]
        place = (self.first + ahead * self.way) * step + self.start * row
        return StepOperand(operand_place(array) + place, self.way * step)

    def at_all_steps(self, array: Any) -> StepOperand:
        """Return the rows of an array (B, …), which are the same in all steps."""
        return StepOperand(operand_place(array) + self.start * array.strides[0])


def step_scratch(name: str, shape: tuple[int, ...], dtype: Any) -> StepOperand:
    """Return scratch memory of this thread, the same in all steps."""
    return StepOperand(operand_place(scratch(np, name, shape, dtype)))


def product_scratch(*products: MatrixProduct) -> int:
    """Return the address of this thread's scratch memory for products that run in turn."""
    return step_scratch("product", (max(each.scratch for each in products),), np.uint8).start


def copy_whole(xp: Any, target: Any, source: Any) -> None:
    """Copy a contiguous array, or add the copy to the current recorder."""
    if current_recorder() is None:
        xp.copyto(target, source)
        return
    places = operand_place(source), operand_place(target)
    call_native(native_function(copy_source), places, (), 0, target.nbytes)


def split_batch(batch: int, work: float, part: Callable[[int, int], None]) -> None:
    """Run part(first, last) over the rows of a batch, on threads if there is enough work."""
    run_ranges(part, batch, batch // _ROWS_PER_THREAD if work > _THREADING_NANOSECONDS else 1)


class PackedWeights:
    """A matrix (k, n) that many products share, packed in panels of columns.

    The rows of a panel follow each other, so each product reads memory in order.

    Args:
        matrix: (k, n), or (n, k) if `transposed`.
        kept: where the panels stay for later calls.
        name: identifies the panels among those of one kernel.
    """

    def __init__(
        self,
        matrix: Any,
        transposed: bool = False,
        kept: KeptLayouts | None = None,
        name: str = "recurrent weights",
    ) -> None:
        self._matrix, self._transposed = as_contiguous(matrix), transposed
        k, n = reversed(matrix.shape) if transposed else matrix.shape
        self.shape, self.dtype = (k, n), matrix.dtype
        some = _PANEL_COLUMNS if vector_width() == 16 else _NARROW_PANEL_COLUMNS
        self.panel = next((p for p in some if n % p == 0), n)
        self._memory = lay_out(kept, name, (k, n, transposed), matrix.nbytes, self._write)

    def _write(self, memory: Any) -> None:
        (k, n), panel = self.shape, self.panel
        strides = (panel * k, 1, k) if self._transposed else (panel, n, 1)
        sizes = (0, n // panel, k, panel, *strides)
        copy = native_function(strided_text, element_of(self.dtype), 3, not self._transposed)
        places = operand_place(self._matrix), operand_place(memory)
        run_native_parts(lambda i: call_native(copy, places, sizes, i, i + 1), n // panel)

    @property
    def place(self) -> StepOperand:
        return StepOperand(operand_place(self._memory))

    def product(self, m: int, row: int = 0, out_row: int = 0) -> MatrixProduct:
        """Plan the product of (m, k) rows by this matrix.

        Args:
            row, out_row: elements from one row to the next of the operand and of the result; 0 for
                k and n.
        """
        (k, n), panel, item = self.shape, self.panel, self.dtype.itemsize
        row, out_row = row or k, out_row or n
        product = plan_product(
            (n // panel,), m, k, panel, self.dtype.name,
            (panel * item, out_row * item, item), (0, row * item, item),
            (k * panel * item, panel * item, item),
        )  # fmt: skip
        assert product is not None
        return product


def write_weight_gradient(xp: Any, dr: Any, dz: Any, h: Any, y: Any, reverse: bool) -> None:
    """Write Σ over steps of dzᵀ @ (h before the step) to dr.

    Args:
        dz: cotangents (T, B, n) of products with r; some columns of an array, or all.
        h, y: the first state (B, H), and those after each step (T, B, H).
    """
    steps, rows, many = dz.shape
    size = h.shape[1]
    end = steps - 1 if reverse else 0
    first = dz[end : end + 1].reshape(rows, many)
    later, past = (dz[:-1], y[1:]) if reverse else (dz[1:], y[:-1])
    later, past = later.reshape(-1, many), past.reshape(-1, size)
    if is_native(xp, dz.dtype):
        gemm(dr, first, h, transpose_a=True)
        if len(later):
            gemm(dr, later, past, transpose_a=True, accumulate=True)
    else:
        xp.matmul(first.T, h, out=dr)
        dr += xp.matmul(later.T, past)

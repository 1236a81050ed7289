"""Chains of native calls that run step by step along a sequence, for LSTM and GRU.

All steps are one native call. Rows of the batch are independent, so threads share them. An element
of a product has the same bits however its rows are cut.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.gemm.gemm import MatrixProduct, gemm, is_supported, plan_product
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.call_table_driver import driver, loop_frame
from graphflow.ops.kernels.jit.compiler import NativeFunction, vector_width
from graphflow.ops.kernels.jit.thread_pool import run_ranges

_THREADING_NANOSECONDS = 200_000
"""Nanoseconds of work from which threads share the rows of a batch."""
_ROWS_PER_THREAD = 8
"""Rows of a batch for a thread, at least."""
_PANEL_COLUMNS, _NARROW_PANEL_COLUMNS = (64, 32, 16), (16,)
"""Columns of a panel of weights, with registers of 64 bytes and of 32; as wide as tiles are."""


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
        """Run steps `first` to `last` in order."""
        if first >= last:
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
        return StepOperand(address(array) + place, self.way * step)

    def at_all_steps(self, array: Any) -> StepOperand:
        """Return the rows of an array (B, …), which are the same in all steps."""
        return StepOperand(address(array) + self.start * array.strides[0])


def split_batch(batch: int, work: float, part: Callable[[int, int], None]) -> None:
    """Run part(first, last) over the rows of a batch, on threads if there is enough work."""
    run_ranges(part, batch, batch // _ROWS_PER_THREAD if work > _THREADING_NANOSECONDS else 1)


class PackedWeights:
    """A matrix (k, n) that many products share, packed in panels of columns.

    The rows of a panel follow each other, so each product reads memory in order.
    """

    def __init__(self, matrix: Any) -> None:
        k, n = matrix.shape
        self.shape, self.dtype = (k, n), matrix.dtype
        some = _PANEL_COLUMNS if vector_width() == 16 else _NARROW_PANEL_COLUMNS
        self.panel = next((p for p in some if n % p == 0), n)
        panels = matrix.reshape(k, n // self.panel, self.panel).transpose(1, 0, 2)
        self.array = np.ascontiguousarray(panels)

    @property
    def place(self) -> StepOperand:
        return StepOperand(address(self.array))

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
    many = dz.shape[2]
    later, past = (dz[:-1], y[1:]) if reverse else (dz[1:], y[:-1])
    later, past = later.reshape(-1, many), past.reshape(-1, h.shape[1])
    first = dz[-1] if reverse else dz[0]
    if is_native(xp, dz.dtype):
        gemm(dr, first, h, transpose_a=True)
        if len(later):
            gemm(dr, later, past, transpose_a=True, accumulate=True)
    else:
        xp.matmul(first.T, h, out=dr)
        dr += xp.matmul(later.T, past)

"""An LSTM along a sequence: each step is a matrix product and one pass over the gates.

All steps are one native call. Rows of the batch are independent, so threads share them. An element
of a product has the same bits however its rows are cut.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.codegen.control_flow import element_of
from graphflow.ops.kernels.fusion.parallel_call import native_function
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.gemm.gemm import MatrixProduct, gemm, is_supported, plan_product
from graphflow.ops.kernels.jit.array_address import address, empty_aligned
from graphflow.ops.kernels.jit.call_table_driver import driver, loop_frame
from graphflow.ops.kernels.jit.compiler import NativeFunction, vector_width
from graphflow.ops.kernels.jit.thread_pool import run_ranges
from graphflow.ops.kernels.sequence import lstm_loops

_THREADING_NANOSECONDS = 200_000
"""Nanoseconds of work from which threads share the rows of a batch."""
_ROWS_PER_THREAD = 8
"""Rows of a batch for a thread, at least."""
_PANEL_COLUMNS, _NARROW_PANEL_COLUMNS = (64, 32, 16), (16,)
"""Columns of a panel of weights, with registers of 64 bytes and of 32; as wide as tiles are."""


def is_native(xp: Any, dtype: Any) -> bool:
    """Return whether native kernels compute an LSTM of this dtype."""
    return xp is np and is_jit_enabled() and is_supported(np.dtype(dtype).name)


# Chains ---------------------------------------------------------------------------------------


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


def _step_rows(array: Any, first: int, way: int, row: int) -> StepOperand:
    """Return rows, from `row` on, of an array (T, B, …): step `first`, then every `way` steps."""
    step, between = array.strides[:2]
    return StepOperand(address(array) + first * step + row * between, way * step)


def _split_batch(batch: int, work: float, part: Callable[[int, int], None]) -> None:
    """Run part(first, last) over the rows of a batch, on threads if there is enough work."""
    run_ranges(part, batch, batch // _ROWS_PER_THREAD if work > _THREADING_NANOSECONDS else 1)


class _PackedWeights:
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

    def product(self, m: int) -> MatrixProduct:
        """Plan the product of (m, k) rows by this matrix."""
        (k, n), panel, item = self.shape, self.panel, self.dtype.itemsize
        product = plan_product(
            (n // panel,), m, k, panel, self.dtype.name,
            (panel * item, n * item, item), (0, k * item, item),
            (k * panel * item, panel * item, item),
        )  # fmt: skip
        assert product is not None
        return product


# Forward --------------------------------------------------------------------------------------


def forward(
    xp: Any, out: Sequence[Any], z: Any, r: Any, bias: Any, h: Any, c: Any, gates: str,
    reverse: bool,
) -> None:  # fmt: skip
    """Fill y (T, B, H), the last h and c (B, H), all c (T, B, H), and the gates (T, B, 4·H)."""
    y, h_last, c_last, cs, kept = out
    if not len(z):
        xp.copyto(h_last, h)
        xp.copyto(c_last, c)
        return
    if is_native(xp, z.dtype) and h.size:
        _forward_natively(y, cs, kept, z, r, bias, h, c, gates, reverse)
    else:
        _forward_by_arrays(xp, y, cs, kept, z, r, bias, h, c, gates, reverse)
    end = 0 if reverse else len(z) - 1
    xp.copyto(h_last, y[end])
    xp.copyto(c_last, cs[end])


def _forward_natively(
    y: Any, cs: Any, kept: Any, z: Any, r: Any, bias: Any, h: Any, c: Any, gates: str, reverse: bool
) -> None:
    steps, batch, size = y.shape
    dtype, item = z.dtype, z.itemsize
    weights = _PackedWeights(r.T)
    loop = native_function(lstm_loops.forward, element_of(dtype), gates)
    first, way = (steps - 1, -1) if reverse else (0, 1)

    def part(start: int, stop: int) -> None:
        many = stop - start
        product = weights.product(many)
        sums, memory = np.empty((many, 4 * size), dtype), empty_aligned(product.scratch)

        def step_rows(array: Any, ahead: int = 0) -> StepOperand:
            return _step_rows(array, first + ahead * way, way, start)

        def fixed_rows(array: Any) -> StepOperand:
            return StepOperand(address(array) + start * size * item)

        for past_h, past_c, begin, end in (
            (fixed_rows(h), fixed_rows(c), 0, 1), (step_rows(y, -1), step_rows(cs, -1), 1, steps),
        ):  # fmt: skip
            chain = CallChain()
            here = StepOperand(address(sums))
            chain.product(
                product, past_h, StepOperand(address(weights.array)), here, address(memory)
            )
            places = [
                step_rows(z),
                here,
                StepOperand(address(bias)),
                past_c,
                step_rows(kept),
                step_rows(cs),
                step_rows(y),
            ]
            chain.add(loop, places, [size], many)
            chain.run(begin, end)

    _split_batch(batch, steps * batch * size * (4 * size / 40 + 4), part)


def _forward_by_arrays(
    xp: Any, y: Any, cs: Any, kept: Any, z: Any, r: Any, bias: Any, h: Any, c: Any, gates: str,
    reverse: bool,
) -> None:  # fmt: skip
    size = h.shape[1]
    place = {g: slice(gates.index(g) * size, (gates.index(g) + 1) * size) for g in "ifgo"}
    for t in reversed(range(len(z))) if reverse else range(len(z)):
        total = z[t] + bias + xp.matmul(h, r.T)
        i, f, o = (1 / (1 + xp.exp(-total[:, place[g]])) for g in "ifo")
        g = xp.tanh(total[:, place["g"]])
        c = f * c + i * g
        h = o * xp.tanh(c)
        for gate, value in zip("ifgo", (i, f, g, o), strict=True):
            kept[t][:, place[gate]] = value
        cs[t], y[t] = c, h


# Backward -------------------------------------------------------------------------------------


def backward(
    xp: Any, out: Sequence[Any], gy: Any, gh: Any, gc: Any, r: Any, h: Any, c: Any, y: Any, cs: Any,
    kept: Any, gates: str, reverse: bool,
) -> None:  # fmt: skip
    """Fill the cotangents of z (T, B, 4·H), of r, and of the first h and c."""
    dz, dr, dh, dc = out
    xp.copyto(dh, gh)
    xp.copyto(dc, gc)
    if not dz.size:
        dr[...] = 0
        return
    if is_native(xp, dz.dtype):
        _backward_natively(dz, dh, dc, gy, r, c, cs, kept, gates, reverse)
    else:
        _backward_by_arrays(xp, dz, dh, dc, gy, r, c, cs, kept, gates, reverse)
    _recurrent_weight_gradient(xp, dr, dz, h, y, reverse)


def _recurrent_weight_gradient(xp: Any, dr: Any, dz: Any, h: Any, y: Any, reverse: bool) -> None:
    """Write Σ over steps of dzᵀ @ (h before the step)."""
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


def _backward_natively(
    dz: Any, dh: Any, dc: Any, gy: Any, r: Any, c: Any, cs: Any, kept: Any, gates: str,
    reverse: bool,
) -> None:  # fmt: skip
    steps, batch, size = gy.shape
    dtype, item = dz.dtype, dz.itemsize
    weights = _PackedWeights(r)
    loop = native_function(lstm_loops.backward, element_of(dtype), gates)
    first, way = (0, 1) if reverse else (steps - 1, -1)

    def part(start: int, stop: int) -> None:
        many = stop - start
        product = weights.product(many)
        memory = empty_aligned(product.scratch)

        def step_rows(array: Any, ahead: int = 0) -> StepOperand:
            return _step_rows(array, first + ahead * way, way, start)

        def fixed_rows(array: Any) -> StepOperand:
            return StepOperand(address(array) + start * size * item)

        for past_c, begin, end in (
            (step_rows(cs, 1), 0, steps - 1),
            (fixed_rows(c), steps - 1, steps),
        ):
            chain = CallChain()
            places = [
                step_rows(gy),
                fixed_rows(dh),
                step_rows(kept),
                step_rows(cs),
                past_c,
                step_rows(dz),
                fixed_rows(dc),
            ]
            chain.add(loop, places, [size], many)
            chain.product(
                product,
                step_rows(dz),
                StepOperand(address(weights.array)),
                fixed_rows(dh),
                address(memory),
            )
            chain.run(begin, end)

    _split_batch(batch, steps * batch * size * (4 * size / 40 + 3), part)


def _backward_by_arrays(
    xp: Any, dz: Any, dh: Any, dc: Any, gy: Any, r: Any, c: Any, cs: Any, kept: Any, gates: str,
    reverse: bool,
) -> None:  # fmt: skip
    size = c.shape[1]
    steps = len(gy)
    place = {g: slice(gates.index(g) * size, (gates.index(g) + 1) * size) for g in "ifgo"}
    for t in range(steps) if reverse else reversed(range(steps)):
        past = t + 1 if reverse else t - 1
        before = cs[past] if 0 <= past < steps else c
        i, f, g, o = (kept[t][:, place[gate]] for gate in "ifgo")
        total, level = gy[t] + dh, xp.tanh(cs[t])
        state = dc + total * o * (1 - level * level)
        dz[t][:, place["i"]] = state * g * i * (1 - i)
        dz[t][:, place["f"]] = state * before * f * (1 - f)
        dz[t][:, place["g"]] = state * i * (1 - g * g)
        dz[t][:, place["o"]] = total * level * o * (1 - o)
        xp.multiply(state, f, out=dc)
        xp.matmul(dz[t], r, out=dh)

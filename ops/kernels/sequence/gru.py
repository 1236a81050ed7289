"""A GRU along a sequence: products with the recurrent weights, and passes over the gates.

With `linear_before_reset` a step is one product and one pass. Otherwise the candidates' product
reads r·h, so a step is two of each. The candidates are the last of the gates. `inner` is what the
gate r multiplies and the gradient needs: Rₙ·h + bₙ, or else r·h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.ops.kernels.codegen.control_flow import element_of
from graphflow.ops.kernels.fusion.parallel_call import native_function
from graphflow.ops.kernels.gemm.gemm import gemm
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.kept_layouts import KeptLayouts
from graphflow.ops.kernels.jit.kernel_recording import operand_place
from graphflow.ops.kernels.sequence import gru_loops
from graphflow.ops.kernels.sequence.step_chain import (
    BatchRows,
    CallChain,
    PackedWeights,
    StepOperand,
    copy_whole,
    is_native,
    product_scratch,
    split_batch,
    step_scratch,
    write_weight_gradient,
)

# Forward --------------------------------------------------------------------------------------


def forward(
    xp: Any, out: Sequence[Any], z: Any, r: Any, bias: Any, h: Any, gates: str,
    linear_before_reset: bool, reverse: bool, kept: KeptLayouts | None = None,
) -> None:  # fmt: skip
    """Fill y (T, B, H), the last h (B, H), the gates (T, B, 3·H), and `inner` (T, B, H).

    Args:
        kept: where the packed weights stay for later calls.
    """
    y, h_last, activated, inner = out
    if not len(z):
        copy_whole(xp, h_last, h)
        return
    if is_native(xp, z.dtype) and h.size:
        run = _forward_natively if linear_before_reset else _forward_in_halves
        run(y, activated, inner, z, r, bias, h, gates, reverse, kept)
    else:
        _forward_by_arrays(
            xp, y, activated, inner, z, r, bias, h, gates, linear_before_reset, reverse
        )
    end = 0 if reverse else len(z) - 1
    copy_whole(xp, h_last, y[end : end + 1].reshape(h.shape))


def _forward_natively(
    y: Any, activated: Any, inner: Any, z: Any, r: Any, bias: Any, h: Any, gates: str,
    reverse: bool, kept: KeptLayouts | None,
) -> None:  # fmt: skip
    steps, batch, size = y.shape
    weights = PackedWeights(r, True, kept)
    loop = native_function(gru_loops.forward, element_of(z.dtype), gates)

    def part(start: int, stop: int) -> None:
        many, rows = stop - start, BatchRows.in_order(steps, reverse, start)
        product = weights.product(many)
        here, memory = step_scratch("gates", (many, 3 * size), z.dtype), product_scratch(product)
        added = StepOperand(operand_place(bias))
        results = [rows.at_step(x) for x in (activated, inner, y)]
        for past, begin, end in ((rows.at_all_steps(h), 0, 1), (rows.at_step(y, -1), 1, steps)):
            chain = CallChain()
            chain.product(product, past, weights.place, here, memory)
            chain.add(loop, [rows.at_step(z), here, added, past, *results], [size], many)
            chain.run(begin, end)

    split_batch(batch, _forward_nanoseconds(y), part)


def _forward_in_halves(
    y: Any, activated: Any, inner: Any, z: Any, r: Any, bias: Any, h: Any, gates: str,
    reverse: bool, kept: KeptLayouts | None,
) -> None:  # fmt: skip
    steps, batch, size = y.shape
    both = PackedWeights(r[: 2 * size], True, kept)
    last = PackedWeights(r[2 * size :], True, kept, "candidates' weights")
    element = element_of(z.dtype)
    gates_loop, candidates_loop = (
        native_function(write, element, gates)
        for write in (gru_loops.forward_gates, gru_loops.forward_candidates)
    )

    def part(start: int, stop: int) -> None:
        many, rows = stop - start, BatchRows.in_order(steps, reverse, start)
        first, second = (w.product(many, out_row=3 * size) for w in (both, last))
        memory = product_scratch(first, second)
        here = step_scratch("gates", (many, 3 * size), z.dtype)
        added = StepOperand(operand_place(bias))
        candidates = StepOperand(here.start + 2 * size * z.dtype.itemsize)
        for past, begin, end in ((rows.at_all_steps(h), 0, 1), (rows.at_step(y, -1), 1, steps)):
            chain = CallChain()
            given = [rows.at_step(z), here, added, past, rows.at_step(activated)]
            chain.product(first, past, both.place, here, memory)
            chain.add(gates_loop, [*given, rows.at_step(inner)], [size], many)
            chain.product(second, rows.at_step(inner), last.place, candidates, memory)
            chain.add(candidates_loop, [*given, rows.at_step(y)], [size], many)
            chain.run(begin, end)

    split_batch(batch, _forward_nanoseconds(y), part)


def _forward_nanoseconds(y: Any) -> float:
    return float(y.size * (3 * y.shape[2] / 40 + 3))


def _forward_by_arrays(
    xp: Any, y: Any, activated: Any, inner: Any, z: Any, r: Any, bias: Any, h: Any, gates: str,
    linear_before_reset: bool, reverse: bool,
) -> None:  # fmt: skip
    place = _gate_slices(gates, h.shape[1])
    new = place["n"]
    products = slice(0, None if linear_before_reset else new.start)
    for t in reversed(range(len(z))) if reverse else range(len(z)):
        past = xp.matmul(h, r[products].T) + bias[products]
        keep, reset = (1 / (1 + xp.exp(-(z[t][:, place[g]] + past[:, place[g]]))) for g in "zr")
        if linear_before_reset:
            inner[t] = past[:, new]
            total = reset * inner[t]
        else:
            inner[t] = reset * h
            total = xp.matmul(inner[t], r[new].T) + bias[new]
        fresh = xp.tanh(z[t][:, new] + total)
        for gate, value in zip("zrn", (keep, reset, fresh), strict=True):
            activated[t][:, place[gate]] = value
        h = fresh + keep * (h - fresh)
        y[t] = h


def _gate_slices(gates: str, size: int) -> dict[str, slice]:
    return {g: slice(i * size, (i + 1) * size) for i, g in enumerate(gates)}


# Backward -------------------------------------------------------------------------------------


def backward(
    xp: Any, out: Sequence[Any], gy: Any, gh: Any, r: Any, h: Any, y: Any, kept: Any, inner: Any,
    gates: str, linear_before_reset: bool, reverse: bool,
) -> None:  # fmt: skip
    """Fill the cotangents of z (T, B, 3·H), r, the first h, and the candidates' product (T, B, H).

    That of the candidates' product differs from that of z where r multiplies the product.
    """
    dz, dr, dh, dn = out
    xp.copyto(dh, gh)
    if not dz.size:
        dr[...] = 0
        return
    native = is_native(xp, dz.dtype)
    if native:
        run = _backward_natively if linear_before_reset else _backward_in_halves
        run(dz, dh, dn, gy, r, h, y, kept, inner, gates, reverse)
    else:
        _backward_by_arrays(
            xp, dz, dh, dn, gy, r, h, y, kept, inner, gates, linear_before_reset, reverse
        )
    size = h.shape[1]
    write_weight_gradient(xp, dr[: 2 * size], dz[..., : 2 * size], h, y, reverse)
    if linear_before_reset:
        write_weight_gradient(xp, dr[2 * size :], dn, h, y, reverse)
        return
    flat, read = (x.reshape(-1, size) for x in (dn, inner))
    if native:
        gemm(dr[2 * size :], flat, read, transpose_a=True)
    else:
        xp.matmul(flat.T, read, out=dr[2 * size :])


def _backward_natively(
    dz: Any, dh: Any, dn: Any, gy: Any, r: Any, h: Any, y: Any, kept: Any, inner: Any,
    gates: str, reverse: bool,
) -> None:  # fmt: skip
    steps, batch, size = gy.shape
    weights = PackedWeights(r)
    loop = native_function(gru_loops.backward, element_of(dz.dtype), gates, True)

    def part(start: int, stop: int) -> None:
        many, rows = stop - start, BatchRows.in_order(steps, not reverse, start)
        product = weights.product(many)
        memory = product_scratch(product)
        sums, carried = np.empty((many, 3 * size), dz.dtype), np.zeros((many, size), dz.dtype)
        products, from_products = (StepOperand(address(x)) for x in (sums, carried))
        for past, begin, end in (
            (rows.at_step(y, 1), 0, steps - 1),
            (rows.at_all_steps(h), steps - 1, steps),
        ):
            chain = CallChain()
            given = [rows.at_step(gy), from_products, *map(rows.at_step, (kept, inner)), past]
            results = [*map(rows.at_step, (dz, dn)), products, rows.at_all_steps(dh)]
            chain.add(loop, [*given, *results], [size], many)
            chain.product(product, products, weights.place, from_products, memory)
            chain.run(begin, end)
        dh[start:stop] += carried

    split_batch(batch, _backward_nanoseconds(gy), part)


def _backward_in_halves(
    dz: Any, dh: Any, dn: Any, gy: Any, r: Any, h: Any, y: Any, kept: Any, inner: Any,
    gates: str, reverse: bool,
) -> None:  # fmt: skip
    steps, batch, size = gy.shape
    both = PackedWeights(r[: 2 * size])
    last = PackedWeights(r[2 * size :], name="candidates' weights")
    element = element_of(dz.dtype)
    loop = native_function(gru_loops.backward, element, gates, False)
    reset_loop = native_function(gru_loops.backward_reset, element, gates)

    def part(start: int, stop: int) -> None:
        many, rows = stop - start, BatchRows.in_order(steps, not reverse, start)
        first, second = last.product(many), both.product(many, row=3 * size)
        memory = product_scratch(first, second)
        reset, carried = (np.zeros((many, size), dz.dtype) for _ in range(2))
        from_reset, from_products = (StepOperand(address(x)) for x in (reset, carried))
        own = rows.at_all_steps(dh)
        for past, begin, end in (
            (rows.at_step(y, 1), 0, steps - 1),
            (rows.at_all_steps(h), steps - 1, steps),
        ):
            chain = CallChain()
            given = [rows.at_step(gy), from_products, *map(rows.at_step, (kept, inner)), past]
            results = [*map(rows.at_step, (dz, dn)), from_reset, own]
            chain.add(loop, [*given, *results], [size], many)
            chain.product(first, rows.at_step(dn), last.place, from_reset, memory)
            ends = [from_reset, rows.at_step(kept), past, rows.at_step(dz), own]
            chain.add(reset_loop, ends, [size], many)
            chain.product(second, rows.at_step(dz), both.place, from_products, memory)
            chain.run(begin, end)
        dh[start:stop] += carried

    split_batch(batch, _backward_nanoseconds(gy), part)


def _backward_nanoseconds(gy: Any) -> float:
    return float(gy.size * (3 * gy.shape[2] / 40 + 2))


def _backward_by_arrays(
    xp: Any, dz: Any, dh: Any, dn: Any, gy: Any, r: Any, h: Any, y: Any, kept: Any, inner: Any,
    gates: str, linear_before_reset: bool, reverse: bool,
) -> None:  # fmt: skip
    size, steps = h.shape[1], len(gy)
    place, both = _gate_slices(gates, size), slice(0, 2 * size)
    for t in range(steps) if reverse else reversed(range(steps)):
        at = t + 1 if reverse else t - 1
        past = y[at] if 0 <= at < steps else h
        keep, reset, new = (kept[t][:, place[gate]] for gate in "zrn")
        total = gy[t] + dh
        own = total * (1 - keep) * (1 - new * new)
        dz[t][:, place["n"]] = own
        dz[t][:, place["z"]] = total * (past - new) * keep * (1 - keep)
        dn[t] = own * reset if linear_before_reset else own
        product = xp.matmul(dn[t], r[place["n"]])
        rest = total * keep
        if linear_before_reset:
            dz[t][:, place["r"]] = own * inner[t] * reset * (1 - reset)
            rest += product
        else:
            dz[t][:, place["r"]] = product * past * reset * (1 - reset)
            rest += product * reset
        xp.add(rest, xp.matmul(dz[t][:, both], r[both]), out=dh)

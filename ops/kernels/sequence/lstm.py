"""An LSTM along a sequence: each step is a matrix product and one pass over the gates.

All steps are one native call. Rows of the batch are independent, so threads share them. An element
of a product has the same bits however its rows are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.ops.kernels.codegen.control_flow import element_of
from graphflow.ops.kernels.fusion.parallel_call import native_function
from graphflow.ops.kernels.jit.kept_layouts import KeptLayouts
from graphflow.ops.kernels.jit.kernel_recording import operand_place
from graphflow.ops.kernels.sequence import lstm_loops
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
    xp: Any, out: Sequence[Any], z: Any, r: Any, bias: Any, h: Any, c: Any, gates: str,
    reverse: bool, kept: KeptLayouts | None = None,
) -> None:  # fmt: skip
    """Fill y (T, B, H), the last h and c (B, H), all c (T, B, H), and the gates (T, B, 4·H).

    Args:
        kept: where the packed weights stay for later calls.
    """
    y, h_last, c_last, cs, activated = out
    if not len(z):
        copy_whole(xp, h_last, h)
        copy_whole(xp, c_last, c)
        return
    if is_native(xp, z.dtype) and h.size:
        _forward_natively(y, cs, activated, z, r, bias, h, c, gates, reverse, kept)
    else:
        _forward_by_arrays(xp, y, cs, activated, z, r, bias, h, c, gates, reverse)
    end = 0 if reverse else len(z) - 1
    copy_whole(xp, h_last, y[end : end + 1].reshape(h.shape))
    copy_whole(xp, c_last, cs[end : end + 1].reshape(c.shape))


def _forward_natively(
    y: Any, cs: Any, activated: Any, z: Any, r: Any, bias: Any, h: Any, c: Any, gates: str,
    reverse: bool, kept: KeptLayouts | None,
) -> None:  # fmt: skip
    steps, batch, size = y.shape
    dtype = z.dtype
    weights = PackedWeights(r, True, kept)
    loop = native_function(lstm_loops.forward, element_of(dtype), gates)

    def part(start: int, stop: int) -> None:
        many, rows = stop - start, BatchRows.in_order(steps, reverse, start)
        product = weights.product(many)
        here, memory = step_scratch("gates", (many, 4 * size), dtype), product_scratch(product)

        for past_h, past_c, begin, end in (
            (rows.at_all_steps(h), rows.at_all_steps(c), 0, 1),
            (rows.at_step(y, -1), rows.at_step(cs, -1), 1, steps),
        ):
            chain = CallChain()
            chain.product(product, past_h, weights.place, here, memory)
            places = [
                rows.at_step(z),
                here,
                StepOperand(operand_place(bias)),
                past_c,
                rows.at_step(activated),
                rows.at_step(cs),
                rows.at_step(y),
            ]
            chain.add(loop, places, [size], many)
            chain.run(begin, end)

    split_batch(batch, steps * batch * size * (4 * size / 40 + 4), part)


def _forward_by_arrays(
    xp: Any, y: Any, cs: Any, activated: Any, z: Any, r: Any, bias: Any, h: Any, c: Any, gates: str,
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
            activated[t][:, place[gate]] = value
        cs[t], y[t] = c, h


# Backward -------------------------------------------------------------------------------------


def backward(
    xp: Any, out: Sequence[Any], gy: Any, gh: Any, gc: Any, r: Any, h: Any, c: Any, y: Any, cs: Any,
    kept: Any, gates: str, reverse: bool,
) -> None:  # fmt: skip
    """Fill the cotangents of z (T, B, 4·H), of r, and of the first h and c."""
    dz, dr, dh, dc = out
    copy_whole(xp, dh, gh)
    copy_whole(xp, dc, gc)
    if not dz.size:
        dr[...] = 0
        return
    if is_native(xp, dz.dtype):
        _backward_natively(dz, dh, dc, gy, r, c, cs, kept, gates, reverse)
    else:
        _backward_by_arrays(xp, dz, dh, dc, gy, r, c, cs, kept, gates, reverse)
    write_weight_gradient(xp, dr, dz, h, y, reverse)


def _backward_natively(
    dz: Any, dh: Any, dc: Any, gy: Any, r: Any, c: Any, cs: Any, kept: Any, gates: str,
    reverse: bool,
) -> None:  # fmt: skip
    steps, batch, size = gy.shape
    dtype = dz.dtype
    weights = PackedWeights(r)
    loop = native_function(lstm_loops.backward, element_of(dtype), gates)

    def part(start: int, stop: int) -> None:
        many, rows = stop - start, BatchRows.in_order(steps, not reverse, start)
        product = weights.product(many)
        memory = product_scratch(product)

        for past_c, begin, end in (
            (rows.at_step(cs, 1), 0, steps - 1),
            (rows.at_all_steps(c), steps - 1, steps),
        ):
            chain = CallChain()
            places = [
                rows.at_step(gy),
                rows.at_all_steps(dh),
                rows.at_step(kept),
                rows.at_step(cs),
                past_c,
                rows.at_step(dz),
                rows.at_all_steps(dc),
            ]
            chain.add(loop, places, [size], many)
            chain.product(
                product,
                rows.at_step(dz),
                weights.place,
                rows.at_all_steps(dh),
                memory,
            )
            chain.run(begin, end)

    split_batch(batch, steps * batch * size * (4 * size / 40 + 3), part)


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

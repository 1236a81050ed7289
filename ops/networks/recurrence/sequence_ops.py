"""Checks of shapes and the batching rule that the ops of whole sequences, LSTM and GRU, share.

Their first operands are z (T, B, G·H), the inputs' part of G gates, the recurrent weights r
(G·H, H), a bias (G·H,), and states (B, H).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.errors import DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Op, Tensor
from graphflow.ir.spec import TensorSpec, equate, show_shape
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.kernels.sequence.step_chain import is_native
from graphflow.ops.tensors.shape import reshape_op
from graphflow.ops.tensors.slicing import concat
from graphflow.ops.tensors.slicing import window as part_of


def require_operands(
    z: TensorSpec, r: TensorSpec, states: Mapping[str, TensorSpec], gates: int
) -> None:
    """Check that z, r and named states fit each other.

    Raises:
        DTypeError, ShapeError: they do not.
    """
    require_kind(z, "float")
    operands = {"z": z, "r": r, **states}
    text = ", ".join(f"{name} {show_shape(x.shape)}" for name, x in operands.items())
    if any(x.dtype != z.dtype for x in operands.values()):
        kinds = ", ".join(f"{name} is {x.dtype}" for name, x in operands.items())
        raise DTypeError(f"{kinds}; use .astype")
    if (z.rank, r.rank) != (3, 2) or any(x.rank != 2 for x in states.values()):
        raise ShapeError(
            f"expected z (T, B, {gates}·H), r ({gates}·H, H), {' and '.join(states)} (B, H), got "
            f"{text}"
        )
    equate(z.shape[2], r.shape[0], text)
    equate(r.shape[0], r.shape[1] * gates, text)
    for state in states.values():
        equate(state.shape[1], r.shape[1], text)
        equate(state.shape[0], z.shape[1], text)


def require_bias(z: TensorSpec, r: TensorSpec, bias: TensorSpec) -> None:
    """Check that the bias has one number for each row of r.

    Raises:
        ShapeError: it does not.
    """
    if bias.dtype != z.dtype or bias.rank != 1:
        raise ShapeError(f"the bias is {bias}, z {z}: one number for each row of r")
    equate(bias.shape[0], r.shape[0], f"bias {bias}, r {r}")


def require_states(kept: TensorSpec, r: TensorSpec, *states: TensorSpec) -> None:
    """Check that each of `states` is (T, B, H), for gates `kept` (T, B, G·H).

    Raises:
        ShapeError: one is not.
    """
    for each in states:
        text = f"states {each} of gates {kept}, r {r}"
        if each.dtype != kept.dtype or each.rank != 3:
            raise ShapeError(text)
        for size, wanted in zip(each.shape, (*kept.shape[:2], r.shape[1]), strict=True):
            equate(size, wanted, text)


def packed_bytes(z: TensorSpec, r: TensorSpec, *rest: TensorSpec, **attrs: Any) -> int:
    """Return the bytes of r as the kernel on a CPU packs it; 0 if it does not."""
    return int(r.nbytes) if is_native(np, z.dtype) else 0


def alias_inputs(*inputs: Tensor) -> list[Tensor]:
    """Return aliases that are independent of each other even if the tensors are not."""
    return [reshape_op(x, shape=x.shape) for x in inputs]


def states_before(first: Tensor, states: Tensor, reverse: bool) -> Tensor:
    """Return the states (T, B, H) before each step, from the first one and those after each."""
    start = FUNCTIONS["expand_dims"](first, 0)
    rest = part_of(states, 0, int(reverse), states.shape[0] - 1)
    return concat([rest, start] if reverse else [start, rest], 0)


def sum_products(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ over steps and rows of a (T, B, m) times b (T, B, n): (m, n)."""
    flat = (FUNCTIONS["reshape"](x, (x.shape[0] * x.shape[1], x.shape[2])) for x in (a, b))
    result: Tensor = FUNCTIONS["matmul"](*flat, transpose_a=True)
    return result


def batch_rule(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
    """Put examples with shared weights side by side in the op's own batch."""
    if batched[1] or batched[2]:
        return NotImplemented
    n = batching.batch_size(inputs, batched)
    z, r, bias, *states = inputs
    z, *states = batching.batch_all((z, *states), (batched[0], *batched[3:]))
    joined = [
        _merge_axes(FUNCTIONS["moveaxis"](z, 0, 1), 1),
        r,
        bias,
        *(_merge_axes(state, 0) for state in states),
    ]

    def split_batch(x: Tensor) -> Tensor:
        axis = x.ndim - 2
        shape = (*x.shape[:axis], n, z.shape[2], x.shape[-1])
        return FUNCTIONS["moveaxis"](FUNCTIONS["reshape"](x, shape), axis, 0)  # type: ignore[no-any-return]

    return tuple(map(split_batch, op(*joined, **attrs)))


def _merge_axes(x: Tensor, axis: int) -> Tensor:
    shape = (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    result: Tensor = FUNCTIONS["reshape"](x, shape)
    return result

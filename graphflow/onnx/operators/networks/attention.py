"""Attention by our op, which never stores the matrix of all scores.

If a model reads this matrix (`qk_matmul_output`), the function body in ONNX's schema expands it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.ir.op import Tensor
from graphflow.ir.spec import Size, floordiv
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.ops.attention import attention_op as attention
from graphflow.ops.pointwise import comparison, select
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.tensors import slicing as window
from graphflow.ops.tensors.creation import arange
from graphflow.ops.tensors.padding import pad
from graphflow.ops.tensors.shape import expand_dims, permute_dims, reshape


@operator("Attention", since=23)
def _attention(call: NodeCall) -> Outputs:
    softcap = call.attr("softcap", 0.0)
    if call.wants(3) or (softcap and call.has(3) and call.version < 24):
        return call.expand_schema_body()
    flat = call.rank(0) == 3
    q, k, v = (_heads(call, i, name) for i, name in enumerate(_HEADS))
    past: Size = 0
    if call.has(4):
        past = call.spec(4).shape[2]
        k, v = (window.concat([call.tensor(4 + i), x], 2) for i, x in enumerate((k, v)))
    causal = bool(call.attr("is_causal", 0))
    sides = tuple(None if s < 0 else s for s in (_side(call, "left"), _side(call, "right")))
    mask = _mask(call, q, k)
    if call.has(6):  # lengths of each element of the batch; positions count from them
        mask = _combine_masks(_length_mask(call, q, k, causal, sides), mask)
        causal, sides = False, (None, None)
    y = attention.attention(
        q,
        k,
        v,
        mask,
        causal=causal,
        scale=call.attr("scale"),
        softcap=softcap or None,
        window=None if sides == (None, None) else sides,
        offset=past,
    )
    if flat:
        batch, heads, time, depth = y.shape
        y = reshape(permute_dims(y, (0, 2, 1, 3)), (batch, time, heads * depth))
    return [y, k, v]


_HEADS = ("q_num_heads", "kv_num_heads", "kv_num_heads")


def _side(call: NodeCall, which: str) -> int:
    return int(call.attr(f"{which}_window_size", -1))


def _heads(call: NodeCall, i: int, name: str) -> Tensor:
    """Return input i as (batch, heads, time, depth); one of rank 3 is (batch, time, width)."""
    x = call.tensor(i)
    if x.ndim == 4:
        return x
    heads = call.required_attr(name)
    batch, time, width = x.shape
    return permute_dims(reshape(x, (batch, time, heads, floordiv(width, heads))), (0, 2, 1, 3))


def _mask(call: NodeCall, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the given mask; keys beyond its end are masked."""
    mask = call.optional(3)
    if mask is None:
        return None
    missing = k.shape[2] - mask.shape[-1]
    if missing != 0 and mask.shape[-1] != 1:
        widths = [(0, missing if i == mask.ndim - 1 else 0) for i in range(mask.ndim)]
        mask = pad(mask, widths, value=False if mask.dtype.kind == "b" else -np.inf)
    return mask if mask.dtype.kind == "b" else astype(mask, q.dtype)


def _length_mask(call: NodeCall, q: Tensor, k: Tensor, causal: bool, sides: Any) -> Tensor:
    """Return a mask of the keys that each query sees, if each sequence has its own length."""
    lengths = reshape(astype(call.tensor(6), "int64"), (-1, 1, 1, 1))
    keys = arange(k.shape[2])
    own = expand_dims(arange(q.shape[2]), 1) + lengths - q.shape[2]  # (batch, 1, T, 1)
    seen = comparison.less(keys, lengths)
    left, right = sides
    if causal:
        right = 0
    if right is not None:
        seen = comparison.logical_and(seen, comparison.less_equal(keys, own + right))
    if left is not None:
        seen = comparison.logical_and(seen, comparison.greater_equal(keys, own - left))
    result: Tensor = seen
    return result


def _combine_masks(seen: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return seen
    if mask.dtype.kind == "b":
        both: Tensor = comparison.logical_and(seen, mask)
        return both
    return select.where(seen, mask, -np.inf)

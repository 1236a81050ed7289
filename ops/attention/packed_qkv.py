"""Attention of queries, keys and values that lie side by side in one tensor.

One product by all three weight matrices gives such a tensor. Kernels read and write parts of it by
strides, so nothing is cut apart or copied into another order. `gf.nn.attention` uses this op if its
inputs are neighbouring parts of one tensor, each with its heads on an axis of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.errors import ShapeError
from graphflow.ir.op import FUNCTIONS, REGISTRY, Cost, Op, Tensor, register, sample
from graphflow.ir.spec import Size, TensorSpec, product, show_shape, spec
from graphflow.ops.attention.attention_op import infer_pairs
from graphflow.ops.attention.blockwise import attention_kernels, native_pattern
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import is_zeros, require_kind
from graphflow.ops.kernels.sequence import flash_attention
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.reductions.reduce import sum
from graphflow.ops.sharding import attention_rules
from graphflow.ops.tensors.shape import permute_dims, reshape, reshape_op
from graphflow.ops.tensors.slicing import concat
from graphflow.ops.tensors.slicing import window as part_of

# Kernels, over arrays (…, heads, T, d) of any strides ---------------------------------------------


def _attend_views(xp: Any, out: Any, heads: Sequence[Any], mask: Any, attrs: Any) -> None:
    """Write attention of q, k and v into the view y, and the log-sum-exps of the scores."""
    (y, logs), (q, k, v) = out, heads
    if flash_attention.is_native(xp, q, k, v, attrs["softcap"]):
        flash_attention.forward(y, logs, q, k, v, mask, native_pattern(**attrs))
        return
    forward, _ = attention_kernels()
    found = forward(xp, *map(xp.ascontiguousarray, (q, k, v)), *mask, **attrs)
    xp.copyto(y, found[0])
    xp.copyto(logs, found[1])


def _attend_views_back(
    xp: Any, outs: Any, g: Any, heads: Sequence[Any], y: Any, logs: Any, mask: Any, attrs: Any
) -> None:
    """Write the gradients of q, k and v into views, for the cotangent g of the result y."""
    q, k, v = heads
    if flash_attention.is_native(xp, q, k, v, attrs["softcap"]):
        delta, pattern = xp.empty(logs.shape, logs.dtype), native_pattern(**attrs)
        flash_attention.backward(outs, g, delta, q, k, v, logs, mask, pattern, y=y)
        return
    _, backward = attention_kernels()
    delta = (g.astype(logs.dtype) * y.astype(logs.dtype)).sum(-1)
    given = map(xp.ascontiguousarray, (g, delta, q, k, v))
    for view, found in zip(outs, backward(xp, *given, logs, *mask, **attrs), strict=True):
        xp.copyto(view, found)


# The op -------------------------------------------------------------------------------------------


def _depth(x: TensorSpec, heads: int, shared: int) -> int:
    """Return the size of a head.

    Raises:
        ShapeError: the last axis is no multiple of the number of heads.
    """
    size = x.shape[-1] if x.rank >= 2 else None
    if not isinstance(size, int) or size % (heads + 2 * shared) or heads % shared:
        raise ShapeError(
            f"shape {show_shape(x.shape)} does not hold {heads} heads of queries and {shared} "
            "heads each of keys and values side by side along its last axis"
        )
    return size // (heads + 2 * shared)


def _infer(
    x: TensorSpec, *mask: TensorSpec, heads: int, shared: int, **attrs: Any
) -> tuple[TensorSpec, TensorSpec]:
    """Infer the specs of the result and of the log-sum-exps."""
    require_kind(x, "float")
    depth = _depth(x, heads, shared)
    q, k = (x.with_shape((*x.shape[:-2], n, x.shape[-2], depth)) for n in (heads, shared))
    _, logs = infer_pairs(q, k, k, mask)
    return x.with_shape((*x.shape[:-1], heads * depth)), logs


def _head_views(x: Any, *counts: int) -> list[Any]:
    """Return views (…, heads, T, d) of an array (…, T, heads·d), of `counts` heads each."""
    heads = _total(counts)
    whole = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).swapaxes(-2, -3)
    parts, start = [], 0
    for count in counts:
        parts.append(whole[..., start : start + count, :, :])
        start += count
    return parts


def _total(counts: Sequence[int]) -> int:
    total = 0
    for count in counts:
        total += count
    return total


def _compute_into(
    xp: Any, out: Any, x: Any, *mask: Any, heads: int, shared: int, **attrs: Any
) -> None:
    _attend_views(
        xp,
        (*_head_views(out[0], heads), out[1]),
        _head_views(x, heads, shared, shared),
        mask,
        attrs,
    )


def _kernel(xp: Any, x: Any, *mask: Any, heads: int, shared: int, **attrs: Any) -> Any:
    depth = x.shape[-1] // (heads + 2 * shared)
    wide = "float32" if x.dtype.itemsize == 2 else x.dtype
    out = (
        xp.empty((*x.shape[:-1], heads * depth), x.dtype),
        xp.empty((*x.shape[:-2], heads, x.shape[-2]), wide),
    )
    _compute_into(xp, out, x, *mask, heads=heads, shared=shared, **attrs)
    return out


def _vjp(
    gs: Sequence[Tensor], ys: Sequence[Tensor], x: Tensor, *mask: Tensor, **attrs: Any
) -> Sequence[Tensor | None]:
    none = (None,) * len(mask)
    if is_zeros(gs[1]):
        return packed_grad(gs[0], x, *ys, *mask, **attrs), *none
    (apart,) = _independent_aliases([x])
    parted = _attend_unpacked(apart, *mask, **attrs)
    (found,) = FUNCTIONS["gradients"](list(parted), [apart], list(gs))
    return found, *none


def _swap_heads_and_time(x: Tensor) -> Tensor:
    """Return (…, T, heads, d) for (…, heads, T, d), or the reverse."""
    return permute_dims(x, _swapped_axes(x.ndim))


def _is_swapped(x: Tensor) -> bool:
    node = x.node
    return node.op.name == "permute_dims" and tuple(node.attrs["axes"]) == _swapped_axes(x.ndim)


def _swapped_axes(rank: int) -> tuple[int, ...]:
    return (*range(rank - 3), rank - 2, rank - 3, rank - 1)


def _independent_aliases(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return an alias of each tensor, so that the gradient in one does not flow through another.

    The inputs may depend on each other, such as x and the result y.
    """
    return [reshape_op(x, shape=x.shape) for x in inputs]


def _select_heads(x: Tensor, start: int, count: int, depth: int) -> Tensor:
    """Return `count` heads, from `start` on, of (…, T, heads·d) as (…, heads, T, d)."""
    mine = part_of(x, x.ndim - 1, start * depth, count * depth)
    return _swap_heads_and_time(reshape(mine, (*x.shape[:-1], count, depth)))


def _pack_heads(x: Tensor) -> Tensor:
    """Return (…, heads, T, d) as (…, T, heads·d)."""
    swapped = _swap_heads_and_time(x)
    return reshape(swapped, (*swapped.shape[:-2], swapped.shape[-2] * swapped.shape[-1]))


def _split_qkv(x: Tensor, heads: int, shared: int) -> list[Tensor]:
    """Return q, k and v as tensors of their own, (…, heads, T, d)."""
    depth = _depth(x.spec, heads, shared)
    starts = ((0, heads), (heads, shared), (heads + shared, shared))
    return [_select_heads(x, start, count, depth) for start, count in starts]


def _attend_unpacked(
    x: Tensor, *mask: Tensor, heads: int, shared: int, **attrs: Any
) -> tuple[Tensor, Tensor]:
    """Express the op by attention of separate tensors, for its derivatives."""
    y, logs = REGISTRY["attention"](*_split_qkv(x, heads, shared), *mask, **attrs)
    return _pack_heads(y), logs


# Its gradient -------------------------------------------------------------------------------------


def _grad_into(
    xp: Any, out: Any, g: Any, x: Any, y: Any, logs: Any, *mask: Any, heads: int, shared: int,
    **attrs: Any,
) -> None:  # fmt: skip
    outs = _head_views(out, heads, shared, shared)
    (gh,), (yh,) = (_head_views(a, heads) for a in (g, y))
    given = _head_views(x, heads, shared, shared)
    _attend_views_back(xp, outs, gh, given, yh, logs, mask, attrs)


def _grad_kernel(xp: Any, g: Any, x: Any, *rest: Any, **attrs: Any) -> Any:
    out = xp.empty(x.shape, x.dtype)
    _grad_into(xp, out, g, x, *rest, **attrs)
    return out


def _grad_vjp(h: Tensor, dx: Tensor, *inputs: Tensor, **attrs: Any) -> Sequence[Tensor | None]:
    apart, mask = _independent_aliases(inputs[:4]), inputs[4:]
    parted = _grad_unpacked(*apart, *mask, **attrs)
    found = FUNCTIONS["gradients"]([parted], apart, [h])
    return *found, *(None,) * len(mask)


def _grad_unpacked(
    g: Tensor, x: Tensor, y: Tensor, logs: Tensor, *mask: Tensor, heads: int, shared: int,
    **attrs: Any,
) -> Tensor:  # fmt: skip
    """Express the gradient by attention's gradient of separate tensors, for its derivatives."""
    depth = _depth(x.spec, heads, shared)
    gh, yh = (_select_heads(a, 0, heads, depth) for a in (g, y))
    delta = sum(astype(gh, logs.dtype) * astype(yh, logs.dtype), -1)
    found = REGISTRY["attention_grad"](
        gh, delta, *_split_qkv(x, heads, shared), logs, *mask, **attrs
    )  # fmt: skip
    return concat([_pack_heads(part) for part in found], -1)


# Registered ---------------------------------------------------------------------------------------


def _cost(products: int) -> Any:
    def cost(x: TensorSpec, heads: int, shared: int) -> Cost:
        steps = x.shape[-2]
        pairs: Size = product(x.shape[:-1]) * heads * steps
        return Cost(flops=pairs * (_depth(x, heads, shared) * (2 * products) + 20))

    return cost


_forward_cost, _backward_cost = _cost(2), _cost(5)
_X, _Y = spec("float32", (2, 3, 12)), spec("float32", (2, 3, 6))
_LOGS = spec("float32", (2, 2, 3))
_ATTRS: dict[str, Any] = {
    "heads": 2, "shared": 1, "scale": 0.6, "left": None, "right": 0, "offset": 0, "softcap": None,
}  # fmt: skip
_FREE = {**_ATTRS, "right": None, "softcap": 1.5}
_EACH = {**_ATTRS, "shared": 2}
_MASK = spec("bool", (2, 1, 1, 3))
_ROWS = batching.rows


def _unmask_first_key(arrays: list[Any]) -> list[Any]:
    """Return sample arrays under whose mask each query sees the first key."""
    arrays[-1] = arrays[-1].copy()
    arrays[-1][..., 0] = True
    return arrays


def _batch_rows(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
    count = 1 if op is packed_op else 4
    if len(inputs) > count:
        return NotImplemented  # a mask may broadcast along the axes before (T, S)
    return _ROWS(op, inputs, batched, **attrs)


# Results: the heads side by side, and the log-sum-exp of each query's scores.
packed_op: Op = register(
    Op(
        "attention_packed",
        infer=_infer,
        kernel=_kernel,
        into=_compute_into,
        vjp=_vjp,
        batch=_batch_rows,
        sharding=attention_rules.packed_attention_rule,
        cost=lambda x, *mask, heads, shared, **attrs: _forward_cost(x, heads, shared),
        autocast="low",
        samples=(
            sample(spec("float32", (2, 3, 12)), **_ATTRS),
            sample(spec("float32", (2, 3, 12)), **_FREE),
            sample(spec("float32", (2, 3, 12)), _MASK, make=_unmask_first_key, **_ATTRS),
            sample(spec("float32", (2, 3, 12)), **_EACH),
            sample(
                spec("float32", (2, 3, 12)),
                spec("bool", (2, 3, 3)),
                make=_unmask_first_key,
                **_EACH,
            ),
        ),
        doc="Attention of queries, keys and values that lie side by side.",
    )
)
packed_grad: Op = register(
    Op(
        "attention_packed_grad",
        infer=lambda g, x, y, logs, *mask, **attrs: x,
        kernel=_grad_kernel,
        into=_grad_into,
        vjp=_grad_vjp,
        batch=_batch_rows,
        sharding=attention_rules.packed_attention_rule,
        cost=lambda g, x, y, logs, *mask, heads, shared, **attrs: _backward_cost(x, heads, shared),
        samples=(
            sample(_Y, _X, _Y, _LOGS, low=-1.0, high=1.0, **_ATTRS),
            sample(_Y, _X, _Y, _LOGS, low=-1.0, high=1.0, **_FREE),
            sample(_Y, _X, _Y, _LOGS, _MASK, low=-1.0, high=1.0, make=_unmask_first_key, **_ATTRS),
            sample(
                spec("float32", (2, 3, 4)),
                _X,
                spec("float32", (2, 3, 4)),
                _LOGS,
                low=-1.0,
                high=1.0,
                **_EACH,
            ),
        ),
        doc="The gradient of attention of parts that lie side by side.",
    )
)


# Recognised ---------------------------------------------------------------------------------------


def match_packed_attention(tensors: Sequence[Tensor], attrs: dict[str, Any]) -> Tensor | None:
    """Build packed attention if q, k and v are neighbouring parts of one tensor; else return None.

    Args:
        tensors: q, k, v and perhaps a mask; a packed mask must be bool.
        attrs: the attributes of attention.
    """
    q, k, v, *mask = tensors
    if any(m.dtype != bool for m in mask):
        return None
    sources = [_packed_source(t) for t in (q, k, v)]
    if any(source is None for source in sources):
        return None
    (x, *_), *_ = sources  # type: ignore[misc]
    depth = q.shape[-1]
    at: Size = 0
    for source, tensor in zip(sources, (q, k, v), strict=True):
        assert source is not None
        if source[0] is not x or source[1] != at or tensor.shape[-1] != depth:
            return None
        at += tensor.shape[-3] * depth
    if at != x.shape[-1] or not isinstance(depth, int):
        return None
    y = packed_op(x, *mask, heads=q.shape[-3], shared=k.shape[-3], **attrs)[0]
    return _select_heads(y, 0, int(q.shape[-3]), depth)


def _packed_source(x: Tensor) -> tuple[Tensor, int] | None:
    """Return the tensor (…, T, n) that x, (…, heads, T, d), is a part of, and where it begins."""
    if not _is_swapped(x):
        return None
    node = x.node.inputs[0].node
    if node.op.name != "reshape" or node.inputs[0].shape[:-1] != node.specs[0].shape[:-2]:
        return None
    part = node.inputs[0]
    node = part.node
    if node.op.name != "slice":
        return None
    whole, start = node.inputs[0], node.attrs["start"]
    rows = whole.shape[:-1] == part.shape[:-1] and all(s == 1 for s in node.attrs["step"])
    if not rows or any(s != 0 for s in start[:-1]) or not isinstance(start[-1], int):
        return None
    return whole, start[-1]


FUNCTIONS["packed_attention"] = match_packed_attention

"""Attention by array calls, block by block.

It serves GPUs, 16-bit floats, soft caps and processors without native kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.ops.attention.block_patterns import (
    AttentionPattern,
    GroupedHeads,
    split_heads,
    upcast_half,
)
from graphflow.ops.kernels.sequence import flash_attention
from graphflow.ops.kernels.sequence.attention_layouts import BandPattern


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of scores: float32 for 16-bit floats, else the same."""
    return np.dtype("float32") if dtype.itemsize == 2 else dtype


def native_pattern(softcap: float | None, **attrs: Any) -> BandPattern:
    """Return the pattern of native calls, which know no soft cap."""
    return BandPattern(**attrs)


def attention_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the kernels of attention and of its gradient, by arrays."""
    return attention_kernel, attention_grad_kernel


def _attend_block(heads: GroupedHeads, y: Any, logs: Any, task: tuple[slice, slice]) -> None:
    """Compute the results and log-sum-exps of a block of queries, (n, g, t, …)."""
    xp, (n, t) = heads.xp, task
    qs = upcast_half(heads.q[n, :, t]) * heads.pattern.scale
    rows = qs.shape[:-1]
    top = xp.full((*rows, 1), -xp.inf, qs.dtype)
    total = xp.zeros((*rows, 1), qs.dtype)
    result = xp.zeros((*rows, y.shape[-1]), qs.dtype)
    for i, s in enumerate(heads.key_blocks(t)):
        z, _ = heads.scores(qs, n, t, s)
        highest = xp.maximum(top, xp.max(z, axis=-1, keepdims=True))
        level = xp.where(
            xp.isneginf(highest), qs.dtype.type(0), highest
        )  # 0: no key was seen so far
        xp.subtract(z, level, out=z)
        xp.exp(z, out=z)
        part = xp.matmul(z, upcast_half(heads.v[n, None, s]))
        if i:
            fading = xp.exp(top - level)
            total *= fading
            result *= fading
            result += part
        else:
            result = part
        total += xp.sum(z, axis=-1, keepdims=True)
        top = highest
    unseen = total == 0
    xp.copyto(total, qs.dtype.type(1), where=unseen)
    xp.divide(result, total, out=y[n, :, t], casting="same_kind")
    logs[n, :, t] = (top + xp.log(total))[..., 0]


def attention_into(xp: Any, out: Any, q: Any, k: Any, v: Any, *mask: Any, **attrs: Any) -> None:
    if flash_attention.is_native(xp, q, k, v, attrs["softcap"]):
        flash_attention.forward(out[0], out[1], q, k, v, mask, native_pattern(**attrs))
        return
    heads = GroupedHeads.from_arrays(xp, q, k, v, mask, AttentionPattern(**attrs))
    y = split_heads(out[0], k.shape[-3])
    logs = out[1].reshape(y.shape[:-1])
    heads.run_tasks(heads.tasks(), lambda task: _attend_block(heads, y, logs, task), heads.flops(2))


def attention_kernel(xp: Any, q: Any, k: Any, v: Any, *mask: Any, **attrs: Any) -> Any:
    out = (
        xp.empty((*q.shape[:-1], v.shape[-1]), q.dtype),
        xp.empty(q.shape[:-1], wide_dtype(q.dtype)),
    )
    attention_into(xp, out, q, k, v, *mask, **attrs)
    return out


def _probabilities(heads: GroupedHeads, qs: Any, logs: Any, n: slice, t: slice, s: slice) -> Any:
    """Return exp(scores - log-sum-exp) of a block, and the slope of the soft cap."""
    p, slope = heads.scores(qs, n, t, s)
    level = logs[n, :, t, None]
    xp = heads.xp
    xp.subtract(p, xp.where(xp.isneginf(level), level.dtype.type(0), level), out=p)
    return xp.exp(p, out=p), slope


def _grad_heads(
    heads: GroupedHeads, g: Any, delta: Any, logs: Any, out: Sequence[Any], n: slice
) -> None:
    """Compute the gradients of some shared heads: all blocks of their queries and keys."""
    xp, (dq, dk, dv) = heads.xp, out
    scale = heads.pattern.scale
    wide = logs.dtype
    sums_k, sums_v = (xp.zeros(x[n].shape, wide) for x in (dk, dv))
    for t in heads.query_blocks():
        qs = upcast_half(heads.q[n, :, t]) * scale
        gt, level = upcast_half(g[n, :, t]), delta[n, :, t, None]
        sums_q = xp.zeros(qs.shape, wide)
        for s in heads.key_blocks(t):
            p, slope = _probabilities(heads, qs, logs, n, t, s)
            sums_v[:, s] += _sum_products_over_group(xp, p, gt)
            dz = xp.matmul(gt, upcast_half(heads.v[n, None, s]).swapaxes(-1, -2))
            dz -= level
            dz *= p
            if slope is not None:
                dz *= slope
            sums_q += xp.matmul(dz, upcast_half(heads.k[n, None, s]))
            sums_k[:, s] += _sum_products_over_group(xp, dz, qs)
        xp.multiply(sums_q, scale, out=dq[n, :, t], casting="same_kind")
    xp.copyto(dk[n], sums_k, casting="same_kind")
    xp.copyto(dv[n], sums_v, casting="same_kind")


def _sum_products_over_group(xp: Any, a: Any, b: Any) -> Any:
    """Return Σ over g and t of a[n, g, t, i]·b[n, g, t, j]."""
    n, g, t, i = a.shape
    flat = a.reshape(n, g * t, i).swapaxes(-1, -2)
    return xp.matmul(flat, b.reshape(n, g * t, b.shape[-1]))


def attention_grad_into(
    xp: Any, out: Any, g: Any, delta: Any, q: Any, k: Any, v: Any, logs: Any, *mask: Any,
    **attrs: Any,
) -> None:  # fmt: skip
    if flash_attention.is_native(xp, q, k, v, attrs["softcap"]):
        flash_attention.backward(out, g, delta, q, k, v, logs, mask, native_pattern(**attrs))
        return
    heads = GroupedHeads.from_arrays(xp, q, k, v, mask, AttentionPattern(**attrs))
    shared = k.shape[-3]
    rows = heads.q.shape[:-1]
    outs = split_heads(out[0], shared), out[1].reshape(heads.k.shape), out[2].reshape(heads.v.shape)
    given = split_heads(g, shared), delta.reshape(rows), logs.reshape(rows)
    tasks = list(dict.fromkeys((n.start, n.stop) for n, _ in heads.tasks()))
    heads.run_tasks(
        tasks, lambda n: _grad_heads(heads, *given, outs, slice(*n)), heads.flops(5)
    )  # fmt: skip


def attention_grad_kernel(
    xp: Any, g: Any, delta: Any, q: Any, k: Any, v: Any, *rest: Any, **attrs: Any
) -> Any:
    out = tuple(xp.empty(x.shape, x.dtype) for x in (q, k, v))
    attention_grad_into(xp, out, g, delta, q, k, v, *rest, **attrs)
    return out


def mask_grad_kernel(
    xp: Any, g: Any, delta: Any, q: Any, k: Any, v: Any, logs: Any, mask: Any, **attrs: Any
) -> Any:
    """Sum the cotangents of the scores over the axes along which the mask is broadcast."""
    heads = GroupedHeads.from_arrays(xp, q, k, v, (mask,), AttentionPattern(**attrs))
    shared = k.shape[-3]
    rows = heads.q.shape[:-1]
    g, delta, logs = split_heads(g, shared), delta.reshape(rows), logs.reshape(rows)
    total = xp.zeros(mask.shape, logs.dtype)
    full = total.reshape((1,) * (q.ndim - mask.ndim) + mask.shape)
    for n, t in heads.tasks():
        qs, gt, level = (
            upcast_half(heads.q[n, :, t]) * attrs["scale"],
            g[n, :, t],
            delta[n, :, t, None],
        )
        for s in heads.key_blocks(t):
            p, _ = _probabilities(heads, qs, logs, n, t, s)
            p *= (
                xp.matmul(upcast_half(gt), upcast_half(heads.v[n, None, s]).swapaxes(-1, -2))
                - level
            )
            _add_block(xp, full, p, (*q.shape[:-3], shared), n, t, s)
    return total.astype(mask.dtype, copy=False)


def _add_block(
    xp: Any, total: Any, block: Any, lead: tuple[int, ...], n: slice, t: slice, s: slice
) -> None:
    """Add a block (n, g, t, s) of the scores' cotangents to the mask's gradient."""
    group = block.shape[1]
    for row, i in zip(block, range(n.start, n.stop), strict=True):
        *batch, head = (int(j) for j in np.unravel_index(i, lead))
        place = tuple(0 if size == 1 else j for size, j in zip(total.shape, batch, strict=False))
        places = (slice(head * group, head * group + group), t, s)
        mine = total[place]
        axes = tuple(a for a in range(3) if mine.shape[a] == 1)
        part = xp.sum(row, axis=axes, keepdims=True) if axes else row
        mine[tuple(slice(None) if mine.shape[a] == 1 else places[a] for a in range(3))] += part

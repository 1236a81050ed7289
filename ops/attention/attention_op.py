"""Attention of queries to keys and values, without the matrix of all their pairs in memory.

Forward, blocks of keys stream past blocks of queries: running maxima and sums of exponentials make
the softmax. Backward, the same blocks of probabilities come again from the logarithms of the sums.
Blocks depend on shapes alone and are shared out among threads whole, so bits do not depend on
threads.

Source: Dao et al., NeurIPS 2022; Rabe & Staats, arXiv:2112.05682.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import Dim, Size, TensorSpec, equate, kind, product, show_shape, spec
from graphflow.ops.attention.block_patterns import (
    AttentionPattern,
    GroupedHeads,
    split_heads,
    upcast_half,
)
from graphflow.ops.attention.second_order import pair_gradients
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import is_zeros, require_kind
from graphflow.ops.kernels.sequence import flash_attention as attend
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.reductions.reduce import sum
from graphflow.ops.sharding import row_ops as row_sharding
from graphflow.ops.tensors.shape import expand_dims, squeeze_op

# Shapes -----------------------------------------------------------------------------------------


def _wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What scores are computed in: two-byte floats as float32."""
    return np.dtype("float32") if dtype.itemsize == 2 else dtype


def infer_pairs(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, mask: Sequence[TensorSpec]
) -> tuple[TensorSpec, TensorSpec]:
    """Specs of the result and of the log-sum-exps."""
    shapes = f"q {show_shape(q.shape)}, k {show_shape(k.shape)}, v {show_shape(v.shape)}"
    require_kind(q, "float")
    if not q.dtype == k.dtype == v.dtype:
        raise DTypeError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; convert with .astype")
    if q.rank < 3 or not q.rank == k.rank == v.rank:
        raise ShapeError(f"{shapes}: give (…, heads, T, d) each, of one rank")
    for a, b in zip(q.shape[:-3], k.shape[:-3], strict=True):
        equate(a, b, f"{shapes}: batches differ")
    for a, b in zip(k.shape[:-1], v.shape[:-1], strict=True):
        equate(a, b, f"{shapes}: k and v differ before their last axis")
    equate(q.shape[-1], k.shape[-1], f"{shapes}: sizes of queries and keys differ")
    heads, shared = q.shape[-3], k.shape[-3]
    if not isinstance(heads, int) or not isinstance(shared, int) or shared < 1 or heads % shared:
        raise ShapeError(f"{shapes}: heads of q are a known multiple of those of k and v")
    for m in mask:
        _require_mask(m, (*q.shape[:-1], k.shape[-2]), q.dtype)
    rows = q.shape[:-1]
    return q.with_shape((*rows, v.shape[-1])), TensorSpec(rows, _wide_dtype(q.dtype))


def _require_mask(mask: TensorSpec, scores: Sequence[Size], dtype: np.dtype[Any]) -> None:
    if kind(mask.dtype) != "bool" and mask.dtype != dtype:
        raise DTypeError(f"the mask is bool or {dtype} as q is, not {mask.dtype}; use .astype")
    text = f"mask {show_shape(mask.shape)} does not broadcast to {show_shape(tuple(scores))}"
    if mask.rank > len(scores):
        raise ShapeError(text)
    for have, want in zip(reversed(mask.shape), reversed(scores), strict=False):
        if have != 1:
            equate(want, have, text)


def _flops(q: TensorSpec, k: TensorSpec, products: int) -> Cost:
    """Of so many products of queries and keys: of d flops twice a pair, and about 20 beside."""
    pairs = product(q.shape[:-1]) * k.shape[-2]
    return Cost(flops=pairs * (q.shape[-1] * (2 * products) + 20))


def native_pattern(softcap: float | None, **attrs: Any) -> attend.BandPattern:
    """The pattern of native calls, which know no soft cap."""
    return attend.BandPattern(**attrs)


def attention_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The kernels of attention and of its gradient, by arrays."""
    return _attention_kernel, _attention_grad_kernel


# Forward ----------------------------------------------------------------------------------------


def _attend_block(heads: GroupedHeads, y: Any, logs: Any, task: tuple[slice, slice]) -> None:
    """Results and log-sum-exps of a block of queries, (n, g, t, …)."""
    xp, (n, t) = heads.xp, task
    qs = upcast_half(heads.q[n, :, t]) * heads.pattern.scale
    rows = qs.shape[:-1]
    top = xp.full((*rows, 1), -xp.inf, qs.dtype)
    total = xp.zeros((*rows, 1), qs.dtype)
    result = xp.zeros((*rows, y.shape[-1]), qs.dtype)
    for i, s in enumerate(heads.key_blocks(t)):
        z, _ = heads.scores(qs, n, t, s)
        highest = xp.maximum(top, xp.max(z, axis=-1, keepdims=True))
        level = xp.where(xp.isneginf(highest), qs.dtype.type(0), highest)  # no key seen so far
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


def _attention_into(xp: Any, out: Any, q: Any, k: Any, v: Any, *mask: Any, **attrs: Any) -> None:
    if attend.is_native(xp, q, k, v, attrs["softcap"]):
        attend.forward(out[0], out[1], q, k, v, mask, native_pattern(**attrs))
        return
    heads = GroupedHeads.from_arrays(xp, q, k, v, mask, AttentionPattern(**attrs))
    y = split_heads(out[0], k.shape[-3])
    logs = out[1].reshape(y.shape[:-1])
    heads.run_tasks(heads.tasks(), lambda task: _attend_block(heads, y, logs, task), heads.flops(2))


def _attention_kernel(xp: Any, q: Any, k: Any, v: Any, *mask: Any, **attrs: Any) -> Any:
    out = (
        xp.empty((*q.shape[:-1], v.shape[-1]), q.dtype),
        xp.empty(q.shape[:-1], _wide_dtype(q.dtype)),
    )
    _attention_into(xp, out, q, k, v, *mask, **attrs)
    return out


def _attention_vjp(
    gs: Sequence[Tensor], ys: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, *mask: Tensor,
    **attrs: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (g, g_logs), (y, logs) = gs, ys
    delta = sum(astype(g, logs.dtype) * astype(y, logs.dtype), -1)
    if not is_zeros(g_logs):
        delta = delta - g_logs
    inputs = (g, delta, q, k, v, logs, *mask)
    slopes: tuple[Tensor | None, ...] = attention_grad(*inputs, **attrs)
    if not mask:
        return slopes
    # a node of its own, which is not computed unless the mask is to be learnt
    is_float = kind(mask[0].dtype) == "float"
    return *slopes, attention_mask_grad(*inputs, **attrs) if is_float else None


# Backward ---------------------------------------------------------------------------------------


def _probabilities(heads: GroupedHeads, qs: Any, logs: Any, n: slice, t: slice, s: slice) -> Any:
    """exp(scores - log-sum-exp) of a block, and the slope of the soft cap."""
    p, slope = heads.scores(qs, n, t, s)
    level = logs[n, :, t, None]
    xp = heads.xp
    xp.subtract(p, xp.where(xp.isneginf(level), level.dtype.type(0), level), out=p)
    return xp.exp(p, out=p), slope


def _grad_heads(
    heads: GroupedHeads, g: Any, delta: Any, logs: Any, out: Sequence[Any], n: slice
) -> None:
    """Gradients of some shared heads: every block of their queries and keys."""
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
    """Σ over g and t of a[n, g, t, i]·b[n, g, t, j]."""
    n, g, t, i = a.shape
    flat = a.reshape(n, g * t, i).swapaxes(-1, -2)
    return xp.matmul(flat, b.reshape(n, g * t, b.shape[-1]))


def _attention_grad_into(
    xp: Any, out: Any, g: Any, delta: Any, q: Any, k: Any, v: Any, logs: Any, *mask: Any,
    **attrs: Any,
) -> None:  # fmt: skip
    if attend.is_native(xp, q, k, v, attrs["softcap"]):
        attend.backward(out, g, delta, q, k, v, logs, mask, native_pattern(**attrs))
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


def _attention_grad_kernel(
    xp: Any, g: Any, delta: Any, q: Any, k: Any, v: Any, *rest: Any, **attrs: Any
) -> Any:
    out = tuple(xp.empty(x.shape, x.dtype) for x in (q, k, v))
    _attention_grad_into(xp, out, g, delta, q, k, v, *rest, **attrs)
    return out


def _mask_grad_kernel(
    xp: Any, g: Any, delta: Any, q: Any, k: Any, v: Any, logs: Any, mask: Any, **attrs: Any
) -> Any:
    """The cotangents of the scores, summed over what the mask is broadcast along."""
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
    """Add a block of scores' cotangents (n, g, t, s) where it belongs in the mask's."""
    group = block.shape[1]
    for row, i in zip(block, range(n.start, n.stop), strict=True):
        *batch, head = (int(j) for j in np.unravel_index(i, lead))
        place = tuple(0 if size == 1 else j for size, j in zip(total.shape, batch, strict=False))
        places = (slice(head * group, head * group + group), t, s)
        mine = total[place]
        axes = tuple(a for a in range(3) if mine.shape[a] == 1)
        part = xp.sum(row, axis=axes, keepdims=True) if axes else row
        mine[tuple(slice(None) if mine.shape[a] == 1 else places[a] for a in range(3))] += part


# The ops ----------------------------------------------------------------------------------------


def _specs(q: int, k: int, heads: int, shared: int, d: int, e: int) -> tuple[TensorSpec, ...]:
    return (
        spec("float32", (2, heads, q, d)),
        spec("float32", (2, shared, k, d)),
        spec("float32", (2, shared, k, e)),
    )


_ATTRS: dict[str, Any] = {"scale": 0.6, "left": None, "right": None, "offset": 0, "softcap": None}
_CASES: tuple[tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], dict[str, Any]], ...] = (
    (_specs(3, 4, 2, 2, 2, 3), (), _ATTRS),
    (_specs(3, 3, 4, 2, 2, 2), (), _ATTRS | {"right": 0, "softcap": 1.5}),
    (_specs(3, 4, 2, 1, 2, 2), (spec("bool", (2, 1, 1, 4)),), _ATTRS | {"left": 1, "offset": 1}),
    (_specs(2, 3, 2, 1, 2, 2), (spec("float32", (2, 1, 3)),), _ATTRS | {"softcap": 2.0}),
)


def _grad_specs(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """g, delta, q, k, v and the log-sum-exps for samples of a gradient."""
    q, k, v = specs
    rows = q.with_shape(q.shape[:-1])
    return q.with_shape((*q.shape[:-1], v.shape[-1])), rows, q, k, v, rows


def _infer_grad(
    g: TensorSpec, delta: TensorSpec, q: TensorSpec, k: TensorSpec, v: TensorSpec,
    logs: TensorSpec, *mask: TensorSpec, **attrs: Any,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    infer_pairs(q, k, v, mask)
    return q, k, v


def _grad_vjp(
    hs: Sequence[Tensor], ys: Sequence[Tensor], *inputs: Tensor, **attrs: Any
) -> tuple[Tensor | None, ...]:
    return pair_gradients((*hs, None), *inputs, **attrs)


def _mask_grad_vjp(
    h: Tensor, y: Tensor, *inputs: Tensor, **attrs: Any
) -> tuple[Tensor | None, ...]:
    return pair_gradients((None, None, None, h), *inputs, **attrs)


attention_grad = register(
    Op(
        "attention_grad",
        infer=_infer_grad,
        kernel=_attention_grad_kernel,
        into=_attention_grad_into,
        vjp=_grad_vjp,
        batch=batching.attention(6),
        sharding=row_sharding.attention_grad_rule,
        cost=lambda g, delta, q, k, *rest, **attrs: _flops(q, k, 5),
        rate="product",
        samples=tuple(
            sample(*_grad_specs(specs), *mask, low=-1.0, high=1.0, **attrs)
            for specs, mask, attrs in _CASES
        ),
    )
)
attention_mask_grad = register(
    Op(
        "attention_mask_grad",
        infer=lambda g, delta, q, k, v, logs, mask, **attrs: mask,
        kernel=_mask_grad_kernel,
        vjp=_mask_grad_vjp,
        batch=batching.attention(6, masks=True),
        sharding=row_sharding.attention_mask_grad_rule,
        cost=lambda g, delta, q, k, *rest, **attrs: _flops(q, k, 2),
        rate="product",
        samples=tuple(
            sample(*_grad_specs(_CASES[3][0]), m, low=-1.0, high=1.0, **_ATTRS)
            for m in (spec("float32", (2, 1, 3)), spec("float32", (2, 1, 2, 1)))
        ),
    )
)
# Softmax of the scores times the values, and the log-sum-exp of each query's scores.
_attention = register(
    Op(
        "attention",
        infer=lambda q, k, v, *mask, **attrs: infer_pairs(q, k, v, mask),
        kernel=_attention_kernel,
        into=_attention_into,
        vjp=_attention_vjp,
        batch=batching.attention(3),
        sharding=row_sharding.attention_rule,
        cost=lambda q, k, v, *mask, **attrs: _flops(q, k, 2),
        rate="half_product",
        autocast="low",
        samples=tuple(sample(*specs, *mask, **attrs) for specs, mask, attrs in _CASES),
    )
)


@function
def attention(
    q: Any, k: Any, v: Any, mask: Any = None, *, causal: bool = False, scale: float | None = None,
    softcap: float | None = None, window: Any = None, offset: Size = 0, name: str | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale·q·kᵀ + mask)·v for each head: what each query finds among the keys.

    Never holds the (T, S) scores; a query that sees no key gives zeros.

    Args:
        q: (…, heads, T, d); with one head also (T, d), or (batch, T, d) where only feeds tell how
            large a batch is.
        k, v: (…, shared, S, d) and (…, shared, S, e): `shared` divides `heads`, neighbouring heads
            of q share one of k and v (grouped-query attention).
        mask: bool (True: may be seen) or of the dtype of q (is added to the scores); broadcasts to
            (…, heads, T, S).
        causal: query i sees no key beyond i + offset.
        scale: default 1/√d.
        softcap: scores are limited to ±softcap by softcap·tanh(scores / softcap), before the mask.
        window: keys at a distance below `window` are seen (with `causal`: that many keys); or
            (left, right): how many keys before and after one's own place, None for any number.
        offset: the place among the keys of query 0, such as S - T where earlier keys are cached.

    Raises:
        DTypeError: q, k and v are not of one float dtype, or the mask not bool or of that dtype.
        ShapeError: shapes do not fit.
        ArgumentError: other arguments are out of range.
    """
    tensors = [as_tensor(x) for x in (q, k, v, *(() if mask is None else (mask,)))]
    if _has_no_head_axis(*tensors[:3]):
        several = [expand_dims(t, -3) for t in tensors[:3]]
        several += [expand_dims(m, -3) if m.ndim > 2 else m for m in tensors[3:]]
        found = attention(
            *several, causal=causal, scale=scale, softcap=softcap, window=window, offset=offset
        )
        alone: Tensor = squeeze_op(found, axes=(found.ndim - 3,), name=name)
        return alone
    left, right = _window_sides(window, causal)
    if isinstance(offset, bool) or not isinstance(offset, int | Dim):
        raise ArgumentError(f"offset is an int or a size, not {offset!r}")
    depth = tensors[0].shape[-1] if tensors[0].ndim else 1
    if scale is None and not isinstance(depth, int):
        raise ArgumentError(f"d is {depth}, not known: give the scale")
    number = 1 / math.sqrt(max(1, depth)) if scale is None else scale
    attrs = {
        "scale": _require_positive("scale", number), "left": left, "right": right, "offset": offset,
        "softcap": None if softcap is None else _require_positive("softcap", softcap),
    }  # fmt: skip
    packed: Tensor | None = FUNCTIONS["packed_attention"](tensors, attrs) if name is None else None
    if packed is not None:
        return packed
    result: Tensor = _attention(*tensors, **attrs, name=name)[0]
    return result


def _has_no_head_axis(*inputs: Tensor) -> bool:
    """Whether what stands before (T, d) is no number of heads: nothing, or sizes to be fed."""
    ranks = {x.ndim for x in inputs}
    return ranks == {2} or (
        len(ranks) == 1 and not any(isinstance(x.shape[-3], int) for x in inputs)
    )


def _require_positive(what: str, value: Any) -> float:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ArgumentError(f"{what} is a finite number above 0, not {value!r}")
    return float(value)


def _window_sides(window: Any, causal: Any) -> tuple[int | None, int | None]:
    """Keys before and after its own place that a query sees."""
    if not isinstance(causal, bool):
        raise ArgumentError(f"causal is True or False, not {causal!r}")
    sides = window if isinstance(window, tuple | list) else (
        (None, None) if window is None else (window, window)
    )  # fmt: skip
    least = 0 if isinstance(window, tuple | list) else 1

    def is_valid(side: Any) -> bool:
        whole = isinstance(side, int | np.integer) and not isinstance(side, bool)
        return side is None or (whole and side >= least)

    if len(sides) != 2 or not all(map(is_valid, sides)):
        raise ArgumentError(
            f"window is a number of keys from 1, or a pair (left, right) of numbers from 0 or "
            f"None, not {window!r}"
        )
    left, right = (None if side is None else int(side) - least for side in sides)
    return left, 0 if causal else right

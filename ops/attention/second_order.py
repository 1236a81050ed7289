"""The gradient of attention's gradient, by ordinary ops on the matrix of all pairs.

Second derivatives are rare and of short sequences, where plain formulas beat blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.ir.spec import Shape, Size, kind
from graphflow.ops.base.shape_rules import unbroadcast
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.pointwise.arithmetic import square
from graphflow.ops.pointwise.comparison import equal, greater_equal, less_equal, logical_and
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.pointwise.select import where
from graphflow.ops.pointwise.transcendental import exp, tanh
from graphflow.ops.reductions.reduce import sum
from graphflow.ops.tensors.creation import arange


def pair_gradients(
    hs: Sequence[Tensor | None], g: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor,
    logs: Tensor, *mask: Tensor, scale: float, left: int | None, right: int | None, offset: Size,
    softcap: float | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the cotangents of (g, delta, q, k, v, logs, *mask) for attention's gradient.

    Let r = scale·q·kᵀ, s = softcap·tanh(r / softcap), p = exp(s + mask - logs), e = g·vᵀ, w = p·(e
    - delta), c = ds/dr and u = scale·w·c. Attention's gradient gives dq = u·k, dk = uᵀ·q, dv =
    pᵀ·g, and w for the mask.

    Args:
        hs: cotangents of these four results, None for zeros.
    """
    wide, shared = logs.dtype, int(k.shape[-3])
    h_q, h_k, h_v, h_mask = hs

    def to_groups(x: Tensor | None) -> Any:
        return None if x is None else _group(astype(x, wide), shared)

    def to_shared(x: Tensor | None) -> Any:
        return None if x is None else FUNCTIONS["expand_dims"](astype(x, wide), -3)

    G, Q, K, V, HQ = to_groups(g), to_groups(q), to_shared(k), to_shared(v), to_groups(h_q)
    HK, HV = to_shared(h_k), to_shared(h_v)
    level, top = (FUNCTIONS["expand_dims"](_group_rows(x, shared), -1) for x in (delta, logs))
    s, c = _cap_scores(_multiply_transposed(Q, K) * scale, softcap)
    seen, bias = _visible(s, mask, shared, left, right, offset)
    unseen = FUNCTIONS["isinf"](top)
    p = exp((s if bias is None else s + bias) - where(unseen, 0, top))
    if seen is not None:
        p = where(seen, p, 0)
    e = _multiply_transposed(G, V)
    w = p * (e - level)
    slope = c if c is None else c * scale
    u = w * (scale if slope is None else slope)
    # Cotangents of u, w, p and e.
    d_g = d_q = d_k = None
    d_w = d_p = d_c = None
    if HQ is not None:
        d_u = _multiply_transposed(HQ, K)
        d_k = matmul(u, HQ, transpose_a=True)
        if HK is not None:
            d_u = d_u + _multiply_transposed(Q, HK)
            d_q = matmul(u, HK)
        d_w = d_u * (scale if slope is None else slope)
        d_c = None if c is None else d_u * w * scale
        d_p, d_g = _multiply_transposed(G, HV), matmul(p, HV)
    if h_mask is not None:
        d_w = _spread_mask(astype(h_mask, wide), s, shared)
    assert d_w is not None
    along = d_w * (e - level)
    d_p = along if d_p is None else d_p + along
    d_e = d_w * p
    d_g = _add_optional(d_g, matmul(d_e, V))
    d_v = matmul(d_e, G, transpose_a=True)
    d_z = d_p * p
    d_s = d_z if d_c is None else d_z - d_c * s * (2 / float(softcap or 1) ** 2)
    d_r = (d_s if c is None else d_s * c) * scale
    d_q = _add_optional(d_q, matmul(d_r, K))
    d_k = _add_optional(d_k, matmul(d_r, Q, transpose_a=True))
    cotangents: list[Tensor | None] = [
        _reshape_like(d_g, g),
        _reshape_like(-sum(d_e, -1), delta),
        _reshape_like(d_q, q),
        _reshape_like(sum(d_k, -3), k),
        _reshape_like(sum(d_v, -3), v),
        _reshape_like(-sum(d_z, -1), logs),
    ]
    if mask:
        is_float = kind(mask[0].dtype) == "float"
        full = FUNCTIONS["reshape"](d_z, (*q.shape[:-1], k.shape[-2]))
        cotangents.append(
            _reshape_like(unbroadcast(full, mask[0].shape), mask[0]) if is_float else None
        )
    return tuple(cotangents)


def _add_optional(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


def _reshape_like(x: Tensor, like: Tensor) -> Tensor:
    """Return x in the shape and dtype of an input."""
    result: Tensor = astype(FUNCTIONS["reshape"](x, like.shape), like.dtype)
    return result


def _multiply_transposed(a: Tensor, b: Tensor) -> Tensor:
    return matmul(a, b, transpose_b=True)


def _group(x: Tensor, shared: int) -> Tensor:
    """Return (…, heads, T, d) as (…, shared, g, T, d)."""
    heads = int(x.shape[-3])
    parts: Shape = (*x.shape[:-3], shared, heads // shared, *x.shape[-2:])
    result: Tensor = FUNCTIONS["reshape"](x, parts)
    return result


def _group_rows(x: Tensor, shared: int) -> Tensor:
    heads = int(x.shape[-2])
    parts: Shape = (*x.shape[:-2], shared, heads // shared, x.shape[-1])
    result: Tensor = FUNCTIONS["reshape"](x, parts)
    return result


def _cap_scores(r: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return scores under a soft cap, and its slope."""
    if softcap is None:
        return r, None
    t = tanh(r / softcap)
    return t * softcap, 1 - square(t)


def _mask_groups(mask: Tensor, rank: int, shared: int) -> Tensor:
    """Return a mask whose axis of heads is split like that of the scores."""
    full = FUNCTIONS["reshape"](mask, ((1,) * (rank - 1 - mask.ndim) + mask.shape))
    heads = int(full.shape[-3])
    parts = (shared, heads // shared) if heads != 1 else (1, 1)
    result: Tensor = FUNCTIONS["reshape"](full, (*full.shape[:-3], *parts, *full.shape[-2:]))
    return result


def _spread_mask(h: Tensor, like: Tensor, shared: int) -> Tensor:
    result: Tensor = FUNCTIONS["broadcast_to"](_mask_groups(h, like.ndim, shared), like.shape)
    return result


def _visible(
    s: Tensor, mask: Sequence[Tensor], shared: int, left: int | None, right: int | None,
    offset: Size,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return which pairs see each other (None: all), and the bias that is added to scores."""
    conditions: list[Tensor] = []
    bias = None
    for m in mask:
        apart = _mask_groups(m, s.ndim, shared)
        if kind(m.dtype) == "bool":
            conditions.append(apart)
        else:
            bias = astype(apart, s.dtype)
            conditions.append(~equal(bias, -math.inf))
    if left is not None or right is not None:
        distance = arange(s.shape[-1]) - FUNCTIONS["expand_dims"](arange(s.shape[-2]), 1) - offset
        if right is not None:
            conditions.append(less_equal(distance, right))
        if left is not None:
            conditions.append(greater_equal(distance, -left))
    seen = None
    for condition in conditions:
        seen = condition if seen is None else logical_and(seen, condition)
    return seen, bias

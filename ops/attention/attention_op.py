"""Attention of queries to keys and values, without the matrix of all their pairs in memory.

Forward, blocks of keys stream past blocks of queries; running maxima and sums of exponentials make
the softmax. Backward, the saved log-sum-exps give the same blocks of probabilities again. Blocks
depend on shapes alone and each is computed by one thread, so threads do not change bits.

Source: Dao et al., NeurIPS 2022; Rabe & Staats, arXiv:2112.05682.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.base.argument_kinds import is_number
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import Dim, Size, TensorSpec, equate, kind, product, show_shape, spec
from graphflow.ops.attention.blockwise import (
    attention_grad_into,
    attention_grad_kernel,
    attention_into,
    attention_kernel,
    mask_grad_kernel,
    wide_dtype,
)
from graphflow.ops.attention.second_order import pair_gradients
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import is_zeros, require_kind
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.reductions.reduce import sum
from graphflow.ops.sharding import attention_rules
from graphflow.ops.tensors.shape import expand_dims, squeeze_op

# Shapes -----------------------------------------------------------------------------------------


def infer_pairs(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, mask: Sequence[TensorSpec]
) -> tuple[TensorSpec, TensorSpec]:
    """Infer the specs of the result and of the log-sum-exps."""
    shapes = f"q {show_shape(q.shape)}, k {show_shape(k.shape)}, v {show_shape(v.shape)}"
    require_kind(q, "float")
    if not q.dtype == k.dtype == v.dtype:
        raise DTypeError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; convert with .astype")
    if q.rank < 3 or not q.rank == k.rank == v.rank:
        raise ShapeError(f"{shapes}: each must be (…, heads, T, d), all of one rank")
    for a, b in zip(q.shape[:-3], k.shape[:-3], strict=True):
        equate(a, b, f"{shapes}: batches differ")
    for a, b in zip(k.shape[:-1], v.shape[:-1], strict=True):
        equate(a, b, f"{shapes}: k and v differ before their last axis")
    equate(q.shape[-1], k.shape[-1], f"{shapes}: sizes of queries and keys differ")
    heads, shared = q.shape[-3], k.shape[-3]
    if not isinstance(heads, int) or not isinstance(shared, int) or shared < 1 or heads % shared:
        raise ShapeError(
            f"{shapes}: the heads of q must be a known multiple of the heads of k and v"
        )
    for m in mask:
        _require_mask(m, (*q.shape[:-1], k.shape[-2]), q.dtype)
    rows = q.shape[:-1]
    return q.with_shape((*rows, v.shape[-1])), TensorSpec(rows, wide_dtype(q.dtype))


def _require_mask(mask: TensorSpec, scores: Sequence[Size], dtype: np.dtype[Any]) -> None:
    if kind(mask.dtype) != "bool" and mask.dtype != dtype:
        raise DTypeError(
            f"the mask must be bool or {dtype}, like q, not {mask.dtype}; convert it with .astype"
        )
    text = f"mask {show_shape(mask.shape)} does not broadcast to {show_shape(tuple(scores))}"
    if mask.rank > len(scores):
        raise ShapeError(text)
    for have, want in zip(reversed(mask.shape), reversed(scores), strict=False):
        if have != 1:
            equate(want, have, text)


def _flops(q: TensorSpec, k: TensorSpec, products: int) -> Cost:
    """Return the cost of this many products of queries and keys.

    Each pair takes 2·d flops a product, and about 20 for its softmax.
    """
    pairs = product(q.shape[:-1]) * k.shape[-2]
    return Cost(flops=pairs * (q.shape[-1] * (2 * products) + 20))


# The gradient -------------------------------------------------------------------------------------


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
    # A node of its own, so that it is not computed unless the mask is learnt.
    is_float = kind(mask[0].dtype) == "float"
    return *slopes, attention_mask_grad(*inputs, **attrs) if is_float else None


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
    """Return specs of g, delta, q, k, v and the log-sum-exps, for samples of a gradient."""
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
        kernel=attention_grad_kernel,
        into=attention_grad_into,
        vjp=_grad_vjp,
        batch=batching.attention(6),
        sharding=attention_rules.attention_grad_rule,
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
        kernel=mask_grad_kernel,
        vjp=_mask_grad_vjp,
        batch=batching.attention(6, masks=True),
        sharding=attention_rules.attention_mask_grad_rule,
        cost=lambda g, delta, q, k, *rest, **attrs: _flops(q, k, 2),
        rate="product",
        samples=tuple(
            sample(*_grad_specs(_CASES[3][0]), m, low=-1.0, high=1.0, **_ATTRS)
            for m in (spec("float32", (2, 1, 3)), spec("float32", (2, 1, 2, 1)))
        ),
    )
)
# Results: the softmax of the scores times the values, and each query's log-sum-exp.
_attention = register(
    Op(
        "attention",
        infer=lambda q, k, v, *mask, **attrs: infer_pairs(q, k, v, mask),
        kernel=attention_kernel,
        into=attention_into,
        vjp=_attention_vjp,
        batch=batching.attention(3),
        sharding=attention_rules.attention_rule,
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
    """Compute softmax(scale·q·kᵀ + mask)·v for each head.

    The (T, S) scores are never held as a whole. A query that sees no key gives zeros.

    Args:
        q: (…, heads, T, d). With one head also (T, d), or (batch, T, d) if only feeds tell the size
            of the batch.
        k, v: (…, shared, S, d) and (…, shared, S, e). `shared` divides `heads`; neighbouring heads
            of q share one of k and v (grouped-query attention).
        mask: bool (True: may be seen), or of the dtype of q and added to the scores. Broadcasts to
            (…, heads, T, S).
        causal: whether query i sees no key beyond i + offset.
        scale: default 1/√d.
        softcap: limits scores to ±softcap, by softcap·tanh(scores / softcap), before the mask.
        window: a query sees keys at a distance below `window` (with `causal`: that many keys). Or
            (left, right): how many keys it sees before and after its own place, None for any
            number.
        offset: the place of query 0 among the keys, such as S - T if earlier keys are cached.

    Raises:
        DTypeError: q, k and v are not of one float dtype, or the mask is neither bool nor of that
            dtype.
        ShapeError: shapes do not fit.
        ArgumentError: another argument is out of range.
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
        raise ArgumentError(f"offset must be an int or a size, not {offset!r}")
    depth = tensors[0].shape[-1] if tensors[0].ndim else 1
    if scale is None and not isinstance(depth, int):
        raise ArgumentError(f"d is {depth}, which is not known: give the scale")
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
    """Return whether the inputs lack an axis of heads.

    They have no axis before (T, d), or one whose size only feeds tell: a batch.
    """
    ranks = {x.ndim for x in inputs}
    return ranks == {2} or (
        len(ranks) == 1 and not any(isinstance(x.shape[-3], int) for x in inputs)
    )


def _require_positive(what: str, value: Any) -> float:
    if not is_number(value) or not 0 < value < math.inf:
        raise ArgumentError(f"{what} must be a positive finite number, not {value!r}")
    return float(value)


def _window_sides(window: Any, causal: Any) -> tuple[int | None, int | None]:
    """Return how many keys before and after its own place a query sees; None: any number."""
    if not isinstance(causal, bool):
        raise ArgumentError(f"causal must be True or False, not {causal!r}")
    sides = window if isinstance(window, tuple | list) else (
        (None, None) if window is None else (window, window)
    )  # fmt: skip
    least = 0 if isinstance(window, tuple | list) else 1

    def is_valid(side: Any) -> bool:
        whole = isinstance(side, int | np.integer) and not isinstance(side, bool)
        return side is None or (whole and side >= least)

    if len(sides) != 2 or not all(map(is_valid, sides)):
        raise ArgumentError(
            f"window must be a number of keys from 1, or a pair (left, right) of numbers from 0 or "
            f"None, not {window!r}"
        )
    left, right = (None if side is None else int(side) - least for side in sides)
    return left, 0 if causal else right

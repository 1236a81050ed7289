"""Attention whose heads stand in rows, (…, T, heads, d), as products make them: nothing is brought
into another order, neither before nor after.

A pass (`passes/heads.py`) comes to this where heads would be moved before T and back; attention of
what stands side by side in one tensor (`packed_qkv.py`) does the same with parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.ir.op import FUNCTIONS, REGISTRY, Cost, Op, Tensor, register, sample
from graphflow.ir.spec import TensorSpec, spec
from graphflow.ops.attention.attention_op import attention_kernels, infer_pairs, native_pattern
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.kernels.sequence import flash_attention as attend
from graphflow.ops.tensors.shape import permute_dims, reshape_op

# Kernels, over arrays (…, heads, T, d) whose heads may stand anywhere -----------------------------


def attend_views(xp: Any, out: Any, heads: Sequence[Any], mask: Any, attrs: Any) -> None:
    """Attention of q, k and v into a view y and the logarithms of the sums."""
    (y, logs), (q, k, v) = out, heads
    if attend.is_native(xp, q, k, v, attrs["softcap"]):
        attend.forward(y, logs, q, k, v, mask, native_pattern(**attrs))
        return
    forward, _ = attention_kernels()
    found = forward(xp, *map(xp.ascontiguousarray, (q, k, v)), *mask, **attrs)
    xp.copyto(y, found[0])
    xp.copyto(logs, found[1])


def attend_views_back(
    xp: Any, outs: Any, g: Any, delta: Any, heads: Sequence[Any], logs: Any, mask: Any,
    attrs: Any, y: Any = None,
) -> None:  # fmt: skip
    """Gradients into views; with y, delta is computed first, where it is told to be."""
    q, k, v = heads
    if attend.is_native(xp, q, k, v, attrs["softcap"]):
        attend.backward(outs, g, delta, q, k, v, logs, mask, native_pattern(**attrs), y=y)
        return
    _, backward = attention_kernels()
    if y is not None:
        delta = (g.astype(logs.dtype) * y.astype(logs.dtype)).sum(-1)
    given = map(xp.ascontiguousarray, (g, delta, q, k, v))
    for view, found in zip(outs, backward(xp, *given, logs, *mask, **attrs), strict=True):
        xp.copyto(view, found)


# The ops ------------------------------------------------------------------------------------------


def _turned(x: TensorSpec) -> TensorSpec:
    """(…, T, heads, d) for (…, heads, T, d), or the other way round."""
    return x.with_shape((*x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1]))


def _axes(rank: int) -> tuple[int, ...]:
    return (*range(rank - 3), rank - 2, rank - 3, rank - 1)


def swap_heads_and_time(x: Tensor) -> Tensor:
    """As `_turned`, of tensors."""
    return permute_dims(x, _axes(x.ndim))


def is_swapped(x: Tensor) -> bool:
    """Whether a tensor is another one, turned."""
    node = x.node
    return node.op.name == "permute_dims" and tuple(node.attrs["axes"]) == _axes(x.ndim)


def _views(*arrays: Any) -> list[Any]:
    return [a.swapaxes(-2, -3) for a in arrays]


def _infer(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, *mask: TensorSpec, **attrs: Any
) -> tuple[TensorSpec, TensorSpec]:
    y, logs = infer_pairs(_turned(q), _turned(k), _turned(v), mask)
    return _turned(y), logs


def _into(xp: Any, out: Any, q: Any, k: Any, v: Any, *mask: Any, **attrs: Any) -> None:
    attend_views(xp, (*_views(out[0]), out[1]), _views(q, k, v), mask, attrs)


def _kernel(xp: Any, q: Any, k: Any, v: Any, *mask: Any, **attrs: Any) -> Any:
    wide = "float32" if q.dtype.itemsize == 2 else q.dtype
    rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    out = xp.empty((*q.shape[:-1], v.shape[-1]), q.dtype), xp.empty(rows, wide)
    _into(xp, out, q, k, v, *mask, **attrs)
    return out


def _grad_into(
    xp: Any, out: Any, g: Any, delta: Any, q: Any, k: Any, v: Any, logs: Any, *mask: Any,
    **attrs: Any,
) -> None:  # fmt: skip
    (g,) = _views(g)
    attend_views_back(xp, _views(*out), g, delta, _views(q, k, v), logs, mask, attrs)


def _grad_kernel(
    xp: Any, g: Any, delta: Any, q: Any, k: Any, v: Any, *rest: Any, **attrs: Any
) -> Any:
    out = tuple(xp.empty(x.shape, x.dtype) for x in (q, k, v))
    _grad_into(xp, out, g, delta, q, k, v, *rest, **attrs)
    return out


def independent_aliases(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Aliases of tensors that do not depend on each other, though what they stand for may."""
    return [reshape_op(x, shape=x.shape) for x in inputs]


def _vjp(
    gs: Sequence[Tensor], ys: Sequence[Tensor], *inputs: Tensor, **attrs: Any
) -> Sequence[Tensor | None]:
    apart, mask = independent_aliases(inputs[:3]), inputs[3:]
    y, logs = REGISTRY["attention"](*map(swap_heads_and_time, apart), *mask, **attrs)
    found = FUNCTIONS["gradients"]([swap_heads_and_time(y), logs], apart, list(gs))
    return *found, *(None,) * len(mask)


def _grad_vjp(
    hs: Sequence[Tensor], ys: Sequence[Tensor], *inputs: Tensor, **attrs: Any
) -> Sequence[Tensor | None]:
    apart, mask = independent_aliases(inputs[:6]), inputs[6:]
    g, delta, q, k, v, logs = apart
    parts = REGISTRY["attention_grad"](
        swap_heads_and_time(g), delta, *map(swap_heads_and_time, (q, k, v)), logs, *mask, **attrs
    )  # fmt: skip
    found = FUNCTIONS["gradients"]([swap_heads_and_time(p) for p in parts], apart, list(hs))
    return *found, *(None,) * len(mask)


def _cost(name: str, *which: int) -> Any:
    """That of another op, some of whose inputs are turned."""

    def cost(*specs: TensorSpec, **attrs: Any) -> Cost:
        given = [_turned(s) if i in which else s for i, s in enumerate(specs)]
        found: Cost = REGISTRY[name].cost(*given, **attrs)  # type: ignore[misc]
        return found

    return cost


_Q, _K, _V = (spec("float32", (2, *shape)) for shape in ((3, 4, 2), (4, 2, 2), (4, 2, 3)))
_Y, _LOGS = spec("float32", (2, 3, 4, 3)), spec("float32", (2, 4, 3))
_ATTRS: dict[str, Any] = {"scale": 0.6, "left": None, "right": None, "offset": 0, "softcap": None}
_CASES: tuple[tuple[tuple[TensorSpec, ...], dict[str, Any]], ...] = (
    ((), _ATTRS),
    ((), {**_ATTRS, "right": 1, "softcap": 1.5}),
    ((spec("bool", (2, 1, 1, 4)),), _ATTRS),
)  # fmt: skip

# Results in rows, and the log-sum-exp of each query's scores, (…, heads, T).
attention_rows: Op = register(
    Op(
        "attention_rows",
        infer=_infer,
        kernel=_kernel,
        into=_into,
        vjp=_vjp,
        batch=batching.attention(3),
        cost=_cost("attention", 0, 1, 2),
        autocast="low",
        samples=tuple(sample(_Q, _K, _V, *mask, **attrs) for mask, attrs in _CASES),
        doc="Attention whose heads stand in rows, (…, T, heads, d).",
    )
)
attention_rows_grad: Op = register(
    Op(
        "attention_rows_grad",
        infer=lambda g, delta, q, k, v, logs, *mask, **attrs: (q, k, v),
        kernel=_grad_kernel,
        into=_grad_into,
        vjp=_grad_vjp,
        batch=batching.attention(6),
        cost=_cost("attention_grad", 0, 2, 3, 4),
        samples=tuple(
            sample(_Y, _LOGS, _Q, _K, _V, _LOGS, *mask, low=-1.0, high=1.0, **attrs)
            for mask, attrs in _CASES
        ),
        doc="The gradients of attention whose heads stand in rows.",
    )
)

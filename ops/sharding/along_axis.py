"""Sharding rules of ops along an axis whose shards need only a little of each other: running sums,
top_k.

Each shard computes on its own piece, sends a summary to the others, and finishes with theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

from graphflow.ir.declarations.op_declaration import ShardExchange
from graphflow.ir.op import FUNCTIONS, Op, Sharding, Tensor
from graphflow.ir.spec import TensorSpec
from graphflow.ops.sharding.rules import equation, letters, without

G = FUNCTIONS
FEW = 4
"""If an axis has at least so many times k elements, the largest k of each shard travel, and not
all."""
Tensors = tuple[Tensor, ...]


def cumulative_rule(combined: str, linear: bool = False) -> Callable[..., Sharding]:
    """Return the rule of running sums and extrema: the last element of a shard goes to those after
    it.

    Args:
        combined: the name of the op that adds the total before a shard to its own results.
        linear: whether the op is linear, so that partial sums may pass.
    """

    def rule(x: TensorSpec, axis: int, **attrs: Any) -> Sharding:
        names = letters(x.rank)
        reverse = attrs.get("reverse", False)
        exchange = ShardExchange(names[axis], contribute, combine, "after" if reverse else "before")
        return Sharding(
            equation([names], [names]), linear=((0,),) if linear else (), exchange=exchange
        )

    def contribute(
        op: Op, start: Any, x: Tensor, axis: int, **attrs: Any
    ) -> tuple[Tensors, Tensors]:
        own = op(x, axis=axis, **attrs)
        last = 0 if attrs.get("reverse", False) else own.shape[axis] - 1
        begin = tuple(last if d == axis else 0 for d in range(x.ndim))
        size = tuple(1 if d == axis else n for d, n in enumerate(own.shape))
        step = (1,) * x.ndim
        return (own,), (G["slice"](own, start=begin, size=size, step=step),)

    def combine(op: Op, kept: Tensors, received: list[Tensors], **attrs: Any) -> Tensors:
        (own,) = kept
        if not received:
            return kept
        before = reduce(G[combined], [total for (total,) in received])
        return (G[combined](before, own),)

    return rule


def top_k_rule(x: TensorSpec, k: Any, axis: int, **attrs: Any) -> Sharding:
    """Split top_k along its axis: the largest k of all are among the largest k of each shard.

    Axes of fewer than `FEW`·k elements stay whole.
    """
    names = letters(x.rank)
    held = without(names, (axis,))
    size = x.shape[axis]
    if not isinstance(k, int) or not isinstance(size, int) or FEW * k > size:
        return Sharding(equation([held], [held] * 2))

    def contribute(
        op: Op, start: Any, x: Tensor, k: int, axis: int, **attrs: Any
    ) -> tuple[Tensors, Tensors]:
        few = min(k, int(x.shape[axis]))
        values, places = op(x, k=few, axis=axis, **attrs)
        return (), (values, places + start)

    def combine(
        op: Op, kept: Tensors, received: list[Tensors], k: int, axis: int, **attrs: Any
    ) -> Tensors:
        values, places = (G["concat"](each, axis=axis) for each in zip(*received, strict=True))
        best, at = op(values, k=k, axis=axis, **attrs)
        return best, G["take_along_axis"](places, at, axis=axis)

    found = Sharding(equation([names], [held] * 2))
    return replace(found, exchange=ShardExchange(names[axis], contribute, combine, "all"))


__all__ = ["top_k_rule", "cumulative_rule"]

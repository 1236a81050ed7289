"""How ops that go along an axis are cut within it, where each shard can begin with its own piece
and a little of the others' is enough to finish: running sums, the largest few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

from graphflow.ir.op import FUNCTIONS, Op, Sharding, Tensor
from graphflow.ir.op_declaration import ShardExchange
from graphflow.ir.spec import TensorSpec
from graphflow.ops.sharding.rules import equation, letters, without

G = FUNCTIONS
FEW = 4
"""Of at least so many times as many elements, the largest few travel and not all."""
Told = tuple[Tensor, ...]


def cumulative_rule(combined: str, linear: bool = False) -> Callable[..., Sharding]:
    """Running sums and extrema: a shard's last one goes to those after it.

    Args:
        combined: the function that adds what was before to what is here.
    """

    def rule(x: TensorSpec, axis: int, **attrs: Any) -> Sharding:
        names = letters(x.rank)
        reverse = attrs.get("reverse", False)
        exchange = ShardExchange(names[axis], tell, hear, "after" if reverse else "before")
        return Sharding(
            equation([names], [names]), linear=((0,),) if linear else (), exchange=exchange
        )

    def tell(op: Op, start: Any, x: Tensor, axis: int, **attrs: Any) -> tuple[Told, Told]:
        own = op(x, axis=axis, **attrs)
        last = 0 if attrs.get("reverse", False) else own.shape[axis] - 1
        begin = tuple(last if d == axis else 0 for d in range(x.ndim))
        size = tuple(1 if d == axis else n for d, n in enumerate(own.shape))
        step = (1,) * x.ndim
        return (own,), (G["slice"](own, start=begin, size=size, step=step),)

    def hear(op: Op, kept: Told, heard: list[Told], **attrs: Any) -> Told:
        (own,) = kept
        if not heard:
            return kept
        before = reduce(G[combined], [total for (total,) in heard])
        return (G[combined](before, own),)

    return rule


def top_k_rule(x: TensorSpec, k: Any, axis: int, **attrs: Any) -> Sharding:
    """top_k: of the largest k of each shard, with their places, the largest k; where that is less
    than everything."""
    names = letters(x.rank)
    held = without(names, (axis,))
    size = x.shape[axis]
    if not isinstance(k, int) or not isinstance(size, int) or FEW * k > size:
        return Sharding(equation([held], [held] * 2))

    def tell(op: Op, start: Any, x: Tensor, k: int, axis: int, **attrs: Any) -> tuple[Told, Told]:
        few = min(k, int(x.shape[axis]))
        values, places = op(x, k=few, axis=axis, **attrs)
        return (), (values, places + start)

    def hear(op: Op, kept: Told, heard: list[Told], k: int, axis: int, **attrs: Any) -> Told:
        values, places = (G["concat"](each, axis=axis) for each in zip(*heard, strict=True))
        best, at = op(values, k=k, axis=axis, **attrs)
        return best, G["take_along_axis"](places, at, axis=axis)

    found = Sharding(equation([names], [held] * 2))
    return replace(found, exchange=ShardExchange(names[axis], tell, hear, "all"))


__all__ = ["top_k_rule", "cumulative_rule"]

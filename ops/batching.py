"""How ops take a batch: the rules that `gf.vmap` re-emits a traced function by, one a family.

A rule gets the op, its inputs and which of them have a new first axis, the batch; it builds nodes
whose outputs all have it. What no rule covers runs in a loop over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.op import FUNCTIONS, Op, Tensor
from graphflow.spec import Size

Rule = Callable[..., Any]


def batch_size(inputs: Sequence[Tensor], batched: Sequence[bool]) -> Size:
    """How many there are in the batch."""
    return next(x.shape[0] for x, has in zip(inputs, batched, strict=True) if has)


def repeated(x: Tensor, size: Size) -> Tensor:
    """x with a new first axis along which it is repeated."""
    result: Tensor = FUNCTIONS["broadcast_to"](FUNCTIONS["expand_dims"](x, 0), (size, *x.shape))
    return result


def all_batched(inputs: Sequence[Tensor], batched: Sequence[bool]) -> list[Tensor]:
    """The inputs, each with the batch axis."""
    size = batch_size(inputs, batched)
    return [x if has else repeated(x, size) for x, has in zip(inputs, batched, strict=True)]


def aligned(inputs: Sequence[Tensor], batched: Sequence[bool]) -> list[Tensor]:
    """The inputs with axes of size 1 behind the batch axis, so that they broadcast as they did
    without it."""
    rank = max(x.ndim - has for x, has in zip(inputs, batched, strict=True))
    return [
        FUNCTIONS["expand_dims"](x, list(range(1, rank - x.ndim + 2)))
        if has and x.ndim <= rank
        else x
        for x, has in zip(inputs, batched, strict=True)
    ]


def elementwise(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
    """Ops over broadcast inputs."""
    return op(*aligned(inputs, batched), **attrs)


def rows(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
    """Ops of the last axes that take any further ones in front, and all inputs alike."""
    return op(*all_batched(inputs, batched), **attrs)


def along(*names: str) -> Rule:
    """Ops along axes: the attributes `names` hold one, or a tuple of them, counted from the front
    (from the end if negative)."""

    def rule(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
        moved = {name: behind(attrs[name]) for name in names}
        return op(*all_batched(inputs, batched), **{**attrs, **moved})

    return rule


def behind(axis: Any) -> Any:
    """An axis, or a tuple of them, where it is behind the batch axis."""
    if isinstance(axis, tuple):
        return tuple(map(behind, axis))
    return axis if axis < 0 else axis + 1


def first_only(name: str, *others: str) -> Rule:
    """As `along`, for ops that change their first input alone, where only that is batched; the
    others must be plain (None stands for the loop)."""
    rule = along(name, *others)

    def guarded(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
        return NotImplemented if any(batched[1:]) else rule(op, inputs, batched, **attrs)

    return guarded


def merged(op: Op, inputs: Sequence[Tensor], batched: Sequence[bool], **attrs: Any) -> Any:
    """Ops whose first input has a batch axis of its own in front, and whose other inputs are
    shared by it: both axes become one for the time of the op.

    NotImplemented, which asks for the loop, where another input is batched, too.
    """
    if any(batched[1:]):
        return NotImplemented
    x, *others = inputs
    reshape = FUNCTIONS["reshape"]
    result = op(reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:])), *others, **attrs)
    results = result if isinstance(result, tuple) else (result,)
    parted = tuple(reshape(y, (*x.shape[:2], *y.shape[1:])) for y in results)
    return parted if isinstance(result, tuple) else parted[0]

"""Sharding rules of slice, pad and concat, along their own axis, too.

Each shard of the result finds its elements wherever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.ir.op import Op, Sharding, Tensor
from graphflow.ir.spec import Shape, Size, TensorSpec
from graphflow.ops.sharding.rules import Range, ShardView, equation, letters, without


def concat_rule(*xs: TensorSpec, axis: int) -> Sharding:
    """Split concat. Along its own axis, each shard of the result finds its elements wherever they
    are."""
    names = letters(xs[0].rank)
    axis %= xs[0].rank
    sizes = [x.shape[axis] for x in xs]
    linear = (tuple(range(len(xs))),)
    if not all(isinstance(size, int) for size in sizes):
        held = without(names, (axis,))
        return Sharding(equation([held] * len(xs), [held]), linear=linear)
    own = names[axis]

    def needs(letter: str, first: int, last: int) -> list[Range]:
        found, begin = [], 0
        for size in map(int, sizes):
            low = min(max(first - begin, 0), size)
            found.append((low, max(low, min(last - begin, size))))
            begin += size
        return found

    def build(op: Op, cut: ShardView, *xs: Tensor, axis: int) -> Any:
        if own in cut.ranges:
            xs = tuple(x for x in xs if x.shape[axis] != 0)
        return op(*xs, axis=axis)

    return Sharding(
        equation([names] * len(xs), [names]), linear=linear, build=build, windows=own,
        windowed=linear[0], needs=needs,
    )  # fmt: skip


def slice_rule(
    x: TensorSpec, start: Sequence[Any], size: Sequence[Any], step: Sequence[int]
) -> Sharding:
    """Split slice. Each shard of the result finds its elements wherever they are."""
    names = letters(x.rank)
    axes = [*zip(x.shape, start, size, step, strict=True)]
    stays = [_is_whole(*axis) for axis in axes]
    known = [
        c if stay or _is_window(*axis[:3]) else "."
        for c, stay, axis in zip(names, stays, axes, strict=True)
    ]
    windows = "".join(c for c, stay in zip(known, stays, strict=True) if c != "." and not stay)
    down = [i for i, axis in enumerate(axes) if _is_diagonal(*axis)]
    known = [c if i in down else own for i, (c, own) in enumerate(zip(names, known, strict=True))]

    def needs(letter: str, first: int, last: int) -> Range:
        i = names.index(letter)
        ends = start[i] + first * step[i], start[i] + (last - 1) * step[i]
        return min(ends), max(ends) + 1

    def build(op: Op, cut: ShardView, x: Tensor, start: Any, size: Any, step: Any) -> Any:
        begin, count = list(start), list(size)
        for i, letter in enumerate(known):
            if letter != ".":
                count[i] = cut.shapes[0][i]
            if letter in cut.ranges:
                low, high = cut.ranges[letter]
                begin[i] = 0 if step[i] > 0 else high - 1 - low
            if i in down:
                begin[i] = cut.start[letter]
        return op(x, start=tuple(begin), size=tuple(count), step=tuple(step))

    own = "".join(known)
    return Sharding(
        equation([own], [own]), linear=((0,),), build=build, windows=windows, needs=needs,
        scale={(0, i): size[i] for i in down},
    )  # fmt: skip


def _is_diagonal(flat: Size, start: Any, size: Size, step: Any) -> bool:
    """Return True if a strided slice of a flattened square matrix is its diagonal (start 0, step
    n+1).

    Only symbolic sizes need this case: if the size is known, windows find the elements.
    """
    return not isinstance(size, int) and bool(
        start == 0 and step == size + 1 and flat == size * size
    )


def _is_whole(have: Size, start: Any, size: Any, step: int) -> bool:
    """Return True if a slice takes the whole axis."""
    return bool(have == size) and start == 0 and step == 1


def _is_window(have: Size, start: Any, size: Any) -> bool:
    """Return True if a slice has known bounds and is not empty."""
    return all(isinstance(n, int) for n in (have, start, size)) and size > 0


def pad_rule(
    x: TensorSpec, shape: Shape, start: Sequence[Any], step: Sequence[int], value: Any
) -> Sharding:
    """Split pad. Each shard of the result finds its elements wherever they are."""
    names = letters(x.rank)
    axes = [*zip(x.shape, start, shape, step, strict=True)]
    stays = [_is_whole(*axis) for axis in axes]
    fits = [_is_window(size, first, have) and by > 0 for have, first, size, by in axes]
    known = [c if stay or fit else "." for c, stay, fit in zip(names, stays, fits, strict=True)]
    windows = "".join(c for c, stay in zip(known, stays, strict=True) if c != "." and not stay)
    sides = zip(shape, start, x.shape, step, strict=True)
    down = [i for i, axis in enumerate(sides) if _is_diagonal(*axis)]
    known = [c if i in down else own for i, (c, own) in enumerate(zip(names, known, strict=True))]

    def needs(letter: str, first: int, last: int) -> Range:
        i = names.index(letter)
        low = -(-(first - start[i]) // step[i])
        high = (last - 1 - start[i]) // step[i] + 1
        size = x.shape[i]
        assert isinstance(size, int)
        low = min(max(low, 0), size)
        return low, max(low, min(high, size))

    def build(
        op: Op, cut: ShardView, x: Tensor, shape: Any, start: Any, step: Any, value: Any
    ) -> Any:
        begin = list(start)
        for i, letter in enumerate(known):
            if letter in cut.ranges:
                low, high = cut.ranges[letter]
                begin[i] = start[i] + low * step[i] - cut.start[letter] if high > low else 0
            if i in down:
                begin[i] = cut.start[letter]
        return op(x, shape=cut.shapes[0], start=tuple(begin), step=tuple(step), value=value)

    own = "".join(known)
    return Sharding(
        equation([own], [own]), linear=((0,),) if value == 0 else (), build=build,
        windows=windows, needs=needs, scale={(1, i): x.shape[i] for i in down},
    )  # fmt: skip

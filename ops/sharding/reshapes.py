"""The sharding rule of reshape: which axes of input and output are split alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from graphflow.ir.op import Sharding
from graphflow.ir.spec import Shape, Size, TensorSpec, floordiv, product
from graphflow.ops.sharding.rules import equation, fresh


class _AxisPair(NamedTuple):
    """An axis of the input and one of the output that are split alike, with `scale` and `outer` of
    `Sharding`."""

    axes: tuple[int, int]
    scale: dict[tuple[int, int], Size]
    outer: dict[tuple[int, int], Size]


def reshape_rule(x: TensorSpec, shape: Shape) -> Sharding:
    """Split reshape.

    Axes that keep their size are split alike. Of axes that are merged, or into which an axis is
    divided, the first one is split, in multiples of the others. Alternative rules split a later one
    of them, row by row.
    """
    have, want = list(x.shape), list(shape)
    blocks = [_axis_pairs(have, want, range(*i), range(*j)) for i, j in _blocks(have, want)]
    first = [ways[0] for ways in blocks]
    others = [
        _rule_of_pairs([*first[:n], way, *first[n + 1 :]], len(have), len(want))
        for n, ways in enumerate(blocks)
        for way in ways[1:]
    ]
    return replace(_rule_of_pairs(first, len(have), len(want)), alternatives=tuple(others))


def _rule_of_pairs(ways: Sequence[_AxisPair | None], left: int, right: int) -> Sharding:
    """Return the rule by which pairs of axes are split, with a letter for each pair."""
    names = (["."] * left, ["."] * right)
    scale: dict[tuple[int, int], Size] = {}
    outer: dict[tuple[int, int], Size] = {}
    for way, letter in zip([w for w in ways if w is not None], fresh(), strict=False):
        for side, axis in zip(names, way.axes, strict=True):
            side[axis] = letter
        scale |= way.scale
        outer |= way.outer
    return Sharding(
        equation(["".join(names[0])], ["".join(names[1])]), scale, outer=outer, linear=((0,),),
        sizes="shape", view=True,
    )  # fmt: skip


def _axis_pairs(
    have: Sequence[Size], want: Sequence[Size], i: Sequence[int], j: Sequence[int]
) -> list[_AxisPair | None]:
    """Return the pairs of axes by which a block of axes that becomes another one may be split.

    The first pair is that of the first axes, if one of their sizes is a multiple of the other. If
    one side is a single axis, each other axis of the other side follows.
    """
    first, other = [a for a in i if have[a] != 1], [b for b in j if want[b] != 1]
    if not first or not other:
        return [None]
    size = _common_factor(have[first[0]], want[other[0]])
    ends = {(0, first[0]): have[first[0]], (1, other[0]): want[other[0]]}
    scale = {} if size is None else {k: floordiv(n, size) for k, n in ends.items() if n != size}
    ways = [None if size is None else _AxisPair((first[0], other[0]), scale, {})]
    if len(other) == 1:
        ways += [_inner_pair(have, first, k, other[0], 0) for k in range(1, len(first))]
    elif len(first) == 1:
        ways += [_inner_pair(want, other, k, first[0], 1) for k in range(1, len(other))]
    return ways


def _inner_pair(
    several: Sequence[Size], axes: Sequence[int], k: int, at: int, side: int
) -> _AxisPair:
    """Return the pair for axis number `k` of several axes that are one axis on the other side.

    Args:
        several: the sizes of the side with several axes.
        axes: the positions of the several axes.
        k: the number of one of them.
        at: the position of the single axis.
        side: 0 if the several axes are the input's.
    """
    key = (1 - side, at)
    behind, before = (product([several[a] for a in part]) for part in (axes[k + 1 :], axes[:k]))
    both = (axes[k], at) if side == 0 else (at, axes[k])
    return _AxisPair(both, {key: behind} if behind != 1 else {}, {key: before})


def _blocks(
    have: Sequence[Size], want: Sequence[Size]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the shortest blocks of two shapes with equal numbers of elements, as ((start, stop),
    (start, stop))."""
    i = j = 0
    while i < len(have) or j < len(want):
        a, b = i, j
        left: Size = have[i] if i < len(have) else 1
        right: Size = want[j] if j < len(want) else 1
        i, j = min(i + 1, len(have)), min(j + 1, len(want))
        while left != right:
            if i < len(have) and (j >= len(want) or not _exceeds(left, right)):
                left, i = left * have[i], i + 1
            elif j < len(want):
                right, j = right * want[j], j + 1
            else:
                break
        yield (a, i), (b, j)


def _exceeds(a: Size, b: Size) -> bool:
    """Return True if a size is known to be larger than another."""
    if isinstance(a, int) and isinstance(b, int):
        return a > b
    return not isinstance(a, int) and (isinstance(b, int) or _common_factor(a, b) == b)


def _common_factor(a: Size, b: Size) -> Size | None:
    """Return the smaller of two sizes if the other is known to be a multiple of it; else None."""
    for small, large in ((a, b), (b, a)):
        times = 0 if small == 0 else floordiv(large, small)
        exact = isinstance(times, int) or all(
            isinstance(atom, str) for term in times.terms for atom in term
        )
        if exact and times * small == large:
            return small
    return None

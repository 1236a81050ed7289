"""Axes that hold several tensors side by side: gates of an LSTM; queries, keys and values.

A slice that takes one of the tensors, and the pad that puts its gradient back, keep a shard of each
tensor. So nothing travels.

    x (…, 3·d) → x[…, :d], x[…, d:2·d], x[…, 2·d:]     a shard has a piece of each third of x
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

from graphflow.ir.op import Node, Sharding, Tensor
from graphflow.ir.spec import Outer
from graphflow.ops.sharding.rules import ShardView, equation, letters, make

Readers = Mapping[Tensor, Sequence[Node | None]]
MAX_SLICES = 64
"""The most slices of one tensor that are looked at."""


class PackedSegment(NamedTuple):
    """One of several tensors along an axis.

    Attributes:
        axis: the axis.
        number: the position of the segment.
        lengths: the relative lengths of all segments.
    """

    axis: int
    number: int
    lengths: tuple[int, ...]

    @property
    def outer(self) -> Outer:
        """The number of segments; if they differ in length, their lengths."""
        alike = len(set(self.lengths)) == 1
        return len(self.lengths) if alike else self.lengths


def segment_of_slice(node: Node, readers: Readers) -> PackedSegment | None:
    """Return the segment that a slice takes, given all slices of the tensor; or that a pad puts
    back. None if the slices do not divide the axis into segments."""
    if node.op.name == "pad":
        taken = node.origin
        if taken is None or taken.op.name != "slice" or node.attrs["value"] != 0:
            return None
        undone = node.attrs["start"], node.inputs[0].shape, node.attrs["shape"]
        if undone != (taken.attrs["start"], taken.attrs["size"], taken.inputs[0].shape):
            return None
        node = taken
    if node.op.name != "slice" or (own := _window(node)) is None:
        return None
    (x,) = node.inputs
    others = [r for r in readers.get(x, ()) if r is not None and r.op.name == "slice"]
    if len(others) > MAX_SLICES:
        return None
    windows = {own} | {w for r in others if (w := _window(r)) is not None and w[0] == own[0]}
    total = int(x.shape[own[0]])
    ends = sorted({0, total, *(end for _, *both in windows for end in both)})
    segments = [*pairwise(ends)]
    if any((start, stop) not in segments for _, start, stop in windows):
        return None
    sizes = [stop - start for start, stop in segments]
    each = gcd(*sizes)
    return PackedSegment(own[0], segments.index(own[1:]), tuple(size // each for size in sizes))


def _window(node: Node) -> tuple[int, int, int] | None:
    """Return (axis, start, stop) of a slice along one axis; None for any other slice."""
    (x,), attrs = node.inputs, node.attrs
    every = zip(x.shape, attrs["start"], attrs["size"], attrs["step"], strict=True)
    cut = [
        (axis, start, start + size)
        for axis, (total, start, size, step) in enumerate(every)
        if not (start == 0 and size == total and step == 1)
    ]
    if len(cut) != 1:
        return None
    ((axis, start, stop),) = cut
    known = all(isinstance(n, int) for n in (x.shape[axis], start, stop))
    return cut[0] if known and attrs["step"][axis] == 1 and stop > start else None


def segment_rule(node: Node, segment: PackedSegment, windows: Sharding) -> Sharding:
    """Return the rule by which a slice or pad keeps a shard of every segment.

    Args:
        node: a slice or a pad.
        segment: the segment.
        windows: the op's own rule.
    """
    axis, number, lengths = segment
    whole = 0 if node.op.name == "slice" else 1  # which of input and output is the packed tensor
    before = sum(lengths[:number])
    names = letters(node.inputs[0].ndim)
    own = [c if c in windows.equation and c not in windows.windows else "." for c in names]
    own[axis] = names[axis]

    def build(op: Any, cut: ShardView, x: Tensor, start: Any, **attrs: Any) -> Any:
        begin = list(start)
        begin[axis] = before * cut.size[names[axis]]
        attrs["shape" if whole else "size"] = cut.shapes[0]
        return make(op, x, start=tuple(begin), **attrs)

    return replace(
        windows,
        equation=equation(["".join(own)], ["".join(own)]),
        scale={(1 - whole, axis): lengths[number]},
        outer={(whole, axis): segment.outer},
        build=build, windows="", needs=None,
    )  # fmt: skip


__all__ = ["Readers", "segment_rule", "segment_of_slice"]

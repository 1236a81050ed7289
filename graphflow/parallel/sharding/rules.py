"""An op's sharding rule for one node, its equation taken apart."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node, Sharding
from graphflow.ir.spec import Dim, Outer, Size, floordiv, segment_count
from graphflow.ops.sharding import rules
from graphflow.parallel.mesh.axis_split import WHOLE, AxisSplit, ShardExtent
from graphflow.parallel.sharding.packed_axes import Readers, segment_of_slice, segment_rule
from graphflow.passes.duplicates import key_of


@dataclass(frozen=True)
class ShardingRule:
    """An op's sharding rule for one node, its equation taken apart."""

    sharding: Sharding
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: Mapping[str, Size]  # of letters of more than one element

    def scale(self, tensor: int, axis: int) -> Size:
        return self.sharding.scale.get((tensor, axis), 1)

    def outer(self, tensor: int, axis: int) -> Outer:
        return self.sharding.outer.get((tensor, axis), 1)

    @property
    def unsplit_extents(self) -> dict[str, ShardExtent]:
        """The pieces of letters of one element, which are never cut."""
        named = {*"".join((*self.inputs, *self.outputs))} - {".", *self.sizes}
        return {letter: ShardExtent(0, 1, 1) for letter in named}

    def split(self, split: AxisSplit, tensor: int, axis: int) -> AxisSplit:
        """How an axis of a tensor is cut whose letter is cut so."""
        return split.scale_by(self.scale(tensor, axis), self.outer(tensor, axis))

    def letter_split(self, split: AxisSplit, tensor: int, axis: int) -> AxisSplit | None:
        """How the letter of an axis is cut that is cut so; None where that cannot be said."""
        rows, factor = self.outer(tensor, axis), self.scale(tensor, axis)
        if split.over is not None:
            if (rows, factor) == (1, 1):
                return split
            own = split.over if rows == 1 else split.inner if rows == split.outer else WHOLE
            return self.letter_split(replace(own, outer=rows), tensor, axis) if own else None
        outer, unit = _rows_per_row(split.outer, rows), floordiv(split.unit, factor)
        if outer is None:
            return None
        if unit * factor != split.unit:
            return AxisSplit(split.axes) if rows == split.outer == 1 else None
        return AxisSplit(split.axes, unit, outer)

    def has_window(self, letter: str) -> bool:
        """Whether a letter needs more of the first input than its own piece."""
        return letter in self.sharding.windows

    def meets(self, letter: str) -> bool:
        """Whether shards along a letter tell each other something."""
        meeting = self.sharding.meeting
        return meeting is not None and letter == meeting.letter

    def is_ordered(self, letter: str) -> bool:
        """Whether pieces along a letter are to be whole stretches, in order of place."""
        return self.has_window(letter) or self.meets(letter)


def _rows_per_row(rows: Outer, each: Outer) -> Outer | None:
    """How many times as many rows there are; None where that cannot be said."""
    if each == 1 or rows == each:
        return rows if each == 1 else 1
    if isinstance(rows, tuple) or isinstance(each, tuple):
        return None
    times = floordiv(rows, each)
    return times if times * each == rows else None


def rules_of(node: Node, readers: Readers) -> list[ShardingRule]:
    """The rules of a node's op: the first is for most cases.

    Args:
        readers: the nodes that read each tensor.
    """
    first, *others = _rules(node)
    stretch = segment_of_slice(node, readers)
    if stretch is not None:
        return [_parse_rule(node, segment_rule(node, stretch, first.sharding)), first]
    return [first, *others]


def rule_of(node: Node) -> ShardingRule:
    """The rule of a node's op; what has none needs its inputs whole."""
    return _rules(node)[0]


_CACHE: dict[Hashable, tuple[ShardingRule, ...]] = {}
"""Rules of nodes that are alike: a network has the same layers again and again, and so do the
strategies among which a search chooses."""
_CACHE_SIZE = 4096
"""Rules that are known at a time."""


def _rules(node: Node) -> tuple[ShardingRule, ...]:
    """The rules that follow from a node's op, attributes and specs."""
    if not all(map(_is_plain, node.attrs.values())):
        return _derive_rules(node)
    specs = tuple([t.spec for t in node.inputs])
    key = (node.op, specs, node.specs, key_of(dict(node.attrs)) if node.attrs else ())
    found = _CACHE.get(key)
    if found is None:
        if len(_CACHE) >= _CACHE_SIZE:
            _CACHE.clear()
        found = _CACHE[key] = _derive_rules(node)
    return found


def _is_plain(value: Any) -> bool:
    """Whether an attribute is small, and says all that it is."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | Dim)


def _derive_rules(node: Node) -> tuple[ShardingRule, ...]:
    specs = [t.spec for t in node.inputs]
    op = node.op
    found: Any
    if op.sharding is not None:
        found = op.sharding(*specs, **node.attrs)
    elif op.elementwise and specs:
        found = rules.elementwise_rule(*specs)
    else:
        found = Sharding(
            rules.equation(["." * s.rank for s in specs], ["." * s.rank for s in node.specs])
        )
    first = Sharding(found) if isinstance(found, str) else found
    return tuple([_parse_rule(node, each) for each in (first, *first.alternatives)])


def _parse_rule(node: Node, found: Sharding) -> ShardingRule:
    specs = [t.spec for t in node.inputs]
    left, right = found.equation.split("->")
    inputs = tuple(left.split(",")) if specs else ()
    outputs = tuple(right.split(","))
    sizes: dict[str, Size] = {}
    every = [*zip(inputs, specs, strict=True), *zip(outputs, node.specs, strict=True)]
    for number, (names, spec) in reversed([*enumerate(every)]):
        for axis, (letter, size) in enumerate(zip(names, spec.shape, strict=True)):
            if number in found.windowed and letter in found.windows:
                continue
            if letter != "." and size != 1:
                times = found.scale.get((number, axis), 1) * segment_count(
                    found.outer.get((number, axis), 1)
                )
                sizes[letter] = floordiv(size, times)
    return ShardingRule(found, inputs, outputs, sizes)

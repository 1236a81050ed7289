"""The sharding rule of one node: its op's rule, with the equation parsed and the sizes filled
in."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node, Sharding
from graphflow.ir.spec import Dim, Outer, Size, floordiv, segment_count
from graphflow.ops.sharding import rules
from graphflow.parallel.mesh.axis_split import WHOLE, AxisSplit, ShardExtent
from graphflow.parallel.sharding.rules.packed_axes import Readers, segment_of_slice, segment_rule
from graphflow.passes.duplicates import key_of


@dataclass(frozen=True)
class ShardingRule:
    """The sharding rule of one node.

    Attributes:
        sharding: the rule that the op declares.
        inputs: the letters of each input's axes.
        outputs: the letters of each output's axes.
        sizes: the sizes of letters that have more than one element.
    """

    sharding: Sharding
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: Mapping[str, Size]

    def scale(self, tensor: int, axis: int) -> Size:
        """Return how many elements a tensor's axis has for each element of its letter."""
        return self.sharding.scale.get((tensor, axis), 1)

    def outer(self, tensor: int, axis: int) -> Outer:
        """Return how many rows a tensor's axis has, each with the elements of its letter."""
        return self.sharding.outer.get((tensor, axis), 1)

    @property
    def unsplit_extents(self) -> dict[str, ShardExtent]:
        """The extents of letters of one element, which are never split."""
        named = {*"".join((*self.inputs, *self.outputs))} - {".", *self.sizes}
        return {letter: ShardExtent(0, 1, 1) for letter in named}

    def split(self, split: AxisSplit, tensor: int, axis: int) -> AxisSplit:
        """Return the split of a tensor's axis, given the split of its letter."""
        return split.scale_by(self.scale(tensor, axis), self.outer(tensor, axis))

    def letter_split(self, split: AxisSplit, tensor: int, axis: int) -> AxisSplit | None:
        """Return the split of an axis' letter, given the split of the axis; None if there is
        none."""
        rows, factor = self.outer(tensor, axis), self.scale(tensor, axis)
        if split.ranges is not None:
            return split if (rows, factor) == (1, 1) and self._is_free_of_places else None
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

    @property
    def _is_free_of_places(self) -> bool:
        """Whether the op does the same with an element wherever it stands on its axes."""
        own = self.sharding
        special = (own.build, own.needs, own.expand, own.exchange, own.sizes)
        return not own.windows and all(each is None for each in special)

    def has_window(self, letter: str) -> bool:
        """Return True if a place needs more along a letter than its own extent."""
        return letter in self.sharding.windows

    def meets(self, letter: str) -> bool:
        """Return True if shards along a letter exchange intermediate results."""
        exchange = self.sharding.exchange
        return exchange is not None and letter == exchange.letter

    def is_ordered(self, letter: str) -> bool:
        """Return True if extents along a letter have to be contiguous and in order of place."""
        return self.has_window(letter) or self.meets(letter)


def _rows_per_row(rows: Outer, each: Outer) -> Outer | None:
    """Return how many rows there are for each row of a letter; None if that is no whole number."""
    if each == 1 or rows == each:
        return rows if each == 1 else 1
    if isinstance(rows, tuple) or isinstance(each, tuple):
        return None
    times = floordiv(rows, each)
    return times if times * each == rows else None


def rules_of(node: Node, readers: Readers) -> list[ShardingRule]:
    """Return the rules of a node's op; the first one is for most cases.

    Args:
        node: the node.
        readers: the nodes that read each tensor.
    """
    first, *others = _rules(node)
    segment = segment_of_slice(node, readers)
    if segment is not None:
        return [_parse_rule(node, segment_rule(node, segment, first.sharding)), first]
    return [first, *others]


def rule_of(node: Node) -> ShardingRule:
    """Return the first rule of a node's op. An op without a rule needs its inputs whole."""
    return _rules(node)[0]


_CACHE: dict[Hashable, tuple[ShardingRule, ...]] = {}
"""Rules of like nodes. A network repeats its layers, and so do the strategies that a search
compares."""
_CACHE_SIZE = 4096
"""The most rules that are cached at a time."""


def _rules(node: Node) -> tuple[ShardingRule, ...]:
    """Return the rules that follow from a node's op, attributes and specs, cached."""
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
    """Return True if an attribute is small and hashable by value, so that it can be part of a cache
    key."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | Dim)


def _derive_rules(node: Node) -> tuple[ShardingRule, ...]:
    """Derive the rules of a node from its op."""
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
    """Parse a rule's equation for one node."""
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

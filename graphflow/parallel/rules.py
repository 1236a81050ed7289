"""An op's sharding rule for one node, its equation taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphflow.op import Node, Sharding
from graphflow.ops import sharding as rules
from graphflow.spec import Size, floordiv


@dataclass(frozen=True)
class Rule:
    """An op's sharding rule for one node, its equation taken apart."""

    sharding: Sharding
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: Mapping[str, Size]

    def scale(self, tensor: int, axis: int) -> Size:
        return self.sharding.scale.get((tensor, axis), 1)

    def windows(self, letter: str) -> bool:
        """Whether a letter needs more of the first input than its own piece."""
        return letter in self.sharding.windows


def rule_of(node: Node) -> Rule:
    """The rule of a node's op; what has none needs its inputs whole."""
    specs = [t.spec for t in node.inputs]
    op = node.op
    found: Any
    if op.sharding is not None:
        found = op.sharding(*specs, **node.attrs)
    elif op.elementwise and specs:
        found = rules.elementwise(*specs)
    else:
        found = Sharding(
            rules.equation(["." * s.rank for s in specs], ["." * s.rank for s in node.specs])
        )
    if isinstance(found, str):
        found = Sharding(found)
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
                sizes[letter] = floordiv(size, found.scale.get((number, axis), 1))
    return Rule(found, inputs, outputs, sizes)

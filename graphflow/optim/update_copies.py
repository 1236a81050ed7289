"""Updates that are alike: of variables and gradients of one spec, the first is built, and others
are copies of its nodes.

Shape rules and conversions need not be gone through again for each of thousands of variables.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from graphflow.ir.op import Node, Tensor, next_serial, next_stream

BuildUpdate = Callable[[Tensor, Tensor], "VariableUpdate"]


class VariableUpdate(NamedTuple):
    """The update of a variable.

    Attributes:
        updates: its assignments, those of slots first.
        slots: by name.
    """

    updates: Sequence[Tensor]
    slots: Mapping[str, Tensor]


class _UpdatePattern(NamedTuple):
    """An update that others are copies of.

    Attributes:
        nodes: what was built for it, in order.
        slots: the names of those that are slots.
    """

    variable: Tensor
    gradient: Tensor
    nodes: Sequence[Node]
    slots: Mapping[Node, str]
    updates: Sequence[Tensor]


class UpdateCopies:
    """Builds updates of variables, each kind once.

    Args:
        build: (variable, gradient) -> the update; what it builds follows from their specs and
            the variable's pin.
        prefix: of the names of what it builds.
    """

    def __init__(self, build: BuildUpdate, prefix: str) -> None:
        self._build = build
        self._prefix = prefix
        self._patterns: dict[Hashable, _UpdatePattern] = {}

    def update(self, variable: Tensor, gradient: Tensor) -> Sequence[Tensor]:
        """The assignments of a variable and its slots."""
        if gradient is variable:
            return self._build(variable, gradient).updates
        key = (variable.spec, gradient.spec, variable.node.device)
        pattern = self._patterns.get(key)
        if pattern is not None:
            return self._copy_pattern(pattern, variable, gradient)
        start = next_serial()
        built = self._build(variable, gradient)
        slots = {tensor.node: name for name, tensor in built.slots.items()}
        nodes = _nodes_since(start, built.updates)
        self._patterns[key] = _UpdatePattern(variable, gradient, nodes, slots, built.updates)
        return built.updates

    def _copy_pattern(
        self, pattern: _UpdatePattern, variable: Tensor, gradient: Tensor
    ) -> list[Tensor]:
        owner = variable.node
        now = {pattern.variable: variable, pattern.gradient: gradient}
        for node in pattern.nodes:
            slot, name, attrs = pattern.slots.get(node), node.name, node.attrs
            if slot is not None:  # its initial value counts as a stream, as all of them do
                name = f"{self._prefix}{owner.name}/{slot}"
                attrs = {**attrs, "initial": replace(attrs["initial"], stream=next_stream())}
            inputs = tuple([now.get(tensor, tensor) for tensor in node.inputs])
            copy = node.copy_for(inputs, name, owner.device, owner, attrs)
            now.update(zip(node.outputs, copy.outputs, strict=True))
        return [now[update] for update in pattern.updates]


def _nodes_since(start: int, outputs: Sequence[Tensor]) -> list[Node]:
    """The nodes on the way to outputs that were built later than a serial number, in order."""
    found: set[Node] = set()
    stack = [tensor.node for tensor in outputs]
    while stack:
        node = stack.pop()
        if node.serial > start and node not in found:
            found.add(node)
            stack += [tensor.node for tensor in node.inputs]
    return sorted(found, key=lambda node: node.serial)


__all__ = ["VariableUpdate", "UpdateCopies"]

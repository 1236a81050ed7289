"""Copies of updates: for variables and gradients of one spec, the first update is built, and the
rest are copies of its nodes.

Shape rules and conversions then run once for each spec, not for each of thousands of variables.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from graphflow.ir.op import Node, Tensor, next_serial, next_stream
from graphflow.transforms.reverse_mode import nodes_built_since

BuildUpdate = Callable[[Tensor, Tensor], "VariableUpdate"]


class VariableUpdate(NamedTuple):
    """The update of a variable.

    Attributes:
        updates: its assignments, those of slots first.
        slots: its slots, by name.
    """

    updates: Sequence[Tensor]
    slots: Mapping[str, Tensor]


class _UpdatePattern(NamedTuple):
    """An update from which others are copied.

    Attributes:
        nodes: the nodes that were built for it, in order.
        slots: names of those nodes that are slots.
    """

    variable: Tensor
    gradient: Tensor
    nodes: Sequence[Node]
    slots: Mapping[Node, str]
    updates: Sequence[Tensor]


class UpdateCopies:
    """Builds updates of variables, one for each combination of specs and device.

    Args:
        build: (variable, gradient) -> the update. The nodes that it builds must follow from
            their specs and the variable's device alone.
        prefix: prefix of the names of these nodes.
    """

    def __init__(self, build: BuildUpdate, prefix: str) -> None:
        self._build = build
        self._prefix = prefix
        self._patterns: dict[Hashable, _UpdatePattern] = {}

    def update(self, variable: Tensor, gradient: Tensor) -> Sequence[Tensor]:
        """Return the assignments of a variable and its slots."""
        if gradient is variable:
            return self._build(variable, gradient).updates
        key = (variable.spec, gradient.spec, variable.node.device)
        pattern = self._patterns.get(key)
        if pattern is not None:
            return self._copy_pattern(pattern, variable, gradient)
        start = next_serial()
        built = self._build(variable, gradient)
        slots = {tensor.node: name for name, tensor in built.slots.items()}
        nodes = nodes_built_since(built.updates, start)
        self._patterns[key] = _UpdatePattern(variable, gradient, nodes, slots, built.updates)
        return built.updates

    def _copy_pattern(
        self, pattern: _UpdatePattern, variable: Tensor, gradient: Tensor
    ) -> list[Tensor]:
        owner = variable.node
        now = {pattern.variable: variable, pattern.gradient: gradient}
        for node in pattern.nodes:
            slot, name, attrs = pattern.slots.get(node), node.name, node.attrs
            if slot is not None:  # takes a random stream, as every initial value does
                name = f"{self._prefix}{owner.name}/{slot}"
                attrs = {**attrs, "initial": replace(attrs["initial"], stream=next_stream())}
            inputs = tuple([now.get(tensor, tensor) for tensor in node.inputs])
            copy = node.copy_for(inputs, name, owner.device, owner, attrs)
            now.update(zip(node.outputs, copy.outputs, strict=True))
        return [now[update] for update in pattern.updates]


__all__ = ["VariableUpdate", "UpdateCopies"]

"""A training step written once for each turn of a window.

Each turn reads the versions of variables that the turn before made. Nodes that read no variable
that changes are written once. The assignments follow the last turn, so a window commits as a whole.

    graph ─unroll_turns→ Window: turn 0 as it was, copies for the later turns, versions in between
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import NamedTuple

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor, origin_scope


class VariableVersion(NamedTuple):
    """A new value of a variable.

    Attributes:
        variable: the variable.
        turn: the turn that made the value.
    """

    variable: Tensor
    turn: int


@dataclass(frozen=True)
class Window:
    """A graph of several turns of a training step.

    Attributes:
        graph: the graph. Output i stands for output i of one step.
        originals: for each node of a later turn, the node of one step that it repeats.
        turns: the turns of these nodes, from 1 on.
        versions: the nodes that stand for new values of variables.
        count: the number of turns.
    """

    graph: Graph
    originals: Mapping[Node, Node]
    turns: Mapping[Node, int]
    versions: Mapping[Node, VariableVersion]
    count: int


def unroll_turns(graph: Graph, count: int) -> Window:
    """Return several turns of a training step, all fed alike.

    Outputs are those of the first turn. Assignments, and what reads them, are those of the last.

    Args:
        graph: one step, with gradients and updates.
        count: the number of turns.
    """
    writer = _TurnWriter(graph, count)
    newest: dict[Tensor, Tensor] = {}
    for turn in range(count):
        newest = writer.write(turn, newest)
    outputs = [writer.last.get(tensor, tensor) for tensor in graph.outputs]
    return Window(Graph(outputs), writer.originals, writer.turns, writer.versions, count)


@dataclass
class _TurnWriter:
    """Writes a graph once for each turn.

    Attributes:
        graph, count, originals, turns, versions: see `Window`.
        last: what stands in the last turn for assignments and for what reads them.
    """

    graph: Graph
    count: int
    originals: dict[Node, Node] = field(default_factory=dict)
    turns: dict[Node, int] = field(default_factory=dict)
    versions: dict[Node, VariableVersion] = field(default_factory=dict)
    last: dict[Tensor, Tensor] = field(default_factory=dict)

    def write(self, turn: int, newest: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Write a turn, and return the versions of variables that it makes.

        Args:
            turn: its number.
            newest: what stands for the variables that earlier turns changed.
        """
        mapped, made = dict(newest), dict[Tensor, Tensor]()
        is_last = turn == self.count - 1
        for node in self.graph.nodes:
            inputs = tuple(mapped.get(tensor, tensor) for tensor in node.inputs)
            if node.op.name == "assign":
                version = self._version(node, inputs[1], turn)
                made[node.inputs[0]] = version
                mapped[node.outputs[0]] = version
                if is_last:
                    assigned = node.with_inputs((node.inputs[0], version))
                    mapped[node.outputs[0]] = self.last[node.outputs[0]] = assigned.outputs[0]
            elif any(tensor in mapped for tensor in node.inputs):
                copy = self._copy(node, inputs, turn)
                mapped.update(zip(node.outputs, copy.outputs, strict=True))
                if is_last and any(tensor in self.last for tensor in node.inputs):
                    self.last.update(zip(node.outputs, copy.outputs, strict=True))
        return made

    def _copy(self, node: Node, inputs: tuple[Tensor, ...], turn: int) -> Node:
        """Return a node that reads what a turn made."""
        if not turn:
            return node.with_inputs(inputs)
        copy = node.copy_for(inputs, f"turn{turn}/{node.name}", node.device, node)
        self.originals[copy] = node
        self.turns[copy] = turn
        return copy

    def _version(self, assign: Node, value: Tensor, turn: int) -> Tensor:
        """Return a new value of a variable, by a node of its own: places may hold different
        ones."""
        variable = assign.inputs[0]
        with origin_scope(assign, f"turn{turn}/", assign.device):
            version: Tensor = REGISTRY["reshape"](value, shape=variable.shape, name=assign.name)
        self.versions[version.node] = VariableVersion(variable, turn)
        return version


def name_in_step(name: str) -> str:
    """Return a name without the turn that precedes it."""
    return re.sub(r"^turn\d+/", "", name)


__all__ = ["VariableVersion", "Window", "name_in_step", "unroll_turns"]

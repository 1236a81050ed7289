"""The variables of a training step by what replicas do with them: exchange, average, or keep."""

from __future__ import annotations

from typing import NamedTuple

from graphflow.ir.graph import Graph
from graphflow.ir.op import Node
from graphflow.ir.spec import is_inexact
from graphflow.parallel.sharding.propagation.propagation import is_slot


class ReplicatedState(NamedTuple):
    """The variables of a training step that replicas would let drift apart.

    Optimisers' slots are in none of these: each replica keeps its own.

    Attributes:
        parameters: the variables that are trained.
        averaged: other float variables whose new values depend on the batch, such as the moments of
            a batch norm.
        equal: integers whose new values depend on the batch. They have to be equal at all replicas.
    """

    parameters: tuple[Node, ...]
    averaged: tuple[Node, ...]
    equal: tuple[Node, ...]


def find_replicated_state(graph: Graph) -> ReplicatedState:
    """Return the variables of a training step by what replicas do with them."""
    drifting = _find_drifting(graph)
    parameters = tuple(v for v in drifting if v.attrs["trainable"] and not is_slot(v))
    others = [v for v in drifting if v not in parameters and not is_slot(v)]
    return ReplicatedState(
        parameters,
        tuple(v for v in others if is_inexact(v.specs[0].dtype)),
        tuple(v for v in others if not is_inexact(v.specs[0].dtype)),
    )


def _find_drifting(graph: Graph) -> list[Node]:
    """Return the assigned variables whose values come to differ between replicas: their new values
    depend on a placeholder, on random numbers, or on another such variable."""
    drifting: dict[Node, None] = {}
    while True:
        reached: set[Node] = set()
        for node in graph.nodes:
            is_source = node.op.name == "placeholder" or node.op.random or node in drifting
            if is_source or any(t.node in reached for t in node.inputs):
                reached.add(node)
        found = {
            node.inputs[0].node: None
            for node in graph.of_op("assign")
            if node.inputs[1].node in reached
        }
        if found.keys() <= drifting.keys():
            return [node for node in graph.variables if node in drifting]
        drifting |= found


__all__ = ["ReplicatedState", "find_replicated_state"]

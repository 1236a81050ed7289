"""Cotangents on their way to an earlier stage: parts from one stage are summed before they are
sent.

So one tensor travels, and not one for each reader.

    (p0 + p2a) + p2b, with p0 of stage 0 and the others of stage 2   →   p0 + (p2a + p2b)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add

from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor, origin_scope
from graphflow.parallel.pipelining.stages import origin_of


def sum_within_stages(graph: Graph, stages: Mapping[Node, int]) -> Graph:
    """Return the graph in which parts of a cotangent are summed before they leave a stage.

    The cotangent belongs to an activation with several readers there, or to a variable that several
    stages share.

    Args:
        graph: the graph with gradients, before it is split into micro-batches.
        stages: the stage of each node of its forward pass.
    """
    depth = {node: 1 for node in graph.nodes if _adds_parts(node, stages)}
    last = set(depth)
    fetched = {t.node for t in graph.outputs}
    for node in depth:
        left = node.inputs[0].node
        alone = left not in fetched and list(graph.consumers[left]) == [node]
        if left in depth and left.origin is node.origin and alone:
            depth[node] = depth[left] + 1
            last.discard(left)

    def regroup(node: Node, inputs: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        """Replace the last node of a chain of sums by a sum for each stage."""
        if node not in last:
            return None
        left, right = inputs
        parts = [right]
        for _ in range(depth[node] - 1):
            left, right = left.node.inputs
            parts.append(right)
        return _sum_by_stage([left, *reversed(parts)], node, stages)

    return graph.rewrite(regroup)


def _adds_parts(node: Node, stages: Mapping[Node, int]) -> bool:
    """Return True if a node adds two parts of a cotangent."""
    origin = origin_of(node, stages)
    made = node.op.name == "add" and node not in stages and origin in stages
    alike = all(t.shape == node.outputs[0].shape for t in node.inputs)
    return made and alike


def _sum_by_stage(
    parts: list[Tensor], node: Node, stages: Mapping[Node, int]
) -> tuple[Tensor] | None:
    """Return the sum of some parts, stage by stage; None if no other stage has two of them."""
    home = stages[origin_of(node, stages)]
    by_stage: dict[int, list[Tensor]] = {}
    for part in parts:
        stage = stages.get(origin_of(part.node, stages), home)
        by_stage.setdefault(stage, []).append(part)
    if all(stage == home or len(found) == 1 for stage, found in by_stage.items()):
        return None
    sums = []
    for stage, found in by_stage.items():
        made = node if stage == home else found[-1].node
        with origin_scope(made if made in stages or made.origin is None else made.origin):
            sums.append(reduce(add, found))
    assert node.origin is not None
    with origin_scope(node.origin):
        return (reduce(add, sums),)


__all__ = ["sum_within_stages"]

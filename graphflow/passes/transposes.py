"""Transposes become matmul flags: BLAS reads an operand either way round, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphflow.graph import Graph
from graphflow.op import Node, Tensor
from graphflow.passes.base import Pass


@dataclass(frozen=True)
class FoldTransposes(Pass):
    """Replace matmul(permute_dims(a), b) by matmul(a, b, transpose_a=True); b likewise."""

    def __call__(self, graph: Graph) -> Graph:
        return graph.rewrite(_fold) if graph.of_op("permute_dims") else graph


def _fold(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
    if node.op.name != "matmul" or any(t.ndim < 2 for t in inputs):
        return None
    flags = [node.attrs.get("transpose_a", False), node.attrs.get("transpose_b", False)]
    operands = list(inputs)
    for i in range(2):
        while _swaps_last_two(operands[i].node):
            operands[i] = operands[i].node.inputs[0]
            flags[i] = not flags[i]
    if all(a is b for a, b in zip(operands, inputs, strict=True)):
        return None
    attrs = {**node.attrs, "transpose_a": flags[0], "transpose_b": flags[1]}
    return node.with_inputs(tuple(operands), attrs).outputs


def _swaps_last_two(node: Node) -> bool:
    if node.op.name != "permute_dims":
        return False
    rank = node.specs[0].rank
    return tuple(node.attrs["axes"]) == (*range(rank - 2), rank - 1, rank - 2)

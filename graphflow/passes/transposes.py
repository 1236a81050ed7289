"""FoldTransposes: turn transposes into flags of matmul, whose kernels read either layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, Node, Tensor, replacement_scope
from graphflow.passes.base import Pass, Phase, register_pass


@dataclass(frozen=True)
class FoldTransposes(Pass):
    """Remove transposes, which copy.

    - matmul(permute_dims(a), b) becomes matmul(a, b, transpose_a=True), and b likewise.
    - A product that is only read transposed becomes the product of the transposed operands.
    - Two permutations become one.
    - A permutation that only moves axes of size 1 becomes a reshape, which does not copy.
    """

    phase: ClassVar[Phase] = Phase.SIMPLIFY

    def __call__(self, graph: Graph) -> Graph:
        wanted = set(graph.outputs)

        def fold(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
            if node.op.name == "matmul":
                return _absorb_transposes(node, inputs)
            before = node.inputs[0]
            once = len(graph.consumers[before.node]) == 1 and before not in wanted
            return _simplify_permutation(node, inputs[0], once)

        return graph.rewrite(fold, ("matmul", "permute_dims"))


def _absorb_transposes(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
    """Replace transposed operands of a product by flags; None if there are none."""
    if any(t.ndim < 2 for t in inputs):
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


def _simplify_permutation(node: Node, x: Tensor, once: bool) -> Sequence[Tensor] | None:
    """Simplify a permutation of a permutation, of a product, or of axes of size 1; else None."""
    axes = tuple(node.attrs["axes"])
    source, before = x.node, x
    if source.op.name == "permute_dims":
        inner = source.attrs["axes"]
        axes, before = tuple(inner[axis] for axis in axes), source.inputs[0]
        if axes == tuple(range(len(axes))):
            return [before]
    moved = [axis for axis in axes if before.shape[axis] != 1]
    if moved == sorted(moved):
        with replacement_scope(node):
            shape = tuple(before.shape[axis] for axis in axes)
            reshaped: Tensor = FUNCTIONS["reshape"](before, shape)
        return [reshaped]
    if before is not x:
        return node.with_inputs((before,), {**node.attrs, "axes": axes}).outputs
    if once and source.op.name == "matmul" and _swaps_last_two(node):
        flags = {
            "transpose_a": not source.attrs.get("transpose_b", False),
            "transpose_b": not source.attrs.get("transpose_a", False),
        }
        attrs = {**source.attrs, **flags}
        return source.with_inputs(source.inputs[::-1], attrs, node.specs).outputs
    return None


def _swaps_last_two(node: Node) -> bool:
    if node.op.name != "permute_dims":
        return False
    rank = node.specs[0].rank
    return tuple(node.attrs["axes"]) == (*range(rank - 2), rank - 1, rank - 2)


register_pass(FoldTransposes())

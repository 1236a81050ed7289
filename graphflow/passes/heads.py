"""Heads stay where they are: attention reads and writes them in rows, (…, T, heads, d), as products
make and take them, instead of having them moved before T and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, replacement_scope
from graphflow.ops.attention.row_layout import is_swapped, swap_heads_and_time
from graphflow.passes.base import Pass, Phase, register_pass


@dataclass(frozen=True)
class FoldHeads(Pass):
    """Attention of heads that were moved before T becomes that of heads in rows, whose results are
    moved; `FoldTransposes` then finds that they are moved back. Its gradient likewise, with the sum
    of products along rows that it is given. No bit changes.

    Floats of 16 bits keep their heads apart, as libraries of GPUs want them.
    """

    phase: ClassVar[Phase] = Phase.ATTENTION

    def __call__(self, graph: Graph) -> Graph:
        return graph.rewrite(_fold_attention, ("attention", "attention_grad"))


def _fold_attention(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
    if node.op.name == "attention" and _has_row_layout(inputs[:3]):
        with replacement_scope(node):
            rows = [t.node.inputs[0] for t in inputs[:3]]
            y, logs = REGISTRY["attention_rows"](*rows, *inputs[3:], **node.attrs)
            return swap_heads_and_time(y), logs
    if node.op.name == "attention_grad" and _has_row_layout((inputs[0], *inputs[2:5])):
        with replacement_scope(node):
            g, q, k, v = (t.node.inputs[0] for t in (inputs[0], *inputs[2:5]))
            given = (g, _sum_along_rows(inputs[1]), q, k, v, *inputs[5:])
            slopes = REGISTRY["attention_rows_grad"](*given, **node.attrs)
            return [swap_heads_and_time(slope) for slope in slopes]
    return None


def _has_row_layout(heads: Sequence[Tensor]) -> bool:
    return all(is_swapped(t) and t.dtype.itemsize > 2 for t in heads)


def _sum_along_rows(delta: Tensor) -> Tensor:
    """The sum of each row of a product of tensors in rows, moved instead of these."""
    total = delta.node
    if total.op.name != "sum" or total.attrs["axis"] not in (-1, (-1,), delta.ndim, (delta.ndim,)):
        return delta
    product = total.inputs[0].node
    if product.op.name != "multiply" or not all(map(is_swapped, product.inputs)):
        return delta
    a, b = (t.node.inputs[0] for t in product.inputs)
    summed: Tensor = FUNCTIONS["sum"](a * b, -1)
    rank = delta.ndim
    moved: Tensor = FUNCTIONS["permute_dims"](summed, (*range(rank - 2), rank - 1, rank - 2))
    return moved


register_pass(FoldHeads())

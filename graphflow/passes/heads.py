"""FoldHeads: let attention read and write heads in the layout of products, (…, T, heads, d).

Models transpose heads to (…, heads, T, d) and back. The attention kernels take any strides, so
these copies can go.
"""

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
    """Replace attention on transposed heads by attention on rows and a transpose of its result.

    `FoldTransposes` then cancels this transpose with the model's own. The gradient, and the row sum
    that it takes, are rewritten likewise. No bit changes.

    16-bit floats keep the layout (…, heads, T, d), which the attention kernels of GPU libraries
    expect.
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
    """Sum products before the transpose rather than after it, and transpose the smaller sums."""
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

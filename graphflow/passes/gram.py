"""UseSyrk: compute one triangle of a matrix times its own transpose, as BLAS's syrk does.

numpy chooses syrk by itself if both operands are one buffer, and its bits differ from those of a
product. Whether two tensors share a buffer depends on the memory plan. So matmul never lets its
operands share one, and this pass chooses syrk where the graph says that they are one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor, make_node, replacement_scope
from graphflow.ir.spec import evaluate
from graphflow.ops.matrices.gram import SYRK_DTYPES, gram_sizes, uses_syrk
from graphflow.passes.base import Pass, Phase, register_pass


@dataclass(frozen=True)
class UseSyrk(Pass):
    """Replace x.T @ x and x @ x.T by the op `gram` where this is faster.

    If sizes are symbolic, the product becomes `gram` as well, and the kernel decides by the sizes.
    """

    phase: ClassVar[Phase] = Phase.SYMMETRY

    def __call__(self, graph: Graph) -> Graph:
        def use_syrk(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
            if inputs[0] is not inputs[1] or inputs[0].ndim != 2:
                return None
            columns = bool(node.attrs.get("transpose_a"))
            if columns == bool(node.attrs.get("transpose_b")) or not _is_faster(inputs[0], columns):
                return None
            with replacement_scope(node):
                made = make_node(REGISTRY["gram"], inputs[:1], {"columns": columns})
            return made.with_inputs(inputs[:1], turn=node.turn).outputs

        return graph.rewrite(use_syrk, ("matmul",))


def _is_faster(x: Tensor, columns: bool) -> bool:
    if not x.spec.is_concrete:
        return x.dtype.name in SYRK_DTYPES
    n, k = gram_sizes(x.spec, columns)
    return uses_syrk(evaluate(n, {}), evaluate(k, {}), x.dtype.name)


register_pass(UseSyrk())

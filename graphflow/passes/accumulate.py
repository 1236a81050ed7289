"""AccumulateProducts: add matrix products to a sum in place, without a buffer for each product.

Weight gradients over micro-batches are such sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor, make_node, replacement_scope
from graphflow.ir.spec import nbytes
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.gemm.gemm import is_supported
from graphflow.ops.matrices.matmul import generated_accumulation
from graphflow.passes.base import Pass, Phase, register_pass

_ACCUMULATORS = ("matmul", "accumulate_product", "variable", "placeholder")
"""Ops whose values may be such sums. Additions to others are left to fused regions."""


@dataclass(frozen=True)
class AccumulateProducts(Pass):
    """Replace c + a @ b by accumulate_product(c, a, b), which has the same bits.

    The product must have no other consumer and at least `least` bytes. A generated kernel must
    compute it, or may do so if the size of the summed axis is symbolic.
    """

    phase: ClassVar[Phase] = Phase.ACCUMULATION

    least: int = 16384

    def __call__(self, graph: Graph) -> Graph:
        if not is_jit_enabled() or "matmul" not in graph.op_names:
            return graph
        wanted = set(graph.outputs)
        consumers = graph.consumers

        def accumulate(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
            for i in (1, 0):
                before = node.inputs[i]
                once = len(consumers[before.node]) == 1 and before not in wanted
                if once and self._fits(node, inputs[1 - i], inputs[i]):
                    product = inputs[i].node
                    given = (inputs[1 - i], *product.inputs)
                    with replacement_scope(node):
                        made = make_node(REGISTRY["accumulate_product"], given, product.attrs)
                    return made.with_inputs(given, turn=product.turn).outputs
            return None

        return graph.rewrite(accumulate, ("add",))

    def _fits(self, node: Node, c: Tensor, product: Tensor) -> bool:
        source, spec = product.node, node.specs[0]
        if source.op.name != "matmul" or c.node.op.name not in _ACCUMULATORS or c is product:
            return False
        if c.spec != spec or product.spec != spec or source.device != node.device:
            return False
        if not spec.is_concrete or nbytes(spec) < self.least or not is_supported(spec.dtype.name):
            return False
        if not all(t.spec.is_concrete for t in source.inputs):
            return True
        flags = [bool(source.attrs.get(name)) for name in ("transpose_a", "transpose_b")]
        a, b = (t.spec for t in source.inputs)
        return generated_accumulation(a, b, *flags) is not None


register_pass(AccumulateProducts())

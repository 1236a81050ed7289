"""FoldConstants: compute nodes of constant inputs once, while the graph is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.blas_threads import one_blas_thread
from graphflow.ir.graph import Graph, bind_attrs
from graphflow.ir.op import REGISTRY, Node, Tensor, owner_module
from graphflow.ir.spec import nbytes
from graphflow.passes.base import Pass, Phase, register_pass


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Replace a pure node of constant inputs by its value.

    A value may take at most `limit` bytes more than its inputs. Folding `zeros((10**4, 10**4))`
    would trade a cheap fill for a large constant to store and send.
    """

    phase: ClassVar[Phase] = Phase.CONSTANTS

    limit: int = 65536

    def __call__(self, graph: Graph) -> Graph:
        with one_blas_thread(), np.errstate(all="ignore"):  # as programs do, for equal bits
            return graph.rewrite(self._fold)

    def _fold(self, node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
        for tensor in inputs:
            if tensor.node.op.name != "constant":
                return None
        if not node.op.pure or node.op.name == "constant":
            return None
        if owner_module(node.op) is not None:
            return None  # a user's op may crash its process, which should be a worker's
        if not all(s.is_concrete for s in node.specs):
            return None
        size = sum(map(nbytes, node.specs))
        if size > self.limit + sum(t.node.attrs["value"].nbytes for t in inputs):
            return None
        try:
            attrs = bind_attrs(node.attrs, {})
            values = node.op.run(np, [t.node.attrs["value"] for t in inputs], attrs)
        except Exception:
            return None  # the step will raise the error, with the node's line
        return [
            _constant(node, np.asarray(value, spec.dtype), i)
            for i, (value, spec) in enumerate(zip(values, node.specs, strict=True))
        ]


def _constant(node: Node, value: np.ndarray[Any, Any], index: int) -> Tensor:
    value = np.array(value, order="C")
    value.flags.writeable = False
    return Node(
        REGISTRY["constant"],
        (),
        {"value": value},
        (node.specs[index],),
        name=node.name,
        device=node.device,
        location=node.location,
        origin=node.origin,
        turn=node.turn,
    ).outputs[0]


register_pass(FoldConstants())

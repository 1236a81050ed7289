"""MergeDuplicates: compute equal applications of pure ops once (common subexpressions)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.passes.base import Pass, Phase, register_pass

_INLINE_BYTES = 1024  # larger constants are equal only if they are the same array


@dataclass(frozen=True)
class MergeDuplicates(Pass):
    """Let the first of equal pure nodes (op, inputs, attributes, pin, turn) stand for the others.

    Nodes of different turns are not merged: a strategy computes them again to save memory. State,
    random streams and side effects are never merged.
    """

    phase: ClassVar[Phase] = Phase.DUPLICATES

    def __call__(self, graph: Graph) -> Graph:
        first: dict[Hashable, list[Node]] = {}
        keys: dict[int, Hashable] = {}  # by id of attributes, which copies of a node share

        def merge(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
            if not node.op.pure:
                return None
            attrs: Hashable = ()
            if node.attrs:
                attrs = keys.get(id(node.attrs))
                if attrs is None:
                    attrs = keys[id(node.attrs)] = key_of(dict(node.attrs))
            alike = first.setdefault((node.op.name, inputs, attrs), [])
            for known in alike:  # nearly always one: comparing is cheaper than hashing more
                if (known.device, known.specs, known.turn) == (node.device, node.specs, node.turn):
                    return known.outputs
            kept = node if inputs is node.inputs else node.with_inputs(inputs)
            alike.append(kept)
            return kept.outputs

        return graph.rewrite(merge)


def key_of(value: Any) -> Hashable:
    """Return a hashable key that is equal exactly if the attribute values are equal."""
    if isinstance(value, np.ndarray):
        if value.nbytes > _INLINE_BYTES:
            return ("array", id(value))
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return tuple((name, key_of(v)) for name, v in sorted(value.items()))
    if isinstance(value, tuple | list):
        return tuple(key_of(v) for v in value)
    if isinstance(value, float):
        return ("float", value.hex())  # 0.0 and -0.0 differ, NaN is NaN
    if isinstance(value, complex):
        return ("complex", value.real.hex(), value.imag.hex())
    return (type(value).__name__, value)


register_pass(MergeDuplicates())

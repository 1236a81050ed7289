"""The reference: a graph run node by node, each op by itself and with a result of its own.

Constant folding uses it, tests compare with it, and it is the way to debug. Programs do the same
faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.base.blas_threads import one_blas_thread
from graphflow.frontend.pytree import bind
from graphflow.ir.graph import Graph, bind_attrs
from graphflow.ir.op import Node, Tensor


def evaluate(
    outputs: Sequence[Tensor],
    feeds: Mapping[Tensor, Any] | None = None,
    *,
    step: int = 0,
    xp: Any = np,
) -> list[Any]:
    """Values of outputs, as arrays of `xp`; placeholders (and, if wished, variables) come from
    `feeds`.

    Variables that are not fed have their initial value. Nothing is assigned.

    Raises:
        FeedError: a placeholder is not fed, or sizes do not fit each other.
    """
    given = {t.node: xp.asarray(value) for t, value in (feeds or {}).items()}
    graph = Graph(outputs)
    shapes = {n: value.shape for n, value in given.items() if n.op.name == "placeholder"}
    return run(graph, given, bind(graph, shapes), step, xp)


def run(
    graph: Graph, given: Mapping[Node, Any], bindings: Mapping[str, int], step: int, xp: Any
) -> list[Any]:
    """Values of a graph's outputs; those of some nodes of one output are given."""
    values: dict[Tensor, Any] = {}
    with one_blas_thread(), np.errstate(all="ignore"):
        for node in graph.nodes:
            results = (given[node],) if node in given else _run(node, values, bindings, step, xp)
            for tensor, result in zip(node.outputs, results, strict=True):
                values[tensor] = xp.asarray(result)
    return [values[t] for t in graph.outputs]


def _run(
    node: Node, values: Mapping[Tensor, Any], bindings: Mapping[str, int], step: int, xp: Any
) -> tuple[Any, ...]:
    if node.op.name == "variable":
        initial = node.attrs["initial"]
        return (initial() if callable(initial) else initial,)
    node.bound_specs(bindings)  # refuses negative sizes, which no kernel looks for
    inputs = [values[t] for t in node.inputs]
    return node.op.run(xp, inputs, bind_attrs(node.attrs, bindings), step)

"""The reference interpreter: run a graph node by node, each result in an array of its own.

Constant folding and debugging use it, and tests compare compiled programs with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.base.process.blas_threads import one_blas_thread
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
    """Compute outputs as arrays of `xp`, given the values of placeholders.

    `feeds` may hold variables, too; others have their initial value. Nothing is assigned.

    Raises:
        FeedError: a placeholder is not fed, or sizes are inconsistent.
    """
    given = {t.node: xp.asarray(value) for t, value in (feeds or {}).items()}
    graph = Graph(outputs)
    shapes = {n: value.shape for n, value in given.items() if n.op.name == "placeholder"}
    return run(graph, given, bind(graph, shapes), step, xp)


def run(
    graph: Graph, given: Mapping[Node, Any], bindings: Mapping[str, int], step: int, xp: Any
) -> list[Any]:
    """Compute a graph's outputs. `given` holds the values of some nodes that have one output."""
    values: dict[Tensor, Any] = {}
    with one_blas_thread(), np.errstate(all="ignore"):
        for node in graph.nodes:
            results = (
                (given[node],) if node in given else _run_node(node, values, bindings, step, xp)
            )
            for tensor, result in zip(node.outputs, results, strict=True):
                values[tensor] = xp.asarray(result)
    return [values[t] for t in graph.outputs]


def _run_node(
    node: Node, values: Mapping[Tensor, Any], bindings: Mapping[str, int], step: int, xp: Any
) -> tuple[Any, ...]:
    if node.op.name == "variable":
        initial = node.attrs["initial"]
        return (initial() if callable(initial) else initial,)
    node.bound_specs(bindings)  # raises for negative sizes, which kernels do not check
    inputs = [values[t] for t in node.inputs]
    return node.op.run(xp, inputs, bind_attrs(node.attrs, bindings), step)

"""The reference: a graph run node by node, each op by itself and with a result of its own.

Constant folding uses it, tests compare with it, and it is the way to debug. Programs do the same
faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.blas import one_thread
from graphflow.errors import FeedError
from graphflow.graph import Graph, bind_attrs
from graphflow.op import Node, Tensor
from graphflow.spec import Dim


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
    """
    given = {t.node: xp.asarray(value) for t, value in (feeds or {}).items()}
    return run(Graph(outputs), given, _bindings(given), step, xp)


def run(
    graph: Graph, given: Mapping[Node, Any], bindings: Mapping[str, int], step: int, xp: Any
) -> list[Any]:
    """Values of a graph's outputs; those of some nodes of one output are given."""
    values: dict[Tensor, Any] = {}
    with one_thread(), np.errstate(all="ignore"):
        for node in graph.nodes:
            results = (given[node],) if node in given else _run(node, values, bindings, step, xp)
            for tensor, result in zip(node.outputs, results, strict=True):
                values[tensor] = xp.asarray(result)
    return [values[t] for t in graph.outputs]


def _bindings(given: Mapping[Node, Any]) -> dict[str, int]:
    """Sizes of symbols, read off the fed arrays; only plain symbols (not `2*n`) can be."""
    bindings: dict[str, int] = {}
    for node, array in given.items():
        for size, actual in zip(node.specs[0].shape, array.shape, strict=True):
            if isinstance(size, Dim):
                ((monomial, _),) = size.terms.items()
                bindings[monomial[0]] = actual
    return bindings


def _run(
    node: Node, values: Mapping[Tensor, Any], bindings: Mapping[str, int], step: int, xp: Any
) -> tuple[Any, ...]:
    if node.op.name == "placeholder":
        raise FeedError(f"placeholder {node.name!r} (made at {node.location}) is not fed")
    if node.op.name == "variable":
        initial = node.attrs["initial"]
        return (initial() if callable(initial) else initial,)
    inputs = [values[t] for t in node.inputs]
    return node.op.run(xp, inputs, bind_attrs(node.attrs, bindings), step)

"""Memory that the bodies of a node (`call`, `scan`, `while_loop`, …) take while it runs."""

from __future__ import annotations

from collections.abc import Mapping

from graphflow.ir.graph import Body, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import nbytes
from graphflow.ops.control_flow.control import cond, scan, while_loop

_ELSEWHERE = ("constant", "placeholder", "group")
"""Ops of bodies whose values have memory elsewhere."""


def body_memory(node: Node, bindings: Mapping[str, int]) -> int:
    """Return the most bytes in use at once by a node's bodies.

    Iterations run one after the other, and one branch of a `cond` runs. The values that a loop
    carries have two sets of buffers.
    """
    peaks = [_peak(body, bindings) for body in bodies(node)]
    if node.op is cond:
        return max(peaks)
    return sum(peaks) + 2 * sum(nbytes(t.spec.bind(bindings)) for t in _loop_carried(node))


def _loop_carried(node: Node) -> tuple[Tensor, ...]:
    """Return the tensors that a loop carries from one iteration to the next."""
    body = node.attrs.get("body")
    if node.op is scan and isinstance(body, Body):
        return tuple(body.outputs[: node.attrs["carries"]])
    if node.op is while_loop and isinstance(body, Body):
        return tuple(body.outputs[: node.attrs["states"]])
    return ()


def _peak(body: Body, bindings: Mapping[str, int]) -> int:
    """Return the most bytes alive at once in build order; results live to the end."""
    nodes = body.graph.nodes
    roots: dict[Tensor, Tensor] = {}
    dies: dict[Tensor, int] = {}
    for i, node in enumerate(nodes):
        for tensor in node.outputs:
            roots[tensor] = roots[node.inputs[0]] if node.op.alias else tensor
            dies[roots[tensor]] = i
        for tensor in node.inputs:
            dies[roots[tensor]] = i
    for tensor in body.graph.outputs:
        dies[roots[tensor]] = len(nodes)
    ends: dict[int, int] = {}
    alive = most = 0
    for i, node in enumerate(nodes):
        if not (node.op.alias or node.op.name in _ELSEWHERE):
            for tensor in node.outputs:
                size = nbytes(tensor.spec.bind(bindings))
                alive += size
                ends[dies[tensor]] = ends.get(dies[tensor], 0) + size
        inside = body_memory(node, bindings) if node.attrs and bodies(node) else 0
        most = max(most, alive + inside)
        alive -= ends.pop(i, 0)
    return most

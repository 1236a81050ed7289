"""Fetches of updates: which variables they change."""

from __future__ import annotations

from graphflow.ir.op import Node, Tensor


def find_updated_variables(tensor: Tensor) -> dict[Node, None]:
    """Return the variables that an assignment or a group updates, also through groups in it."""
    node = tensor.node
    if node.op.name == "assign":
        return {node.inputs[0].node: None}
    found: dict[Node, None] = {}
    if node.op.name == "group":
        for member in node.inputs:
            found |= find_updated_variables(member)
    return found

"""Value numbering for expanded ops.

The gradient of an op along whole rows begins with the same maxima and sums as the op itself. Those
were reduced over places already, so they are taken over and do not travel again.
"""

from __future__ import annotations

from collections.abc import Hashable

from graphflow.ir.op import Node, Tensor
from graphflow.passes.duplicates import key_of


class ValueNumbering:
    """Finds the first of several nodes that compute the same."""

    def __init__(self) -> None:
        self._first: dict[Hashable, Node] = {}
        self._same: dict[Tensor, Tensor] = {}

    def first_equal(self, node: Node) -> Node:
        """Return the first node that computes the same; the node itself if there is none."""
        if not node.op.pure:
            return node
        inputs = tuple(self._same.get(t, t) for t in node.inputs)
        found = self._first.setdefault((node.op.name, inputs, key_of(dict(node.attrs))), node)
        if found is not node:
            self._same.update(zip(node.outputs, found.outputs, strict=True))
        return found


__all__ = ["ValueNumbering"]

"""Repeats: what two expansions make alike. The gradient of an op that looks along whole rows begins
as the op itself did, with its largest numbers and sums: those have travelled already.
"""

from __future__ import annotations

from collections.abc import Hashable

from graphflow.ir.op import Node, Tensor
from graphflow.passes.duplicates import key_of


class ValueNumbering:
    """Numbers nodes by what they make."""

    def __init__(self) -> None:
        self._first: dict[Hashable, Node] = {}
        self._same: dict[Tensor, Tensor] = {}

    def first_equal(self, node: Node) -> Node:
        """The first node that makes the same; it itself, if none did."""
        if not node.op.pure:
            return node
        inputs = tuple(self._same.get(t, t) for t in node.inputs)
        found = self._first.setdefault((node.op.name, inputs, key_of(dict(node.attrs))), node)
        if found is not node:
            self._same.update(zip(node.outputs, found.outputs, strict=True))
        return found


__all__ = ["ValueNumbering"]

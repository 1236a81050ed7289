"""Copies of nodes, and of the bodies that they hold, with other sizes in place of symbols.

A step that is written once for each micro-batch has, in each copy, the size of that micro-batch
where the user's graph has the symbol of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Body, Graph
from graphflow.ir.op import Node, Tensor, make_node, origin_scope
from graphflow.ir.spec import Dim, Size, substitute
from graphflow.ops.control_flow.control import fold_in


class SymbolSubstitution:
    """Rebuilds nodes, and the bodies that they hold, with other sizes in place of symbols.

    Args:
        sizes: the sizes that stand for symbols.
        turn: the number of the copy. Each turn draws other random numbers.
    """

    def __init__(self, sizes: Mapping[str, Size], turn: int = 0) -> None:
        self._sizes = sizes
        self._turn = turn

    def node(
        self, node: Node, inputs: tuple[Tensor, ...], more: Mapping[str, Any] | None = None
    ) -> Node:
        """Rebuild a node with other sizes.

        Args:
            node: the node.
            inputs: its inputs.
            more: attributes that replace those of the node.
        """
        return make_node(node.op, inputs, {**self.attrs_of(node), **(more or {})}, node.name)

    def attrs_of(self, node: Node) -> dict[str, Any]:
        """Return the attributes of a node with other sizes."""
        attrs = {name: self._value(value) for name, value in node.attrs.items()}
        if self._turn and "stream" in attrs:
            seed, number = attrs["stream"]
            attrs["stream"] = fold_in(seed, self._turn), number
        return attrs

    def device_of(self, node: Node) -> DeviceName:
        """Return the device of the copy of a node in a body."""
        return node.device

    def _value(self, value: Any) -> Any:
        """Substitute symbols in an attribute."""
        if isinstance(value, Dim):
            return substitute(value, self._sizes)
        if isinstance(value, tuple):
            return tuple(self._value(each) for each in value)
        if isinstance(value, Body):
            return self._body(value)
        return value

    def _body(self, body: Body) -> Body:
        """Rebuild a body with other sizes."""
        mapped: dict[Tensor, Tensor] = {}
        for node in (*body.inputs, *body.graph.nodes):
            if node.outputs[0] not in mapped:
                inputs = tuple(mapped[t] for t in node.inputs)
                with origin_scope(node, "", self.device_of(node)):
                    made = self.node(node, inputs)
                mapped.update(zip(node.outputs, made.outputs, strict=True))
        parameters = tuple(mapped[node.outputs[0]].node for node in body.inputs)
        return Body(parameters, Graph([mapped[t] for t in body.graph.outputs]), body.results)


__all__ = ["SymbolSubstitution"]

"""Copies of a step's nodes in the body of a party."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import Node, Tensor, origin_scope
from graphflow.ir.spec import Size
from graphflow.parallel.sharding.symbol_substitution import SymbolSubstitution


class PartyCopy(SymbolSubstitution):
    """Writes nodes of a step again, on the device of a party.

    Args:
        sizes: the sizes that stand for symbols of the step.
        device: the device.

    Attributes:
        device: the same.
    """

    def __init__(self, sizes: Mapping[str, Size], device: DeviceName) -> None:
        super().__init__(sizes)
        self.device = device

    def device_of(self, node: Node) -> DeviceName:
        """Return the device of the party."""
        return self.device

    def write(self, nodes: Iterable[Node], mapped: dict[Tensor, Tensor]) -> None:
        """Write nodes that have no copy yet, in order.

        Args:
            nodes: the nodes, inputs before their readers.
            mapped: the tensors that stand for those of the step; gets those of the nodes.
        """
        for node in nodes:
            if node.outputs[0] in mapped:
                continue
            if node.op.name == "constant":
                mapped[node.outputs[0]] = node.outputs[0]
                continue
            with origin_scope(node, "", self.device):
                made = self.node(node, tuple(mapped[t] for t in node.inputs))
            mapped.update(zip(node.outputs, made.outputs, strict=True))


__all__ = ["PartyCopy"]

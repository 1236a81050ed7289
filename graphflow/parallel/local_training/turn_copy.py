"""Copies of a replica's nodes for one turn: devices, sizes, names and random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import Node, Tensor, origin_scope
from graphflow.ir.spec import Size, substitute, symbols
from graphflow.parallel.mesh.axis_split import ShardExtent
from graphflow.parallel.sharding.symbol_substitution import SymbolSubstitution


class TurnCopy(SymbolSubstitution):
    """Rebuilds the nodes of a template for one turn of one replica.

    Args:
        sizes: the sizes that stand for symbols of the template.
        prefix: the start of the names of nodes.
        devices: the device of the replica; or, if it has several, a device for each device of the
            template.
        turn: the number of the turn. Each turn draws other random numbers.
        rank: the place of the nodes in the order of execution, see `Node.turn`.
        extents: for each symbol of the batch, the extent of the replica's micro-batch in the batch
            of its turn. A random tensor with the batch among its axes is that part of the tensor
            for the whole batch of the turn, as it is with `Data`.
    """

    def __init__(
        self,
        sizes: Mapping[str, Size],
        prefix: str,
        devices: DeviceName | Mapping[DeviceName, DeviceName],
        turn: int,
        extents: Mapping[str, ShardExtent],
        rank: int = -1,
    ) -> None:
        super().__init__(sizes, turn)
        self.prefix = prefix
        self._devices = devices
        self._starts = {symbol: extent.start for symbol, extent in extents.items()}
        self._totals = {symbol: extent.total for symbol, extent in extents.items()}
        self._replaced = sizes
        self._rank = rank

    def size(self, size: Size) -> Size:
        """Return the size that stands for one of the template's."""
        return substitute(size, self._replaced)

    def rebuild(self, node: Node, inputs: tuple[Tensor, ...]) -> Node:
        """Return the copy of a node."""
        with origin_scope(node, self.prefix, self.device_of(node), self._rank):
            return self.node(node, inputs)

    def device_of(self, node: Node) -> DeviceName:
        if isinstance(self._devices, DeviceName):
            return self._devices
        return self._devices.get(node.device, node.device)

    def attrs_of(self, node: Node) -> dict[str, Any]:
        attrs = super().attrs_of(node)
        if "stream" not in attrs:
            return attrs
        shape = node.attrs["shape"]
        total, start = node.attrs.get("part") or (shape, (0,) * len(shape))
        if any(self._is_batch(size) for size in total):
            attrs["part"] = (
                tuple(substitute(size, self._totals) for size in total),
                tuple(
                    self.size(begin) + (substitute(size, self._starts) if is_batch else 0)
                    for size, begin, is_batch in zip(
                        total, start, map(self._is_batch, total), strict=True
                    )
                ),
            )
        return attrs

    def _is_batch(self, size: Size) -> bool:
        """Return True if a size depends on the batch."""
        return not self._totals.keys().isdisjoint(symbols(size))


__all__ = ["TurnCopy"]

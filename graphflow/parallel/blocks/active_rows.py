"""Emission of sums of which only the active rows travel.

    gradient of a place ─rows that are active, to the front→ packed ──rows in use──→ all others
    packed of all places ─added, in the order of places→ sums ─back to their rows→ the sum

All places know which rows are active, so no keys travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, make_node
from graphflow.parallel.mesh.device_mesh import Place
from graphflow.parallel.mesh.layouts import Layout, SentTensor, ShardedTensor, whole
from graphflow.parallel.resharding.communication_log import CommunicationLog, user_name
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.sharding.emission.emitter import Emitter

ACTIVE_SUM = "active_sum"
"""The name of the op behind gradients of which only active rows travel."""
EXPECTED_ACTIVE = 16
"""Plans expect one row in so many to travel; lassos exchanged 3 to 10 % of their gradients."""
G = FUNCTIONS


class BlockEmitter(Emitter):
    """Writes the nodes of a window of a block method for all places of a mesh."""

    def emit_node(self, node: Node) -> None:
        """Write any node; in place of an `active_sum` of partial sums, the exchange."""
        axis = self._summed_axis(node)
        if axis is None:
            super().emit_node(node)
            return
        gradient, active = node.inputs
        self.reduce_inputs(node, [active])
        flags = self.resharder.convert(self.values[active], whole(1), node, user_name(active.node))
        exchange = _Exchange(self.resharder, node, self.values[gradient], flags, axis)
        self.values[node.outputs[0]] = exchange.run()

    def _summed_axis(self, node: Node) -> str | None:
        """Return the axis of devices over which an `active_sum` adds; None if there is none."""
        if node.op.name != ACTIVE_SUM:
            return None
        layout = self.values[node.inputs[0]].layout
        across = [(axis, kind) for axis, kind in layout.partial]
        if len(across) != 1 or across[0][1] != "sum" or any(layout.dims):
            return None
        return None if across[0][0] in self.mesh.sequential else across[0][0]


class _Exchange:
    """The exchange of the active rows of one gradient.

    Args:
        resharder: builds nodes, and records what travels.
        node: the `active_sum`.
        gradient: the gradient, partial along the axis.
        active: the flags of its rows, whole.
        axis: the mesh axis.
    """

    def __init__(
        self,
        resharder: Resharder,
        node: Node,
        gradient: ShardedTensor,
        active: ShardedTensor,
        axis: str,
    ) -> None:
        self._resharder = resharder
        self._node = node
        self._gradient = gradient
        self._active = active
        self._axis = axis

    def run(self) -> ShardedTensor:
        """Return the sum, whole, with zeros in rows that are not active."""
        found: dict[Place, Tensor] = {}
        sent: dict[SentTensor, float] = {}
        for group in self._resharder.mesh.groups(self._axis):
            packed = [self._pack(place) for place in group]
            for rank, place in enumerate(group):
                found[place] = self._add(place, packed, rank, sent)
        CommunicationLog(self._resharder, self._node, user_name(self._node))(
            "active rows", (self._axis,), sent
        )
        shards = tuple(found[place] for place in self._resharder.mesh.places)
        spec = self._gradient.spec
        return ShardedTensor(spec, Layout(whole(spec.rank).dims), shards)

    def _pack(self, place: Place) -> tuple[Tensor, Tensor]:
        """Return a place's active rows, moved to the front; and the same as they travel."""
        gradient = self._resharder.shard_at(self._gradient, place)
        with self._resharder.on_device(place, self._node):
            active = self._resharder.shard_at(self._active, place)
            first = G["argsort"](G["astype"](G["logical_not"](active), "int64"))
            used = _spread(G["take"](active, first, axis=0), gradient)
            rows: Tensor = G["where"](used, G["take"](gradient, first, axis=0), 0.0)
            number = G["sum"](G["astype"](active, "int64"))
            width = gradient.shape[0]
            expected = max(1, int(width) // EXPECTED_ACTIVE)
            attrs = {"lookups": expected, "rows": width, "piece": width}
            travels = make_node(REGISTRY["used_rows"], (rows, number), attrs).outputs[0]
        return rows, travels

    def _add(
        self,
        place: Place,
        packed: Sequence[tuple[Tensor, Tensor]],
        rank: int,
        sent: dict[SentTensor, float],
    ) -> Tensor:
        """Return the sum at a place; records what it receives."""
        resharder = self._resharder
        with resharder.on_device(place, self._node):
            parts = [own if k == rank else other for k, (own, other) in enumerate(packed)]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            active = resharder.shard_at(self._active, place)
            behind = G["cumsum"](G["astype"](active, "int64")) - 1
            rows = G["take"](total, G["maximum"](behind, 0), axis=0)
            result: Tensor = G["where"](_spread(active, total), rows, 0.0)
        for k, part in enumerate(parts):
            if k != rank:
                size = float(prod(map(int, part.shape)) * part.spec.dtype.itemsize)
                sent[part, result.node.device] = size
        return result


def _spread(flags: Tensor, like: Tensor) -> Tensor:
    """Return a flag for each row in a shape that broadcasts to a tensor's."""
    shaped: Tensor = flags if like.ndim < 2 else G["expand_dims"](flags, (1,))
    return shaped


__all__ = ["ACTIVE_SUM", "BlockEmitter"]

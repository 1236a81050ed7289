"""New values of variables whose updates are computed in shards: small ones are gathered together.

With a sharded optimiser state, each place computes a shard of the new value, and needs all of it in
the next step. Nothing in this step waits for it, so the gathers are bucketed as gradients are.
"""

from __future__ import annotations

from collections.abc import Callable

from graphflow.ir.op import Node
from graphflow.parallel.mesh.layouts import Layout, ShardedTensor
from graphflow.parallel.resharding.communication_log import user_name
from graphflow.parallel.resharding.fused_collectives import fused_all_gather
from graphflow.parallel.resharding.gradient_buckets import SMALL_FRACTION
from graphflow.parallel.resharding.resharder import Resharder

_Key = tuple[str, str, int]
"""The mesh axis, the dtype, and the device index of the first place: stages have buckets of their
own."""


class UpdateGatherer:
    """New values on their way to variables, in buckets by mesh axis and dtype.

    Args:
        resharder: builds the collectives.
        limit: bytes that are gathered at once; 0: nothing waits.
        assign: called with an assignment and its value in the layout of the variable.
    """

    def __init__(
        self, resharder: Resharder, limit: int, assign: Callable[[Node, ShardedTensor], None]
    ) -> None:
        self._resharder = resharder
        self._limit = limit
        self._assign = assign
        self._open: dict[_Key, list[tuple[Node, ShardedTensor]]] = {}
        self._waiting: dict[_Key, int] = {}  # bytes of each open bucket

    def add(self, node: Node, value: ShardedTensor, layout: Layout) -> None:
        """Assign a value, now or when its bucket is full.

        Args:
            node: the assignment.
            value: the new value.
            layout: the layout of the variable.
        """
        axis = self._gathered_along(value, layout)
        size = self._resharder.nbytes(value.spec, layout)
        if axis is None or size * SMALL_FRACTION > self._limit:
            self._assign(
                node, self._resharder.convert(value, layout, node, user_name(node.inputs[1].node))
            )
            return
        home = self._resharder.device_index(node, self._resharder.mesh.places[0])
        key = (axis, value.spec.dtype.name, home)
        self._open.setdefault(key, []).append((node, value))
        self._waiting[key] = self._waiting.get(key, 0) + size
        if self._waiting[key] >= self._limit:
            self._close(key)

    def flush(self) -> None:
        """Assign all values that wait."""
        for key in list(self._open):
            self._close(key)

    def _gathered_along(self, value: ShardedTensor, layout: Layout) -> str | None:
        """Return the one mesh axis along which a value has to be gathered; None if more has to be
        done."""
        pairs = zip(value.layout.dims, layout.dims, strict=True)
        moved = [(have, want) for have, want in pairs if have != want]
        if len(moved) != 1 or value.layout.partial or layout.partial:
            return None
        ((have, want),) = moved
        if not have or have.drop_last() != want or have.axes[-1] in self._resharder.mesh.sequential:
            return None
        return have.axes[-1] if all(part.spec.is_concrete for part in value.shards) else None

    def _close(self, key: _Key) -> None:
        """Gather the values of a bucket, and assign them."""
        nodes, values = zip(*self._open.pop(key), strict=True)
        del self._waiting[key]
        if len(values) == 1:
            name, whole = user_name(nodes[0].inputs[1].node), values[0].layout
            d = next(d for d, split in enumerate(whole.dims) if key[0] in split.axes)
            whole = whole.with_dim(d, whole.dims[d].drop_last())
            found = [self._resharder.convert(values[0], whole, nodes[0], name)]
        else:
            found = fused_all_gather(self._resharder, values, key[0], nodes[-1])
        for node, value in zip(nodes, found, strict=True):
            self._assign(node, value)


__all__ = ["UpdateGatherer"]

"""Partial sums that wait in buckets, until a reader needs the sum or the bucket is full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.ir.op import (
    Node,
    Tensor,
)
from graphflow.ops.control_flow.control import is_control
from graphflow.parallel.compression.emission import COMPRESSED
from graphflow.parallel.mesh.layouts import Layout, ShardedTensor
from graphflow.parallel.resharding.gradient_buckets import GradientBuckets
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.sharding.rules.node_rule import rule_of


class PartialSums:
    """Decides which partial sums wait for others, and completes those that a node reads.

    Args:
        resharder: builds the collectives.
        values: the sharded tensor of each tensor so far. Sums that were exchanged replace theirs.
        preferred: the layouts that readers of a tensor would like best.
        readers: the nodes that read each tensor; None stands for a fetch.
        bucket: bytes of sums in one exchange; 0: each sum has an exchange of its own.
    """

    def __init__(
        self,
        resharder: Resharder,
        values: dict[Tensor, ShardedTensor],
        preferred: Mapping[Tensor, Layout],
        readers: Mapping[Tensor, Sequence[Node | None]],
        bucket: int,
    ) -> None:
        self._resharder = resharder
        self._values = values
        self._preferred = preferred
        self._readers = readers
        self._buckets = GradientBuckets(resharder, values, bucket)

    def flush(self, tensor: Tensor) -> None:
        """Exchange the bucket in which a tensor waits, if it waits."""
        self._buckets.flush_tensor(tensor)

    def add_output(self, tensor: Tensor, node: Node) -> None:
        """Let a partial sum wait in a bucket, if its readers need the sum.

        A sum does not wait if its only reader can pass it on as a partial sum.
        """
        readers = self._readers.get(tensor, [])
        if any(reader is not None and reader.op.name == COMPRESSED for reader in readers):
            return  # that node exchanges it
        if readers and all(reader is None for reader in readers):
            self._buckets.add_fetched(tensor, node)
        if any(reader is None for reader in readers) or not readers:
            return
        found = self._values[tensor].layout.partial
        sums = all(kind == "sum" for _, kind in found)
        alone = readers[0] if len(set(readers)) == 1 else None
        if sums and alone is not None and self._passes_partials(alone, tensor):
            return
        target = self._preferred.get(tensor)
        partial = {axis for axis, _ in found}
        cut = target is not None and partial & target.axes()
        if target is not None and any(split.ranges is not None for split in target.dims):
            cut = False  # a scatter gives contiguous parts
        self._buckets.add(tensor, node, target if cut else None)

    def reduce_inputs(self, node: Node, tensors: Sequence[Tensor] | None = None) -> None:
        """Complete the sums that a node reads, as far as they wait or would be sent micro-batch by
        micro-batch.

        Args:
            node: the node.
            tensors: those that it reads; default: its inputs.

        A sum over micro-batches of one device, for a reader on another device, is made before it is
        sent. So one tensor travels, and not one for each micro-batch.
        """
        for tensor in node.inputs if tensors is None else tensors:
            layout = self._values[tensor].layout
            if layout.partial:  # only partial sums wait
                self._buckets.flush_tensor(tensor)
                layout = self._values[tensor].layout
            if not layout.partial:
                continue
            rest = tuple(p for p in layout.partial if p[0] not in self._resharder.mesh.sequential)
            if rest != layout.partial and self._is_elsewhere(tensor, node):
                there = Layout(layout.dims, rest)
                value = self._resharder.convert(
                    self._values[tensor], there, tensor.node, tensor.name
                )
                self._values[tensor] = value

    def _is_elsewhere(self, tensor: Tensor, reader: Node) -> bool:
        """Return True if a reader is on another device than the tensor, at any place."""
        return any(
            self._resharder.device_index(tensor.node, place)
            != self._resharder.device_index(reader, place)
            for place in self._resharder.mesh.places
        )

    def _passes_partials(self, reader: Node, tensor: Tensor, depth: int = 8) -> bool:
        """Return True if a reader can pass a partial sum on: it moves elements, or adds other
        partial sums.

        Args:
            depth: nodes that are looked through to see whether the other operands are partial sums.
        """
        if reader.op.name in ("assign", "group") or is_control(reader.op):
            return False
        sharding = rule_of(reader).sharding
        if not sharding.linear or (not sharding.view and len(sharding.linear[0]) < 2):
            return False
        others = [t for t in reader.inputs if t is not tensor]
        return sharding.view or all(self._may_be_partial(t, depth - 1) for t in others)

    def _may_be_partial(self, tensor: Tensor, depth: int) -> bool:
        """Return True if a tensor is a partial sum or may become one."""
        if tensor in self._values:
            return bool(self._values[tensor].layout.partial)
        node = tensor.node
        if not depth or not node.inputs or is_control(node.op):
            return False
        rule = rule_of(node)
        summed = {c for names in rule.inputs for c in names if c != "."}
        if summed - set("".join(rule.outputs)):
            return True
        return self._passes_partials(node, node.inputs[0], depth) and self._may_be_partial(
            node.inputs[0], depth - 1
        )


__all__ = ["PartialSums"]

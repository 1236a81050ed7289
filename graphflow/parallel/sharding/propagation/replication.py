"""Replication: the batch, the gradients and the optimiser state of places with the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.parallel.mesh.axis_split import AxisSplit
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import Layout, whole
from graphflow.parallel.mesh.size_partitioner import SizePartitioner, batch_too_small_error
from graphflow.parallel.sharding.propagation.batch_axis import batch_placeholders
from graphflow.parallel.sharding.propagation.propagation import is_slot, propagate


@dataclass(frozen=True)
class ReplicationConfig:
    """The rules by which places with the same model work together.

    Attributes:
        bucket: bytes of gradients in one exchange; 0: each gradient has an exchange of its own.
        unsynchronised: mesh axes along which batch norm takes the moments of its own shard.
        state_axis: the mesh axis along which each place keeps its part of the optimiser's slots
            only, and updates that part of the variables; None: each place keeps all.
        sequence_axis: the mesh axis along which activations that rules leave whole are split along
            the batch's second axis.
        examples: the placeholders that hold the batch, or their names, if the user names them.
        ring_axis: the mesh axis that divides the rows of tables in ranges on a ring.
        owns_tables: whether places may own whole parts of hash tables.
    """

    bucket: int = 0
    unsynchronised: frozenset[str] = frozenset()
    state_axis: str | None = None
    sequence_axis: str | None = None
    examples: Sequence[Tensor | str] | None = None
    ring_axis: str | None = None
    owns_tables: bool = True


NOT_REPLICATED = ReplicationConfig()
"""The configuration of a place that shares its model with no other place."""


def split_batch(
    graph: Graph,
    batch: Sequence[Tensor],
    given: Mapping[Tensor, Layout],
    axis: str | None,
    mesh: Mesh,
    strict: bool,
) -> dict[Tensor, Layout]:
    """Return layouts in which the placeholders that hold the batch are split along their first
    axis.

    Args:
        graph: the graph.
        batch: the placeholders.
        given: the layouts of rules. If a rule splits the first axis, `axis` does not.
        axis: the mesh axis of the batch. Sequential micro-batches split what each place has by
            then.
        mesh: the mesh.
        strict: refuse a batch smaller than its shards.

    Raises:
        ShardingError: the batch is smaller than its shards, and `strict`.
    """
    found = dict(given)
    for tensor in batch:
        layout = found.get(tensor) or whole(tensor.ndim)
        axes = layout.dims[0].axes
        if axis is not None and not axes and axis not in layout.axes():
            axes = (axis,)
        split = AxisSplit((*axes, *mesh.sequential))
        if not split:
            continue
        if strict and not SizePartitioner(mesh).can_split(tensor.shape[0], split):
            name = graph.names[tensor.node]
            size = f"{tensor.shape[0]} (of {name!r}, made at {tensor.node.location})"
            raise batch_too_small_error(size, split.axes, mesh)
        found[tensor] = layout.with_dim(0, split)
    return found


def split_sequence(
    graph: Graph,
    given: Mapping[Tensor, Layout],
    partitioner: SizePartitioner,
    replication: ReplicationConfig,
) -> dict[Tensor, Layout]:
    """Return layouts in which activations that are whole along the sequence axis are split along
    tokens.

    These are the norms and sums between tensor-parallel layers. Variables are not split.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
        MLSys 2023.
    """
    axis = replication.sequence_axis
    assert axis is not None
    found = propagate(graph.nodes, given, partitioner, axis)
    kept = {tensor: layout for tensor, layout in found.items() if axis in layout.axes()}
    for node in graph.variables:
        (tensor,) = node.outputs
        kept[tensor] = found.get(tensor) or whole(tensor.ndim)
    for tensor in batch_placeholders(graph, replication.examples):
        layout = kept.get(tensor) or found.get(tensor) or whole(tensor.ndim)
        split = AxisSplit((axis,))
        free = tensor.ndim > 1 and axis not in layout.axes() and not layout.dims[1]
        kept[tensor] = (
            layout.with_dim(1, split)
            if free and partitioner.can_split(tensor.shape[1], split)
            else layout
        )
    return {**given, **kept}


def split_slots(
    graph: Graph, given: Mapping[Tensor, Layout], partitioner: SizePartitioner, axis: str
) -> dict[Tensor, Layout]:
    """Return layouts in which each optimiser slot is split along one more mesh axis than its
    variable.

    Source: Rajbhandari et al., "ZeRO", SC 2020 (stage 2).
    """
    owners = {
        node.outputs[0]: node.origin.outputs[0]
        for node in graph.variables
        if is_slot(node) and node.origin is not None and node.outputs[0] not in given
    }
    missing = any(owner not in given for owner in owners.values())
    lie = propagate(graph.nodes, given, partitioner) if missing else given
    found = dict(given)
    for slot, owner in owners.items():
        layout = lie.get(owner) or whole(owner.ndim)
        found[owner] = layout
        found[slot] = _split_slot(slot, Layout(layout.dims[: slot.ndim]), partitioner, axis)
    return found


def _split_slot(tensor: Tensor, layout: Layout, partitioner: SizePartitioner, axis: str) -> Layout:
    """Split a slot along the first of its axes that is large enough and not in rows."""
    if axis in layout.axes():
        return layout
    for d, (size, have) in enumerate(zip(tensor.shape, layout.dims, strict=True)):
        split = AxisSplit((*have.axes, axis), have.unit)
        if have.outer == 1 and partitioner.can_split(size, split):
            return layout.with_dim(d, split)
    return layout


__all__ = ["NOT_REPLICATED", "ReplicationConfig", "split_sequence", "split_slots", "split_batch"]

"""Building the nodes of shards: devices and names for each place, and maps over places and groups.

`Resharder` builds on this class the conversions between layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import REGISTRY, Node, Tensor, origin_scope
from graphflow.ir.spec import Shape, TensorSpec, product
from graphflow.parallel.mesh.axis_split import ShardExtent
from graphflow.parallel.mesh.device_mesh import DeviceAssignment, Mesh, Place
from graphflow.parallel.mesh.layouts import CommunicationRecord, Layout, SentTensor, ShardedTensor
from graphflow.parallel.mesh.size_partitioner import SizePartitioner

CROSS_DEVICE_SCOPE = "moves/"
"""The name scope of nodes that are built for an op of the user's and lie on several devices."""


class ShardBuilder:
    """Builds nodes at the places of a mesh and records the communication between them.

    Args:
        mesh: the mesh.
        partitioner: the extents of shards over this mesh.
        assignment: the devices of nodes, if they do not follow from the place alone.

    Attributes:
        records: the collectives and halos so far.
        fetched: the transfers to the first place, for fetches.
    """

    def __init__(
        self,
        mesh: Mesh,
        partitioner: SizePartitioner,
        assignment: DeviceAssignment | None = None,
    ) -> None:
        self.mesh = mesh
        self.partitioner = partitioner
        self._assignment = assignment
        self.records: list[CommunicationRecord] = []
        self.fetched: list[CommunicationRecord] = []

    def on_device(self, place: Place, node: Node) -> origin_scope:
        """Return a scope whose nodes are at a place, and count as made where `node` was made."""
        return origin_scope(node, self.name_prefix(place), self.device_of(node, place))

    def cross_device(self, cause: Node) -> origin_scope:
        """Return a scope whose nodes lie on several devices: each where its own input is."""
        return origin_scope(cause, CROSS_DEVICE_SCOPE, DeviceName())

    def name_prefix(self, place: Place) -> str:
        """Return the prefix of the names of nodes at a place."""
        return self.mesh.tag(place)[1:] + "/"

    def sites(self, node: Node) -> Sequence[tuple[str, DeviceName]]:
        """Return, for each place, the prefix of names there and the device of what stands for a
        node."""
        if self._assignment is None:
            return self._sites
        return [
            (self.name_prefix(place), self.device_of(node, place)) for place in self.mesh.places
        ]

    @cached_property
    def _sites(self) -> Sequence[tuple[str, DeviceName]]:
        """The prefixes and devices of all places, if devices follow from the place alone."""
        places = self.mesh.places
        return [(self.name_prefix(p), self.mesh.devices[self.mesh.index_of(p)]) for p in places]

    def device_of(self, node: Node, place: Place) -> DeviceName:
        """Return the device of what stands for a node at a place."""
        if self._assignment is not None:
            return self._assignment.devices[self._assignment.device_index(node, place)]
        return self.mesh.devices[self.mesh.index_of(place)]

    def device_index(self, node: Node, place: Place) -> int:
        """Return the index shared by all shards placed on the same device."""
        return (
            self.mesh.device_index(place)
            if self._assignment is None
            else self._assignment.device_index(node, place)
        )

    def shard_at(self, value: ShardedTensor, place: Place) -> Tensor:
        """Return the shard of a tensor at a place."""
        return value.shards[self.mesh.index_of(place)]

    def local_shape(self, shape: Shape, layout: Layout, place: Place) -> Shape:
        """Return the shape of the shard at a place."""
        return tuple(
            self.partitioner.piece(size, split, place).size
            for size, split in zip(shape, layout.dims, strict=True)
        )

    def nbytes(self, spec: TensorSpec, layout: Layout) -> int:
        """Return the bytes of one shard; nominal if sizes are symbolic."""
        parts = 1
        for split in layout.dims:
            parts *= self.mesh.part_count(split.axes)
        return self.partitioner.guess(product(spec.shape)) * spec.dtype.itemsize // parts

    def map_shards(
        self,
        value: ShardedTensor,
        spec: TensorSpec,
        cause: Node,
        change: Callable[[Tensor], Tensor],
    ) -> ShardedTensor:
        """Return the result of a function of the same shape, applied to each shard where it is."""
        made = self._map_places(
            value, value.layout, cause, lambda place: change(self.shard_at(value, place))
        )
        return replace(made, spec=spec)

    def reshape_shards(self, value: ShardedTensor, cause: Node) -> ShardedTensor:
        """Reshape each shard to the shape that the value's layout implies."""

        def build(place: Place) -> Tensor:
            shape = self.local_shape(value.spec.shape, value.layout, place)
            part: Tensor = REGISTRY["reshape"](self.shard_at(value, place), shape=shape)
            return part

        return self._map_places(value, value.layout, cause, build)

    def _map_places(
        self,
        value: ShardedTensor,
        layout: Layout,
        cause: Node | None,
        build: Callable[[Place], Tensor],
    ) -> ShardedTensor:
        """Build a shard for each place; once for places that share a device, an input and an
        extent."""
        parts = []
        known: dict[Any, Tensor] = {}
        for place, part in zip(self.mesh.places, value.shards, strict=True):
            own = tuple(
                self.partitioner.piece(size, split, place)
                for size, split in zip(value.spec.shape, layout.dims, strict=True)
            )
            key = (self.device_index(cause or part.node, place), part, own)
            if not self.mesh.sequential or key not in known:
                with self.on_device(place, cause or part.node):
                    known[key] = build(place)
            parts.append(known[key])
        return ShardedTensor(value.spec, layout, tuple(parts))

    def _map_groups(
        self,
        value: ShardedTensor,
        layout: Layout,
        axes: Sequence[str],
        build: Callable[[list[Place], list[Tensor]], list[Tensor]],
    ) -> ShardedTensor:
        """Build the shards of each group along some mesh axes; once for groups with the same inputs
        and extents."""
        parts: dict[Place, Tensor] = {}
        known: dict[Any, list[Tensor]] = {}
        for group in self.mesh.groups(*axes):
            own = [self.shard_at(value, place) for place in group]
            pieces = [self._extents(value, layout, place) for place in group]
            key = (*own, *map(tuple, pieces))
            if key not in known or not self.mesh.sequential:
                known[key] = [
                    self._with_symbolic_shape(tensor, value, layout, place)
                    for tensor, place in zip(build(group, own), group, strict=True)
                ]
            parts.update(zip(group, known[key], strict=True))
        return ShardedTensor(value.spec, layout, tuple(parts[p] for p in self.mesh.places))

    def _with_symbolic_shape(
        self, tensor: Tensor, value: ShardedTensor, layout: Layout, place: Place
    ) -> Tensor:
        """Give a shard the symbols of its extent. Sums of the symbols of extents equal the whole
        size."""
        shape = self.local_shape(value.spec.shape, layout, place)
        if tensor.shape == shape:
            return tensor
        with self.on_device(place, tensor.node.origin or tensor.node):
            named: Tensor = REGISTRY["reshape"](tensor, shape=shape)
        return named

    def _extents(self, value: ShardedTensor, layout: Layout, place: Place) -> list[ShardExtent]:
        """Return the extent of each axis at a place."""
        axes = zip(value.spec.shape, layout.dims, strict=True)
        return [self.partitioner.piece(size, split, place) for size, split in axes]

    def sent_bytes(
        self, parts: Iterable[tuple[Place, Tensor]], to: Place, cause: Node
    ) -> dict[SentTensor, int]:
        """Return the bytes of each shard that a place receives from other places."""
        there = self.device_of(cause, to) if self.mesh.sequential else to
        return {
            (part, there): self.partitioner.guess(product(part.shape)) * part.spec.dtype.itemsize
            for place, part in parts
            if place != to and not (self.mesh.sequential and self.device_of(cause, place) == there)
        }


__all__ = ["CROSS_DEVICE_SCOPE", "ShardBuilder"]

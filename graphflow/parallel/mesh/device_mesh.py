"""A mesh of devices: named axes, and a device for each place.

A mesh such as {"data": 2, "model": 2} has four places. A place is a tuple of coordinates, one for
each axis. A size that is split along an axis has one extent for each coordinate
(`size_partitioner.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from math import prod

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import Node

MICRO = "micro"
"""The mesh axis of micro-batches, which run one after the other on the same device."""
PATH = "way"
"""The mesh axis of a bidirectional pipeline: one coordinate for each path of micro-batches through
the devices. Each path has weights of its own."""


Place = tuple[int, ...]
"""The coordinates of a shard: its number along each axis of the mesh."""


@dataclass(frozen=True)
class DeviceAssignment:
    """The devices of nodes, for meshes in which a place alone does not fix them (pipelines).

    Graphs are built from device indices, not from the devices. So a graph is the same, with the
    same bits, on every cluster, and on a single device.

    Attributes:
        device_index: maps a node of the whole graph and a place to the index of a device.
        devices: the devices, by index.
    """

    device_index: Callable[[Node, Place], int]
    devices: Sequence[DeviceName]


@dataclass(frozen=True)
class Mesh:
    """Named axes, and a device for each place.

    Args:
        sizes: the sizes of the axes, in order.
        devices: the devices of the places; the last axis runs fastest.
        sequential: the axes along which places share a device and run one after the other.
    """

    sizes: Mapping[str, int]
    devices: Sequence[DeviceName]
    sequential: frozenset[str] = field(default_factory=frozenset)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(self.sizes)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """All places, in row-major order."""
        return tuple(itertools.product(*map(range, self.sizes.values())))

    def index_of(self, place: Place) -> int:
        """Return the row-major index of a place. Values of all places are stored in this order."""
        number = 0
        for at, size in zip(place, self.sizes.values(), strict=True):
            number = number * size + at
        return number

    def coordinate(self, place: Place, axis: str) -> int:
        """Return a place's coordinate along an axis."""
        return place[self.names.index(axis)]

    def device_index(self, place: Place) -> int:
        """Return the index that places share if they share a device along sequential axes."""
        pairs = zip(self.names, place, strict=True)
        return self.index_of(tuple(0 if name in self.sequential else at for name, at in pairs))

    def group(self, place: Place, *axes: str) -> list[Place]:
        """Return the places that differ from a place only along some axes, in order."""
        own = [
            range(size) if name in axes else (at,)
            for (name, size), at in zip(self.sizes.items(), place, strict=True)
        ]
        return [*itertools.product(*own)]

    def groups(self, *axes: str) -> Iterator[list[Place]]:
        """Yield all groups of places along some axes."""
        for place in self.places:
            if not any(self.coordinate(place, axis) for axis in axes):
                yield self.group(place, *axes)

    def part_count(self, axes: Sequence[str]) -> int:
        """Return into how many parts a size is split along some axes."""
        return prod(self.sizes[a] for a in axes)

    def describe_parts(self, axes: Sequence[str]) -> str:
        """Describe, for messages, into how many parts a size is split: `2 (data) × 4
        micro-batches`."""
        named = [f"{self.sizes[a]} ({a})" for a in axes if a not in (MICRO, PATH)]
        turns = self.part_count([a for a in axes if a in (MICRO, PATH)])
        return " × ".join(named + [f"{turns} micro-batches"] * (turns > 1))

    def tag(self, place: Place) -> str:
        """Return the suffix of names at a place: `@data=0,model=1`."""
        return self._tags[place]

    @cached_property
    def _tags(self) -> dict[Place, str]:
        return {
            place: "@" + ",".join(f"{n}={i}" for n, i in zip(self.names, place, strict=True))
            for place in self.places
        }

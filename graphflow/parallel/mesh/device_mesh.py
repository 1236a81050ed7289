"""A mesh of devices, and how sizes are cut along it.

A mesh has named axes, {"data": 2, "model": 2}; each of its places is a device. A size that is cut
along some of these axes has a piece at each place: the first pieces are larger by one where it does
not divide, as numpy's array_split has it.
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
"""The place of a shard: its number along each axis of the mesh."""


@dataclass(frozen=True)
class DeviceAssignment:
    """Where what stands for a node at a place is, if not where the place is.

    What is built is told by homes, not by the devices that they are on: it is the same graph, of
    the same bits, on any cluster, one of a single device too.

    Attributes:
        of: the number of the home.
        devices: of the homes.
    """

    device_index: Callable[[Node, Place], int]
    devices: Sequence[DeviceName]


@dataclass(frozen=True)
class Mesh:
    """Named axes, and a device for each place.

    Args:
        sizes: of the axes, in order.
        devices: of the places, the last axis running fastest.
        local: axes along which the places share a device: they take turns.
    """

    sizes: Mapping[str, int]
    devices: Sequence[DeviceName]
    sequential: frozenset[str] = field(default_factory=frozenset)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        return tuple(itertools.product(*map(range, self.sizes.values())))

    def index_of(self, place: Place) -> int:
        """The place's number, by which what has a value at each place is ordered."""
        number = 0
        for at, size in zip(place, self.sizes.values(), strict=True):
            number = number * size + at
        return number

    def coordinate(self, place: Place, axis: str) -> int:
        """The place's number along an axis."""
        return place[self.names.index(axis)]

    def device_index(self, place: Place) -> int:
        """A number that places have in common if they share a device to take turns."""
        pairs = zip(self.names, place, strict=True)
        return self.index_of(tuple(0 if name in self.sequential else at for name, at in pairs))

    def group(self, place: Place, *axes: str) -> list[Place]:
        """The places along some axes that differ in nothing else, in order."""
        own = [
            range(size) if name in axes else (at,)
            for (name, size), at in zip(self.sizes.items(), place, strict=True)
        ]
        return [*itertools.product(*own)]

    def groups(self, *axes: str) -> Iterator[list[Place]]:
        """All groups along some axes."""
        for place in self.places:
            if not any(self.coordinate(place, axis) for axis in axes):
                yield self.group(place, *axes)

    def part_count(self, axes: Sequence[str]) -> int:
        return prod(self.sizes[a] for a in axes)

    def describe_parts(self, axes: Sequence[str]) -> str:
        """Into what a size is cut along some axes, for people: `2 (data) × 4 micro-batches`."""
        named = [f"{self.sizes[a]} ({a})" for a in axes if a not in (MICRO, PATH)]
        turns = self.part_count([a for a in axes if a in (MICRO, PATH)])
        return " × ".join(named + [f"{turns} micro-batches"] * (turns > 1))

    def tag(self, place: Place) -> str:
        """How what is at a place is named: `@data=0,model=1`."""
        return self._tags[place]

    @cached_property
    def _tags(self) -> dict[Place, str]:
        return {
            place: "@" + ",".join(f"{n}={i}" for n, i in zip(self.names, place, strict=True))
            for place in self.places
        }

"""Layouts of tensors on a mesh, and records of the communication between places.

Along the axes that split it, each place has a shard; along the others, each has everything. A
layout may also be partial: then the tensor is the sum (maximum, …) of what all places have.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import field, replace
from functools import cache, cached_property

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Location, Tensor
from graphflow.ir.spec import TensorSpec
from graphflow.parallel.mesh.axis_split import WHOLE, AxisSplit

Partial = tuple[tuple[str, str], ...]
"""Pairs of a mesh axis along which a value is partial, and how its parts are combined ("sum",
…)."""


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor on a mesh: a split for each axis, and the partial results still to be
    combined.

    Attributes:
        dims: the split of each axis.
        partial: the mesh axes along which the value is partial.
    """

    dims: tuple[AxisSplit, ...]
    partial: Partial = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.partial))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def is_whole(self) -> bool:
        """True if every place has everything, and nothing is left to be combined."""
        return not self.partial and not any(self.dims)

    def axes(self) -> set[str]:
        """Return the mesh axes that the layout uses."""
        return {a for split in self.dims for a in split.axes} | {a for a, _ in self.partial}

    def with_dim(self, d: int, split: AxisSplit) -> Layout:
        """Return the layout with another split of axis `d`."""
        return replace(self, dims=(*self.dims[:d], split, *self.dims[d + 1 :]))

    def __str__(self) -> str:
        axes = ", ".join("×".join(split.axes) or "·" for split in self.dims)
        rest = "".join(f" {kind} over {axis}" for axis, kind in self.partial)
        return f"({axes}){rest}"


@cache  # one entry for each rank
def whole(rank: int) -> Layout:
    """Return the layout in which every place has everything."""
    return Layout((WHOLE,) * rank)


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """The shards of one tensor of the whole graph, one at each place.

    Attributes:
        spec: the spec of the whole tensor.
        layout: its layout on the mesh.
        shards: the shards, in the order of `Mesh.places`.
    """

    spec: TensorSpec
    layout: Layout
    shards: tuple[Tensor, ...]


SentTensor = tuple[Tensor, Hashable]
"""A tensor and the place or device that it goes to; for the result of a collective, (tensor,
None)."""


@dataclass(frozen=True)
class CommunicationRecord:
    """A collective, or another exchange between places, that the partitioner inserted.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "halo", or "meeting"
            (shards that finish an op together); "fetch" for what goes to the first place, to be
            fetched.
        axis: the mesh axis.
        tensor: the name of the tensor.
        bytes: the total of bytes that travel between places.
        cause: the name of the node that needed the exchange.
        location: the user's line.
        sent: the bytes of each part. Passes may find that a part was sent before (`report.py`).
        plain: with a filter, the bytes that would travel without it; None without a filter.
    """

    kind: str
    axis: str
    tensor: str
    bytes: int
    cause: str
    location: Location
    sent: Mapping[SentTensor, float] = field(default_factory=dict, repr=False, compare=False)
    plain: int | None = None

    def restrict_to(self, sent: Mapping[SentTensor, float]) -> CommunicationRecord:
        """Return the record of those parts only that are in `sent`."""
        return replace(self, bytes=round(sum(sent.values())), sent=sent)

"""How tensors lie on a mesh: a piece at each place along the axes that are split, the whole along
the others; or a partial result, which all parts together (their sum, largest, …) make whole.
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
"""Along which axes of the mesh a value is partial, and how parts are combined."""


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh."""

    dims: tuple[AxisSplit, ...]
    partial: Partial = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.partial))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def is_whole(self) -> bool:
        """Whether every place has everything, and nothing is left to be combined."""
        return not self.partial and not any(self.dims)

    def axes(self) -> set[str]:
        """The axes of the mesh in use."""
        return {a for split in self.dims for a in split.axes} | {a for a, _ in self.partial}

    def with_dim(self, d: int, split: AxisSplit) -> Layout:
        return replace(self, dims=(*self.dims[:d], split, *self.dims[d + 1 :]))

    def __str__(self) -> str:
        told = ", ".join("×".join(split.axes) or "·" for split in self.dims)
        rest = "".join(f" {kind} over {axis}" for axis, kind in self.partial)
        return f"({told}){rest}"


@cache  # of as many entries as there are ranks
def whole(rank: int) -> Layout:
    """Every place has everything."""
    return Layout((WHOLE,) * rank)


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """What stands for a tensor: a part at each place."""

    spec: TensorSpec
    layout: Layout
    shards: tuple[Tensor, ...]


SentTensor = tuple[Tensor, Hashable]
"""A tensor that goes to a place, or a device; or a result of a collective, and None."""


@dataclass(frozen=True)
class CommunicationRecord:
    """A collective that was inserted.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "halo", or "meeting" where
            shards finish an op together; "fetch" is what goes to the first place, to be fetched.
        axis: of the mesh.
        tensor: the name of what moves.
        bytes: that travel between places, in all.
        cause: the node that asked for it.
        location: the user's line.
        sent: the bytes of each of its parts: passes find some that were sent before (`report.py`).
    """

    kind: str
    axis: str
    tensor: str
    bytes: int
    cause: str
    location: Location
    sent: Mapping[SentTensor, float] = field(default_factory=dict, repr=False, compare=False)

    def restrict_to(self, sent: Mapping[SentTensor, float]) -> CommunicationRecord:
        """What is left if only so much is sent."""
        return replace(self, bytes=round(sum(sent.values())), sent=sent)

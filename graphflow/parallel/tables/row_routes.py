"""The distinct rows that places look up, by owner."""

from __future__ import annotations

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Tensor
from graphflow.parallel.mesh.layouts import ShardedTensor


@dataclass(frozen=True, eq=False)
class RowRoute:
    """The distinct rows that one place looks up, by owner.

    Attributes:
        inverse: the position of each id among the distinct rows.
        numbers: how many rows of each owner there are.
        keys: the keys of each owner, padded.
        sent: the same, of which only the keys in use travel.
    """

    inverse: Tensor
    numbers: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class LookupRoutes:
    """The routes of one lookup at all places.

    Attributes:
        ids: the ids as they are split.
        routes: the route of each place.
    """

    ids: ShardedTensor
    routes: tuple[RowRoute, ...]

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes along which places have different ids."""
        return tuple(axis for split in self.ids.layout.dims for axis in split.axes)


__all__ = ["LookupRoutes", "RowRoute"]

"""How one size is split over axes of a mesh: splits, and the part that a shard has."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.spec import (
    Outer,
    Size,
    segment_count,
)


class ShardExtent(NamedTuple):
    """The part of a size that a shard has."""

    start: Size
    size: Size
    total: Size

    @property
    def stop(self) -> Size:
        return self.start + self.size


@dataclass(frozen=True)
class AxisSplit:
    """How a size is cut: along which axes of the mesh, the first one outermost, in multiples of a
    unit. What was several axes and became one may be cut along an inner one of these: then it has
    `outer` rows, of each of which a shard has a piece. These are of equal length; or of such
    lengths, where queries stand beside fewer keys and values. Where the outer one of them is cut,
    too, `over` says how: a shard has so many rows, and its piece of each; `axes` are those of both.
    """

    axes: tuple[str, ...] = ()
    unit: Size = 1
    outer: Outer = 1
    over: AxisSplit | None = None

    def __bool__(self) -> bool:
        return bool(self.axes)

    @property
    def rows(self) -> Size:
        """How many rows of length 1 there are."""
        return segment_count(self.outer)

    def drop_last(self) -> AxisSplit:
        return self.keep_first(len(self.axes) - 1)

    def keep_first(self, count: int) -> AxisSplit:
        """Along the first few axes only."""
        if self.over is not None and count <= len(self.over.axes):
            return self.over.keep_first(count)
        return replace(self, axes=self.axes[:count]) if count else WHOLE

    @property
    def inner(self) -> AxisSplit:
        """How each row is cut."""
        done = 0 if self.over is None else len(self.over.axes)
        return AxisSplit(self.axes[done:], self.unit)

    def combine_with(self, other: AxisSplit, size: Size) -> AxisSplit | None:
        """Both, of a size whose rows the one cuts, and other axes of the mesh each row."""
        over, rows = (self, other) if self.outer == 1 else (other, self)
        plain = over.outer == 1 and over.over is rows.over is None
        if not plain or rows.outer == 1 or isinstance(rows.outer, tuple) or not over or not rows:
            return None
        if set(over.axes) & set(rows.axes) or over.unit * rows.outer != size:
            return None
        return replace(rows, axes=over.axes + rows.axes, over=over)

    def scale_by(self, factor: Size, outer: Outer = 1) -> AxisSplit:
        """The same, each element being `factor` many, in `outer` times as many rows; whole where
        that cannot be said, rows being of unlike lengths."""
        if not self.axes:
            return self
        if self.over is not None:
            over = self.over.scale_by(factor)
            return replace(self, unit=self.unit * factor, over=over) if outer == 1 else WHOLE
        if 1 in (self.outer, outer):
            rows = self.outer if outer == 1 else outer
        elif isinstance(self.outer, tuple) or isinstance(outer, tuple):
            return WHOLE
        else:
            rows = self.outer * outer
        return AxisSplit(self.axes, self.unit * factor, rows)


WHOLE = AxisSplit()

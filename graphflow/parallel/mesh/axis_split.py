"""Splits of one axis of a tensor over axes of a mesh, and the extents that shards have."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.spec import (
    Outer,
    Size,
    segment_count,
)
from graphflow.parallel.mesh.row_ranges import RowRanges


class ShardExtent(NamedTuple):
    """The part of a size that a shard has: `size` elements from `start` on, of `total`."""

    start: Size
    size: Size
    total: Size

    @property
    def stop(self) -> Size:
        """The end of the extent, exclusive."""
        return self.start + self.size


@dataclass(frozen=True)
class AxisSplit:
    """The split of a size over mesh axes.

    A reshape may merge several axes into one and leave an inner one split. The merged axis then
    consists of rows, and a shard has a piece of each row.

    Attributes:
        axes: the mesh axes, the outermost first; with `over`, those of both levels.
        unit: extents are multiples of this number of elements.
        outer: the number of rows; or the relative lengths of rows that differ, as in a packed
            projection with more queries than keys and values.
        over: the split of the rows themselves, if they are distributed. A shard then has some of
            the rows, and its piece of each.
        ranges: the owners of ranges of the axis, if places do not have one contiguous part each.
    """

    axes: tuple[str, ...] = ()
    unit: Size = 1
    outer: Outer = 1
    over: AxisSplit | None = None
    ranges: RowRanges | None = None

    def __bool__(self) -> bool:
        return bool(self.axes)

    @property
    def is_contiguous(self) -> bool:
        """Whether a shard is one contiguous part of the axis."""
        return self.outer == 1 and self.ranges is None

    @property
    def rows(self) -> Size:
        """The number of rows of length 1."""
        return segment_count(self.outer)

    def drop_last(self) -> AxisSplit:
        """Return the split without its innermost mesh axis."""
        return self.keep_first(len(self.axes) - 1)

    def keep_first(self, count: int) -> AxisSplit:
        """Return the split along the outermost `count` mesh axes only."""
        if self.over is not None and count <= len(self.over.axes):
            return self.over.keep_first(count)
        return replace(self, axes=self.axes[:count]) if count else WHOLE

    @property
    def inner(self) -> AxisSplit:
        """The split of each row."""
        done = 0 if self.over is None else len(self.over.axes)
        return AxisSplit(self.axes[done:], self.unit)

    def combine_with(self, other: AxisSplit, size: Size) -> AxisSplit | None:
        """Return the split of a size whose rows one split distributes, and whose rows the other
        split divides. None if the two do not combine so."""
        if self.ranges is not None or other.ranges is not None:
            return None
        over, rows = (self, other) if self.outer == 1 else (other, self)
        plain = over.outer == 1 and over.over is rows.over is None
        if not plain or rows.outer == 1 or isinstance(rows.outer, tuple) or not over or not rows:
            return None
        if set(over.axes) & set(rows.axes) or over.unit * rows.outer != size:
            return None
        return replace(rows, axes=over.axes + rows.axes, over=over)

    def scale_by(self, factor: Size, outer: Outer = 1) -> AxisSplit:
        """Return the split of an axis with `factor` elements for each element of this one, repeated
        in `outer` rows. WHOLE if rows of unlike lengths would have to be combined."""
        if not self.axes:
            return self
        if self.ranges is not None:
            return self if factor == outer == 1 else WHOLE
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
"""The split of an axis that every place has in full."""

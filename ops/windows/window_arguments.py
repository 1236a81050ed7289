"""Sliding windows over spatial axes: users' arguments, sizes, and the elements under a tap.

Convolution, pooling and unfolding share them. Tap k of the window at position o of an axis reads
element o·stride - before + k·dilation; elements outside the axis are padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product as pairs_of
from typing import Any, NamedTuple

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Tensor, as_tensor
from graphflow.ir.spec import (
    Dim,
    Shape,
    Size,
    equate,
    floordiv,
    maximum,
    minimum,
    require_nonnegative,
    show_shape,
)
from graphflow.ops.tensors.shape import moveaxis

Ints = tuple[int, ...]
Pairs = tuple[tuple[Size, Size], ...]


class Windows(NamedTuple):
    """Windows of known sizes, as kernels take them; one entry for each spatial axis."""

    kernel: Ints
    stride: Ints
    before: Ints
    dilation: Ints
    out: Ints  # positions

    @classmethod
    def from_attributes(
        cls, kernel: Ints, stride: Ints, padding: Any, dilation: Ints, out: Ints
    ) -> Windows:
        """Return the windows that the attributes of an op describe; `padding` holds pairs."""
        return cls(kernel, stride, tuple(before for before, _ in padding), dilation, out)

    def on_axis(self, axis: int) -> Windows:
        """Return the windows along one spatial axis."""
        return Windows(*(field[axis : axis + 1] for field in self))


@lru_cache(maxsize=1024)
def drop_unseen_taps(windows: Windows, space: Ints) -> tuple[Windows, tuple[slice, ...]]:
    """Return the windows without outer taps that see padding only, and the taps that are left.

    Args:
        space: the spatial axes of the input.
    """
    kept = []
    for n, kernel, stride, before, dilation, out in zip(space, *windows, strict=True):
        seen = [
            k
            for k in range(kernel)
            if any(0 <= p * stride - before + k * dilation < n for p in range(out))
        ] or [0]
        kept.append(slice(seen[0], seen[-1] + 1))
    axes = zip(windows.before, kept, windows.dilation, strict=True)
    return windows._replace(
        kernel=tuple(taps.stop - taps.start for taps in kept),
        before=tuple(before - taps.start * dilation for before, taps, dilation in axes),
    ), tuple(kept)


# Users' arguments -------------------------------------------------------------------------------


def require_image(x: Any) -> Tensor:
    """Return x as a tensor with a batch axis, a channel axis and at least one spatial axis.

    Raises:
        ShapeError: x has fewer than three axes.
    """
    tensor: Tensor = as_tensor(x)
    if tensor.ndim < 3:
        raise ShapeError(f"expected x of (batch, channels, *space), got {show_shape(tensor.shape)}")
    return tensor


def move_channels_first(x: Any, channels_last: bool) -> Tensor:
    """Return x as (batch, channels, *space), from (batch, *space, channels) if `channels_last`."""
    tensor = require_image(x)
    return moveaxis(tensor, -1, 1) if channels_last else tensor


def restore_channels(y: Tensor, channels_last: bool) -> Tensor:
    """Move the channels of y back to the last axis if `channels_last`."""
    return moveaxis(y, 1, -1) if channels_last else y


def spatial_axes(rank: int, channels_last: bool) -> Ints:
    """Return the spatial axes of an image tensor of `rank` axes."""
    return tuple(range(1, rank - 1)) if channels_last else tuple(range(2, rank))


def per_axis(what: str, value: Any, rank: int, least: int = 1) -> Ints:
    """Return one int for each spatial axis, none below `least`, from an int or a list.

    Raises:
        ArgumentError: the value has another form.
    """
    entries = list(value) if isinstance(value, tuple | list) else [value] * rank
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int | np.integer) or entry < least:
            raise ArgumentError(
                f"{what} must be an int >= {least} or {rank} of them, got {value!r}"
            )
    if len(entries) != rank:
        raise ArgumentError(f"{what} {value!r} has {len(entries)} entries for {rank} spatial axes")
    return tuple(int(entry) for entry in entries)


def require_known(what: str, sizes: Shape) -> Ints:
    """Return sizes as ints.

    Raises:
        ShapeError: a size is symbolic.
    """
    result = tuple(n for n in sizes if isinstance(n, int))
    if len(result) != len(sizes):
        raise ShapeError(f"the {what} {sizes} must be known while the graph is built")
    return result


def padding_pairs(
    padding: Any, sizes: Shape, kernel: Sequence[Size], stride: Ints, dilation: Ints
) -> Pairs:
    """Return (before, after) for each axis.

    Args:
        padding: an int, an int or a pair for each axis, "valid" (none), "same" or "same_lower" (as
            many outputs as inputs divided by the stride, rounded up; an odd element of padding goes
            after, or before).

    Raises:
        ArgumentError: padding has another form.
    """
    if isinstance(padding, str):
        if padding == "valid":
            return ((0, 0),) * len(sizes)
        if padding not in ("same", "same_lower"):
            raise ArgumentError(
                f"padding must be 'same', 'same_lower', 'valid' or numbers, got {padding!r}"
            )
        return tuple(
            _same_padding(*axis, lower=padding == "same_lower")
            for axis in zip(sizes, kernel, stride, dilation, strict=True)
        )
    entries = list(padding) if isinstance(padding, tuple | list) else [padding] * len(sizes)
    if len(entries) != len(sizes):
        raise ArgumentError(
            f"padding {padding!r} has {len(entries)} entries for {len(sizes)} spatial axes"
        )
    result = []
    for entry in entries:
        both = tuple(entry) if isinstance(entry, tuple | list) else (entry, entry)
        if len(both) != 2 or not all(_is_count(p) for p in both):
            raise ArgumentError(
                "padding must be an int >= 0, or for each spatial axis one or a pair (before, "
                f"after), got {padding!r}"
            )
        result.append((both[0], both[1]))
    return tuple(result)


def _is_count(value: Any) -> bool:
    if isinstance(value, Dim):
        return True
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return bool(value >= 0)


def _same_padding(
    n: Size, kernel: Size, stride: int, dilation: int, lower: bool
) -> tuple[Size, Size]:
    positions = floordiv(n + (stride - 1), stride)
    total = maximum((positions - 1) * stride + (kernel - 1) * dilation + 1 - n, 0)
    small = floordiv(total, 2)
    return (total - small, small) if lower else (small, total - small)


# Sizes ------------------------------------------------------------------------------------------


def position_count(
    n: Size,
    kernel: Size,
    stride: int,
    padding: tuple[Size, Size],
    dilation: int,
    ceil_mode: bool = False,
) -> Size:
    """Return how many windows fit on an axis.

    With `ceil_mode` it counts the window that hangs over the end, too, if that begins inside the
    axis or the padding before it.

    Raises:
        ShapeError: no window fits.
    """
    span = (kernel - 1) * dilation + 1
    what = f"windows of size {span} on an axis of size {n} padded by {show_shape(padding)}"
    require_nonnegative(kernel - 1, f"{what}: a window must have one element or more, got {kernel}")
    if min(stride, dilation) < 1:
        raise ShapeError(
            f"{what}: stride and dilation must be at least 1, got {stride} and {dilation}"
        )
    # Negative padding crops: a shard of a convolution may begin inside its input. The padding after
    # an axis may be negative for transposes, too: see `conv._transpose_padding`.
    if isinstance(padding[0], Dim):
        require_nonnegative(padding[0], f"{what}: the padding before it is negative")
    room = n + padding[0] + padding[1] - span
    count = floordiv(room + (stride - 1 if ceil_mode else 0), stride) + 1
    if ceil_mode:
        count = minimum(count, floordiv(n + padding[0] - 1, stride) + 1)
    if isinstance(count, int):
        if count < 1:
            raise ShapeError(f"{what}: not one fits")
    else:
        equate(maximum(count, 1), count, what)
    return count


def positions_shape(
    sizes: Shape, kernel: Sequence[Size], stride: Ints, padding: Pairs, dilation: Ints
) -> Shape:
    """Return `position_count` for each axis."""
    axes = zip(sizes, kernel, stride, padding, dilation, strict=True)
    return tuple(position_count(*axis) for axis in axes)


# Taps -------------------------------------------------------------------------------------------


def tap_slices(n: int, out: int, stride: int, offset: int) -> tuple[slice, slice]:
    """Return the positions o for which element o·stride + offset lies inside an axis of size n.

    The second slice selects these elements.
    """
    first = max(0, -(offset // stride))
    last = min(out - 1, (n - 1 - offset) // stride)
    if last < first:
        return slice(0, 0), slice(0, 0)
    start = first * stride + offset
    return slice(first, last + 1), slice(start, last * stride + offset + 1, stride)


def taps(sizes: Ints, windows: Windows) -> Iterator[tuple[int, tuple[Any, ...], tuple[Any, ...]]]:
    """Yield for each tap in row-major order its number, its valid positions and their elements.

    A position is valid if the tap lies inside the axes. Both are indices of the last axes.
    """
    per: list[list[tuple[slice, slice]]] = []
    for n, kernel, stride, before, dilation, out in zip(sizes, *windows, strict=True):
        per.append([tap_slices(n, out, stride, k * dilation - before) for k in range(kernel)])
    for number, chosen in enumerate(pairs_of(*per)):
        where, elements = zip(*chosen, strict=True)
        if all(s.start < s.stop for s in where):
            yield number, (..., *where), (..., *elements)

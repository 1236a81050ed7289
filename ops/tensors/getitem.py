"""`x[...]`, lowered to slice, squeeze, expand_dims and take.

Axes that several arrays index are merged into one first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Tensor, function
from graphflow.ir.spec import Dim, Size, floordiv, minimum, product
from graphflow.ops.tensors.flat_indices import ravel_multi_index
from graphflow.ops.tensors.shape import expand_dims, moveaxis, reshape, squeeze
from graphflow.ops.tensors.slicing import slice_op
from graphflow.ops.tensors.take import as_indices, take

_Window = tuple[Size, Size, Size]  # start, size, step


@function
def getitem(x: Tensor, index: Any) -> Tensor:
    """Return `x[index]` for ints, slices, None, Ellipsis, and int arrays or tensors.

    One array selects as `take` does. Several broadcast and select positions together, as in numpy.
    On an axis of unknown size n, bounds clip as in numpy, but n must be at least 1 if a bound is 1
    or -1 away from an end. A slice between a bound from the front and one from the back must not be
    inside out. Both are checked when a size is fed.

    Raises:
        ArgumentError: the index holds a boolean mask, or anything else.
        ShapeError: an int is outside its axis, there are too many indices, or arrays do not
            broadcast.
    """
    items = _expand_ellipsis(index, x.ndim)
    windows: list[_Window] = []
    dropped: list[int] = []
    layout: list[str] = []  # of the result: "axis", "new", "take"
    taken: list[Tensor] = []
    for item in items:
        if item is None:
            layout.append("new")
            continue
        axis = len(windows)
        n = x.shape[axis]
        first: Size = 0
        count: Size = n
        stride: Size = 1
        if isinstance(item, slice):
            first, count, stride = _window_of(item, n, axis)
            layout.append("axis")
        elif isinstance(item, int | np.integer) and not isinstance(item, bool | np.bool_):
            first, count = _position(int(item), n, axis), 1
            dropped.append(axis)
        else:
            taken.append(_index_tensor(item))
            layout.append("take")
        windows.append((first, count, stride))
    if any(w != (0, n, 1) for w, n in zip(windows, x.shape, strict=True)):
        start, size, step = zip(*windows, strict=True)
        x = slice_op(x, start=start, size=size, step=step)
    x = expand_dims(squeeze(x, dropped), [i for i, kind in enumerate(layout) if kind == "new"])
    if not taken:
        return x
    at = [i for i, kind in enumerate(layout) if kind == "take"]
    x, places = _merge_indexed_axes(x, taken, at)
    x = take(x, places, at[0])
    # numpy moves the axes of separated ints and arrays to the front
    if at[0] and _are_separated(items):
        axes = list(range(at[0], at[0] + places.ndim))
        x = moveaxis(x, axes, list(range(places.ndim)))
    return x


def _merge_indexed_axes(x: Tensor, indices: list[Tensor], axes: list[int]) -> tuple[Tensor, Tensor]:
    """Merge the indexed axes of x at the first of them; return x and the indices into that axis."""
    if len(axes) == 1:
        return x, indices[0]
    first, end = axes[0], axes[0] + len(axes)
    x = moveaxis(x, axes, list(range(first, end)))
    sizes = x.shape[first:end]
    merged = reshape(x, (*x.shape[:first], product(sizes), *x.shape[end:]))
    return merged, ravel_multi_index(indices, sizes)


def _expand_ellipsis(index: Any, rank: int) -> list[Any]:
    """Return the index of each axis (and None for new ones), with Ellipsis written out."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > rank:
        raise ShapeError(f"{used} indices for a tensor of rank {rank}")
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise ArgumentError("an index holds one Ellipsis at most")
    at = dots[0] if dots else len(items)
    return items[:at] + [slice(None)] * (rank - used) + items[at + 1 :]


def _are_separated(items: Sequence[Any]) -> bool:
    """Return True if slices or new axes stand between the ints and arrays of an index."""
    advanced = [
        i for i, item in enumerate(items) if item is not None and not isinstance(item, slice)
    ]
    return advanced[-1] - advanced[0] >= len(advanced)


def _index_tensor(item: Any) -> Tensor:
    if not isinstance(item, Tensor | np.ndarray | list | bool | np.bool_):
        raise ArgumentError(
            "an index must be an int, a slice, None, Ellipsis or an int tensor, got "
            f"{type(item).__name__} {item!r}"
        )
    tensor = as_indices(item)
    if tensor.dtype.kind == "b":
        raise ArgumentError(
            "a boolean mask selects a number of elements that is known only when it runs; "
            "use gf.where(mask, x, 0), or gf.compress(mask, x, size) with the most there may be"
        )
    if tensor.dtype.kind not in "iu":
        raise ArgumentError(
            f"an index must be an int tensor, got {tensor.dtype}; convert with .astype"
        )
    return tensor


def _position(i: int, n: Size, axis: int) -> Size:
    """Return an int index as counted from the front; an unknown size is checked when it is fed."""
    if isinstance(n, int) and not -n <= i < n:
        raise ShapeError(f"index {i} is outside axis {axis} of size {n}")
    return i if i >= 0 else n + i


def _window_of(item: slice, n: Size, axis: int) -> _Window:
    """Return start, size and step of a Python slice on an axis of size n."""
    stride = 1 if item.step is None else item.step
    bounds = (item.start, item.stop)
    if not isinstance(stride, int | np.integer) or stride == 0:
        raise ArgumentError(
            f"axis {axis}: the step of a slice must be an int other than 0, got {stride!r}"
        )
    if not all(b is None or isinstance(b, int | np.integer | Dim) for b in bounds):
        raise ArgumentError(f"axis {axis}: the bounds of a slice must be ints, got {item}")
    stride = int(stride)
    first, last = (int(b) if isinstance(b, np.integer) else b for b in bounds)
    if isinstance(n, int) and not any(isinstance(b, Dim) for b in bounds):
        indices = range(n)[first:last:stride]
        return indices.start if len(indices) else 0, len(indices), stride
    if stride < 0:
        if bounds != (None, None):
            raise ArgumentError(
                f"axis {axis} of unknown size {n}: with a negative step, slice it all"
            )
        return n - 1, floordiv(n + (-stride - 1), -stride), stride
    start = 0 if first is None else _clip_bound(first, n)
    stop = n if last is None else _clip_bound(last, n)
    length = stop - start
    if _is_empty_range(first, last) or (isinstance(length, int) and length < 0):
        length = 0
    return start, floordiv(length + (stride - 1), stride), stride


def _is_empty_range(start: Any, stop: Any) -> bool:
    """Return True if two int bounds count from one end and leave nothing between them."""
    if not isinstance(start, int) or not isinstance(stop, int):
        return False
    return (start < 0) == (stop < 0) and start >= stop


def _clip_bound(bound: int | Dim, n: Size) -> Size:
    """Return a slice's bound on an unknown size, clipped as in numpy.

    Bounds of 1 and -1 stay as they are; the window is checked when the size is fed.
    """
    if isinstance(bound, Dim):
        return bound
    inside = abs(bound) if abs(bound) <= 1 else minimum(n, abs(bound))
    return inside if bound >= 0 else n - inside

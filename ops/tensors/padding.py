"""`gf.pad`: elements before and after those of a tensor, in numpy's modes.

It has no op of its own. Mode "constant" is the op `pad`; other modes concatenate windows of x,
flipped or not. So gradients, batching and sharding need no rules of their own.
"""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Tensor, as_tensor, function, promote_inputs
from graphflow.ir.spec import Size, normalize_shape
from graphflow.ops.tensors.repetition import repeat
from graphflow.ops.tensors.slicing import concat, flip, pad_op, window

_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")


@function
def pad(x: Tensor, widths: Any, mode: str = "constant", value: Any = None) -> Tensor:
    """Add elements before and after those of each axis, in one of numpy's modes.

    Args:
        widths: one count for all sides, (before, after) for all axes, or one such pair for each
            axis.
        mode: "constant" (`value`), "edge" (repeats the outermost element), "reflect" (mirrors at
            the outermost element), "symmetric" (mirrors behind it), "wrap" (continues from the
            other end). PyTorch calls "edge" replicate, and "wrap" circular.
        value: for "constant"; default: 0 or False.

    Raises:
        ArgumentError: the mode is unknown, widths have another form, or a mode takes no value.
        ShapeError: a width is negative, or there are no elements to repeat. An axis of unknown size
            cannot be extended by more than its own length.
        DTypeError: the value does not fit the dtype of x.
    """
    x = as_tensor(x)
    if not (isinstance(mode, str) and mode in _MODES):
        raise ArgumentError(
            f"mode {mode!r} is not known; use {', '.join(map(repr, _MODES))} (PyTorch's replicate "
            "is 'edge', its circular 'wrap')"
        )
    pairs = _pad_pairs(widths, x.ndim)
    before = normalize_shape([b for b, _ in pairs], "pad")
    after = normalize_shape([a for _, a in pairs], "pad")
    if mode != "constant":
        if value is not None:
            raise ArgumentError(f"mode {mode!r} repeats elements of x and takes no value")
        for axis, (first, last) in enumerate(zip(before, after, strict=True)):
            x = _extend_axis(x, axis, first, last, mode)
        return x
    if value is None:
        value = x.dtype.type(0).item()
    promote_inputs("pad", (x, value))  # refuses a value that does not fit the dtype
    if not any(before) and not any(after):
        return x
    shape = tuple(b + n + a for b, n, a in zip(before, x.shape, after, strict=True))
    result: Tensor = pad_op(x, shape=shape, start=before, step=(1,) * x.ndim, value=value)
    return result


def _pad_pairs(widths: Any, rank: int) -> list[tuple[Any, Any]]:
    if not isinstance(widths, tuple | list):
        return [(widths, widths)] * rank
    if not any(isinstance(w, tuple | list) for w in widths):
        widths = [widths] * rank
    if len(widths) != rank or any(len(w) != 2 for w in widths):
        raise ArgumentError(f"{rank} axes need {rank} pairs (before, after), got {widths}")
    return [(b, a) for b, a in widths]


def _extend_axis(x: Tensor, axis: int, before: Size, after: Size, mode: str) -> Tensor:
    """Add x's own elements before and after those of an axis."""
    n = x.shape[axis]
    if not before and not after:
        return x
    if n == 0:
        raise ShapeError(f"axis {axis} of size 0 has no element to repeat; use mode 'constant'")
    if mode == "edge" or (mode == "reflect" and n == 1):  # of one element, as numpy does it
        first = repeat(window(x, axis, 0, 1), before, axis)
        last = repeat(window(x, axis, n - 1, 1), after, axis)
        return _join_parts(x, axis, (first, before), (last, after))
    shared = 1 if mode == "reflect" else 0  # the mirror element itself is not repeated
    while before or after:  # each turn extends x by at most its own length
        size = x.shape[axis]
        most = _whole_periods(size - shared, n - shared)
        left, right = _at_most(before, most), _at_most(after, most)
        if mode == "wrap":
            first, last = window(x, axis, most - left, left), window(x, axis, size - most, right)
        else:
            first = flip(window(x, axis, shared, left), axis)
            last = flip(window(x, axis, size - shared - right, right), axis)
        x = _join_parts(x, axis, (first, left), (last, right))
        before, after = before - left, after - right
    return x


def _join_parts(
    x: Tensor, axis: int, first: tuple[Tensor, Size], last: tuple[Tensor, Size]
) -> Tensor:
    return concat([part for part, size in (first, (x, 1), last) if size], axis)


def _whole_periods(size: Size, period: Size) -> Size:
    """Return the part of `size` that is whole periods, so that copies continue the pattern."""
    if isinstance(size, int) and isinstance(period, int):
        return size // period * period
    return size


def _at_most(count: Size, most: Size) -> Size:
    """Return the smaller of two known counts; unknown ones are checked when they are fed."""
    return min(count, most) if isinstance(count, int) and isinstance(most, int) else count

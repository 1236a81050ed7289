"""Ops that go along rows: reductions, softmax, norms, losses.

Such an op has `expr(xp, *values)`, where xp has reductions over the op's axes, and `rows`, which
gives these axes. The same expression serves numpy and CuPy (`AxisReductions`) and the generator
(`expression_trace.ROWS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Op, Rows
from graphflow.ir.spec import broadcast_shapes

Sizes = tuple[int, ...]


class AxisReductions:
    """numpy or CuPy, with reductions over some axes, which stay as size 1."""

    def __init__(self, xp: Any, axes: Sizes, shape: Sizes) -> None:
        self._xp = xp
        self._axes = axes
        self._shape = shape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xp, name)

    def sum(self, x: Any) -> Any:
        return self._xp.sum(x, axis=self._axes, keepdims=True, dtype=x.dtype)

    def prod(self, x: Any) -> Any:
        return self._xp.prod(x, axis=self._axes, keepdims=True, dtype=x.dtype)

    def max(self, x: Any) -> Any:
        return self._xp.max(x, axis=self._axes, keepdims=True)

    def min(self, x: Any) -> Any:
        return self._xp.min(x, axis=self._axes, keepdims=True)

    def any(self, x: Any) -> Any:
        return self._xp.any(x, axis=self._axes, keepdims=True)

    def all(self, x: Any) -> Any:
        return self._xp.all(x, axis=self._axes, keepdims=True)

    def mean(self, x: Any) -> Any:
        return self.sum(x) / self.count(x)

    def count(self, like: Any) -> Any:
        """Return the elements of a row, as a number that takes the dtype of what it meets."""
        return float(prod(self._shape[a] for a in self._axes))

    def place(self, like: Any) -> Any:
        """Return the index of each element in its row, int32."""
        sizes = tuple(n if a in self._axes else 1 for a, n in enumerate(self._shape))
        return self._xp.arange(prod(sizes), dtype="int32").reshape(sizes)


def row_kernel(
    expr: Callable[..., Any], rows: Callable[..., Rows], squeezed: bool = False
) -> Callable[..., Any]:
    """Return the plain kernel of an op that goes along rows.

    Args:
        squeezed: whether results lack the reduced axes; they do as well with keepdims=False.
    """

    def kernel(xp: Any, *arrays: Any, **attrs: Any) -> Any:
        form = rows(*(a.shape for a in arrays), **attrs)
        assert form.axes is not None
        seen = [a.reshape(s) for a, s in zip(arrays, form.shapes, strict=True)]
        result = expr(AxisReductions(xp, form.axes, full_shape(form)), *seen, **attrs)
        if squeezed or attrs.get("keepdims") is False:
            result = xp.squeeze(result, form.axes)
        return result

    return kernel


def check_first(refuse: Callable[..., None], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that first refuses values that the op does not take."""

    def checked_kernel(xp: Any, *arrays: Any, **attrs: Any) -> Any:
        refuse(xp, *arrays, **attrs)
        return kernel(xp, *arrays, **attrs)

    return checked_kernel


def over_axes(x: Any, *others: Any, axis: Any, **attrs: Any) -> Rows:
    """Return the `rows` of an op that reduces the axes of its attribute `axis`, and whose inputs
    broadcast."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    return Rows(tuple(a % max(len(x), 1) for a in axes), (x, *others))


@dataclass(frozen=True)
class CollapsedShape:
    """A shape of which some axes may be reduced, with as few axes as its operands allow.

    Attributes:
        sizes: of the collapsed axes: at least one, and one before a reduced one.
        axes: for each operand, along which of them it has elements.
        over: as in `Region`.
    """

    sizes: Sizes
    axes: tuple[tuple[bool, ...], ...]
    over: str = ""


def orientation(shape: Sizes, axes: Sizes) -> str | None:
    """Return `over` of a region: rows if the reduced axes are last, columns if one run follows
    them.

    None: the reduced axes are interleaved with others.
    """
    flags: list[bool] = []
    for axis, size in enumerate(shape):
        if size != 1 and (not flags or flags[-1] != (axis in axes)):
            flags.append(axis in axes)
    if True not in flags or flags in ([True], [False, True]):
        return "rows"
    return "columns" if flags in ([True, False], [False, True, False]) else None


def collapse_axes(
    shape: Sequence[int], operands: Sequence[Sequence[int]], axes: Sizes | None = None
) -> CollapsedShape | None:
    """Join neighbouring axes that all operands share or lack, and that are all reduced or none.

    Axes of size 1 vanish. None if the reduced axes do not become one.

    Args:
        axes: the reduced ones; None: there are none.
    """
    over = "" if axes is None else orientation(tuple(shape), axes)
    if over is None:
        return None
    rank = len(shape)
    sizes: list[int] = []
    masks: list[tuple[bool, ...]] = []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        mask = tuple(
            axis >= rank - len(given) and given[axis - rank + len(given)] != 1 for given in operands
        )
        mask = (*mask, axes is not None and axis in axes)
        if masks and masks[-1] == mask:
            sizes[-1] *= size
        else:
            sizes.append(size)
            masks.append(mask)
    nowhere = (False,) * len(operands)
    if over:
        flags = [mask[-1] for mask in masks]
        if True not in flags:  # each row has one element
            sizes.append(1)
            masks.append((*nowhere, True))
            flags.append(True)
        behind = 2 if over == "columns" else 1
        if flags.count(True) != 1 or len(flags) < behind or not flags[-behind]:
            return None
        if len(flags) == behind:
            sizes.insert(0, 1)
            masks.insert(0, (*nowhere, False))
    if not sizes:
        sizes, masks = [1], [(*nowhere, False)]
    return CollapsedShape(tuple(sizes), tuple(zip(*(m[:-1] for m in masks), strict=True)), over)


MOST_AXES = 4
"""Collapsed axes of a region, at most."""


def full_shape(rows: Rows) -> Sizes:
    """Return the shape that an op goes over."""
    whole: Any = broadcast_shapes(*rows.shapes) if rows.whole is None else rows.whole
    sizes: Sizes = whole
    return sizes


def collapsed_form(
    op: Op, shapes: Sequence[Sizes], attrs: Mapping[str, Any]
) -> CollapsedShape | None:
    """Return how an op goes over operands of these shapes; None if it has no kernel."""
    if op.rows is None:
        whole: Any = broadcast_shapes(*shapes)
        form = collapse_axes(whole, shapes)
    else:
        rows = op.rows(*shapes, **attrs)
        seen: Any = rows.shapes
        form = collapse_axes(full_shape(rows), seen, rows.axes)
    return None if form is None or len(form.sizes) > MOST_AXES else form

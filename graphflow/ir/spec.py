"""Tensor specs: shapes, dtypes, and equations between symbolic sizes.

Shape rules (`infer` of an op) work on `TensorSpec`s only. If a rule equates two symbolic sizes, the
equation is recorded, and checked when a step is fed. This module re-exports names of `dims` and
`dtypes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShapeError
from graphflow.ir.dims import (
    Dim,
    Shape,
    Size,
    evaluate,
    floordiv,
    fresh_number,
    is_fresh,
    is_nonnegative,
    maximum,
    minimum,
    product,
    show_symbol,
    sole_symbol,
    substitute,
    symbols,
)
from graphflow.ir.dtypes import (
    BFLOAT16,
    DTYPES,
    as_dtype,
    complex_dtype,
    is_half,
    is_inexact,
    kind,
    limits,
    promote,
    real_dtype,
)

LARGEST_SIZE = 2**63 - 1
"""The largest size of an axis."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape (sizes, perhaps symbolic) and dtype of a tensor."""

    shape: Shape
    dtype: np.dtype[Any]

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> Size:
        """Number of elements."""
        return product(self.shape)

    @property
    def nbytes(self) -> Size:
        """Size of the elements, in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def is_concrete(self) -> bool:
        """True if every size is an int."""
        return all(isinstance(s, int) for s in self.shape)

    def bind(self, bindings: Mapping[str, int]) -> TensorSpec:
        """Return this spec with its symbols replaced by sizes.

        Raises:
            ShapeError: a size comes out negative.
        """
        if self.is_concrete:
            return self
        shape = tuple([evaluate(s, bindings) for s in self.shape])
        if min(shape) < 0:
            raise ShapeError(
                f"shape {show_shape(self.shape)} comes to {show_shape(shape)}, and no size is "
                f"negative, where {_show_bindings(self.shape, bindings)}; give sizes that fit"
            )
        return TensorSpec(shape, self.dtype)

    def with_shape(self, shape: Iterable[Size]) -> TensorSpec:
        """Return the spec of the same dtype and another shape."""
        return TensorSpec(tuple(shape), self.dtype)

    def with_dtype(self, dtype: Any) -> TensorSpec:
        """Return the spec of the same shape and another dtype."""
        return TensorSpec(self.shape, np.dtype(dtype))

    def __repr__(self) -> str:
        return f"{self.dtype}{show_shape(self.shape)}"


def _show_bindings(shape: Shape, bindings: Mapping[str, int]) -> str:
    names = dict.fromkeys(name for size in shape for name in symbols(size))
    return ", ".join(f"{show_symbol(name)} = {bindings[name]}" for name in names)


def nbytes(spec: TensorSpec) -> int:
    """Return the size of a tensor of known shape, in bytes."""
    return evaluate(spec.nbytes, {})


@checks_argument_names(ShapeError)
def spec(dtype: Any, shape: Any = ()) -> TensorSpec:
    """Make a TensorSpec of plain values: `spec("float32", (None, 64))`."""
    return TensorSpec(normalize_shape(shape, of=""), as_dtype(dtype))


# Equations between sizes ----------------------------------------------------------------------

Equation = tuple[Size, Size]
_equations: ContextVar[list[Equation] | None] = ContextVar("equations", default=None)


class record_equations:
    """Collect the equations that shape rules assume while the block runs.

    A class with a slot rather than a generator: the building of every node opens one.
    """

    __slots__ = ("_token",)

    def __enter__(self) -> list[Equation]:
        equations: list[Equation] = []
        self._token = _equations.set(equations)
        return equations

    def __exit__(self, *raised: object) -> None:
        _equations.reset(self._token)


def equate(a: Size, b: Size, what: str) -> Size:
    """Require two sizes to be equal, and return the one that is known better.

    If a symbol leaves it open, the equation is recorded, to be checked when a step is fed.

    Raises:
        ShapeError: both are numbers and differ; `what` begins the message.
    """
    if a == b:
        return a
    if isinstance(a, int) and isinstance(b, int):
        raise ShapeError(f"{what}: {a} != {b}")
    equations = _equations.get()
    if equations is not None:
        equations.append((a, b))
    return a if isinstance(a, int) else (b if isinstance(b, int) else a)


def require_nonnegative(size: Size, what: str) -> None:
    """Require a size to be at least 0; a symbolic one is checked when a step is fed.

    Raises:
        ShapeError: the size is negative; `what` is the message.
    """
    if not is_nonnegative(size):
        if not isinstance(size, Dim):
            raise ShapeError(what)
        equate(maximum(size, 0), size, what)


def broadcast_shapes(*shapes: Shape) -> Shape:
    """Broadcast shapes as numpy does; a symbol is equated with any other size than 1.

    Raises:
        ShapeError: two known sizes differ and neither is 1.
    """
    first = shapes[0] if shapes else ()
    if all(shape is first or shape == first for shape in shapes):
        return first
    rank = max((len(s) for s in shapes), default=0)
    result: list[Size] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, start=rank - len(shape)):
            if result[axis] == 1:
                result[axis] = size
            elif size != 1 and size != result[axis]:
                text = " and ".join(show_shape(s) for s in shapes)
                result[axis] = equate(result[axis], size, f"shapes {text} do not broadcast")
    return tuple(result)


def show_shape(shape: Sequence[Size | str]) -> str:
    """Write a shape as Python does: `(n, 64)`."""
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def show_distinctly(*things: Size | TensorSpec) -> list[str]:
    """Write sizes and specs for one message, so that different fresh symbols look different.

    Fresh symbols of the same text get numbers, in the order in which they were made.
    """
    shapes = [thing.shape if isinstance(thing, TensorSpec) else (thing,) for thing in things]
    fresh = {name for shape in shapes for size in shape for name in symbols(size) if is_fresh(name)}
    alike: dict[str, list[str]] = {}
    for name in sorted(fresh, key=fresh_number):
        alike.setdefault(show_symbol(name), []).append(name)
    numbered: dict[str, Size] = {}
    for shown, names in alike.items():
        head, dot, tail = shown.rpartition(".shape[") if ".shape[" in shown else (shown, "", "")
        if len(names) > 1:
            numbered |= {n: Dim.symbol(f"{head}#{i}{dot}{tail}") for i, n in enumerate(names, 1)}
    shapes_shown = [tuple(substitute(size, numbered) for size in shape) for shape in shapes]
    return [
        str(thing.with_shape(shape) if isinstance(thing, TensorSpec) else shape[0])
        for thing, shape in zip(things, shapes_shown, strict=True)
    ]


def mismatch_hint(before: TensorSpec, after: TensorSpec) -> str:
    """Return the end of a message about two specs that must be equal: how to make them equal."""
    known = [(a, b) for a, b in zip(before.shape, after.shape, strict=False) if a != b]
    named = all(isinstance(a, Dim) and isinstance(b, Dim) for a, b in known)
    if before.dtype != after.dtype or before.rank != after.rank or not named:
        return "give an initial value of that shape and dtype, or convert what is returned"
    return (
        "sizes that placeholders do not name count as different: give those that are equal one "
        "name, as in gf.placeholder(dtype, ('batch', 4)), or return a tensor of the first size"
    )


def normalize_shape(shape: Any, what: str = "shape", of: str | None = None) -> Shape:
    """Convert a user's shape (ints, names, dims) to a tuple of sizes.

    Args:
        what: the name of the shape in messages.
        of: name of the tensor of this shape, "" if it has none; then an entry may be None, for any
            size.

    Raises:
        ShapeError: an entry is negative or of another type.
    """
    entries = (
        (shape,) if shape is None or isinstance(shape, int | str | Dim | np.integer) else shape
    )
    if not isinstance(entries, list | tuple):
        raise ShapeError(f"{what}: a shape is a tuple of sizes such as (64, 3), not {shape!r}")
    return tuple(
        Dim.fresh(f"{of}.shape[{axis}]" if of else "None")
        if entry is None and of is not None
        else _normalize_size(entry, what)
        for axis, entry in enumerate(entries)
    )


def _normalize_size(entry: Any, what: str) -> Size:
    if entry is None:
        raise ShapeError(
            f"{what}: None is any size, which placeholders have; give a number, or the size of a "
            "tensor such as x.shape[0]"
        )
    if isinstance(entry, str):
        if not entry.isidentifier():
            raise ShapeError(f"{what}: a named size must be an identifier, not {entry!r}")
        return Dim.symbol(entry)
    if isinstance(entry, Dim):
        return entry
    if isinstance(entry, int | np.integer) and not isinstance(entry, bool | np.bool_):
        if entry < 0:
            raise ShapeError(f"{what}: sizes are not negative, got {entry}; use None for any size")
        if entry > LARGEST_SIZE:
            raise ShapeError(f"{what}: sizes are below 2**63")
        return int(entry)
    raise ShapeError(f"{what}: a size is an int, None or a name, not {entry!r}")


# Pieces of axes --------------------------------------------------------------------------------

Outer = Size | tuple[int, ...]
"""How many segments of equal length an axis consists of, or the relative lengths of these."""


def segment_count(outer: Outer) -> Size:
    """Return the number of segments, counted in units of relative length 1."""
    return sum(outer) if isinstance(outer, tuple) else outer


class Span(NamedTuple):
    """The part of an axis from start to stop, or this part of each segment of the axis.

    `rows` is the number of segments of equal length, or a tuple of their relative lengths, by which
    start and stop are multiplied. With `ranges`, the part consists of these (start, stop) of the
    axis, one after the other; then start is 0, and stop is the number of elements.
    """

    start: int
    stop: int
    rows: int | tuple[int, ...] = 1
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def size(self) -> int:
        """Number of elements in all segments."""
        return (self.stop - self.start) * int(segment_count(self.rows))

    def to_index(self, size: int) -> Any:
        """Return the index of this part in an axis of `size` elements: a slice, or an array."""
        if self.rows == 1 and not self.ranges:
            return slice(self.start, self.stop)
        return np.concatenate([np.arange(*each) for each in self.to_ranges(size)])

    def to_ranges(self, size: int) -> list[tuple[int, int]]:
        """Return the ranges of this part in an axis of `size` elements, in order."""
        if self.ranges:
            return [*self.ranges]
        lengths = self.rows if isinstance(self.rows, tuple) else (1,) * self.rows
        each, before, found = size // sum(lengths), 0, []
        for length in lengths:
            ahead = before * each
            found.append((ahead + length * self.start, ahead + length * self.stop))
            before += length
        return found


def index_of(spans: Sequence[Span], shape: Shape) -> tuple[Any, ...]:
    """Return the index of spans, one for each axis; at most one may have several segments."""
    return tuple(span.to_index(int(n)) for span, n in zip(spans, shape, strict=True))


__all__ = [
    "BFLOAT16", "DTYPES", "Dim", "Equation", "LARGEST_SIZE", "Outer", "Shape", "Size", "Span",
    "TensorSpec", "sole_symbol", "as_dtype", "broadcast_shapes", "complex_dtype", "equate",
    "evaluate", "floordiv", "is_fresh", "is_half", "is_inexact", "kind", "is_nonnegative",
    "limits", "maximum", "minimum", "nbytes", "normalize_shape", "index_of", "product",
    "promote", "real_dtype", "record_equations", "require_nonnegative", "show_shape",
    "show_symbol", "spec", "segment_count", "substitute", "symbols",
]  # fmt: skip

"""Shapes and dtypes: what is known of a tensor before it exists.

Shape rules (`infer` of an op) work on `TensorSpec`s only; where a rule equates two symbolic sizes,
the equation is recorded and checked when a step is fed. Of `dims` and `dtypes`, this module has the
public names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from graphflow.arguments import spelt
from graphflow.dims import (
    Dim,
    Shape,
    Size,
    alone,
    evaluate,
    floordiv,
    is_fresh,
    maximum,
    minimum,
    product,
    show_symbol,
    substitute,
    symbols,
)
from graphflow.dtypes import (
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
from graphflow.errors import ShapeError
from graphflow.values import dataclass

LARGEST_SIZE = 2**63 - 1
"""Of an axis."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape (sizes, perhaps symbolic) and dtype of a tensor."""

    shape: Shape
    dtype: np.dtype[Any]

    @property
    def rank(self) -> int:
        """How many axes there are."""
        return len(self.shape)

    @property
    def size(self) -> Size:
        """Number of elements."""
        return product(self.shape)

    @property
    def nbytes(self) -> Size:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    @property
    def is_concrete(self) -> bool:
        """Whether every size is a known int."""
        return all(isinstance(s, int) for s in self.shape)

    def bind(self, bindings: Mapping[str, int]) -> TensorSpec:
        """This spec with its symbols replaced by sizes."""
        if self.is_concrete:
            return self
        return TensorSpec(tuple(evaluate(s, bindings) for s in self.shape), self.dtype)

    def with_shape(self, shape: Iterable[Size]) -> TensorSpec:
        """The same dtype in another shape."""
        return TensorSpec(tuple(shape), self.dtype)

    def with_dtype(self, dtype: Any) -> TensorSpec:
        """The same shape of another dtype."""
        return TensorSpec(self.shape, np.dtype(dtype))

    def __repr__(self) -> str:
        return f"{self.dtype}{show_shape(self.shape)}"


def told_apart(*specs: TensorSpec) -> tuple[TensorSpec, ...]:
    """Return specs for an error that tells them apart. If the sizes of several placeholders are
    shown alike, as those without names are, each has a number behind it: `x.shape[0]#2`."""
    alike: dict[str, dict[str, None]] = {}
    for spec in specs:
        for symbol in itertools.chain.from_iterable(map(symbols, spec.shape)):
            alike.setdefault(show_symbol(symbol), {})[symbol] = None
    sizes: dict[str, Size] = {
        symbol: Dim.symbol(f"{shown}#{number}")
        for shown, several in alike.items()
        for number, symbol in enumerate(several, 1)
        if len(several) > 1
    }
    return tuple(each.with_shape(substitute(s, sizes) for s in each.shape) for each in specs)


def nbytes(spec: TensorSpec) -> int:
    """Bytes of a tensor of known shape."""
    return evaluate(spec.nbytes, {})


@spelt(ShapeError)
def spec(dtype: Any, shape: Any = ()) -> TensorSpec:
    """A TensorSpec from plain words: `spec("float32", (None, 64))`."""
    return TensorSpec(normalize_shape(shape, of=""), as_dtype(dtype))


# Equations between sizes ----------------------------------------------------------------------

Equation = tuple[Size, Size]
_equations: ContextVar[list[Equation] | None] = ContextVar("equations", default=None)


class recorded_equations:
    """Collect the equations that shape rules assume while the block runs.

    Not a generator: every node that is built opens one.
    """

    __slots__ = ("_token",)

    def __enter__(self) -> list[Equation]:
        equations: list[Equation] = []
        self._token = _equations.set(equations)
        return equations

    def __exit__(self, *raised: object) -> None:
        _equations.reset(self._token)


def equate(a: Size, b: Size, what: str) -> Size:
    """Two sizes that must agree: the better known of both; a symbolic equation is recorded.

    Raises:
        ShapeError: both are known and differ.
    """
    if a == b:
        return a
    if isinstance(a, int) and isinstance(b, int):
        raise ShapeError(f"{what}: {a} != {b}")
    equations = _equations.get()
    if equations is not None:
        equations.append((a, b))
    return a if isinstance(a, int) else (b if isinstance(b, int) else a)


def broadcast_shapes(*shapes: Shape) -> Shape:
    """Numpy broadcasting; a symbol broadcasts only with itself or 1, anything else is equated.

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
            elif size != 1:
                text = " and ".join(show_shape(s) for s in shapes)
                result[axis] = equate(result[axis], size, f"shapes {text} do not broadcast")
    return tuple(result)


def show_shape(shape: Sequence[Size | str]) -> str:
    """A shape as Python writes it: `(n, 64)`."""
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def normalize_shape(shape: Any, what: str = "shape", of: str | None = None) -> Shape:
    """A user's shape (ints, names, dims) as a tuple of sizes.

    Args:
        of: the tensor whose shape it is, where None is any size; "" where that is none yet.

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


# Parts of axes --------------------------------------------------------------------------------

Outer = Size | tuple[int, ...]
"""Of how many stretches of equal length an axis consists; or of which lengths these are."""


def stretches(outer: Outer) -> Size:
    """How many stretches of length 1 there are."""
    return sum(outer) if isinstance(outer, tuple) else outer


class Span(NamedTuple):
    """The part of an axis from start to stop; of each of `rows` stretches of equal length, or of
    stretches of such lengths, as many times."""

    start: int
    stop: int
    rows: int | tuple[int, ...] = 1

    @property
    def size(self) -> int:
        return (self.stop - self.start) * int(stretches(self.rows))

    def within(self, size: int) -> Any:
        """What an array of this size along the axis is indexed by."""
        if self.rows == 1:
            return slice(self.start, self.stop)
        lengths = self.rows if isinstance(self.rows, tuple) else (1,) * self.rows
        each, before, found = size // sum(lengths), 0, []
        for length in lengths:
            ahead = before * each
            found.append(np.arange(ahead + length * self.start, ahead + length * self.stop))
            before += length
        return np.concatenate(found)


def part_of(spans: Sequence[Span], shape: Shape) -> tuple[Any, ...]:
    """What an array of a shape is indexed by, of which one axis at most is in rows."""
    return tuple(span.within(int(n)) for span, n in zip(spans, shape, strict=True))


__all__ = [
    "BFLOAT16", "DTYPES", "Dim", "Equation", "LARGEST_SIZE", "Outer", "Shape", "Size", "Span",
    "TensorSpec", "alone", "as_dtype", "broadcast_shapes", "complex_dtype", "equate", "evaluate",
    "floordiv", "is_fresh", "is_half", "is_inexact", "kind", "limits", "maximum", "minimum",
    "nbytes", "normalize_shape", "part_of", "product", "promote", "real_dtype",
    "recorded_equations", "show_shape", "show_symbol", "spec", "stretches", "substitute", "symbols",
    "told_apart",
]  # fmt: skip

"""Shapes and dtypes: what is known of a tensor before it exists.

A dim is an int or a `Dim`: an integer polynomial over named sizes ("symbols"). `None` in a
placeholder's shape makes a fresh symbol, a string a shared one. Shape rules (`infer` of an op)
work on `TensorSpec`s only; where a rule equates two symbolic sizes, the equation is recorded and
checked when a step is fed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, reduce
from operator import mul
from typing import Any, NamedTuple, Union

import ml_dtypes  # 6 ms; with it numpy knows "bfloat16" by name
import numpy as np

from graphflow.errors import DTypeError, ShapeError

Size = Union[int, "Dim"]
Shape = tuple[Size, ...]
# An atom is a symbol's name or an opaque function of dims, e.g. ("floordiv", a, b).
Atom = Any
Monomial = tuple[Atom, ...]

_fresh = itertools.count()


class Dim:
    """An integer polynomial over symbols, immutable and hashable: `n`, `2*n + 1`, `n*m`, `n//2`."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms: dict[Monomial, int] = {m: c for m, c in terms.items() if c}
        self._hash = hash(frozenset(self.terms.items()))

    @staticmethod
    def symbol(name: str | None = None) -> Dim:
        """A size known by name; without a name, one that is equal to nothing else."""
        return Dim({(name if name is not None else f"?{next(_fresh)}",): 1})

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and self.terms == other.terms

    def __repr__(self) -> str:
        return " + ".join(_monomial(m, c) for m, c in sorted(self.terms.items(), key=repr)) or "0"

    def __add__(self, other: Size) -> Size:
        if not _is_size(other):  # a tensor adds sizes itself
            return NotImplemented
        terms = dict(self.terms)
        for m, c in _terms(other).items():
            terms[m] = terms.get(m, 0) + c
        return _simplest(terms)

    __radd__ = __add__

    def __mul__(self, other: Size) -> Size:
        if not _is_size(other):
            return NotImplemented
        if not isinstance(other, Dim):
            scaled = {m: c * int(other) for m, c in self.terms.items()}
            return self if other == 1 else _simplest(scaled)
        terms: dict[Monomial, int] = {}
        for (m1, c1), (m2, c2) in itertools.product(self.terms.items(), other.terms.items()):
            m = tuple(sorted(m1 + m2, key=repr))
            terms[m] = terms.get(m, 0) + c1 * c2
        return _simplest(terms)

    __rmul__ = __mul__

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Size) -> Size:
        return self + (other * -1) if _is_size(other) else NotImplemented

    def __rsub__(self, other: Size) -> Size:
        return -self + other

    def __floordiv__(self, other: Size) -> Size:
        return floordiv(self, other) if _is_size(other) else NotImplemented

    def __rfloordiv__(self, other: Size) -> Size:
        return floordiv(other, self)


def _is_size(value: Any) -> bool:
    return isinstance(value, int | np.integer | Dim)


def _terms(size: Size) -> Mapping[Monomial, int]:
    return size.terms if isinstance(size, Dim) else {(): int(size)}


def _simplest(terms: Mapping[Monomial, int]) -> Size:
    dim = Dim(terms)
    if not dim.terms:
        return 0
    return dim.terms[()] if set(dim.terms) == {()} else dim


def _monomial(monomial: Monomial, factor: int) -> str:
    atoms = [a if isinstance(a, str) else f"{a[0]}({a[1]}, {a[2]})" for a in monomial]
    return "*".join(([str(factor)] if factor != 1 or not atoms else []) + atoms)


def floordiv(a: Size, b: Size) -> Size:
    """a // b: exact division of polynomials where it exists, else an opaque size."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if isinstance(b, int) and b == 1:
        return a
    quotient = _divide_exactly(a, b)
    return quotient if quotient is not None else Dim({(("floordiv", a, b),): 1})


def _divide_exactly(a: Size, b: Size) -> Size | None:
    """a / b for a single-term b, if every term of a is divisible by it."""
    if a == b:
        return 1
    if a == 0:
        return 0
    divisor = list(_terms(b).items())
    if len(divisor) != 1:
        return None
    (atoms, factor) = divisor[0]
    terms: dict[Monomial, int] = {}
    for monomial, coefficient in _terms(a).items():
        rest = list(monomial)
        for atom in atoms:
            if atom not in rest:
                return None
            rest.remove(atom)
        if coefficient % factor:
            return None
        terms[tuple(rest)] = coefficient // factor
    return _simplest(terms)


def minimum(a: Size, b: Size) -> Size:
    """The smaller of two sizes; opaque where a symbol hides which."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return a if a == b else Dim({(("min", a, b),): 1})


def maximum(a: Size, b: Size) -> Size:
    """The larger of two sizes; opaque where a symbol hides which."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return a if a == b else Dim({(("max", a, b),): 1})


def evaluate(size: Size, bindings: Mapping[str, int]) -> int:
    """The value of a size under sizes of its symbols.

    Raises:
        KeyError: a symbol has no binding.
    """
    if not isinstance(size, Dim):
        return int(size)
    return sum(
        factor * reduce(mul, (_atom_value(a, bindings) for a in monomial), 1)
        for monomial, factor in size.terms.items()
    )


def _atom_value(atom: Atom, bindings: Mapping[str, int]) -> int:
    if isinstance(atom, str):
        return bindings[atom]
    function, a, b = atom
    x, y = evaluate(a, bindings), evaluate(b, bindings)
    if function == "floordiv":
        return x // y
    return min(x, y) if function == "min" else max(x, y)


def substitute(size: Size, sizes: Mapping[str, Size]) -> Size:
    """A size with other sizes in place of some of its symbols."""
    if not isinstance(size, Dim):
        return size
    total: Size = 0
    for monomial, factor in size.terms.items():
        term: Size = factor
        for atom in monomial:
            term = term * _substituted(atom, sizes)
        total = total + term
    return total


def _substituted(atom: Atom, sizes: Mapping[str, Size]) -> Size:
    if isinstance(atom, str):
        return sizes.get(atom, Dim.symbol(atom))
    function, a, b = atom
    x, y = substitute(a, sizes), substitute(b, sizes)
    if function == "floordiv":
        return floordiv(x, y)
    return minimum(x, y) if function == "min" else maximum(x, y)


def symbols(size: Size) -> Iterator[str]:
    """Names of the symbols that a size depends on."""
    if isinstance(size, Dim):
        for atom in itertools.chain.from_iterable(size.terms):
            if isinstance(atom, str):
                yield atom
            else:
                yield from symbols(atom[1])
                yield from symbols(atom[2])


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
        return (self.stop - self.start) * int(stretches(self.rows))  # type: ignore[arg-type]

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
    return tuple(span.within(int(n)) for span, n in zip(spans, shape, strict=True))  # type: ignore[arg-type]


def product(shape: Iterable[Size]) -> Size:
    """Number of elements of a shape."""
    total: Size = 1
    for size in shape:
        total = total * size
    return total


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


def show_shape(shape: Shape) -> str:
    """A shape as Python writes it: `(n, 64)`."""
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def normalize_shape(shape: Any, what: str = "shape") -> Shape:
    """A user's shape (ints, None, names, dims) as a tuple of sizes.

    Raises:
        ShapeError: an entry is negative or of another type.
    """
    entries = (
        (shape,) if shape is None or isinstance(shape, int | str | Dim | np.integer) else shape
    )
    if not isinstance(entries, list | tuple):
        raise ShapeError(f"{what}: a shape is a tuple of sizes such as (64, 3), not {shape!r}")
    return tuple(_normalize_size(entry, what) for entry in entries)


def _normalize_size(entry: Any, what: str) -> Size:
    if entry is None:
        return Dim.symbol()
    if isinstance(entry, str):
        if not entry.isidentifier():
            raise ShapeError(f"{what}: a named size must be an identifier, not {entry!r}")
        return Dim.symbol(entry)
    if isinstance(entry, Dim):
        return entry
    if isinstance(entry, int | np.integer) and not isinstance(entry, bool | np.bool_):
        if entry < 0:
            raise ShapeError(f"{what}: sizes are not negative, got {entry}; use None for any size")
        return int(entry)
    raise ShapeError(f"{what}: a size is an int, None or a name, not {entry!r}")


# Specs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape (sizes, perhaps symbolic) and dtype of a tensor."""

    shape: Shape
    dtype: np.dtype[Any]

    @property
    def rank(self) -> int:
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
        return TensorSpec(tuple(shape), self.dtype)

    def with_dtype(self, dtype: Any) -> TensorSpec:
        return TensorSpec(self.shape, np.dtype(dtype))

    def __repr__(self) -> str:
        return f"{self.dtype}{show_shape(self.shape)}"


def nbytes(spec: TensorSpec) -> int:
    """Bytes of a tensor of known shape."""
    return evaluate(spec.nbytes, {})


def spec(dtype: Any, shape: Any = ()) -> TensorSpec:
    """A TensorSpec from plain words: `spec("float32", (None, 64))`."""
    return TensorSpec(normalize_shape(shape), as_dtype(dtype))


_SIGNED = ("int8", "int16", "int32", "int64")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *_SIGNED, *_UNSIGNED, *_FLOATS, *_COMPLEX)
BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """A supported numpy dtype from a name, type or dtype.

    Raises:
        DTypeError: not one of `DTYPES`.
    """
    known = _NATIVE.get(dtype) if isinstance(dtype, str | np.dtype) else None
    if known is not None:
        return known
    try:
        result = np.dtype(dtype)
    except (TypeError, ValueError):
        result = None
    if result is None or dtype is None or result.name not in DTYPES:
        raise DTypeError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    native: np.dtype[Any] = result.newbyteorder("=")
    return native


_NATIVE: dict[str | np.dtype[Any], np.dtype[Any]] = {
    key: np.dtype(name) for name in DTYPES for key in (name, np.dtype(name))
}
"""By names and dtypes: numpy takes microseconds to say how a dtype is called."""


def kind(dtype: np.dtype[Any]) -> str:
    """One of "bool", "int" (signed or not), "float" and "complex"."""
    return _KINDS[dtype.kind]


# bfloat16 is no type of numpy's own, so it has the kind of raw memory.
_KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float", "V": "float", "c": "complex"}


def is_inexact(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is float or complex: one that gradients flow through."""
    return dtype.kind in "fcV"


def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is a float of 16 bits, which stores numbers but is not computed in."""
    return dtype.itemsize == 2 and dtype.kind in "fV"


@cache
def limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """The least and the largest finite number of a numeric dtype (of a complex one's parts)."""
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    high = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return -high, high


def real_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of the parts of a complex dtype; others stay."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def complex_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The complex dtype whose parts hold a float dtype; complex ones stay."""
    if dtype.kind == "c":
        return dtype
    return np.dtype("complex128" if dtype.itemsize == 8 else "complex64")


def promote(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """The array-API result type of two dtypes: within bool, ints, and floats with complex numbers;
    other kinds never mix. float16 with bfloat16 gives float32, which holds both.

    Raises:
        DTypeError: the kinds differ, or the pair is uint64 with a signed int.

    Source: Python array API standard 2024.12, "Type Promotion Rules".
    """
    if a == b:
        return a
    if is_inexact(a) and is_inexact(b):
        if "c" in (a.kind, b.kind):
            a, b = complex_dtype(a), complex_dtype(b)
        elif is_half(a) and is_half(b):
            return np.dtype("float32")
        return np.promote_types(a, b)
    mixed = "uint64" in (a.name, b.name) and "i" in (a.kind, b.kind)
    if kind(a) != kind(b) or mixed:
        raise DTypeError(f"dtypes {a} and {b} do not mix; convert one with .astype({a.name!r})")
    return np.promote_types(a, b)

"""Initial values of variables, described as plain data that each worker expands itself.

An initializer takes its random stream when it is created. So a script gives the same values on any
placement.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.argument_kinds import is_number
from graphflow.base.initial_numbers import orthonormalize_rows
from graphflow.base.initial_numbers import truncated_normal as normal_within_two
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import next_stream, user_location
from graphflow.ir.spec import Span, as_dtype, index_of, is_inexact
from graphflow.ir.spec import kind as kind_of

LARGE_BYTES = 1 << 24
"""Bytes of a variable from which each shard draws its own part of the initial value."""
KINDS = ("constant", "uniform", "normal", "hashed", "truncated_normal", "orthogonal")
"""The kinds of initializers."""
_BLOCK = 1 << 18  # numbers that are drawn at a time


@dataclass(frozen=True)
class Initializer:
    """The recipe for a variable's first value: a kind, its parameters a and b, and a random stream.

    Kinds: "constant" (a); "uniform" on [a, b); "normal" with mean a and standard deviation b;
    "truncated_normal": the same, within 2 standard deviations; "orthogonal": an orthogonal matrix
    times a; "hashed": the rows of a `gf.nn.HashTable`, 0 until they are trained.

    Attributes:
        whole: the shape of the variable of which this is a part; () if it is no part.
        spans: the part of each of its axes.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    a: float = 0.0
    b: float = 0.0
    stream: tuple[int, int] = (0, 0)
    whole: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def is_large(self) -> bool:
        """Whether parts should be drawn where they are needed, and the whole nowhere.

        An orthogonal matrix is computed as a whole; shards are cut from it.
        """
        return (
            self.kind != "orthogonal"
            and math.prod(self.shape) * as_dtype(self.dtype).itemsize >= LARGE_BYTES
        )

    def part(self, spans: tuple[Span, ...]) -> Initializer:
        """Return the initial value of a part of the variable: the numbers that the whole has there.

        Args:
            spans: the part of each axis; the variable has one axis at least.
        """
        shape = tuple(span.size for span in spans)
        return replace(self, shape=shape, whole=self.shape, spans=spans)

    def with_dtype(self, dtype: Any) -> Initializer:
        """Return the same initial values in another dtype."""
        return replace(self, dtype=_dtype(dtype).name)

    def __call__(self) -> np.ndarray[Any, Any]:
        """Return the array; each call returns the same values."""
        out = np.empty(self.shape, self.dtype)
        self.fill(out)
        return out

    def fill(self, out: np.ndarray[Any, Any]) -> None:
        """Write the values to an array of this shape and dtype, without a second array of its
        size."""
        if self.kind in ("constant", "hashed"):
            out[...] = self.a
        elif self.kind == "orthogonal":
            self._fill_orthogonal(out)
        elif not self.shape:
            out[...] = self._draw(self._generator(), ())
        elif out.size:
            self._draw_blocks(out)

    def _draw_blocks(self, out: np.ndarray[Any, Any]) -> None:
        """Draw a block of rows after the other."""
        whole = self.whole or self.shape
        spans = self.spans or tuple(Span(0, size) for size in whole)
        width = math.prod(whole[1:])
        rows, within = max(1, _BLOCK // max(1, width)), index_of(spans[1:], whole[1:])
        generator, done, at = self._generator(), 0, 0
        for start, stop in spans[0].to_ranges(whole[0]):
            generator = self._skip(generator, done * width, start * width)
            for first in range(start, stop, rows):
                count = min(rows, stop - first)
                drawn = self._draw(generator, (count, *whole[1:]))
                out[at : at + count] = drawn[(slice(None), *within)].reshape(count, *out.shape[1:])
                at += count
            done = stop

    def _fill_orthogonal(self, out: np.ndarray[Any, Any]) -> None:
        """Compute the whole, and write the part."""
        whole = self.whole or self.shape
        sides = (math.prod(whole[:-1]), whole[-1])
        matrix = self._generator().standard_normal((min(sides), max(sides)))
        orthonormalize_rows(matrix)
        values = self.a * (matrix if sides[0] <= sides[1] else matrix.T).reshape(whole)
        part = values[index_of(self.spans, whole)] if self.spans else values
        out[...] = part.reshape(out.shape)

    def _draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
        if self.kind == "truncated_normal":
            return normal_within_two(generator.random(shape)) * self.b + self.a
        draw = generator.uniform if self.kind == "uniform" else generator.normal
        return draw(self.a, self.b, shape)

    def _generator(self, drawn: int = 0) -> np.random.Generator:
        """Return the generator after so many words of 64 bits."""
        words = np.random.Philox(np.random.SeedSequence(self.stream))
        generator = np.random.Generator(words.advance(drawn // 4) if drawn >= 4 else words)
        generator.random(drawn % 4)
        return generator

    def _skip(self, generator: np.random.Generator, done: int, start: int) -> np.random.Generator:
        """Return a generator that goes on at number `start`, given one at number `done`.

        A uniform or truncated normal number takes one word, so words are skipped. Normal numbers
        take one or more.
        """
        if self.kind in ("uniform", "truncated_normal"):
            return generator if done == start else self._generator(start)
        for first in range(done, start, _BLOCK):
            generator.standard_normal(min(_BLOCK, start - first))
        return generator


@dataclass(frozen=True, eq=False)
class ReplicaRows:
    """The first value of a variable that has a row for each replica of a model, all alike.

    Attributes:
        row: the first value of a row.
        replicas: the number of rows.
        adds_up: rows are parts of one sum, such as residuals. Otherwise each row is one replica's
            own copy.
    """

    row: Initializer | np.ndarray[Any, Any]
    replicas: int
    adds_up: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all rows."""
        return (self.replicas, *self.row.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the rows."""
        return self.row.dtype

    def __call__(self) -> np.ndarray[Any, Any]:
        """Return the array; each call returns the same values."""
        row = self.row() if isinstance(self.row, Initializer) else self.row
        return np.array(np.broadcast_to(row, self.shape))

    def first_rows(self, count: int) -> Initializer | np.ndarray[Any, Any]:
        """Return the first value of `count` rows."""
        if isinstance(self.row, Initializer) and self.row.kind == "constant":
            return replace(self.row, shape=(count, *self.row.shape))
        return self()[:count]

    def fit_rows(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the rows of a checkpoint for this number of replicas.

        Old replica i goes on as replica i modulo the new number. If rows add up, those that meet
        are added and new replicas begin with zeros, so the sum over replicas stays what it was.
        Otherwise the rows of the first replicas are copied to the others.
        """
        if not self.adds_up:
            return np.array(rows[np.arange(self.replicas) % len(rows)])
        found = np.zeros(self.shape, rows.dtype)
        for i, row in enumerate(rows):
            found[i % self.replicas] += row
        return found


def _make(kind: str, shape: Any, dtype: Any, a: float, b: float) -> Initializer:
    wanted = _dtype(dtype)
    if kind != "constant":
        if kind_of(wanted) != "float":
            raise DTypeError(f"{_here()}: random values need a float dtype, not {wanted}")
        if not all(_is_number_or_flag(x) and math.isfinite(x) for x in (a, b)):
            raise ArgumentError(
                f"{_here()}: the parameters must be finite numbers, not {a!r} and {b!r}"
            )
    return Initializer(kind, _static_shape(shape), wanted.name, float(a), float(b), next_stream())


def _dtype(dtype: Any) -> np.dtype[Any]:
    try:
        return as_dtype(dtype)
    except DTypeError as error:
        raise DTypeError(f"{_here()}: {error}") from None


def _static_shape(shape: Any) -> tuple[int, ...]:
    """Return a variable's shape as a tuple of ints."""
    sizes = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
    counts = [s for s in sizes if isinstance(s, int | np.integer) and not isinstance(s, bool)]
    if len(counts) < len(sizes) or any(s < 0 for s in counts):
        raise ShapeError(
            f"{_here()}: the shape of a variable must be ints from 0 on, not {shape!r}"
        )
    return tuple(map(int, sizes))


def _is_number_or_flag(value: Any) -> bool:
    return is_number(value) or isinstance(value, bool)


def _here() -> str:
    return f"initializer at {user_location()}"


@checks_argument_names(ArgumentError)
def zeros(shape: Any, dtype: Any = "float32") -> Initializer:
    """Fill with 0."""
    return _make("constant", shape, dtype, 0.0, 0.0)


@checks_argument_names(ArgumentError)
def ones(shape: Any, dtype: Any = "float32") -> Initializer:
    """Fill with 1."""
    return _make("constant", shape, dtype, 1.0, 0.0)


def hashed_rows(shape: Any, dtype: Any) -> Initializer:
    """Fill the rows of a hash table with 0. Optimisers train each from its id's initial value."""
    made = _make("constant", shape, dtype, 0.0, 0.0)
    if kind_of(np.dtype(made.dtype)) != "float":
        raise DTypeError(f"{_here()}: the rows of a hash table are floats, not {made.dtype}")
    return replace(made, kind="hashed")


@checks_argument_names(ArgumentError)
def full(shape: Any, value: float, dtype: Any = "float32") -> Initializer:
    """Fill with `value`.

    Raises:
        ArgumentError: the value is no number, or the dtype cannot hold it.
    """
    wanted = _dtype(dtype)
    fits = _is_number_or_flag(value) and (is_inexact(wanted) or _is_exact(value, wanted))
    if not fits:
        raise ArgumentError(f"{_here()}: {value!r} is not a value of dtype {wanted}")
    return _make("constant", shape, dtype, value, 0.0)


def _is_exact(value: Any, dtype: np.dtype[Any]) -> bool:
    """Return True if an integer or bool dtype holds the value, and float64 carries it exactly."""
    limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return bool(limits[0] <= value <= limits[1] and value == int(value) == int(float(value)))


@checks_argument_names(ArgumentError)
def uniform(
    shape: Any, low: float = -0.05, high: float = 0.05, dtype: Any = "float32"
) -> Initializer:
    """Draw from the uniform distribution on [low, high)."""
    if _is_number_or_flag(low) and _is_number_or_flag(high) and low > high:
        raise ArgumentError(f"{_here()}: low {low} is above high {high}")
    return _make("uniform", shape, dtype, low, high)


@checks_argument_names(ArgumentError)
def normal(shape: Any, mean: float = 0.0, std: float = 0.05, dtype: Any = "float32") -> Initializer:
    """Draw from the normal distribution with the given mean and standard deviation."""
    if _is_number_or_flag(std) and std < 0:
        raise ArgumentError(f"{_here()}: the standard deviation must not be negative: {std}")
    return _make("normal", shape, dtype, mean, std)


@checks_argument_names(ArgumentError)
def truncated_normal(
    shape: Any, mean: float = 0.0, std: float = 0.05, dtype: Any = "float32"
) -> Initializer:
    """Draw from the normal distribution within 2 standard deviations (std) of the mean.

    The values' own standard deviation is 0.88·std.
    """
    return replace(normal(shape, mean, std, dtype), kind="truncated_normal")


@checks_argument_names(ArgumentError)
def glorot(shape: Any, dtype: Any = "float32") -> Initializer:
    """Draw uniformly from ±√(6 / (fan_in + fan_out)).

    Source: Glorot & Bengio, AISTATS 2010, eq. 16.
    """
    fan_in, fan_out = _fans(shape)
    limit = math.sqrt(6.0 / max(1, fan_in + fan_out))
    return _make("uniform", shape, dtype, -limit, limit)


@checks_argument_names(ArgumentError)
def he(shape: Any, dtype: Any = "float32") -> Initializer:
    """Draw normally with standard deviation √(2 / fan_in), for layers before a ReLU.

    Source: He et al., ICCV 2015, eq. 10.
    """
    return _make("normal", shape, dtype, 0.0, math.sqrt(2.0 / max(1, _fans(shape)[0])))


@checks_argument_names(ArgumentError)
def lecun(shape: Any, dtype: Any = "float32") -> Initializer:
    """Draw normally with standard deviation √(1 / fan_in), for layers before a SELU or tanh.

    Source: LeCun, Bottou, Orr & Müller, Efficient BackProp, 1998, eq. 16.
    """
    return _make("normal", shape, dtype, 0.0, math.sqrt(1.0 / max(1, _fans(shape)[0])))


@checks_argument_names(ArgumentError)
def orthogonal(shape: Any, gain: float = 1.0, dtype: Any = "float32") -> Initializer:
    """Fill with an orthogonal matrix times `gain`, drawn uniformly from all orthogonal matrices.

    The matrix has the last axis as columns and the others, flattened, as rows: columns are
    orthonormal if there are as many rows or more, else rows. Each process computes the whole:
    1024 × 1024 takes about a second, twice the size eight times that.

    Raises:
        ShapeError: the shape has fewer than 2 axes.

    Source: Saxe, McClelland & Ganguli, ICLR 2014.
    """
    if len(_static_shape(shape)) < 2:
        raise ShapeError(
            f"{_here()}: an orthogonal matrix has 2 axes or more, not the shape {shape!r}"
        )
    return _make("orthogonal", shape, dtype, gain, 0.0)


def _fans(shape: Any) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a weight (..., in, out)."""
    shape = _static_shape(shape)
    if not shape:
        return 1, 1
    field = math.prod(shape[:-2]) if len(shape) > 1 else 1
    return (shape[-2] if len(shape) > 1 else shape[0]) * field, shape[-1] * field


__all__ = [
    "Initializer", "full", "glorot", "he", "lecun", "normal", "ones", "orthogonal",
    "truncated_normal", "uniform", "zeros",
]  # fmt: skip

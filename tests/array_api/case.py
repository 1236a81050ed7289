"""Calls of every function of the array API standard, as functions of a namespace and arrays.

Each case gives the same numbers with numpy's namespace, which is the oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Make = Callable[..., Any]
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS, COMPLEX = ("float32", "float64"), ("complex64", "complex128")
BOOL = ("bool",)
REAL, NUMERIC = INTS + FLOATS, INTS + FLOATS + COMPLEX
ALL = BOOL + NUMERIC
INEXACT = FLOATS + COMPLEX
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (5,), (2, 3), (2, 0, 3), (3, 1, 2))


@dataclass(frozen=True)
class Case:
    """A call: `call(xp, *arrays)`.

    Attributes:
        dtype: of the result by the standard, where numpy's own is not the one; "float", "int" and
            "complex" are the default dtypes of the namespace.
        oracle: what stands for the call with numpy's namespace, if numpy has no such argument.
        loose: digits of float32 that are lost.
    """

    name: str
    call: Make
    arrays: tuple[Array, ...] = ()
    dtype: str = ""
    loose: float = 10.0
    oracle: Make | None = None

    def __str__(self) -> str:
        of = "-".join(f"{a.dtype.name}{list(a.shape)}".replace(" ", "") for a in self.arrays)
        return f"{self.name}-{of}" if of else self.name


def numbers(dtype: str, shape: tuple[int, ...], low: float = -4, high: float = 4) -> Array:
    """Return numbers of a dtype, the same in each run; ints that no usual operation overflows."""
    rng = np.random.default_rng(len(shape) + 7 * sum(shape))
    if dtype == "bool":
        return np.asarray(rng.integers(0, 2, shape), bool)
    if dtype in INTS:
        least = max(int(low), 0) if dtype.startswith("u") else int(low)
        return np.asarray(rng.integers(least, int(high) + 1, shape), dtype)
    real = rng.uniform(low, high, shape)
    return np.asarray(
        real + 1j * rng.uniform(low, high, shape) if dtype in COMPLEX else real, dtype
    )


def function_of(name: str) -> Make:
    """Return the function of a name such as `linalg.det` as a function of the namespace first."""

    def call(xp: Any, *args: Any, **kwargs: Any) -> Any:
        found = xp
        for part in name.split("."):
            found = getattr(found, part)
        return found(*args, **kwargs)

    return call


def with_options(name: str, **kwargs: Any) -> Make:
    function = function_of(name)
    return lambda xp, *arrays: function(xp, *arrays, **kwargs)


def label(name: str, how: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in how.items())})"


def mixing_pairs(kinds: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield pairs of dtypes that the standard promotes."""
    for a, b in itertools.product(kinds, kinds):
        groups = [set(INTS), set(INEXACT), set(BOOL)]
        if any({a, b} <= group for group in groups) and not (
            "uint64" in (a, b) and {a, b} & set(INTS[:4])
        ):
            yield a, b

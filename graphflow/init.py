"""Initial values of variables, as plain data that each worker draws by itself.

An initializer holds a random stream from when it was made, so the same script gives the same
values on any placement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.op import next_stream, user_location
from graphflow.spec import as_dtype


@dataclass(frozen=True)
class Initializer:
    """What to fill a variable with: a kind, its parameters (a, b), and a random stream.

    Kinds: "constant" (a); "uniform" on [a, b); "normal" of mean a and deviation b.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    a: float = 0.0
    b: float = 0.0
    stream: tuple[int, int] = (0, 0)

    def with_dtype(self, dtype: Any) -> Initializer:
        return replace(self, dtype=as_dtype(dtype).name)

    def __call__(self) -> np.ndarray[Any, Any]:
        """The array; the same at each call."""
        if self.kind == "constant":
            return np.full(self.shape, self.a, self.dtype)
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(self.stream)))
        draw = {"uniform": generator.uniform, "normal": generator.normal}[self.kind]
        return draw(self.a, self.b, self.shape).astype(self.dtype)


def _make(kind: str, shape: Any, dtype: Any, a: float, b: float) -> Initializer:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(s, int | np.integer) and s >= 0 for s in shape):
        raise ShapeError(
            f"initializer at {user_location()}: the shape of a variable is known, got {shape}"
        )
    if not (math.isfinite(a) and math.isfinite(b)):
        raise ArgumentError(f"initializer at {user_location()}: parameters {a}, {b} are not finite")
    return Initializer(kind, tuple(map(int, shape)), as_dtype(dtype).name, a, b, next_stream())


def zeros(shape: Any, dtype: Any = "float32") -> Initializer:
    """All 0."""
    return _make("constant", shape, dtype, 0.0, 0.0)


def ones(shape: Any, dtype: Any = "float32") -> Initializer:
    """All 1."""
    return _make("constant", shape, dtype, 1.0, 0.0)


def full(shape: Any, value: float, dtype: Any = "float32") -> Initializer:
    """All `value`."""
    return _make("constant", shape, dtype, float(value), 0.0)


def uniform(
    shape: Any, low: float = -0.05, high: float = 0.05, dtype: Any = "float32"
) -> Initializer:
    """Uniform on [low, high)."""
    return _make("uniform", shape, dtype, low, high)


def normal(shape: Any, mean: float = 0.0, std: float = 0.05, dtype: Any = "float32") -> Initializer:
    """Normal of the given mean and standard deviation."""
    return _make("normal", shape, dtype, mean, std)


def glorot(shape: Any, dtype: Any = "float32") -> Initializer:
    """Uniform on ±√(6 / (fan_in + fan_out)).

    Source: Glorot & Bengio, AISTATS 2010, eq. 16.
    """
    fan_in, fan_out = _fans(shape)
    limit = math.sqrt(6.0 / max(1, fan_in + fan_out))
    return _make("uniform", shape, dtype, -limit, limit)


def he(shape: Any, dtype: Any = "float32") -> Initializer:
    """Normal of deviation √(2 / fan_in), for layers before a ReLU.

    Source: He et al., ICCV 2015, eq. 10.
    """
    return _make("normal", shape, dtype, 0.0, math.sqrt(2.0 / max(1, _fans(shape)[0])))


def _fans(shape: Any) -> tuple[int, int]:
    """Inputs and outputs of a weight (..., in, out)."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not shape:
        return 1, 1
    field = math.prod(shape[:-2]) if len(shape) > 1 else 1
    return (shape[-2] if len(shape) > 1 else shape[0]) * field, shape[-1] * field

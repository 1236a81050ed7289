"""Ops that draw random tensors: uniform, normal, Bernoulli and integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from graphflow.ir.op import (
    Cost,
    Op,
    Sample,
    register,
    sample,
)
from graphflow.ir.spec import Shape, TensorSpec, as_dtype, product
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.randomness import philox
from graphflow.ops.sharding import rules as sharding

Stream = tuple[int, int]


Part = tuple[tuple[int, ...], tuple[int, ...]]


_STREAM: dict[str, Any] = {"stream": (7, 1)}


def _infer_random(shape: Shape, dtype: str, **attrs: Any) -> TensorSpec:
    result = TensorSpec(shape, as_dtype(dtype))
    require_kind(result, "float")
    return result


def _cost(flops: int) -> Any:
    # About 30 flops for a Philox word, plus the distribution's.
    return lambda shape, **attrs: Cost(flops=product(shape) * (30 + flops))


def draw_part(
    xp: Any, shape: tuple[int, ...], part: Part | None, draw: Callable[[int, int], Any]
) -> Any:
    """Draw a tensor, or a part of one, by `draw(count, first)`.

    Args:
        part: the shape of the whole tensor, and the part's start in it; None: the whole.
    """
    if part is None:
        return draw(math.prod(shape), 0).reshape(shape)
    whole, start = part
    row = math.prod(whole[1:])
    rows = draw(shape[0] * row, start[0] * row).reshape(shape[0], *whole[1:])
    index = tuple(slice(s, s + n) for s, n in zip(start[1:], shape[1:], strict=True))
    return xp.ascontiguousarray(rows[(slice(None), *index)])


def _uniform_kernel(
    xp: Any, shape: tuple[int, ...], dtype: str, low: float, high: float, stream: Stream,
    step: int, part: Part | None = None,
) -> Any:  # fmt: skip
    drawn = draw_part(
        xp, shape, part, lambda n, first: philox.uniform(xp, n, dtype, stream, step, first)
    )
    if (low, high) != (0.0, 1.0):
        last, wide = as_dtype(dtype).type, _compute_type(dtype)
        drawn = drawn.astype(wide, copy=False) * wide(high - low) + wide(low)
        drawn = drawn.astype(dtype, copy=False)
        # Rounding may reach `high`, which is excluded.
        below = np.nextafter(last(high), last(low))
        drawn = xp.minimum(drawn, below) if low < high else drawn
    return drawn


def _compute_type(dtype: str) -> Any:
    """Return the type to compute in."""
    return np.float64 if dtype == "float64" else np.float32


uniform_op = register(
    Op(
        "random_uniform",
        infer=_infer_random,
        kernel=_uniform_kernel,
        sharding=sharding.random_rule,
        cost=_cost(4),
        samples=(
            # Not by `sample`, whose own low and high are those of inputs.
            Sample((), {"shape": (3, 5), "dtype": "float32", "low": -1.0, "high": 2.0} | _STREAM),
            Sample((), {"shape": (), "dtype": "float64", "low": 0.0, "high": 1.0} | _STREAM),
        ),
        pure=False,
        random=True,
    )
)


def _normal_kernel(
    xp: Any, shape: tuple[int, ...], dtype: str, mean: float, std: float, stream: Stream,
    step: int, part: Part | None = None,
) -> Any:  # fmt: skip
    wide = _compute_type(dtype)
    name = np.dtype(wide).name
    drawn = draw_part(
        xp, shape, part, lambda n, first: philox.normal(xp, n, name, stream, step, first)
    )
    return (drawn * wide(std) + wide(mean)).astype(dtype, copy=False)


normal_op = register(
    Op(
        "random_normal",
        infer=_infer_random,
        kernel=_normal_kernel,
        sharding=sharding.random_rule,
        cost=_cost(30),
        samples=(
            sample(shape=(3, 5), dtype="float32", mean=1.0, std=2.0, **_STREAM),
            sample(shape=(0, 2), dtype="float64", mean=0.0, std=1.0, **_STREAM),
        ),
        pure=False,
        random=True,
    )
)


def _bernoulli_kernel(
    xp: Any, shape: tuple[int, ...], probability: float, stream: Stream, step: int,
    part: Part | None = None,
) -> Any:  # fmt: skip
    if probability >= 1:
        return xp.ones(shape, bool)
    bound = int(probability * 2**32)
    return draw_part(
        xp, shape, part, lambda n, first: philox.draw_below(xp, n, bound, stream, step, first)
    )


bernoulli_op = register(
    Op(
        "random_bernoulli",
        infer=lambda shape, **attrs: TensorSpec(shape, np.dtype(bool)),
        kernel=_bernoulli_kernel,
        sharding=sharding.random_rule,
        cost=_cost(1),
        samples=(
            sample(shape=(3, 5), probability=0.3, **_STREAM),
            sample(shape=(), probability=1.0, **_STREAM),
        ),
        pure=False,
        random=True,
    )
)


def _infer_integers(shape: Shape, dtype: str, **attrs: Any) -> TensorSpec:
    result = TensorSpec(shape, as_dtype(dtype))
    require_kind(result, "int")
    return result


def _integers_kernel(
    xp: Any, shape: tuple[int, ...], dtype: str, low: int, last: int, stream: Stream,
    step: int, part: Part | None = None,
) -> Any:  # fmt: skip
    drawn = draw_part(
        xp, shape, part, lambda n, f: philox.integers(xp, n, last - low + 1, stream, step, f)
    )
    moved = drawn + np.uint64(low % 2**64)  # two's complement: correct for either sign
    return moved if dtype == "uint64" else moved.view("int64").astype(dtype, copy=False)


integers_op = register(
    Op(
        "random_integers",
        infer=_infer_integers,
        kernel=_integers_kernel,
        sharding=sharding.random_rule,
        cost=_cost(40),  # two words each
        samples=(
            Sample((), {"shape": (3, 5), "dtype": "int64", "low": -4, "last": 9} | _STREAM),
            Sample((), {"shape": (), "dtype": "uint8", "low": 0, "last": 255} | _STREAM),
        ),
        pure=False,
        random=True,
    )
)

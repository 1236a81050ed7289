"""Native gathers, strided copies, joins and positions of extrema against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf

RNG = np.random.default_rng(0)
DTYPES = ["bool", "int8", "float16", "float32", "int64", "complex128"]
SHAPES: list[tuple[int, ...]] = [(1,), (5,), (1, 4), (3, 1), (4, 5, 3), (2, 1, 3, 4), (2, 3, 40)]


def numbers(shape: tuple[int, ...], dtype: str) -> Any:
    return (RNG.standard_normal(shape) * 5).astype(dtype)


def compute(build: Callable[..., gf.Tensor], *arrays: Any) -> Any:
    """Compute a tensor of placeholders of a program."""
    given = [gf.placeholder(a.dtype, a.shape) for a in arrays]
    with gf.Session() as s:
        return s.run(build(*given), dict(zip(given, arrays, strict=True)))


def check(build: Callable[..., gf.Tensor], want: Any, *arrays: Any) -> None:
    have = compute(build, *arrays)
    assert have.dtype == want.dtype
    np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathers_take_what_numpy_takes(dtype: str) -> None:
    for shape in SHAPES:
        x = numbers(shape, dtype)
        for axis, n in enumerate(shape):
            at = RNG.integers(-n, n, (2, 3)).astype(RNG.choice(["int8", "int32", "int64"]))
            check(lambda x, i, axis=axis: gf.take(x, i, axis), np.take(x, at, axis), x, at)
            whole = (*shape[:axis], 4, *shape[axis + 1 :])
            each = RNG.integers(0, n, whole).astype(RNG.choice(["uint8", "int64", "uint64"]))
            want = np.take_along_axis(x, each.astype(np.int64), axis)
            check(lambda x, i, axis=axis: gf.take_along_axis(x, i, axis), want, x, each)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_move_what_numpy_moves(dtype: str) -> None:
    for shape in SHAPES:
        x, rank = numbers(shape, dtype), len(shape)
        order = tuple(map(int, RNG.permutation(rank)))
        check(lambda x, order=order: gf.permute_dims(x, order), x.transpose(order), x)
        check(gf.flip, np.flip(x), x)
        window = tuple(slice(n // 2, None) if n % 2 else slice(0, n, 2) for n in shape)
        check(lambda x, window=window: x[window], x[window], x)
        axis = int(RNG.integers(rank))
        other = numbers((*shape[:axis], 3, *shape[axis + 1 :]), dtype)
        want = np.concatenate([x, other, x], axis)
        check(lambda x, y, axis=axis: gf.concat([x, y, x], axis), want, x, other)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint64", "int64", "float32", "float64"])
def test_extrema_are_where_numpy_finds_them(dtype: str) -> None:
    for shape in SHAPES:
        x = numbers(shape, dtype)
        if x.dtype.kind == "f":
            x.reshape(-1)[:: max(1, x.size // 3)] = np.nan  # the first one counts
        for axis in (None, *range(len(shape))):
            check(lambda x, axis=axis: gf.argmax(x, axis), np.argmax(x, axis), x)
            check(lambda x, axis=axis: gf.argmin(x, axis), np.argmin(x, axis), x)

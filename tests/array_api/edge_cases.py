"""Calls at the edges: no elements, no axes, odd complex numbers, limits of ints, odd slices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.array_api.case import (
    ALL,
    COMPLEX,
    FLOATS,
    INTS,
    NUMERIC,
    REAL,
    Case,
    Make,
    function_of,
    numbers,
)
from tests.array_api.elementwise_cases import UNARY

EMPTY: dict[str, Make] = {
    "sum": lambda xp, x: xp.sum(x, axis=0), "any": lambda xp, x: xp.any(x, axis=-1),
    "prod": lambda xp, x: xp.prod(x), "all": lambda xp, x: xp.all(x),
    "concat": lambda xp, x: xp.concat([x, x], axis=1), "stack": lambda xp, x: xp.stack([x, x]),
    "matmul": lambda xp, x: xp.matrix_transpose(x) @ x, "outer matmul": lambda xp, x: x @ x.mT,
    "sort": lambda xp, x: xp.sort(x), "argsort": lambda xp, x: xp.argsort(x, axis=0),
    "cumulative_sum": lambda xp, x: xp.cumulative_sum(x, axis=0, include_initial=True),
    "flip": lambda xp, x: xp.flip(x), "roll": lambda xp, x: xp.roll(x, 2, axis=0),
    "take": lambda xp, x: xp.take(x, xp.asarray([0, 2]), axis=1),
    "take none": lambda xp, x: xp.take(x, xp.astype(xp.zeros(0), xp.int64), axis=0),
    "reshape": lambda xp, x: xp.reshape(x, (3, 0, 2)), "diff": lambda xp, x: xp.diff(x, n=5),
    "tril": lambda xp, x: xp.tril(x), "broadcast_to": lambda xp, x: xp.broadcast_to(x, (2, 0, 3)),
    "unstack": lambda xp, x: xp.unstack(x), "repeat": lambda xp, x: xp.repeat(x, 2, axis=1),
    "tile": lambda xp, x: xp.tile(x, (2, 2)), "where": lambda xp, x: xp.where(x == x, x, x),
    "tensordot": lambda xp, x: xp.tensordot(x, x, axes=((0,), (0,))),
    "slice": lambda xp, x: x[:, 1],
    "vecdot": lambda xp, x: xp.vecdot(x, x),
    "permute_dims": lambda xp, x: xp.permute_dims(x, (1, 0)),
    "count_nonzero": lambda xp, x: xp.count_nonzero(x, axis=0),
    "trace": lambda xp, x: xp.linalg.trace(x),
    "searchsorted": lambda xp, x: xp.searchsorted(x[:, 0], xp.reshape(x, (0,))),
}  # fmt: skip
SCALAR: dict[str, Make] = {
    "expand_dims": lambda xp, x: xp.expand_dims(x, axis=0), "flip": lambda xp, x: xp.flip(x),
    "roll": lambda xp, x: xp.roll(x, 1), "repeat": lambda xp, x: xp.repeat(x, 3),
    "tile": lambda xp, x: xp.tile(x, (2, 2)), "tile ()": lambda xp, x: xp.tile(x, ()),
    "clip": lambda xp, x: xp.clip(x, 0, 1), "reshape": lambda xp, x: xp.reshape(x, (1, 1)),
    "stack": lambda xp, x: xp.stack([x, x]), "broadcast_to": lambda xp, x: xp.broadcast_to(x, (2,)),
    "squeeze": lambda xp, x: xp.squeeze(x, ()),
    "permute_dims": lambda xp, x: xp.permute_dims(x, ()),
    "where": lambda xp, x: xp.where(x == x, x, x), "sum": lambda xp, x: xp.sum(x, keepdims=True),
    "x[...]": lambda xp, x: x[...], "x[None]": lambda xp, x: x[None, ...], "T": lambda xp, x: x + x,
    "searchsorted": lambda xp, x: xp.searchsorted(xp.asarray([1, 2, 3], dtype=x.dtype), x),
    "tensordot": lambda xp, x: xp.tensordot(x, x, axes=0),
}  # fmt: skip
INDEXING: dict[str, Make] = {
    "x[5:]": lambda xp, x: x[5:], "x[-9:9]": lambda xp, x: x[-9:9], "x[3:1]": lambda xp, x: x[3:1],
    "x[::3]": lambda xp, x: x[::3], "x[3::-1]": lambda xp, x: x[3::-1],
    "x[:-9:-2]": lambda xp, x: x[:-9:-2], "x[-1:-4:-1]": lambda xp, x: x[-1:-4:-1],
    "x[0, ..., 0]": lambda xp, x: x[0, ..., 0], "x[..., None, 1]": lambda xp, x: x[..., None, 1],
    "x[None, :, None]": lambda xp, x: x[None, :, None, 1:, ..., None],
    "x[0-d]": lambda xp, x: x[xp.asarray(1)], "x[:, 0-d]": lambda xp, x: x[:, xp.asarray(-1)],
    "x[2-d]": lambda xp, x: x[xp.asarray([[0, 1], [2, -1]])],
    "x[1, ints]": lambda xp, x: x[1, xp.asarray([0, 2])],
    "x[ints, :, ints]": lambda xp, x: x[xp.asarray([0, 1]), :, xp.asarray([1, 0])],
    "x[:, ints, ints]": lambda xp, x: x[:, xp.asarray([[0], [1]]), xp.asarray([1, 0])],
    "roll 100": lambda xp, x: xp.roll(x, 100), "roll -7": lambda xp, x: xp.roll(x, -7, axis=1),
    "tile short": lambda xp, x: xp.tile(x, (2,)), "tile 0": lambda xp, x: xp.tile(x, (0, 1, 1)),
    "repeat 0": lambda xp, x: xp.repeat(x, 0, axis=0), "diff n": lambda xp, x: xp.diff(x, n=9),
    "moveaxis -": lambda xp, x: xp.moveaxis(x, -1, 0), "take 2": lambda xp, x: x[::2, ::-1],
}  # fmt: skip
MADE: dict[str, tuple[Make, str]] = {
    "linspace 0": (lambda xp: xp.linspace(0, 1, 0), "float"),
    "linspace one open": (lambda xp: xp.linspace(3, 9, 1, endpoint=False), "float"),
    "arange 0": (lambda xp: xp.arange(0), "int"), "eye 0": (lambda xp: xp.eye(0), "float"),
    "eye far": (lambda xp: xp.eye(2, 3, k=5), "float"),
    "arange large": (lambda xp: xp.arange(2**53, 2**53 + 3), "int"),
    "arange of floats down": (lambda xp: xp.arange(1.0, -1.0, -0.3), "float"),
    "arange of ints and floats": (lambda xp: xp.arange(1, 3, 0.5), "float"),
    "asarray large": (lambda xp: xp.asarray(2**63 - 1), "int"),
    "asarray small": (lambda xp: xp.asarray(-(2**63)), "int"),
    "asarray nested": (lambda xp: xp.asarray([[[1.5]], [[2]]]), "float"),
    "asarray empty": (lambda xp: xp.asarray([]), "float"),
    "full uint64": (lambda xp: xp.full((), 2**64 - 1, dtype=xp.uint64), "uint64"),
    "full nan": (lambda xp: xp.full(2, xp.nan), "float"),
    "full inf": (lambda xp: xp.full((1, 0), -xp.inf), "float"),
    "full large": (lambda xp: xp.full((2,), 2**40), "int"),
    "meshgrid": (lambda xp: xp.meshgrid(xp.arange(2), xp.arange(3), xp.arange(0)), "int"),
    "meshgrid 1": (lambda xp: xp.meshgrid(xp.arange(2)), "int"),
    "zeros ()": (lambda xp: xp.zeros(()), "float"),
}  # fmt: skip


MOVES = ("concat", "stack", "flip", "reshape", "any", "all")
"""Functions of arrays of any dtype."""


def _convert_to(dtype: str) -> Make:
    return lambda xp, x: xp.astype(x, getattr(xp, dtype))


def _sort_down(name: str, axis: int) -> tuple[Make, Make]:
    """Return a descending sort, and the same by numpy, which only sorts up."""

    def call(xp: Any, x: Any) -> Any:
        return getattr(xp, name)(x, axis=axis, descending=True)

    def oracle(xp: Any, x: Any) -> Any:
        order = np.flip(np.argsort(np.flip(x, axis), axis=axis, stable=True), axis)
        order = x.shape[axis] - 1 - order
        return order if name == "argsort" else np.take_along_axis(x, order, axis)

    return call, oracle


def _add_in_place(xp: Any, x: Any) -> Any:
    x = +x  # numpy's arrays would change for the calls that follow
    x += 1
    x *= 2
    return x


def edges() -> Iterator[Case]:
    for dtype in ALL:
        for name, call in EMPTY.items():
            ordered = name not in ("sort", "argsort", "searchsorted")
            if dtype in REAL or (ordered and dtype != "bool") or name in MOVES:
                yield Case(f"empty: {name}", call, (numbers(dtype, (0, 3)),))
        for name, call in SCALAR.items():
            if dtype in REAL or (dtype in COMPLEX and name not in ("clip", "searchsorted")):
                yield Case(f"scalar: {name}", call, (numbers(dtype, ()),))
        for name, call in INDEXING.items():
            if dtype != "bool" or not name.startswith("diff"):
                yield Case(f"odd {name}", call, (numbers(dtype, (3, 4, 2)),))
    for name, (make, made) in MADE.items():
        yield Case(f"made: {name}", make, (), made)
    for dtype in NUMERIC:
        yield Case("in place", _add_in_place, (numbers(dtype, (3,)),))
    for dtype, name, axis in itertools.product(REAL, ("sort", "argsort"), (0, -1)):
        call, oracle = _sort_down(name, axis)
        yield Case(f"{name} down", call, (numbers(dtype, (5, 4), 0, 3),), oracle=oracle)


def limits() -> Iterator[Case]:
    for dtype in INTS:
        info = np.iinfo(dtype)
        x = np.array([info.min, info.min + 1, 1, info.max - 1, info.max, 2], dtype)
        y = np.array([1, 2, 3, info.max, 5, 7], dtype)
        for name in ("add", "subtract", "multiply", "floor_divide", "remainder", "maximum", "less"):
            yield Case(f"{name} at limits", function_of(name), (x, y))
        for name in ("negative", "abs", "square", "sign", "bitwise_invert", "isfinite"):
            yield Case(f"{name} at limits", function_of(name), (x,))
        small = numbers(dtype, (9,), -9, 9)
        divisors = np.where(small == 0, 3, small).astype(dtype)[::-1]
        for name in ("floor_divide", "remainder"):
            yield Case(f"{name} of signs", function_of(name), (small, divisors))
        for other in INTS:
            yield Case(f"astype({other}) of limits", _convert_to(other), (x,))
    for dtype, other in itertools.product(FLOATS, ("int8", "int64", "uint8", "bool")):
        least = 0 if other.startswith("u") else -1
        x = np.array([1.9, 0.5, 1.9 * least, 0.4 * least, 100.99], dtype)
        yield Case(f"astype({other}) of fractions", _convert_to(other), (x,))
    parts = (0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, np.nan)
    pairs = np.array(list(itertools.product(parts, parts)))
    for dtype, (name, (kinds, *_)) in itertools.product(COMPLEX, UNARY.items()):
        if dtype in kinds and name in EXACT:
            z = np.empty(len(pairs), dtype)
            z.real, z.imag = pairs[:, 0], pairs[:, 1]
            yield Case(f"{name} of odd complex", function_of(name), (z,), loose=100)


EXACT = {name for name in UNARY if name not in ("round", "reciprocal", "square", "sign")}
"""Functions of complex numbers with infinite parts that the standard or C99 fixes."""

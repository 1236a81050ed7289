"""Calls of functions that reduce, sort, search or compare along axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.array_api.case import (
    ALL,
    COMPLEX,
    FLOATS,
    INEXACT,
    INTS,
    NUMERIC,
    REAL,
    Case,
    function_of,
    label,
    numbers,
    with_options,
)

AXES: tuple[dict[str, Any], ...] = (
    {}, {"axis": 0}, {"axis": -1, "keepdims": True}, {"axis": (0, 1)}, {"axis": ()},
    {"keepdims": True},
)  # fmt: skip
REDUCTIONS = {
    **dict.fromkeys(("sum", "prod"), NUMERIC), **dict.fromkeys(("max", "min"), REAL),
    "mean": INEXACT, **dict.fromkeys(("std", "var"), FLOATS),
    **dict.fromkeys(("all", "any", "count_nonzero"), ALL),
}  # fmt: skip


def reductions() -> Iterator[Case]:
    for name, kinds in REDUCTIONS.items():
        for dtype, how in itertools.product(kinds, AXES):
            x = numbers(dtype, (2, 3, 2), 1, 3)
            yield Case(label(name, how), with_options(name, **how), (x,))
        for dtype in kinds:
            yield Case(name, function_of(name), (numbers(dtype, ()),))
            if name in ("sum", "prod", "all", "any", "count_nonzero"):
                yield Case(name, function_of(name), (numbers(dtype, (0, 2)),))
    for name, to in itertools.product(("sum", "prod"), NUMERIC):
        x = numbers("int8" if to in INTS else to, (2, 3), 0, 3)
        yield Case(f"{name}(dtype={to})", with_options(name, dtype=np.dtype(to)), (x,))
    for name, dtype in itertools.product(("std", "var"), FLOATS):
        x = numbers(dtype, (3, 4))
        yield Case(f"{name}(correction=1)", with_options(name, axis=0, correction=1), (x,))
        yield Case(f"{name}(correction=0.5)", with_options(name, correction=0.5), (x,))
    for name, dtype in itertools.product(("argmax", "argmin"), REAL):
        for how in ({}, {"axis": 0}, {"axis": -1, "keepdims": True}, {"keepdims": True}):
            yield Case(label(name, how), with_options(name, **how), (numbers(dtype, (3, 4)),))
    for name, dtype in itertools.product(("cumulative_sum", "cumulative_prod"), NUMERIC):
        x = numbers(dtype, (2, 3), 1, 2)
        for how in (
            {"axis": 0},
            {"axis": -1, "include_initial": True},
            {
                "axis": 1,
                "dtype": np.dtype(
                    "complex128" if dtype in COMPLEX else "float64" if dtype in FLOATS else "int32"
                ),
            },
        ):
            yield Case(label(name, how), with_options(name, **how), (x,))
        yield Case(name, function_of(name), (numbers(dtype, (4,), 1, 2),))
    for name, dtype in itertools.product(("sort", "argsort"), REAL):
        x = numbers(dtype, (4, 5), 0, 9)
        for how in ({}, {"axis": 0}):
            yield Case(label(name, how), with_options(name, **how, stable=True), (x,))
    for dtype in REAL:
        line, x = np.sort(numbers(dtype, (6,), 0, 9)), numbers(dtype, (2, 3), 0, 9)
        for side in ("left", "right"):
            yield Case(f"searchsorted({side})", with_options("searchsorted", side=side), (line, x))
        order = np.array([2, 0, 1])
        unsorted = np.array([5, 9, 1], dtype)
        yield Case("searchsorted(sorter)", lambda xp, a, v, s: xp.searchsorted(a, v, sorter=s),
                   (unsorted, x, order))  # fmt: skip
    for dtype in ALL:
        x, y = numbers(dtype, (2, 3)), numbers(dtype, (3,))
        yield Case("where", function_of("where"), (numbers("bool", (2, 1)), x, y))
        if dtype != "bool":
            yield Case("where(number)", lambda xp, c, x: xp.where(c, x, 2), (x > 1, x))
    for dtype in NUMERIC:
        x = numbers(dtype, (3, 4))
        for how in ({}, {"axis": 0}, {"n": 2}, {"n": 0}):
            yield Case(label("diff", how), with_options("diff", **how), (x,))
        ends = numbers(dtype, (3, 1)), numbers(dtype, (3, 2))
        yield Case("diff(ends)", lambda xp, x, a, b: xp.diff(x, prepend=a, append=b), (x, *ends))
    for dtype in REAL:
        x = numbers(dtype, (2, 3), 0, 9)
        for how in ({"min": 2}, {"max": 5}, {"min": 2, "max": 5}, {}):
            yield Case(label("clip", how), with_options("clip", **how), (x,))
        limits = np.array([1, 2, 3], dtype), np.array([[4], [5]], dtype)
        yield Case("clip(arrays)", function_of("clip"), (x, *limits))

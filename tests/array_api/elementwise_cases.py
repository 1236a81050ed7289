"""Calls of elementwise functions and operators."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.array_api.case import (
    ALL,
    BOOL,
    COMPLEX,
    FLOATS,
    INEXACT,
    INTS,
    NUMERIC,
    REAL,
    SHAPES,
    Case,
    Make,
    function_of,
    mixing_pairs,
    numbers,
)

ODD = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, 1e30, -1e-30, np.inf, -np.inf, np.nan)
ODD_PAIRS = tuple(np.array(part) for part in zip(*itertools.product(ODD, ODD), strict=True))

UNARY: dict[str, tuple[tuple[str, ...], float, float]] = {
    **dict.fromkeys(("abs", "negative", "positive", "square", "sign"), (NUMERIC, -4, 4)),
    **dict.fromkeys(("ceil", "floor", "trunc"), (REAL, -4, 4)), "round": (NUMERIC, -4, 4),
    **dict.fromkeys(("acos", "asin", "atanh"), (INEXACT, -0.9, 0.9)),
    **dict.fromkeys(("asinh", "atan", "cos", "cosh", "exp", "expm1", "sin", "sinh", "tanh", "tan"),
                    (INEXACT, -1.4, 1.4)),
    "acosh": (INEXACT, 1.1, 4),
    **dict.fromkeys(("log", "log1p", "log2", "log10"), (INEXACT, 0.1, 4)),
    "sqrt": (INEXACT, 0, 9), "reciprocal": (INEXACT, 0.5, 4), "signbit": (FLOATS, -4, 4),
    "bitwise_invert": (BOOL + INTS, -4, 4), "logical_not": (BOOL, 0, 1),
    **dict.fromkeys(("conj", "imag", "real"), (COMPLEX, -4, 4)),
    **dict.fromkeys(("isfinite", "isinf", "isnan"), (NUMERIC, -4, 4)),
}  # fmt: skip
BINARY: dict[str, tuple[tuple[str, ...], float, float]] = {
    **dict.fromkeys(("add", "multiply", "subtract"), (NUMERIC, -4, 4)),
    **dict.fromkeys(("equal", "not_equal"), (ALL, -2, 2)),
    **dict.fromkeys(("greater", "greater_equal", "less", "less_equal", "maximum", "minimum"),
                    (REAL, -2, 2)),
    "divide": (INEXACT, 1, 4), "floor_divide": (REAL, 1, 4), "remainder": (REAL, 1, 4),
    "pow": (NUMERIC, 1, 3),
    **dict.fromkeys(("atan2", "copysign", "hypot", "logaddexp", "nextafter"), (FLOATS, -4, 4)),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), (BOOL + INTS, -4, 4)),
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), (INTS, 0, 4)),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), (BOOL, 0, 1)),
}  # fmt: skip
OPERATORS: dict[str, tuple[Any, str]] = {
    "+": (operator.add, "add"), "-": (operator.sub, "subtract"), "*": (operator.mul, "multiply"),
    "/": (operator.truediv, "divide"), "//": (operator.floordiv, "floor_divide"),
    "%": (operator.mod, "remainder"), "**": (operator.pow, "pow"),
    "&": (operator.and_, "bitwise_and"), "|": (operator.or_, "bitwise_or"),
    "^": (operator.xor, "bitwise_xor"), "<<": (operator.lshift, "bitwise_left_shift"),
    ">>": (operator.rshift, "bitwise_right_shift"), "<": (operator.lt, "less"),
    "<=": (operator.le, "less_equal"), ">": (operator.gt, "greater"),
    ">=": (operator.ge, "greater_equal"), "==": (operator.eq, "equal"),
    "!=": (operator.ne, "not_equal"),
}  # fmt: skip


def elementwise() -> Iterator[Case]:
    for name, (kinds, low, high) in UNARY.items():
        for dtype, shape in itertools.product(kinds, SHAPES):
            yield Case(name, function_of(name), (numbers(dtype, shape, low, high),))
        for dtype in set(FLOATS) & set(kinds):
            yield Case(f"{name} of odd numbers", function_of(name), (np.array(ODD, dtype),))
    for name, (kinds, low, high) in BINARY.items():
        for a, b in mixing_pairs(kinds):
            yield Case(
                name,
                function_of(name),
                (numbers(a, (2, 3), low, high), numbers(b, (3,), low, high)),
            )
        for dtype in kinds:
            for left, right in (((), (4,)), ((2, 1), (1, 3)), ((0,), (1,)), ((3,), ())):
                arrays = (numbers(dtype, left, low, high), numbers(dtype, right, low, high))
                yield Case(name, function_of(name), arrays)
        for dtype in set(FLOATS) & set(kinds):
            pair = tuple(part.astype(dtype) for part in ODD_PAIRS)
            yield Case(f"{name} of odd numbers", function_of(name), pair)


def _pass_arrays(function: Make) -> Make:
    return lambda xp, *arrays: function(*arrays)


def _put_last(call: Make, scalar: Any) -> Make:
    return lambda xp, x: call(xp, x, scalar)


def _put_first(call: Make, scalar: Any) -> Make:
    return lambda xp, x: call(xp, scalar, x)


def operators() -> Iterator[Case]:
    scalars = {"b": True, "i": 2, "u": 2, "f": 2.5, "c": 1 + 2j}
    for sign, (operate, name) in OPERATORS.items():
        kinds, low, high = BINARY[name]
        forms = {f"x {sign} y": _pass_arrays(operate), name: function_of(name)}
        for dtype, (form, call) in itertools.product(kinds, forms.items()):
            x, y = numbers(dtype, (2, 3), low, high), numbers(dtype, (3,), low, high)
            scalar = scalars[x.dtype.kind]
            yield Case(form, call, (x, y))
            yield Case(f"{form}, number last", _put_last(call, scalar), (x,))
            yield Case(f"{form}, number first", _put_first(call, scalar), (x,))
    for dtype in BOOL + INTS:
        yield Case("~x", lambda xp, x: ~x, (numbers(dtype, (3,)),))
    for dtype in NUMERIC:
        x = numbers(dtype, (2, 3))
        for sign, call in {"-x": lambda xp, x: -x, "+x": lambda xp, x: +x,
                           "abs(x)": lambda xp, x: abs(x)}.items():  # fmt: skip
            yield Case(sign, call, (x,))
        yield Case("x @ y", lambda xp, x, y: x @ y, (x, numbers(dtype, (3, 2))))

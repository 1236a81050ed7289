"""What stands for functions of numpy and scipy: each hint is code, which gives the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.dtypes import DTYPES
from graphflow.ir.name_hints import FUNCTION_HINTS

special = pytest.importorskip("scipy.special")

POINTS = np.array([0.0, -0.0, 1e-3, 0.5, -0.5, 2.25, -2.25, 33.3, -33.3, 1e6, -1e6])
A, B = (part.reshape(-1) for part in np.meshgrid(POINTS, POINTS))
WITH_NAN = np.array([[1.0, np.nan, -3.0], [np.inf, 0.0, np.nan]])
MATRIX, OTHER = np.arange(6.0).reshape(2, 3) - 2, np.array([[0.0, -1.0, 5.0], [2.0, 2.0, 1e6]])
VECTOR = np.array([1.0, np.inf, -2.0])
INTS, SHIFTS = np.array([5, 0, -7, 1 << 40]), np.array([3, 1, 2, 0])


@dataclass(frozen=True)
class Case:
    """A hint's inputs by the names that it uses, what it stands for, and whether numbers that are
    no tensors are among them."""

    reference: Callable[..., Any]
    inputs: dict[str, Any]
    fixed: dict[str, Any] = field(default_factory=dict)
    smooth: bool = False


def _of_x(reference: Any) -> Case:
    return Case(reference, {"x": POINTS}, smooth=True)


def _of_pairs(reference: Any) -> Case:
    return Case(reference, {"x": A, "y": B}, smooth=True)


def _make_case(reference: Any, *arrays: Any, **fixed: Any) -> Case:
    return Case(reference, dict(zip(("x", "y"), arrays, strict=False)), fixed)


PLAIN = {
    "absolute": np.absolute, "arccos": np.arccos, "arccosh": np.arccosh, "arcsin": np.arcsin,
    "arcsinh": np.arcsinh, "arctan": np.arctan, "arctanh": np.arctanh, "rint": np.rint,
    "cbrt": np.cbrt, "exp2": np.exp2, "sinc": np.sinc, "deg2rad": np.deg2rad,
    "rad2deg": np.rad2deg, "gammaln": special.gammaln, "conjugate": np.conjugate,
}  # fmt: skip
PAIRS = {
    "power": np.power, "arctan2": np.arctan2, "mod": np.mod, "true_divide": np.true_divide,
    "fmax": np.fmax, "fmin": np.fmin, "xlogy": special.xlogy,
}  # fmt: skip
CASES: dict[str, Case] = {
    **{name: _of_x(function) for name, function in PLAIN.items()},
    **{name: _of_pairs(function) for name, function in PAIRS.items()},
    "left_shift": _make_case(np.left_shift, INTS, SHIFTS),
    "right_shift": _make_case(np.right_shift, INTS, SHIFTS),
    "invert": _make_case(np.invert, INTS),
    "amax": _make_case(np.max, WITH_NAN), "amin": _make_case(np.min, OTHER),
    "ptp": _make_case(np.ptp, OTHER),
    "nanmax": _make_case(np.nanmax, WITH_NAN), "nanmin": _make_case(np.nanmin, WITH_NAN),
    "nansum": _make_case(np.nansum, WITH_NAN), "nanmean": _make_case(np.nanmean, WITH_NAN),
    "nan_to_num": _make_case(
        lambda x: np.nan_to_num(x, posinf=9.0, neginf=-9.0), WITH_NAN, low=-9.0, high=9.0
    ),
    "average": _make_case(np.mean, MATRIX),
    "average of weights": Case(lambda x, w: np.average(x, weights=w), {"x": MATRIX, "w": OTHER}),
    "cumulative_sum": _make_case(np.cumsum, VECTOR),
    "cumulative_prod": _make_case(np.cumprod, VECTOR),
    "percentile": _make_case(lambda x: np.percentile(x, 30), MATRIX, q=30),
    "isclose": Case(
        lambda a, b: np.isclose(a, b, rtol=0, atol=0.5), {"a": VECTOR, "b": VECTOR + 0.25},
        {"tolerance": 0.5},
    ),
    "allclose": Case(
        lambda a, b: np.allclose(a, b, rtol=0, atol=0.5), {"a": VECTOR, "b": VECTOR + 0.25},
        {"tolerance": 0.5},
    ),
    "digitize": _make_case(
        lambda x: np.digitize(x, [0.0, 2.25]), POINTS, bins=np.array([0.0, 2.25])
    ),
    "argwhere": _make_case(np.argwhere, MATRIX, size=5),
    "flatnonzero": _make_case(np.flatnonzero, MATRIX, size=5),
    "cross": _make_case(np.cross, MATRIX, OTHER),
    "dot": _make_case(np.dot, MATRIX, OTHER.T),
    "vdot": Case(np.vdot, {"a": MATRIX * 1j, "b": OTHER + 2j}),
    "inner": Case(np.inner, {"a": MATRIX * 1j, "b": OTHER + 2j}),
    "kron": Case(np.kron, {"a": MATRIX, "b": OTHER}),
    "transpose": _make_case(lambda x: np.transpose(x, (1, 0)), MATRIX, y=(1, 0)),
    "rot90": _make_case(np.rot90, MATRIX), "fliplr": _make_case(np.fliplr, MATRIX),
    "flipud": _make_case(np.flipud, MATRIX), "ravel": _make_case(np.ravel, MATRIX),
    "concatenate": _make_case(lambda *both: np.concatenate(both), MATRIX, OTHER),
    "hstack": Case(lambda *both: np.hstack(both), {"matrices": [MATRIX, OTHER]}),
    "hstack of vectors": Case(lambda *both: np.hstack(both), {"vectors": [VECTOR, VECTOR]}),
    "vstack": Case(lambda *both: np.vstack(both), {"matrices": [MATRIX, OTHER]}),
    "vstack of vectors": Case(lambda *both: np.vstack(both), {"vectors": [VECTOR, VECTOR]}),
    "column_stack": Case(lambda *both: np.column_stack(both), {"vectors": [VECTOR, VECTOR]}),
    "dstack": Case(lambda *both: np.dstack(both), {"matrices": [MATRIX, OTHER]}),
    "logspace": Case(lambda: np.logspace(-2, 3, 4), {}, {"a": -2.0, "b": 3.0, "n": 4}),
    "identity": Case(lambda: np.identity(3), {}, {"x": 3}),
    "empty_like": _make_case(np.zeros_like, MATRIX),
}  # fmt: skip

# Hints that are no code, or that make numbers which nothing is compared with.
WORDS = {
    "array", "asarray", "from_dlpack", "empty", "rand", "randn", "shuffle", "save", "load",
    "histogram", "nanmedian", "select", "unique",
}  # fmt: skip
LISTS = ("matrices", "vectors")


def _code(name: str) -> tuple[str, str]:
    """The expression of a hint, and what it calls z."""
    key, _, which = name.partition(" of ")
    told = FUNCTION_HINTS[key].replace(", reshaped", "")
    first, _, second = told.partition(", or ")
    expression = second if which else first
    expression, _, z = expression.partition(", with z = ")
    return expression, z


def _evaluate_code(name: str, names: dict[str, Any]) -> Any:
    expression, z = _code(name)
    scope = {"gf": gf, "math": math, **names}
    if z:
        scope["z"] = eval(z, scope)  # noqa: S307 - a hint of ours
    made = eval(expression, scope)  # noqa: S307
    if not callable(made):
        return made
    arguments = list(names.values())
    return made(arguments) if name == "concatenate" else made(*arguments)


def _build_case(name: str, case: Case) -> tuple[Any, dict[Any, Any]]:
    names: dict[str, Any] = {}
    feeds: dict[Any, Any] = {}
    for key, value in case.inputs.items():
        arrays = value if key in LISTS else [value]
        fed = [gf.placeholder(a.dtype.name, a.shape) for a in arrays]
        feeds.update(zip(fed, arrays, strict=True))
        names[key] = fed if key in LISTS else fed[0]
    return _evaluate_code(name, {**names, **case.fixed}), feeds


@pytest.mark.parametrize("name", CASES)
def test_a_hint_gives_the_numbers_of_what_it_stands_for(name: str) -> None:
    case = CASES[name]
    y, feeds = _build_case(name, case)
    with np.errstate(all="ignore"):
        (have,) = evaluate([y], feeds)
        wanted = np.asarray(case.reference(*feeds.values()))
    np.testing.assert_allclose(have.reshape(wanted.shape), wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.smooth])
def test_a_hint_has_the_slopes_of_what_it_stands_for(name: str) -> None:
    """By differences, where these are numbers; at 0 it may have one slope of several, no NaN."""
    case = CASES[name]
    y, feeds = _build_case(name, case)
    with np.errstate(all="ignore"):
        slopes = evaluate(gf.gradients(gf.sum(y), list(feeds)), feeds)
        arrays = list(feeds.values())
        value = case.reference(*arrays)
        for i, slope in enumerate(slopes):
            step = 1e-6 * np.maximum(1, np.abs(arrays[i]))
            ends = [
                case.reference(*(a + sign * step if i == j else a for j, a in enumerate(arrays)))
                for sign in (1, -1)
            ]
            right, left = (ends[0] - value) / step, (value - ends[1]) / step
            tame = (np.abs(right - left) < 1e-2) & (np.abs(right) < 1e3)
            tame &= np.all([np.abs(a) < 1e3 for a in arrays], axis=0)  # a step is not a period
            scale = np.maximum(np.abs(value), 1) * 1e-9 / step + 1e-3 * np.abs(right)
            wrong = tame & (np.abs(slope - (right + left) / 2) > scale + 1e-4)
            assert not wrong.any(), [a[wrong] for a in arrays]
            about = np.isfinite(ends[0]) & np.isfinite(ends[1]) & np.isfinite(value)
            assert not np.isnan(slope[about]).any(), [a[about & np.isnan(slope)] for a in arrays]


def test_every_hint_for_a_function_of_numpy_or_scipy_is_tried() -> None:
    known = {
        name
        for name in FUNCTION_HINTS
        if callable(getattr(np, name, None)) or hasattr(special, name)
    }
    assert known - WORDS - CASES.keys() - set(DTYPES) == set()

"""The vectorised functions against references of more digits: whole range, special values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from graphflow.ir.op import REGISTRY
from graphflow.ops.kernels.fusion.region_kernels import run_op

Array = np.ndarray[Any, Any]
LIMIT = {"float32": 2.0, "float64": 4.0}
WIDER = {"float32": np.float64, "float64": np.longdouble}
UNARY = ("exp", "expm1", "log", "log1p", "log2", "log10", "tanh", "erf", "sin", "cos", "sigmoid",
         "asin", "acos", "atan")  # fmt: skip

pytestmark = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant < 60, reason="the references need 80-bit floats"
)


def run_ours(name: str, *arrays: Array) -> Array:
    result: Array = run_op(REGISTRY[name], np, arrays, {})
    assert result is not None
    return result


def erf_reference(x: Array) -> Array:
    """A series of positive terms: 2/√π·exp(-x²)·Σ 2ⁿx²ⁿ⁺¹/(2n+1)!!; flat beyond 6.5. Of smaller
    numbers it has fewer."""
    result = np.copysign(np.ones_like(x), x)
    for low, high, terms in ((0, 0.5, 30), (0.5, 2, 70), (2, 6.5, 250)):
        here = (np.abs(x) >= low) & (np.abs(x) < high)
        result[here] = np.copysign(_erf_series(np.abs(x[here]), terms), x[here])
    return np.where(np.isnan(x), x, result)


def _erf_series(t: Array, terms: int) -> Array:
    term = t.copy()
    total = t.copy()
    square = 2 * t * t
    for n in range(1, terms):
        term *= square / (2 * n + 1)
        total += term
    return total * np.exp(-t * t) * (2 / np.sqrt(np.arccos(t.dtype.type(-1))))


def reference(name: str, *arrays: Array) -> Array:
    with np.errstate(all="ignore"):
        if name == "erf":
            return erf_reference(arrays[0])
        if name == "sigmoid":
            return 1 / (1 + np.exp(-arrays[0]))
        return getattr(np, {"pow": "power"}.get(name, name))(*arrays)


def ulps(have: Array, exact: Array) -> Array:
    """How far results are off, in units of the last place of what is exact."""
    with np.errstate(all="ignore"):
        rounded = exact.astype(have.dtype)
        unit = np.spacing(np.abs(rounded)).astype(exact.dtype)
        off = np.abs(have.astype(exact.dtype) - exact) / unit
    same = (have == rounded) | (np.isnan(have) & np.isnan(rounded))
    return np.where(same, 0.0, off).astype(float)


def inputs(name: str, dtype: str) -> Array:
    """Numbers of every exponent, of every size that matters, and those near which it is hard."""
    rng = np.random.default_rng(7)
    bits = np.dtype(dtype).itemsize * 8
    any_bits = rng.integers(0, 2**bits, 200_000, dtype=f"uint{bits}").view(dtype)
    spans = [rng.uniform(-s, s, 60_000) for s in (1e-3, 0.5, 1.5, 10, 100, 800)]
    turns = np.arange(-2000, 2000) * (math.pi / 4)
    near = np.concatenate([turns + d for d in (0, 1e-9, -1e-7)])
    found = np.concatenate([any_bits, *[s.astype(dtype) for s in (*spans, near)]])
    if name in ("log", "log2", "log10"):
        found = np.abs(found)
    if name == "log1p":
        with np.errstate(all="ignore"):
            found = np.where(found < -1, -1 / found, found)
    return found.astype(dtype)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", UNARY)
def test_functions_are_close_over_their_whole_range(name: str, dtype: str) -> None:
    x = inputs(name, dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        off = ulps(run_ours(name, x), reference(name, x.astype(WIDER[dtype])))
    worst = int(np.argmax(np.nan_to_num(off, nan=np.inf)))
    assert off[worst] <= LIMIT[dtype], f"{name}({x[worst]!r}) is off by {off[worst]:.2f} ulp"


@pytest.mark.parametrize("dtype", ["float32"])
def test_powers_are_close_over_their_whole_range(dtype: str) -> None:
    rng = np.random.default_rng(8)
    x = np.exp(rng.uniform(-80, 80, 200_000)).astype(dtype)
    y = (rng.uniform(-100, 100, 200_000) / np.maximum(np.abs(np.log(x)), 1)).astype(dtype)
    whole = rng.integers(-6, 7, 200_000).astype(dtype)
    some = rng.normal(size=200_000).astype(dtype)
    for a, b in ((x, y), (some, whole), (np.abs(some), y)):
        exact = reference("pow", a.astype(WIDER[dtype]), b.astype(WIDER[dtype]))
        assert ulps(run_ours("pow", a, b), exact).max() <= LIMIT[dtype]


def draw_special_values(dtype: str) -> Array:
    info = np.finfo(dtype)
    tiny = [0.0, info.smallest_subnormal, info.tiny / 3, info.tiny, info.eps, 0.25, 0.5]
    large = [1.0, 1.5, 2.0, 3.0, 87.0, 104.0, 710.0, 746.0, 1e5, 1e6, info.max, np.inf, np.nan]
    with np.errstate(over="ignore"):
        positive = np.array(tiny + large).astype(dtype)
    return np.concatenate([positive, -positive])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", UNARY)
def test_special_values_are_as_numpy_has_them(name: str, dtype: str) -> None:
    x = draw_special_values(dtype)
    exact = reference(name, x.astype(WIDER[dtype]))
    with np.errstate(over="ignore"):
        have, want = run_ours(name, x), exact.astype(dtype)
    assert np.array_equal(np.isnan(have), np.isnan(want))
    assert np.array_equal(have[np.isinf(want)], want[np.isinf(want)])
    zero = want == 0
    assert np.array_equal(have[zero], want[zero])
    signed = zero if name != "sigmoid" else zero & False
    assert np.array_equal(np.signbit(have[signed]), np.signbit(want[signed]))


@pytest.mark.parametrize("dtype", ["float32"])
def test_powers_of_special_values_are_as_numpy_has_them(dtype: str) -> None:
    x, y = (a.ravel() for a in np.meshgrid(draw_special_values(dtype), draw_special_values(dtype)))
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), y.astype(np.float64)).astype(dtype)
    have = run_ours("pow", x, y)
    assert ulps(have, want.astype(WIDER[dtype])).max() <= LIMIT[dtype] + 1
    assert np.array_equal(np.signbit(have[want == 0]), np.signbit(want[want == 0]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_powers_of_whole_numbers_are_whole(dtype: str) -> None:
    base, exponent = (a.ravel() for a in np.meshgrid(np.arange(1.0, 10), np.arange(0.0, 8)))
    x, y = base.astype(dtype), exponent.astype(dtype)
    (have,) = REGISTRY["pow"].run(np, [x, y], {})
    assert np.array_equal(have, [int(a) ** int(b) for a, b in zip(x, y, strict=True)])


@pytest.mark.parametrize("name", [*UNARY, "gelu", "softplus", "mish"])
def test_the_number_of_elements_and_their_place_change_no_bit(name: str) -> None:
    x = np.concatenate([inputs("log", "float32")[:400], draw_special_values("float32")])
    # Of two NaN a product has either one's payload, as the compiler orders the factors.
    x[np.isnan(x)] = np.nan
    whole = run_ours(name, x)
    for start, stop in ((0, 1), (1, 18), (3, 67), (5, 300), (16, 48), (399, 430)):
        assert run_ours(name, x[start:stop].copy()).tobytes() == whole[start:stop].tobytes()

"""`x.__array_namespace__()`: code that is written for the array API standard builds graphs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from tests import loaded
from tests.house.sources import ROOT

X = np.arange(12, dtype="float32").reshape(3, 4) ** 2 - 20


def standardize(x: Any) -> Any:
    """Scale columns to mean 0 and variance 1, as a library writes it for any namespace."""
    xp = x.__array_namespace__(api_version="2024.12")
    center = xp.mean(x, axis=0, keepdims=True)
    scale = xp.std(x, axis=0, keepdims=True, correction=1)
    return (x - center) / xp.where(scale > 0, scale, xp.ones_like(scale, device=x.device))


def log_softmax(x: Any) -> Any:
    xp = x.__array_namespace__()
    shifted = x - xp.max(x, axis=-1, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))


def principal_axes(x: Any, count: int) -> Any:
    xp = x.__array_namespace__()
    centered = x - xp.mean(x, axis=0)
    values, vectors = xp.linalg.eigh(centered.T @ centered / (x.shape[0] - 1))
    signs = xp.sign(xp.take(vectors, xp.asarray([0]), axis=0))
    return xp.flip(values)[:count], xp.abs(vectors * signs)[:, -count:]


def pairwise_distances(x: Any) -> Any:
    xp = x.__array_namespace__()
    squares = xp.sum(x * x, axis=1)
    squared = squares[:, None] + squares[None, :] - 2 * (x @ xp.matrix_transpose(x))
    other = ~xp.eye(x.shape[0], dtype=xp.bool)
    return xp.sqrt(1 + xp.clip(squared, 0, None)) * xp.astype(other, x.dtype)


@pytest.mark.parametrize(
    "function",
    [standardize, log_softmax, lambda x: principal_axes(x, 2)[0], pairwise_distances],
)
def test_functions_of_libraries_build_graphs_with_gradients(function: Any) -> None:
    x = gf.placeholder("float32", (3, 4))
    y = function(x)
    (slope,) = gf.gradients(gf.sum(y), [x])
    with gf.Session() as s:
        value, slope = s.run([y, slope], {x: X})
    np.testing.assert_allclose(value, function(X.astype("float64")), rtol=1e-3, atol=1e-3)
    assert np.isfinite(slope).all()


def test_a_namespace_has_versions_dtypes_and_devices() -> None:
    x = gf.placeholder("float32", (3,))
    xp = x.__array_namespace__()
    assert xp is gf.array_api and xp.__array_api_version__ == "2024.12"
    assert x.dtype == xp.float32 and xp.isdtype(x.dtype, ("integral", "real floating"))
    info = xp.__array_namespace_info__()
    assert info.default_dtypes()["real floating"] == xp.asarray([1.0]).dtype == xp.float32
    assert set(info.dtypes(kind="unsigned integer")) == {"uint8", "uint16", "uint32", "uint64"}
    assert not info.capabilities()["data-dependent shapes"]
    assert info.default_device() == x.device and x.device in info.devices()
    for device in info.devices():  # each is there
        with gf.Session() as s:
            assert s.run(xp.zeros((), device=device)) == 0
    with pytest.raises(gf.errors.ArgumentError, match=r"'2030\.01'.*use one of .*2024\.12"):
        x.__array_namespace__(api_version="2030.01")


def test_nested_lists_may_hold_tensors() -> None:
    xp, x = gf.array_api, gf.placeholder("int32", ())
    with gf.Session() as s:
        found = s.run(xp.asarray([[x, x + 1], [3, x]]), {x: 5})
        half = s.run(xp.asarray([x, x], dtype=xp.float32), {x: 5})
    np.testing.assert_array_equal(found, [[5, 6], [3, 5]])
    assert found.dtype == "int64"  # as numpy does with a Python int beside an int32
    assert half.dtype == "float32" and half.tolist() == [5, 5]


def test_devices_pin_nodes() -> None:
    xp, x = gf.array_api, gf.placeholder("bool", (3,))
    assert [t.device for t in (xp.zeros(3, device="cpu:0"), x.to_device("gpu"), x)] == [
        "cpu:0", "gpu", "",
    ]  # fmt: skip
    with gf.Session() as s:
        y = xp.astype(x.to_device("cpu"), xp.int8, device="cpu")
        assert s.run(y, {x: [True, False, True]}).tolist() == [1, 0, 1]
    with pytest.raises(gf.errors.DeviceError, match="did you mean 'gpu:0'"):
        xp.zeros(3, device="cuda:0")


def test_dtypes_answer_questions() -> None:
    xp = gf.array_api
    assert xp.finfo(xp.complex64) == xp.finfo(xp.asarray([1.0])) != xp.finfo(xp.float64)
    assert xp.finfo("bfloat16").eps == 2**-7 and xp.iinfo(xp.int8).max == 127
    assert xp.result_type(xp.int8, xp.uint8) == xp.int16
    assert xp.result_type(xp.float32, 1j, True) == xp.complex64
    assert xp.can_cast(xp.float32, xp.complex128) and not xp.can_cast(xp.int64, xp.float64)
    for call in (
        lambda: xp.result_type(xp.int8, 1.5), lambda: xp.result_type(xp.int8, xp.float32),
        lambda: xp.result_type(1, 2), lambda: xp.finfo(xp.int8), lambda: xp.iinfo(xp.float32),
        lambda: xp.isdtype(xp.int8, "integer"),
    ):  # fmt: skip
        with pytest.raises(gf.errors.GraphError):
            call()


REFUSED: dict[str, Any] = {
    r"gf\.nonzero\(x, size\)": lambda xp, x: xp.nonzero(x),
    r"gf\.unique_values\(x, size\)": lambda xp, x: xp.unique_values(x),
    r"gf\.unique_counts\(x, size\)": lambda xp, x: xp.unique_counts(x),
    r"gf\.unique_inverse\(x, size\)": lambda xp, x: xp.unique_inverse(x),
    r"gf\.unique_all\(x, size\)": lambda xp, x: xp.unique_all(x),
    "truth value.*gf.where": lambda xp, x: bool(x[0] > 0),
    "complex value.*Session.run": lambda xp, x: complex(x[0]),
    "mask": lambda xp, x: x[x > 0],
    "tensors do not change": lambda xp, x: x.__setitem__(0, 1.0),
    "array.*Session.run": lambda xp, x: xp.repeat(x, gf.placeholder("int64", (3,))),
    "is a copy": lambda xp, x: xp.asarray([1.0], copy=False),
    "has no __dlpack__": lambda xp, x: xp.from_dlpack([1.0]),
}


@pytest.mark.parametrize("told", REFUSED)
def test_shapes_that_depend_on_values_are_refused_in_one_line(told: str) -> None:
    x = gf.placeholder("float32", (3,))
    with pytest.raises(gf.errors.GraphError, match=told) as caught:
        REFUSED[told](gf.array_api, x)
    assert "\n" not in str(caught.value)


SCIPY = """
import graphflow as gf, numpy as np, scipy.fft, scipy.integrate, scipy.special, scipy.stats

calls = (
    lambda x: scipy.special.softmax(x, axis=1), lambda x: scipy.stats.gmean(x),
    lambda x: scipy.stats.skew(x), lambda x: scipy.stats.kurtosis(x), scipy.fft.fft,
    lambda x: scipy.integrate.trapezoid(x, axis=0),
)
value = np.random.default_rng(0).uniform(0.1, 0.9, (5, 4)).astype("float32")
x = gf.placeholder("float32", (5, 4))
with gf.Session() as s:
    for call, found in zip(calls, s.run([call(x) for call in calls], {x: value})):
        np.testing.assert_allclose(found, call(value), rtol=1e-3, atol=1e-4)
"""


@pytest.mark.slow
def test_functions_of_scipy_build_graphs() -> None:
    pytest.importorskip("scipy")
    environment = {**os.environ, "SCIPY_ARRAY_API": "1", "PYTHONPATH": str(ROOT)}
    done = loaded.run_python(["-c", SCIPY], environment)
    assert done.returncode == 0, done.stderr

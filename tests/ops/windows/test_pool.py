"""Pooling against windows taken one by one, and wrong arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.errors import ArgumentError, DTypeError, GraphError, ShapeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.spec import Dim
from graphflow.ops import nn
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool
from graphflow.transforms.reverse_mode import gradients

Array = np.ndarray[Any, Any]


def value(build: Any, x: Array) -> Any:
    p = placeholder(x.dtype, (None, *x.shape[1:]))
    result = build(p)
    several = isinstance(result, tuple)
    values = evaluate(list(result) if several else [result], {p: x})
    return values if several else values[0]


@st.composite
def windows(draw: Any) -> tuple[Array, dict[str, Any]]:
    rank = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    kernel, dilation, size = each(1, 3), each(1, 2), each(1, 6)
    padding = tuple(
        (min(a, k - 1), min(b, k - 1))
        for a, b, k in zip(each(0, 2), each(0, 2), kernel, strict=True)
    )
    assume(
        all(
            n + sum(p) > (k - 1) * d
            for n, p, k, d in zip(size, padding, kernel, dilation, strict=True)
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x = rng.integers(-3, 4, (draw(st.integers(1, 2)), 2, *size)).astype("float64")
    attrs = {
        "kernel": kernel,
        "stride": each(1, 3),
        "padding": padding,
        "dilation": dilation,
        "ceil_mode": draw(st.booleans()),
    }
    return x, attrs


def positions(n: int, k: int, s: int, p: tuple[int, int], d: int, ceil_mode: bool) -> int:
    room = n + sum(p) - (k - 1) * d - 1
    count = -(-room // s) + 1 if ceil_mode else room // s + 1
    return count - 1 if (count - 1) * s >= n + p[0] else count


def each_window(x: Array, attrs: dict[str, Any]) -> Any:
    """Position, elements inside as (index, values (batch, channels)) and how many count with
    padding."""
    axes = list(
        zip(
            x.shape[2:], attrs["kernel"], attrs["stride"], attrs["padding"], attrs["dilation"],
            strict=True,
        )
    )  # fmt: skip
    out = [positions(*axis, attrs["ceil_mode"]) for axis in axes]
    for at in np.ndindex(*out):
        elements, padded = [], 0
        for tap in np.ndindex(*attrs["kernel"]):
            index = tuple(
                o * s - p[0] + t * d for o, t, (_, _, s, p, d) in zip(at, tap, axes, strict=True)
            )
            padded += all(i < n + p[1] for i, (n, _, _, p, _) in zip(index, axes, strict=True))
            if all(0 <= i < n for i, n in zip(index, x.shape[2:], strict=True)):
                elements.append((index, x[(..., *index)]))
        yield out, at, elements, padded


@given(windows())
@settings(max_examples=80)
def test_max_pool_and_its_indices(case: tuple[Array, dict[str, Any]]) -> None:
    x, attrs = case
    have, indices = value(lambda x: nn.max_pool(x, **attrs, return_indices=True), x)
    flat = x.reshape(*x.shape[:2], -1)
    for out, at, elements, _ in each_window(x, attrs):
        assert have.shape[2:] == tuple(out)
        if not elements:
            assert (have[(..., *at)] == -np.inf).all()
            continue
        wanted = np.max([v for _, v in elements], axis=0)
        np.testing.assert_array_equal(have[(..., *at)], wanted)
        found = np.take_along_axis(flat, indices[(..., *at)][..., None], 2)[..., 0]
        np.testing.assert_array_equal(found, wanted)
        first = np.argmax([v for _, v in elements], axis=0)
        places = np.array([np.ravel_multi_index(i, x.shape[2:]) for i, _ in elements])
        np.testing.assert_array_equal(indices[(..., *at)], places[first])


@given(windows(), st.booleans())
@settings(max_examples=80)
def test_avg_pool_and_sums(case: tuple[Array, dict[str, Any]], counted: bool) -> None:
    x, attrs = case
    have = value(lambda x: nn.avg_pool(x, **attrs, count_include_pad=counted), x)
    sums = value(lambda x: nn.avg_pool(x, **attrs, divisor=1), x)
    for _, at, elements, padded in each_window(x, attrs):
        total = np.sum([v for _, v in elements], axis=0) if elements else np.zeros(x.shape[:2])
        count = max(1, padded if counted else len(elements))
        np.testing.assert_allclose(sums[(..., *at)], total, rtol=1e-12)
        np.testing.assert_allclose(have[(..., *at)], total / count, rtol=1e-12)


def test_lp_pool_is_the_norm_of_windows_and_flat_at_zero() -> None:
    a = np.array([[[3.0, -4.0, 0.0, 0.0, 1.0, 1.0]]])
    np.testing.assert_allclose(value(lambda x: nn.lp_pool(x, 2), a)[0, 0], [5, 0, 2**0.5])
    np.testing.assert_allclose(value(lambda x: nn.lp_pool(x, 2, p=1), a)[0, 0], [7, 0, 2])
    x = placeholder("float64", a.shape)
    for p in (1, 2, 3):
        (g,) = evaluate(gradients(nn.lp_pool(x, 2, p), [x]), {x: a})
        assert np.isfinite(g).all() and (g[0, 0, 2:4] == 0).all()
    np.testing.assert_allclose(value(lambda x: nn.global_lp_pool(x, 2), a), 27**0.5)


def test_nan_is_the_largest_and_has_the_gradient() -> None:
    a = np.array([[[1.0, np.nan, 2.0, 5.0]]])
    x = placeholder("float64", a.shape)
    y = nn.max_pool1d(x, 2)
    have, g = evaluate([y, *gradients(y, [x])], {x: a})
    np.testing.assert_array_equal(have, [[[np.nan, 5]]])
    np.testing.assert_array_equal(g, [[[0, 1, 0, 1]]])


def test_the_first_of_equal_elements_has_the_gradient() -> None:
    a = np.array([[[[1.0, 3.0, 3.0], [3.0, 0.0, 3.0]]]])
    x = placeholder("float64", a.shape)
    first = [[[[0, 1.0, 0], [0, 0, 0]]]]
    np.testing.assert_array_equal(
        evaluate(gradients(nn.max_pool2d(x, (2, 3)), [x]), {x: a})[0], first
    )
    np.testing.assert_array_equal(evaluate(gradients(nn.global_max_pool(x), [x]), {x: a})[0], first)


def test_ints_have_a_largest_element() -> None:
    a = np.arange(6, dtype="int8").reshape(1, 1, 6) - 100
    have = value(lambda x: nn.max_pool1d(x, 3, 2, ((2, 1),)), a)
    np.testing.assert_array_equal(have[0, 0], [-100, -98, -96, -95])


def test_channels_may_come_last() -> None:
    a = np.random.default_rng(0).normal(size=(2, 3, 5, 4))
    moved = np.moveaxis(a, 1, -1).copy()
    functions: list[Any] = [
        lambda x, **k: nn.max_pool2d(x, 2, **k),
        lambda x, **k: nn.max_pool2d(x, 2, return_indices=True, **k)[1],
        lambda x, **k: nn.avg_pool2d(x, 2, **k),
        lambda x, **k: nn.lp_pool2d(x, 2, **k),
        lambda x, **k: nn.adaptive_avg_pool(x, (2, 3), **k),
        lambda x, **k: nn.adaptive_max_pool(x, (2, 3), **k),
        nn.global_avg_pool,
        nn.global_max_pool,
        nn.global_lp_pool,
    ]
    for f in functions:
        last = value(lambda x, f=f: f(x, channels_last=True), moved)
        np.testing.assert_allclose(np.moveaxis(last, -1, 1), value(f, a), rtol=1e-12)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_adaptive_windows_cover_the_axis(n: int, m: int, rows: int) -> None:
    a = np.random.default_rng(n).normal(size=(1, 2, rows, n))
    mean = value(lambda x: nn.adaptive_avg_pool(x, (None, m)), a)
    largest = value(lambda x: nn.adaptive_max_pool(x, (None, m)), a)
    assert mean.shape == largest.shape == (1, 2, rows, m)
    for i in range(m):
        part = a[..., i * n // m : -(-(i + 1) * n // m)]
        np.testing.assert_allclose(mean[..., i], part.mean(-1), rtol=1e-12)
        np.testing.assert_array_equal(largest[..., i], part.max(-1))


def test_unpooling_puts_the_largest_elements_back() -> None:
    a = np.random.default_rng(0).normal(size=(2, 3, 7, 5))
    x = placeholder("float64", (None, 3, 7, 5))
    y, indices = nn.max_pool2d(x, 3, stride=2, padding=1, return_indices=True)
    back = nn.max_unpool(y, indices, 3, 2, 1)
    assert back.shape == x.shape
    have = evaluate([back], {x: a})[0]
    assert ((have == a) | (have == 0)).all()
    assert set(evaluate([y], {x: a})[0].reshape(-1)) == set(have[have != 0])
    larger = nn.max_unpool(y, indices, 3, 2, 1, output_size=(8, 5))
    assert evaluate([larger], {x: a})[0].shape == (2, 3, 8, 5)


def test_an_index_outside_the_plane_is_an_error_of_the_step() -> None:
    x = placeholder("float64", (1, 1, 2))
    y = nn.max_unpool(x, np.array([[[0, 4]]]), 2)
    with pytest.raises(IndexError, match="index 4 is outside an axis of size 4"):
        evaluate([y], {x: np.ones((1, 1, 2))})


def test_unknown_spatial_sizes() -> None:
    x = placeholder("float32", (None, 2, "n"))
    n = Dim.symbol("n")
    assert nn.max_pool1d(x, 2).shape == (x.shape[0], 2, (n - 2) // 2 + 1)
    ceil = nn.avg_pool1d(x, 2, ceil_mode=True)
    assert [evaluate([ceil], {x: np.ones((1, 2, k), "float32")})[0].shape[2] for k in (3, 4)] == [
        2,
        2,
    ]
    assert nn.adaptive_avg_pool(x, 1).shape == nn.global_max_pool(x).shape == (x.shape[0], 2, 1)


def test_large_images_are_pooled_in_pieces_with_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(-9, 9, (3, 17, 50, 60)).astype("float32")
    x = placeholder("float32", a.shape)
    outputs = []
    for y in (nn.max_pool2d(x, 3, 2, 1), nn.avg_pool2d(x, 3, 2, 1), nn.interpolate(x, scale=2)):
        outputs += [y, *gradients(y, [x])]
    outputs.append(nn.interpolate(x, (70, 40), mode="bilinear"))
    alone = evaluate(outputs, {x: a})
    pool = Pool(3)
    with use_pool(pool):
        shared = evaluate(outputs, {x: a})
    pool.close()
    assert [v.tobytes() for v in alone] == [v.tobytes() for v in shared]
    for i, f in enumerate((nn.max_pool2d, nn.avg_pool2d)):
        small = value(lambda x, f=f: f(x, 3, 2, 1), a[:1, :2].copy())
        np.testing.assert_array_equal(alone[2 * i][:1, :2], small)


X = np.zeros((2, 4, 6, 6), "float32")
WRONG: dict[str, tuple[Any, type[GraphError], str]] = {
    "rank": (lambda: nn.max_pool1d(X, 2), ShapeError, "1 spatial axes"),
    "no space": (lambda: nn.avg_pool(X[:, :, 0, 0], 2), ShapeError, "batch, channels"),
    "kernel": (lambda: nn.max_pool2d(X, 7), ShapeError, "size 7 on an axis of size 6"),
    "kernels": (lambda: nn.max_pool2d(X, (2, 2, 2)), ArgumentError, "3 entries for 2"),
    "zero": (lambda: nn.avg_pool2d(X, 0), ArgumentError, "kernel must be an int >= 1"),
    "ceil": (lambda: nn.avg_pool2d(X, 2, ceil_mode=1), ArgumentError, "ceil_mode must be True or"),
    "divisor": (lambda: nn.avg_pool2d(X, 2, divisor=0), ArgumentError, "divisor"),
    "bools": (lambda: nn.max_pool2d(X > 0, 2), DTypeError, "int or float"),
    "mean of ints": (lambda: nn.avg_pool2d(X.astype(int), 2), DTypeError, "float"),
    "p": (lambda: nn.lp_pool2d(X, 2, p=0), ArgumentError, "p must be a positive number"),
    "sizes": (lambda: nn.adaptive_avg_pool(X, (1, 2, 3)), ShapeError, "3 entries for 2"),
    "size": (lambda: nn.adaptive_max_pool(X, 0), ArgumentError, "size must be an int >= 1"),
    "unknown": (
        lambda: nn.adaptive_max_pool(placeholder("float32", (1, 1, None)), 2),
        ShapeError,
        "must be known",
    ),
    "indices": (lambda: nn.max_unpool(X, X, 2), DTypeError, "int"),
    "indices' shape": (
        lambda: nn.max_unpool(X, X[:1].astype(int), 2),
        ShapeError,
        "1 != 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_told_with_their_line(name: str) -> None:
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=rf"(?s)test_pool\.py:\d+.*({message})"):
        call()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_goes_to_the_largest_element_only(
    dtype: str, bad: float
) -> None:
    x = np.arange(16, dtype=dtype).reshape(1, 1, 4, 4)
    g = np.array([[bad, 1.0], [2.0, 3.0]], dtype).reshape(1, 1, 2, 2)
    image, weight = placeholder(dtype, x.shape), placeholder(dtype, g.shape)
    grads = gradients([nn.max_pool(image, 2)], [image], [weight])
    for plain in ("on", "off"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GRAPHFLOW_JIT", plain)
            (have,) = evaluate(grads, {image: x, weight: g})
        want = np.zeros((4, 4), dtype)
        want[[1, 1, 3, 3], [1, 3, 1, 3]] = g.ravel()
        assert np.array_equal(have[0, 0], want, equal_nan=True)

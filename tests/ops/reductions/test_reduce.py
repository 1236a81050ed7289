"""Reductions, products, running sums against numpy: axes, dtypes, empties, ties, sizes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor
from graphflow.transforms.reverse_mode import gradients

G = FUNCTIONS


def value(tensor: Tensor) -> Any:
    return evaluate([tensor])[0]


def gradient_at(function: Any, array: Any, dtype: str = "float64", shape: Any = None) -> Any:
    array = np.asarray(array, dtype)
    x = placeholder(dtype, array.shape if shape is None else shape)
    return evaluate(gradients(function(x), [x]), {x: array})[0]


@st.composite
def arrays_and_axes(draw: st.DrawFn) -> tuple[np.ndarray, Any]:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=4))
    rng = np.random.default_rng(draw(st.integers(0, 50)))
    axes = st.lists(st.integers(0, len(shape) - 1), unique=True) if shape else st.just([])
    axis = draw(st.one_of(st.none(), axes.map(tuple)))
    if axis:
        axis = tuple(a - len(shape) if draw(st.booleans()) else a for a in axis)
    return rng.uniform(-2, 2, shape), axis


@given(
    st.sampled_from(["sum", "mean", "max", "min", "prod", "var", "std", "any", "all"]),
    arrays_and_axes(),
    st.booleans(),
)
def test_reductions_agree_with_numpy(name: str, case: Any, keepdims: bool) -> None:
    array, axis = case
    have = value(G[name](array, axis=axis, keepdims=keepdims))
    want = np.asarray(getattr(np, name)(array, axis=axis, keepdims=keepdims))
    assert (have.shape, have.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(have, want, rtol=1e-12)


@pytest.mark.parametrize("name", ["sum", "prod", "cumsum"])
@pytest.mark.parametrize(
    "dtype, wide",
    [("bool", "int64"), ("int8", "int64"), ("int64", "int64"), ("uint16", "uint64"),
     ("float16", "float16"), ("float32", "float32")],
)  # fmt: skip
def test_sums_of_short_ints_are_wide_as_the_array_api_has_it(
    name: str, dtype: str, wide: str
) -> None:
    y = G[name](np.ones(300, dtype))
    assert (y.dtype, value(y).dtype) == (np.dtype(wide), np.dtype(wide))
    assert np.ravel(value(y))[-1] == (1 if name == "prod" else 300)


def test_sums_take_a_dtype() -> None:
    assert value(G["sum"](np.ones(3, "int8"), dtype="int16")).dtype == np.int16
    assert value(G["sum"](np.ones(3, "float32"), dtype="float64")).dtype == np.float64
    assert value(G["prod"](np.full(2, 2, "int8"), dtype="float32")) == np.float32(4)
    (g,) = gradients(G["sum"](x := placeholder("float32", (3,)), dtype="float64"), [x])
    assert (g.dtype, g.shape) == (np.float32, (3,))


def test_means_of_ints_and_bools_are_float64() -> None:
    assert value(G["mean"](np.array([1, 2]))) == 1.5
    assert value(G["mean"](np.array([True, False]))).dtype == np.float64
    assert G["std"](np.array([1, 2])).dtype == np.float64


def test_float16_means_do_not_overflow() -> None:
    assert value(G["mean"](np.full(1000, 1000, "float16"))) == 1000
    assert value(G["var"](np.tile(np.array([0, 600], "float16"), 500))) == float("inf")
    assert value(G["var"](np.tile(np.array([0, 200], "float16"), 500))) == 10000


def test_reductions_of_nothing() -> None:
    empty = np.zeros((0, 3), "float32")
    assert value(G["sum"](empty)) == 0
    assert value(G["prod"](empty, axis=0)).tolist() == [1, 1, 1]
    assert (value(G["any"](empty)), value(G["all"](empty))) == (False, True)
    assert np.isnan(value(G["mean"](empty)))
    assert value(G["max"](empty, axis=1)).shape == (0,)
    for name in ("max", "min", "argmax", "argmin", "logsumexp"):
        with pytest.raises(ShapeError, match=f"{name} at .*no elements.*\\(0, 3\\)"):
            G[name](empty, axis=0)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "prod", "argmax", "any", "logsumexp"])
def test_wrong_axes_are_refused_with_the_line(name: str) -> None:
    x = placeholder("float32", (2, 3))
    with pytest.raises(ShapeError, match=rf"{name} at .*test_reduce\.py:\d+: axis 2.*rank 2"):
        G[name](x, axis=2)
    with pytest.raises(ArgumentError, match=rf"{name} at .*int.*, (got|not) 1\.5"):
        G[name](x, axis=1.5)
    with pytest.raises(ArgumentError, match="keepdims must be True or False"):
        G[name](x, 0, 1)


def test_an_axis_given_twice_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"sum at .*\(0, -2\) name an axis twice"):
        G["sum"](placeholder("float32", (2, 3)), axis=(0, -2))


def test_nan_propagates() -> None:
    array = np.array([[1, np.nan], [2, 3]])
    for name in ("sum", "mean", "max", "min", "prod", "var", "logsumexp"):
        have = value(G[name](array, axis=1))
        assert np.isnan(have).tolist() == [True, False]
    assert value(G["argmax"](array, axis=1)).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_the_first_of_equal_elements_is_found(name: str) -> None:
    array = np.array([[2, 1, 2, 1]])
    y = G[name](array, axis=-1)
    assert y.dtype == np.int64
    assert value(y).tolist() == getattr(np, name)(array, axis=-1).tolist()
    assert value(G[name](array, keepdims=True)).shape == (1, 1)
    with pytest.raises(DTypeError):
        G[name](np.array([True]))


def test_ties_share_the_gradient_of_an_extremum_equally() -> None:
    assert gradient_at(G["max"], [3, 1, 3, 2]).tolist() == [0.5, 0, 0.5, 0]
    rows = gradient_at(lambda x: G["min"](x, axis=1), [[1, 1, 1, 1], [0, 5, 5, 5]])
    assert rows.tolist() == [[0.25] * 4, [1, 0, 0, 0]]


@pytest.mark.parametrize("zeros", [(), (1,), (0, 2)])
def test_gradients_of_products_are_exact_at_zeros(zeros: tuple[int, ...]) -> None:
    array = np.array([2.0, 3, 5, 7])
    array[list(zeros)] = 0
    have = gradient_at(G["prod"], array)
    assert have.tolist() == [np.prod(np.delete(array, i)) for i in range(4)]


def test_second_derivatives_of_products_are_exact_at_zeros() -> None:
    x = placeholder("float64", (None,))
    (g,) = gradients(G["prod"](x), [x])
    weights = placeholder("float64", (None,))
    (h,) = gradients(G["sum"](g * weights), [x])
    # d²/dx0 dx1 of x0·x1·x2 is x2, and so on, at (0, 0, 5).
    array, row = np.array([0.0, 0, 5]), np.array([1.0, 10, 100])
    hessian = np.array([[0, 5, 0], [5, 0, 0], [0, 0, 0]])
    assert evaluate([h], {x: array, weights: row})[0].tolist() == (hessian @ row).tolist()


@pytest.mark.parametrize("correction", [0, 1, 0.5])
def test_factors_follow_sizes_that_are_fed(correction: float) -> None:
    array = np.array([[1.0, 2], [3, 5], [4, 4]])
    for name, options in (("mean", {}), ("var", {"correction": correction})):
        for axis in (None, 0, 1):

            def reduce(
                x: Tensor, name: str = name, axis: Any = axis, options: Any = options
            ) -> Any:
                return G[name](x, axis=axis, **options)

            known = gradient_at(reduce, array)
            unknown = gradient_at(reduce, array, shape=(None, "m"))
            np.testing.assert_allclose(unknown, known, rtol=1e-14)


def test_variance_corrects_the_count() -> None:
    array = np.array([1.0, 2, 4])
    assert value(G["var"](array, correction=1)) == pytest.approx(np.var(array, ddof=1))
    assert value(G["std"](array, correction=1)) == pytest.approx(np.std(array, ddof=1))
    with np.errstate(all="ignore"):
        assert np.isnan(value(G["var"](np.array([2.0]), correction=1)))
    with pytest.raises(ArgumentError, match="correction must be a number"):
        G["var"](array, correction="1")


def test_logsumexp_neither_overflows_nor_loses_infinities() -> None:
    rows = np.array([[1000.0, 1000], [-1000, -1000], [-np.inf, -np.inf], [np.inf, 0]])
    have = value(G["logsumexp"](rows, axis=1))
    assert have.tolist() == pytest.approx(
        [1000 + math.log(2), -1000 + math.log(2), -math.inf, math.inf]
    )


def test_running_sums_go_along_one_axis() -> None:
    array = np.arange(6.0).reshape(2, 3)
    for axis in (0, 1, -1):
        assert value(G["cumsum"](array, axis=axis)).tolist() == np.cumsum(array, axis).tolist()
    assert value(G["cumsum"](np.arange(3))).tolist() == [0, 1, 3]
    with pytest.raises(ArgumentError, match="rank 2; give the axis"):
        G["cumsum"](array)
    assert gradient_at(lambda x: G["cumsum"](x, 0), [1, 1, 1]).tolist() == [3, 2, 1]


def test_running_sums_lose_nothing_on_their_way() -> None:
    """In float32 each term beyond 2**24 would vanish, and half of them before."""
    last = value(G["cumsum"](np.full(2**21, 0.1, "float32")))[-1]
    assert last == np.float32(2**21 * float(np.float32(0.1)))


def test_buffers_of_any_layout_of_reduction_get_the_bits_of_the_kernel() -> None:
    rng = np.random.default_rng(3)
    array = rng.normal(size=(17, 33, 5)).astype("float32")
    for name in ("sum", "mean", "max"):
        op = G[name](array).node.op
        for axis in ((0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)):
            wanted = np.asarray(op.kernel(np, array, axis=axis, keepdims=False))
            out = np.empty(wanted.shape, wanted.dtype)
            op.into(np, out, array, axis=axis, keepdims=False)
            assert out.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("shape", [(2, 3, 40), (9, 5, 3, 7), (4, 6, 2, 3, 5), (2, 3, 0, 4)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_sums_of_channels_lose_no_digit_and_have_the_same_bits_in_place(
    shape: tuple[int, ...], keepdims: bool
) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    axes = tuple(i for i in range(x.ndim) if i != 1)
    attrs = {"axis": axes, "keepdims": keepdims}
    (found,) = REGISTRY["sum"].run(np, [x], attrs)
    want = x.sum(axes, "float64", keepdims=keepdims)
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-5)
    into, out = REGISTRY["sum"].into, np.empty_like(found)
    assert into is not None and found.shape == want.shape
    into(np, out, x, **attrs)
    assert out.tobytes() == found.tobytes()

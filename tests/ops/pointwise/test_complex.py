"""Complex numbers: numpy's values, gradients in both parts, clear words where they have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import DifferentiationError, DTypeError, FeedError, VariableError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS
from graphflow.transforms.reverse_mode import gradients

G = FUNCTIONS
C = ["complex64", "complex128"]


def draw(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)


UNARY: dict[str, Callable[[Any], Any]] = {
    "real": np.real, "imag": np.imag, "conj": np.conj, "angle": np.angle, "abs": np.abs,
    "negative": np.negative, "square": np.square, "reciprocal": np.reciprocal, "sign": np.sign,
    "sqrt": np.sqrt, "exp": np.exp, "expm1": np.expm1, "log": np.log, "log1p": np.log1p,
    "log2": np.log2, "log10": np.log10, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh,
    "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "rsqrt": lambda z: 1 / np.sqrt(z), "sum": np.sum, "mean": np.mean, "prod": np.prod,
    "isfinite": np.isfinite, "isnan": np.isnan, "isinf": np.isinf, "any": np.any, "all": np.all,
    "cumsum": np.cumsum, "matrix_transpose": np.transpose,
}  # fmt: skip


@pytest.mark.parametrize("dtype", C)
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_tensor_are_numpys(name: str, dtype: str) -> None:
    z = draw(dtype, (5,) if name == "cumsum" else (4, 5))
    want = UNARY[name](z)
    have = evaluate([G[name](z)])[0]
    assert have.dtype == want.dtype and have.shape == want.shape
    np.testing.assert_allclose(have, want, rtol=2e-5 if dtype == "complex64" else 1e-12)


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide,
    "pow": np.power, "matmul": np.matmul, "equal": np.equal, "not_equal": np.not_equal,
}  # fmt: skip


@pytest.mark.parametrize("real", [None, "float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_tensors_are_numpys_also_with_real_ones(name: str, real: Any) -> None:
    a, b = draw("complex64", (3, 3)), draw("complex64", (3, 3), 1)
    wide = a
    if real is not None:
        a = a.real.astype(real)
        wide = a.astype("float64" if real == "float64" else "float32")
    want = BINARY[name](wide, b)
    have = evaluate([G[name](a, b)])[0]
    assert have.dtype == want.dtype
    np.testing.assert_allclose(have, want, rtol=2e-5)


def test_parts_make_the_number_and_broadcast() -> None:
    z = gf.complex(np.array([[1.0], [2.0]], "float32"), np.array([3.0, 4.0], "float32"))
    assert z.dtype == "complex64"
    assert evaluate([z])[0].tolist() == [[1 + 3j, 1 + 4j], [2 + 3j, 2 + 4j]]
    assert gf.complex(np.float64(1), 2.0).dtype == "complex128"
    assert gf.complex(np.float16(1), 2.0).dtype == "complex64"
    assert gf.constant(1j).dtype == "complex64" and gf.constant([1j, 2]).dtype == "complex64"


def test_the_conjugate_and_real_part_of_real_tensors_are_the_tensors() -> None:
    x = placeholder("float32", (2,))
    assert x.conj() is x and x.real is x and gf.conj(x) is x
    assert evaluate([x.imag, gf.angle(x)], {x: np.array([-1, 1], "f")})[0].tolist() == [0, 0]
    product = x * x
    (g,) = gradients(gf.sum(product), [x])
    assert not {"conj", "real"} & {n.op.name for n in Graph(g).nodes}


def test_python_numbers_are_weak_and_complex_ones_make_floats_complex() -> None:
    z, x, n = placeholder("complex64", ()), placeholder("float64", ()), placeholder("int32", ())
    assert [(z + 1).dtype, (2.5 * z).dtype, (z - 1j).dtype] == [np.complex64] * 3
    assert (x * 1j).dtype == np.complex128
    with pytest.raises(DTypeError, match=r"add at .*1j does not fit int32"):
        n + 1j
    with pytest.raises(DTypeError, match=r"add at .*int32 and complex64 do not mix"):
        n + z
    with pytest.raises(
        DTypeError, match=r"astype at .*complex64 does not convert to float32.*real"
    ):
        z.astype("float32")


@pytest.mark.parametrize(
    "order",
    [
        lambda z: z < z,
        lambda z: gf.maximum(z, z),
        gf.max,
        gf.argmin,
        lambda z: gf.clip(z, 0.0, 1.0),
        gf.floor,
        lambda z: z // z,
        lambda z: z % z,
        gf.var,
        gf.nn.softmax,
        lambda z: gf.atan2(z, z),
    ],
)
def test_what_needs_an_order_is_refused_with_a_remedy(order: Callable[[Any], Any]) -> None:
    z = placeholder("complex64", (2, 2))
    with pytest.raises(DTypeError, match=r" at .*test_complex\.py:\d+.*(gf\.abs|gf\.real)"):
        order(z)


# Gradients --------------------------------------------------------------------------------------


def test_the_cotangent_is_the_direction_of_steepest_ascent() -> None:
    z = placeholder("complex128", ())
    (g,) = gradients(gf.square(gf.abs(z)), [z])
    assert evaluate([g], {z: np.complex128(3 + 4j)})[0] == pytest.approx(6 + 8j)
    (g,) = gradients(gf.imag(z * (2 - 1j)), [z])  # Im(z w) has the slope i·conj(w)
    assert evaluate([g], {z: np.complex128(1)})[0] == pytest.approx(1j * (2 + 1j))


def test_a_real_input_of_a_complex_result_gets_the_real_part() -> None:
    x = placeholder("float32", (2,))
    w = np.array([1 + 2j, 3 - 1j], "complex64")
    (g,) = gradients(gf.real(gf.sum(x * w)), [x])
    assert g.dtype == np.float32
    assert evaluate([g], {x: np.ones(2, "f")})[0].tolist() == [1, 3]


def test_gradients_at_zero_are_finite() -> None:
    z = placeholder("complex64", (1,))
    ys = [
        gf.abs(z),
        gf.real(gf.sign(z)),
        gf.real(gf.prod(z)),
        gf.real(z**2),
        gf.real(z ** (2 + 0j)),
    ]
    for y in ys:
        (g,) = gradients(y, [z])
        assert np.isfinite(evaluate([g], {z: np.zeros(1, "complex64")})[0]).all()


def test_a_complex_result_has_no_gradient_by_itself() -> None:
    z = placeholder("complex64", (2,))
    with pytest.raises(DifferentiationError, match=r"gradients at .*complex64; give grad_ys"):
        gradients(z * z, [z])
    (g,) = gradients(z * z, [z], np.array([1, 1j], "complex64"))
    assert evaluate([g], {z: np.array([1j, 1], "complex64")})[0].tolist() == [-2j, 2j]


def test_descent_finds_a_complex_root() -> None:
    z = gf.variable(np.complex64(0.5 + 0.5j), name="z")
    loss = gf.square(gf.abs(z * z + 1.0))
    step = gf.optim.SGD(0.05).minimize(loss)
    with gf.Session() as s:
        for _ in range(200):
            s.run(step)
        assert abs(s.get(z) - 1j) < 1e-3
    with pytest.raises(VariableError, match="complex, which only SGD trains"):
        gf.optim.Adam(0.1).minimize(loss)


# Feeds, state, passes ---------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    re=st.floats(width=32, allow_nan=False), im=st.floats(width=32, allow_nan=False),
    dtype=st.sampled_from(C),
)  # fmt: skip
def test_what_is_fed_is_what_is_fetched(re: float, im: float, dtype: str) -> None:
    z = placeholder(dtype, ())
    with gf.Session() as s:
        have = s.run(z, {z: complex(re, im)})
    assert have.dtype == dtype and have == np.complex128(complex(re, im))


@pytest.mark.parametrize("value", [1, 1.5, [1, 2], np.float32(1), np.complex128(1j), np.float64(2)])
def test_feeds_that_convert(value: Any) -> None:
    z = placeholder("complex64", np.shape(value))
    with gf.Session() as s:
        assert np.array_equal(s.run(z, {z: value}), np.asarray(value, "complex64"))


@pytest.mark.parametrize("value", [1j, np.complex64(1)])
def test_complex_numbers_are_no_feeds_for_floats(value: Any) -> None:
    x = placeholder("float32", ())
    with gf.Session() as s, pytest.raises(FeedError, match="complex"):
        s.run(x, {x: value})


def test_complex_attributes_are_told_apart_and_travel() -> None:
    from graphflow.runtime.wire.attribute_reader import unpack_attribute
    from graphflow.runtime.wire.graph_codec import pack_attribute

    x = placeholder("complex64", (2,))
    y = gf.stack([x + 1j, x + 1j, x - 1j])
    with gf.Session() as s:
        have = s.run(y, {x: np.zeros(2, "complex64")})
    assert have[:, 0].tolist() == [1j, 1j, -1j]
    assert unpack_attribute(pack_attribute(1 - 2j, []), []) == 1 - 2j
    filled = gf.full((2,), 1 + 1j, dtype="complex64")
    assert evaluate([filled])[0].tolist() == [1 + 1j] * 2


def test_a_sign_has_the_gradient_0_at_0() -> None:
    x = gf.placeholder("complex128", (2,))
    (slope,) = gf.gradients(gf.sum(gf.imag(gf.sign(x))), [x])
    (found,) = evaluate([slope], {x: np.array([0.0, 2.0])})
    np.testing.assert_allclose(found, [0, 0.5j])

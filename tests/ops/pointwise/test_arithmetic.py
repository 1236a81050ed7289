"""Elementwise ops against numpy: broadcasting, dtypes, weak scalars, odd values, kinks."""

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
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor, as_tensor
from graphflow.ops.pointwise import arithmetic, convert, select, transcendental
from graphflow.transforms.reverse_mode import gradients

G = FUNCTIONS
NUMPY = {
    "pow": "power", "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh",
    "atan": "arctan", "atan2": "arctan2", "atanh": "arctanh", "round": "rint",
}  # fmt: skip
BINARY = ["add", "subtract", "multiply", "divide", "maximum", "minimum", "equal", "less", "pow"]


def value(tensor: Tensor, **feeds: Any) -> Any:
    return evaluate([tensor])[0]


def slope(function: Any, *points: float) -> list[float]:
    """Gradients of a scalar function of scalars."""
    xs = [placeholder("float64", ()) for _ in points]
    values = evaluate(
        gradients(function(*xs), xs),
        {x: np.asarray(p, "float64") for x, p in zip(xs, points, strict=True)},
    )
    return [float(v) for v in values]


OURS = ("exp", "expm1", "log", "log1p", "log2", "log10", "tanh", "sin", "cos", "pow", "asin",
        "acos", "atan")  # fmt: skip


@given(
    st.sampled_from(BINARY),
    hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=4, min_side=0),
    st.tuples(st.sampled_from(["float32", "float64"]), st.sampled_from(["float32", "float64"])),
    st.integers(0, 100),
)
def test_binary_ops_broadcast_and_promote_as_numpy_does(
    name: str, shapes: Any, dtypes: tuple[str, str], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a, b = (
        rng.uniform(0.5, 2, s).astype(d) for s, d in zip(shapes.input_shapes, dtypes, strict=True)
    )
    have = value(G[name](a, b))
    want = np.asarray(getattr(np, NUMPY.get(name, name))(a, b))
    assert (have.shape, have.dtype) == (shapes.result_shape, want.dtype)
    assert_as_numpy(name, have, want)


def assert_as_numpy(name: str, have: Any, want: Any) -> None:
    """Equal, or to a few ulp where the kernels that we generate have functions of their own."""
    exact = name not in OURS
    np.testing.assert_allclose(have, want, rtol=0 if exact else 8 * np.finfo(want.dtype).eps)


@pytest.mark.parametrize("name", ["sqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "sin",
                                  "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh",
                                  "asinh", "acosh", "atanh", "floor", "ceil", "trunc", "round",
                                  "sign", "abs", "isnan", "isinf", "isfinite"])  # fmt: skip
def test_unary_ops_treat_odd_values_as_numpy_does(name: str) -> None:
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-30], "f")
    have = value(G[name](odd))
    with np.errstate(all="ignore"):
        assert_as_numpy(name, have, getattr(np, NUMPY.get(name, name))(odd))


@pytest.mark.parametrize("dtype, ulps", [("float32", 2), ("float64", 6), ("float16", 1)])
def test_erf_is_right_to_a_few_ulp(dtype: str, ulps: int) -> None:
    def erf(x: np.ndarray) -> Any:
        with np.errstate(all="ignore"):
            return REGISTRY["erf"].run(np, [x], {})[0]

    x = np.concatenate([np.linspace(-7, 7, 6001), np.logspace(-30, 0, 400)]).astype(dtype)
    want = np.array([math.erf(float(v)) for v in x])
    have = erf(x)
    assert have.dtype == x.dtype
    assert np.max(np.abs(have - want) / np.spacing(np.abs(want).astype(dtype))) <= ulps
    assert np.isnan(erf(np.array(np.nan, dtype)))
    assert erf(np.array([np.inf, -np.inf], dtype)).tolist() == [1, -1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["logaddexp", "hypot", "copysign"])
def test_pairs_of_odd_values_are_numpys(name: str, dtype: str) -> None:
    odd = np.array([0.0, -0.0, 1, -100, 88.5, 1e-45, 3e38, np.inf, -np.inf, np.nan], dtype)
    a, b = np.repeat(odd, odd.size), np.tile(odd, odd.size)
    with np.errstate(all="ignore"):
        wanted, found = getattr(np, name)(a, b), value(G[name](a, b))
    np.testing.assert_allclose(found, wanted, rtol=4 * np.finfo(dtype).eps)
    assert (np.signbit(found) == np.signbit(wanted)).all()


def test_gradients_of_pairs_are_finite_where_one_divides_nothing() -> None:
    assert slope(G["logaddexp"], -np.inf, -np.inf) == [0.5, 0.5]
    assert slope(G["logaddexp"], 2.0, 2.0) == [0.5, 0.5]
    assert slope(G["hypot"], 0.0, 0.0) == [0.0, 0.0]
    assert slope(lambda x: G["copysign"](x, -1.0), 3.0) == [-1.0]
    assert value(arithmetic.signbit(np.array([-0.0, 0.0, -1.0, 2.0]))).tolist() == [1, 0, 1, 0]


def test_python_scalars_are_weak() -> None:
    x = placeholder("float32", (3,))
    assert [(x * 2).dtype, (2.5 - x).dtype, (x / 3).dtype, (x**2).dtype] == [np.float32] * 4
    n = placeholder("int16", (3,))
    assert [(n + 1).dtype, (7 // n).dtype, (n**2).dtype] == [np.int16] * 3
    with pytest.raises(DTypeError, match=r"add at .*test_arithmetic\.py:\d+.*2\.5.*astype"):
        n + 2.5
    with pytest.raises(DTypeError, match="outside the range of int16"):
        n + 100_000
    assert value(as_tensor(np.float32(0.5)) * 2**70) == 2.0**69
    with pytest.raises(DTypeError, match="outside the range of float32"):
        x + 10**40


def test_kinds_do_not_mix() -> None:
    x, n, b = (placeholder(d, (3,)) for d in ("float32", "int32", "bool"))
    for mixed in (lambda: x + n, lambda: n * b, lambda: G["where"](b, x, n), lambda: x == n):
        with pytest.raises(DTypeError, match=r"test_arithmetic\.py.*do not mix.*astype"):
            mixed()


def test_shapes_that_do_not_broadcast_are_refused_with_both() -> None:
    x, y = placeholder("float32", (3, 4)), placeholder("float32", (3,))
    with pytest.raises(ShapeError, match=r"add at .*\(3, 4\).*\(3,\)"):
        x + y


@pytest.mark.parametrize("name", ["exp", "sqrt", "sin", "erf", "tanh", "sigmoid", "gelu"])
def test_functions_of_reals_refuse_ints_with_a_remedy(name: str) -> None:
    with pytest.raises(
        DTypeError, match=f"{name} at .*expected float.*, got int64; convert with .astype"
    ):
        G[name](np.array([1, 2]))


def test_dividing_ints_or_bools_gives_float64() -> None:
    assert value(as_tensor(np.array([1, 2])) / 4).tolist() == [0.25, 0.5]
    assert G["divide"](np.array([1], "int8"), np.array([2], "int8")).dtype == np.float64
    assert value(G["divide"](np.array([True]), np.array([True]))).dtype == np.float64


@given(st.integers(-9, 9), st.integers(1, 5), st.booleans())
def test_floor_division_and_remainder_follow_the_sign_of_the_divisor(
    a: int, b: int, negative: bool
) -> None:
    b = -b if negative else b
    for dtype in ("int32", "float64"):
        x, y = np.array(a, dtype), np.array(b, dtype)
        quotient = value(G["floor_divide"](x, y))
        rest = value(G["remainder"](x, y))
        assert (quotient, rest) == (a // b, a % b)


@pytest.mark.parametrize(
    "exponent, op",
    [
        (2, "square"),
        (2.0, "square"),
        (1, "positive"),
        (0.5, "sqrt"),
        (-1, "reciprocal"),
        (3, "pow"),
    ],
)
def test_powers_by_common_numbers_become_cheaper_ops(exponent: float, op: str) -> None:
    x = placeholder("float32", (2,))
    y = x**exponent
    assert y.node.op is REGISTRY[op]
    array = np.array([0.5, 3.0], "float32")
    np.testing.assert_allclose(evaluate([y], {x: array})[0], array**exponent, rtol=1e-6)


def test_powers_have_gradients_where_the_base_or_the_exponent_is_0() -> None:
    assert slope(lambda a, b: a**b, 0.0, 3.0) == [0, 0]
    assert slope(lambda a, b: a**b, 3.0, 0.0) == [0, pytest.approx(math.log(3))]
    assert slope(lambda a, b: a**b, 0.0, 0.0) == [0, 0]
    assert slope(lambda a: a**3, -2.0) == [12]


def test_at_a_tie_the_larger_and_the_smaller_give_half_of_the_gradient_to_each() -> None:
    for f in (select.maximum, select.minimum):
        assert slope(f, 1.5, 1.5) == [0.5, 0.5]
    assert slope(select.maximum, 2.0, 1.0) == [1, 0]
    assert slope(select.minimum, 2.0, 1.0) == [0, 1]


def test_kinks_have_the_documented_gradients() -> None:
    assert slope(arithmetic.abs, 0.0) == [0]
    assert slope(G["relu"], 0.0) == [0]
    assert slope(lambda x: select.clip(x, 0, 1), 1.0) == [1]
    assert slope(lambda x: select.clip(x, 0, 1), 1.5) == [0]
    assert slope(lambda x: G["leaky_relu"](x, 0.1), 0.0) == [0.1]
    assert slope(arithmetic.floor, 0.3) == [0]


def test_clip_takes_numbers_tensors_and_nothing() -> None:
    x = placeholder("float32", (3,))
    array = np.array([-2, 0.5, 7], "float32")
    clipped = [
        select.clip(x, 0, 1), select.clip(x, max=1.0), select.clip(x, min=as_tensor([0.0, 1, 2])),
    ]  # fmt: skip
    values = evaluate(clipped, {x: array})
    assert [v.tolist() for v in values] == [[0, 0.5, 1], [-2, 0.5, 1], [0, 1, 7]]
    assert select.clip(x) is x
    with pytest.raises(ArgumentError, match=r"clip at .*NaN"):
        select.clip(x, min=math.nan)
    with pytest.raises(DTypeError, match="does not fit int8"):
        select.clip(placeholder("int8", ()), 0, 300)
    with pytest.raises(DTypeError, match="does not fit int8"):
        select.clip(placeholder("int8", ()), 0.5, 3)


def test_where_wants_a_truth_value() -> None:
    with pytest.raises(DTypeError, match=r"where at .*condition must be bool, got float32"):
        select.where(placeholder("float32", (2,)), 1.0, 2.0)
    n = placeholder("int8", (2,))
    assert select.where(n > 0, n, 0).dtype == np.int8


def test_astype_truncates_and_passes_gradients_between_floats_only() -> None:
    assert value(convert.astype(np.array([-1.7, 1.7]), "int32")).tolist() == [-1, 1]
    x = placeholder("float32", (2,))
    assert convert.astype(x, "float32") is x
    (g,) = gradients(convert.astype(x, "float64"), [x])
    assert g.dtype == np.float32
    (g,) = gradients(convert.astype(convert.astype(x, "int32"), "float32"), [x])
    assert evaluate([g], {x: np.ones(2, "f")})[0].tolist() == [0, 0]
    with pytest.raises(DTypeError, match=r"astype at .*complex256"):
        convert.astype(x, "complex256")


def test_no_gradient_passes_a_stop() -> None:
    assert slope(lambda x: x * convert.stop_gradient(x), 3.0) == [3]


def test_likes_follow_symbolic_shapes() -> None:
    x = placeholder("float32", (None, 2))
    fed = {x: np.empty((3, 2), "f")}
    likes = [convert.zeros_like(x), convert.ones_like(x, "bool"), convert.full_like(x, 7)]
    zeros, ones, sevens = evaluate(likes, fed | {x: fed[x]})
    assert (zeros.shape, ones.dtype, sevens.tolist()) == ((3, 2), np.bool_, [[7, 7]] * 3)
    assert [t.node.inputs for t in likes] == [()] * 3
    with pytest.raises(DTypeError):
        convert.full_like(placeholder("int32", ()), 0.5)


def test_rounding_leaves_ints_as_they_are() -> None:
    n = np.array([-3, 2], "int16")
    for op in (arithmetic.floor, arithmetic.ceil, arithmetic.round, arithmetic.trunc):
        assert value(op(n)).dtype == np.int16


def test_logic_takes_truth_values_only() -> None:
    a, b = placeholder("bool", (2,)), placeholder("bool", ())
    fed = {a: np.array([True, False]), b: np.array(True)}
    have = evaluate([a & b, a | b, a ^ b, ~a], fed)
    assert [h.tolist() for h in have] == [[True, False], [True, True], [False, True], [False, True]]
    with pytest.raises(DTypeError, match=r"logical_not at .*bool"):
        G["logical_not"](placeholder("int32", ()))


def test_a_broadcast_inputs_gradient_has_its_own_shape_also_for_symbolic_sizes() -> None:
    x, b = placeholder("float32", (None, 3)), placeholder("float32", (1, 3))
    c = placeholder("float32", ())
    slopes = gradients(x * b + c, [x, b, c])
    assert [g.shape for g in slopes] == [x.shape, (1, 3), ()]
    values = evaluate(slopes, {x: np.ones((4, 3), "f"), b: np.ones((1, 3), "f"), c: np.float32(2)})
    assert (values[1].tolist(), float(values[2])) == ([[4, 4, 4]], 12)


def test_saturated_sigmoids_neither_overflow_nor_lose_their_tails() -> None:
    x = np.array([-1000, -80, 0, 1000], "float32")
    have = value(G["sigmoid"](x))
    np.testing.assert_allclose(have, [0, math.exp(-80), 0.5, 1], rtol=1e-5)
    np.testing.assert_allclose(value(G["softplus"](x)), [0, math.exp(-80), math.log(2), 1000], 1e-5)
    np.testing.assert_allclose(value(G["silu"](x)), [0, -80 * math.exp(-80), 0, 1000], 1e-5)


def test_transcendental_ops_are_all_public_under_their_names() -> None:
    for name in ("sqrt", "rsqrt", "exp", "log", "atan2", "erf", "tanh"):
        assert getattr(transcendental, name) is FUNCTIONS[name]

"""`gf.custom_jvp`: its rule in forward mode, transposed in reverse mode, and mapped by vmap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DifferentiationError
from graphflow.frontend.interpreter import evaluate

X, W = np.array([0.3, -1.2, 2.0]), np.array([0.5, 0.2, -0.1])


def double_rule(tangents: Any, y: gf.Tensor, x: gf.Tensor, w: gf.Tensor) -> gf.Tensor:
    """A rule that is not the derivative of x·w, so that it shows where it is used."""
    return tangents[0] * w * 2.0 + tangents[1] * gf.sin(x) * 3.0


def inputs(dtype: str = "float64") -> tuple[gf.Tensor, gf.Tensor]:
    return gf.placeholder(dtype, (3,)), gf.placeholder(dtype, (3,))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_both_modes_follow_the_rule(dtype: str) -> None:
    x, w = inputs(dtype)
    y = gf.custom_jvp(lambda a, b: a * b, jvp=double_rule)(x, w)
    tangent = gf.jvp(y, [x, w], [np.ones(3), W])
    alone = gf.jvp(y, [x], [np.ones(3)])
    slopes = gf.gradients(gf.sum(y * y), [x, w])
    have = evaluate([y, tangent, alone, *slopes], {x: X.astype(dtype), w: W.astype(dtype)})
    want = [X * W, 2 * W + 3 * np.sin(X) * W, 2 * W, 4 * X * W * W, 6 * X * W * np.sin(X)]
    for a, b in zip(have, want, strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(a, b, rtol=1e-6 if dtype == "float32" else 1e-13)


def test_second_derivatives_differentiate_the_rule() -> None:
    x, w = inputs()
    y = gf.custom_jvp(lambda a, b: a * b, jvp=double_rule)(x, w)
    (slope,) = gf.gradients(gf.sum(y * y), [x])  # 2y · 2w
    mixed, forward = gf.jacobian(slope, w), gf.jvp(slope, [w], [np.ones(3)])
    have, along = evaluate([mixed, forward], {x: X, w: W})
    want = 4 * X * W + 4 * W * 3 * np.sin(X)  # by y through the rule, and by w
    np.testing.assert_allclose(have, np.diag(want), rtol=1e-13)
    np.testing.assert_allclose(along, want, rtol=1e-13)


def test_a_rule_that_is_the_derivative_changes_nothing() -> None:
    @gf.custom_jvp(jvp=lambda t, y, x: t[0] * gf.nn.sigmoid(x))
    def softplus(x: gf.Tensor) -> gf.Tensor:
        return gf.log1p(gf.exp(x))

    x = gf.placeholder("float64", (3,))
    plain = gf.log1p(gf.exp(x))
    have = [softplus(x), gf.hessian(gf.sum(softplus(x)), x), *gf.gradients(softplus(x), [x])]
    want = [plain, gf.hessian(gf.sum(plain), x), *gf.gradients(plain, [x])]
    for a, b in zip(evaluate(have, {x: X}), evaluate(want, {x: X}), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)
    (far,) = evaluate(gf.gradients(softplus(x), [x]), {x: np.array([800.0, 0.0, -800.0])})
    np.testing.assert_allclose(far, [1.0, 0.5, 0.0])  # where exp overflows, and its slope is NaN


def test_nests_ints_and_missing_tangents() -> None:
    def rule(tangents: Any, y: Any, a: gf.Tensor, n: gf.Tensor, b: gf.Tensor) -> Any:
        assert tangents[1] is None
        return {"sum": tangents[0] + tangents[2] * 5.0, "rest": (None, None)}

    @gf.custom_jvp(jvp=rule)
    def f(a: gf.Tensor, pair: Any, scale: float = 1.0) -> Any:
        return {"sum": a + pair[1] * scale, "rest": (a * a, pair[0] + 1)}

    a, b = inputs()
    y = f(a, (gf.constant([1, 2, 3]), b))
    slopes = gf.gradients([y["sum"], y["rest"][0]], [a, b])
    along = gf.jvp([y["sum"], y["rest"][0]], [b], [np.ones(3)])
    have = evaluate([*slopes, *along], {a: X, b: W})
    for value, want in zip(have, (1.0, 5.0, 5.0, 0.0), strict=True):
        assert value.tolist() == [want] * 3


def test_complex_rules_are_transposed_to_adjoints() -> None:
    f = gf.custom_jvp(lambda x, w: x * w, jvp=lambda t, y, x, w: t[0] * w + x * t[1])
    x, w = inputs("complex128")
    at = {x: X + 1j * W, w: W - 2j * X}
    for y in (f(x, w), x * w):
        loss = gf.sum(gf.abs(y) ** 2)
        found = evaluate(gf.gradients(loss, [x, w]), at)
        want = evaluate(gf.gradients(gf.sum(gf.abs(x * w) ** 2), [x, w]), at)
        np.testing.assert_allclose(found, want, rtol=1e-13)


def test_rules_are_mapped_by_vmap_and_run_inside_loops_and_sessions() -> None:
    f = gf.custom_jvp(lambda x, w: x * w, jvp=double_rule)
    rows, w = gf.placeholder("float64", (2, 3)), gf.placeholder("float64", (3,))
    mapped = gf.vmap(f, (0, None))
    slopes = gf.gradients(gf.sum(mapped(rows, w)), [rows, w])
    inner = gf.vmap(lambda x: gf.gradients(gf.sum(f(x, w)), [x])[0])(rows)
    tangent = gf.jvp(mapped(rows, w), [rows, w], [np.ones((2, 3)), np.ones(3)])
    last, _ = gf.scan(lambda c, x: (f(c, x), None), gf.ones((3,), "float64"), rows)
    (looped,) = gf.gradients(gf.sum(last), [rows])
    both = np.stack([X, 2 * X])
    with gf.Session() as s:
        gx, gw, gi, t, g = s.run([*slopes, inner, tangent, looped], {rows: both, w: W})
    np.testing.assert_allclose(gx, [2 * W, 2 * W])
    np.testing.assert_allclose(gi, gx)
    np.testing.assert_allclose(gw, 3 * np.sin(both).sum(0))
    np.testing.assert_allclose(t, 2 * W + 3 * np.sin(both))
    np.testing.assert_allclose(g[1], 3 * np.sin(X))  # the state before is 1·x[0]
    np.testing.assert_allclose(g[0], 2 * 2 * X * 3 * np.sin(1.0))


def test_forward_mode_needs_no_transposition() -> None:
    """`round` has a gradient of zeros; a rule through an op without any works forward, too."""
    f = gf.custom_jvp(lambda x: x * 1.0, jvp=lambda t, y, x: gf.nextafter(t[0], t[0]) * 2.0)
    x = gf.placeholder("float64", (3,))
    assert evaluate([gf.jvp(f(x), [x], [W])], {x: X})[0].tolist() == (2 * W).tolist()
    mapped = gf.vmap(f)(x)
    assert evaluate([gf.jvp(mapped, [x], [W])], {x: X})[0].tolist() == (2 * W).tolist()


@pytest.mark.parametrize(
    "rule, message",
    [
        (lambda t, y, x: t[0] * t[0], "not linear in its tangents"),
        (lambda t, y, x: gf.exp(t[0]), "not linear in its tangents"),
        (lambda t, y, x: gf.sum(t[0]), r"float64\(\) as tangent 0, of a result float64\(3,\)"),
        (lambda t, y, x: t[0].astype("float32"), r"float32\(3,\) as tangent 0"),
        (lambda t, y, x: (t[0], t[0]), "as tangent 0"),
        (lambda t, y, x: 1.0, "as tangent 0.* None for zeros"),
    ],
)
def test_wrong_rules_are_told(rule: Any, message: str) -> None:
    x = gf.placeholder("float64", (3,))
    y = gf.custom_jvp(lambda a: a + 1.0, jvp=rule)(x)
    with pytest.raises(DifferentiationError, match=rf"test_custom_tangents\.py[\s\S]*{message}"):
        gf.gradients(gf.sum(y), [x])


def test_tangents_have_the_nest_of_the_results_and_none_of_ints() -> None:
    x = gf.placeholder("float64", (3,))
    pair = gf.custom_jvp(lambda a: (a, a), jvp=lambda t, y, a: t[0])(x)
    with pytest.raises(DifferentiationError, match="as many tangents as results"):
        gf.gradients(pair[0], [x])
    count = gf.custom_jvp(lambda a: (a, gf.argmax(a)), jvp=lambda t, y, a: (t[0], y[1]))(x)
    with pytest.raises(DifferentiationError, match="result 1, which is int64; give None"):
        gf.gradients(count[0], [x])


@pytest.mark.parametrize("given", [{}, {"jvp": 3}, {"jvp": None}])
def test_a_rule_is_needed(given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"custom_jvp at .*test_custom_tangents.*jvp=rule"):
        gf.custom_jvp(lambda x: x, **given)

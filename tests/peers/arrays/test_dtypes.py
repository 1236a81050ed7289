"""16-bit floats, autocasting, loss scaling and complex numbers beside torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.spec import BFLOAT16

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

HALVES = ["bfloat16", "float16"]
EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
shapes = st.tuples(st.integers(1, 5), st.integers(1, 6))


def to_torch(array: Any) -> Any:
    if array.dtype == BFLOAT16:
        return torch.tensor(array.astype("float32")).to(torch.bfloat16)
    return torch.tensor(array)


def to_float(tensor: Any) -> Any:
    return tensor.detach().to(torch.float32).numpy()


# Complex numbers --------------------------------------------------------------------------------

COMPLEX: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "arithmetic": (lambda a, b: a * b + a / b - b, lambda a, b: a * b + a / b - b),
    "pow": (lambda a, b: a**b, lambda a, b: a**b),
    "square and reciprocal": (
        lambda a, b: a**2 * gf.reciprocal(b),
        lambda a, b: a**2 * torch.reciprocal(b),
    ),
    "abs": (lambda a, b: gf.abs(a) * b, lambda a, b: torch.abs(a) * b),
    "angle": (lambda a, b: gf.angle(a) * b, lambda a, b: torch.angle(a) * b),
    "sign": (lambda a, b: gf.sign(a) * b, lambda a, b: torch.sgn(a) * b),
    "parts": (
        lambda a, b: gf.complex(a.real * b.imag, b.real) * gf.conj(b),
        lambda a, b: torch.complex(a.real * b.imag, b.real) * torch.conj(b),
    ),
    "exponentials": (
        lambda a, b: gf.exp(a) + gf.log(b) + gf.sqrt(a) * gf.rsqrt(b),
        lambda a, b: torch.exp(a) + torch.log(b) + torch.sqrt(a) * torch.rsqrt(b),
    ),
    "trigonometry": (
        lambda a, b: gf.sin(a) * gf.cos(b) + gf.tan(a) + gf.asin(a) + gf.acos(b) + gf.atan(a),
        lambda a, b: torch.sin(a) * torch.cos(b) + torch.tan(a) + torch.asin(a) + torch.acos(b)
        + torch.atan(a),
    ),
    "hyperbolic": (
        lambda a, b: gf.sinh(a) * gf.cosh(b) + gf.tanh(a) + gf.asinh(a) + gf.acosh(b) + gf.atanh(a),
        lambda a, b: torch.sinh(a) * torch.cosh(b) + torch.tanh(a) + torch.asinh(a)
        + torch.acosh(b) + torch.atanh(a),
    ),
    "matmul": (lambda a, b: gf.matmul(a, b.mT), lambda a, b: a @ b.mT),
    "reductions": (
        lambda a, b: gf.sum(a, 0) * gf.mean(b, 1, keepdims=True) + gf.prod(a) + gf.cumsum(b, 1),
        lambda a, b: a.sum(0) * b.mean(1, keepdim=True) + a.prod() + b.cumsum(1),
    ),
    "where": (
        lambda a, b: gf.where(gf.abs(a) > gf.abs(b), a, b * 2j),
        lambda a, b: torch.where(a.abs() > b.abs(), a, b * 2j),
    ),
    "with a real tensor": (
        lambda a, b: a * b.real + b.imag.astype("complex128"),
        lambda a, b: a * b.real + b.imag.to(torch.complex128),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPLEX)
@settings(max_examples=10, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**32 - 1))
def test_complex_values_and_gradients_are_torchs(
    name: str, shape: tuple[int, int], seed: int
) -> None:
    ours, theirs = COMPLEX[name]
    rng = np.random.default_rng(seed)
    a, b, g = (rng.uniform(-1, 1, shape) + 1j * rng.uniform(0.1, 1, shape) for _ in range(3))
    xs = [gf.placeholder("complex128", shape) for _ in range(2)]
    ts = [torch.tensor(v, requires_grad=True) for v in (a, b)]
    y, u = ours(*xs), theirs(*ts)
    weight = np.resize(g, u.shape) if u.is_complex() else np.resize(g.real, u.shape)
    u.backward(torch.tensor(weight))
    have = evaluate([y, *gf.gradients(y, xs, [weight])], dict(zip(xs, (a, b), strict=True)))
    for mine, other in zip(have, (u, *(t.grad for t in ts)), strict=True):
        np.testing.assert_allclose(mine, other.detach().numpy(), rtol=1e-8, atol=1e-9)


# 16 bits ----------------------------------------------------------------------------------------

OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "divide": (lambda a, b: a / b, lambda a, b: a / b),
    "exp": (lambda a, b: gf.exp(a), lambda a, b: torch.exp(a)),
    "tanh": (lambda a, b: gf.tanh(a), lambda a, b: torch.tanh(a)),
    "gelu": (lambda a, b: gf.nn.gelu(a), lambda a, b: torch.nn.functional.gelu(a)),
    "matmul": (lambda a, b: gf.matmul(a, b.mT), lambda a, b: a @ b.mT),
    "sum": (lambda a, b: gf.sum(a, 1), lambda a, b: a.sum(1)),
    "mean": (lambda a, b: gf.mean(a, 0), lambda a, b: a.mean(0)),
    "softmax": (lambda a, b: gf.nn.softmax(a), lambda a, b: torch.softmax(a, -1)),
    "max": (lambda a, b: gf.max(a, 1), lambda a, b: a.amax(1)),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", OPS)
@settings(max_examples=10, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**32 - 1))
def test_results_in_16_bits_are_torchs_to_one_rounding(
    name: str, half: str, shape: tuple[int, int], seed: int
) -> None:
    ours, theirs = OPS[name]
    rng = np.random.default_rng(seed)
    a, b = (rng.uniform(0.2, 2, shape).astype(half) for _ in range(2))
    xs = [gf.placeholder(half, shape) for _ in range(2)]
    have = evaluate([ours(*xs)], dict(zip(xs, (a, b), strict=True)))[0]
    want = theirs(to_torch(a), to_torch(b))
    assert have.dtype == half and str(want.dtype) == f"torch.{half}"
    np.testing.assert_allclose(have.astype("float32"), to_float(want), rtol=EPSILON[half])


# Autocasting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", HALVES)
def test_a_network_under_autocast_has_torchs_dtypes_and_nearly_its_numbers(half: str) -> None:
    rng = np.random.default_rng(0)
    x, w, v = (rng.normal(size=s).astype("f") for s in [(8, 16), (16, 32), (32, 4)])
    labels = rng.integers(0, 4, 8)
    ws = [gf.variable(a, name=n) for a, n in ((w, "w"), (v, "v"))]
    with gf.autocast(half):
        h = gf.nn.relu(gf.constant(x) @ ws[0])
        logits = h @ ws[1]
        loss = gf.mean(gf.nn.cross_entropy(logits, labels))
    slopes = gf.gradients(loss, ws)
    ts = [torch.tensor(a, requires_grad=True) for a in (w, v)]
    with torch.autocast("cpu", getattr(torch, half)):
        k = torch.relu(torch.tensor(x) @ ts[0])
        scores = k @ ts[1]
        cost = torch.nn.functional.cross_entropy(scores, torch.tensor(labels))
    cost.backward()
    mine = [h, logits, loss, *slopes]
    theirs = [k, scores, cost, *(t.grad for t in ts)]
    assert [f"torch.{t.dtype}" for t in mine] == [str(t.dtype) for t in theirs]
    for have, want in zip(evaluate(mine), theirs, strict=True):
        scale = float(want.abs().max())
        np.testing.assert_allclose(
            have.astype("f"), to_float(want), rtol=4 * EPSILON[half], atol=4 * EPSILON[half] * scale
        )


# Loss scaling -----------------------------------------------------------------------------------


def test_scales_and_parameters_follow_torchs_scaler() -> None:
    inputs = [1.0, 2.0, float("inf"), 1.0, 1.0, float("nan"), 3.0, 1.0, 1.0, 1.0]
    scale = gf.variable(np.float32(2.0**10), name="scale", trainable=False)
    w = gf.variable(np.float32(0.5), name="w")
    x = gf.placeholder("float32")
    scaling = gf.optim.LossScaling(scale, interval=2)
    step = gf.optim.SGD(0.1, momentum=0.9).minimize(gf.square(w * x - 1.0), scaling=scaling)
    p = torch.nn.Parameter(torch.tensor(0.5))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    with gf.Session() as s:
        for value in inputs:
            s.run(step, {x: value})
            optimizer.zero_grad()
            scaler.scale((p * value - 1.0) ** 2).backward()
            scaler.step(optimizer)
            scaler.update()
            assert float(s.get(scale)) == scaler.get_scale()
            assert float(s.get(w)) == pytest.approx(float(p), rel=1e-6)

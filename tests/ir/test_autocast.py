"""gf.autocast: products in 16 bits, sums and losses in float32, gradients as the variables are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import DTypeError
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY

HALVES = ["bfloat16", "float16"]
F = "float32"
LOW = [op.name for op in REGISTRY.values() if op.autocast == "low"]
HIGH = [op.name for op in REGISTRY.values() if op.autocast == "high"]


def test_products_convolutions_and_attention_are_low_and_reductions_and_norms_high() -> None:
    assert {"matmul", "conv", "conv_transpose", "attention"} <= set(LOW)
    assert {"sum", "mean", "var", "softmax", "log_softmax", "cross_entropy"} <= set(HIGH)
    assert all(REGISTRY[name].autocast is None for name in ("add", "relu", "exp", "reshape"))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", LOW)
def test_low_ops_take_float32_in_16_bits_and_leave_other_dtypes(name: str, half: str) -> None:
    op = REGISTRY[name]
    sample = op.samples[0]
    with gf.autocast(half):
        for dtype, wanted in ((F, half), (half, half), ("float64", "float64")):
            xs = [
                gf.placeholder(s.dtype if s.dtype != F else dtype, s.shape) for s in sample.inputs
            ]
            ys = op(*xs, **sample.attrs)
            assert (ys[0] if isinstance(ys, tuple) else ys).dtype == wanted


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", HIGH)
def test_high_ops_take_16_bits_in_float32(name: str, half: str) -> None:
    op = REGISTRY[name]
    samples = [s for s in op.samples if any(i.dtype == F for i in s.inputs)]
    if not samples:
        pytest.skip("takes no floats")
    found = []
    for dtype in (F, half):
        xs = [
            gf.placeholder(dtype if s.dtype == F else s.dtype, s.shape) for s in samples[0].inputs
        ]
        with gf.autocast(half):
            ys = op(*xs, **samples[0].attrs)
        found.append([y.spec for y in (ys if isinstance(ys, tuple) else (ys,))])
    assert found[0] == found[1]


def test_elementwise_ops_take_what_comes() -> None:
    x, h = gf.placeholder(F, (2,)), gf.placeholder("float16", (2,))
    with gf.autocast("float16"):
        assert (gf.nn.relu(h).dtype, gf.nn.relu(x).dtype, (h + x).dtype) == ("float16", F, F)


def test_a_variable_is_converted_once_in_a_block() -> None:
    x, w = gf.placeholder(F, (4, 4)), gf.variable(gf.init.glorot((4, 4)), name="w")
    with gf.autocast("bfloat16"):
        y = ((x @ w) @ w) @ w
    assert y.dtype == "bfloat16"
    assert len(Graph(y).of_op("astype")) == 2


def test_blocks_nest_and_end() -> None:
    x = gf.placeholder(F, (4, 4))
    with gf.autocast("bfloat16"):
        with gf.autocast("float16"):
            assert (x @ x).dtype == "float16"
        with gf.autocast(None):
            assert (x @ x).dtype == F
        assert (x @ x).dtype == "bfloat16"
    assert (x @ x).dtype == F


def test_operands_of_both_dtypes_meet_in_16_bits() -> None:
    x, w = gf.placeholder("bfloat16", (2, 3)), gf.variable(gf.init.ones((3, 4)))
    assert (x @ w).dtype == F
    with gf.autocast("bfloat16"):
        y = x @ w
        assert y.dtype == "bfloat16" and len(Graph(y).of_op("astype")) == 1
        image, kernel = gf.placeholder("bfloat16", (1, 2, 4)), gf.variable(gf.init.ones((3, 2, 2)))
        assert gf.nn.conv1d(image, kernel).dtype == "bfloat16"


def test_layers_compute_their_products_in_16_bits_bias_and_all() -> None:
    x, image = gf.placeholder(F, (2, 5, 8)), gf.placeholder(F, (2, 3, 6, 6))
    linear, attention = gf.nn.Linear(8, 4), gf.nn.MultiHeadAttention(8, 2)
    convolution, norm = gf.nn.Conv2d(3, 4, 3), gf.nn.LayerNorm(8)
    with gf.autocast("bfloat16"):
        ys = [linear(x), attention(x), convolution(image)]
        assert norm(ys[1]).dtype == F
    assert [y.dtype.name for y in ys] == ["bfloat16"] * 3


@pytest.mark.parametrize("given", [F, "bfloat16"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_keep_their_state_in_float32(kind: str, given: str) -> None:
    rows = np.random.default_rng(0).uniform(-1, 1, (5, 2, 4)).astype(F)
    x, layer = gf.placeholder(F, rows.shape), getattr(gf.nn, kind)(4, 3)
    full = layer(x)[0]
    with gf.autocast("bfloat16"):
        y, last = layer(gf.astype(x, given))
        grads = gf.gradients(gf.mean(gf.square(y)), list(layer.parameters().values()))
    states = last if isinstance(last, tuple) else (last,)
    assert {t.dtype.name for t in (y, *states, *grads)} == {F}
    with gf.Session() as s:
        wanted, found, *_ = s.run([full, y, *grads], {x: rows})
    np.testing.assert_allclose(found, wanted, atol=0.02)


def test_gradients_have_the_dtype_of_the_variables_and_16_bit_products() -> None:
    x, w = gf.placeholder(F, (2, 3)), gf.variable(gf.init.glorot((3, 4)), name="w")
    with gf.autocast("bfloat16"):
        loss = gf.mean(gf.nn.mse_loss(x @ w, np.ones((2, 4), F)))
        (g,) = gf.gradients(loss, [w])
    assert loss.dtype == F and g.dtype == F
    assert {n.specs[0].dtype.name for n in Graph(g).of_op("matmul")} == {"bfloat16"}


@pytest.mark.parametrize("wrong", ["float32", "int8", "float99", 3, "complex64"])
def test_other_dtypes_are_refused_with_the_line(wrong: Any) -> None:
    with pytest.raises(DTypeError, match=r"gf\.autocast at .*test_autocast\.py:\d+"):
        gf.autocast(wrong)


# Training ---------------------------------------------------------------------------------------


def train(scope: Callable[[], Any], scaling: Any = None, dtype: str = F, steps: int = 60) -> float:
    """The last loss of a small MLP that learns sums of sines."""
    rng = np.random.default_rng(0)
    inputs = rng.uniform(-2, 2, (64, 4)).astype(F)
    targets = np.sin(inputs).sum(1, keepdims=True).astype(F)
    x, t = gf.placeholder(F, (None, 4)), gf.placeholder(F, (None, 1))
    with gf.random.seed(1):
        weights = [
            gf.variable(gf.init.glorot(shape, dtype), name=f"w{i}")
            for i, shape in enumerate([(4, 32), (32, 32), (32, 1)])
        ]
        biases = [gf.variable(gf.init.zeros(32, dtype), name=f"b{i}") for i in range(2)]
    with scope():
        h = gf.tanh(gf.astype(x, dtype) @ weights[0] + biases[0])
        h = gf.nn.relu(h @ weights[1] + biases[1])
        loss = gf.mean(gf.square(gf.astype(h @ weights[2], F) - t))
    step = gf.optim.Adam(0.01).minimize(loss, scaling=scaling)
    with gf.Session() as s:
        for _ in range(steps):
            last = s.run([loss, step], {x: inputs, t: targets})[0]
    return float(last)


def test_an_mlp_trains_in_16_bits_to_nearly_the_loss_of_float32() -> None:
    full = train(lambda: gf.autocast(None))
    assert full < 0.05
    assert train(lambda: gf.autocast("bfloat16")) == pytest.approx(full, rel=0.2)
    scaling = gf.optim.LossScaling(2.0**24, interval=20)  # the first steps overflow
    assert train(lambda: gf.autocast("float16"), scaling) == pytest.approx(full, rel=0.3)


def test_an_mlp_of_16_bit_variables_trains() -> None:
    assert train(lambda: gf.autocast(None), dtype="bfloat16") < 0.2
    assert train(lambda: gf.autocast(None), gf.optim.LossScaling(), "float16") < 0.1

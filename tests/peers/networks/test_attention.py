"""Attention and activations against torch, on random shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.ops import nn
from graphflow.ops.attention import block_patterns as attention_blocks

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree  # noqa: E402

F = torch.nn.functional


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, so that small arrays have several."""
    monkeypatch.setattr(attention_blocks, "_QUERIES", 3)
    monkeypatch.setattr(attention_blocks, "_KEYS", 4)
    monkeypatch.setattr(attention_blocks, "_SCORES", 30)


@given(
    batch=st.lists(st.integers(1, 2), min_size=1, max_size=2),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    lengths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    masked=st.sampled_from(["none", "causal", "bool", "added"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_attention(
    batch: list[int], heads: tuple[int, int], lengths: tuple[int, int], sizes: tuple[int, int],
    masked: str, seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    (shared, group), (t, s), (d, e) = heads, lengths, sizes
    q = rng.normal(size=(*batch, shared * group, t, d))
    k, v = rng.normal(size=(*batch, shared, s, d)), rng.normal(size=(*batch, shared, s, e))
    extra = []
    if masked == "bool":
        seen = rng.random((batch[-1], 1, t, s)) < 0.6
        seen[..., 0] = True  # torch gives NaN to who sees nothing
        extra = [seen]
    elif masked == "added":
        extra = [rng.normal(size=(shared * group, 1, s))]
    causal = masked == "causal"
    agree(
        lambda q, k, v, *m: nn.attention(q, k, v, *m, causal=causal),
        lambda q, k, v, *m: F.scaled_dot_product_attention(
            q, k, v, *m, is_causal=causal, enable_gqa=True
        ),
        [q, k, v, *extra],
    )


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(0, 4), st.integers(0, 4), st.integers(0, 9)
)
@settings(max_examples=40)
def test_windows_offsets_and_soft_caps_follow_their_formula(
    t: int, s: int, left: int, right: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = rng.normal(size=(2, t, 3)), rng.normal(size=(2, s, 3)), rng.normal(size=(2, s, 2))
    offset = s - t

    def theirs(q: Any, k: Any, v: Any) -> Any:
        scores = 2 * torch.tanh(q @ k.mT * 0.7 / 2)
        distance = torch.arange(s) - torch.arange(t)[:, None] - offset
        seen = (distance <= right) & (distance >= -left)
        weights = torch.where(seen, torch.exp(scores), 0)
        total = weights.sum(-1, keepdim=True)
        return weights @ v / torch.where(total == 0, 1, total)

    agree(
        lambda q, k, v: nn.attention(
            q, k, v, scale=0.7, softcap=2.0, window=(left, right), offset=offset
        ),
        theirs,
        [q, k, v],
    )


ACTIVATIONS: dict[str, tuple[Any, Any]] = {
    "celu": (lambda x: nn.celu(x, 0.7), lambda x: F.celu(x, 0.7)),
    "elu": (lambda x: nn.elu(x, 0.7), lambda x: F.elu(x, 0.7)),
    "gelu": (nn.gelu, F.gelu),
    "gelu_tanh": (lambda x: nn.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "glu": (lambda x: nn.glu(x, 1), lambda x: F.glu(x, 1)),
    "hard_shrink": (lambda x: nn.hard_shrink(x, 0.7), lambda x: F.hardshrink(x, 0.7)),
    "hard_sigmoid": (nn.hard_sigmoid, F.hardsigmoid),
    "hard_swish": (nn.hard_swish, F.hardswish),
    "hard_tanh": (lambda x: nn.hard_tanh(x, -0.5, 2.0), lambda x: F.hardtanh(x, -0.5, 2.0)),
    "leaky_relu": (lambda x: nn.leaky_relu(x, 0.2), lambda x: F.leaky_relu(x, 0.2)),
    "log_sigmoid": (nn.log_sigmoid, F.logsigmoid),
    "log_softmax": (nn.log_softmax, lambda x: F.log_softmax(x, -1)),
    "mish": (nn.mish, F.mish),
    "relu": (nn.relu, F.relu),
    "relu6": (nn.relu6, F.relu6),
    "selu": (nn.selu, F.selu),
    "sigmoid": (nn.sigmoid, torch.sigmoid),
    "silu": (nn.silu, F.silu),
    "soft_shrink": (lambda x: nn.soft_shrink(x, 0.7), lambda x: F.softshrink(x, 0.7)),
    "softmax": (lambda x: nn.softmax(x, 0), lambda x: F.softmax(x, 0)),
    "softplus": (nn.softplus, lambda x: F.softplus(x, threshold=1e9)),
    "softsign": (nn.softsign, F.softsign),
    "swiglu": (
        lambda x: nn.swiglu(x, 1),
        lambda x: F.silu(x.chunk(2, 1)[0]) * x.chunk(2, 1)[1],
    ),
    "tanh": (nn.tanh, torch.tanh),
    "thresholded_relu": (
        lambda x: nn.thresholded_relu(x, 0.3),
        lambda x: F.threshold(x, 0.3, 0.0),
    ),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99), st.sampled_from([0.5, 3.0, 20.0]))
@settings(max_examples=10)
def test_activations(name: str, rows: int, columns: int, seed: int, spread: float) -> None:
    x = np.random.default_rng(seed).normal(0, spread, (rows, 2 * columns))
    agree(*ACTIVATIONS[name], [x], rtol=1e-7)  # some of torch's constants are float32


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=15)
def test_prelu_has_a_slope_for_each_channel(n: int, channels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, slope = rng.normal(size=(n, channels, 3)), rng.normal(size=channels)
    agree(lambda x, a: nn.prelu(x, a.reshape((-1, 1))), F.prelu, [x, slope])

"""Layers against torch's, with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ops import nn

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree, same_weights  # noqa: E402

T = torch.nn
X = "float64"
D = torch.float64
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 4, dtype=X), lambda: T.Linear(3, 4, dtype=D), (2, 5, 3)),
    "linear_without_bias": (
        lambda: nn.Linear(3, 4, bias=False, dtype=X),
        lambda: T.Linear(3, 4, bias=False, dtype=D),
        (2, 3),
    ),
    "conv1d": (
        lambda: nn.Conv1d(2, 4, 3, padding=1, groups=2, dtype=X),
        lambda: T.Conv1d(2, 4, 3, padding=1, groups=2, dtype=D),
        (2, 2, 7),
    ),
    "conv2d": (
        lambda: nn.Conv2d(3, 4, (3, 2), stride=2, dilation=(1, 2), dtype=X),
        lambda: T.Conv2d(3, 4, (3, 2), stride=2, dilation=(1, 2), dtype=D),
        (2, 3, 7, 8),
    ),
    "conv3d": (
        lambda: nn.Conv3d(1, 2, 2, bias=False, dtype=X),
        lambda: T.Conv3d(1, 2, 2, bias=False, dtype=D),
        (2, 1, 3, 4, 3),
    ),
    "conv_transpose1d": (
        lambda: nn.ConvTranspose1d(2, 4, 3, 2, dtype=X),
        lambda: T.ConvTranspose1d(2, 4, 3, 2, dtype=D),
        (2, 2, 5),
    ),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(4, 2, 3, 2, 1, 1, 2, dtype=X),
        lambda: T.ConvTranspose2d(4, 2, 3, 2, 1, 1, 2, dtype=D),
        (2, 4, 3, 4),
    ),
    "conv_transpose3d": (
        lambda: nn.ConvTranspose3d(1, 2, 2, dtype=X),
        lambda: T.ConvTranspose3d(1, 2, 2, dtype=D),
        (1, 1, 2, 3, 2),
    ),
    "layer_norm": (lambda: nn.LayerNorm((2, 3), dtype=X), lambda: T.LayerNorm((2, 3), dtype=D),
                   (4, 2, 3)),
    "rms_norm": (
        lambda: nn.RMSNorm(3, 0.1, dtype=X), lambda: T.RMSNorm(3, 0.1, dtype=D), (4, 3)
    ),
    "group_norm": (
        lambda: nn.GroupNorm(2, 4, dtype=X), lambda: T.GroupNorm(2, 4, dtype=D), (3, 4, 2)
    ),
    "batch_norm": (
        lambda: nn.BatchNorm2d(3, dtype=X), lambda: T.BatchNorm2d(3, dtype=D).eval(), (2, 3, 2, 2)
    ),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(3, 4, dtype=X), nn.relu, nn.Linear(4, 2, dtype=X)),
        lambda: T.Sequential(T.Linear(3, 4, dtype=D), T.ReLU(), T.Linear(4, 2, dtype=D)),
        (5, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_layers_with_the_same_weights(name: str) -> None:
    ours, theirs, shape = CASES[name]
    here, there = ours(), theirs()
    with torch.no_grad():  # norms begin with 1 and 0
        for i, parameter in enumerate(there.parameters()):
            generator = torch.Generator().manual_seed(i)
            parameter += torch.rand(parameter.shape, generator=generator, dtype=D)
    feeds = same_weights(here, there)
    agree(here, there, [np.random.default_rng(0).normal(size=shape)], rtol=1e-7, feeds=feeds)


@pytest.mark.parametrize("name", CASES)
def test_layers_begin_as_torchs_do(name: str) -> None:
    ours, theirs, _ = CASES[name]
    with gf.random.seed(1):
        here = ours()
    mine, peers = list(here.parameters().values()), list(theirs().parameters())
    assert [v.shape for v in mine] == [tuple(p.shape) for p in peers]
    for v, p in zip(mine, peers, strict=True):
        values = v.node.attrs["initial"]()
        if p.numel() >= 8:  # the largest of a few draws says little of where they are from
            assert abs(values).max() <= max(p.detach().abs().max().item() * 2.5, 1e-9)
        assert (values.std() == 0) == (p.numel() == 1 or p.std().item() == 0)


def test_embedding_takes_rows() -> None:
    here, there = nn.Embedding(5, 3, dtype=X), T.Embedding(5, 3, dtype=D)
    feeds = same_weights(here, there)
    rows = np.array([[0, 4], [1, 1]])
    agree(
        lambda x: here(rows) * x, lambda x: there(torch.tensor(rows)) * x, [np.ones((2, 2, 3))],
        feeds=feeds,
    )  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_multi_head_attention(bias: bool, causal: bool) -> None:
    here = nn.MultiHeadAttention(6, 2, bias, dtype=X)
    there = T.MultiheadAttention(6, 2, bias=bias, batch_first=True, dtype=D)
    feeds = same_weights(here, there)
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1) if causal else None
    rng = np.random.default_rng(0)
    x, k, v = rng.normal(size=(2, 4, 6)), rng.normal(size=(2, 4, 6)), rng.normal(size=(2, 4, 6))

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return there(q, k, v, attn_mask=hidden, need_weights=False)[0]

    agree(lambda x: here(x, causal=causal), lambda x: theirs(x, x, x), [x], feeds=feeds)
    agree(lambda *a: here(*a, causal=causal), theirs, [x, k, v], feeds=feeds)


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_blocks_are_torchs_encoder_layers(norm_first: bool) -> None:
    here = nn.TransformerBlock(6, 2, 8, activation=nn.relu, norm_first=norm_first, dtype=X)
    there = T.TransformerEncoderLayer(
        6, 2, 8, 0.0, batch_first=True, norm_first=norm_first, dtype=D
    )
    peers = dict(there.named_parameters())
    order = [
        "norm1.weight", "norm1.bias", "self_attn.in_proj_weight", "self_attn.in_proj_bias",
        "self_attn.out_proj.weight", "self_attn.out_proj.bias", "norm2.weight", "norm2.bias",
        "linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias",
    ]  # fmt: skip
    variables = here.parameters().values()
    feeds = {v: peers[n].detach().numpy() for v, n in zip(variables, order, strict=True)}
    agree(here, there, [np.random.default_rng(0).normal(size=(2, 4, 6))], rtol=1e-7, feeds=feeds)

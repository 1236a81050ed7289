"""Whole models, step for step with torch: the same initial weights, the same losses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow import nn

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

T = torch.nn
F = torch.nn.functional
STEPS = 20
CLOSE = 1e-4


def copy_weights(
    session: gf.Session, here: Iterable[gf.Tensor], there: Iterable[torch.Tensor]
) -> None:
    for variable, peer in zip(here, there, strict=True):
        assert variable.shape == tuple(peer.shape)
        session.set(variable, peer.detach().numpy())


def peers_losses(
    model: Any, loss_of: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Any],
    clip: float | None = None,
) -> list[float]:  # fmt: skip
    losses = []
    for batch in batches:
        loss = loss_of(*map(torch.tensor, batch))
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            T.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


# A small GPT ------------------------------------------------------------------------------------

VOCABULARY, LENGTH, SIZE, HEADS, DEPTH = 37, 16, 32, 4, 2


class GPT(nn.Layer):
    def __init__(self) -> None:
        self.tokens = nn.Embedding(VOCABULARY, SIZE, name="tokens")
        self.places = nn.Embedding(LENGTH, SIZE, name="places")
        self.blocks = [nn.TransformerBlock(SIZE, HEADS, name=f"block{i}") for i in range(DEPTH)]
        self.norm = nn.LayerNorm(SIZE)
        self.head = nn.Linear(SIZE, VOCABULARY, bias=False, name="head")

    def __call__(self, tokens: gf.Tensor) -> gf.Tensor:
        x = self.tokens(tokens) + self.places(gf.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, causal=True)
        return self.head(self.norm(x))


class PeerGPT(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = T.Embedding(VOCABULARY, SIZE), T.Embedding(LENGTH, SIZE)
        self.blocks = T.ModuleList(
            T.TransformerEncoderLayer(
                SIZE, HEADS, 4 * SIZE, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(DEPTH)
        )
        self.norm, self.head = T.LayerNorm(SIZE), T.Linear(SIZE, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n = tokens.shape[1]
        x = self.tokens(tokens) + self.places(torch.arange(n))
        hidden = T.Transformer.generate_square_subsequent_mask(n)
        for block in self.blocks:
            x = block(x, src_mask=hidden, is_causal=True)
        return self.head(self.norm(x))

    def in_our_order(self) -> list[torch.Tensor]:
        first = ("norm1", "self_attn", "norm2", "linear1", "linear2")
        blocks = [p for b in self.blocks for name in first for p in getattr(b, name).parameters()]
        ends = (self.norm.weight, self.norm.bias, self.head.weight)
        return [self.tokens.weight, self.places.weight, *blocks, *ends]


def test_a_small_gpt_trains_as_in_torch() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    batches = [(rng.integers(0, VOCABULARY, (4, LENGTH + 1)),) for _ in range(STEPS)]
    model, peer = GPT(), PeerGPT()
    text = gf.placeholder("int64", (None, LENGTH + 1))
    loss = nn.cross_entropy(model(text[:, :-1]), text[:, 1:], reduction="mean")
    step = gf.optim.AdamW(1e-2).minimize(loss)

    def loss_of(text: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(peer(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    with gf.Session() as s:
        copy_weights(s, model.parameters().values(), peer.in_our_order())
        losses = [float(s.run([loss, step], {text: b})[0]) for (b,) in batches]
    want = peers_losses(peer, loss_of, torch.optim.AdamW(peer.parameters(), 1e-2), batches)
    assert losses == pytest.approx(want, abs=CLOSE)
    assert losses[-1] < losses[0]


# An LSTM language model -------------------------------------------------------------------------


class Speaker(nn.Layer):
    def __init__(self) -> None:
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def __call__(self, tokens: gf.Tensor) -> gf.Tensor:
        y, _ = self.lstm(self.embedding(tokens))
        return self.head(y)


class PeerSpeaker(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = T.Embedding(VOCABULARY, 16)
        self.lstm = T.LSTM(16, 24, 2, batch_first=True)
        self.head = T.Linear(24, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def test_an_lstm_language_model_trains_as_in_torch() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(1)
    batches = [(rng.integers(0, VOCABULARY, (4, 11)),) for _ in range(STEPS)]
    model, peer = Speaker(), PeerSpeaker()
    text = gf.placeholder("int64", (None, 11))
    loss = nn.cross_entropy(model(text[:, :-1]), text[:, 1:], reduction="mean")
    step = gf.optim.Adam(1e-2).minimize(
        loss, transform=lambda g: gf.optim.clip_by_global_norm(g, 0.5)[0]
    )

    def loss_of(text: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(peer(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    with gf.Session() as s:
        copy_weights(s, model.parameters().values(), peer.parameters())
        losses = [float(s.run([loss, step], {text: b})[0]) for (b,) in batches]
    optimizer = torch.optim.Adam(peer.parameters(), 1e-2)
    want = peers_losses(peer, loss_of, optimizer, batches, clip=0.5)
    assert losses == pytest.approx(want, abs=CLOSE)
    assert losses[-1] < losses[0]


# ResNet-18 for images of 32×32 ------------------------------------------------------------------


class Residual(nn.Layer):
    def __init__(self, inputs: int, outputs: int, stride: int, dtype: str) -> None:
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False, dtype=dtype)
        self.norm1 = nn.BatchNorm2d(outputs, dtype=dtype)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False, dtype=dtype)
        self.norm2 = nn.BatchNorm2d(outputs, dtype=dtype)
        self.past = None
        if stride != 1 or inputs != outputs:
            self.past = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False, dtype=dtype),
                nn.BatchNorm2d(outputs, dtype=dtype),
            )

    def __call__(self, x: gf.Tensor) -> gf.Tensor:
        y = nn.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return nn.relu(y + (x if self.past is None else self.past(x)))


class PeerResidual(T.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, dtype: str) -> None:
        super().__init__()
        self.conv1 = T.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = T.BatchNorm2d(outputs)
        self.conv2 = T.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = T.BatchNorm2d(outputs)
        self.past = None
        if stride != 1 or inputs != outputs:
            self.past = T.Sequential(
                T.Conv2d(inputs, outputs, 1, stride, bias=False), T.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + (x if self.past is None else self.past(x)))


def stages(residual: Any, widths: Sequence[int], depth: int, dtype: str) -> list[Any]:
    """The residual blocks of each width, the first of each but the first halving the image."""
    blocks, inputs = [], widths[0]
    for width in widths:
        for i in range(depth):
            stride = 2 if i == 0 and width != widths[0] else 1
            blocks.append(residual(inputs, width, stride, dtype))
            inputs = width
    return blocks


class ResNet(nn.Layer):
    def __init__(self, widths: Sequence[int], depth: int, dtype: str) -> None:
        self.conv = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False, dtype=dtype)
        self.norm = nn.BatchNorm2d(widths[0], dtype=dtype)
        self.blocks = nn.Sequential(*stages(Residual, widths, depth, dtype))
        self.head = nn.Linear(widths[-1], 10, dtype=dtype)

    def __call__(self, x: gf.Tensor) -> gf.Tensor:
        x = self.blocks(nn.relu(self.norm(self.conv(x))))
        return self.head(gf.mean(x, (2, 3)))


class PeerResNet(T.Module):
    def __init__(self, widths: Sequence[int], depth: int, dtype: str) -> None:
        super().__init__()
        self.conv = T.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.norm = T.BatchNorm2d(widths[0])
        self.blocks = T.Sequential(*stages(PeerResidual, widths, depth, dtype))
        self.head = T.Linear(widths[-1], 10)
        self.to(getattr(torch, dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        return self.head(x.mean((2, 3)))


# In float32, twenty steps of a deep net with batch norms tell nothing: torch itself ends 0.1 away
# from what it gives in float64, whatever the rate.
@pytest.mark.parametrize(
    "widths, depth, side, dtype",
    [
        pytest.param((4, 8), 1, 8, "float32", id="narrow"),
        pytest.param((64, 128, 256, 512), 2, 32, "float64", id="18", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(600)
def test_a_resnet_trains_as_in_torch_and_then_predicts_as_it_does(
    widths: tuple[int, ...], depth: int, side: int, dtype: str
) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(2)
    batches = [
        (rng.normal(size=(4, 3, side, side)).astype(dtype), rng.integers(0, 10, 4))
        for _ in range(STEPS)
    ]
    model, peer = ResNet(widths, depth, dtype), PeerResNet(widths, depth, dtype)
    x, labels = gf.placeholder(dtype, (None, 3, side, side)), gf.placeholder("int64", (None,))
    with nn.training() as updates:
        loss = nn.cross_entropy(model(x), labels, reduction="mean")
    step = gf.optim.SGD(0.01, momentum=0.9).minimize(loss)
    predicted = model(x)

    def loss_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(peer(x), labels)

    with gf.Session() as s:
        copy_weights(s, model.parameters().values(), peer.parameters())
        losses = [
            float(s.run([loss, step, *updates], {x: images, labels: classes})[0])
            for images, classes in batches
        ]
        optimizer = torch.optim.SGD(peer.parameters(), 0.01, momentum=0.9)
        want = peers_losses(peer, loss_of, optimizer, batches)
        assert losses == pytest.approx(want, abs=CLOSE)
        peer.eval()
        statistics = [v for name, v in peer.named_buffers() if "running" in name]
        for variable, there in zip(model.buffers().values(), statistics, strict=True):
            np.testing.assert_allclose(s.get(variable), there.numpy(), rtol=1e-3, atol=1e-4)
        have = s.run(predicted, {x: batches[0][0]})
    np.testing.assert_allclose(
        have, peer(torch.tensor(batches[0][0])).detach().numpy(), rtol=1e-3, atol=1e-3
    )

"""Weights from torch and back: the same outputs, and torch's strict loading of what is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow import nn
from graphflow.errors import CheckpointError

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from safetensors.torch import load_file, save_file  # noqa: E402

T = torch.nn
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 4), lambda: T.Linear(3, 4), (2, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3), lambda: T.Conv1d(2, 4, 3), (2, 2, 7)),
    "conv2d": (
        lambda: nn.Conv2d(2, 4, 3, groups=2), lambda: T.Conv2d(2, 4, 3, groups=2), (2, 2, 7, 7)
    ),
    "conv3d": (
        lambda: nn.Conv3d(1, 2, 2, bias=False), lambda: T.Conv3d(1, 2, 2, bias=False),
        (2, 1, 3, 3, 3),
    ),
    "conv_transpose1d": (
        lambda: nn.ConvTranspose1d(2, 4, 3, 2), lambda: T.ConvTranspose1d(2, 4, 3, 2), (2, 2, 5)
    ),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(4, 2, 3, groups=2),
        lambda: T.ConvTranspose2d(4, 2, 3, groups=2), (1, 4, 5, 5),
    ),
    "conv_transpose3d": (
        lambda: nn.ConvTranspose3d(1, 2, 2), lambda: T.ConvTranspose3d(1, 2, 2), (1, 1, 3, 3, 3)
    ),
    "batch_norm1d": (lambda: nn.BatchNorm1d(3), lambda: T.BatchNorm1d(3), (4, 3)),
    "batch_norm2d": (lambda: nn.BatchNorm2d(3), lambda: T.BatchNorm2d(3), (2, 3, 4, 4)),
    "batch_norm3d": (
        lambda: nn.BatchNorm3d(3, affine=False), lambda: T.BatchNorm3d(3, affine=False),
        (2, 3, 2, 2, 2),
    ),
    "layer_norm": (lambda: nn.LayerNorm((2, 3)), lambda: T.LayerNorm((2, 3)), (4, 2, 3)),
    "rms_norm": (lambda: nn.RMSNorm(3, 1e-5), lambda: T.RMSNorm(3, 1e-5), (4, 3)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), lambda: T.GroupNorm(2, 4), (2, 4, 3)),
    "instance_norm": (
        lambda: nn.InstanceNorm(3, affine=True), lambda: T.InstanceNorm2d(3, affine=True),
        (2, 3, 4, 4),
    ),
    "prelu": (lambda: nn.PReLU(3), lambda: T.PReLU(3), (2, 3, 4)),
    "lstm": (
        lambda: nn.LSTM(3, 4, 2, bidirectional=True), lambda: T.LSTM(3, 4, 2, bidirectional=True),
        (5, 2, 3),
    ),
    "lstm_without_bias": (
        lambda: nn.LSTM(3, 4, bias=False, batch_first=True),
        lambda: T.LSTM(3, 4, bias=False, batch_first=True), (2, 5, 3),
    ),
    "gru": (
        lambda: nn.GRU(3, 4, 3, bidirectional=True), lambda: T.GRU(3, 4, 3, bidirectional=True),
        (5, 2, 3),
    ),
    "rnn": (lambda: nn.RNN(3, 4, 2), lambda: T.RNN(3, 4, 2), (5, 2, 3)),
    "gru_cell": (lambda: nn.GRUCell(3, 4), lambda: T.GRUCell(3, 4), (2, 3)),
    "transformer_block": (
        lambda: nn.TransformerBlock(6, 2, 8, activation=nn.relu, norm_first=False),
        lambda: T.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), (2, 4, 6),
    ),
    "transformer_block_gpt": (
        lambda: nn.TransformerBlock(6, 2, 8),
        lambda: T.TransformerEncoderLayer(
            6, 2, 8, 0.0, batch_first=True, norm_first=True, activation="gelu"
        ),
        (2, 4, 6),
    ),
    "transformer_encoder": (
        lambda: nn.TransformerEncoder(6, 2, 2, 8, final_norm=True),
        lambda: T.TransformerEncoder(
            T.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 2, T.LayerNorm(6)
        ),
        (2, 4, 6),
    ),
    "weight_norm": (
        lambda: nn.weight_norm(nn.Linear(3, 4)),
        lambda: T.utils.parametrizations.weight_norm(T.Linear(3, 4)), (2, 3),
    ),
    "spectral_norm": (
        lambda: nn.Sequential(nn.spectral_norm(nn.Linear(3, 4))),
        lambda: T.Sequential(T.utils.parametrizations.spectral_norm(T.Linear(3, 4))), (2, 3),
    ),
    "sequential": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.relu, nn.Flatten(),
                              nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 3))),
        lambda: T.Sequential(T.Conv2d(1, 4, 3), T.BatchNorm2d(4), T.ReLU(), T.Flatten(),
                             T.Sequential(T.Dropout(0.5), T.Linear(16, 3))),
        (2, 1, 4, 4),
    ),
}  # fmt: skip


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _random_module(make: Callable[[], Any], seed: int) -> Any:
    """Return a module whose parameters and moments are random, as after a training."""
    module = make()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.8 + 0.1)
            else:
                tensor.fill_(17)
    return module.eval()


@pytest.mark.parametrize("name", CASES)
def test_weights_come_from_torch_and_go_back(name: str, tmp_path: Path) -> None:
    make, make_peer, shape = CASES[name]
    here, there = make(), _random_module(make_peer, 1)
    save_file(there.state_dict(), tmp_path / "torch.safetensors")
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    fed = gf.placeholder("float32", shape)
    out = _first(here(fed))
    with gf.Session() as s:
        here.load(s, tmp_path / "torch.safetensors", "torch")
        have = s.run(out, {fed: x})
        saved = here.save(s, tmp_path / "back.safetensors", "torch")
        here.load(s, there.state_dict(), "torch")  # as tensors
        np.testing.assert_array_equal(s.run(out, {fed: x}), have)
    with torch.no_grad():
        np.testing.assert_allclose(have, _first(there(torch.tensor(x))).numpy(), atol=1e-5)
    again = _random_module(make_peer, 2)
    again.load_state_dict(load_file(saved), strict=True)
    for key, tensor in there.state_dict().items():
        assert not tensor.is_floating_point() or torch.equal(tensor, again.state_dict()[key])


def test_multi_head_attention_and_embeddings(tmp_path: Path) -> None:
    class Here(nn.Layer):
        def __init__(self) -> None:
            self.embed = nn.Embedding(9, 6)
            self.attention = nn.MultiHeadAttention(6, 3)

        def __call__(self, ids: Any) -> Any:
            return self.attention(self.embed(ids))

    class There(T.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = T.Embedding(9, 6)
            self.attention = T.MultiheadAttention(6, 3, batch_first=True)

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids)
            return self.attention(x, x, x)[0]

    here, there = Here(), _random_module(There, 3)
    ids = np.random.default_rng(0).integers(0, 9, (2, 5))
    with gf.Session() as s:
        here.load(s, there.state_dict(), "torch")
        have = s.run(here(ids))
        again = There()
        again.load_state_dict(load_file(here.save(s, tmp_path, "torch")), strict=True)
    with torch.no_grad():
        np.testing.assert_allclose(have, there(torch.tensor(ids)).numpy(), atol=1e-5)
        np.testing.assert_allclose(have, again(torch.tensor(ids)).numpy(), atol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_and_a_decoder(norm_first: bool, tmp_path: Path) -> None:
    def make_peer() -> Any:
        return T.Transformer(6, 2, 2, 1, 8, 0.0, batch_first=True, norm_first=norm_first)

    here = nn.Transformer(6, 2, 2, 1, 8, 0.0, norm_first=norm_first)
    there = _random_module(make_peer, 5)
    random = np.random.default_rng(0)
    source, target = (random.normal(size=(2, n, 6)).astype("float32") for n in (5, 4))
    fed = gf.placeholder("float32", source.shape), gf.placeholder("float32", target.shape)
    with gf.Session() as s:
        here.load(s, there.state_dict(), "torch")
        have = s.run(here(*fed), dict(zip(fed, (source, target), strict=True)))
        saved = load_file(here.save(s, tmp_path, "torch"))
    again = _random_module(make_peer, 6)
    again.load_state_dict(saved, strict=True)
    with torch.no_grad():
        for module in (there, again):
            want = module(torch.tensor(source), torch.tensor(target)).numpy()
            np.testing.assert_allclose(have, want, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_of_torch_is_widened(dtype: str) -> None:
    there = T.Linear(3, 4).to(getattr(torch, dtype))
    with gf.Session() as s:
        here = nn.Linear(3, 4)
        report = here.load(s, there.state_dict(), "torch")
        assert report.converted == dict.fromkeys(("weight", "bias"), f"{dtype} to float32")
        assert np.array_equal(s.get(here.weight), there.weight.detach().float().numpy())


def test_the_line_that_converts_a_pickle_does(tmp_path: Path) -> None:
    there = T.Linear(3, 4)
    torch.save(there.state_dict(), tmp_path / "net.pt")
    with gf.Session() as s:
        here = nn.Linear(3, 4)
        with pytest.raises(CheckpointError, match="is a pickle") as caught:
            here.load(s, tmp_path / "net.pt", "torch")
        code = str(caught.value).partition('python -c "')[2].removesuffix('"')
        code = code.replace("'net.", f"'{tmp_path}/net.")
        exec(code)
        here.load(s, tmp_path / "net.safetensors", "torch")
        assert np.array_equal(s.get(here.weight), there.weight.detach().numpy())

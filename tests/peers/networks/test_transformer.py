"""The encoder-decoder transformer and norms of weights against torch, with torch's weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ops import nn

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree  # noqa: E402

T, D, X = torch.nn, torch.float64, "float64"
RANDOM = np.random.default_rng(0)
SOURCE, TARGET = RANDOM.normal(size=(2, 5, 6)), RANDOM.normal(size=(2, 4, 6))
PADDING = np.array([[False] * 5, [False, False, False, True, True]])
OUR_NAMES = {"in_proj_weight": "weight", "in_proj_bias": "bias", "out_proj": "out"}


def same_weights(here: Any, there: Any) -> dict[Any, np.ndarray]:
    """Return the values of a layer's variables: those of torch's at the same path."""
    found = {}
    for path, parameter in there.named_parameters():
        at = here
        for name in path.split("."):
            norm = isinstance(at, nn.LayerNorm) and name == "weight"
            name = "scale" if norm else OUR_NAMES.get(name, name)
            at = at[int(name)] if isinstance(at, tuple) else getattr(at, name)
        found[at] = parameter.detach().numpy() + 0.1 * RANDOM.normal(size=tuple(parameter.shape))
        parameter.data = torch.tensor(found[at])
    assert found.keys() == set(here.parameters().values())
    return found


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_with_masks_is_torchs(norm_first: bool) -> None:
    here = nn.Transformer(6, 2, 2, 1, 8, 0.0, norm_first=norm_first, dtype=X)
    there = T.Transformer(6, 2, 2, 1, 8, 0.0, batch_first=True, norm_first=norm_first, dtype=D)
    feeds = same_weights(here, there)
    hidden, padding = torch.triu(torch.ones(4, 4), 1).bool(), torch.tensor(PADDING)
    agree(
        lambda a, b: here(
            a, b, causal=True, source_padding_mask=PADDING, memory_padding_mask=PADDING
        ),
        lambda a, b: there(
            a, b, tgt_mask=hidden, src_key_padding_mask=padding, memory_key_padding_mask=padding
        ),
        [SOURCE, TARGET], feeds=feeds, rtol=1e-7,
    )  # fmt: skip
    agree(here, there, [SOURCE, TARGET], feeds=feeds, rtol=1e-7)


def test_a_mask_of_scores_and_padding_go_together() -> None:
    here = nn.TransformerEncoder(6, 2, 2, 8, 0.0, bias=False, dtype=X)
    layer = T.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, bias=False, dtype=D)
    there = T.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    scores, padding = RANDOM.normal(size=(5, 5)), torch.where(torch.tensor(PADDING), -torch.inf, 0)
    agree(
        lambda x: here(x, mask=scores, padding_mask=PADDING),
        lambda x: there(x, mask=torch.tensor(scores), src_key_padding_mask=padding.double()),
        [SOURCE], feeds=same_weights(here, there), rtol=1e-7,
    )  # fmt: skip


@pytest.mark.parametrize("axis", [0, 1, None])
def test_weight_norm_is_torchs(axis: int | None) -> None:
    here, there = nn.Conv2d(2, 3, 2, dtype=X), T.Conv2d(2, 3, 2, dtype=D)
    normed = nn.weight_norm(here, axis=axis)
    peer = T.utils.parametrizations.weight_norm(there, dim=axis)
    rows = peer.parametrizations.weight
    rows.original0.data *= 1.5
    values = [rows.original1, there.bias, rows.original0.reshape(normed.weight_g.shape)]
    variables = list(normed.parameters().values())
    feeds = {v: p.detach().numpy() for v, p in zip(variables, values, strict=True)}
    agree(normed, peer, [RANDOM.normal(size=(2, 2, 4, 4))], feeds=feeds)


@pytest.mark.parametrize("kind", ["Linear", "ConvTranspose2d"])
def test_spectral_norm_is_torchs_in_training_and_in_use(kind: str) -> None:
    sizes: tuple[int, ...] = (3, 4) if kind == "Linear" else (3, 4, 2)
    here = nn.spectral_norm(getattr(nn, kind)(*sizes, dtype=X), iterations=2)
    peer = T.utils.parametrizations.spectral_norm(
        getattr(T, kind)(*sizes, dtype=D), n_power_iterations=2
    )
    rows = peer.parametrizations.weight
    x = RANDOM.normal(size=(2, 3) if kind == "Linear" else (2, 3, 4, 4))
    bias = here.layer.bias
    values = {here.layer.weight: rows.original, bias: peer.bias,
              here.weight_u: rows[0]._u, here.weight_v: rows[0]._v}  # fmt: skip
    feeds = {v: p.detach().numpy().copy() for v, p in values.items()}
    agree(here, peer.eval(), [x], feeds=feeds)
    with nn.training() as updates:
        y = here(x)
        assert len(updates) == 2
        again = here(x)
    assert len(updates) == 2  # a second call takes the same weight
    slope = gf.gradients(gf.sum(y * y + again * again) / 2, [here.layer.weight])
    have, *after, by = evaluate([y, *updates, *slope], feeds)
    want = peer.train()(torch.tensor(x))
    (grown,) = torch.autograd.grad((want * want).sum(), [rows.original])
    np.testing.assert_allclose(have, want.detach().numpy(), rtol=1e-9)
    np.testing.assert_allclose(by, grown.numpy(), rtol=1e-7, atol=1e-9)
    for value, wanted in zip(after, (rows[0]._u, rows[0]._v), strict=True):
        np.testing.assert_allclose(value, wanted.numpy(), rtol=1e-9)

"""Transformer layers and norms of weights: names, masks, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ops import nn

X = np.random.default_rng(0).normal(size=(2, 5, 6)).astype("f")


def test_a_transformer_has_torchs_names_and_glorots_range() -> None:
    model = nn.Transformer(6, 2, 1, 1, 8)
    names = set(model.parameters())
    assert {
        "transformer/encoder/layers/0/self_attn/weight",
        "transformer/decoder/layers/0/multihead_attn/out/bias",
        "transformer/decoder/layers/0/linear2/weight", "transformer/encoder/norm/scale",
    } < names and len(names) == 12 + 18 + 4  # fmt: skip
    weight = model.decoder.layers[0].linear1.weight.node.attrs["initial"]()
    assert 0.5 < np.abs(weight).max() < np.sqrt(6 / 14)


def test_what_is_padding_or_later_changes_nothing() -> None:
    model = nn.Transformer(6, 2, 1, 1, 8)
    padding = np.arange(5) > 2
    source, target = gf.placeholder("float32", (5, 6)), gf.placeholder("float32", (5, 6))
    y = model(source, target, causal=True, source_padding_mask=padding, memory_padding_mask=padding)
    noise = np.where(np.arange(5)[:, None] > 2, 9, 0).astype("f")
    have = [evaluate([y], {source: X[0] + n, target: X[1] + n})[0] for n in (0 * noise, noise)]
    np.testing.assert_allclose(have[0][:3], have[1][:3], rtol=1e-5)
    assert np.abs(have[0][3:] - have[1][3:]).max() > 1e-3


def test_dropout_is_for_training_and_layers_train() -> None:
    model = nn.Sequential(nn.TransformerEncoder(6, 2, 2, 8, 0.5), nn.Linear(6, 1))
    with nn.training():
        loss = gf.mean((model(X) - 1) ** 2)
    step = gf.optim.Adam(0.05).minimize(loss)
    used = gf.mean((model(X) - 1) ** 2)
    with gf.Session() as s:
        first = s.run(used)
        assert s.run(used) == first and s.run(loss) != s.run(loss)
        for _ in range(30):
            s.run(step)
        assert s.run(used) < first / 3


@pytest.mark.parametrize("wrap", [nn.weight_norm, nn.spectral_norm])
def test_a_norm_of_weights_wraps_any_layer_and_variable(wrap: Any) -> None:
    lstm = nn.LSTM(6, 4, num_layers=2, batch_first=True)
    normed = wrap(lstm, "weight_hh_l1")
    (y, _), (before, _) = normed(X), lstm(X)
    slope = gf.gradients(gf.sum(y), [lstm.weight_hh_l1])
    have, want, by = evaluate([y, before, *slope])
    assert by.any()
    if wrap is nn.weight_norm:
        np.testing.assert_allclose(have, want, rtol=1e-5)
        assert "lstm/weight_hh_l1_g" in normed.parameters()
        assert evaluate([normed.weight_hh_l1_g])[0].shape == (16, 1)
    else:
        assert np.abs(have - want).max() > 1e-4
        assert set(normed.buffers()) == {"lstm/weight_hh_l1_u", "lstm/weight_hh_l1_v"}


def test_a_spectral_norm_approaches_the_largest_singular_value() -> None:
    layer = nn.Linear(6, 6, bias=False)
    normed = nn.spectral_norm(layer)
    with nn.training() as updates:
        normed(X)
    weight = normed(np.eye(6, dtype="f"))
    with gf.Session() as s:
        for _ in range(100):
            s.run(updates)
        assert np.linalg.norm(s.run(weight), 2) == pytest.approx(1, rel=1e-4)
    zero = nn.spectral_norm(nn.Linear(3, 2))
    assert not np.isnan(
        evaluate([zero.weight_u], {zero.layer.weight: np.zeros((2, 3), "f")})[0]
    ).any()


@pytest.mark.parametrize(
    ("mistake", "error", "told"),
    [
        (lambda: nn.weight_norm(gf.exp), ArgumentError, "no layer with a variable 'weight'"),
        (lambda: nn.weight_norm(nn.Linear(3, 2), "scale"), ArgumentError, "WeightNorm at .*scale"),
        (lambda: nn.weight_norm(nn.Linear(3, 2), axis=2), ShapeError, "2"),
        (lambda: nn.spectral_norm(nn.LayerNorm(3), "bias"), ShapeError, r"\(3,\)"),
        (lambda: nn.spectral_norm(nn.Linear(3, 2), iterations=0), ArgumentError, "1, got 0"),
        (lambda: nn.TransformerEncoderLayer(6, 2, 0), ArgumentError, "hidden must be"),
        (lambda: nn.TransformerEncoder(6, 2, 0), ArgumentError, "num_layers must be"),
        (
            lambda: nn.TransformerEncoderLayer(6, 2)(X, padding_mask=np.zeros((2, 5))), DTypeError,
            "EncoderLayer at .*padding mask is bool.*not float64",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_told(mistake: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        mistake()

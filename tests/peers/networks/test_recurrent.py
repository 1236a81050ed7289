"""Recurrent layers and cells against torch, on random shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.ops import nn

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree, same_weights  # noqa: E402

KINDS = ["RNN", "LSTM", "GRU"]
FUNCTIONS = {"RNN": nn.rnn, "LSTM": nn.lstm, "GRU": nn.gru}


def flatten_results(result: Any) -> list[Any]:
    """y, h and perhaps c."""
    y, state = result
    return [y, *(state if isinstance(state, tuple) else (state,))]


@pytest.mark.parametrize("kind", KINDS)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    directions=st.integers(1, 2),
    bias=st.booleans(),
    batch_first=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=8)
def test_functions(
    kind: str, sizes: tuple[int, ...], directions: int, bias: bool, batch_first: bool, seed: int
) -> None:
    t, b, i, n = sizes
    rng = np.random.default_rng(seed)
    rows = n * {"RNN": 1, "LSTM": 4, "GRU": 3}[kind]
    x = rng.normal(size=(b, t, i) if batch_first else (t, b, i))
    w, r = rng.normal(size=(directions, rows, i)), rng.normal(size=(directions, rows, n))
    given = [rng.normal(size=(directions, 2 * rows))] if bias else []
    states = [rng.normal(size=(directions, b, n)) for _ in range(1 + (kind == "LSTM"))]

    def ours(x: Any, w: Any, r: Any, *rest: Any) -> list[Any]:
        bias, initial = (rest[0], rest[1:]) if given else (None, rest)
        direction = "bidirectional" if directions == 2 else "forward"
        return flatten_results(
            FUNCTIONS[kind](
                x, w, r, bias, tuple(initial), direction=direction, batch_first=batch_first
            )
        )

    def theirs(x: Any, w: Any, r: Any, *rest: Any) -> list[Any]:
        initial = rest[len(given) :]
        weights = []
        for d in range(directions):
            weights += [w[d], r[d], *(rest[0][d].split(rows) if given else ())]
        run = {"RNN": torch.rnn_tanh, "LSTM": torch.lstm, "GRU": torch.gru}[kind]
        state = tuple(initial) if kind == "LSTM" else initial[0]
        return list(run(x, state, weights, bias, 1, 0.0, False, directions == 2, batch_first))

    agree(ours, theirs, [x, w, r, *given, *states])


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 2), st.booleans(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
@settings(max_examples=6)
def test_layers_with_lengths(kind: str, layers: int, both: bool, lengths: list[int]) -> None:
    rng = np.random.default_rng(layers)
    options: dict[str, Any] = {"bidirectional": both}
    here = getattr(nn, kind)(3, 2, layers, **options, dtype="float64")
    there = getattr(torch.nn, kind)(3, 2, layers, **options, dtype=torch.float64)
    feeds = same_weights(here, there)
    pack, unpack = torch.nn.utils.rnn.pack_padded_sequence, torch.nn.utils.rnn.pad_packed_sequence

    def theirs(x: Any) -> list[Any]:
        y, *state = flatten_results(there(pack(x, lengths, enforce_sorted=False)))
        return [unpack(y, total_length=4)[0], *state]

    x = rng.normal(size=(4, len(lengths), 3))
    agree(lambda x: flatten_results(here(x, lengths=np.array(lengths))), theirs, [x], feeds=feeds)


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 99))
@settings(max_examples=8)
def test_cells(kind: str, batch: int, size: int, bias: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    here = getattr(nn, f"{kind}Cell")(2, size, bias, dtype="float64")
    there = getattr(torch.nn, f"{kind}Cell")(2, size, bias, dtype=torch.float64)
    feeds = same_weights(here, there)
    states = [rng.normal(size=(batch, size)) for _ in range(1 + (kind == "LSTM"))]

    def call(cell: Any) -> Any:
        return lambda x, *s: cell(x, s if len(s) > 1 else s[0])

    agree(call(here), call(there), [rng.normal(size=(batch, 2)), *states], feeds=feeds)


def test_layers_begin_as_torchs_do() -> None:
    layer = gf.nn.LSTM(30, 50, 2, bidirectional=True)
    there = torch.nn.LSTM(30, 50, 2, bidirectional=True)
    names = [name.rsplit("/", 1)[-1] for name in layer.parameters()]
    assert names == [name for name, _ in there.named_parameters()]
    for ours, theirs in zip(layer.parameters().values(), there.parameters(), strict=True):
        values = ours.node.attrs["initial"]()
        assert ours.shape == tuple(theirs.shape)
        assert abs(values).max() == pytest.approx(theirs.abs().max().item(), rel=0.05)

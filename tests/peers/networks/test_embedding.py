"""Embedding and its optimiser steps against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree  # noqa: E402

F = torch.nn.functional
IDS = st.lists(st.integers(0, 8), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(IDS, st.integers(1, 4), st.none() | st.integers(0, 8))
def test_lookups_and_their_gradient(ids: list[int], width: int, padding: int | None) -> None:
    table = np.random.default_rng(len(ids)).standard_normal((9, width))
    agree(
        lambda t: gf.nn.embedding(ids, t, padding),
        lambda t: F.embedding(torch.tensor(ids), t, padding_idx=padding),
        [table],
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 8), max_size=4), min_size=1, max_size=5),
    st.sampled_from(["sum", "mean", "max"]), st.none() | st.integers(0, 8),
)  # fmt: skip
def test_bags_of_rows_and_their_gradient(
    bags: list[list[int]], mode: str, padding: int | None
) -> None:
    table = np.random.default_rng(len(bags)).standard_normal((9, 3))
    ids = np.array([i for bag in bags for i in bag], "int64")
    begins = np.cumsum([0, *map(len, bags)])[:-1].astype("int64")
    agree(
        lambda t: gf.nn.embedding_bag(ids, t, begins, mode, padding_id=padding),
        lambda t: F.embedding_bag(
            torch.tensor(ids), t, torch.tensor(begins), mode=mode, padding_idx=padding
        ),
        [table],
    )


STEPS = [
    (gf.optim.SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (gf.optim.Adagrad(0.1, epsilon=1e-10), lambda p: torch.optim.Adagrad(p, 0.1)),
    (gf.optim.Adam(0.1, sparse=True), lambda p: torch.optim.SparseAdam(p, 0.1)),
]  # fmt: skip


@pytest.mark.parametrize("ours, theirs", STEPS, ids=["SGD", "Adagrad", "Adam"])
def test_twenty_sparse_steps(ours: Any, theirs: Any) -> None:
    rng = np.random.default_rng(0)
    start = rng.standard_normal((9, 4)).astype("float32")
    layer = torch.nn.Embedding(9, 4, sparse=True, _weight=torch.tensor(start))
    optimizer = theirs(layer.parameters())
    table = gf.variable(start, name="table")
    ids = gf.placeholder("int64", (None,))
    loss = gf.sum(gf.tanh(gf.nn.embedding(ids, table)) ** 2)
    step = ours.minimize(loss)
    with gf.Session() as session:
        for _ in range(20):
            chosen = rng.integers(0, 9, 5)
            have, _ = session.run([loss, step], {ids: chosen})
            optimizer.zero_grad()
            want = (torch.tanh(layer(torch.tensor(chosen))) ** 2).sum()
            want.backward()
            optimizer.step()
            np.testing.assert_allclose(have, want.item(), rtol=1e-5)
        np.testing.assert_allclose(
            session.get(table), layer.weight.detach().numpy(), rtol=1e-4, atol=1e-5
        )

"""Probabilities that a step computed and that are none: samplers refuse them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import OpError

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize(
    ("rows", "wrong", "told"),
    [
        ([[0, 0], [0, NAN]], 1, r"the largest logit of row \(1,\) is nan"),
        ([[0, 0], [INF, 0]], 1, r"the largest logit of row \(1,\) is inf"),
        ([[-INF, -INF], [-INF, -INF]], 2, r"the largest logit of row \(0,\) is -inf"),
    ],
)
def test_logits_without_a_softmax_are_refused_with_the_line(
    dtype: str, rows: Any, wrong: int, told: str
) -> None:
    logits = gf.placeholder(dtype, (2, 2))
    drawn = gf.random.categorical(logits)  # here
    across = gf.random.categorical(gf.swapaxes(logits, 0, 1), axis=0)
    with gf.Session() as s:
        with pytest.raises(OpError, match=rf"test_probabilities\.py.*{wrong} of 2 rows.*{told}"):
            s.run(drawn, {logits: rows})
        with pytest.raises(OpError, match=told):
            s.run(across, {logits: rows})
        assert s.run(drawn, {logits: [[0, -INF], [-INF, 3]]}).tolist() == [0, 1]


def test_a_vector_of_logits_is_one_row() -> None:
    logits = gf.placeholder("float32", (3,))
    with gf.Session() as s, pytest.raises(OpError, match=r"1 of 1 rows.*the largest logit is nan"):
        s.run(gf.random.categorical(logits), {logits: [0, NAN, 0]})


@pytest.mark.parametrize(
    ("p", "told"),
    [
        ([0.5, NAN], r"1 of 2 probabilities are not in \[0, 1\]: p at index \(1,\) is nan"),
        ([1.5, -0.5], r"2 of 2 probabilities .* p at index \(0,\) is 1\.5"),
    ],
)
def test_numbers_outside_0_and_1_are_no_probabilities(p: Any, told: str) -> None:
    fed = gf.placeholder("float32", (2,))
    drawn = gf.random.bernoulli(fed)
    with gf.Session() as s:
        with pytest.raises(OpError, match=told):
            s.run(drawn, {fed: p})
        assert s.run(drawn, {fed: [1, 0]}).tolist() == [True, False]


def test_an_empty_batch_has_no_row_to_refuse() -> None:
    logits, p = gf.placeholder("float32", (None, 3)), gf.placeholder("float32", (None,))
    fetches = [gf.random.categorical(logits), gf.random.bernoulli(p)]
    with gf.Session() as s:
        values = s.run(fetches, {logits: np.zeros((0, 3)), p: np.zeros(0)})
    assert [v.shape for v in values] == [(0,), (0,)]

"""Probabilities of classes from those of pairs: the compiled loop against ordinary ops."""

from __future__ import annotations

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool
from graphflow.ops.reductions.pair_coupling import _couple_by_loop, couple_pairs


@pytest.mark.parametrize("rows", [0, 1, 7, 3000])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_any_number_of_threads_finds_what_a_loop_over_ops_finds(rows: int, count: int) -> None:
    chance = np.random.default_rng(rows).uniform(0.05, 0.95, (rows, count * (count - 1) // 2))
    (want,) = evaluate([_couple_by_loop(gf.constant(chance), count)])
    for threads in (1, 3):
        with use_pool(Pool(threads)):
            (found,) = evaluate([couple_pairs(gf.constant(chance), count=count)])
        np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-12)


def test_consistent_pairs_give_back_the_classes_that_they_come_from() -> None:
    p = np.array([0.6, 0.3, 0.1])
    chance = [[p[i] / (p[i] + p[j]) for i, j in ((0, 1), (0, 2), (1, 2))]]
    (found,) = evaluate([couple_pairs(gf.constant(np.array(chance)), count=3)])
    np.testing.assert_allclose(found[0], p, atol=0.005)


def test_another_number_of_pairs_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"float64 \(rows, 6\) for 4 classes"):
        couple_pairs(gf.constant(np.ones((2, 5))), count=4)

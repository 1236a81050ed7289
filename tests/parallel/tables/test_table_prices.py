"""Prices of lookups and updates: the rows that a step touches count, not the table's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: gf.optim.SGD(0.1),
    "adagrad": lambda: gf.optim.Adagrad(0.1),
    "rowwise": lambda: gf.optim.RowwiseAdagrad(0.1),
    "adam": lambda: gf.optim.Adam(0.1, sparse=True),
}
TWO = gf.Cluster.hypothetical(
    2, ("cpu:0",), flops=1e10, bandwidth=1e10, memory=1 << 36, launch=1e-6, link_bandwidth=1e9
)
"""What a session learned on this machine, busy as it may be, does not count."""


def build_training(rows: int, width: int, lookups: int, optimizer: str, workers: int = 2) -> Any:
    """The ids, and the fetches of a step that trains a table."""
    ids = gf.placeholder("int64", (lookups,), name="ids")
    table = gf.variable(gf.init.normal((rows, width), 0.1), name="table")
    loss = gf.mean(gf.nn.embedding(ids, table) ** 2)
    strategy = gf.parallel.Data(workers, tables=[table]) if workers > 1 else None
    return ids, [loss, OPTIMIZERS[optimizer]().minimize(loss, strategy=strategy)]


def predict_step(*case: Any) -> float:
    return float(gf.plan(build_training(*case)[1], TWO).makespan)


@settings(deadline=None, max_examples=12)
@given(
    st.integers(50_000, 2_000_000), st.sampled_from([4, 32, 128]), st.integers(100, 4000),
    st.sampled_from(sorted(OPTIMIZERS)),
)  # fmt: skip
def test_a_step_costs_what_it_touches_and_a_larger_table_nothing_more(
    rows: int, width: int, half: int, optimizer: str
) -> None:
    case = width, 2 * half, optimizer
    once, larger, more = predict_step(rows, *case), predict_step(9 * rows, *case), 0.0
    assert larger == pytest.approx(once, rel=0.08)  # fewer ids occur twice
    more = predict_step(rows, width, 8 * half, optimizer)
    assert once < more < 4.2 * once


def test_rows_that_occur_again_are_not_computed_again() -> None:
    """4,000 lookups in 500 rows fill an eighth of the room for distinct rows."""
    few, many = predict_step(4_000, 128, 4_000, "adam"), predict_step(400_000, 128, 4_000, "adam")
    assert few < 0.8 * many


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_predictions_before_traces_are_near_measured_steps(seed: int) -> None:
    random = np.random.default_rng(seed)
    ratios = []
    for _ in range(4):
        rows, width = int(np.exp(random.uniform(7.6, 13.8))), int(2 ** random.integers(2, 8))
        lookups = 2 * int(np.exp(random.uniform(4.8, 9.2)))
        workers = int(random.integers(1, 3))
        optimizer = sorted(OPTIMIZERS)[random.integers(len(OPTIMIZERS))]
        ids, step = build_training(rows, width, lookups, optimizer, workers)
        batches = [random.integers(0, rows, lookups) for _ in range(8)]
        with gf.Session(gf.Cluster.local(workers, threads=1)) as s:
            for i in range(22):
                s.run(step, {ids: batches[i % 8]})
            plan, taken = s.plan(step), []
            for i in range(60):
                start = time.perf_counter()
                s.run(step, {ids: batches[i % 8]})
                taken.append(time.perf_counter() - start)
        # Other work of the machine makes steps slower, never faster.
        ratios.append(plan.makespan / float(np.quantile(taken, 0.1)))
    errors = np.abs(np.log(ratios))
    assert np.median(errors) < np.log(1.5) and errors.max() < np.log(4), ratios

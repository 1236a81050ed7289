"""Row-wise Adagrad: its formula, one number a row, only rows that were looked up, any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError
from graphflow.ir.graph import Graph

Array = np.ndarray[Any, Any]
Data, Shard = gf.parallel.Data, gf.parallel.Shard
ROWS, SIZE = 11, 4


def _by_hand(
    table: Array, state: Array, ids: Array, slopes: Array, rate: float, epsilon: float
) -> tuple[Array, Array]:
    """FBGEMM's definition: gradients of equal ids are summed; a row's state grows by the mean of
    the squares of its gradient, and the row moves by lr / (√state + ε) times its gradient."""
    table, state = table.copy(), state.copy()
    for row in np.unique(ids):
        gradient = slopes[ids == row].sum(0)
        state[row] += np.mean(gradient**2)
        table[row] -= rate * gradient / (np.sqrt(state[row]) + epsilon)
    return table, state


def _train(
    optimizer: Any, strategy: Any = None, cluster: Any = None, dtype: str = "float64"
) -> tuple[Array, Array, list[tuple[Array, Array]]]:
    """Return a table and its state after four steps, and the ids and slopes of each step."""
    random = np.random.default_rng(0)
    table = gf.variable(random.normal(size=(ROWS, SIZE)).astype(dtype), name="table")
    ids, slopes = gf.placeholder("int64", (None,)), gf.placeholder(dtype, (None, SIZE))
    loss = gf.sum(gf.nn.embedding(ids, table) * slopes)
    step = optimizer.minimize(loss, strategy=strategy)
    (slot,) = (node.outputs[0] for node in Graph(step).variables if node.origin is table.node)
    batches = []
    with gf.Session(cluster) as s:
        for _ in range(4):
            rows = random.integers(-3, 4, 7)
            batches.append((rows % ROWS, random.normal(size=(7, SIZE)).astype(dtype)))
            s.run(step, {ids: rows, slopes: batches[-1][1]})
        return s.get(table), s.get(slot), batches


@pytest.mark.parametrize("initial", [0.0, 0.25])
def test_steps_follow_the_formula_to_the_last_digits(initial: float) -> None:
    optimizer = gf.optim.RowwiseAdagrad(0.3, initial=initial, epsilon=1e-3)
    table, state, batches = _train(optimizer)
    want = np.random.default_rng(0).normal(size=(ROWS, SIZE))
    sums = np.full(ROWS, initial)
    for ids, slopes in batches:
        want, sums = _by_hand(want, sums, ids, slopes, 0.3, 1e-3)
    assert state.shape == (ROWS,)
    np.testing.assert_allclose(table, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(state, sums, rtol=1e-12, atol=1e-12)


def test_two_equal_pushes_move_by_the_rate_and_by_its_half_root() -> None:
    w = gf.variable(np.zeros((2, 3)), name="w")
    step = gf.optim.RowwiseAdagrad(0.5, epsilon=0.0).minimize(gf.sum(gf.take(w, [1], 0)) * 2.0)
    with gf.Session() as s:
        moves = [s.get(w)[1] for _ in range(3) if s.run(step) is None]
    np.testing.assert_allclose(-moves[0], 0.5, rtol=1e-15)
    np.testing.assert_allclose(moves[0] - moves[1], 0.5 / np.sqrt(2), rtol=1e-14)
    np.testing.assert_allclose(moves[1] - moves[2], 0.5 / np.sqrt(3), rtol=1e-14)


def test_a_step_reads_and_writes_no_more_than_the_rows_that_it_looked_up() -> None:
    table = gf.variable(np.zeros((1000, 8), "float32"), name="table")
    ids = gf.placeholder("int64", (5,))
    step = gf.optim.RowwiseAdagrad(0.1).minimize(gf.sum(gf.nn.embedding(ids, table)))
    made = [n for n in Graph(step).nodes if n.op.name not in ("variable", "assign", "update_rows")]
    assert max(spec.size for node in made for spec in node.specs) == 5 * 8
    assert table.size * 4 // 8 == sum(
        n.specs[0].nbytes for n in Graph(step).variables if n.origin is table.node
    )


def test_a_table_without_lookups_is_trained_row_by_row_as_well() -> None:
    random = np.random.default_rng(1)
    value, slope = random.normal(size=(2, 5, 3, 2))
    w = gf.variable(value, name="w")
    b = gf.variable(np.zeros(()), name="b")
    step = gf.optim.RowwiseAdagrad(0.1, epsilon=0.0).minimize(gf.sum(w * slope) + 3.0 * b)
    with gf.Session() as s:
        s.run(step)
        scale = np.sqrt((slope**2).mean((1, 2), keepdims=True))
        np.testing.assert_allclose(s.get(w), value - 0.1 * slope / scale, rtol=1e-12)
        np.testing.assert_allclose(s.get(b), -0.1, rtol=1e-12)


STRATEGIES = {
    **{f"rows over {n}": (lambda n=n: Shard({"m": n}, {"table": ("m",)})) for n in (1, 2, 3)},
    "columns": lambda: Shard({"m": 2}, {"table": (None, "m")}),
    "both": lambda: Shard({"m": 2, "n": 2}, {"table": ("m", "n")}),
    "replicas": lambda: Data(3),
    **{f"shares of {n}": (lambda n=n: Data(n, shard_state=True)) for n in (2, 3)},
    "shares of rows": lambda: Data(2, shard_state=True) * Shard({"m": 2}, {"table": ("m",)}),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_shards_train_as_one_device(name: str) -> None:
    optimizer = gf.optim.RowwiseAdagrad(0.3)
    table, state, _ = _train(optimizer)
    parts, part_state, _ = _train(optimizer, STRATEGIES[name]())
    np.testing.assert_allclose(parts, table, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(part_state, state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy, parts", [
    (Shard({"m": 3}, {"table": ("m",)}), 3), (Data(2, shard_state=True), 2),
    (Data(2, shard_state=True) * Shard({"m": 2}, {"table": ("m",)}), 4),
    (Shard({"m": 2}, {"table": (None, "m")}), 1),
], ids=["rows", "shares", "shares of rows", "columns"])  # fmt: skip
def test_the_state_is_cut_along_with_the_rows(strategy: Any, parts: int) -> None:
    table = gf.variable(np.zeros((24, 4), "float32"), name="table")
    ids = gf.placeholder("int64", (None,), name="ids")
    loss = gf.sum(gf.nn.embedding(ids, table))
    division = strategy.report(gf.optim.RowwiseAdagrad(0.1).minimize(loss, strategy=strategy))
    (pieces,) = (p for v, p in division.division.variables.items() if v.origin is table.node)
    sizes = {tuple(span.stop - span.start for span in spans) for spans in pieces.spans}
    assert sizes == {(24 // parts,)}


@pytest.mark.parametrize("before", [2, 3])
@pytest.mark.parametrize("after", [None, 2, 3])
def test_the_state_moves_with_its_rows_from_a_checkpoint(
    before: int, after: int | None, tmp_path: Path
) -> None:
    """Steps on some shards, a checkpoint, and steps on others: those of one device."""

    def run_training(halves: list[int | None]) -> Array:
        random = np.random.default_rng(0)
        table = gf.variable(random.normal(size=(ROWS, SIZE)), name="table")
        ids = gf.placeholder("int64", (None,))
        loss = gf.sum(gf.square(gf.nn.embedding(ids, table) - 0.5))
        for number, shards in enumerate(halves):
            strategy = None if shards is None else Shard({"m": shards}, {"table": ("m",)})
            step = gf.optim.RowwiseAdagrad(0.3).minimize(loss, strategy=strategy)
            with gf.Session() as s:
                if number:
                    s.load(tmp_path / "kept")
                for _ in range(2):
                    s.run(step, {ids: random.integers(0, ROWS, 9)})
                s.save(tmp_path / "kept")
                end = s.get(table)
        return end

    have, want = run_training([before, after]), run_training([None, None])
    np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12)


def test_two_workers_keep_the_bits_of_one_process() -> None:
    strategy = Shard({"m": 2}, {"table": ("m",)})
    optimizer = gf.optim.RowwiseAdagrad(0.3)
    table, state, _ = _train(optimizer, strategy, gf.Cluster.local(2, threads=1))
    here, here_state, _ = _train(optimizer, strategy)
    np.testing.assert_array_equal(table, here)
    np.testing.assert_array_equal(state, here_state)


@pytest.mark.parametrize("options", [{"lr": -1}, {"epsilon": float("nan")}, {"initial": "x"}])
def test_numbers_that_are_none_are_refused(options: Any) -> None:
    with pytest.raises(ArgumentError, match=r"RowwiseAdagrad at .*test_rowwise"):
        gf.optim.RowwiseAdagrad(**options)

"""EMSO: inner steps by hand, the problem that they solve, tables, strategies, and what it gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError
from tests.parallel.models import difference, mlp

Array = np.ndarray[Any, Any]
Data, Shard, Pipeline = gf.parallel.Data, gf.parallel.Shard, gf.parallel.Pipeline
SGD, Emso = gf.optim.SGD, gf.optim.Emso


class Squares:
    """Least squares, and steps of an optimiser on batches of it."""

    def __init__(self, rows: int, size: int, noise: float = 0.5, fall: float = 0.0) -> None:
        random = np.random.default_rng(0)
        scale = np.logspace(0, fall, size)
        self.x = random.normal(size=(rows, size)) * scale
        self.y = self.x @ (random.normal(size=size) / np.sqrt(scale))
        self.y = self.y + noise * random.normal(size=rows)
        self.best = np.linalg.lstsq(self.x, self.y, rcond=None)[0]

    def loss(self, w: Array) -> float:
        return float(np.mean((self.x @ w - self.y) ** 2) / 2)

    def train(self, optimizer: Any, batch: int, strategy: Any = None, repeat: int = 1) -> Array:
        """The weights after one pass; `repeat`: steps that each batch takes."""
        rows, size = self.x.shape
        x, y = gf.placeholder("float64", (batch, size)), gf.placeholder("float64", (batch,))
        w = gf.variable(np.zeros(size), name="w")
        step = optimizer.minimize(gf.mean((x @ w - y) ** 2.0) / 2.0, strategy=strategy)
        with gf.Session() as s:
            for i in range(0, rows, batch):
                for _ in range(repeat):
                    s.run(step, {x: self.x[i : i + batch], y: self.y[i : i + batch]})
            return s.get(w)

    def by_hand(self, rate: float, batch: int, steps: int, gamma: float) -> Array:
        """Gradient steps on φ(w) + γ/2·‖w − w₀‖², batch by batch."""
        w = np.zeros(self.x.shape[1])
        for i in range(0, len(self.x), batch):
            x, y, start = self.x[i : i + batch], self.y[i : i + batch], w
            for _ in range(steps):
                w = w - rate * (x.T @ (x @ w - y) / batch + gamma * (w - start))
        return w


INNER = [
    SGD(0.1),
    SGD(0.05, momentum=0.9, nesterov=True),
    gf.optim.Adam(0.1),
    gf.optim.Adagrad(0.1),
]
NAMES = ["SGD", "momentum", "Adam", "Adagrad"]


@pytest.mark.parametrize("inner", INNER, ids=NAMES)
@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_one_inner_step_is_the_inner_optimiser_to_the_bit(inner: Any, gamma: float) -> None:
    squares = Squares(40, 3)
    one = squares.train(Emso(inner, inner_steps=1, gamma=gamma), 8)
    np.testing.assert_array_equal(one, squares.train(inner, 8))


@pytest.mark.parametrize("inner", INNER, ids=NAMES)
def test_without_gamma_inner_steps_are_steps_on_the_same_batch_to_the_bit(inner: Any) -> None:
    """Slots go on from one inner step to the next, and from batch to batch."""
    squares = Squares(40, 3)
    have = squares.train(Emso(inner, inner_steps=3, gamma=0), 8)
    np.testing.assert_array_equal(have, squares.train(inner, 8, repeat=3))


@pytest.mark.parametrize("gamma", [0.0, 0.3, 5.0])
def test_inner_steps_follow_the_formula(gamma: float) -> None:
    squares = Squares(60, 4)
    want = squares.by_hand(0.1, 12, 4, gamma)
    have = squares.train(Emso(SGD(0.1), 4, gamma), 12)
    np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12)


def test_many_inner_steps_solve_the_problem_of_the_batch() -> None:
    squares, gamma = Squares(16, 4), 0.7
    x, y, w = squares.x, squares.y, np.zeros(4)
    for part in (slice(0, 8), slice(8, 16)):
        left = x[part].T @ x[part] / 8 + gamma * np.eye(4)
        w = np.linalg.solve(left, x[part].T @ y[part] / 8 + gamma * w)
    have = squares.train(Emso(SGD(0.3), 60, gamma), 8)
    np.testing.assert_allclose(have, w, rtol=1e-6)


def test_gamma_may_be_a_graph_value() -> None:
    squares = Squares(24, 3)
    x, y = gf.placeholder("float64", (8, 3)), gf.placeholder("float64", (8,))
    w, count = gf.variable(np.zeros(3), name="w"), gf.variable(1.0, name="count")
    loss = gf.mean((x @ w - y) ** 2.0) / 2.0
    step = Emso(SGD(0.1), 3, gamma=gf.sqrt(count)).minimize(loss)
    want = np.zeros(3)
    with gf.Session() as s:
        for i in range(3):
            part = slice(8 * i, 8 * i + 8)
            s.run([step, gf.assign(count, count + 1.0)], {x: squares.x[part], y: squares.y[part]})
            a, b, start = squares.x[part], squares.y[part], want
            for _ in range(3):
                slope = a.T @ (a @ want - b) / 8 + np.sqrt(i + 1) * (want - start)
                want = want - 0.1 * slope
            np.testing.assert_allclose(s.get(w), want, rtol=1e-6)


def test_inner_steps_share_their_dropout() -> None:
    """Two steps on one φ: else the second would see another mask."""
    w = gf.variable(np.ones(64), name="w")
    loss = gf.sum(gf.nn.dropout(w, 0.5))
    step = Emso(SGD(0.25), 2, 0.0).minimize(loss)
    with gf.Session() as s:
        s.run(step)
        assert set(s.get(w)) == {0.0, 1.0}  # both moved by 2 · 0.25 · 2, or neither


@pytest.mark.parametrize("inner", [
    SGD(0.1), gf.optim.RowwiseAdagrad(0.1), gf.optim.Adam(0.1, sparse=True),
], ids=lambda o: type(o).__name__)  # fmt: skip
@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_rows_of_a_table_are_updated_as_those_of_a_small_one(inner: Any, gamma: float) -> None:
    """The looked-up rows move as a table of these rows alone does; the others stay."""
    start = np.random.default_rng(0).normal(size=(50, 3))
    chosen = np.array([7, 7, 30, 49])

    def run_training(rows: Array, ids: Sequence[int]) -> Array:
        table, i = gf.variable(rows, name="table"), gf.placeholder("int64", (4,))
        loss = gf.sum(gf.square(gf.nn.embedding(i, table) - 0.5))
        step = Emso(inner, 3, gamma).minimize(loss)
        with gf.Session() as s:
            for _ in range(2):
                s.run(step, {i: ids})
            return s.get(table)

    have = run_training(start, chosen)
    want = start.copy()
    want[[7, 30, 49]] = run_training(start[[7, 30, 49]], [0, 0, 1, 2])
    np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(have[:7], start[:7])


@pytest.mark.parametrize("inner", [SGD(0.1), gf.optim.RowwiseAdagrad(0.1), gf.optim.Adam(0.1)],
                         ids=lambda o: type(o).__name__)  # fmt: skip
@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_new_rows_of_a_hash_table_go_on_from_their_initial_values(inner: Any, gamma: float) -> None:
    """As an embedding of the same values does; ids that wait for a row are not trained."""
    with gf.random.seed(1):
        table = gf.nn.HashTable(3, 10, admit=2, dtype="float64")
    ids = gf.placeholder("int64", (None,))
    with gf.nn.training() as updates:
        loss = gf.sum(gf.square(table(ids) - 0.5))
    step, read = Emso(inner, 3, gamma).minimize(loss), table(ids)
    with gf.Session() as s, gf.Session() as d:
        first = s.run(read, {ids: [5, -9, 77]})
        dense = gf.variable(first, name="dense")
        i = gf.placeholder("int64", (None,))
        plain = type(inner)(**{**vars(inner), "sparse": True})
        other = Emso(plain, 3, gamma).minimize(gf.sum(gf.square(gf.nn.embedding(i, dense) - 0.5)))
        for batch, trained in (([5, 5, 77], [0, 0]), ([-9, 5], [0]), ([77, -9], [2, 1])):
            s.run([step, *updates], {ids: batch})
            d.run(other, {i: trained})
            have = s.run(read, {ids: [5, -9, 77]})
            np.testing.assert_allclose(have, d.get(dense), rtol=1e-12, atol=1e-14)


@pytest.mark.every(3)
@pytest.mark.parametrize("strategy", [
    Data(2), Data(3, shard_state=True), Data(2, accumulate=2),
    Shard({"m": 2}, {"w1": (None, "m"), "w2": ("m",)}),
    Data(2, shard_state=True) * Shard({"m": 2}, {"w1": (None, "m")}),
    Pipeline(2, microbatches=2), Pipeline(2, "pipedream", 1),
], ids=["replicas", "shares", "turns", "columns", "product", "1f1b", "pipedream"])  # fmt: skip
@pytest.mark.parametrize("inner", [SGD(0.05, momentum=0.9), gf.optim.Adam(0.05)],
                         ids=["SGD", "Adam"])  # fmt: skip
def test_strategies_give_what_one_device_gives(strategy: Any, inner: Any) -> None:
    optimizer = Emso(inner, 3, 0.5)
    have, want = mlp(strategy, optimizer=optimizer), mlp(optimizer=optimizer)
    assert difference(have.train(), want.train()) < 1e-12


def test_replicas_that_talk_seldom_take_their_own_inner_steps() -> None:
    """After each window of one turn, the mean of two replicas on their halves of the batch."""
    squares, want = Squares(32, 3), np.zeros(3)
    x, y = gf.placeholder("float64", ("batch", 3)), gf.placeholder("float64", ("batch",))
    w = gf.variable(np.zeros(3), name="w")
    strategy = gf.parallel.LocalSGD(2, period=1)
    loss = gf.mean((x @ w - y) ** 2.0) / 2.0
    step = Emso(SGD(0.1), 3, 0.5).minimize(loss, strategy=strategy)
    with gf.Session() as s:
        for i in range(0, 32, 8):
            s.run(step, {x: squares.x[i : i + 8], y: squares.y[i : i + 8]})
            ends = []
            for part in (slice(i, i + 4), slice(i + 4, i + 8)):
                a, b, end = squares.x[part], squares.y[part], want
                for _ in range(3):
                    end = end - 0.1 * (a.T @ (a @ end - b) / 4 + 0.5 * (end - want))
                ends.append(end)
            want = (ends[0] + ends[1]) / 2
        np.testing.assert_allclose(s.get(w), want, rtol=1e-12)


def test_an_exchange_that_keeps_what_it_did_not_send_takes_one_inner_step() -> None:
    squares, top = Squares(32, 3), gf.parallel.TopK(0.3)
    strategy = Data(2, compress=top)
    with pytest.raises(ArgumentError, match=r"test_emso.*inner_steps must be 1 where an exchange"):
        squares.train(Emso(SGD(0.1), 2, 0.5), 8, strategy)
    have = squares.train(Emso(SGD(0.1), 1, 0.5), 8, strategy)
    np.testing.assert_array_equal(have, squares.train(SGD(0.1), 8, strategy))


def test_a_table_in_pieces_is_trained_as_a_whole_one() -> None:
    def run_training(strategy: Any) -> Array:
        random = np.random.default_rng(0)
        table, i = (
            gf.variable(random.normal(size=(20, 3)), name="table"),
            gf.placeholder("int64", (6,)),
        )
        loss = gf.sum(gf.square(gf.nn.embedding(i, table) - 0.5))
        step = Emso(gf.optim.RowwiseAdagrad(0.1), 3, 0.5).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            for _ in range(3):
                s.run(step, {i: random.integers(0, 20, 6)})
            return s.get(table)

    for shards in (2, 3):
        have = run_training(Shard({"m": shards}, {"table": ("m",)}))
        np.testing.assert_allclose(have, run_training(None), rtol=1e-12, atol=1e-12)


def test_one_pass_leaves_less_of_the_suboptimality_than_gradient_descent() -> None:
    """20,000 rows of 50 features whose scales span 1.5 decades; the best of a few rates each."""
    squares = Squares(20_000, 50, noise=2.0, fall=-1.5)
    best = squares.loss(squares.best)

    def rest(optimizer: Any, batch: int) -> float:
        return squares.loss(squares.train(optimizer, batch)) / best - 1

    for batch, rates, pairs, share in (
        (20, (0.1, 0.2, 0.5), ((0.1, 3.0), (0.2, 3.0)), 0.9),
        (200, (0.5, 1.0, 1.5), ((0.5, 0.3), (1.0, 0.3)), 0.6),
        (2000, (0.5, 1.0, 1.5), ((0.5, 0.0), (1.0, 0.0)), 0.3),
    ):
        plain = min(rest(SGD(rate), batch) for rate in rates)
        inner = min(rest(Emso(SGD(rate), 10, gamma), batch) for rate, gamma in pairs)
        assert inner < share * plain, (batch, inner, plain)


@pytest.mark.parametrize("wrong, told", [
    (lambda: Emso(0.1, 2, 1.0), "inner must be"),
    (lambda: Emso(Emso(SGD(0.1), 2, 1.0), 2, 1.0), "inner must be another optimiser"),
    (lambda: Emso(SGD(0.1), 0, 1.0), "an int from 1, not 0"),
    (lambda: Emso(SGD(0.1), 2.0, 1.0), "inner_steps must be"),
    (lambda: Emso(SGD(0.1), 2, -1.0), "gamma must be a number from 0, not -1.0"),
    (lambda: Emso(SGD(0.1), 2, gf.placeholder("float32", (2,))), "gamma must be a scalar"),
    (lambda: Emso(SGD(0.1), 2, 1.0, sparse=True), "for the inner optimiser"),
    (
        lambda: Emso(SGD(0.1), 2, 1.0).minimize(
            gf.sum(gf.variable(np.ones(2))), scaling=gf.optim.LossScaling()
        ),
        "scaling must be None",
    ),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_with_the_line(wrong: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=r"Emso at .*test_emso\.py") as refused:
        wrong()
    assert told in str(refused.value)

"""Bags of rows against torch's definition in numpy, their gradients, and sparse updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, OpError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import Graph

Array = np.ndarray[Any, Any]
ROWS, SIZE = 7, 3
MODES = ("sum", "mean", "max")


def _by_hand(
    table: Array, bags: list[list[int]], mode: str, weights: list[list[float]] | None, padding: Any
) -> Array:
    """torch.nn.functional.embedding_bag, bag by bag."""
    out = np.zeros((len(bags), table.shape[1]))
    for b, bag in enumerate(bags):
        kept = [i for i, row in enumerate(bag) if padding is None or row % ROWS != padding]
        rows = [table[bag[i]] * (1.0 if weights is None else weights[b][i]) for i in kept]
        if rows:
            out[b] = {"sum": np.sum, "mean": np.mean, "max": np.max}[mode](rows, 0)
    return out


BAGS = st.lists(st.lists(st.integers(-ROWS, ROWS - 1), max_size=5), max_size=6)


@settings(max_examples=60, deadline=None)
@given(BAGS, st.sampled_from(MODES), st.none() | st.integers(0, ROWS - 1), st.integers(0, 99))
def test_bags_of_any_lengths_and_their_gradients(
    bags: list[list[int]], mode: str, padding: int | None, seed: int
) -> None:
    random = np.random.default_rng(seed)
    table, slopes = random.normal(size=(ROWS, SIZE)), random.normal(size=(len(bags), SIZE))
    weights = [list(random.normal(size=len(bag))) for bag in bags] if mode == "sum" else None
    t, w = gf.placeholder("float64", table.shape), gf.placeholder("float64", (None,))
    ids, offsets = gf.placeholder("int64", (None,)), gf.placeholder("int64", (None,))
    given_weights = {} if weights is None else {"weights": w}
    y = gf.nn.embedding_bag(ids, t, offsets, mode, padding_id=padding, **given_weights)
    wanted = [t] if weights is None else [t, w]
    grads = gf.gradients(gf.sum(y * slopes), wanted)
    flat = np.array([i for bag in bags for i in bag], int)
    feeds = {
        t: table, ids: flat, offsets: np.cumsum([0, *map(len, bags)])[:-1].astype(int),
    }  # fmt: skip
    if weights is not None:
        feeds[w] = np.array([x for bag in weights for x in bag], float)
    value, *have = evaluate([y, *grads], feeds)
    np.testing.assert_allclose(
        value, _by_hand(table, bags, mode, weights, padding), rtol=1e-12, atol=1e-12
    )

    def loss(part: Array, at: int, step: float) -> float:
        moved = part.copy()
        moved.reshape(-1)[at] += step
        changed, factors = (moved, weights) if part is table else (table, None)
        if part is not table:
            cuts = np.cumsum([len(bag) for bag in bags])[:-1]
            factors = [list(x) for x in np.split(moved, cuts)] if bags else []
        return float(np.sum(slopes * _by_hand(changed, bags, mode, factors, padding)))

    # every mode is piecewise linear, so that differences are exact up to rounding
    for slope, tensor in zip(have, wanted, strict=True):
        part = table if tensor is t else feeds[tensor]
        near = [(loss(part, i, 1e-4) - loss(part, i, -1e-4)) / 2e-4 for i in range(part.size)]
        np.testing.assert_allclose(slope.reshape(-1), near, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("length", [4, None])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", [None, 2])
def test_a_matrix_of_ids_is_a_bag_a_row(mode: str, padding: int | None, length: Any) -> None:
    random = np.random.default_rng(0)
    table = random.normal(size=(ROWS, SIZE))
    ids = gf.placeholder("int64", (None, length))
    t = gf.placeholder("float64", (ROWS, SIZE))
    y = gf.nn.embedding_bag(ids, t, mode=mode, padding_id=padding)
    flat = gf.nn.embedding_bag(
        gf.reshape(ids, (ids.size,)), t, gf.arange(ids.shape[0]) * ids.shape[1], mode,
        padding_id=padding,
    )  # fmt: skip
    slopes = random.normal(size=(3, SIZE))
    both = [y, flat, *(gf.gradients(gf.sum(v * slopes), [t])[0] for v in (y, flat))]
    feed = np.array([[0, 2, -5, 6], [2, 2, 2, -5], [1, 1, 3, 2]])
    for count in (4,) if length else (4, 1, 0):
        value, other, slope, other_slope = evaluate(both, {ids: feed[:, :count], t: table})
        bags = [list(row) for row in feed[:, :count]]
        want = _by_hand(table, bags, mode, None, padding)
        np.testing.assert_allclose(value, want, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(other, want, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(slope, other_slope, rtol=1e-12, atol=1e-12)


def test_weights_of_a_padded_matrix_scale_rows_and_have_gradients() -> None:
    table = np.arange(12.0).reshape(4, 3)
    weights = gf.placeholder("float64", (2, 3))
    y = gf.nn.embedding_bag(
        [[1, 2, 0], [3, 0, 0]], table, mode="sum", weights=weights, padding_id=0
    )
    (slope,) = gf.gradients(gf.sum(y), [weights])
    value, slope = evaluate([y, slope], {weights: np.array([[0.5, 2.0, 9.0], [1.0, 9.0, 9.0]])})
    np.testing.assert_array_equal(value, [table[1] * 0.5 + table[2] * 2, table[3]])
    np.testing.assert_array_equal(slope, [[12, 21, 0], [30, 0, 0]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", [
    gf.optim.SGD(0.1), gf.optim.Adagrad(0.1), gf.optim.RowwiseAdagrad(0.1),
    gf.optim.Adam(0.1, sparse=True),
], ids=lambda o: type(o).__name__)  # fmt: skip
def test_steps_touch_the_rows_that_occur_and_no_others(optimizer: Any, mode: str) -> None:
    bag = gf.nn.EmbeddingBag(1000, 8, mode, padding_id=3)
    ids, offsets = gf.placeholder("int64", (6,)), gf.placeholder("int64", (3,))
    step = optimizer.minimize(gf.sum(gf.square(bag(ids, offsets) - 0.3)))
    made = [n for n in Graph(step).nodes if n.op.name not in ("variable", "assign", "update_rows")]
    assert max(spec.size for node in made for spec in node.specs) == 6 * 8
    with gf.Session() as s:
        before = s.get(bag.weight)
        for _ in range(3):
            s.run(step, {ids: [5, 999, 5, 3, 7, 5], offsets: [0, 2, 2]})
        changed = np.flatnonzero((s.get(bag.weight) != before).any(1))
    assert changed.tolist() == [5, 7, 999]


Data, Shard = gf.parallel.Data, gf.parallel.Shard


@pytest.mark.parametrize("strategy", [
    Data(2, batch=["ids"]), Shard({"m": 3}, {"bag/weight": ("m",)}),
    Shard({"m": 2}, {"bag/weight": (None, "m")}),
], ids=["replicas", "rows", "columns"])  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_a_table_in_pieces_trains_as_on_one_device(mode: str, strategy: Any) -> None:
    def run_training(strategy: Any, offsets: bool) -> Array:
        random = np.random.default_rng(0)
        bag = gf.nn.EmbeddingBag(20, 4, mode, padding_id=1, dtype="float64", name="bag")
        value = random.normal(size=(20, 4))
        ids = gf.placeholder("int64", (None,) if offsets else (None, 3), name="ids")
        begins = gf.placeholder("int64", (None,))
        pooled = bag(ids, begins) if offsets else bag(ids)
        loss = gf.sum(gf.square(pooled - 0.3))
        step = gf.optim.RowwiseAdagrad(0.1).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            s.set(bag.weight, value)
            for _ in range(3):
                rows = random.integers(-20, 20, 12)
                feeds = {ids: rows, begins: [0, 5, 5, 7]} if offsets else {ids: rows.reshape(4, 3)}
                s.run(step, feeds)
            return s.get(bag.weight)

    for offsets in (True, False):
        np.testing.assert_allclose(
            run_training(strategy, offsets), run_training(None, offsets), rtol=1e-12, atol=1e-12
        )


IDS, T = gf.placeholder("int64", (None,)), gf.placeholder("float32", (ROWS, SIZE))
V, W = gf.placeholder("float32", (3,)), gf.placeholder("float32", (1, 2))


@pytest.mark.parametrize("error, told, wrong", [
    (DTypeError, "int", lambda: gf.nn.embedding_bag(gf.placeholder("float32", (2, 2)), T)),
    (DTypeError, "int", lambda: gf.nn.embedding_bag(IDS, T, gf.placeholder("float32", (2,)))),
    (DTypeError, "float", lambda: gf.nn.embedding_bag(IDS, IDS, IDS)),
    (ShapeError, "give offsets=", lambda: gf.nn.embedding_bag(IDS, T)),
    (ShapeError, "one axis", lambda: gf.nn.embedding_bag([[1]], T, [0])),
    (ShapeError, "(rows, size)", lambda: gf.nn.embedding_bag(IDS, V, IDS)),
    (ShapeError, "no row", lambda: gf.nn.embedding_bag([[1]], T, padding_id=ROWS)),
    (ShapeError, "a weight for each", lambda: gf.nn.embedding_bag([[1]], T, None, "sum", W)),
    (ArgumentError, "sum, mean, max", lambda: gf.nn.embedding_bag([[1]], T, mode="min")),
    (ArgumentError, 'mode "sum"', lambda: gf.nn.embedding_bag([[1]], T, weights=[[1.0]])),
    (ArgumentError, "sum, mean, max", lambda: gf.nn.EmbeddingBag(3, 4, "min")),
    (ArgumentError, "above 0", lambda: gf.nn.EmbeddingBag(0, 4)),
])  # fmt: skip
def test_bags_that_make_no_sense_are_refused_with_the_line(
    error: type[Exception], told: str, wrong: Any
) -> None:
    with pytest.raises(error, match=r"test_embedding_bag\.py") as refused:
        wrong()
    assert told in str(refused.value)


@pytest.mark.parametrize("begins", [[1, 2], [0, 2, 1], [0, 4], []])
def test_offsets_that_do_not_ascend_are_refused_and_the_session_goes_on(begins: list[int]) -> None:
    offsets = gf.placeholder("int64", (None,))
    y = gf.nn.embedding_bag(IDS, T, offsets)
    table = np.ones((ROWS, SIZE), "float32")
    with gf.Session() as s:
        with pytest.raises(OpError, match=r"test_embedding_bag.*offsets must ascend"):
            s.run(y, {IDS: [0, 1, 2], T: table, offsets: np.array(begins, int)})
        with pytest.raises(OpError, match=r"7"):
            s.run(y, {IDS: [0, 7, 2], T: table, offsets: [0]})
        assert s.run(y, {IDS: [0, 1, 2], T: table, offsets: [0, 3]}).tolist() == [[1] * 3, [0] * 3]

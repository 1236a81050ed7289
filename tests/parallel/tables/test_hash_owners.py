"""Hash tables whose parts several places own: as one device, whatever ids come and wherever."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import OpError
from graphflow.ops.tables.hash_index import part_of
from graphflow.parallel.mesh.row_ranges import ring_ranges

Data, Shard = gf.parallel.Data, gf.parallel.Shard
Array = np.ndarray[Any, Any]
DIM, PARTS = 3, 6
SLOW = pytest.mark.slow
OPTIMISERS = {
    "sgd": gf.optim.SGD(0.1),
    "rowwise": gf.optim.RowwiseAdagrad(0.1, initial=0.5),
    "adam": gf.optim.AdamW(0.1),
}
WIDE = [0, 1, 2, 3, -1, -2, 7, 2**62, -(2**63), 2**63 - 1, 1 << 40, -(1 << 32)]


class Training:
    """A hash table and a dense layer, on ids of which each bag has two."""

    def __init__(
        self, strategy: Any = None, optimiser: Any = OPTIMISERS["adam"], capacity: int = 48,
        dtype: str = "float64", **options: Any,
    ) -> None:  # fmt: skip
        options = {"parts": PARTS, **options}
        with gf.random.seed(3):
            initial = gf.init.normal((DIM,), 0.0, 1.0)
            self.table = gf.nn.HashTable(
                DIM, capacity, initial=initial, dtype=dtype, name="table", **options
            )
        self.ids = gf.placeholder("int64", ("batch", 2), name="ids")
        self.weights = gf.placeholder(dtype, ("batch",), name="weights")
        self.dense = gf.variable(np.ones(DIM, dtype), name="dense")
        with gf.nn.training() as updates:
            self.values = self.table(self.ids)
        scores = gf.sum(self.values, axis=1) @ self.dense
        loss = gf.mean(gf.tanh(scores) * self.weights)
        self.fetches = [loss, optimiser.minimize(loss, strategy=strategy), *updates]
        self.read = self.table(self.ids)

    def feeds(self, ids: Any) -> dict[gf.Tensor, Any]:
        array = np.array(ids, np.int64).reshape(-1, 2)
        return {self.ids: array, self.weights: np.cos(np.arange(len(array)))}

    def step(self, session: gf.Session, ids: Any) -> tuple[Array, Array]:
        """Return the values that a step reads, and its loss."""
        values, loss, *_ = session.run([self.values, *self.fetches], self.feeds(ids))
        return values, loss

    def state(self, session: gf.Session) -> list[Array]:
        """Return the index, and owners, rows and slots of ids that have a row."""
        layout, values = self.table.layout, session._state.values()
        arrays = [np.array(values[name]) for name in sorted(values)]
        rows = layout.parts * (layout.rows + 1)
        return [
            a.reshape(layout.parts, -1, *a.shape[1:])[:, :-1] if a.shape[:1] == (rows,) else a
            for a in arrays
        ]


def batches(seed: int, steps: int, spread: int = 40) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.integers(-spread, spread, (8, 2)) * 2**40 - 1 for _ in range(steps)]


def assert_equal(have: Sequence[Array], want: Sequence[Array]) -> None:
    """Assert that ints are equal, and floats but for the order of sums."""
    assert len(have) == len(want)
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)
        assert a.dtype.kind != "i" or np.array_equal(a, b)


STRATEGIES = {
    "1 owner": lambda: Data(1, tables=["table/weight"]),
    "2 owners": lambda: Data(2, tables=["table/*"]),
    "3 owners": lambda: Data(3, tables=["table/weight"]),
    "one batch": lambda: Shard({"m": 3}, {"table/weight": ("m",)}),
    "copies of owners": lambda: Shard({"d": 2, "m": 2}, {"table/weight": ("m",)}, batch="d"),
    "micro-batches": lambda: Data(2, tables=["table/weight"], accumulate=2),
    "shares": lambda: Data(2, tables=["table/weight"], shard_state=True),
    "product": lambda: Data(2) * Shard({"m": 3}, {"table/weight": ("m",)}),
}  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("how, name", [
    *(
        pytest.param(how, "adam", marks=[SLOW] * (how in ("1 owner", "shares", "2 owners")))
        for how in STRATEGIES
    ),
    pytest.param("2 owners", "sgd", marks=SLOW), ("3 owners", "rowwise"),
])  # fmt: skip
def test_owners_of_parts_train_as_one_device(how: str, name: str) -> None:
    """More ids than rows: parts evict, and they evict the same."""
    one = Training(None, OPTIMISERS[name])
    owned = Training(STRATEGIES[how](), OPTIMISERS[name])
    with gf.Session() as s, gf.Session() as t:
        for ids in batches(0, 6):
            assert_equal(owned.step(t, ids), one.step(s, ids))
        assert_equal(owned.state(t), one.state(s))
        counts = [s.run([m.table.stored, m.table.evicted]) for s, m in ((s, one), (t, owned))]
        assert counts[0] == counts[1]
        assert counts[0][1] > 0
        (ids,) = batches(1, 1)
        assert_equal([t.run(owned.read, {owned.ids: ids})], [s.run(one.read, {one.ids: ids})])


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(WIDE), min_size=6, max_size=12), min_size=1, max_size=6),
    st.integers(6, 18), st.integers(1, 3), st.sampled_from(["lru", "ttl:1", "ttl:3", None]),
    st.integers(1, 3),
)  # fmt: skip
def test_any_ids_are_admitted_evicted_and_read_as_on_one_device(
    every: list[list[int]], capacity: int, admit: int, evict: str | None, owners: int
) -> None:
    """Also where a part is full, which both refuse, and neither changes anything."""
    options: Any = {"capacity": capacity, "admit": admit, "evict": evict}
    one = Training(None, OPTIMISERS["rowwise"], **options)
    strategy = Data(owners, tables=["table/weight"])
    owned = Training(strategy, OPTIMISERS["rowwise"], **options)
    with gf.Session() as s, gf.Session() as t:
        for ids in every:
            ids = ids[: len(ids) // 2 * 2]
            try:
                want = one.step(s, ids)
            except OpError as error:
                with pytest.raises(OpError, match="one of 6 parts of the table has") as refused:
                    owned.step(t, ids)
                assert type(refused.value) is type(error)
                continue
            assert_equal(owned.step(t, ids), want)
        assert_equal(owned.state(t), one.state(s))


def test_only_distinct_ids_and_rows_travel() -> None:
    """12 bytes for each id that another worker owns, its row once, and its gradient."""
    owned = Training(Data(2, tables=["table/weight"]), capacity=600, dtype="float32")
    report = owned.fetches[1].node.attrs["strategy"].report(
        owned.fetches, gf.Cluster.local(2)
    )  # fmt: skip
    assert {move.kind for move in report.collectives if "dense" not in move.tensor} >= {
        "keys", "rows", "gradients",
    }  # fmt: skip
    ids = np.tile(np.arange(16) % 10, (1, 2)).reshape(-1, 2)
    with gf.Session(gf.Cluster.local(2)) as s:
        owned.step(s, ids)
        with s.trace() as trace:
            owned.step(s, ids)
        pieces = s._deployment.state.shards[owned.table.weight.node]
        ranges = pieces.ranges
        assert ranges == ring_ranges("table/weight", 606, 2, 101)
        assert [node.specs[0].shape for node in pieces.nodes] == [(303, DIM), (303, DIM)]
    asked = sum(
        len({i for i in half.ravel() if ranges.owners[part_of(np.array([i]), PARTS)[0]] != place})
        for place, half in enumerate((ids[:8], ids[8:]))
    )
    moved = sum(e.bytes for e in trace.edges if "used_rows" in e.tensor)
    assert asked > 0
    assert moved == asked * (12 + 2 * DIM * 4)


@SLOW
def test_a_report_expects_the_bytes_of_ids_that_are_equally_likely() -> None:
    strategy = Data(2, tables=["table/weight"])
    owned = Training(strategy, capacity=600, dtype="float32")
    cluster = gf.Cluster.local(2)
    fed = {owned.ids: (500, 2), owned.weights: (500,)}
    plan = gf.plan(owned.fetches, cluster, shapes=fed)
    expected = sum(t.bytes for t in plan.transfers if "used_rows" in t.tensor)
    ids = np.random.default_rng(0).integers(0, 600, (2, 500, 2)) * 2**33
    with gf.Session(cluster) as s:
        owned.step(s, ids[0])
        with s.trace() as trace:
            owned.step(s, ids[1])
    moved = sum(e.bytes for e in trace.edges if "used_rows" in e.tensor)
    assert moved == pytest.approx(expected, rel=0.1)


def run_training(
    folder: Path, owners: Sequence[int | None], steps: int, dying: int | None = None
) -> list[Any]:
    """Return what steps read, and the last state; other owners go on after each step but one.

    Args:
        owners: how many owners there are by turns; None: one device without a strategy.
        dying: before this step, a worker is killed.
    """
    found: list[Any] = []
    every = batches(2, steps)
    for turn, count in enumerate(owners):
        strategy = None if count is None else Data(count, tables=["table/weight"])
        model = Training(strategy, OPTIMISERS["rowwise"], admit=2)
        cluster = gf.Cluster.local(count, threads=1) if dying is not None and count else None
        share = every[turn :: len(owners)] if len(owners) > 1 else every
        options: Any = {} if dying is None else {"checkpoint": folder, "every": 3}
        with gf.Session(cluster, **options) as s:
            if turn:
                s.load(folder)
            for number, ids in enumerate(share):
                if dying == number:
                    os.kill(s._life.hosts.pids[1], signal.SIGKILL)
                found += model.step(s, ids)
            if dying is None:
                s.save(folder)
            found += model.state(s) if turn == len(owners) - 1 else []
    return found


@pytest.mark.parametrize("first", [2, pytest.param(3, marks=SLOW)])
def test_training_goes_on_with_other_owners_from_a_checkpoint_at_every_step(
    first: int, tmp_path: Path
) -> None:
    """Rows, slots, ids, their counts and last use move with their parts; bits are one device's."""
    owners = [first, None, 1, 3, 2, 6]
    have = run_training(tmp_path / "moved", owners, 6)
    want = run_training(tmp_path / "one", [None] * 6, 6)
    assert_equal(have, want)


def test_a_worker_that_dies_costs_no_bit(tmp_path: Path) -> None:
    want = run_training(tmp_path / "whole", [2], 6, dying=99)
    have = run_training(tmp_path / "killed", [2], 6, dying=4)
    assert all(np.array_equal(a, b) for a, b in zip(have, want, strict=True))


@SLOW  # two sessions of two workers
def test_parts_move_to_the_owner_that_is_asked_for_fewer(tmp_path: Path) -> None:
    """Nothing but the place of the parts changes, and a second call moves nothing."""
    cluster = gf.Cluster.local(2, threads=1)
    strategy = Data(2, tables=["table/weight"])
    model = Training(strategy, capacity=9000, parts=60)
    random = np.random.default_rng(0)
    ids = np.arange(-4000, 4000)
    owners = np.array(ring_ranges("table/weight", 9060, 2, 151).owners)
    mine = ids[owners[part_of(ids, 60)] == 0]
    every = [
        np.where(random.random((1500, 2)) < 0.7, random.choice(mine, (1500, 2)),
                 random.choice(ids, (1500, 2)))
        for _ in range(6)
    ]  # fmt: skip
    with gf.Session(cluster) as s, gf.Session(cluster) as t:
        for batch in every[:3]:
            assert_equal(model.step(s, batch), model.step(t, batch))
        before = model.state(s)
        done = s.replan()
        assert done.load_before > 1.3 > 1.1 > done.load_after
        assert done.ranges > 0
        assert all(map(np.array_equal, model.state(s), before))
        assert s.replan().ranges == 0
        for batch in every[3:]:
            values, want = model.step(s, batch), model.step(t, batch)
            assert all(map(np.array_equal, values, want))
        assert all(map(np.array_equal, model.state(s), model.state(t)))


def test_a_table_of_fewer_parts_than_owners_is_summed_over_them() -> None:
    """So is one whose gradients are changed on their way."""
    clipped: Any = {"transform": lambda grads: gf.optim.clip_by_global_norm(grads, 0.1)[0]}
    for options, more in (({"parts": 1}, {}), ({}, clipped)):
        results = []
        for strategy in (None, Data(2, tables=["table/weight"])):
            model = Training(strategy, **options)
            loss = model.fetches[0]
            step = gf.optim.SGD(0.1).minimize(loss, strategy=strategy, **more)
            with gf.Session() as s:
                model.fetches[1] = step
                values = [model.step(s, ids)[0] for ids in batches(0, 4)]
                results.append([*values, s.get(model.table.weight), s.get(model.table.index)])
        assert_equal(*results)


def test_a_full_part_at_an_owner_is_refused_with_numbers_and_the_session_goes_on() -> None:
    model = Training(Data(2, tables=["table/weight"]), capacity=12, evict=None)
    with gf.Session(gf.Cluster.local(2, threads=1)) as s:
        model.step(s, [1, 2, 1, 2])
        before = model.state(s)
        told = r"one of 6 parts of the table has 2 rows; \d+ new ids need one and \d are free.*lru"
        with pytest.raises(OpError, match=told):
            model.step(s, np.arange(40))
        assert all(map(np.array_equal, model.state(s), before))
        model.step(s, [1, 2, 2, 1])


def test_a_table_lies_on_one_worker_without_a_strategy() -> None:
    table, ids = gf.nn.HashTable(4, 9000), gf.placeholder("int64", (3,), name="ids")
    assert table.index.shape[0] == 2
    with gf.device("/worker:1"), gf.nn.training() as updates:
        loss = gf.sum(table(ids))
    with gf.Session(gf.Cluster.local(2, threads=1)) as s:
        s.run([loss, *updates], {ids: [1, 2, 3]})
        assert s.run(table.stored) == 3


def test_more_parts_than_rows_are_refused() -> None:
    with pytest.raises(gf.errors.ArgumentError, match=r"HashTable at .*at most the capacity, 4"):
        gf.nn.HashTable(2, 4, parts=5)

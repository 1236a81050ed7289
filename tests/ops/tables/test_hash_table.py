"""Hash tables against a dict: any ids, admission, eviction, initial values, training, placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import (
    ArgumentError,
    DTypeError,
    MemoryLimitError,
    OpError,
    ShardingError,
    TableFullError,
    VariableError,
)
from graphflow.ir.op import REGISTRY
from graphflow.ops.tables.hash_index import (
    Asked,
    HashLayout,
    find,
    insert_ids,
    part_of,
    view_state,
)
from graphflow.runtime.memory.memory_layout import plan_layout
from tests.runtime.programs import make_partition

Array = np.ndarray[Any, Any]
Data, Shard = gf.parallel.Data, gf.parallel.Shard
DIM, RATE = 3, 0.25
WIDE = [0, 1, 2, 3, -1, -2, 7, 2**62, -(2**63), 2**63 - 1, 1 << 40]


class Model:
    """A hash table of Python dicts, which looks through all of its ids in each step."""

    def __init__(self, capacity: int, admit: int, evict: str | None) -> None:
        self.capacity, self.admit = capacity, admit
        self.lifetime = int(evict[4:]) if evict and evict.startswith("ttl") else None
        self.evicts = evict == "lru"
        self.rows: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.waiting: dict[int, tuple[int, int, int]] = {}  # id -> count, last use, place
        self.values: dict[int, tuple[Array, float]] = {}  # id -> value, Adagrad's sum
        self.evicted = self.step = 0

    def find(self, ids: list[int]) -> tuple[dict[int, int], int]:
        """The row of each id that has one after this step, and how many ids lose theirs."""
        dead = [
            i for i, last in self.used.items()
            if self.lifetime is not None and last < self.step - self.lifetime
        ]  # fmt: skip
        kept = {i: row for i, row in self.rows.items() if i not in dead or i not in ids}
        lost = len(self.rows) - len(kept)
        found = {i: kept[i] for i in ids if i in kept}
        for i in sorted(set(ids) - set(found)):
            count = self.waiting.get(i, (0, 0, 0))[0] + ids.count(i)
            if count < self.admit:
                continue
            taken = set(kept.values()) | set(found.values())
            never = [r for r in range(self.begun, self.capacity) if r not in taken]
            idle = [r for r in range(self.begun) if r not in taken]
            if never or idle:
                found[i] = (never or idle)[0]
                continue
            victims = [
                j for j in kept
                if j not in ids and (self.evicts or (self.lifetime is not None and j in dead))
            ]  # fmt: skip
            if not victims:
                raise MemoryError
            last = min(victims, key=lambda j: (self.used[j], kept[j]))
            found[i] = kept.pop(last)
            lost += 1
        return found, lost

    @property
    def begun(self) -> int:
        """Rows below this one were in use at some time."""
        return self.most

    most = 0

    def insert(self, ids: list[int], found: dict[int, int], lost: int) -> None:
        """Store the ids of a step."""
        gone = {
            i for i, row in self.rows.items() if row in found.values() and found.get(i) != row
        } | {i for i in ids if i in self.rows and i not in found}
        for i in gone:
            del self.rows[i], self.used[i]
            self.values.pop(i, None)
        for i, row in found.items():
            self.rows[i], self.used[i] = row, self.step
            self.waiting.pop(i, None)
            self.most = max(self.most, row + 1)
        self._wait(ids, found)
        self.evicted += lost
        self.step += 1

    def _wait(self, ids: list[int], found: dict[int, int]) -> None:
        """Count the ids without a row; of more than `capacity`, forget those seen first."""
        rest = sorted({i for i in ids if i not in found})
        new = [i for i in rest if i not in self.waiting]
        for i in rest:
            if i in self.waiting:
                count, _, place = self.waiting[i]
                self.waiting[i] = (count + ids.count(i), self.step, place)
        for i in new:
            taken = {place for _, _, place in self.waiting.values()}
            free = [p for p in range(self.capacity) if p not in taken]
            old = [j for j in self.waiting if j not in rest]
            if not free and not old:
                continue
            if free:
                place = min((p for p in free if p >= self.places), default=free[0])
            else:
                last = min(old, key=lambda j: self.waiting[j][1:])
                place = self.waiting.pop(last)[2]
            self.waiting[i] = (ids.count(i), self.step, place)
            self.places = max(self.places, place + 1)

    places = 0


BATCHES = st.lists(st.lists(st.sampled_from(WIDE), max_size=6), min_size=1, max_size=12)
POLICIES = st.sampled_from(["lru", "ttl:1", "ttl:3", None])


@settings(max_examples=300, deadline=None)
@given(BATCHES, st.integers(1, 5), st.integers(1, 3), POLICIES, st.sampled_from([0, 10**6]))
def test_ids_have_the_rows_that_a_dict_gives_them(
    batches: list[list[int]], capacity: int, admit: int, evict: str | None, steps: int
) -> None:
    """From the first step, and after a million without ids."""
    model = Model(capacity, admit, evict)
    layout = HashLayout(capacity, admit, evict == "lru", model.lifetime)
    matrix = np.full(layout.shape, -1)
    model.step, matrix[:, 0] = steps, steps - 1
    for batch in batches:
        ids = np.array(batch, np.int64)
        before = matrix.copy()
        try:
            want, lost = model.find(batch)
        except MemoryError:
            with pytest.raises(TableFullError, match=f"{capacity} rows"):
                find(matrix, Asked(ids), layout, True)
            continue
        found = find(matrix, Asked(ids), layout, True)
        assert np.array_equal(matrix, before)
        have = {i: int(e) for i, e in zip(batch, found.entries, strict=True) if e < capacity}
        assert have == want
        assert found.evicted.tolist() == [lost]
        fresh = {i for i, new in zip(batch, found.fresh, strict=True) if new}
        dead = {
            i for i, last in model.used.items()
            if model.lifetime is not None and last < model.step - model.lifetime
        }  # fmt: skip
        assert fresh == {i for i in batch if i not in model.rows or i in dead}
        model.insert(batch, want, lost)
        insert_ids(matrix, Asked(ids), found.entries, found.evicted, layout)
        state = view_state(matrix, layout)
        live = np.flatnonzero(state.used[0, :capacity] >= 0)
        assert {int(state.keys[0, e]): int(e) for e in live} == model.rows
        assert int(state.header[0, 2]) + 1 == model.evicted
        counted = np.flatnonzero(state.used[0, capacity:] >= 0) + capacity
        assert {int(state.keys[0, e]): int(state.counts[0, e]) for e in counted} == {
            i: count for i, (count, _, _) in model.waiting.items()
        }


@settings(max_examples=100, deadline=None)
@given(BATCHES, st.integers(1, 4), st.integers(1, 3), POLICIES)
def test_parts_are_tables_of_their_own_wherever_they_lie(
    batches: list[list[int]], rows: int, admit: int, evict: str | None
) -> None:
    """A whole table of three parts, an owner of two of them in another order, and three tables."""
    options = (admit, evict == "lru", int(evict[4:]) if evict and evict != "lru" else None)
    layout, single = HashLayout(3 * rows, *options, 3), HashLayout(rows, *options)
    whole, order = np.full(layout.shape, -1), np.array([2, 0])
    places = np.array([1, -1, 0])
    alone = [np.full(single.shape, -1) for _ in range(3)]
    for batch in batches:
        ids = np.array(batch, np.int64)
        keys, counts = np.unique(ids, return_counts=True)
        counts = np.where(places[part_of(keys, 3)] < 0, 0, counts)
        asked = [Asked(ids[part_of(ids, 3) == part]) for part in range(3)]
        try:
            wanted = [find(m, a, single, True) for m, a in zip(alone, asked, strict=True)]
        except TableFullError:
            with pytest.raises(TableFullError):
                find(whole, Asked(ids), layout, True)
            continue
        found = find(whole, Asked(ids), layout, True)
        owned = find(whole[order], Asked(keys, counts, places), layout, True)
        insert_ids(part := whole[order], Asked(keys, counts, places), owned.entries,
                   owned.evicted, layout)  # fmt: skip
        insert_ids(whole, Asked(ids), found.entries, found.evicted, layout)
        assert np.array_equal(part, whole[order])
        assert np.array_equal(owned.evicted, found.evicted[order])
        for number, (matrix, own, want) in enumerate(zip(alone, asked, wanted, strict=True)):
            mine = part_of(ids, 3) == number
            assert np.array_equal(found.rows[mine], number * (rows + 1) + want.rows)
            assert np.array_equal(found.entries[mine], want.entries)
            assert np.array_equal(found.fresh[mine], want.fresh)
            insert_ids(matrix, own, want.entries, want.evicted, single)
            assert np.array_equal(whole[number], matrix[0])


def test_an_index_that_fills_up_is_built_anew_and_finds_all_ids() -> None:
    layout = HashLayout(50)
    matrix = np.full(layout.shape, -1)
    for step in range(200):
        ids = np.arange(step * 7, step * 7 + 40) * 2**32 - 5
        found = find(matrix, Asked(ids), layout, True)
        insert_ids(matrix, Asked(ids), found.entries, found.evicted, layout)
        state = view_state(matrix, layout)
        assert 4 * (state.positions >= 0).sum() <= 3 * layout.positions
        assert int(state.header[0, 1]) + 1 >= (state.positions >= 0).sum()
        again = find(matrix, Asked(ids), layout, False)
        assert np.array_equal(again.entries, found.entries)
        assert not again.fresh.any()


def _table(capacity: int = 4, dtype: str = "float64", **options: Any) -> gf.nn.HashTable:
    with gf.random.seed(3):
        initial = gf.init.normal((DIM,), 0.0, 1.0)
        return gf.nn.HashTable(DIM, capacity, initial=initial, dtype=dtype, name="table", **options)


class Training:
    """A table, and a step whose gradients are given."""

    def __init__(self, optimizer: Any, strategy: Any = None, **options: Any) -> None:
        self.table = _table(**options)
        self.ids = gf.placeholder("int64", (None,), name="ids")
        self.slopes = gf.placeholder("float64", (None, DIM), name="slopes")
        with gf.nn.training() as updates:
            self.values = self.table(self.ids)
        loss = gf.sum(self.values * self.slopes)
        self.step = [optimizer.minimize(loss, strategy=strategy), *updates]
        self.read = self.table(self.ids)

    def run(self, session: gf.Session, ids: list[int], slopes: Array) -> Array:
        feeds = {self.ids: np.array(ids, np.int64), self.slopes: slopes}
        return session.run([self.values, *self.step], feeds)[0]


@settings(max_examples=40, deadline=None)
@given(BATCHES, st.integers(2, 5), st.integers(1, 3), POLICIES, st.integers(0, 9))
def test_rows_are_trained_from_their_initial_values_with_new_slots(
    batches: list[list[int]], capacity: int, admit: int, evict: str | None, seed: int
) -> None:
    """Values, and row-wise Adagrad by hand, of a dict that forgets what is evicted."""
    optimizer = gf.optim.RowwiseAdagrad(RATE, initial=0.5, epsilon=0.0)
    training = Training(optimizer, capacity=capacity, admit=admit, evict=evict)
    random, model = np.random.default_rng(seed), Model(capacity, admit, evict)
    with gf.Session() as s:
        first = dict(zip(WIDE, s.run(training.read, {training.ids: WIDE}), strict=True))
        for batch in batches:
            slopes = random.normal(size=(len(batch), DIM))
            try:
                want, lost = model.find(batch)
            except MemoryError:
                with pytest.raises(MemoryLimitError, match=r"made at .*test_hash_table"):
                    training.run(s, batch, slopes)
                continue
            dead = set(model.rows) - set(want) | {
                i for i, last in model.used.items()
                if model.lifetime is not None and last < model.step - model.lifetime
            }  # fmt: skip
            have = training.run(s, batch, slopes)
            held = {i: v for i, v in model.values.items() if i not in dead}
            model.insert(batch, want, lost)
            for i, value in zip(batch, have, strict=True):
                np.testing.assert_array_equal(value, held[i][0] if i in held else first[i])
            for i in want:
                value, total = held.get(i, (first[i], 0.5))
                slope = slopes[[j == i for j in batch]].sum(0)
                total = total + np.mean(slope**2)
                model.values[i] = (value - RATE * slope / np.sqrt(total), total)
            known = np.array(list(want), np.int64)
            read = s.run(training.read, {training.ids: known})
            for i, value in zip(want, read, strict=True):
                np.testing.assert_allclose(value, model.values[i][0], rtol=1e-12, atol=1e-12)
                model.values[i] = (value, model.values[i][1])
        counts = s.run([training.table.evicted, training.table.stored])
        assert list(map(int, counts)) == [model.evicted, len(model.rows)]


OPTIMIZERS = [
    gf.optim.SGD(0.1, momentum=0.9), gf.optim.Adam(0.1), gf.optim.AdamW(0.1), gf.optim.RMSProp(0.1),
    gf.optim.Adagrad(0.1, initial=0.1), gf.optim.RowwiseAdagrad(0.1),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_a_table_with_room_trains_as_an_embedding_of_its_ids(optimizer: Any) -> None:
    """The same rows under other numbers; `sparse`, as hash tables are always updated."""
    names = np.array([5, -7, 10**15, 3])
    training = Training(optimizer)
    dense = gf.variable(np.zeros((4, DIM)), name="dense")
    ids, slopes = gf.placeholder("int64", (None,)), gf.placeholder("float64", (None, DIM))
    values = gf.nn.embedding(ids, dense)
    plain = type(optimizer)(**{**vars(optimizer), "sparse": True})
    step = plain.minimize(gf.sum(values * slopes))
    random = np.random.default_rng(0)
    with gf.Session() as s, gf.Session() as d:
        d.set(dense, s.run(training.read, {training.ids: names}))
        for _ in range(6):
            rows, slope = random.integers(0, 4, 5), random.normal(size=(5, DIM))
            have = training.run(s, names[rows], slope)
            want, _ = d.run([values, step], {ids: rows, slopes: slope})
            np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("options", [
    {"transform": lambda grads: gf.optim.clip_by_global_norm(grads, 0.5)[0]},
    {"scaling": gf.optim.LossScaling(4.0)},
], ids=["clipped", "scaled"])  # fmt: skip
def test_gradients_may_be_changed_on_their_way(options: Any) -> None:
    def run_training(given: Any, by: float) -> Array:
        table, ids = _table(), gf.placeholder("int64", (None,))
        with gf.nn.training() as updates:
            loss = gf.sum(gf.square(table(ids))) * by
        step = gf.optim.Adagrad(0.1).minimize(loss, **given)
        with gf.Session() as s:
            for batch in ([1, 2, 1], [2, 3], [4, 5], [1, 5]):
                s.run([step, *updates], {ids: batch})
            return s.get(table.weight)[:4]

    if "scaling" in options:
        np.testing.assert_allclose(run_training(options, 1.0), run_training({}, 1.0), rtol=1e-12)
    else:
        near, far = run_training(options, 1.0), run_training(options, 100.0)
        np.testing.assert_allclose(near, far, rtol=1e-12)  # both have the norm 0.5


def test_a_step_that_is_not_finite_leaves_new_rows_to_their_next_one() -> None:
    table, ids = _table(2), gf.placeholder("int64", (None,))
    scale = gf.placeholder("float64", ())
    with gf.nn.training() as updates:
        loss = gf.sum(gf.square(table(ids))) * scale
    step = gf.optim.SGD(0.25).minimize(loss, scaling=gf.optim.LossScaling())
    read = table(ids)
    with gf.Session() as s:
        first = s.run(read, {ids: [1, 2, 3]})
        s.run([step, *updates], {ids: [1, 2], scale: 1.0})
        s.run([step, *updates], {ids: [3], scale: np.inf})
        np.testing.assert_array_equal(s.run(read, {ids: [3]}), first[2:])
        np.testing.assert_allclose(s.run(read, {ids: [2]}), first[1:2] / 2)
        s.run(updates, {ids: [1]})  # stored without training
        np.testing.assert_array_equal(s.run(read, {ids: [1]}), first[:1])
        s.run([step, *updates], {ids: [1], scale: 1.0})
        np.testing.assert_allclose(s.run(read, {ids: [1]}), first[:1] / 2)


def test_steps_touch_the_rows_that_they_looked_up_and_no_others() -> None:
    training = Training(gf.optim.Adam(0.1), capacity=2000)
    found = [
        n for n in gf.Graph(training.step).nodes
        if n.op.name not in ("variable", "assign", "update_rows", "hash_insert", "group")
    ]  # fmt: skip
    assert all(s.size == 1 or not isinstance(s.size, int) for n in found for s in n.specs)


def test_a_step_on_a_large_table_takes_memory_for_the_ids_that_occur() -> None:
    table, ids = gf.nn.HashTable(64, 1_000_000), gf.placeholder("int64", (256,))
    with gf.nn.training() as updates:
        loss = gf.sum(gf.square(table(ids) - 1.0))
    for optimizer in (gf.optim.SGD(0.1), gf.optim.Adam(0.1)):
        step = REGISTRY["group"](optimizer.minimize(loss), *updates)
        layout = plan_layout(make_partition(step), {})
        assert layout.arena.nbytes < 40 * 256 * 64 * 4  # the index alone has 40 MB
        assert {node.op.name for node in layout.deferred} >= {"update_rows", "hash_insert"}


@pytest.mark.parametrize("strategy", [
    Data(2), Data(3, shard_state=True),
    *(Shard({"m": n}, {"table/weight": ("m",)}) for n in (1, 2, 3)),
    Shard({"m": 2}, {"table/weight": (None, "m")}),
], ids=["replicas", "shares", "1 shard", "2 shards", "3 shards", "columns"])  # fmt: skip
def test_placement_and_the_order_of_ids_change_nothing(strategy: Any) -> None:
    def run_training(strategy: Any, backwards: bool) -> tuple[Array, Array]:
        training = Training(gf.optim.Adam(0.1), strategy, capacity=5)
        random, values = np.random.default_rng(0), []
        with gf.Session() as s:
            for _ in range(6):
                ids, slopes = random.integers(-4, 5, 6), random.normal(size=(6, DIM))
                turn = slice(None, None, -1 if backwards else 1)
                values.append(training.run(s, ids[turn], slopes[turn])[turn])
            return np.array(values), s.get(training.table.index)

    want = run_training(None, False)
    for have in (
        run_training(strategy, False),
        run_training(None, True),
        run_training(strategy, True),
    ):
        np.testing.assert_allclose(have[0], want[0], rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(have[1], want[1])


def test_a_table_is_a_stage_of_a_pipeline() -> None:
    def run_training(strategy: Any) -> Array:
        with gf.random.seed(0):
            table, head = _table(8), gf.nn.Linear(DIM, 4, dtype="float64", name="head")
        ids = gf.placeholder("int64", ("batch",), name="ids")
        with gf.nn.training() as updates:
            rows = table(ids)
            with gf.name_scope("head"):
                loss = gf.mean(gf.square(gf.tanh(head(rows))))
        step = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            for batch in ([1, 2, 3, 4], [3, 4, 5, 3]):
                s.run([step, *updates], {ids: batch})
            return s.get(table.weight)

    split = gf.parallel.Pipeline([["table"], ["head"]], microbatches=2)
    np.testing.assert_allclose(run_training(split), run_training(None), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", [
    gf.parallel.LocalSGD(2, period=1, batch=["ids", "slopes"]),
    gf.parallel.Gossip(2, "ring", batch=["ids", "slopes"]),
], ids=["local", "gossip"])  # fmt: skip
def test_replicas_that_would_hold_other_ids_are_refused(strategy: Any) -> None:
    training = Training(gf.optim.SGD(0.1), strategy)
    told = r"at .*test_hash_table.*'table/weight' \(made at .*the mean of .* would mix ids.*Data\("
    with gf.Session() as s, pytest.raises(ShardingError, match=told):
        training.run(s, [1, 2, 3, 4], np.ones((4, DIM)))


def test_filters_of_dense_gradients_leave_rows_to_their_own_exchange() -> None:
    def run_training(strategy: Any) -> Array:
        table, ids = _table(), gf.placeholder("int64", (None,))
        w = gf.variable(np.ones(100), name="w")
        with gf.nn.training() as updates:
            loss = gf.mean(gf.square(table(ids))) + gf.sum(w * w)
        step = gf.optim.Adam(0.1).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            for batch in ([1, 2, 1, 5], [2, 3, 7, 7], [4, 5, 4, 1]):
                s.run([step, *updates], {ids: batch})
            return s.get(table.weight)[:4]

    whole = run_training(Data(2, compress=gf.parallel.TopK(0.1)))
    np.testing.assert_allclose(whole, run_training(None), rtol=1e-12, atol=1e-12)


def test_two_workers_keep_the_bits_and_a_checkpoint_goes_on_without_them(tmp_path: Path) -> None:
    strategy = Shard({"m": 2}, {"table/weight": ("m",)})
    batches = [[1, 2, 3], [4, 1, 9], [5, 6], [1, 2, 7]]
    slopes = np.random.default_rng(0).normal(size=(4, 3, DIM))

    def run_training(strategy: Any, clusters: list[Any]) -> list[Array]:
        values = []
        training = Training(gf.optim.Adam(0.1), strategy)
        for half, cluster in enumerate(clusters):
            with gf.Session(cluster) as s:
                if half:
                    s.load(tmp_path / "half")
                part = slice(2 * half, 2 * half + 2) if len(clusters) > 1 else slice(None)
                for ids, slope in zip(batches[part], slopes[part], strict=True):
                    values.append(training.run(s, ids, slope[: len(ids)]))
                s.save(tmp_path / "half")
        return values

    want = run_training(strategy, [None])
    for clusters in ([gf.Cluster.local(2, threads=1)], [gf.Cluster.local(2, threads=1), None]):
        have = run_training(strategy, clusters)
        assert all(np.array_equal(a, b) for a, b in zip(have, want, strict=True))


@pytest.mark.parametrize("after", [None, 3], ids=["whole", "3 shards"])
def test_rows_slots_and_owners_move_from_a_checkpoint_to_other_shards(
    after: int | None, tmp_path: Path
) -> None:
    def run_training(halves: list[int | None]) -> list[Array]:
        random, values = np.random.default_rng(0), []
        for number, shards in enumerate(halves):
            rule = None if shards is None else Shard({"m": shards}, {"table/weight": ("m",)})
            training = Training(gf.optim.RowwiseAdagrad(0.1), rule, capacity=7)
            with gf.Session() as s:
                if number:
                    s.load(tmp_path / "kept")
                for _ in range(4):
                    ids, slopes = random.integers(-5, 6, 5), random.normal(size=(5, DIM))
                    values.append(training.run(s, ids, slopes))
                s.save(tmp_path / "kept")
        return values

    have, want = run_training([2, after]), run_training([None, None])
    np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind, dtype", [
    ("normal", "float32"), ("normal", "float64"), ("uniform", "float32"), ("uniform", "float64"),
    ("uniform", "bfloat16"),
])  # fmt: skip
def test_initial_values_have_their_distribution_and_differ_by_id_and_table(
    kind: str, dtype: str
) -> None:
    make = gf.init.normal if kind == "normal" else gf.init.uniform
    bounds = (1.0, 2.0) if kind == "normal" else (-1.0, 3.0)
    tables = [gf.nn.HashTable(7, 3, initial=make((7,), *bounds), dtype=dtype) for _ in range(2)]
    ids = np.arange(-3000, 3000) * 2**33 + 1
    with gf.Session() as s:
        one, two = (np.asarray(v, "float64") for v in s.run([t(ids) for t in tables]))
    near = 0.05 * (4 if dtype == "bfloat16" else 1)
    assert abs(one.mean() - 1.0) < near
    assert abs(one.std() - (2.0 if kind == "normal" else 4 / np.sqrt(12))) < near
    assert abs(np.corrcoef(one.T) - np.eye(7)).max() < 0.06
    assert abs(np.corrcoef(one[:-1, 0], one[1:, 0])[0, 1]) < 0.06
    assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 0.03
    assert kind == "normal" or (one.min() >= -1.0 and one.max() < 3.0 + (dtype == "bfloat16") / 64)


IDS = gf.placeholder("int64", (None,))


@pytest.mark.parametrize("error, told, wrong", [
    (DTypeError, "int", lambda: _table()(gf.placeholder("float32", (2,)))),
    (DTypeError, "int", lambda: _table()([1.5])),
    (ArgumentError, "above 0", lambda: gf.nn.HashTable(2, 0)),
    (ArgumentError, "above 0", lambda: gf.nn.HashTable(2, 3, admit=0)),
    *(
        (ArgumentError, "ttl:<steps>", lambda e=e: gf.nn.HashTable(2, 3, evict=e))
        for e in ("ttl", "ttl:0", "ttl:-1", "ttl:30d", "fifo")
    ),
    (ArgumentError, "of shape (2,)", lambda: gf.nn.HashTable(2, 3, initial=gf.init.zeros((3,)))),
    (ArgumentError, "must be a Initializer", lambda: gf.nn.HashTable(2, 3, initial=0.5)),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_with_the_line(
    error: type[Exception], told: str, wrong: Any
) -> None:
    with pytest.raises(error, match=r"HashTable at .*test_hash_table\.py") as refused:
        wrong()
    assert told in str(refused.value)


def test_rows_that_are_no_floats_are_refused() -> None:
    with pytest.raises(DTypeError, match=r"test_hash_table.*floats, not int32"):
        gf.nn.HashTable(2, 3, initial=gf.init.zeros((2,)), dtype="int32")


def test_a_second_call_in_a_training_block_is_refused() -> None:
    table = _table()
    with gf.nn.training():
        table(IDS)
        with pytest.raises(ArgumentError, match=r"test_hash_table.*once in a training block"):
            table(IDS)
    table(IDS)


def test_a_table_that_the_loss_does_not_look_up_is_not_trained() -> None:
    table, w = _table(), gf.variable(1.0, name="w")
    with pytest.raises(VariableError, match=r"test_hash_table.*depends on no lookup"):
        gf.optim.SGD(0.1).minimize(w * w, [w, table.weight])


def test_a_full_table_without_eviction_refuses_new_ids_and_the_session_goes_on() -> None:
    training = Training(gf.optim.SGD(0.1), capacity=3, evict=None)
    with gf.Session() as s:
        training.run(s, [1, 2], np.ones((2, DIM)))
        before = s.run(training.read, {training.ids: [1, 2, 3, 4]})
        with pytest.raises(OpError, match=r"has 3 rows; 2 new ids need one and 1 are free.*lru"):
            training.run(s, [3, 4, 1], np.ones((3, DIM)))
        np.testing.assert_array_equal(s.run(training.read, {training.ids: [1, 2, 3, 4]}), before)
        training.run(s, [3, 1], np.ones((2, DIM)))
        assert s.run(training.table.stored) == 3


def test_ids_of_any_shape_and_small_dtypes_are_looked_up() -> None:
    table = _table()
    with gf.Session() as s:
        wide = s.run(table(np.array([[1, -2], [3, 1]])))
        for dtype in ("int8", "int32", "int16"):
            np.testing.assert_array_equal(s.run(table(np.array([[1, -2], [3, 1]], dtype))), wide)
        assert s.run(table(np.zeros((0, 2), int))).shape == (0, 2, DIM)


def test_a_parameter_server_refuses_a_hash_table_with_the_remedy() -> None:
    with pytest.raises(ShardingError, match=r"test_hash_table.*'table/weight'.*parallel\.Data\("):
        Training(gf.optim.SGD(0.1), gf.parallel.ParameterServer(window=2, workers=2))

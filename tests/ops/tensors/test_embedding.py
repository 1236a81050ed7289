"""Embedding, and updates that touch only the rows of a table that were looked up."""

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
from graphflow.ir.op import REGISTRY
from graphflow.placement.cost_model.problem_builder import build_problem
from graphflow.runtime.memory.memory_layout import MemoryLayout, plan_layout
from tests.placement.speeds import profile
from tests.runtime.programs import make_partition

RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((7, 3)).astype("float32")


def _train_table(
    optimizer: Any, ids: Any, *, dense: bool, lookups: int = 1, dtype: str = "float32"
) -> np.ndarray[Any, Any]:
    """A table after three steps; `dense`: its gradient is hidden from the optimiser."""
    table = gf.variable(TABLE.astype(dtype), name="table")
    i = gf.placeholder("int64", (None,))
    out = sum(
        (gf.sum(gf.square(gf.nn.embedding(i * sign, table) + 0.5)) for sign in (1, -1)[:lookups]),
        start=gf.constant(np.zeros((), dtype)),
    )

    def hide_gradients(grads: list[gf.Tensor]) -> list[gf.Tensor]:
        return [gf.positive(g) for g in grads]

    step = optimizer.minimize(out, transform=hide_gradients if dense else None)
    with gf.Session() as session:
        for shift in range(3):
            session.run(step, {i: (np.array(ids, int) + shift) % 7})
        return session.get(table)


def test_embedding_looks_rows_up_by_ids_of_any_shape() -> None:
    ids = np.array([[0, 3], [6, -1]], "int32")
    (value,) = evaluate([gf.nn.embedding(ids, TABLE)])
    np.testing.assert_array_equal(value, TABLE[ids])


def test_a_padded_id_has_no_gradient() -> None:
    table = gf.placeholder("float32", TABLE.shape)
    y = gf.nn.embedding([1, 2, 1, 0], table, padding_id=1)
    (slope,) = gf.gradients(gf.sum(y), [table])
    values = evaluate([y, slope], {table: TABLE})
    np.testing.assert_array_equal(values[0], TABLE[[1, 2, 1, 0]])
    assert values[1][:, 0].tolist() == [1, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", ["int64", "int32", "int8", "uint8"])
@pytest.mark.parametrize("rows", [7, None])
def test_a_padded_id_counted_from_the_end_has_no_gradient(dtype: str, rows: int | None) -> None:
    """ids - n are the same rows, in a table of a known or symbolic size."""
    table, ids = gf.placeholder("float32", (rows, 3)), gf.placeholder(dtype, (3,))
    y = gf.nn.embedding(ids, table, padding_id=6)
    (slope,) = gf.gradients(gf.sum(y), [table])
    from_front = np.array([1, 6, 0], dtype)
    given_ids = [from_front] if dtype == "uint8" else [from_front, from_front - 7]
    for each in given_ids:
        (value,) = evaluate([slope], {table: TABLE, ids: each.astype(dtype)})
        assert value[:, 0].tolist() == [1, 1, 0, 0, 0, 0, 0]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 6), max_size=6),
    st.sampled_from([gf.optim.SGD(0.1), gf.optim.Adagrad(0.1)]),
    st.integers(1, 2),
)
def test_a_step_on_the_rows_gives_the_bits_of_a_step_on_the_table(
    ids: list[int], optimizer: Any, lookups: int
) -> None:
    sparse = _train_table(optimizer, ids, dense=False, lookups=lookups)
    dense = _train_table(optimizer, ids, dense=True, lookups=lookups)
    assert sparse.tobytes() == dense.tobytes()


def test_float16_rows_have_the_bits_of_a_float16_table() -> None:
    values = [
        _train_table(gf.optim.SGD(0.1), [1, 1, 4], dense=dense, dtype="float16")
        for dense in (True, False)
    ]
    assert values[0].tobytes() == values[1].tobytes()


OTHERS = [gf.optim.Adam, gf.optim.AdamW, gf.optim.RMSProp]


@pytest.mark.parametrize("kind", OTHERS, ids=lambda k: k.__name__)
def test_a_lazy_step_leaves_other_rows_and_equals_a_first_dense_step_on_its_own(kind: Any) -> None:
    def run_one_step(optimizer: Any) -> np.ndarray[Any, Any]:
        table = gf.variable(TABLE, name="table")
        loss = gf.sum(gf.square(gf.nn.embedding([2, 5, 2], table)))
        with gf.Session() as session:
            session.run(optimizer.minimize(loss))
            return session.get(table)

    lazy, dense = run_one_step(kind(0.1, sparse=True)), run_one_step(kind(0.1))
    own = [2, 5]
    assert lazy[own].tobytes() == dense[own].tobytes()
    rest = [0, 1, 3, 4, 6]
    assert lazy[rest].tobytes() == TABLE[rest].tobytes()


def test_lazy_momentum_decays_only_where_rows_occur() -> None:
    table = gf.variable(np.zeros((3, 1), "float32"))
    i = gf.placeholder("int64", (1,))
    loss = gf.sum(gf.nn.embedding(i, table))
    step = gf.optim.SGD(1.0, momentum=0.5, sparse=True).minimize(loss)
    with gf.Session() as session:
        for row in (0, 1, 0):
            session.run(step, {i: [row]})
        assert session.get(table)[:, 0].tolist() == [-1 - 1.5, -1, 0]


def _layout(fetch: gf.Tensor) -> MemoryLayout:
    return plan_layout(make_partition(fetch), {})


def test_a_step_on_a_million_rows_takes_memory_for_those_that_occur() -> None:
    table = gf.variable(gf.init.zeros((1_000_000, 64)), name="table")
    ids = gf.placeholder("int64", (256,))
    loss = gf.sum(gf.square(gf.nn.embedding(ids, table) - 1.0))
    rows = 256 * 64 * 4
    for optimizer in (gf.optim.SGD(0.1), gf.optim.Adam(0.1, sparse=True)):
        layout = _layout(optimizer.minimize(loss))
        assert layout.arena.nbytes < 30 * rows  # the table has 3,900 times as many
        assert {node.op.name for node in layout.deferred} >= {"update_rows"}
    assert _layout(gf.optim.Adam(0.1).minimize(loss)).arena.nbytes > 4_000 * 64 * 4


def test_a_plan_counts_no_second_table_for_a_step_on_its_rows() -> None:
    table = gf.variable(gf.init.zeros((1_000_000, 64)), name="table")
    step = gf.optim.SGD(0.1).minimize(gf.sum(gf.nn.embedding(np.arange(256), table)))
    cluster = gf.Cluster.local(workers=1, threads=1)
    made = build_problem(Graph([step]), cluster, {}, profiles={0: profile()})
    assert made.problem.output_memory.max() < 1_000_000
    assert made.problem.memory.max() == 1_000_000 * 64 * 4
    assert made.problem.compute[:, 0].max() < 1e-2  # seconds; to copy the table takes more


def test_a_step_on_a_large_table_allocates_little_and_is_right() -> None:
    import tracemalloc

    table = gf.variable(gf.init.zeros((1_000_000, 64)), name="table")
    ids = gf.placeholder("int64", (None,))
    loss = gf.sum(gf.square(gf.nn.embedding(ids, table) - 1.0))
    step = gf.optim.SGD(0.25).minimize(loss)
    taken = RNG.integers(0, 1_000_000, 200)
    with gf.Session() as session:
        session.run(step, {ids: taken})
        tracemalloc.start()
        session.run(step, {ids: taken})
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        rows = session.run(gf.nn.embedding(ids, table), {ids: taken})
    assert peak < 4_000_000  # bytes; the table has 256,000,000
    single = np.bincount(taken)[taken] == 1
    np.testing.assert_array_equal(rows[single], np.full((single.sum(), 64), 0.75, "float32"))


def test_a_tied_table_is_updated_whole() -> None:
    table = gf.variable(TABLE, name="table")
    h = gf.nn.embedding([1, 2], table)
    loss = gf.sum(gf.square(h @ table.mT))
    (slope,) = gf.gradients(loss, [table])
    step = gf.optim.SGD(0.1).minimize(loss)
    with gf.Session() as session:
        (g,) = session.run([slope])
        session.run(step)
        np.testing.assert_allclose(session.get(table), TABLE - np.float32(0.1) * g, rtol=1e-6)


def test_an_assignment_of_set_rows_writes_into_its_variable() -> None:
    cache = gf.variable(np.zeros((100_000, 4), "int32"), name="cache", trainable=False)
    at = gf.placeholder("int64", (2, 1))
    new = gf.placeholder("int32", (2, 4))
    group = REGISTRY["group"](gf.assign(cache, gf.scatter_nd(cache, at, new)))
    assert _layout(group).arena.nbytes < 1000
    with gf.Session() as session:
        session.run(group, {at: [[3], [99_999]], new: np.arange(8, dtype="int32").reshape(2, 4)})
        value = session.get(cache)
        with pytest.raises(OpError, match=r"index 100000 is outside axis 0 of size 100000"):
            session.run(group, {at: [[3], [100_000]], new: np.ones((2, 4), "int32")})
        assert session.get(cache).tobytes() == value.tobytes()
    assert value[[3, -1]].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and value.sum() == 28


def test_a_cache_takes_a_position_of_every_sequence_in_place() -> None:
    cache = gf.variable(np.zeros((2, 3, 1000, 4), "float16"), name="cache", trainable=False)
    at = gf.placeholder("int64", (2,))
    places = gf.broadcast_to(gf.reshape(at, (2, 1, 1)), (2, 3, 1))
    new = gf.placeholder("float16", (2, 3, 4))
    written = gf.scatter_nd(cache, places[:, :, None], new[:, :, None], batch_dims=2)
    write = REGISTRY["group"](gf.assign(cache, written))
    assert _layout(write).arena.nbytes < 2000
    value = np.arange(24.0).reshape(2, 3, 4).astype("float16")
    with gf.Session() as session:
        session.run(write, {at: [7, 999], new: value})
        have = session.get(cache)
    np.testing.assert_array_equal(have[[0, 1], :, [7, 999]], value)
    assert np.count_nonzero(have) == 23


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.nn.embedding([0.5], TABLE), DTypeError, "int"),
        (lambda: gf.nn.embedding([0], np.arange(3)), DTypeError, "float"),
        (lambda: gf.nn.embedding(TABLE, [0]), DTypeError, r"give embedding\(ids, table\)"),
        (lambda: gf.nn.embedding([0], np.float32(1)), ShapeError, "scalar"),
        (lambda: gf.nn.embedding([0], TABLE, padding_id=7), ShapeError, "padding_id 7 .* of 7"),
        (lambda: gf.nn.embedding([0], TABLE, padding_id=-1), ArgumentError, "from 0"),
        (lambda: gf.optim.SGD(0.1, sparse=1), ArgumentError, "sparse must be True or False"),
    ],
)
def test_mistakes_name_the_line(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_embedding\.py:\d+.*{words}"):
        call()


def test_an_id_outside_the_table_names_it_its_size_and_the_line() -> None:
    table = gf.variable(TABLE, name="table")
    ids = gf.placeholder("int64", (2,))
    step = gf.optim.SGD(0.1).minimize(gf.sum(gf.nn.embedding(ids, table)))
    with gf.Session() as session:
        where = r"test_embedding\.py:\d+.*index 7 is outside axis 0 of size 7"
        with pytest.raises(OpError, match=where):
            session.run(step, {ids: [0, 7]})
        assert session.get(table).tobytes() == TABLE.tobytes()

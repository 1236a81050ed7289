"""Rows lie in ranges on a ring: balanced, and few move when there is another number of owners."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.parallel.mesh.row_ranges import RowRanges, ring_ranges

ROWS = 1_000_000


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_owners_have_about_as_many_rows(count: int) -> None:
    sizes = ring_ranges("table", ROWS, count).sizes
    assert sum(sizes) == ROWS
    assert max(sizes) * count / ROWS < 1.2


def test_a_fifth_owner_takes_its_share_from_all_and_none_move_between_the_others() -> None:
    before, after = (np.array(ring_ranges("table", ROWS, n).owners) for n in (4, 5))
    moved = before != after
    assert 0.12 < moved.mean() < 0.28
    assert {*after[moved].tolist()} == {4}


@pytest.mark.parametrize("name", ["users", "items"])
@pytest.mark.parametrize("rows", [24, 999, ROWS])
def test_even_ranges_fill_memories_alike_and_move_to_new_owners_only(name: str, rows: int) -> None:
    for count in range(1, 9):
        before, after = (ring_ranges(name, rows, n, even=True) for n in (count, count + 1))
        old, new = (np.array(ranges.owners) for ranges in (before, after))
        held = np.bincount(new, minlength=count + 1)
        assert held.max() - held.min() <= 1
        assert {*new[old != new].tolist()} == {count}


def test_ids_sorted_by_frequency_ask_each_owner_for_about_as_many_rows() -> None:
    """One contiguous half would be asked for nearly all of them."""
    chances = 1 / np.arange(1, ROWS + 1) ** 1.05
    ids = np.random.default_rng(0).choice(ROWS, 8192, p=chances / chances.sum())
    ranges = ring_ranges("table", ROWS, 2, even=True)
    owners = np.array(ranges.owners)[np.unique(ids) // ranges.width]
    assert 0.4 < np.mean(owners) < 0.6
    assert np.mean(np.unique(ids) < ROWS // 2) > 0.85


@pytest.mark.parametrize("rows", [3, 7, 50, 5000, 9999])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_row_is_stored_once(rows: int, count: int) -> None:
    ranges = ring_ranges("table", rows, count)
    stored = np.concatenate([ranges.rows_of(i) for i in range(count)])
    np.testing.assert_array_equal(np.sort(stored), np.arange(rows))
    np.testing.assert_array_equal(stored[ranges.positions], np.arange(rows))
    assert min(ranges.sizes) > 0
    for i in range(count):
        assert all(a[1] < b[0] for a, b in pairwise(ranges.bounds_of(i)))


def test_fewer_rows_than_owners_are_refused() -> None:
    with pytest.raises(gf.errors.ShardingError, match="'table' has 2 rows for 3 owners"):
        ring_ranges("table", 2, 3)


def test_the_stored_order_is_by_owner_and_then_by_row() -> None:
    ranges = RowRanges(7, 2, (1, 0, 1, 0), 2)
    assert ranges.sizes == (3, 4)
    assert ranges.bounds_of(0) == ((2, 4), (6, 7))
    assert ranges.positions.tolist() == [3, 4, 0, 1, 5, 6, 2]


@pytest.mark.parametrize("workers", [None, 2])
def test_a_table_on_a_ring_is_read_whole_and_multiplied_like_any_other(workers: Any) -> None:
    """It was trained by rows before, so its rows lie in ranges."""
    values = np.random.default_rng(0).normal(size=(30, 4))
    fed_ids, fed_wanted = np.arange(12) * 5 % 30, np.ones((12, 30))

    def results(strategy: Any, cluster: list[gf.Cluster]) -> list[Any]:
        table = gf.variable(values, name="table")
        ids = gf.placeholder("int64", ("batch",), name="ids")
        wanted = gf.placeholder("float64", ("batch", 30), name="wanted")
        rows = gf.nn.embedding(ids, table)
        sparse = gf.optim.SGD(0.1).minimize(gf.mean(rows**2), strategy=strategy)
        scores = rows @ table.T
        loss = gf.mean((scores - wanted) ** 2)
        tied = gf.optim.Adam(0.1).minimize(loss, strategy=strategy)
        with gf.Session(*cluster) as s:
            s.run(sparse, {ids: fed_ids})
            found = [s.run(table)]
            for _ in range(2):
                found += s.run([scores, loss, tied], {ids: fed_ids, wanted: fed_wanted})[:2]
            return [*found, s.get(table)]

    strategy = gf.parallel.Data(2, tables=["table"])
    have = results(strategy, [gf.Cluster.local(workers)] if workers else [])
    for a, b in zip(have, results(None, []), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)

"""`replan` moves ranges of rows to owners that are asked for fewer: no bit of a row changes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.parallel.mesh.row_ranges import RowRanges, ring_ranges
from graphflow.parallel.tables.range_moves import (
    changed_ranges,
    count_rows,
    find_swaps,
    owner_loads,
)
from tests.parallel.tables.test_row_exchange import OPTIMISERS

ROWS, BATCH = 600, 64


class Skewed:
    """Rows of a table are looked up, nearly all at one owner of those that the ring gives.

    Args:
        share: the share of lookups at the first owner.
    """

    def __init__(self, optimiser: Any, owners: int, share: float = 0.9) -> None:
        random = np.random.default_rng(0)
        self.owners, self.share = owners, share
        self.ids = gf.placeholder("int64", ("batch", 2), name="ids")
        self.table = gf.variable(random.normal(size=(ROWS, 3)).astype("float32"), name="table")
        # Ids that are computed from feeds count, too; and dropout shows that steps keep numbers.
        rows = gf.nn.embedding(self.ids - ROWS, self.table)
        self.loss = gf.mean((gf.nn.dropout(rows, 0.2) - 1) ** 2)
        strategy = gf.parallel.Data(owners, tables=["table"])
        self.train = optimiser.minimize(self.loss, strategy=strategy)

    def feeds(self, step: int) -> dict[gf.Tensor, Any]:
        random = np.random.default_rng(step)
        ranges = ring_ranges("table", ROWS, self.owners, even=True)
        there = random.choice(ranges.rows_of(0), (BATCH, 2))
        others = random.integers(0, ROWS, (BATCH, 2))
        return {self.ids: np.where(random.random((BATCH, 2)) < self.share, there, others)}

    def step(self, s: gf.Session, number: int) -> Any:
        return s.run([self.loss, self.train], self.feeds(number))[0]


@pytest.mark.every(5)
@pytest.mark.parametrize("owners", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["adam", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_moves_change_loads_and_nothing_else(
    name: str, owners: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is that of a large table, which is read by parts."""
    for place in ("execution.variable_store", "runtime.checkpoint.manifest"):
        monkeypatch.setattr(f"graphflow.{place}.PIECED_BYTES", 100)
    monkeypatch.setattr("graphflow.runtime.checkpoint.folder.MAPPED_BYTES", 100)
    cluster = gf.Cluster.local(owners, threads=1)
    model = Skewed(OPTIMISERS[name], owners)
    with gf.Session(cluster) as s, gf.Session(cluster) as t:
        for number in range(4):
            assert model.step(s, number) == model.step(t, number)
        before = s.get(model.table)
        values = {key: np.array(value) for key, value in s._state.values().items()}
        done = s.replan()
        assert done.load_before > 1.3 and done.load_after < 1.1
        assert done.ranges > 10 and f"{done.ranges} ranges of rows" in str(done)
        assert done.range_bytes >= done.ranges * 3 * 4
        np.testing.assert_array_equal(s.get(model.table), before)
        after = s._state.values()
        assert after.keys() == values.keys() and len(after) > 1
        for key, value in values.items():
            np.testing.assert_array_equal(np.asarray(after[key]), value)
        again = s.replan()
        assert again.ranges == again.range_bytes == 0
        for number in range(4, 8):
            assert model.step(s, number) == model.step(t, number)
        np.testing.assert_array_equal(s.get(model.table), t.get(model.table))
        s.save(tmp_path / "moved")
        want = s.get(model.table)
    other = Skewed(OPTIMISERS[name], 2)
    with gf.Session() as s:  # places read their parts of the pieces, wherever ranges lay
        s.load(tmp_path / "moved")
        s.warmup([other.loss, other.train], {other.ids: (BATCH, 2)})
        np.testing.assert_array_equal(s.get(other.table), want)


def test_even_loads_and_one_device_move_nothing() -> None:
    model = Skewed(OPTIMISERS["sgd"], 2, share=0.0)
    with gf.Session(gf.Cluster.local(2, threads=1)) as s:
        for number in range(4):
            model.step(s, number)
        assert s.replan().ranges == 0
    model = Skewed(OPTIMISERS["sgd"], 2)
    with gf.Session() as s:
        for number in range(4):
            model.step(s, number)
        assert s.replan().ranges == 0


@pytest.mark.slow  # processes start, and one is killed
def test_ranges_move_after_a_loss_that_mirrors_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners are parts of the plan then, whichever workers hold them."""
    model = Skewed(OPTIMISERS["adam"], 3)
    with gf.Session(gf.Cluster.local(3, threads=1), replicas=2, trial=False) as s:
        monkeypatch.setattr(s._recovery._takeover._replacements, "begin", lambda lost: None)
        for number in range(3):
            model.step(s, number)
        os.kill(s._life.hosts.pids[1], signal.SIGKILL)
        model.step(s, 3)
        assert s._deployment.has_losses
        before = s.get(model.table)
        done = s.replan()
        assert done.ranges > 10 and done.load_after < done.load_before
        np.testing.assert_array_equal(s.get(model.table), before)
        model.step(s, 4)
        assert s.replan().ranges == 0


def moved_rows(
    model: Skewed, folder: Path, dying: str, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Return losses and the table of some steps; a worker is killed at the move, or after it."""
    with gf.Session(gf.Cluster.local(2, threads=1), checkpoint=folder, every=100) as s:
        send, killed = s._deployment.send_programs, []

        def send_and_kill(compiled: Any) -> None:
            send(compiled)
            if compiled.fetches[0].node.name == dying and not killed:
                killed.append(os.kill(s._life.hosts.pids[1], signal.SIGKILL))

        monkeypatch.setattr(s._deployment, "send_programs", send_and_kill)
        found = [model.step(s, number) for number in range(3)]
        assert s.replan().ranges > 10
        assert len(killed) == (dying == "moved_ranges")
        found.append(model.step(s, 3))
        if dying == "later":
            os.kill(s._life.hosts.pids[0], signal.SIGKILL)
        found += [model.step(s, number) for number in (4, 5)]
        assert s.replan().ranges == 0
        return [*found, s.get(model.table)]


@pytest.mark.slow
@pytest.mark.parametrize("dying", ["moved_ranges", "later"])
def test_a_lost_worker_loses_no_row(
    dying: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that dies when the step that moves rows is about to run."""
    model = Skewed(OPTIMISERS["adam"], 2)
    want = moved_rows(model, tmp_path / "alone", "", monkeypatch)
    have = moved_rows(model, tmp_path / "killed", dying, monkeypatch)
    for a, b in zip(have, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("owners", [2, 4])
def test_ids_by_zipfs_law_are_asked_of_owners_evenly(owners: int) -> None:
    """Also ids of later batches, which no count knew, move nothing again."""
    rows = 1_000_000
    chances = 1 / np.arange(1, rows + 1) ** 1.05
    random = np.random.default_rng(0)
    ids = random.choice(rows, (2, 8, 16384), p=chances / chances.sum())
    before = ring_ranges("table", rows, owners)
    seen, later = (sum(count_rows(each, before) for each in part) for part in ids)
    after = before.swap(find_swaps(before, seen))
    changed = [a != b for a, b in zip(before.owners, after.owners, strict=True)]
    old, new = (
        loads.max() / loads.mean()
        for loads in (owner_loads(ranges, later) for ranges in (before, after))
    )
    assert old > 1.05 and new < 1.02
    assert 0 < sum(changed) < 0.05 * len(changed)
    assert after.sizes == before.sizes
    assert not find_swaps(after, later)


@pytest.mark.parametrize("seed", range(20))
def test_swaps_keep_sizes_and_never_raise_the_load(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, count = int(random.integers(20, 20_000)), int(random.integers(2, 6))
    before = ring_ranges(str(seed), rows, count)
    asked = (random.pareto(1.0, len(before.owners)) * 1000).astype(np.int64)
    after = before.swap(find_swaps(before, asked))
    assert after.sizes == before.sizes
    assert owner_loads(after, asked).max() <= owner_loads(before, asked).max()
    stored = np.concatenate([after.rows_of(i) for i in range(count)])
    np.testing.assert_array_equal(stored[after.positions], np.arange(rows))
    same = set(range(len(before.owners))) - {*changed_ranges(before, after)}
    assert all(before.owners[i] == after.owners[i] for i in same)


def test_a_range_that_is_busier_than_the_mean_stays_where_it_is() -> None:
    ranges = RowRanges(8, 1, (0, 0, 0, 0, 1, 1, 1, 1), 2)
    assert find_swaps(ranges, np.array([10_000, 0, 0, 0, 0, 0, 0, 0])) == []

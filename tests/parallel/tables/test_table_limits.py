"""A table larger than a worker's memory trains on several; a lost worker costs a pause."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from tests.parallel.tables.test_row_exchange import OPTIMISERS, Model

LIMIT = 32 << 20
"""Memory of each worker, in bytes."""


def limit_memory(workers: int) -> gf.Cluster:
    """Return local workers with little memory each."""
    cluster = gf.Cluster.local(workers)
    small = [
        replace(worker, devices=tuple(replace(d, memory=LIMIT) for d in worker.devices))
        for worker in cluster.workers
    ]
    return replace(cluster, workers=tuple(small))


class LargeTable:
    """A table of nearly twice a worker's memory, and a step of training.

    Args:
        parts: the number of workers that divide it.
        ratio: the size of the table over a worker's memory.
    """

    def __init__(
        self, parts: int, ratio: float = 1.8, optimizer: Any = gf.optim.RowwiseAdagrad
    ) -> None:
        rows = int(ratio * LIMIT) // 256
        self.table = gf.variable(gf.init.uniform((rows, 64)), name="table")
        self.ids = gf.placeholder("int64", ("batch",), name="ids")
        self.loss = gf.mean(gf.nn.embedding(self.ids, self.table) ** 2)
        strategy = gf.parallel.Data(parts, tables=[self.table])
        self.train = optimizer(0.1).minimize(self.loss, strategy=strategy)
        self.fed = np.arange(500) * 97 % rows

    def step(self, session: gf.Session) -> float:
        return float(session.run([self.loss, self.train], {self.ids: self.fed})[0])


@pytest.mark.parametrize(
    "ratio, optimizer", [(1.86, gf.optim.RowwiseAdagrad), (1.92, gf.optim.SGD)]
)
def test_a_table_of_nearly_twice_a_workers_memory_trains_on_two(
    ratio: float, optimizer: Any
) -> None:
    """The rest of 32 MiB is for slots, and for the rows that a step uses."""
    with gf.Session(limit_memory(2)) as s:
        model = LargeTable(2, ratio, optimizer)
        first, *_, last = [model.step(s) for _ in range(5)]
        assert last < first


def test_fewer_workers_than_its_memory_needs_are_refused_with_numbers(tmp_path: Path) -> None:
    """Also where the table comes from a checkpoint of more workers."""
    with gf.Session(limit_memory(2)) as s:
        LargeTable(2).step(s)
        s.save(tmp_path / "two")
    with gf.Session(limit_memory(1)) as s:
        s.load(tmp_path / "two")
        with pytest.raises(gf.errors.MemoryLimitError, match=r"need 0\.\d+ GB .* has 0\.0336 GB"):
            LargeTable(1).step(s)


def run_training(folder: Path, dying: int | None) -> list[Any]:
    """Return losses and tables of some steps; before one of them, a worker is killed."""
    model = Model(OPTIMISERS["adam"], gf.parallel.Data(2, tables=["table*"]))
    with gf.Session(gf.Cluster.local(2), checkpoint=folder, every=3) as s:
        found: list[Any] = []
        for step in range(6):
            if step == dying:
                os.kill(s._life.hosts.pids[step % 2], signal.SIGKILL)
            found.append(s.run([model.loss, model.train], model.feeds(step))[0])
        return [*found, *map(s.get, model.tables)]


@pytest.mark.every(2)
@pytest.mark.parametrize("dying", [1, 4])
def test_a_lost_owner_changes_no_bit(dying: int, tmp_path: Path) -> None:
    want = run_training(tmp_path / "alone", None)
    for a, b in zip(run_training(tmp_path / "killed", dying), want, strict=True):
        np.testing.assert_array_equal(a, b)

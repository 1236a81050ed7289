"""Counts are ints, numpy's too, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ScheduleError, ShardingError

parallel = gf.parallel
TWO = np.int64(2)
MADE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "replicas": (parallel.Data, lambda made: made.replicas),
    "accumulate": (lambda n: parallel.Data(2, accumulate=n), lambda made: made.accumulate),
    "a mesh": (lambda n: parallel.Shard({"model": n}), lambda made: made.mesh["model"]),
    "stages": (parallel.Pipeline, lambda made: made.stages),
    "micro-batches": (
        lambda n: parallel.Pipeline(2, microbatches=n), lambda made: made.microbatches,
    ),
    "a schedule's": (lambda n: parallel.one_f_one_b(n, 4), lambda made: made.stages),
    "layers": (lambda n: parallel.GPT(n, 64, 4), lambda made: made.layers),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_counts_of_numpy_are_counts(name: str) -> None:
    make, read = MADE[name]
    assert type(read(make(TWO))) is int and read(make(TWO)) == 2


@pytest.mark.parametrize("wrong", ["2", 2.0, np.float64(2), True, np.bool_(True), 0, -1, [2], b"2"])
@pytest.mark.parametrize("name", MADE)
def test_nothing_else_is_a_count(name: str, wrong: Any) -> None:
    if name == "stages" and wrong == [2]:
        return  # a list of stages, which is looked at when there is a graph
    with pytest.raises((ShardingError, ScheduleError)) as told:
        MADE[name][0](wrong)
    assert repr(wrong) in str(told.value)


def test_a_mesh_of_numpys_counts_trains() -> None:
    x = gf.placeholder("float64", (4, 6), name="x")
    w = gf.variable(np.ones((6, 2)), name="w")
    loss = gf.mean(gf.square(x @ w))
    strategy = parallel.Shard({"data": TWO, "model": TWO}, {"w": (None, "model")}, batch="data")
    train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    with gf.Session() as s:
        assert s.run([loss, train], {x: np.ones((4, 6))})[0] == 36.0


def test_a_batch_that_is_too_small_is_told_by_the_name_that_it_has() -> None:
    for size, told in ((None, "a batch of 1 (of 'x'"), ("B", "a batch of 1 (size 'B') (of 'x'")):
        x = gf.placeholder("float64", (size, 3), name="x")
        loss = gf.mean(x @ gf.variable(np.ones((3, 2))))
        train = gf.optim.SGD(0.1).minimize(loss, strategy=parallel.Data(2))
        with gf.Session() as s, pytest.raises(ShardingError) as error:
            s.run(train, {x: np.ones((1, 3))})
        assert told in str(error.value)

"""A session with replicas=2 that loses workers goes on from the last commit, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import StateLost
from tests.faults.recovery.model import Model
from tests.faults.recovery.test_recovery import digest, kill, local

STEPS = 12
SLOW = pytest.mark.slow


def train(s: gf.Session, model: Model, before: Callable[[int], None], steps: int = STEPS) -> Any:
    """The curve, and the state after each step."""
    told: list[Any] = []
    for number in range(s.step, steps):
        before(number)
        if number % 5 == 2:
            s.set(model.rate, 1.0 + number / 10)
        told.append(s.run([model.loss, model.train], model.feed(number))[0].tobytes())
    return [*told, digest(s, model)]


@pytest.fixture(scope="module")
def wanted() -> dict[int, Any]:
    found = {}
    for workers in (2, 3):
        with local(workers) as s:
            found[workers] = train(s, Model(workers), lambda number: None)
    return found


@pytest.mark.fault(8)
@pytest.mark.parametrize("worker", [0, pytest.param(1, marks=SLOW)])
def test_a_killed_worker_costs_no_step_and_no_bit(worker: int, wanted: dict[int, Any]) -> None:
    with local(2, replicas=2) as s:
        assert train(s, Model(2), lambda n: kill(s, worker) if n == 4 else None) == wanted[2]
        assert s.step == STEPS
        assert {home for home, _ in s.mirrors().places.values()} == set()


def test_three_workers_lose_one_after_the_other_once_new_mirrors_are_complete(
    wanted: dict[int, Any],
) -> None:
    killed = []

    with local(3, replicas=2) as s:

        def strike(number: int) -> None:
            report = s.mirrors()
            if number in (3, 8):
                assert report.places and not report.missing, f"at step {number}: {report}"
                killed.append(1 if number == 3 else 2)
                kill(s, killed[-1])

        assert train(s, Model(3), strike) == wanted[3]
    assert killed == [1, 2]


def test_both_copies_lost_is_told_and_stays_so() -> None:
    model = Model(2)
    with local(2, replicas=2) as s:
        train(s, model, lambda number: None, steps=3)
        kill(s, 0)
        kill(s, 1)
        for _ in range(2):
            with pytest.raises(StateLost, match=r"2 of 2 workers are lost.*both copies of.*w0"):
                s.run([model.loss, model.train], model.feed(3))


def test_both_copies_lost_goes_back_to_the_checkpoint(
    wanted: dict[int, Any], tmp_path: Path
) -> None:
    def strike(number: int) -> None:
        if number == 6:
            kill(s, 0)
            kill(s, 1)

    with local(2, replicas=2, checkpoint=tmp_path / "c", every=4) as s:
        assert train(s, Model(2), strike) == wanted[2]
        assert not s.mirrors().missing and s.mirrors().places


def test_with_checkpoints_too_mirrors_come_first(wanted: dict[int, Any], tmp_path: Path) -> None:
    with local(2, replicas=2, checkpoint=tmp_path / "c", every=4) as s:
        replays: list[Any] = []
        s._recovery._replay = replays.append  # type: ignore[union-attr,method-assign]
        assert train(s, Model(2), lambda n: kill(s, 1) if n == 6 else None) == wanted[2]
        assert replays == []


def test_a_large_table_gets_a_new_mirror_by_pieces_while_steps_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from graphflow.planning import mirror_copies

    monkeypatch.setattr(mirror_copies, "PIECE_BYTES", 1 << 14)
    rows, lookups, steps = 3001, 16, 40
    draw = np.random.default_rng(1)
    batches = [draw.integers(rows, size=lookups) for _ in range(steps)]

    def run(before: Callable[[gf.Session, int], None], **options: Any) -> list[bytes]:
        with gf.random.seed(5), gf.device("/worker:0"):
            table = gf.variable(gf.init.normal((rows, 16)), name="table")
            ids = gf.placeholder("int64", (lookups,), name="ids")
            loss = gf.mean(gf.square(gf.take(table, ids, 0) - 1.0))
            step = gf.optim.RowwiseAdagrad(0.3).minimize(loss)
        with local(3, **options) as s:
            told = []
            for number, batch in enumerate(batches):
                before(s, number)
                told.append(s.run([loss, step], {ids: batch})[0].tobytes())
            return [*told, s.get(table).tobytes()]

    def strike(s: gf.Session, number: int) -> None:
        if number == 2:
            kill(s, 0)
        if number == 8:  # the mirror has some pieces, and no right value yet
            assert "table" in s.mirrors().missing
        if number == 30:
            assert not s.mirrors().missing
            kill(s, 1)

    assert run(strike, replicas=2) == run(lambda s, number: None)


STRATEGIES = {
    "data": gf.parallel.Data(2),
    "shard": gf.parallel.Shard({"model": 2}, {"a": (None, "model"), "b": ("model", None)}),
}


@pytest.mark.parametrize("strategy", [pytest.param("data", marks=SLOW), "shard"])
def test_strategies_go_on_with_mirrors(strategy: str) -> None:
    def run(strike: bool, **options: Any) -> list[bytes]:
        with gf.random.seed(11):
            x = gf.placeholder("float32", (None, 8), name="x")
            h = gf.tanh(x @ gf.variable(gf.init.glorot((8, 16)), name="a"))
            loss = gf.mean(gf.square(h @ gf.variable(gf.init.glorot((16, 4)), name="b") - 1.0))
            step = gf.optim.Adam(0.05).minimize(loss, strategy=STRATEGIES[strategy])
        with local(2, **options) as s:
            told = []
            for number in range(8):
                if strike and number == 3:
                    kill(s, 1)
                feed = np.random.default_rng(number).normal(size=(6, 8)).astype("float32")
                told.append(s.run([loss, step], {x: feed})[0].tobytes())
            return [*told, *(s.get(v.outputs[0]).tobytes() for v in gf.Graph(step).variables)]

    assert run(True, replicas=2) == run(False)


def test_from_the_kill_to_the_next_result_is_below_a_second() -> None:
    model = Model(2)
    with local(2, replicas=2) as s:
        train(s, model, lambda number: None, steps=4)
        kill(s, 1)
        started = time.monotonic()
        s.run([model.loss, model.train], model.feed(4))
        assert time.monotonic() - started < 1.0

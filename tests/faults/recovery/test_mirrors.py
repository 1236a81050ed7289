"""A session with replicas=2 that loses workers goes on from the last commit, bit for bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import StateLost
from tests.faults.recovery.model import Model
from tests.faults.recovery.test_recovery import digest, kill, local, pids
from tests.faults.running import Running, Worker, cluster_file, have_ended, stop

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
    with local(2) as s:
        found[2] = train(s, Model(2), lambda number: None)
    return found


@pytest.mark.fault(8)
@pytest.mark.parametrize("worker", [0, pytest.param(1, marks=SLOW)])
def test_a_killed_worker_costs_no_step_and_no_bit(worker: int, wanted: dict[int, Any]) -> None:
    times: list[float] = []

    def strike(number: int) -> None:
        times.append(time.monotonic())
        if number == 4:
            kill(s, worker)

    with local(2, replicas=2) as s:
        assert train(s, Model(2), strike) == wanted[2]
        assert s.step == STEPS
    assert times[5] - times[4] < 1.0  # from the kill to the result


@SLOW
@pytest.mark.fault(2)
def test_a_frozen_worker_is_given_up_and_its_process_ended(wanted: dict[int, Any]) -> None:
    with local(2, replicas=2) as s:
        frozen = pids(s)[1]
        assert train(s, Model(2), lambda n: stop(frozen) if n == 4 else None) == wanted[2]
        assert have_ended([frozen], 10.0)


@SLOW
@pytest.mark.fault(10)
def test_a_worker_that_is_asked_to_end_leaves_its_part_to_its_mirrors(
    wanted: dict[int, Any],
) -> None:
    def ask(number: int) -> None:
        if number == 4:
            os.kill(pids(s)[0], signal.SIGTERM)
            time.sleep(0.1)

    with local(2, replicas=2) as s:
        asked = pids(s)[0]
        assert train(s, Model(2), ask) == wanted[2]
        assert have_ended([asked], 10.0)


@SLOW
@pytest.mark.fault(50)
def test_a_worker_that_is_started_again_at_its_address_joins_and_gets_the_mirrors(
    workers: Callable[..., list[Worker]], running: list[Running], tmp_path: Path
) -> None:
    """Then the other one may die as well."""
    both, model, steps = workers(2), Model(2), 0
    addresses = [worker.address for worker in both]

    def run_until(s: gf.Session, is_over: Callable[[], bool]) -> None:
        nonlocal steps
        given_up = time.monotonic() + 60.0
        while not is_over() and time.monotonic() < given_up:
            s.run([model.loss, model.train], model.feed(steps))
            steps += 1
            time.sleep(0.01)
        assert is_over()

    with gf.Session(cluster_file(tmp_path, addresses), trial=False, replicas=2) as s:
        for victim in (1, 0):
            run_until(s, lambda: steps > 3 and is_settled(s))
            both[victim].send(signal.SIGKILL)
            both[victim].end()
            run_until(s, lambda: bool(s.mirrors().missing))
            running.append(Worker(addresses[victim]).ready())
        run_until(s, lambda: is_settled(s))
        found = digest(s, model)
    with local(2) as s:
        other = Model(2)
        for number in range(steps):
            s.run([other.loss, other.train], other.feed(number))
        assert digest(s, other) == found


def is_settled(s: gf.Session) -> bool:
    """Whether every variable has a mirror with its value, and no worker has two parts."""
    mirrors, report = s._deployment.mirrors, s.mirrors()
    assert mirrors is not None
    whole = bool(report.places) and not report.missing and not mirrors.lacks_mirrors
    return whole and mirrors.find_uneven_part() is None


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=SLOW)])
def test_workers_die_one_after_the_other_and_each_is_replaced_while_steps_go_on(
    workers: int,
) -> None:
    """At the end none of the first processes is left, and each part is in another process again."""
    model, killed, steps = Model(workers), 0, 0
    with local(workers, replicas=2) as s:
        until = time.monotonic() + 60.0
        first = pids(s)
        while (killed < workers or not is_settled(s)) and time.monotonic() < until:
            if steps > 2 and killed < workers and is_settled(s):
                kill(s, killed)
                killed += 1
            s.run([model.loss, model.train], model.feed(steps))
            steps += 1
            time.sleep(0.01)
        assert killed == workers and is_settled(s)
        assert all(have_ended([pid], 5.0) for pid in first)
        places = s.mirrors().places
        assert len({home for home, _ in places.values()}) == workers
        assert all(home != mirror for home, mirror in places.values())
        found = digest(s, model)
    with local(workers) as s:
        other = Model(workers)
        for number in range(steps):
            s.run([other.loss, other.train], other.feed(number))
        assert digest(s, other) == found


def test_both_copies_lost_is_told_and_stays_so() -> None:
    model = Model(2)
    with local(2, replicas=2) as s:
        train(s, model, lambda number: None, steps=3)
        kill(s, 0)
        kill(s, 1)
        for _ in range(2):
            with pytest.raises(
                StateLost, match=r"lost worker 0, worker 1, and with them both copies of"
            ):
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


@SLOW
def test_with_checkpoints_too_mirrors_come_first(wanted: dict[int, Any], tmp_path: Path) -> None:
    with local(2, replicas=2, checkpoint=tmp_path / "c", every=4) as s:
        replays: list[Any] = []
        s._recovery._replay = replays.append  # type: ignore[union-attr,method-assign]
        assert train(s, Model(2), lambda n: kill(s, 1) if n == 6 else None) == wanted[2]
        assert replays == []


def test_a_large_table_gets_a_new_mirror_by_pieces_while_steps_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker that has the only copy of a part of the rows, and their mirror, dies last."""
    from graphflow.planning.migration import mirror_copies

    monkeypatch.setattr(mirror_copies, "PIECE_BYTES", 1 << 14)
    rows, lookups = 3001, 16
    pieces: list[bool] = []  # in each step, whether the table has a second copy

    def run(killing: bool, steps: int, **options: Any) -> list[bytes]:
        draw = np.random.default_rng(1)
        with gf.random.seed(5), gf.device("/worker:0"):
            table = gf.variable(gf.init.normal((rows, 16)), name="table")
            ids = gf.placeholder("int64", (lookups,), name="ids")
            loss = gf.mean(gf.square(gf.take(table, ids, 0) - 1.0))
            step = gf.optim.RowwiseAdagrad(0.3).minimize(loss)
        with local(2, **options) as s:
            told: list[bytes] = []
            until = time.monotonic() + 60.0
            kills = [0, 1] if killing else []
            while (kills or len(told) < steps) and time.monotonic() < until:
                if kills and len(told) > 2 and not s.mirrors().missing:
                    kill(s, kills.pop(0))
                batch = {ids: draw.integers(rows, size=lookups)}
                told.append(s.run([loss, step], batch)[0].tobytes())
                if killing:
                    pieces.append("table" not in s.mirrors().missing)
            assert not kills
            return [*told, s.get(table).tobytes()]

    found = run(True, 5, replicas=2)
    assert found == run(False, len(found) - 1)
    assert pieces.count(False) > 12  # 3001 rows of 64 bytes in pieces of 16 KiB

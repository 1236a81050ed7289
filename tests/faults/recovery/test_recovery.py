"""A session with checkpoint= that loses workers gives the bits of one that does not."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import PoisonedTask, WorkerLost
from graphflow.runtime.wire.messages import Close, Measure
from tests.faults import hazards
from tests.faults.hostile.strangers import Stranger
from tests.faults.recovery.model import Model
from tests.faults.running import Worker, children, cluster_file, stop, took

STEPS = 24
SLOW = pytest.mark.slow  # workers start again and again, or have to be missed for seconds


def digest(s: gf.Session, model: Model) -> list[bytes]:
    state = [v.outputs[0] for v in gf.Graph(model.train).variables]
    return [s.get(v).tobytes() for v in state]


def train(
    s: gf.Session,
    model: Model,
    before: Callable[[int], None] = lambda number: None,
    steps: int = STEPS,
) -> list[Any]:
    """The curve, with all its bits, and the state at its end."""
    told: list[Any] = []
    for number in range(steps):
        before(number)
        if number % 5 == 2:
            s.set(model.rate, 1.0 + number / 10)
        told.append(s.run([model.loss, model.train], model.feed(number))[0].tobytes())
        if number % 4 == 1:
            told.append(s.run({"e": model.evaluate}, model.feed(100 + number))["e"].tobytes())
    return [*told, digest(s, model)]


def pids(s: gf.Session) -> list[int]:
    found: list[int] = s._life.hosts.pids  # type: ignore[attr-defined]
    return found


def kill(s: gf.Session, worker: int) -> None:
    with suppress(ProcessLookupError):  # nobody has missed it yet since the last time
        os.kill(pids(s)[worker], signal.SIGKILL)


def local(workers: int = 2, **options: Any) -> gf.Session:
    return gf.Session(gf.Cluster.local(workers=workers, threads=1), trial=False, **options)


class Curves(dict[int, list[Any]]):
    """Without faults, by the number of workers; computed when somebody asks, but for two workers,
    which most do, some at moments when it would disturb."""

    def __missing__(self, workers: int) -> list[Any]:
        with (
            gf.Session(gf.Cluster.here(devices=["cpu:0"], threads=1))
            if workers == 1
            else local(workers)
        ) as s:
            return self.setdefault(workers, train(s, Model(workers)))


@pytest.fixture(scope="module")
def curves() -> Mapping[int, list[Any]]:
    found = Curves()
    assert found[2]
    return found


@contextmanager
def kill_workers_at_random(
    s: gf.Session, seed: int, workers: int, times: int
) -> Iterator[list[float]]:
    """Kills workers at random moments, whatever the session is at just then; twice at most in one
    step, since what ends three workers is given up: on a busy machine it is at one for long. The
    step may be over, and the next one begun, until the worker dies."""
    draw = random.Random(seed)
    done = threading.Event()
    struck: list[float] = []
    at = Counter[int]()

    def strike() -> None:
        for _ in range(times):
            if done.wait(draw.uniform(0.0, 1.0)):
                return
            while max(at[(step := s.step) - 1], at[step + 1]) + at[step] >= 2:
                if done.wait(0.05):
                    return
            at[step] += 1
            kill(s, draw.randrange(max(workers, len(pids(s)))))
            struck.append(time.monotonic())

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield struck
    finally:
        done.set()
        thread.join()


@pytest.mark.fault(1)
@pytest.mark.parametrize(
    ("seed", "workers", "replicas"),
    [
        (0, 2, 1),
        *(pytest.param(*more, 1, marks=SLOW) for more in ((1, 3), (2, 2), (3, 3), (4, 2))),
        *(pytest.param(seed, 2 + seed % 2, 2, marks=SLOW) for seed in range(5, 11)),
    ],
)
def test_workers_killed_at_random_moments_change_no_bit(
    seed: int, workers: int, replicas: int, curves: Mapping[int, list[Any]], tmp_path: Path
) -> None:
    wanted = curves[workers]
    with local(workers, checkpoint=tmp_path / "c", every=4, replicas=replicas) as s:
        with kill_workers_at_random(s, seed, workers, times=6) as struck:
            pause = lambda number: time.sleep(0.06)  # noqa: E731
            assert train(s, Model(workers), pause) == wanted
        assert len(struck) > 1
        assert s.step == STEPS + STEPS // 4
        assert s.checkpoint_error is None


@pytest.mark.slow  # workers start again and again
@pytest.mark.fault(1)
def test_two_kills_in_a_row_and_both_workers_at_once_change_no_bit(
    curves: Mapping[int, list[Any]], tmp_path: Path
) -> None:
    def strike(number: int) -> None:
        if number in (6, 7, 12):
            kill(s, number % 2)
        if number in (12, 17):
            kill(s, 1)

    with local(checkpoint=tmp_path / "c", every=5) as s:
        assert train(s, Model(2), strike) == curves[2]


def test_a_kill_in_the_first_plan_before_any_checkpoint_changes_no_bit(
    curves: Mapping[int, list[Any]], tmp_path: Path
) -> None:
    with local(checkpoint=tmp_path / "c", every="1h") as s:
        kill(s, 0)
        assert train(s, Model(2), lambda n: kill(s, 1) if n == 3 else None) == curves[2]


def test_each_loss_of_a_worker_is_told_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("WARNING", "graphflow"),
        local(checkpoint=tmp_path / "c", every=5) as s,
    ):
        train(s, Model(2), lambda n: kill(s, 1) if n in (3, 9) else None, steps=12)
        meters = s._life.hosts.meters
        assert meters.value("graphflow_workers_lost_total") == 2
        assert meters.value("graphflow_recoveries_total") == 2
    lost = [r.getMessage() for r in caplog.records if r.getMessage().startswith("worker.lost")]
    assert len(lost) == 2 and all("worker=1" in each for each in lost)


@pytest.mark.slow  # workers start again and again
def test_a_kill_during_recovery_itself_changes_no_bit(
    curves: Mapping[int, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the workers are back, while steps are done again, and while variables are restored."""
    from graphflow.recovery.recoverer import Recovery

    original, left = Recovery._replay, [2, 1]

    def redo(self: Recovery, entry: Any) -> None:
        if left:
            kill(s, left.pop() % 2)
        original(self, entry)

    monkeypatch.setattr(Recovery, "_replay", redo)
    with local(checkpoint=tmp_path / "c", every=5) as s:
        assert train(s, Model(2), lambda n: kill(s, 0) if n == 8 else None) == curves[2]
    assert not left


@SLOW
@pytest.mark.fault(4)
def test_losses_in_steps_that_are_done_again_count_for_those_steps(
    curves: Mapping[int, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else three that have nothing in common would be taken for the work of one."""
    from graphflow.recovery.recoverer import Recovery
    from graphflow.runtime.protocol.poison_tracker import PoisonTaskTracker

    again, died, left, found = Recovery._replay, PoisonTaskTracker.record_worker_loss, [7, 6, 5], []

    def redo(self: Recovery, entry: Any) -> None:
        if left and entry.before == left[-1]:
            kill(s, left.pop() % 2)
        again(self, entry)

    def record_committed(
        self: PoisonTaskTracker, error: WorkerLost, committed: int
    ) -> PoisonedTask | None:
        found.append(committed)
        return died(self, error, committed)

    monkeypatch.setattr(Recovery, "_replay", redo)
    monkeypatch.setattr(PoisonTaskTracker, "record_worker_loss", record_committed)
    expected = []

    def strike(number: int) -> None:
        if number == 8:
            expected.extend([s.step, 5, 6, 7])
            kill(s, 0)

    with local(checkpoint=tmp_path / "c", every=5) as s:
        assert train(s, Model(2), strike) == curves[2]
    assert found == expected


@pytest.mark.slow  # workers start again and again
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(
    curves: Mapping[int, list[Any]], tmp_path: Path
) -> None:
    def strike(number: int) -> None:
        if number in (10, 15):
            s._recovery._begin_checkpoint()  # type: ignore[union-attr]
            kill(s, number % 2)

    with local(checkpoint=tmp_path / "c", every=5) as s:
        assert train(s, Model(2), strike) == curves[2]
    assert not [p.name for p in (tmp_path / "c").iterdir() if p.name.startswith(".")]


@SLOW
def test_a_frozen_worker_is_replaced_and_its_process_ends(
    curves: Mapping[int, list[Any]], tmp_path: Path
) -> None:
    frozen = []

    def strike(number: int) -> None:
        if number == 6:
            frozen.append(pids(s)[1])
            stop(frozen[0])

    with local(checkpoint=tmp_path / "c", every=5) as s:
        assert train(s, Model(2), strike) == curves[2]
        assert frozen[0] not in pids(s) and not Path(f"/proc/{frozen[0]}").exists()


@pytest.mark.slow
@pytest.mark.fault(2)
def test_a_worker_that_freezes_while_another_is_replaced_is_replaced_too(
    curves: Mapping[int, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections, as its system does, and never answers; nobody has missed it yet."""
    monkeypatch.setattr("graphflow.runtime.client.worker_membership.REOPEN_SECONDS", 5.0)
    frozen = []

    def strike(number: int) -> None:
        if number == 6:
            frozen.append(pids(s)[0])
            stop(frozen[0])
            kill(s, 1)

    with local(checkpoint=tmp_path / "c", every=5) as s:
        assert train(s, Model(2), strike) == curves[2]
        assert frozen[0] not in pids(s) and not Path(f"/proc/{frozen[0]}").exists()


@SLOW
def test_a_session_that_looks_for_better_placements_recovers_too(tmp_path: Path) -> None:
    def run(**options: Any) -> list[Any]:
        def strike(number: int) -> None:
            if options and number in (9, 13, 30):
                kill(s, number % 2)
            if number == 15:
                s.replan()

        with local(replan="auto", **options) as s:
            return train(s, Model(2, pinned=False), strike, steps=40)

    assert run(checkpoint=tmp_path / "c", every=7) == run()


def test_many_steps_of_one_call_recover_too(tmp_path: Path) -> None:
    def run(**options: Any) -> list[Any]:
        model = Model(2)

        def feeds() -> Iterator[dict[gf.Tensor, Any]]:
            for number in range(20):
                if options and number in (6, 13):
                    kill(s, number % 2)
                yield model.feed(number)

        with local(**options) as s:
            found = s.run([model.loss, model.train], feeds(), steps=20)
            told = [loss.tobytes() for loss, _ in found]
            return [*told, digest(s, model)]

    assert run(checkpoint=tmp_path / "c", every=5) == run()


@pytest.mark.slow
def test_calls_of_many_steps_whose_program_no_worker_has_any_more_recover_too(
    tmp_path: Path,
) -> None:
    """What a recovery does again needs the one set of fetches, and the other one is asked next."""

    def run(**options: Any) -> list[Any]:
        model = Model(2)
        with local(**options) as s:
            first = s.run([model.loss, model.train], map(model.feed, range(9)), steps=9)
            other = s.run(model.evaluate, map(model.feed, range(9)), steps=9)
            told = []
            for number, ((loss, _), value) in enumerate(zip(first, other, strict=True)):
                told += [loss.tobytes(), value.tobytes()]
                if options and number == 5:
                    s.save()
                    kill(s, 1)
            return [*told, digest(s, model)]

    assert run(checkpoint=tmp_path / "c") == run()


@pytest.mark.parametrize("seed", [0, *(pytest.param(more, marks=SLOW) for more in (1, 2, 3))])
def test_kills_at_random_moments_of_steps_that_begin_ahead_change_no_bit(
    seed: int, tmp_path: Path
) -> None:
    def run(times: int, **options: Any) -> list[Any]:
        model = Model(2)
        with local(**options) as s, kill_workers_at_random(s, seed, 2, times) as struck:
            found = s.run([model.loss, model.train], map(model.feed, range(40)), steps=40)
            told = []
            for loss, _ in found:
                told.append(loss.tobytes())
                time.sleep(0.06 * bool(times))
            assert len(struck) > 1 or not times
            return [*told, digest(s, model)]

    assert run(5, checkpoint=tmp_path / "c", every=4) == run(0)


@SLOW
def test_a_division_by_a_strategy_stays_when_workers_are_lost(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    """Replicas and shares of the optimiser's state, on two workers and then on one of them."""

    def model() -> tuple[gf.Tensor, gf.Tensor, gf.Tensor, gf.Tensor]:
        with gf.random.seed(7):
            x = gf.placeholder("float32", (8, 6), name="x")
            w = gf.variable(gf.init.glorot((6, 5)), name="w")
            loss = gf.mean(gf.square(gf.nn.dropout(gf.tanh(x @ w), 0.2)))
            strategy = gf.parallel.Data(replicas=2, shard_state=True)
            return x, w, loss, gf.optim.Adam(0.1).minimize(loss, strategy=strategy)

    def run(s: gf.Session, before: Callable[[int], None] = lambda number: None) -> list[bytes]:
        x, w, loss, step = model()
        told = []
        for number in range(s.step, 12):
            before(number)
            values = np.random.default_rng(number).normal(size=(8, 6)).astype("float32")
            told.append(s.run([loss, step], {x: values})[0].tobytes())
        return [*told, s.get(w).tobytes()]

    with local() as s:
        wanted = run(s)
    with local(checkpoint=tmp_path / "a", every=4) as s:
        assert run(s, lambda n: kill(s, n % 2) if n in (3, 6) else None) == wanted
    with local(1, checkpoint=tmp_path / "a") as s:
        assert s.get(gf.variable(gf.init.zeros((6, 5)), name="w")).tobytes() == wanted[-1]
    found = workers(2)
    cluster = remote(tmp_path, found)
    with gf.Session(cluster, trial=False, checkpoint=tmp_path / "b", every=4, rejoin=0.5) as s:
        assert run(s, lambda n: found[1].process.kill() if n == 6 else None) == wanted
        assert len(s.cluster.workers) == 1


# Other processes ------------------------------------------------------------------------------


def remote(tmp_path: Path, found: list[Worker]) -> Path:
    return cluster_file(tmp_path, [worker.address for worker in found])


@pytest.mark.fault(50)
def test_a_worker_that_comes_back_at_its_address_goes_on_with_the_session(
    workers: Callable[..., list[Worker]], running: list[Any], tmp_path: Path,
    curves: Mapping[int, list[Any]],
) -> None:  # fmt: skip
    found = workers(2, "--checkpoints", str(tmp_path))
    there: list[float] = []
    (tmp_path / "c").mkdir()

    def strike(number: int) -> None:
        if number == 7:
            found[1].process.kill()
            found[1].process.wait()
            running.append(fresh := Worker(found[1].address))
            fresh.ready()
            there.append(time.monotonic())
        elif number == 8:
            took(50, "a step after it is back: found, recovered", time.monotonic() - there[0])

    cluster = remote(tmp_path, found)
    with gf.Session(cluster, trial=False, checkpoint=tmp_path / "c", every=5) as s:
        model = Model(2)
        assert train(s, model, strike) == curves[2]
        assert len(s.cluster.workers) == 2
        before = s.step
        with Stranger(found[0].address) as late:  # of epoch 1, with the session's own token
            store = s._recovery.writer.store  # type: ignore[union-attr]
            late.session, late.token = store.session, store.token
            assert store.epoch == 2
            assert late.ask(Measure(900), "Fenced").error == "StaleEpoch"
            late.tell(Close(901))
        s.run(model.loss, model.feed(0))
        assert s.step == before + 1


@pytest.mark.fault(50)
def test_a_worker_that_comes_back_with_fewer_devices_is_planned_around(
    workers: Callable[..., list[Worker]], running: list[Any], tmp_path: Path,
    curves: Mapping[int, list[Any]], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    (stays,), (leaves,) = workers(1), workers(1, "--devices", "cpu:0,cpu:1")
    cluster = remote(tmp_path, [stays, leaves])
    first, second = cluster.read_text().split(f'address = "{leaves.address}"')
    second = second.replace('["cpu:0"]', '["cpu:0", "cpu:1"]')
    cluster.write_text(f'{first}address = "{leaves.address}"{second}')

    def strike(number: int) -> None:
        if number == 7:
            leaves.process.kill()
            leaves.process.wait()
            running.append(fresh := Worker(leaves.address))
            fresh.ready()

    with gf.Session(cluster, trial=False, checkpoint=tmp_path / "c", every=5, rejoin=4.0) as s:
        assert train(s, Model(2), strike) == curves[2]
        assert len(s.cluster.workers) == 1
    told = next(r.getMessage() for r in caplog.records if "worker.unfit" in r.getMessage())
    assert leaves.address in told and "has cpu:0, but not cpu:1 as the cluster says" in told
    stays.send(signal.SIGTERM)
    assert stays.wait(5.0) == 0, "it keeps no session"


@SLOW
@pytest.mark.fault(2, 50)
def test_a_worker_of_another_machine_that_froze_and_wakes_has_a_new_epoch(
    workers: Callable[..., list[Worker]], tmp_path: Path, curves: Mapping[int, list[Any]]
) -> None:
    """It wakes while it is waited for, with all that it held of the epoch before."""
    found = workers(2, env={"GRAPHFLOW_LOG": "json"})
    frozen = [found[1].pid, *children(found[1].pid)]

    def wake() -> None:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)

    timer = threading.Timer(6.0, wake)

    def strike(number: int) -> None:
        if number == 8:
            for pid in frozen:
                stop(pid)
            timer.start()

    cluster = remote(tmp_path, found)
    with gf.Session(cluster, trial=False, checkpoint=tmp_path / "c", every=5, rejoin=20.0) as s:
        assert train(s, Model(2), strike) == curves[2]
        assert len(s.cluster.workers) == 2
    timer.join()
    events = [json.loads(line) for line in found[1].errors]
    assert [e["epoch"] for e in events if e["event"] == "session.opened"] == [1, 2]
    assert not [e for e in events if e["event"] == "loop.failed"]


@SLOW
@pytest.mark.fault(13)
def test_without_a_worker_that_stays_away_the_session_goes_on_with_the_others(
    workers: Callable[..., list[Worker]], tmp_path: Path, curves: Mapping[int, list[Any]]
) -> None:
    found = workers(3)

    def strike(number: int) -> None:
        if number in (7, 12):
            found[number % 3].process.kill()

    cluster = remote(tmp_path, found)
    with gf.Session(cluster, trial=False, checkpoint=tmp_path / "c", every=5, rejoin=1.0) as s:
        assert train(s, Model(3), strike) == curves[3]
        assert len(s.cluster.workers) == 1
    with local(2, checkpoint=tmp_path / "c") as s:  # and it is taken up on others
        assert s.step == STEPS + STEPS // 4
        assert digest(s, model := Model(2)) == curves[3][-1]
        assert s.run(model.loss, model.feed(0)).dtype == "float32"


@SLOW
def test_a_session_that_no_worker_is_left_for_says_so(
    workers: Callable[..., list[Worker]], running: list[Any], tmp_path: Path
) -> None:
    found = workers(1)
    model = Model(1)
    cluster = remote(tmp_path, found)
    with gf.Session(cluster, trial=False, checkpoint=tmp_path / "c", every=2, rejoin=0.1) as s:
        train(s, model, steps=5)
        found[0].process.kill()
        started = time.monotonic()
        for _ in range(2):
            with pytest.raises(WorkerLost, match="none of the workers"):
                s.run(model.loss, model.feed(0))
        assert time.monotonic() - started < 20
        running.append(fresh := Worker(found[0].address))
        fresh.ready()
        before = s.step
        s.run(model.loss, model.feed(0))
        assert s.step == before + 1


# Giving up ------------------------------------------------------------------------------------


@pytest.mark.fault(4)
def test_an_op_that_kills_every_worker_is_not_tried_on_a_fourth(tmp_path: Path) -> None:
    with gf.device("/worker:1"):
        count = gf.variable(np.zeros((), "float32"), name="count")
        add = gf.assign(count, count + 1.0)
        deadly = hazards.crash(gf.constant(np.ones(3, "float32")))
    with local(ops=["tests.faults.hazards"], checkpoint=tmp_path / "c", every=2) as s:
        for _ in range(5):
            s.run(add)
        with pytest.raises(PoisonedTask, match="ended 3 workers"):
            s.run(deadly)
        assert s.run(add) == 6
        assert s.get(count) == 6


@SLOW
@pytest.mark.fault(4, 47)
def test_an_op_that_kills_a_worker_of_another_machine_is_named_however_often_it_is_restarted(
    workers: Callable[..., list[Worker]],
    running: list[Any],
    tmp_path: Path,
    curves: Mapping[int, list[Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another session has that worker, too: it goes on, and is not told what the first computes."""
    options = ("--allow-ops", "tests.faults.hazards")
    (worker,) = workers(1, *options)
    over, lives = threading.Event(), [worker]

    def supervise() -> None:
        while not over.wait(0.01):
            if lives[-1].process.poll() is not None:
                lives.append(Worker(worker.address, *options))
                running.append(lives[-1])

    beside: list[Any] = []
    cluster = remote(tmp_path, [worker])

    def train_beside() -> None:
        with gf.Session(cluster, trial=False, checkpoint=tmp_path / "b", every=4, rejoin=30) as s:
            try:
                beside.append(s.step)
                beside.append(train(s, Model(1), lambda number: time.sleep(0.25)))
            except BaseException as error:
                beside.append(error)

    threads = [threading.Thread(target=each) for each in (supervise, train_beside)]
    for thread in threads:
        thread.start()
    count = gf.variable(np.zeros((), "float32"), name="count")
    add = gf.assign(count, count + 1.0)
    deadly = hazards.crash(gf.constant(np.ones(3, "float32")), name="deadly")
    try:
        with gf.Session(
            cluster, trial=False, ops=["tests.faults.hazards"],
            checkpoint=tmp_path / "c", every=2,
        ) as s:  # fmt: skip
            while not beside:
                s.run(add)
            before = s.run(add)
            with pytest.raises(
                PoisonedTask, match=r"hazards.crash 'deadly' \(made at .* 3 workers"
            ):
                s.run(deadly)
            assert s.run(add) == before + 1
        threads[1].join(60.0)
    finally:
        over.set()
        threads[0].join()
    assert len(lives) == 4
    assert beside == [0, curves[1]]
    lost = [r.getMessage() for r in caplog.records if "worker.lost" in r.getMessage()]
    assert any("in what another session computed, Segmentation fault" in each for each in lost)

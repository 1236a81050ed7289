"""Sessions over workers take the short way where they can, and whoever looks sees no difference."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import CodeType
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import CheckError, SessionError, StepTimeout, WorkerLost
from graphflow.placement.clusters.cluster import Cluster
from graphflow.runtime.client import fast_path_loop as repeating
from graphflow.runtime.client.fast_path_loop import FastPathLoop
from graphflow.runtime.protocol.coordinator_events import Replies
from graphflow.runtime.protocol.fast_path import FastPathCoordinator
from tests.faults import hazards
from tests.faults.running import stop
from tests.interrupts import interrupt_after, interrupt_at

OPS = ["tests.faults.hazards"]


class Model:
    """A counter on one worker, to which what the other made of a feed is added. A negative feed
    makes a step fail, and `slow` takes its time."""

    def __init__(self) -> None:
        self.x = gf.placeholder("float32", (None,), name="x")
        with gf.device("/worker:1"):
            checked = gf.debug.check(self.x, gf.all(self.x >= 0), "no negative feeds")
            summed = gf.sum(checked)
            late = hazards.sleep(summed, seconds=0.6)
        with gf.device("/worker:0"):
            self.total = gf.variable(np.zeros((), "float32"), name="total")
            self.add = gf.assign(self.total, self.total + summed)
            self.slow = gf.assign(self.total, self.total + late)


def local(deadline: float = 60, **more: Any) -> gf.Session:
    cluster = Cluster.local(workers=2, threads=1)
    return gf.Session(cluster, deadline=deadline, trial=False, ops=OPS, **more)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def session() -> Iterator[gf.Session]:
    with local() as session:
        yield session


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What went which way: the steps of all sessions of this process, and the answers to them."""
    found: list[str] = []
    repeat, answered = FastPathLoop.run_step, FastPathCoordinator.accept_answer

    def record_repeat(self: FastPathLoop, *given: Any) -> Replies | None:
        replies = repeat(self, *given)
        found.append("short" if replies is not None else "long")
        return replies

    def record_answer(self: FastPathCoordinator, *given: Any) -> Any:
        actions = answered(self, *given)
        found.append("answered" if actions is not None else "said otherwise")
        return actions

    monkeypatch.setattr(FastPathLoop, "run_step", record_repeat)
    monkeypatch.setattr(FastPathCoordinator, "accept_answer", record_answer)
    return found


def fed(model: Model, *values: float) -> dict[Any, Any]:
    return {model.x: np.array(values, "float32")}


def test_steps_take_the_short_way_and_count_once(
    session: gf.Session, model: Model, ways: list[str]
) -> None:
    session.set(model.total, np.float32(0))
    totals = [float(session.run(model.add, fed(model, step, 1))) for step in range(50)]
    assert totals == [sum(range(step + 1)) + step + 1 for step in range(50)]
    assert float(session.get(model.total)) == totals[-1]
    # A tick may be due, or an answer come late: then the long way is taken.
    assert ways.count("short") > 25 and ways.count("answered") > ways.count("short")


@pytest.mark.parametrize("rows", [1, 4095, 4096, 100_000])
def test_feeds_of_any_size_give_the_same(
    session: gf.Session, model: Model, ways: list[str], rows: int
) -> None:
    session.set(model.total, np.float32(0))
    feed = fed(model, *[1.0] * rows)
    assert [float(session.run(model.add, feed)) for _ in range(4)] == [
        rows * step for step in (1, 2, 3, 4)
    ]
    assert ("short" in ways) == (rows < 4096)


def test_a_step_that_fails_changes_nothing_and_the_next_ones_are_as_if_it_had_not_been(
    session: gf.Session, model: Model, ways: list[str]
) -> None:
    session.set(model.total, np.float32(0))
    for step in range(6):
        assert float(session.run(model.add, fed(model, 1, 1))) == 2 * (step + 1)
        with pytest.raises(CheckError, match="no negative feeds"):
            session.run(model.add, fed(model, 1, -1))
    assert float(session.get(model.total)) == 12
    assert "short" in ways


def test_threads_that_share_a_session_take_turns(
    session: gf.Session, model: Model, ways: list[str]
) -> None:
    session.set(model.total, np.float32(0))
    seen: list[float] = []

    def run() -> None:
        for _ in range(25):
            seen.append(float(session.run(model.add, fed(model, 1))))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == list(range(1, 101))
    assert ways.count("short") > 20


def test_ctrl_c_in_the_middle_of_a_short_step_ends_it_and_nothing_else(
    session: gf.Session, model: Model, ways: list[str]
) -> None:
    session.set(model.total, np.float32(0))
    for _ in range(3):
        session.run(model.add, fed(model, 1))
    handler = signal.getsignal(signal.SIGINT)
    session.run(model.slow, fed(model, 1))
    before = float(session.get(model.total))
    for seconds in (0.001, 0.01, 0.05, 0.1):
        assert interrupt_after(lambda: session.run(model.slow, fed(model, 1)), seconds) < 2
        assert signal.getsignal(signal.SIGINT) is handler
    assert float(session.get(model.total)) == before
    assert [float(session.run(model.add, fed(model, 1))) for _ in range(3)] == [
        before + step for step in (1, 2, 3)
    ]


def is_short(code: CodeType) -> bool:
    return code.co_filename == repeating.__file__ or code.co_name == "_try_fast_path"


def test_ctrl_c_at_any_line_of_the_short_way_leaves_a_session_that_goes_on(
    session: gf.Session, model: Model
) -> None:
    handler, tracer = signal.getsignal(signal.SIGINT), sys.gettrace()
    session.set(model.total, np.float32(0))
    total = 0.0
    for count in itertools.count(1):
        for _ in range(2):  # what is due is done before
            total += 1
            assert float(session.run(model.add, fed(model, 1))) == total
        sys.settrace(interrupt_at(count, is_short))
        try:
            session.run(model.add, fed(model, 1))
            sys.settrace(tracer)
            break  # it ended before that many lines
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracer)
        assert signal.getsignal(signal.SIGINT) is handler
        found = float(session.get(model.total))
        assert found in (total, total + 1), "a step happens, or it does not"
        total = found
    assert count > 40  # the short way has hardly fewer lines, where it is taken


def test_what_breaks_the_short_way_ends_the_session_and_says_so(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_memory_error(*args: Any) -> Any:
        raise MemoryError("none is left")

    with local() as session:
        for _ in range(3):
            session.run(model.add, fed(model, 1))
        for where in ("begin_step", "accept_answer"):
            monkeypatch.setattr(FastPathCoordinator, where, raise_memory_error)
        began = time.monotonic()
        with pytest.raises(SessionError, match=r"closed.*none is left"):
            while time.monotonic() < began + 10:  # a tick may be due: then there is no short way
                session.run(model.add, fed(model, 1))
        monkeypatch.undo()


def test_a_step_that_is_late_is_told_so_and_the_next_one_runs(ways: list[str]) -> None:
    model = Model()
    with local(deadline=0.5) as session:
        for _ in range(3):
            session.run(model.add, fed(model, 1))
        ways.clear()
        victim = session._deployment.hosts.pids[1]
        stop(victim)
        try:
            with pytest.raises(StepTimeout, match="worker 1"):
                session.run(model.add, fed(model, 1))
        finally:
            os.kill(victim, signal.SIGCONT)
        assert [float(session.run(model.add, fed(model, 1))) for _ in range(20)] == [*range(4, 24)]
        assert "answered" in ways


def test_a_worker_that_dies_in_a_short_step_is_lost(ways: list[str]) -> None:
    model = Model()
    with local() as session:
        for _ in range(3):
            session.run(model.add, fed(model, 1))
        assert "short" in ways
        victim = session._deployment.hosts.pids[1]
        timer = threading.Timer(0.02, os.kill, (victim, signal.SIGKILL))
        timer.start()
        began = time.monotonic()
        with pytest.raises(WorkerLost, match="killed by signal 9"):
            while time.monotonic() < began + 10:
                session.run(model.slow, fed(model, 1))
        timer.join()


def test_a_session_with_checkpoints_takes_it_and_recovers(tmp_path: Any, ways: list[str]) -> None:
    model = Model()
    with local(checkpoint=tmp_path, every=5) as session:
        totals = []
        for step in range(20):
            if step == 12:
                os.kill(session._deployment.hosts.pids[0], signal.SIGKILL)
            totals.append(float(session.run(model.add, fed(model, step))))
    assert totals == [sum(range(step + 1)) for step in range(20)]
    assert ways.count("short") > 8

"""A training that is told to end, or killed, goes on from where it was: in another process, or on
other workers."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import WorkerLost
from tests.faults import hazards
from tests.faults.recovery.model import Model
from tests.faults.recovery.test_recovery import SLOW, curves, local, pids, train
from tests.faults.running import (
    Running,
    Script,
    Worker,
    children,
    cluster_file,
    have_ended,
    is_alive,
    record_duration,
    stop,
    took,
)
from tests.interrupts import interrupt_after

__all__ = ["curves"]

TRAINING = """
import sys, time, graphflow as gf
from tests.faults.recovery.model import Model
cluster, folder, every, steps, pause = sys.argv[1:]
every = int(every) if every.isdigit() else every
where = cluster
if cluster in ("local", "stream"):
    where = gf.Cluster.local(workers=2, threads=1)
if cluster == "here":
    where = gf.Cluster.here(threads=1)
model = Model(1 if cluster == "here" else 2)
with gf.Session(where, trial=False, checkpoint=folder, every=every, rejoin=20) as s:
    print("ready", s.step, flush=True)
    numbers, fetches = range(s.step, int(steps)), [model.loss, model.train]
    if cluster == "stream":
        found = s.run(fetches, map(model.feed, numbers), steps=len(numbers))
    else:
        found = (s.run(fetches, model.feed(number)) for number in numbers)
    for number, (loss, _) in zip(numbers, found):
        print("step", number, float(loss).hex(), flush=True)
        time.sleep(float(pause))
print("done", flush=True)
"""


def losses(lines: list[str]) -> dict[int, str]:
    words = (line.split() for line in lines if line.startswith("step "))
    return {int(number): loss for _, number, loss in words}


@pytest.fixture(scope="module")
def wanted() -> dict[int, str]:
    """The curve of a training that nothing befalls."""
    model, told = Model(1), {}
    with gf.Session(gf.Cluster.here(threads=1)) as s:
        for number in range(40):
            loss, _ = s.run([model.loss, model.train], model.feed(number))
            told[number] = float(loss).hex()
    return told


def start(
    script: Callable[..., Script], cluster: str, folder: Path, every: str, steps: int = 40,
    pause: float = 0.0,
) -> Script:  # fmt: skip
    return script(TRAINING, cluster, str(folder), every, str(steps), str(pause))


@pytest.mark.every(3)
@pytest.mark.fault(10)
@pytest.mark.parametrize("cluster", ["here", "local", "stream"])
def test_a_client_that_is_told_to_end_writes_a_checkpoint_and_ends_well(
    cluster: str, script: Callable[..., Script], tmp_path: Path, wanted: dict[int, str]
) -> None:
    first = start(script, cluster, tmp_path / "c", "1h", pause=0.05)
    first.line("step 10")
    own = children(first.pid)
    with record_duration(10, f"ended: {cluster}"):
        first.send(signal.SIGTERM)
        assert first.wait(20.0) == 0, first.describe_output()
    assert have_ended(own, 5.0) and "done" not in first.lines
    second = start(script, cluster, tmp_path / "c", "1h")
    at = int(second.line("ready").split()[1])
    assert 11 <= at < 40
    assert second.wait() == 0
    told = losses(first.lines) | losses(second.lines)
    # One that was told to end in a step has committed it, and did not come to print it.
    assert {n: told[n] for n in told if n != at - 1} == {
        n: wanted[n] for n in wanted if n != at - 1
    }


@pytest.mark.slow  # several clients, one after the other
@pytest.mark.fault(10)
def test_a_signal_between_steps_and_one_in_a_long_step_end_the_process_both(
    script: Callable[..., Script], tmp_path: Path
) -> None:
    text = """
import sys, time, numpy as np, graphflow as gf
from tests.faults import hazards
count = gf.variable(np.zeros((), "float32"), name="count")
step = gf.assign(count, count + 1.0)
nap = hazards.sleep(gf.constant(np.ones(3, "float32")), seconds=1.5)
with gf.Session(gf.Cluster.local(workers=1), ops=["tests.faults.hazards"], trial=False,
                checkpoint=sys.argv[1]) as s:
    print("at", float(s.get(count)), s.step, flush=True)
    s.run(step)
    if sys.argv[2] == "between":
        print("now", flush=True)
        time.sleep(30)
    if sys.argv[2] == "within":
        s.run(nap)
        print("now", flush=True)
        s.run([step, nap])
        time.sleep(30)
"""
    for how, at in (("between", "at 0.0 0"), ("within", "at 1.0 1"), ("look", "at 3.0 4")):
        process = script(text, str(tmp_path / "c"), how)
        assert process.line("at") == at
        if how != "look":
            process.line("now")
            time.sleep(0.5)
            process.send(signal.SIGTERM)
        assert process.wait(20.0) == 0, process.describe_output()


def test_a_handler_of_the_users_own_stays_and_ours_goes_with_the_session(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    heard: list[int] = []
    try:
        for place in ("a", "b"):
            with gf.Session(checkpoint=tmp_path / place):
                assert signal.getsignal(signal.SIGTERM) != before
            assert signal.getsignal(signal.SIGTERM) == before
        first, second = (gf.Session(checkpoint=tmp_path / place) for place in ("a", "b"))
        first.close()
        second.close()
        assert signal.getsignal(signal.SIGTERM) == before, "in whatever order they are closed"
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        with gf.Session(checkpoint=tmp_path / "a"):
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_session_with_checkpoints_that_is_forgotten_goes_and_the_signal_is_not_its_business(
    tmp_path: Path,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        forgotten = gf.Session(gf.Cluster.local(workers=1), checkpoint=tmp_path / "a")
        life = weakref.ref(forgotten._life)
        workers = pids(forgotten)
        forgotten.run_async(gf.constant(1.0)).result()
        del forgotten
        gc.collect()
        assert life() is None and have_ended(workers, 5.0)
        with gf.Session(checkpoint=tmp_path / "b"):
            pass
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)


MOMENTS = """
import logging, os, signal, sys, threading, time, numpy as np, graphflow as gf
how, folder = sys.argv[1:]
count = gf.variable(np.zeros((), "float32"), name="count")
step = gf.assign(count, count + 1.0)
own = threading.RLock()

def slow(call):
    def late(*given, **more):
        time.sleep(0.2)
        with own:
            return call(*given, **more)
    return late

def told(call):
    def first(*given, **more):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        return call(*given, **more)
    return first

with gf.Session(checkpoint=folder, every="1h") as s:
    s.run(step)
    if how == "get":
        s._state.get = told(s._state.get)
        s.get(count)
    if how == "set":
        s._recovery.set = told(s._recovery.set)
        s.set(count, 5.0)
    if how == "save":
        s._state.values = told(s._state.values)
        s.save(folder + "-other")
    if how == "thread":
        threading.Thread(target=lambda: [s.run(step) for _ in iter(int, 1)], daemon=True).start()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(30)
    if how == "futures":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        for future in [s.run_async(step) for _ in range(100_000)]:
            future.result()
    if how in ("waiting", "logging", "own"):  # for one of those who waits for what is held here
        logging.getLogger("graphflow").setLevel("INFO")
        logging.getLogger("graphflow").addHandler(handler := logging.StreamHandler())
        s._steps.run_cached = slow(s._steps.run_cached)
        futures = [s.run_async(step) for _ in range(5)]
        locks = {"waiting": futures[4]._condition, "logging": handler.lock, "own": own}
        while s.step < 2:
            time.sleep(0.01)
        with locks[how]:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        time.sleep(30)
    if how == "inner":
        with gf.Session(checkpoint=folder + "-other", every="1h") as inner:
            inner._runs_cached, inner._steps.run = False, told(inner._steps.run)
            inner.run(step)
    if how == "outer":
        with gf.Session(checkpoint=folder + "-other", every="1h"):
            s._runs_cached, s._steps.run = False, told(s._steps.run)
            s.run(step)
    if how == "close":
        s._recovery.close = told(s._recovery.close)
    if how in ("closing", "failing"):  # when the last checkpoint is there, or none is written
        s.save()
        s._life.hosts.close = told(s._life.hosts.close)
    if how == "failing":
        raise ValueError
print("goes on", flush=True)
"""


@pytest.mark.every(3)
@pytest.mark.fault(10)
@pytest.mark.parametrize(
    "how",
    [
        "get", "set", "save", "thread", "futures", "waiting", "logging", "own", "inner", "outer",
        "close", "closing", "failing",
    ],
)  # fmt: skip
def test_a_signal_at_any_moment_ends_the_process_with_a_checkpoint(
    how: str, script: Callable[..., Script], tmp_path: Path
) -> None:
    process = script(MOMENTS, how, str(tmp_path / "c"))
    assert process.wait(30.0) == 0, process.describe_output()
    assert "goes on" not in process.lines
    with gf.Session(checkpoint=tmp_path / "c") as s:
        assert s.step >= 1


OPENING = """
import os, signal, sys, time, graphflow as gf
from contextlib import ExitStack
from graphflow.runtime.client import worker_membership as membership
from graphflow.runtime.launch import local
cluster, folder, how = sys.argv[1:]
count = gf.variable(0.0, name="count")
where = gf.Cluster.local(workers=2, threads=1) if cluster == "local" else cluster

def told(kind, name):
    call = getattr(kind, name)
    def first(*given, **more):
        found = call(*given, **more)
        if os.path.isdir(folder):
            print("told", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        return found
    setattr(kind, name, first)

with ExitStack() as held:
    if how == "second":
        outer = held.enter_context(gf.Session(checkpoint=folder + "-outer", every="1h"))
        outer.run(gf.assign(count, count + 1.0))
    if how == "forked":
        told(local.LocalWorker, "__init__")
    if how == "met":
        told(membership.WorkerMembership, "_connect")
    print("opens", flush=True)
    s = held.enter_context(gf.Session(where, checkpoint=folder, trial=False))
    print("open", flush=True)
    s.run(count)
    time.sleep(30)
"""


@pytest.mark.every(2)
@pytest.mark.fault(10)
@pytest.mark.parametrize(
    "how",
    ["waits", "met", *(pytest.param(how, marks=pytest.mark.slow) for how in ("second", "forked"))],
)  # slow: processes start one after the other
def test_a_session_that_is_being_opened_waits_for_nobody_any_more(
    how: str, script: Callable[..., Script], workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    cluster = "local"
    if how in ("waits", "second"):  # for a worker that is not there
        cluster = str(cluster_file(tmp_path, [workers(1)[0].address, "tcp://127.0.0.1:9"]))
    process = script(OPENING, cluster, str(tmp_path / "c"), how)
    process.line("opens")
    if how in ("waits", "second"):
        time.sleep(1.0)
        at = process.send(signal.SIGTERM)
    else:
        process.line("told")
        at = time.monotonic()
    assert process.wait(20.0) == 0, process.describe_output()
    took(10, f"ended while it opened: {how}", time.monotonic() - at)
    assert time.monotonic() - at < 5.0
    assert "open" not in process.lines and "Traceback" not in process.describe_output()
    if how == "second":
        with gf.Session(checkpoint=tmp_path / "c-outer") as s:
            assert s.step == 1


@pytest.mark.every(2)
@pytest.mark.fault(10)
@pytest.mark.parametrize("stay", [1, 0], ids=["one stays", "nobody stays"])
def test_a_session_that_waits_for_a_lost_worker_waits_no_longer(
    stay: int, script: Callable[..., Script], workers: Callable[..., list[Worker]], tmp_path: Path,
    wanted: dict[int, str],
) -> None:  # fmt: skip
    found = workers(2)
    cluster = str(cluster_file(tmp_path, [worker.address for worker in found]))
    process = start(script, cluster, tmp_path / "c", "5", pause=0.05)
    process.line("step 7")
    for worker in found[stay:]:
        worker.process.kill()
    time.sleep(3.0)  # of the 20 s that it waits
    at = process.send(signal.SIGTERM)
    assert process.wait(15.0) == 0, process.describe_output()
    took(10, f"ended while it waited for a worker, {stay} left", time.monotonic() - at)
    assert time.monotonic() - at < 8.0 and "done" not in process.lines
    first = losses(process.lines)
    second = start(script, "here", tmp_path / "c", "1h")
    step = int(second.line("ready").split()[1])
    assert step > max(first) if stay else 5 <= step <= max(first) + 1
    assert second.wait() == 0
    told = first | losses(second.lines)
    assert told == {number: wanted[number] for number in told}
    for worker in found[:stay]:
        worker.send(signal.SIGTERM)
        assert worker.wait(5.0) == 0, "it keeps no session"


def test_two_sessions_of_a_process_both_write_their_last_checkpoint(tmp_path: Path) -> None:
    count = gf.variable(0.0, name="count")
    add = gf.assign(count, count + 1.0)
    with pytest.raises(SystemExit) as ended, gf.Session(checkpoint=tmp_path / "a") as a:
        a.run(add)
        with gf.Session(checkpoint=tmp_path / "b") as b:
            b.run(add)
            b.run(add)
            signal.raise_signal(signal.SIGTERM)
            time.sleep(5)
    assert ended.value.code == 0
    for place, steps in (("a", 1), ("b", 2)):
        with gf.Session(checkpoint=tmp_path / place) as s:
            assert s.step == steps == s.get(count)


AGAIN = """
import os, signal, sys, time, graphflow as gf
from contextlib import nullcontext
from graphflow.recovery import graceful_shutdown as draining
draining.GRACE_SECONDS = float(sys.argv[2])
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)
last = Last()  # goes with the modules, when Python has put handlers away
count = gf.variable(0.0, name="count")
try:
    with gf.Session(checkpoint=sys.argv[1]) as s:
        s.run(gf.assign(count, count + 1.0))
        with s._lock if sys.argv[3] == "within" else nullcontext():  # as in a step
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
            s.get(count)
        time.sleep(30)
finally:
    print("ends", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("ended", flush=True)
"""


@pytest.mark.fault(10)
@pytest.mark.parametrize(
    ("seconds", "how", "lines"),
    [
        ("10", "between", ["ends", "ended"]),
        ("10", "within", ["ends", "ended"]),
        ("0", "between", ["ends"]),
    ],
)
def test_a_signal_that_comes_again_while_the_process_ends_does_not_end_it_halfway(
    seconds: str, how: str, lines: list[str], script: Callable[..., Script], tmp_path: Path
) -> None:
    process = script(AGAIN, str(tmp_path / "c"), seconds, how)
    assert process.wait(30.0) == (0 if seconds == "10" else -signal.SIGTERM), (
        process.describe_output()
    )
    assert process.lines == lines


# Workers --------------------------------------------------------------------------------------


@pytest.mark.fault(10)
def test_a_local_worker_that_is_told_to_end_is_replaced(
    tmp_path: Path, curves: dict[int, list[Any]]
) -> None:
    ended: list[int] = []

    def before(number: int) -> None:
        if number in (6, 13):
            ended.append(pids(s)[number % 2])
            os.kill(ended[-1], signal.SIGTERM)
        time.sleep(0.02)

    with local(checkpoint=tmp_path / "c", every="1h") as s:
        assert train(s, Model(2), before) == curves[2]
        assert not set(ended) & set(pids(s))
        assert have_ended(ended, 5.0)


@pytest.mark.fault(10)
def test_a_worker_that_is_told_to_end_has_the_state_saved_and_ends_well(
    workers: Callable[..., list[Worker]], tmp_path: Path, curves: dict[int, list[Any]]
) -> None:
    found = workers(2)

    def before(number: int) -> None:
        if number == 9:
            found[1].send(signal.SIGTERM)
            found[1].wait(15.0)  # the session is idle, and lets it go all the same

    cluster = cluster_file(tmp_path, [worker.address for worker in found])
    with gf.Session(cluster, trial=False, checkpoint=tmp_path / "c", every="1h", rejoin=1.0) as s:
        assert train(s, Model(2), before) == curves[2]
        assert len(s.cluster.workers) == 1
    assert found[1].process.returncode == 0


@pytest.mark.fault(10)
def test_a_worker_that_is_told_to_end_does_not_wait_for_a_session_that_cannot_save(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    """It ends after the step that runs, and not before."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # workers respect that tests have nohup
    try:
        found = workers(2, "--allow-ops", "tests.faults.hazards")
    finally:
        signal.signal(signal.SIGHUP, before)
    cluster = cluster_file(tmp_path, [worker.address for worker in found])
    with gf.device("/worker:1"):
        nap = hazards.sleep(gf.constant(np.ones(3, "float32")), seconds=1.0)
    with gf.Session(cluster, trial=False, ops=["tests.faults.hazards"]) as s:
        s.run(nap)
        at = time.monotonic()
        timer = threading.Timer(0.3, found[1].send, (signal.SIGHUP,))  # its terminal was closed
        timer.start()
        assert s.run(nap).tolist() == [1.0, 1.0, 1.0]
        assert found[1].wait(10.0) == 0
        assert time.monotonic() - at < 6.0
        timer.join()
        with pytest.raises(WorkerLost, match=r"asked to end|has ended") as failure:
            s.run(nap)
        assert failure.value.worker == 1


@pytest.mark.every(2)
@pytest.mark.fault(10)
@pytest.mark.parametrize("shared", ["on", "off"])
def test_a_worker_that_is_interrupted_in_a_step_is_missed_at_once(
    workers: Callable[..., list[Worker]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shared: str,
) -> None:
    """By Ctrl-C at its own terminal; what it is told travels by a lane, or by TCP."""
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", shared)
    (worker,) = workers(1, "--allow-ops", "tests.faults.hazards")
    lost, seconds = signal_in_step(worker, tmp_path, signal.SIGINT)
    assert re.search(r"worker 0 .* it was asked to end", str(lost))
    assert seconds < 2.0
    assert worker.wait(10.0) == 0


@pytest.mark.fault(1)
def test_a_worker_by_address_that_is_killed_is_missed_at_once(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    (worker,) = workers(1, "--allow-ops", "tests.faults.hazards")
    lost, seconds = signal_in_step(worker, tmp_path, signal.SIGKILL)
    took(1, "found, a worker by address", seconds)
    assert (lost.worker, lost.reason) == (0, "killed")
    assert lost.step is not None and lost.ended
    again = Worker(worker.address)  # its address is free for the next one
    try:
        assert again.ready().address == worker.address
    finally:
        again.end()


def signal_in_step(
    worker: Worker, folder: Path, number: signal.Signals
) -> tuple[WorkerLost, float]:
    """How a session misses a worker that gets a signal in a step, and after how many seconds."""
    cluster = cluster_file(folder, [worker.address])
    nap = hazards.sleep(gf.constant(np.ones(3, "float32")), seconds=4.0)
    with gf.Session(cluster, trial=False, ops=["tests.faults.hazards"]) as s:
        timer = threading.Timer(0.5, worker.send, (number,))
        timer.start()
        at = time.monotonic()
        with pytest.raises(WorkerLost) as failure:
            s.run(nap)
        seconds = time.monotonic() - at - 0.5
        timer.join()
    return failure.value, seconds


def test_a_worker_without_sessions_ends_at_once(workers: Callable[..., list[Worker]]) -> None:
    (worker,) = workers(1)
    at = worker.send(signal.SIGTERM)
    assert worker.wait(10.0) == 0
    assert time.monotonic() - at < 5.0


# The client's end -----------------------------------------------------------------------------


@pytest.mark.fault(7)
def test_another_process_takes_up_what_a_killed_client_left(
    workers: Callable[..., list[Worker]], script: Callable[..., Script], tmp_path: Path,
    wanted: dict[int, str],
) -> None:  # fmt: skip
    found = workers(2)
    cluster = str(cluster_file(tmp_path, [worker.address for worker in found]))
    told: dict[int, str] = {}
    for last in (9, 23):
        process = start(script, cluster, tmp_path / "c", "5", pause=0.05)
        process.line(f"step {last}")
        process.send(signal.SIGKILL)
        process.wait()
        told |= losses(process.lines)
    with record_duration(7, "taken up by another process, from its start"):
        process = start(script, cluster, tmp_path / "c", "5")
        assert int(process.line("ready").split()[1]) >= 15
    assert process.wait() == 0, process.describe_output()
    assert told | losses(process.lines) == wanted
    assert all(is_alive(worker.pid) for worker in found)
    session = json.loads((tmp_path / "c" / "session.json").read_text())
    assert session["epoch"] == 3


@pytest.mark.slow  # a lease of half a minute
@pytest.mark.fault(7)
def test_what_a_killed_client_left_is_parked_and_ends_with_its_lease(
    workers: Callable[..., list[Worker]], script: Callable[..., Script], tmp_path: Path
) -> None:
    (worker,) = workers(1)
    cluster = str(cluster_file(tmp_path, [worker.address]))
    text = TRAINING.replace('Model(1 if cluster == "here" else 2)', "Model(1)")
    process = script(text, cluster, str(tmp_path / "c"), "5", "1000", "0.01")
    process.line("step 9")
    killed = process.send(signal.SIGKILL)
    process.wait()

    def sessions() -> list[Any]:
        asked = Running([sys.executable, "-m", "graphflow", "status", worker.address, "--json"])
        try:
            assert asked.wait() == 0, asked.describe_output()
            (report,) = json.loads("".join(asked.lines))["workers"]
            found: list[Any] = report["sessions"]
            return found
        finally:
            asked.end()

    seen = []
    while (left := sessions()) and time.monotonic() < killed + 60.0:
        seen.append(left[0]["parked"])
        time.sleep(1.0)
    assert left == [] and seen[-1]
    took(7, "parked, and ended with its lease", time.monotonic() - killed)
    assert is_alive(worker.pid), "it serves others"


@SLOW
@pytest.mark.fault(2, 7)
def test_a_client_that_was_thought_dead_is_fenced(
    workers: Callable[..., list[Worker]], script: Callable[..., Script], tmp_path: Path
) -> None:
    found = workers(1)
    cluster = str(cluster_file(tmp_path, [worker.address for worker in found]))
    text = TRAINING.replace('Model(1 if cluster == "here" else 2)', "Model(1)")
    first = script(text, cluster, str(tmp_path / "c"), "2", "1000", "0.05")
    first.line("step 6")
    stop(first.pid)
    second = script(text, cluster, str(tmp_path / "c"), "2", "30", "0")
    assert second.wait() == 0, second.describe_output()
    kept = sorted(p.name for p in (tmp_path / "c").iterdir())
    first.send(signal.SIGCONT)
    assert first.wait(60.0) != 0
    assert "StaleEpoch" in first.describe_output()
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == kept


@pytest.mark.slow  # several clients, one after the other
@pytest.mark.fault(9)
def test_an_interrupted_step_leaves_a_session_that_recovers_as_before(tmp_path: Path) -> None:
    from tests.faults import hazards

    count = gf.variable(0.0, name="count")
    add = gf.assign(count, count + 1.0)
    nap = hazards.sleep(gf.constant([1.0, 2.0]), seconds=3.0)
    with local(ops=["tests.faults.hazards"], checkpoint=tmp_path / "c", every="1h") as s:
        s.run(add)
        assert interrupt_after(lambda: s.run(nap), 0.5) < 2.5
        before = float(s.get(count))
        s.run(add)
        os.kill(pids(s)[0], signal.SIGKILL)
        os.kill(pids(s)[1], signal.SIGKILL)
        assert s.run(add) == before + 2

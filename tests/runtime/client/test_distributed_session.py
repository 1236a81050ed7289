"""Sessions over real worker processes: state, errors, faults, several sessions, traces."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import (
    CheckError,
    DeviceError,
    FeedError,
    OpError,
    PlanError,
    SessionError,
    StateLost,
    StepTimeout,
    WorkerLost,
)
from graphflow.runtime.protocol.coordinator import CoordinatorMachine
from graphflow.runtime.wire.array_codec import BorrowedBuffer, decode_small
from tests import loaded
from tests.faults import hazards
from tests.runtime.workers import serve_worker

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def session() -> Iterator[gf.Session]:
    """Two workers for the tests that harm nobody."""
    with gf.Session(gf.Cluster.local(workers=2, threads=1)) as s:
        yield s


def compute_across_workers(x: gf.Tensor) -> gf.Tensor:
    """x * 2 on the first worker, plus 1 on the second, minus 3 on the first."""
    with gf.device("/worker:0"):
        doubled = x * 2.0
    with gf.device("/worker:1"):
        more = doubled + 1.0
    with gf.device("/worker:0"):
        return more - 3.0


def test_the_client_carries_no_tensor_that_two_workers_exchange(
    session: gf.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over edges, in collectives and in branches, in single steps and in many."""
    carried = 0
    handle = CoordinatorMachine.handle

    def count_carried_bytes(machine: CoordinatorMachine, event: Any, now: float) -> list[Any]:
        nonlocal carried
        actions = handle(machine, event, now)
        for each in (event, *actions):
            small = getattr(getattr(each, "message", None), "small", ())
            carried += sum(decode_small(array)[1].nbytes for array in small)
            data = getattr(each, "data", None)
            if isinstance(data, BorrowedBuffer):  # of unknown size, and only arrays are lent
                carried += 4 * size
            elif data is not None:
                carried += memoryview(data).nbytes
        return actions

    size = 300_000
    with gf.device("/worker:0"):
        start = gf.variable(np.ones(size, "float32"), name="carried")
        first = gf.tanh(start)
    with gf.device("/worker:1"):
        second = first * 2.0
    reduced = gf.parallel.all_reduce([first, second], algorithm="ring")
    ends = []
    for worker, tensor in enumerate((*reduced, first, second)):
        with gf.device(f"/worker:{worker % 2}"):
            ends.append(gf.sum(tensor))
    with gf.device("/worker:0"):
        ends.append(gf.sum(gf.cond(ends[3] > 0, lambda: second * 3.0, lambda: first)))
    session.run(ends)
    monkeypatch.setattr(CoordinatorMachine, "handle", count_carried_bytes)
    session.run(ends)
    list(session.run(ends, itertools.repeat({}), steps=4))
    assert carried <= 5 * 4 * len(ends)  # the sums
    session.run(second)
    assert carried >= 4 * size  # what is fetched is counted


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64", "complex128"])
def test_tensors_of_every_float_and_complex_dtype_travel_and_are_kept(
    session: gf.Session, dtype: str
) -> None:
    x = gf.placeholder(dtype, (None,))
    with gf.device("/worker:0"):
        v = gf.variable(gf.init.full((3,), 0.5, dtype), name=f"v_{dtype}")
        y = x + v
    with gf.device("/worker:1"):
        z = gf.exp(y) * (1j if "complex" in dtype else 1.0)
    given = np.arange(3).astype(dtype)
    first, second = session.run([z, gf.assign(v, x)], {x: given})
    wide = (given + np.asarray(0.5, dtype)).astype("complex128" if "complex" in dtype else "f8")
    wanted = np.exp(wide) * (1j if "complex" in dtype else 1.0)
    assert first.dtype == second.dtype == dtype
    np.testing.assert_allclose(first.astype(wanted.dtype), wanted, rtol=2.0**-7)
    assert session.get(v).tobytes() == given.tobytes()


SLOW = ["tests.faults.hazards"]


def slow_step() -> gf.Tensor:
    """A tensor that takes the second worker many seconds, and the machine nothing; of a session
    with the ops of SLOW."""
    with gf.device("/worker:1"):
        y = gf.variable(np.ones(3, "float32"))
        for _ in range(600):
            y = hazards.sleep(y, seconds=0.05)
        return gf.sum(y)


def test_tensors_move_between_workers_and_back(session: gf.Session) -> None:
    x = gf.placeholder("float32", (None, 3))
    for rows in (1, 5, 0, 1000):
        value = np.arange(rows * 3, dtype="float32").reshape(rows, 3)
        assert np.array_equal(session.run(compute_across_workers(x), {x: value}), value * 2 - 2)


def test_a_large_tensor_crosses_whole(session: gf.Session) -> None:
    x = gf.placeholder("float32", (None,))
    value = np.random.default_rng(0).random(3_000_001, "float32")
    assert np.array_equal(session.run(compute_across_workers(x), {x: value}), value * 2 + 1 - 3)


def test_state_lives_on_its_worker_and_is_read_and_set_from_the_client(session: gf.Session) -> None:
    with gf.device("/worker:1"):
        counter = gf.variable(np.zeros(4, "float32"))
    step = gf.assign(counter, counter + 1.0)
    for expected in (1, 2, 3):
        assert session.run(step).tolist() == [expected] * 4
    assert session.get(counter).tolist() == [3] * 4
    session.set(counter, np.arange(4.0))
    assert session.run([counter, step])[0].tolist() == [0, 1, 2, 3]
    assert session.get(counter).tolist() == [1, 2, 3, 4]
    assert session.plan(step).placement["variable"].startswith("/worker:1")


def test_a_swap_over_two_workers_reads_the_old_values(session: gf.Session) -> None:
    with gf.device("/worker:0"):
        a = gf.variable(np.ones(3, "float32"))
    with gf.device("/worker:1"):
        b = gf.variable(np.full(3, 2.0, "float32"))
    session.run([gf.assign(a, b), gf.assign(b, a)])
    assert session.get(a).tolist() == [2] * 3 and session.get(b).tolist() == [1] * 3


def test_an_op_that_fails_on_a_worker_names_node_line_and_remote_traceback(
    session: gf.Session,
) -> None:
    labels = gf.placeholder("int64", (None,))
    with gf.device("/worker:0"):
        counter = gf.variable(np.zeros((), "float32"))
    with gf.device("/worker:1"):
        loss = gf.mean(gf.nn.cross_entropy(gf.zeros((2, 3)), labels, name="bad_labels"))
    fetches = [loss, gf.assign(counter, counter + 1.0)]
    with pytest.raises(OpError) as failure:
        session.run(fetches, {labels: [0, 7]})
    text = str(failure.value)
    assert "bad_labels" in text and f"{__file__}:" in text and "/worker:1/cpu:0" in text
    assert "Traceback" in "".join(failure.value.__notes__)
    assert session.get(counter) == 0, "a step that fails changes nothing, on any worker"
    session.run(fetches, {labels: [0, 1]})
    assert session.get(counter) == 1, "and the session goes on"


def test_a_false_check_on_a_worker_is_a_check_error(session: gf.Session) -> None:
    x = gf.placeholder("float32", (3,))
    with gf.device("/worker:1"):
        checked = gf.debug.check(x, x > 0.0, "must be positive") * 2.0
    with pytest.raises(CheckError, match="must be positive"):
        session.run(checked, {x: [1, -1, 1]})
    assert session.run(checked, {x: [1, 2, 3]}).tolist() == [2, 4, 6]


def test_bad_feeds_and_pins_fail_before_the_step_and_the_session_goes_on(
    session: gf.Session,
) -> None:
    x = gf.placeholder("float32", (None, 3))
    y = compute_across_workers(x)
    with pytest.raises(FeedError):
        session.run(y, {x: np.zeros((2, 4), "float32")})
    with gf.device("/worker:7"):
        nowhere = x + 1.0
    with pytest.raises(DeviceError, match=r"worker:7"):
        session.run(nowhere, {x: np.zeros((1, 3), "float32")})
    with gf.device("gpu"):
        pinned = x + 1.0
    with pytest.raises(DeviceError, match="gpu"):
        session.run(pinned, {x: np.zeros((1, 3), "float32")})
    assert session.run(y, {x: np.zeros((1, 3), "float32")}).tolist() == [[-2] * 3]


def test_futures_come_in_the_order_of_their_calls(session: gf.Session) -> None:
    with gf.device("/worker:0"):
        counter = gf.variable(np.zeros((), "float32"))
    step = gf.assign(counter, counter + 1.0)
    futures = [session.run_async(step) for _ in range(20)]
    assert [float(f.result(30)) for f in futures] == list(range(1, 21))


def test_a_checkpoint_of_two_workers_continues_in_this_process(
    session: gf.Session, tmp_path: Path
) -> None:
    with gf.device("/worker:0"):
        a = gf.variable(np.ones(3, "float32"), name="saved_a")
    with gf.device("/worker:1"):
        b = gf.variable(np.ones(3, "float32"), name="saved_b")
    step = [gf.assign(a, a + b), gf.assign(b, b * 2.0)]
    session.run(step)
    session.save(tmp_path / "c")
    plain_a = gf.variable(np.zeros(3, "float32"), name="saved_a")
    plain_b = gf.variable(np.zeros(3, "float32"), name="saved_b")
    with gf.Session() as here:
        here.load(tmp_path / "c")
        assert here.run([plain_a, plain_b])[0].tolist() == [2] * 3
        assert here.get(plain_b).tolist() == [2] * 3


def test_a_trace_has_a_track_for_each_device_and_link(session: gf.Session, tmp_path: Path) -> None:
    x = gf.placeholder("float32", (None, 3))
    y = compute_across_workers(x)
    feed = {x: np.zeros((100, 3), "float32")}
    with session.trace(tmp_path / "trace.json"):
        for _ in range(3):
            session.run(y, feed)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    text = json.dumps(events)
    assert "/worker:0/cpu:0" in text and "/worker:1/cpu:0" in text
    transfers = [e for e in events if e["ph"] == "X" and "bytes" in e.get("args", {})]
    assert len(transfers) >= 6 and all(e["dur"] >= 0 for e in transfers)
    plan = session.plan(y)
    assert plan.measured is not None and plan.measured.makespan > 0
    plan.save(tmp_path / "plan.svg")


def test_a_saved_plan_places_a_session_and_another_graphs_plan_is_refused(tmp_path: Path) -> None:
    x = gf.placeholder("float32", (None, 8), name="x")
    w = gf.variable(np.eye(8, dtype="float32"), name="w")
    y = gf.nn.relu(x @ w)
    cluster = gf.Cluster.local(workers=2, threads=1)
    plan = gf.plan(y, cluster, shapes={x: (4, 8)})
    plan.save(tmp_path / "plan.json")
    loaded = gf.Plan.load(tmp_path / "plan.json")
    with gf.Session(cluster, plan=loaded) as s:
        value = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
        with pytest.raises(PlanError):
            s.run(y + 1.0, {x: value})
        assert np.array_equal(s.run(y, {x: value}), np.maximum(value, 0))
        assert s.plan(y).placement == plan.placement
        assert np.array_equal(s.run(y + 1.0, {x: value}), np.maximum(value, 0) + 1)


def test_a_killed_worker_is_named_with_the_step_within_five_seconds() -> None:
    with gf.Session(gf.Cluster.local(workers=2, threads=1), ops=SLOW) as s:
        warm = compute_across_workers(gf.constant(np.ones(3, "float32")))
        s.run(warm)
        total = slow_step()
        victim = s._life.hosts.pids[1]
        timer = threading.Timer(1.5, os.kill, (victim, signal.SIGKILL))
        timer.start()
        start = time.monotonic()
        with pytest.raises(WorkerLost) as failure:
            s.run(total)
        assert time.monotonic() - start < 1.5 + 5.0
        timer.join()
        assert "worker 1" in str(failure.value) and "step" in str(failure.value)
        with pytest.raises(StateLost, match="checkpoint"):
            s.run(warm)


def test_a_step_past_its_deadline_is_a_step_timeout() -> None:
    with gf.Session(gf.Cluster.local(workers=2, threads=1), deadline=2.0, ops=SLOW) as s:
        total = slow_step()
        with gf.device("/worker:0"):
            waiting = total * 2.0
        start = time.monotonic()
        with pytest.raises(StepTimeout):
            s.run(waiting)
        assert time.monotonic() - start < 12.0


def test_no_worker_outlives_its_session() -> None:
    s = gf.Session(gf.Cluster.local(workers=2, threads=1))
    pids = list(s._life.hosts.pids)
    s.close()
    s.close()
    deadline = time.monotonic() + 10
    while any(map(_is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_is_alive, pids))
    with pytest.raises(SessionError, match="closed"):
        s.run(gf.constant(1.0))


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


INTERRUPTED = """
import os, signal, threading, numpy as np, graphflow as gf
with gf.Session(gf.Cluster.local(workers=2, threads=1)) as s:
    with gf.device("/worker:1"):
        w = gf.variable(np.zeros((), "float32"))
        big = gf.variable(np.full((1500, 1500), 1e-3, "float32"))
        y = big
        for _ in range(300):
            y = y @ big
    step = [gf.assign(w, w + 1.0), gf.sum(y)]
    threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        s.run(step)
        print("finished")
    except KeyboardInterrupt:
        print("interrupted", float(s.get(w)), float(s.run(gf.assign(w, w + 1.0))))
"""


@pytest.mark.slow  # each session calibrates the workers by address
def test_ctrl_c_cancels_the_step_and_leaves_the_session_usable() -> None:
    done = loaded.run_python(["-c", INTERRUPTED], {**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.split() == ["interrupted", "0.0", "1.0"], done.stdout + done.stderr


def test_what_a_worker_prints_reaches_the_users_terminal() -> None:
    script = (
        "import graphflow as gf\n"
        "with gf.Session(gf.Cluster.local(workers=2)) as s:\n"
        "    with gf.device('/worker:1'):\n"
        "        s.run(gf.debug.print(gf.ones((2,)) * 3.0, 'seen there'))\n"
    )
    done = loaded.run_python(["-c", script], {**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "seen there" in done.stdout and "3." in done.stdout


@pytest.mark.slow  # each session calibrates the workers by address
def test_two_sessions_on_one_cluster_do_not_share_state(tmp_path: Path) -> None:
    with serve_worker() as one, serve_worker() as other:
        text = "".join(f'[[workers]]\naddress = "{address}"\n' for address in (one, other))
        (tmp_path / "cluster.toml").write_text(text)
        with gf.device("/worker:1"):
            counter = gf.variable(np.zeros((), "float32"), name="counter")
        step = gf.assign(counter, counter + 1.0)
        first = gf.Session(tmp_path / "cluster.toml")
        with first, gf.Session(tmp_path / "cluster.toml") as second:
            assert [float(first.run(step)) for _ in range(3)] == [1, 2, 3]
            assert [float(second.run(step)) for _ in range(2)] == [1, 2]
            assert float(first.get(counter)) == 3
        with gf.Session(tmp_path / "cluster.toml") as third:
            assert float(third.run(step)) == 1, "a closed session leaves nothing behind"


FORKED = """
import os, signal, sys, numpy as np, graphflow as gf
from graphflow.errors import SessionError
def child(session):
    if os.fork() == 0:
        signal.alarm(10)  # a hang would be killed
        try:
            session.run(y, feed)
        except SessionError as error:
            print("fork" in str(error), flush=True)
        sys.exit(0)  # runs what is registered for the exit, and leaves the with block
    assert os.wait()[1] == 0
x = gf.placeholder("float32", (None, None))
y = x @ x
feed = {x: np.ones((500, 500), "float32")}
for cluster in (gf.Cluster.here(threads=2), gf.Cluster.local(workers=1, threads=1)):
    with gf.Session(cluster) as s:
        s.run(y, feed)
        child(s)
        print(float(s.run(y, feed)[0, 0]), flush=True)
"""


def test_a_fork_is_told_that_the_session_is_its_parents_and_harms_nothing() -> None:
    done = loaded.run_python(["-c", FORKED], {**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.split() == ["True", "500.0"] * 2, done.stdout + done.stderr


def test_an_error_in_the_block_does_not_wait_for_the_step_of_a_future() -> None:
    start = time.monotonic()
    with (
        pytest.raises(ZeroDivisionError),
        gf.Session(gf.Cluster.local(workers=2, threads=1), ops=SLOW) as s,
    ):
        future = s.run_async(slow_step())
        while not future.running():
            time.sleep(0.01)
        time.sleep(2.0)
        start = time.monotonic()
        raise ZeroDivisionError
    assert time.monotonic() - start < 5.0
    with pytest.raises(SessionError, match="cancelled"):
        future.result(0)

"""What becomes of a session whose processes die, freeze, crash, block or are told to end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import OpError, PoisonedTask, StateLost, StepTimeout, WorkerLost
from tests.faults import hazards
from tests.faults.running import Script, Worker, cluster_file, have_ended, stop, took

DEAD = 5.0
"""Seconds in which a dead, frozen or unreachable worker is found."""
OPS = ["tests.faults.hazards"]
ONES = np.ones(3, "float32")


@contextmanager
def session(workers: int = 2, **options: Any) -> Iterator[gf.Session]:
    with gf.Session(
        gf.Cluster.local(workers=workers, threads=1), ops=OPS, trial=False, **options
    ) as s:
        yield s


def pids(s: gf.Session) -> list[int]:
    found: list[int] = s._life.hosts.pids  # type: ignore[attr-defined]
    return found


def counter(worker: int = 0) -> tuple[gf.Tensor, gf.Tensor]:
    """A variable, and the step that adds one to it."""
    with gf.device(f"/worker:{worker}"):
        count = gf.variable(np.zeros((), "float32"), name=f"count{worker}")
        return count, gf.assign(count, count + 1.0)


@contextmanager
def send_signal_later(number: int, pid: int, after: float = 0.5) -> Iterator[list[float]]:
    """Signals a process a little later; when that was."""
    at: list[float] = []

    def strike() -> None:
        at.append(time.monotonic())
        os.kill(pid, number)

    timer = threading.Timer(after, strike)
    timer.start()
    try:
        yield at
    finally:
        timer.join()


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)],  # silent for 5 s
)
@pytest.mark.fault(1, 2)
def test_a_worker_that_dies_or_freezes_in_mid_step_is_lost_within_five_seconds(
    number: int,
) -> None:
    with gf.device("/worker:1"):
        nap = hazards.sleep(gf.constant(ONES), seconds=8.0)
    with pytest.raises(WorkerLost) as left, session() as s:
        s.warmup(nap)  # so that the step begins at once
        with send_signal_later(number, pids(s)[1]) as at, pytest.raises(WorkerLost) as failure:
            s.run(nap)
        took(1 if number == signal.SIGKILL else 2, "found", time.monotonic() - at[0])
        assert time.monotonic() - at[0] < DEAD + 1.0
        assert failure.value.worker == 1 and f"step {s.step}" in str(failure.value)
        assert failure.value.step == s.step == 0
        if number == signal.SIGKILL:
            assert time.monotonic() - at[0] < DEAD / 2 and "signal 9" in str(failure.value)
        with pytest.raises(StateLost, match="checkpoint"):
            s.run(nap)
        raise failure.value
    assert "checkpoint=" in "".join(left.value.__notes__), "what to do about it"


@pytest.mark.fault(1)
def test_errors_logs_and_traces_name_the_step_by_its_number_in_the_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever else has run on the workers: trials, failed steps, steps of a state given up."""
    count, step = counter()
    x = gf.placeholder("float32", (3,), name="x")
    with gf.device("/worker:1"):
        failing = hazards.fail(x, name="failing")
        nap = hazards.sleep(gf.constant(ONES), seconds=8.0)
    with session(replan="auto") as s:
        for _ in range(3):
            with pytest.raises(OpError):
                s.run([failing, step], {x: ONES})
            s.run(step)
        s.save(tmp_path / "c")
        list(s.run(step, [{}] * 5, steps=5))
        s.load(tmp_path / "c")
        with s.trace() as trace:
            s.run([step, count])
        assert [each.number for each in trace.steps] == [3] and s.step == 4
        caplog.clear()
        with send_signal_later(signal.SIGKILL, pids(s)[1]), pytest.raises(WorkerLost) as failure:
            s.run([nap, step])
        assert failure.value.step == s.step == 4 and "step 4" in str(failure.value)
        (told,) = [r.getMessage() for r in caplog.records if "step.aborted" in r.getMessage()]
        assert "step=4" in told


@pytest.mark.fault(3)
def test_an_op_that_segfaults_is_named_with_node_and_line() -> None:
    x = gf.placeholder("float32", (3,), name="x")
    with gf.device("/worker:1"):
        broken = hazards.crash(x * 2.0, name="broken")
    with session() as s:
        start = time.monotonic()
        with pytest.raises(WorkerLost) as failure:
            s.run(broken + 1.0, {x: ONES})
        took(3, "found and named, the first compilation included", time.monotonic() - start)
        assert time.monotonic() - start < DEAD + 1.0
    told = str(failure.value)
    assert "signal 11" in told and "hazards.crash 'broken'" in told and f"{__file__}:" in told


@pytest.mark.fault(3)
def test_an_op_that_segfaults_in_the_body_of_a_loop_is_named() -> None:
    with gf.device("/worker:1"):
        x = gf.constant(ONES)
        last = gf.while_loop(
            lambda state: state[0] < 3,
            lambda state: (state[0] + 1, hazards.crash(state[1], name="inside")),
            (0, x),
        )[1]
    with session() as s, pytest.raises(WorkerLost, match="'inside'"):
        s.run(last)


@pytest.mark.slow  # waits for frozen and for ended processes
@pytest.mark.fault(3)
def test_a_worker_by_address_tells_its_session_and_its_terminal_which_op_ended_it(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    (worker,) = workers(1, "--allow-ops", *OPS)
    x = gf.placeholder("float32", (3,), name="x")
    broken = hazards.crash(x, name="broken")
    with gf.Session(cluster_file(tmp_path, [worker.address]), ops=OPS) as s:
        start = time.monotonic()
        with pytest.raises(WorkerLost) as failure:
            s.run(broken, {x: ONES})
        took(3, "found, a worker by address", time.monotonic() - start)
        assert failure.value.worker == 0 and time.monotonic() - start < DEAD
        assert "hazards.crash 'broken' (made at" in failure.value.op
        assert failure.value.reason == "Segmentation fault" and failure.value.ended
    assert worker.wait() == -signal.SIGSEGV
    assert any("hazards.crash 'broken' (made at" in line for line in worker.errors), (
        worker.describe_output()
    )


@pytest.mark.fault(5)
def test_an_op_that_raises_is_told_within_a_second_with_node_line_and_remote_traceback() -> None:
    x = gf.placeholder("float32", (3,), name="x")
    count, step = counter()
    with gf.device("/worker:1"):
        failing = hazards.fail(x, name="failing")
    with session() as s:
        s.run(step)
        start = time.monotonic()
        with pytest.raises(OpError) as failure:
            s.run([failing, step], {x: ONES})
        took(5, "told", time.monotonic() - start)
        assert time.monotonic() - start < 2.0
        told = str(failure.value)
        assert "'failing'" in told and f"{__file__}:" in told and "/worker:1/cpu:0" in told
        assert "hazards.py" in "".join(failure.value.__notes__), "the remote traceback"
        assert float(s.get(count)) == 1.0, "the step changed nothing"
        assert float(s.run(step)) == 2.0, "and the session goes on"


@pytest.mark.fault(5)
def test_whatever_an_op_raises_is_an_error_of_that_op() -> None:
    """Not the interpreter's end, not text that cannot be sent, not a loss that is another's."""
    x = gf.placeholder("float32", (3,), name="x")
    with gf.device("/worker:1"):
        failing = {what: hazards.fail(x, what=what, name=what) for what in hazards.RAISED}
        cut = hazards.cut(x, name="cut")
    count, step = counter()
    with session() as s:
        for what, node in failing.items():
            with pytest.raises(OpError) as failure:
                s.run([node, step], {x: ONES})
            told = str(failure.value)
            assert type(failure.value) is OpError and f"'{what}' (made at {__file__}:" in told
            wanted = "LookupError from its message" if what == "Untold" else "told to\\ud800"
            assert wanted in told
        with pytest.raises(OpError, match=r"'cut'.*returned float32\(1,\), expected float32\(3,\)"):
            s.run(cut, {x: ONES})
        assert float(s.get(count)) == 0.0 and float(s.run(step)) == 1.0


@pytest.mark.slow  # longer than a peer may be silent
@pytest.mark.fault(6)
def test_an_op_that_holds_the_interpreter_is_a_timeout_and_no_death() -> None:
    count, step = counter(1)
    with gf.device("/worker:1"):
        held = hazards.hold(gf.constant(ONES), seconds=7.0)
    with session(deadline=6.0) as s:
        s.run(step)
        start = time.monotonic()
        with pytest.raises(StepTimeout, match=r"step 1 .*worker 1"):
            s.run([held, step])
        took(6, "told after the deadline of 6 s", time.monotonic() - start - 6.0)
        assert time.monotonic() - start < 6.0 + 2 * 0.5 + 1.0
        assert float(s.run(step)) == 2.0, "its worker lives, with what it holds"
        assert float(s.get(count)) == 2.0


@pytest.mark.fault(6)
def test_an_op_that_holds_the_interpreter_for_a_moment_is_a_timeout() -> None:
    count, step = counter(1)
    with gf.device("/worker:1"):
        held = hazards.hold(gf.constant(ONES), seconds=2.0)
    with session(deadline=1.0) as s:
        s.run(step)
        with pytest.raises(StepTimeout, match=r"step 1 .*worker 1"):
            s.run([held, step])
        time.sleep(1.0)
        assert float(s.run(step)) == 2.0
        assert float(s.get(count)) == 2.0


@pytest.mark.fault(6)
def test_whoever_keeps_a_chain_of_workers_waiting_is_named_with_its_edge() -> None:
    """The others wait in vain, too, and any of them may be the first to say so."""
    x = gf.placeholder("float32", (3,), name="x")
    with gf.device("/worker:0"):
        first = x * 2.0
        slow = hazards.sleep(first, seconds=2.0, name="slow")
    quick, late = first, slow
    for worker in (1, 2, 3):
        with gf.device(f"/worker:{worker}"):
            quick, late = gf.tanh(quick, name=f"q{worker}"), gf.tanh(late, name=f"l{worker}")
    with session(4, deadline=1.0) as s:
        with pytest.raises(StepTimeout, match=r"edge \d+ from /worker:0/cpu:0 \('slow'") as failure:
            s.run(late, {x: ONES})
        assert failure.value.worker == 0
        time.sleep(1.0)
        for _ in range(3):  # from the second on without messages
            s.run(quick, {x: ONES})
        stopped = pids(s)[1]
        stop(stopped)
        try:
            start = time.monotonic()
            with pytest.raises(
                StepTimeout, match=r"from /worker:1/cpu:0 \('q1', made at"
            ) as failure:
                s.run(quick, {x: ONES})
            took(
                6, "of a chain the one that keeps the others waiting", time.monotonic() - start - 1
            )
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert failure.value.worker == 1
        s.run(quick, {x: ONES})


INTERRUPTED = """
import time, numpy as np, graphflow as gf
from tests.faults import hazards
with gf.device("/worker:1"):
    count = gf.variable(np.zeros((), "float32"))
    step = gf.assign(count, count + 1.0)
    nap = hazards.sleep(gf.constant(np.ones(3, "float32")), seconds=2.5)
with gf.Session({cluster}, ops=["tests.faults.hazards"], trial=False) as s:
    s.run(step)
    print("napping", flush=True)
    try:
        s.run([step, nap])
    except KeyboardInterrupt:
        print("interrupted", time.monotonic(), flush=True)
    print("goes on", float(s.run(step)), flush=True)
"""


@pytest.mark.fault(9)
def test_ctrl_c_cancels_the_step_within_two_seconds_and_the_session_goes_on(
    script: Callable[..., Script],
) -> None:
    run = script(INTERRUPTED.format(cluster="gf.Cluster.local(workers=2, threads=1)"))
    run.line("napping")
    time.sleep(0.3)
    at = run.send(signal.SIGINT)
    interrupted = float(run.line("interrupted").split()[1]) - at
    took(9, "cancelled", interrupted)
    assert interrupted < 2.0
    assert run.line("goes on").split()[2] == "2.0"
    assert run.wait() == 0, run.describe_output()


REDUCING = """
import time, numpy as np, graphflow as gf
from tests.faults import hazards
late, xs = gf.placeholder("float32", ({size},)), []
for worker in range(2):
    with gf.device(f"/worker:{{worker}}"):
        x = gf.constant(np.full({size}, 1.0 + worker, "float32"))
        xs.append((x, x + hazards.sleep(late, seconds=2.5) if worker else x))
with gf.device("/worker:0"):
    count = gf.variable(np.zeros((), "float32"))
    step = gf.assign(count, count + 1.0)
quick = gf.parallel.all_reduce([x for x, _ in xs], "sum", {algorithm!r})
slow = gf.parallel.all_reduce([x for _, x in xs], "sum", {algorithm!r})
zeros = {{late: np.zeros({size}, "float32")}}
with gf.Session(
    gf.Cluster.local(workers=2, threads=1), ops=["tests.faults.hazards"], trial=False
) as s:
    s.run([step, *quick])
    print("reducing", flush=True)
    try:
        s.run([step, *slow], zeros)
    except KeyboardInterrupt:
        print("interrupted", time.monotonic(), flush=True)
    number, *sums = s.run([step, *quick])
    print("goes on", float(number), *(float(y.min()) for y in sums), flush=True)
"""


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("algorithm", "size", "shared"),
    [
        ("auto", 100, "on"),
        ("ring", 300_000, "off"),
        pytest.param("auto", 100, "off", marks=pytest.mark.slow),
        pytest.param("ring", 300_000, "on", marks=pytest.mark.slow),
    ],
)
@pytest.mark.fault(9)
def test_ctrl_c_while_a_worker_waits_in_a_collective_leaves_collectives_usable(
    script: Callable[..., Script],
    monkeypatch: pytest.MonkeyPatch,
    shared: str,
    algorithm: str,
    size: int,
) -> None:
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", shared)
    run = script(REDUCING.format(algorithm=algorithm, size=size))
    run.line("reducing")
    time.sleep(0.5)
    at = run.send(signal.SIGINT)
    interrupted = float(run.line("interrupted").split()[1]) - at
    took(9, "cancelled in a collective", interrupted)
    assert interrupted < 2.0
    assert run.line("goes on").split()[2:] == ["2.0", "3.0", "3.0"]
    assert run.wait() == 0, run.describe_output()


LOCAL = """
import json, numpy as np, graphflow as gf
from tests.faults import hazards
with gf.device("/worker:1"):
    nap = hazards.sleep(gf.constant(np.ones(3, "float32")), seconds=60.0)
with gf.Session(gf.Cluster.local(workers=2, threads=1), ops=["tests.faults.hazards"], trial=False) as s:
    print("pids", json.dumps(s._life.hosts.pids), flush=True)
    s.run(nap)
"""  # noqa: E501


@pytest.mark.every(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.fault(7)
def test_local_workers_do_not_outlive_the_process_that_started_them(
    script: Callable[..., Script], number: int
) -> None:
    run = script(LOCAL)
    workers = json.loads(run.line("pids").removeprefix("pids"))
    time.sleep(0.5)
    at = run.send(number)
    assert have_ended([run.pid, *workers], 2 * DEAD)
    took(7, f"local workers gone after {signal.Signals(number).name}", time.monotonic() - at)


@pytest.mark.slow  # waits for frozen and for ended processes
@pytest.mark.fault(2)
def test_closing_a_session_ends_frozen_workers_too() -> None:
    with session() as s:
        workers = pids(s)
        stop(workers[0])
    assert have_ended(workers, 2 * DEAD)


@pytest.mark.fault(4)
def test_an_op_that_ends_three_workers_is_poisoned_and_meets_no_fourth(tmp_path: Path) -> None:
    _, step = counter(0)
    broken = hazards.crash(gf.constant(ONES), name="broken")
    with session(checkpoint=tmp_path / "c", every=1) as s:
        s.run(step)
        with pytest.raises(PoisonedTask, match="'broken'"):
            s.run(broken)

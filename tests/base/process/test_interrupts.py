"""What a program's own signal handlers raise comes out as it is, and the session goes on."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.base.process.interrupts import (
    DeferredSignals,
    defer_signals,
    is_interrupt,
    passing_interrupts,
)
from graphflow.runtime.tracing.trace import Trace
from tests.faults.running import ROOT, Worker, cluster_file

OWN = {**globals(), "__name__": "graphflow.own"}
"""What makes a function one of the package's, which is none of the user's."""


class _Late(Exception):
    """A timeout of the program's own."""


@pytest.fixture(params=[_Late, TimeoutError, SystemExit], ids=lambda kind: kind.__name__)
def raised(request: pytest.FixtureRequest) -> Iterator[list[BaseException]]:
    """The errors that the handler of SIGALRM has raised."""
    errors: list[BaseException] = []

    def handler(*_: object) -> None:
        errors.append(request.param(7))
        raise errors[-1]

    before = signal.signal(signal.SIGALRM, handler)
    yield errors
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _is_ended_by_handler(
    act: Callable[[], object], seconds: float, raised: list[BaseException]
) -> bool:
    """Whether the handler ended `act`, which must show the same error."""
    raised.clear()
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            act()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        assert raised and error is raised[0], repr(error)
        return True
    return False


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_handlers_that_raise_at_any_moment_leave_a_session_that_goes_on(
    workers: int, raised: list[BaseException], tmp_path: Path
) -> None:
    draw = random.Random(workers)
    v = gf.variable(np.zeros(4, "float32"), name="v")
    x = gf.placeholder("float32", (4,), name="x")
    step, one = gf.assign(v, v + x), np.ones(4, "float32")
    one_more = gf.sum(v) + 1.0

    def trace_step(s: gf.Session) -> None:
        with s.trace(tmp_path / "trace.json"):
            s.run(step, {x: one})

    acts: dict[str, Callable[[gf.Session], Any]] = {
        "run": lambda s: [s.run(step, {x: one}) for _ in range(200)],
        "stream": lambda s: list(s.run(step, [{x: one}] * 200, steps=200)),
        "plan": lambda s: s.compile([[gf.sum(v * x) * draw.random()]]),
        "save": lambda s: s.save(tmp_path / "saved"),
        "load": lambda s: s.load(tmp_path / "saved"),
        "replan": lambda s: s.replan(),
        "trace": trace_step,
        # Not their results: an interrupt in `Future.result` is Python's own, which may lose it.
        "futures": lambda s: [s.run_async(one_more) for _ in range(20)],
    }
    cluster = gf.Cluster.local(workers) if workers else None
    with gf.Session(cluster, trial=False) as s:
        s.run(step, {x: one})
        s.save(tmp_path / "saved")
        ended = 0
        for name in [*acts] * 4:
            began = time.perf_counter()
            acts[name](s)
            lasts = time.perf_counter() - began  # so that the alarm comes in its midst
            ended += _is_ended_by_handler(
                lambda name=name: acts[name](s), draw.uniform(0.05, 0.8) * lasts, raised
            )
            before = s.run(v)
            assert np.all(before == before[0]), "a step was done in part"
            np.testing.assert_array_equal(s.run(step, {x: one}), before + 1)
    assert ended


@pytest.mark.every(5)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_step_counts_if_its_updates_happened(
    workers: int, raised: list[BaseException]
) -> None:
    draw = random.Random(workers)
    v = gf.variable(np.zeros(4, "float32"), name="v")
    step, returned = gf.assign(v, v + 1.0), 0

    def run(s: gf.Session) -> None:
        nonlocal returned
        for _ in range(60):
            s.run(step)
            returned += 1

    def stream(s: gf.Session) -> None:
        nonlocal returned
        for _ in s.run(step, itertools.repeat({}), steps=60):
            returned += 1

    with gf.Session(gf.Cluster.local(workers) if workers else None, trial=False) as s:
        for act in [run, stream] * 30:
            began = time.perf_counter()
            act(s)
            lasts = time.perf_counter() - began
            happened, steps, returned = float(s.get(v)[0]), s.step, 0
            _is_ended_by_handler(lambda act=act: act(s), draw.uniform(0.05, 0.9) * lasts, raised)
            happened = float(s.get(v)[0]) - happened
            assert returned <= happened <= returned + 1
            assert s.step - steps == happened


def test_a_handler_runs_once_more_where_a_dropped_stream_would_lose_what_it_raised(
    raised: list[BaseException],
) -> None:
    v = gf.variable(np.zeros(4, "float32"), name="v")
    step, draw = gf.assign(v, v + 1.0), random.Random(0)

    def drop(s: gf.Session) -> None:
        for _ in range(20):
            for _ in s.run(step, itertools.repeat({}), steps=5):
                break
        time.sleep(0.05)

    with gf.Session(trial=False) as s:
        drop(s)
        for _ in range(50):
            raised.clear()
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 1e-3))
                drop(s)
            except BaseException as error:
                assert error is raised[-1]
            else:
                pytest.fail("what the handler raised was lost")


def _strike(*_: object, **__: object) -> None:
    signal.raise_signal(signal.SIGALRM)


def _swallows(act: Callable[[], object]) -> None:
    """As a function of the package that takes errors of the disk for the disk's."""
    with contextlib.suppress(OSError):
        act()


def test_what_a_handler_raises_passes_what_a_call_catches(raised: list[BaseException]) -> None:
    swallows = FunctionType(_swallows.__code__, OWN)
    strike = partial(signal.raise_signal, signal.SIGALRM)
    call = FunctionType(_calls.__code__, OWN)
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(BaseException) as told:
        call(swallows, strike)
    assert told.value is raised[0] and told.value.__context__ is None
    assert is_interrupt(told.value) and signal.getsignal(signal.SIGALRM) is handler


def test_what_a_call_raises_as_it_cleans_up_does_not_hide_what_a_handler_raised(
    raised: list[BaseException],
) -> None:
    with pytest.raises(BaseException) as told:
        FunctionType(_fails.__code__, OWN)()
    assert told.value is raised[0]


def _fails() -> None:
    with passing_interrupts():
        try:
            signal.raise_signal(signal.SIGALRM)
        finally:
            raise OSError("closed twice")


def _calls(swallows: Callable[..., None], act: Callable[[], object]) -> None:
    with passing_interrupts():
        swallows(act)


def test_functions_of_the_users_in_a_call_catch_what_their_handler_raises(
    raised: list[BaseException],
) -> None:
    caught = []

    def users() -> None:
        try:
            signal.raise_signal(signal.SIGALRM)
        except BaseException as error:
            caught.append(error)

    _calls(lambda act: act(), users)
    assert caught == raised


def test_trace_files_are_whole_or_not_there_after_an_interrupt(
    raised: list[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = FunctionType(_strike.__code__, OWN)
    monkeypatch.setattr("graphflow.base.atomic_write.Path.replace", struck)
    with pytest.raises(BaseException) as told:
        Trace().save(tmp_path / "trace.json")
    assert told.value is raised[0] and not [*tmp_path.iterdir()]


OPENING = """
import os, signal, sys, time, threading, random, gc, graphflow as gf
from pathlib import Path
from tests.faults.running import children
kind, where, count = sys.argv[1:]
errors = []
def handler(*_):
    errors.append({"TimeoutError": TimeoutError, "SystemExit": SystemExit}[kind](7))
    raise errors[-1]
signal.signal(signal.SIGALRM, handler)
cluster = (lambda: gf.Cluster.local(2)) if where == "local" else (lambda: gf.Cluster.load(where))
def use():
    with gf.Session(cluster(), trial=False) as s:
        assert s.run(gf.constant(2.0) + 1) == 3
def none_left():
    until = time.monotonic() + 5
    while (left := children(os.getpid())) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.02)
    return not left
use()
began = time.monotonic()
use()
lasts, draw = time.monotonic() - began, random.Random(0)
for at in [0.02, 0.15, 0.4] + [draw.uniform(0.001, lasts) for _ in range(int(count))]:
    began = time.monotonic()
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, at)
            use()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        assert error is errors[-1], repr(error)
        error.__traceback__ = None
    else:
        assert not errors, "what the handler raised was lost"
    errors.clear()
    assert time.monotonic() - began < at + 10
    assert none_left(), at
use()
print("done", none_left())
"""


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("SystemExit", 3),
        *(
            pytest.param(kind, 12, marks=pytest.mark.slow)
            for kind in ("SystemExit", "TimeoutError")
        ),
    ],
)
def test_a_handler_that_raises_while_a_session_opens_or_closes_leaves_no_process(
    kind: str, times: int
) -> None:
    assert _output(OPENING, kind, "local", str(times)) == "done True\n"


def test_a_handler_that_raises_while_workers_by_address_are_joined_lets_them_go(
    tmp_path: Path,
) -> None:
    workers = [Worker(), Worker()]
    try:
        addresses = [worker.ready().address for worker in workers]
        where = cluster_file(tmp_path, addresses)
        assert _output(OPENING, "TimeoutError", str(where), "12") == "done True\n"
        until = time.monotonic() + 5.0  # their lease is 30 s
        while any(map(_is_in_a_session, workers)) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(map(_is_in_a_session, workers)), [worker.errors for worker in workers]
    finally:
        for worker in workers:
            worker.end()


def _is_in_a_session(worker: Worker) -> bool:
    told = "\n".join(worker.errors)
    return told.count("session.opened") > told.count("session.closed")


def _output(program: str, *arguments: str) -> str:
    """What a program prints, which ends well within two minutes."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_an_error_of_the_same_type_that_no_handler_raised_is_an_ops(
    raised: list[BaseException],
) -> None:
    try:
        signal.raise_signal(signal.SIGALRM)
    except BaseException as error:
        assert error is raised[0] and is_interrupt(error)
    try:
        raise TimeoutError
    except TimeoutError as error:
        assert not is_interrupt(error)


def test_handlers_that_are_held_back_run_afterwards(raised: list[BaseException]) -> None:
    done = []

    def act() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGALRM)
            assert isinstance(signal.getsignal(signal.SIGALRM), DeferredSignals)
            done.append(1)

    with pytest.raises(BaseException) as told:
        act()
    assert told.value is raised[0] and done
    assert not isinstance(signal.getsignal(signal.SIGALRM), DeferredSignals)


@pytest.mark.every(2)
@pytest.mark.parametrize("inherited", [False, True])
def test_local_workers_end_well_where_sigchld_is_ignored(inherited: bool) -> None:
    ignore = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    program = (
        "assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN\n"
        "import graphflow as gf\n"
        "with gf.Session(gf.Cluster.local(2)) as s:\n"
        "    print(s.run(gf.constant(2.0) + 1))\n"
        "    os.kill(s._life.hosts.pids[0], signal.SIGKILL)\n"
        "    print(s._life.hosts._local.wait_exit(0, 10.0))"
    )
    if inherited:  # as from a shell that says `trap '' CHLD`
        program = f"import os, signal, sys\n{program}"
        start = f"{ignore}os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
        told = _output(start, program)
    else:
        told = _output(ignore + program)
    assert told == "3.0\nkilled by signal 9\n"

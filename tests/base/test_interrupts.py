"""What a program's own signal handlers raise comes out as it is, and the session goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.base.interrupts import HeldBack, is_interrupt, uninterrupted


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


def _struck(act: Callable[[], object], seconds: float, raised: list[BaseException]) -> bool:
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


@pytest.mark.parametrize("workers", [0, 2])
def test_handlers_that_raise_at_any_moment_leave_a_session_that_goes_on(
    workers: int, raised: list[BaseException], tmp_path: Path
) -> None:
    draw = random.Random(workers)
    v = gf.variable(np.zeros(4, "float32"), name="v")
    x = gf.placeholder("float32", (4,), name="x")
    step, one = gf.assign(v, v + x), np.ones(4, "float32")
    acts: dict[str, Callable[[gf.Session], Any]] = {
        "run": lambda s: [s.run(step, {x: one}) for _ in range(200)],
        "stream": lambda s: list(s.run(step, [{x: one}] * 200, steps=200)),
        "plan": lambda s: s.compile([[gf.sum(v * x) * draw.random()]]),
        "save": lambda s: s.save(tmp_path / "saved"),
        "load": lambda s: s.load(tmp_path / "saved"),
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
            ended += _struck(
                lambda name=name: acts[name](s), draw.uniform(0.05, 0.8) * lasts, raised
            )
            before = s.run(v)
            assert np.all(before == before[0]), "a step was done in part"
            np.testing.assert_array_equal(s.run(step, {x: one}), before + 1)
    assert ended


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
        with uninterrupted():
            signal.raise_signal(signal.SIGALRM)
            assert isinstance(signal.getsignal(signal.SIGALRM), HeldBack)
            done.append(1)

    with pytest.raises(BaseException) as told:
        act()
    assert told.value is raised[0] and done
    assert not isinstance(signal.getsignal(signal.SIGALRM), HeldBack)


def test_local_workers_end_well_where_sigchld_is_ignored() -> None:
    program = (
        "import signal, os; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "import graphflow as gf\n"
        "with gf.Session(gf.Cluster.local(2)) as s: print(s.run(gf.constant(2.0) + 1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ},
    )  # fmt: skip
    assert "3.0" in done.stdout and "Traceback" not in done.stderr

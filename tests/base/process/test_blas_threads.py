"""BLAS has one thread wherever a graph's values are computed, and its own number afterwards."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import graphflow as gf
from graphflow.base.process.blas_threads import one_blas_thread
from graphflow.frontend.interpreter import evaluate
from graphflow.passes.constants import FoldConstants


def _threads() -> set[int]:
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}


@pytest.fixture(autouse=True)
def two_threads() -> Any:
    one_blas_thread.cache_clear()  # it knows the libraries of its first use; other tests bring more
    with threadpool_limits(2, "blas"):
        if _threads() != {2}:
            pytest.skip("BLAS has one thread only, or its threads are not known")
        yield


def test_whoever_is_inside_has_one_thread_until_the_last_one_leaves() -> None:
    with one_blas_thread():
        with one_blas_thread():
            assert _threads() == {1}
        assert _threads() == {1}
    assert _threads() == {2}


def test_the_interpreter_and_folding_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    of_numpy = np.linalg.inv

    def inv(x: Any) -> Any:
        seen.append(_threads())
        return of_numpy(x)

    monkeypatch.setattr(np.linalg, "inv", inv)
    x = gf.placeholder("float64", (3, 3))
    evaluate([gf.linalg.inv(x)], {x: np.eye(3)})
    FoldConstants()(gf.Graph([gf.linalg.inv(gf.constant(np.eye(3)))]))
    assert seen == [{1}, {1}]
    assert _threads() == {2}


def test_a_step_that_fails_gives_the_threads_back() -> None:
    x = gf.placeholder("float64", (3, 3))
    with gf.Session(gf.Cluster.here()) as s, pytest.raises(gf.errors.OpError):
        s.run(gf.linalg.inv(x), {x: np.zeros((3, 3))})
    assert _threads() == {2}


def test_a_handler_that_comes_in_between_waits_for_nobody_and_changes_no_number() -> None:
    seen = []

    def handler(*_: Any) -> None:
        with one_blas_thread():
            seen.append(_threads())
        signal.setitimer(signal.ITIMER_REAL, 1e-3)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    try:
        while len(seen) < 200:
            with one_blas_thread():
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert _threads() == {2}
    assert all(threads == {1} for threads in seen)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
@pytest.mark.parametrize("own_blocks", [0, 2])
def test_a_fork_while_another_thread_is_inside_counts_only_its_own_blocks(own_blocks: int) -> None:
    inside, forked = threading.Event(), threading.Event()
    blas = one_blas_thread()

    def hold() -> None:
        with blas, blas._lock:
            inside.set()
            forked.wait(30)

    def in_child() -> None:
        with blas:
            assert _threads() == {1}
        assert _threads() == ({1} if own_blocks else {2})

    with ExitStack() as own:
        for _ in range(own_blocks):
            own.enter_context(blas)
        other = threading.Thread(target=hold)
        other.start()
        inside.wait(30)
        threading.Timer(0.2, forked.set).start()
        _run_in_fork(in_child)
        other.join()
    assert _threads() == {2}


def _run_in_fork(test: Callable[[], None]) -> None:
    child = os.fork()
    if not child:
        signal.alarm(20)  # a child that waits for a lock ends by this signal
        try:
            test()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

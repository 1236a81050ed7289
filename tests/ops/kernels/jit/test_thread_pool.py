"""The pool: every part once, errors handed on, nobody left waiting."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.errors import DeviceError
from graphflow.ops.kernels.jit import thread_pool as threads
from graphflow.ops.kernels.jit.thread_pool import Pool, current_pool, run_parts, use_pool


@given(st.integers(1, 5), st.integers(0, 12))
def test_every_part_runs_once(threads: int, parts: int) -> None:
    pool = Pool(threads)
    done: list[int] = []
    pool.run(done.append, parts)
    pool.close()
    assert sorted(done) == list(range(parts))


def test_more_threads_than_the_system_starts_are_told_and_none_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def start_two_threads(thread: threading.Thread) -> None:
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two_threads)
    with pytest.raises(DeviceError, match=r"of the 100000 threads .* starts 3; give fewer"):
        Pool(100_000)
    for thread in begun:
        thread.join(30)
        assert not thread.is_alive()


def test_the_caller_works_too_and_others_help() -> None:
    pool = Pool(2)
    barrier = threading.Barrier(2, timeout=30)  # passes only if two threads run parts at once
    names: set[str] = set()

    def part(i: int) -> None:
        barrier.wait()
        names.add(threading.current_thread().name)

    pool.run(part, 2)
    pool.close()
    assert threading.current_thread().name in names and len(names) == 2


@pytest.mark.parametrize("wrong", [0, 1], ids=["caller", "worker"])
def test_an_error_of_a_part_reaches_the_caller_and_the_pool_goes_on(wrong: int) -> None:
    pool = Pool(2)

    def part(i: int) -> None:
        if i == wrong:
            raise IndexError(f"part {i}")

    for _ in range(2):
        with pytest.raises(IndexError, match=f"part {wrong}"):
            pool.run(part, 2)
    done: list[int] = []
    pool.run(done.append, 4)
    pool.close()
    assert sorted(done) == [0, 1, 2, 3]


def test_a_part_that_runs_parts_does_them_alone() -> None:
    pool = Pool(3)
    done: list[tuple[int, int]] = []
    pool.run(lambda i: pool.run(lambda j: done.append((i, j)), 3), 3)
    pool.close()
    assert sorted(done) == [(i, j) for i in range(3) for j in range(3)]


def test_a_closed_pool_leaves_the_caller_to_work_alone() -> None:
    pool = Pool(3)
    pool.close()
    done: list[int] = []
    pool.run(done.append, 3)
    assert done == [0, 1, 2]
    pool.close()


def test_a_forgotten_pool_ends_its_threads() -> None:
    pool = Pool(3)
    workers = [worker.thread for worker in pool._workers]
    pool.run(lambda i: None, 3)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    for worker in workers:
        worker.join(timeout=30)
        assert not worker.is_alive()


def test_the_current_pool_belongs_to_the_thread_and_the_block() -> None:
    pool = Pool(1)
    seen: list[Pool | None] = []
    with use_pool(pool):
        with use_pool(None):
            assert current_pool() is None
        assert current_pool() is pool
        thread = threading.Thread(target=lambda: seen.append(current_pool()))
        thread.start()
        thread.join()
    assert seen == [None] and current_pool() is None


def test_without_a_pool_parts_run_in_order() -> None:
    done: list[int] = []
    run_parts(done.append, 4)
    assert done == [0, 1, 2, 3]


@pytest.mark.parametrize("times", [1, 2])
def test_wherever_ctrl_c_comes_nobody_is_left_at_work_and_the_pool_goes_on(times: int) -> None:
    """At each call and return of a run on three threads, the places where Python lets a signal in;
    then once more, where the first is answered."""
    ended, moment = False, 0
    while not ended:
        pool, moment = Pool(3), moment + 1
        at_work: list[int] = []
        done: list[int] = []
        seen = 0

        def part(i: int, at_work: list[int] = at_work, done: list[int] = done) -> None:
            if threading.current_thread() is not threading.main_thread():
                at_work.append(i)
                time.sleep(0.002)
                at_work.remove(i)
            done.append(i)

        def interrupt(frame: FrameType, event: str, arg: object, moment: int = moment) -> None:
            nonlocal seen
            if frame.f_code.co_filename == threads.__file__:
                seen += 1
                if seen in range(moment, moment + times):
                    sys.setprofile(interrupt if seen + 1 < moment + times else None)
                    raise KeyboardInterrupt

        try:
            sys.setprofile(interrupt)
            pool.run(part, 3)
            ended = seen < moment
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert not at_work
        done.clear()
        pool.run(done.append, 7)
        assert sorted(done) == list(range(7))
        helpers = [worker.thread for worker in pool._workers]
        pool._finalizer()
        for helper in helpers:
            helper.join(5.0)
            assert not helper.is_alive()
    assert moment > 20

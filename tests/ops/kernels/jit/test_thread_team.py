"""Jobs of native calls: every entry once, whether helpers come or not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.call_table_driver import copy_task
from graphflow.ops.kernels.jit.compiler import compiler, cut_rows
from graphflow.ops.kernels.jit.thread_pool import Pool
from graphflow.ops.kernels.jit.thread_team import MOST_SHARES


class Copy:
    """A copy of an array as a job of some entries; `run` runs it and checks the result."""

    def __init__(self, entries: int, seed: int = 0) -> None:
        self._source = np.random.default_rng(seed).integers(0, 255, 64 * entries, np.uint8)
        self._target = np.zeros_like(self._source)
        task = copy_task(64)
        function = compiler().function(task.name, task.text).address
        ends = np.array([address(self._source), address(self._target)], np.uint64)
        self._pointers = ends + 64 * np.arange(entries, dtype=np.uint64)[:, None]
        places = address(self._pointers) + 16 * np.arange(entries)
        self._table = np.array([(function, place, 0, 0, 64) for place in places], np.uint64)

    def run(self, pool: Pool) -> None:
        self._target[:] = 0
        pool.run_entries(self._table, len(self._table))
        np.testing.assert_array_equal(self._target, self._source)


@pytest.fixture(scope="module", params=[1, 2, 5])
def pool(request: pytest.FixtureRequest) -> Pool:
    pool = Pool(request.param)
    request.addfinalizer(pool.close)
    return pool


@given(st.integers(1, MOST_SHARES + 3), st.integers(1, 20))
@settings(max_examples=20, deadline=None)
def test_every_entry_runs_before_the_job_ends(pool: Pool, entries: int, times: int) -> None:
    job = Copy(entries)
    for _ in range(times):
        job.run(pool)


def test_threads_that_went_to_sleep_take_part_again(pool: Pool) -> None:
    job = Copy(8)
    pause = threading.Event()
    for _ in range(5):
        pause.wait(0.005)  # longer than threads poll
        job.run(pool)


def test_a_job_ends_while_the_helpers_run_parts_in_python() -> None:
    with closing(Pool(3)) as pool:
        started, go = threading.Barrier(4, timeout=30), threading.Event()

        def part(_: int) -> None:
            started.wait()
            go.wait(30)

        caller = threading.Thread(target=pool.run, args=(part, 3))
        caller.start()
        started.wait()
        Copy(6).run(pool)
        go.set()
        caller.join(30)
        assert not caller.is_alive()


def test_callers_at_the_same_time_each_get_their_own_job_done() -> None:
    with closing(Pool(2)) as pool:
        errors: list[BaseException] = []

        def repeat(job: Copy) -> Callable[[], None]:
            def run() -> None:
                try:
                    for _ in range(200):
                        job.run(pool)
                except BaseException as error:
                    errors.append(error)

            return run

        callers = [threading.Thread(target=repeat(Copy(7, seed))) for seed in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
        assert not errors and not any(caller.is_alive() for caller in callers)


def test_a_closed_pool_runs_jobs_on_the_caller_alone() -> None:
    pool = Pool(2)
    pool.close()
    Copy(5).run(pool)


@given(st.integers(0, 500), st.integers(1, 70), st.integers(1, 9))
def test_shares_of_rows_cover_them_in_order(rows: int, unit: int, count: int) -> None:
    shares = cut_rows(rows, unit, count)
    assert [s.start for s in shares] == [0, *(s.stop for s in shares[:-1])]
    assert shares[-1].stop == rows and len(shares) <= count
    assert all(s.start % unit == 0 for s in shares)

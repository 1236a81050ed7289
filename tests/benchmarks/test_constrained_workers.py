"""A worker that is held to a share of a core, and a link that is throttled."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.lib.constrained_workers import CannotConstrain, constrained_pair
from benchmarks.lib.processor_share import PERIOD, Allowance, processor_clock

ROOT = Path(__file__).resolve().parents[2]
SPIN = "while True: pass"


def test_an_allowance_stops_a_process_that_is_ahead_of_its_share() -> None:
    allowance = Allowance(0.5)
    assert allowance.advance(elapsed=0.001, used=0.0005) == 0.0
    pause = allowance.advance(elapsed=0.001, used=0.001)
    assert pause == pytest.approx(0.001)
    assert allowance.advance(elapsed=pause, used=0.0) == pytest.approx(0.0)


def test_an_idle_process_saves_up_one_period_at_most() -> None:
    allowance = Allowance(0.5)
    allowance.advance(elapsed=10.0, used=0.0)
    assert allowance.seconds == pytest.approx(0.5 * PERIOD)


@contextmanager
def start_process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *command])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(5.0)


def test_a_busy_process_gets_no_more_than_its_share_and_is_continued_at_the_end() -> None:
    script = str(ROOT / "benchmarks" / "lib" / "processor_share.py")
    with start_process("-c", SPIN) as spinning:
        used = processor_clock(spinning.pid)
        with start_process(script, str(spinning.pid), "0.3"):
            time.sleep(0.3)  # until it holds
            start, before = time.monotonic(), used()
            time.sleep(0.5)
            assert used() - before <= 0.3 * (time.monotonic() - start) + 0.1
        before = used()
        until = time.monotonic() + 30.0
        while used() == before:
            assert time.monotonic() < until, "it runs again"
            time.sleep(0.01)


TRANSFER = """
import sys, time, numpy as np, graphflow as gf
from pathlib import Path
from benchmarks.lib.worker_pairs import ListedWorkers
x = gf.placeholder("float32", (1 << 18,))
with gf.device("/worker:0"):
    here = x * 2.0
with gf.device("/worker:1"):
    total = gf.sum(here + 1.0)
with ListedWorkers(sys.argv[2:], Path(sys.argv[1])).session(2, trial=False) as session:
    feeds = {x: np.ones(1 << 18, "float32")}
    print(*(float(session.run(total, feeds)) for _ in range(2)))
    start = time.monotonic()
    session.run(total, feeds)
    print(time.monotonic() - start)
"""


@pytest.mark.slow  # both workers calibrate
def test_a_throttled_link_carries_a_megabyte_no_faster_than_its_rate(tmp_path: Path) -> None:
    try:
        with constrained_pair(None, 100.0, tmp_path) as pair:
            done = subprocess.run(
                [*pair.enter, sys.executable, "-c", TRANSFER, str(tmp_path), *pair.addresses],
                env={**pair.environment, "GRAPHFLOW_CACHE": str(tmp_path)},
                capture_output=True, text=True, check=False, timeout=100.0,
            )  # fmt: skip
    except CannotConstrain as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stderr
    *values, seconds = done.stdout.split()
    assert [float(value) for value in values] == [3.0 * (1 << 18)] * 2
    assert float(seconds) > 0.8 * (1 << 20) * 8 / 100e6, "shared memory must not bypass the link"


def test_workers_of_a_pair_end_with_it(tmp_path: Path) -> None:
    before = children_of(os.getpid())
    with constrained_pair(0.5, None, tmp_path) as pair:
        assert all(address.startswith("tcp://127.0.0.1:") for address in pair.addresses)
        started = children_of(os.getpid()) - before
        assert len(started) == 3, "two workers, and the process that holds one of them"
    assert not started & children_of(os.getpid())


def children_of(parent: int) -> set[int]:
    """Return the processes that a process started and has not waited for."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return {int(pid) for pid in listed}

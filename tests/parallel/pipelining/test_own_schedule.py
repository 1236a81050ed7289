"""A schedule is one new file: it is drawn, simulated and trained with by its name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.parallel.pipelining import schedule as schedules
from graphflow.parallel.pipelining.schedule import SCHEDULES
from graphflow.parallel.pipelining.timeline import draw, run
from tests.parallel.pipelining.test_flushing_pipeline import (
    assert_same,
    run_training,
    train_on_one_device,
)

FILE = '''
"""Last first: all forward passes, then the backward passes from the last micro-batch on."""

from graphflow.parallel.pipelining.schedule import Schedule, Task, register_schedule


@register_schedule("last-first")
def last_first(stages, microbatches):
    forward, backward = range(microbatches), reversed(range(microbatches))
    backward = list(backward)
    orders = tuple(
        tuple([Task("F", s, i) for i in forward] + [Task("B", s, i) for i in backward])
        for s in range(stages)
    )
    return Schedule("last first", stages, microbatches, orders)
'''


@pytest.fixture(autouse=True)
def last_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The schedule of a file that is in no package, registered for one test."""
    (tmp_path / "own_schedule.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    for table in ("SCHEDULES", "STAGES_PER_DEVICE"):
        known: dict[str, Any] = getattr(schedules, table)
        monkeypatch.setitem(known, "last-first", None)  # so that the test's entry is removed
    import_module("own_schedule")
    yield
    del sys.modules["own_schedule"]


def test_a_schedule_of_a_new_file_is_drawn_and_simulated() -> None:
    made = SCHEDULES["last-first"](2, 2)
    assert draw(made).splitlines() == [
        "F0 F1 .. .. B1 B0",
        ".. F0 F1 B1 B0 ..",
    ]
    timeline = run(made, forward=1.0, backward=2.0)
    assert timeline.stored == (2, 2) and timeline.makespan == 9.0


def test_a_network_is_trained_by_the_schedule_of_a_new_file() -> None:
    assert_same(run_training(gf.parallel.Pipeline(2, "last-first", 4)), train_on_one_device())


def test_two_workers_give_the_bits_of_one_process() -> None:
    strategy = gf.parallel.Pipeline("auto", "last-first", 4)
    here = run_training(gf.parallel.Pipeline(2, "last-first", 4))
    there = run_training(strategy, gf.Cluster.local(2, threads=1))
    assert all(np.array_equal(a, b) for a, b in zip(here[1], there[1], strict=True))

"""Threads of a team leave the processor of their caller."""

from __future__ import annotations

import os
import threading
from contextlib import closing

import pytest

from graphflow.ops.kernels.jit import processor_spread
from graphflow.ops.kernels.jit.processor_spread import ProcessorSpread, current_processor
from graphflow.ops.kernels.jit.thread_pool import Pool

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two processors, and a system that tells which",
)


def helper_processors() -> list[set[int]]:
    """Return the processors that each helper may use."""
    found = (t for t in threading.enumerate() if t.name.startswith("graphflow-kernel"))
    return [os.sched_getaffinity(t.native_id) for t in found if t.native_id is not None]


def test_helpers_follow_wherever_the_caller_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.sched_getaffinity(0)
    with closing(Pool(2)) as pool:
        assert pool.team is not None
        pool.run(lambda i: None, 2)  # the helper is there
        for processor in sorted(mine)[:2]:
            monkeypatch.setattr(processor_spread, "current_processor", lambda at=processor: at)
            pool.team.rouse()
            assert mine - {processor} in helper_processors()
    assert os.sched_getaffinity(0) == mine


def test_an_only_processor_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, to: found.append(to))
    monkeypatch.setattr(processor_spread, "current_processor", lambda: 3)
    spread = ProcessorSpread()
    spread.add_thread()
    spread.leave_processor()
    assert not found


def test_a_thread_that_has_ended_or_a_system_that_forbids_it_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: int, to: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    spread = ProcessorSpread()
    spread.add_thread()
    spread.leave_processor()
    assert current_processor() in os.sched_getaffinity(0)

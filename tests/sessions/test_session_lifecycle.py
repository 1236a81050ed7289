"""A session without checkpoints: what it does in the place of what recovers, and how it ends."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, SessionError, StateLost, WorkerLost
from graphflow.recovery.no_recovery import NoRecovery


def test_a_session_without_checkpoints_is_lost_with_a_worker() -> None:
    v = gf.variable(np.zeros((), "float32"), name="v")
    with gf.Session() as s:
        assert type(s._recovery) is NoRecovery and s.checkpoint_error is None
        s.set(v, 3.0)
        assert s.get(v) == 3.0
        with pytest.raises(ArgumentError, match="save needs a folder"):
            s.save()
        s._steps.lost = WorkerLost("worker 1 was lost", worker=1)
        for call in (lambda: s.run(v), lambda: s.get(v), lambda: s.run_async(v), s.replan):
            with pytest.raises(StateLost, match="worker 1 was lost"):
                call()


def test_a_lost_worker_that_ends_a_block_is_told_what_helps() -> None:
    with pytest.raises(WorkerLost) as failure, gf.Session():
        raise WorkerLost("worker 1 was lost", worker=1)
    assert failure.value.__notes__ == [
        "A session opened with checkpoint=directory recovers by itself."
    ]


def test_a_session_is_not_copied_or_pickled_and_says_what_to_do_instead() -> None:
    with (
        gf.Session() as s,
        pytest.raises(SessionError, match="belongs to the process that opened it"),
    ):
        copy.deepcopy(s)


def test_nothing_is_done_in_a_session_that_has_ended_and_the_end_comes_once() -> None:
    v = gf.variable(np.zeros((), "float32"), name="v")
    s = gf.Session()
    found = s.run(v, [{}] * 3, steps=3)
    assert next(found) == 0.0
    s.close()
    s.close()
    for call in (lambda: s.run(v), lambda: s.get(v), lambda: next(found), lambda: s.set(v, 1.0)):
        with pytest.raises(SessionError, match="is closed"):
            call()

"""Which work is tried no more."""

from __future__ import annotations

from graphflow.errors import PoisonedTask, WorkerLost
from graphflow.runtime.protocol.poison_tracker import PoisonTaskTracker


def death(worker: int, *, op: str = "", program: str = "p", ended: bool = True) -> WorkerLost:
    reason = "killed by signal 11"
    return WorkerLost("lost", worker=worker, reason=reason, op=op, program=program, ended=ended)


def test_an_op_that_ended_three_workers_is_poisoned_at_whatever_steps_it_did() -> None:
    poison = PoisonTaskTracker()
    op = 'decode "image" (made at model.py:7)'
    assert poison.record_worker_loss(death(1, op=op), 4) is None
    assert poison.record_worker_loss(death(1, op="another"), 4) is None
    assert poison.record_worker_loss(death(0, op=op), 9) is None
    error = poison.record_worker_loss(death(2, op=op), 11)
    assert isinstance(error, PoisonedTask)
    for part in (op, "3 workers", "worker 1", "worker 0", "worker 2", "signal 11"):
        assert part in str(error)


def test_a_program_is_poisoned_where_it_ended_three_workers_at_the_same_point() -> None:
    poison = PoisonTaskTracker()
    for committed in range(5):
        assert poison.record_worker_loss(death(0), committed) is None
    assert poison.record_worker_loss(death(1), 2) is None
    error = poison.record_worker_loss(death(1), 2)
    assert isinstance(error, PoisonedTask) and "program 'p' after 2 steps" in str(error)


def test_a_worker_that_was_cut_off_or_computed_nothing_died_of_no_task() -> None:
    poison = PoisonTaskTracker()
    for _ in range(5):
        assert poison.record_worker_loss(death(0, ended=False), 1) is None
        assert poison.record_worker_loss(death(0, program=""), 1) is None

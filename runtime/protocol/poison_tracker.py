"""Poison tasks: work that kills the workers that run it.

After the same task has killed `DEADLY` workers, it is not tried again.
"""

from __future__ import annotations

from collections import defaultdict

from graphflow.errors import PoisonedTask, WorkerLost

DEADLY = 3  # worker deaths after which their common task counts as the cause


class PoisonTaskTracker:
    """Count of the workers that were lost at the same task, over all epochs of a session."""

    def __init__(self) -> None:
        self._deaths: dict[str, list[WorkerLost]] = defaultdict(list)

    def record_worker_loss(self, error: WorkerLost, committed: int) -> PoisonedTask | None:
        """Record a lost worker; return an error once its task has killed `DEADLY` workers.

        The task is the op in which a signal ended the worker, at whatever step. If the op is
        unknown, it is the program that the worker computed, at the same point of the run. A worker
        that computed nothing, or whose process did not end, was not killed by its work.

        Args:
            committed: steps committed before the step in which the worker was lost. A repeated step
                has the same count.
        """
        if not error.ended or not (error.op or error.program):
            return None
        task = error.op or f"program {error.program!r} after {committed} steps"
        deaths = self._deaths[task]
        deaths.append(error)
        if len(deaths) < DEADLY:
            return None
        losses = "; ".join(f"worker {death.worker}: {death.reason}" for death in deaths)
        return PoisonedTask(
            f"{task} ended {len(deaths)} workers and is not tried on another ({losses}); find out "
            "what it does with these inputs in a process of its own"
        )

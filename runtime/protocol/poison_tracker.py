"""Which work kills the workers that do it: after the same killed three, it is tried no more."""

from __future__ import annotations

from collections import defaultdict

from graphflow.errors import PoisonedTask, WorkerLost

DEADLY = 3  # deaths at the same task after which it is taken for their cause


class PoisonTaskTracker:
    """Counts the workers that were lost at the same task, over all epochs of a session."""

    def __init__(self) -> None:
        self._deaths: dict[str, list[WorkerLost]] = defaultdict(list)

    def record_worker_loss(self, error: WorkerLost, committed: int) -> PoisonedTask | None:
        """Takes note of a lost worker; the error to end with once its task has killed three.

        The task is the op that a signal ended the worker in, at whatever step; where that is not
        known, the program it was computing, at this point of the run. A worker that was not
        computing, or whose process did not end, did not die of what it computed.

        Args:
            committed: how many steps came before the one it was lost in, which may be one that is
                done again.
        """
        if not error.ended or not (error.op or error.program):
            return None
        task = error.op or f"program {error.program!r} after {committed} steps"
        deaths = self._deaths[task]
        deaths.append(error)
        if len(deaths) < DEADLY:
            return None
        told = "; ".join(f"worker {death.worker}: {death.reason}" for death in deaths)
        return PoisonedTask(
            f"{task} ended {len(deaths)} workers and is not tried on another ({told}); find out "
            "what it does with these inputs in a process of its own"
        )

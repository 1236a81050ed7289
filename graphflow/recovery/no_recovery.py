"""Fragile: a session without checkpoints, whose state is lost with the worker that holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from graphflow.errors import ArgumentError, CheckpointError, StateLost, WorkerLost
from graphflow.execution.step_prefetch import Run
from graphflow.ir.op import Node
from graphflow.planning.deployment import Deployment
from graphflow.runtime.checkpoint import Checkpoint

Array = np.ndarray[Any, Any]
T = TypeVar("T")


class NoRecovery:
    """What stands in the place of a `Recovery` where nothing is kept: it does what it is asked to
    do once.

    Args:
        run: as of `Recovery`.
    """

    error: CheckpointError | None = None

    def __init__(self, deployment: Deployment, run: Run) -> None:
        self._hosts = deployment.hosts
        self._state = deployment.state
        self.step = run

    def set(self, node: Node, value: Array) -> None:
        """Set a variable."""
        self._state.set(node, value)

    def retry_on_loss(self, operation: Callable[[], T]) -> T:
        """Do something with the workers."""
        return operation()

    def on_worker_lost(self, error: WorkerLost) -> NoReturn:
        """What follows from the loss of a worker for all that comes after it.

        Raises:
            StateLost: always.
        """
        raise StateLost(
            f"the session lost a worker and its variables ({error}); open a new session and load "
            "a checkpoint: s.load(folder). One that is opened with checkpoint=directory recovers "
            "by itself"
        )

    def after_step(self) -> None:
        """At the end of a step: there is nothing to be kept."""

    def save(self) -> NoReturn:
        """There is nowhere to write to.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError("save takes a folder, or the session a checkpoint= directory")

    def load(self, take: Callable[[], None], read: Callable[[], Checkpoint]) -> None:
        """Take the state of a checkpoint."""
        take()

    def leave_draining_workers(self) -> None:
        """Leave workers that were asked to end: what they hold cannot be saved, so they need not
        wait."""
        self._hosts.leave_draining()

"""Sessions without checkpoints: a lost worker takes its variables with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from graphflow.errors import (
    ArgumentError,
    CheckpointError,
    GraphflowError,
    SessionError,
    StateLost,
    WorkerLost,
)
from graphflow.execution.step_prefetch import Run
from graphflow.ir.op import Node
from graphflow.placement.clusters.cluster import Cluster
from graphflow.planning.deployment import Deployment
from graphflow.planning.migration.server_changes import ServerChanges
from graphflow.runtime.checkpoint import Checkpoint
from graphflow.runtime.checkpoint.pieced_arrays import LazyArray
from graphflow.runtime.telemetry.logs import Log

Array = np.ndarray[Any, Any]
T = TypeVar("T")

_log = Log("graphflow.session")


class NoRecovery:
    """The counterpart of `Recovery` for a session without a checkpoint directory: it runs each
    operation once.

    Args:
        run: runs a step, as for `Recovery`.
    """

    error: CheckpointError | None = None

    def __init__(self, deployment: Deployment, run: Run) -> None:
        self._deployment = deployment
        self._hosts = deployment.hosts
        self._state = deployment.state
        self.step = run

    def set(self, node: Node, value: Array | LazyArray) -> None:
        """Set a variable."""
        self._state.set(node, value)

    def retry_on_loss(self, operation: Callable[[], T]) -> T:
        """Run an operation on the workers, once."""
        return operation()

    def on_worker_lost(self, error: WorkerLost) -> None:
        """Refuse every call after a worker was lost.

        Raises:
            StateLost: always.
        """
        raise StateLost(
            f"the session lost a worker and its variables ({error}); open a new session and load "
            "a checkpoint: s.load(folder). One that is opened with checkpoint=directory recovers "
            "by itself"
        )

    def after_step(self) -> None:
        """At the end of a step: nothing to do."""

    def save(self) -> NoReturn:
        """Refuse to save without a folder.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            "save needs a folder: s.save(folder); or open the session with checkpoint=directory"
        )

    def begin_anew(self) -> None:
        """Do nothing: a lost worker ends the session."""

    def change_cluster(self, cluster: Cluster) -> None:
        """Do nothing: the session never begins anew."""

    def load(self, take: Callable[[], None], read: Callable[[], Checkpoint]) -> None:
        """Take the state of a checkpoint."""
        take()

    def close(self, *, complete: bool) -> None:
        """Do nothing: nothing runs in the background."""

    def leave_draining_workers(self) -> None:
        """Leave workers that were asked to end. Parameter servers hand over to others before; no
        other state can be saved."""
        for worker in self._hosts.draining_workers():
            try:
                ServerChanges(self._deployment).hand_over(worker)
            except SessionError:  # it has no servers
                break
            except GraphflowError as error:
                _log.tell("servers.kept", worker=worker, reason=str(error))
        self._hosts.leave_draining()

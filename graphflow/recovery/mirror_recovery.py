"""Recovery by mirrors: when a worker is lost, others take its part, with the state of the last
commit.

    WorkerLost → mirrors become the variables → the step runs on the workers that are left
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

import numpy as np

from graphflow.errors import LinkLost, StateLost, WorkerLost
from graphflow.execution.step_prefetch import Decide, Run
from graphflow.ir.op import Node, Tensor
from graphflow.placement.clusters.cluster import Cluster
from graphflow.planning.deployment import Deployment
from graphflow.planning.migration.mirror_copies import MirrorCopies
from graphflow.planning.mirrors.mirrors import Mirrors
from graphflow.recovery.no_recovery import NoRecovery
from graphflow.recovery.replacements import Replacements
from graphflow.runtime.checkpoint.pieced_arrays import LazyArray
from graphflow.runtime.host.host_interface import ASKED_TO_END
from graphflow.runtime.protocol.poison_tracker import PoisonTaskTracker
from graphflow.runtime.telemetry.logs import Log

Array = np.ndarray[Any, Any]
T = TypeVar("T")

MAX_RECOVERIES = 10
"""Recoveries in a row without a new step, after which the session gives up."""
_NEW_SESSION = (
    "open a new session and load a checkpoint: s.load(folder). One that is opened with "
    "checkpoint=directory, too, goes on from the newest by itself"
)

_log = Log("graphflow.session")


class Takeover:
    """Lets the workers of a session take the part of a lost one, and makes new mirrors.

    Args:
        undo: undoes steps begun ahead.
    """

    def __init__(self, deployment: Deployment, mirrors: Mirrors, undo: Callable[[], None]) -> None:
        self._deployment = deployment
        self._hosts = deployment.hosts
        self._mirrors = mirrors
        self._copies = MirrorCopies(deployment, mirrors)
        self._replacements = Replacements(deployment.hosts)
        self._undo = undo

    @property
    def is_possible(self) -> bool:
        """True if variables have mirrors."""
        return self._mirrors.is_active

    def run(self, error: WorkerLost) -> None:
        """Continue without the worker of an error, from the last commit.

        Raises:
            StateLost: both copies of a variable are gone.
            WorkerLost: another worker was lost meanwhile; the call can be repeated with this error.
        """
        started = monotonic()
        if error.worker is not None and error.worker not in self._hosts.lost_workers():
            self._hosts.leave([error.worker], error.reason)
        self._drop_programs()
        self._deployment.begin_check(None)
        self._copies.restart()
        self._mirrors.take_over()
        self._deployment.steps.lost = None
        self._replacements.begin(self._mirrors.lost)
        self._hosts.meters.add("graphflow_recoveries_total")
        _log.tell(
            "session.taken_over", step=self._deployment.steps.committed, reason=str(error),
            seconds=round(monotonic() - started, 3),
        )  # fmt: skip

    def restart(self, cluster: Cluster) -> None:
        """Begin anew after all workers of a cluster did."""
        self._mirrors.restart(cluster)
        self._copies.restart()

    def end_replacements(self) -> None:
        """Wait until no worker is being started any more."""
        self._replacements.restart()

    def after_step(self) -> None:
        """After a step: make new mirrors, piece by piece, and even out the parts of workers.

        Raises:
            WorkerLost: a worker was lost meanwhile.
        """
        mirrors, part = self._mirrors, None
        if self._replacements.are_near:
            self._welcome_joined()
        elif mirrors.lacks_mirrors:
            self._drop_programs()
            mirrors.replace_all()
        elif not self._copies.is_done:
            self._undo()
            self._copies.copy_piece()
            if self._copies.is_done:
                _log.tell("mirrors.complete", step=self._deployment.steps.committed)
        elif mirrors.lost and (part := mirrors.find_uneven_part()) is not None:
            self._drop_programs()
            mirrors.even_out(part)

    def _welcome_joined(self) -> None:
        """Take in a worker that has joined in place of a lost one."""
        joined = self._replacements.take_joined()
        if joined is None:
            return
        self._mirrors.add_worker(*joined)
        self._deployment.cluster = self._mirrors.cluster

    def _drop_programs(self) -> None:
        """Let the next steps send their programs again."""
        self._undo()
        deployment = self._deployment
        programs = [c.program for c in deployment.compiled.values() if c.program]
        deployment.undeploy(None)
        self._hosts.forget(programs, {})


class MirrorRecovery(NoRecovery):
    """The recovery of a session with mirrors and without a checkpoint directory.

    Args:
        run: runs a step, as for `Recovery`.
        takeover: continues without a lost worker.
    """

    def __init__(self, deployment: Deployment, run: Run, takeover: Takeover) -> None:
        super().__init__(deployment, run)
        self._steps = deployment.steps
        self._takeover = takeover
        self._poison_tracker = PoisonTaskTracker()
        self._pending_loss: WorkerLost | None = None
        self._losses_in_a_row = 0
        self._lost: StateLost | None = None

        def step(
            tensors: Sequence[Tensor], feeds: Mapping[Node, Array], begun: Decide
        ) -> list[Any]:
            return self.retry_on_loss(lambda: run(tensors, feeds, begun))

        self.step = step

    def set(self, node: Node, value: Array | LazyArray) -> None:
        """Set a variable and its mirror."""
        self.retry_on_loss(lambda: self._state.set(node, value))

    def retry_on_loss(self, operation: Callable[[], T]) -> T:
        """Run an operation on the workers, again after each loss of a worker.

        Raises:
            StateLost: both copies of a variable are gone.
            PoisonedTask: the same work ended three workers.
            WorkerLost: too many were lost in a row.
        """
        while True:
            try:
                if self._pending_loss is not None:
                    self._takeover.run(self._pending_loss)
                    self._pending_loss = None
                result = operation()
                self._losses_in_a_row = 0
                return result
            except StateLost as error:
                self._lost = StateLost(f"{error}; {_NEW_SESSION}")
                raise self._lost from error
            except WorkerLost as error:
                if not self._takeover.is_possible:
                    raise
                self._note(error)
            except LinkLost as error:
                if not self._takeover.is_possible:
                    raise
                self._note(loss_of_target(error))

    def _note(self, error: WorkerLost) -> None:
        self._pending_loss = error
        self._losses_in_a_row += 1
        poisoned = self._poison_tracker.record_worker_loss(error, self._steps.committed)
        if poisoned is not None:
            raise poisoned from error
        if self._losses_in_a_row > MAX_RECOVERIES:
            raise error

    def on_worker_lost(self, error: WorkerLost) -> None:
        """Accept the loss of a worker, unless variables are lost: the next operation recovers.

        Raises:
            StateLost: both copies of a variable are gone.
        """
        if self._lost is not None:
            raise self._lost
        if not self._takeover.is_possible:
            super().on_worker_lost(error)

    def after_step(self) -> None:
        """At the end of a step: go on with new mirrors, and leave workers that are to end."""
        if self._takeover.is_possible:
            self.retry_on_loss(self._takeover.after_step)
        self.leave_draining_workers()

    def close(self, *, complete: bool) -> None:
        """End what runs in the background."""
        self._takeover.end_replacements()

    def leave_draining_workers(self) -> None:
        """Leave workers that were asked to end, and continue on the others with their mirrors."""
        leaving = self._hosts.draining_workers()
        if not self._takeover.is_possible:
            super().leave_draining_workers()
        elif leaving and self._pending_loss is None and self._lost is None:
            first = min(leaving)
            self._hosts.leave(leaving, ASKED_TO_END)
            self._pending_loss = WorkerLost(f"worker {first} was asked to end", worker=first)
            with suppress(StateLost):  # the next call raises it
                self.retry_on_loss(lambda: None)


def loss_of_target(error: LinkLost) -> WorkerLost:
    """Return the loss of the worker that another one does not reach."""
    reason = f"worker {error.source} does not reach it"
    return WorkerLost(str(error), worker=error.target, step=error.step, reason=reason)

"""Recovery: a session continues by itself when it loses a worker, bit for bit as if it had not.

    WorkerLost → available workers, at a higher epoch → the last checkpoint → the steps since

The session logs everything that changed the state since a checkpoint: fetches and feeds of steps,
and values that were set. A step is a function of state, feeds and its number. So a replay gives the
same bits on any placement. A step whose end the caller has not seen is replayed for its results,
too; the others are replayed for the state alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from graphflow.base.process.interrupts import defer_signals, is_interrupt
from graphflow.errors import CheckpointError, LinkLost, StateLost, WorkerLost
from graphflow.execution.checkpoint_matching import Rename, load_renamed
from graphflow.execution.step_prefetch import Decide, Run, not_begun
from graphflow.ir.op import Node, Tensor
from graphflow.ops.communication.channels import replayed_feeds
from graphflow.placement.clusters.cluster import Cluster
from graphflow.planning.deployment import Deployment
from graphflow.recovery.checkpoint_writer import WRITE_SECONDS, CheckpointWriter, PendingCheckpoint
from graphflow.recovery.mirror_recovery import MAX_RECOVERIES, Takeover, loss_of_target
from graphflow.recovery.replay_log import CommittedStep, ReplayLog, ReplaySegment, VariableWrite
from graphflow.runtime.checkpoint import Checkpoint
from graphflow.runtime.checkpoint.pieced_arrays import LazyArray
from graphflow.runtime.host.host_interface import NO_WORKER_LEFT
from graphflow.runtime.protocol.poison_tracker import PoisonTaskTracker
from graphflow.runtime.telemetry.logs import Log

Array = np.ndarray[Any, Any]
T = TypeVar("T")

REPLAY_BYTES = 256 * 2**20
"""Size of the log beyond which a checkpoint is written early."""
_FINISH_SECONDS = 10.0  # to wait for a checkpoint whose workers are gone

_log = Log("graphflow.session")


class Recovery:
    """Keeps a session going when it loses workers.

    Args:
        run: runs a step once.
        undo: undoes steps begun ahead, before the workers start anew.
        strict, rename: how the session's first checkpoint meets the model.
        patience: returns the seconds to wait for workers that this session did not start
            itself; fewer once the session is asked to end.
        takeover: continues on the workers that are left, if variables have mirrors.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        deployment: Deployment,
        run: Run,
        undo: Callable[[], None],
        patience: Callable[[], float],
        takeover: Takeover | None = None,
        *,
        strict: bool = True,
        rename: Rename = MappingProxyType({}),
    ) -> None:
        self.writer = writer
        self._deployment = deployment
        self._hosts = deployment.hosts
        self._state = deployment.state
        self._steps = deployment.steps
        self._cluster = deployment.cluster  # with which the session began
        self._run = run
        self._undo = undo
        self._patience = patience
        self._takeover = takeover
        self._keeps_log = self._hosts.can_be_lost
        folder = writer.resume(strict, rename)
        again = None if folder is None else partial(load_renamed, folder, rename)
        self._replay_log = ReplayLog(again)
        self._writing: ReplaySegment | None = None
        self._pending_loss: WorkerLost | None = None
        self._target_step = 0  # steps committed before the first of several losses in a row
        self._steps_before_loss = 0  # steps before the one that the last loss ended
        self._losses_in_a_row = 0
        self._poison_tracker = PoisonTaskTracker()
        self._uncertain = False
        self._is_restoring = False  # the workers do not have the state of the present step

    @property
    def error(self) -> CheckpointError | None:
        """Why the last checkpoint could not be written; None if it was."""
        return self.writer.error

    # What a session does ------------------------------------------------------------------------

    def step(
        self, tensors: Sequence[Tensor], feeds: Mapping[Node, Array], begun: Decide
    ) -> list[Any]:
        """Run a step, and repeat it as long as workers are lost in it.

        Raises:
            WorkerLost, PoisonedTask: the step cannot be completed.
            GraphflowError: as the step itself.
        """
        if self._uncertain:
            self._make_certain()
        before = self._steps.committed
        with self._note_interrupt():
            values = self.retry_on_loss(lambda: self._run(tensors, feeds, begun))
            self._losses_in_a_row = 0
            if self._keeps_log:
                copies = {node: np.array(value) for node, value in feeds.items()}
                copies |= replayed_feeds(tensors, values)
                if self._steps.last is not None:
                    copies |= self._steps.last.replayed_feeds()
                self._replay_log.add(CommittedStep(tuple(tensors), copies, before))
        return values

    def set(self, node: Node, value: Array | LazyArray) -> None:
        """Set a variable. From then on, no checkpoint holds the present state."""
        self.writer.saved_step = -1
        with self._note_interrupt():
            self.retry_on_loss(lambda: self._state.set(node, value))
            if self._keeps_log:
                self._replay_log.add(VariableWrite(node, value))

    @contextmanager
    def _note_interrupt(self) -> Iterator[None]:
        """Note an interrupt of the block: workers may have done its work, or not."""
        try:
            yield
        except BaseException as error:
            if is_interrupt(error):
                self._uncertain = self._keeps_log
            raise

    def _make_certain(self) -> None:
        """Write the state as it is after an interrupted step or a loaded checkpoint.

        If that fails, the log leads nowhere and is cleared, but training continues.
        """
        try:
            self.save()
        except CheckpointError as error:
            _log.tell("recovery.lost", step=self._steps.committed, reason=str(error))
            self._replay_log.clear()
            self._uncertain = False

    def retry_on_loss(self, operation: Callable[[], T]) -> T:
        """Run an operation on the workers, again after each loss of a worker.

        Raises:
            WorkerLost: the session cannot be recovered.
            PoisonedTask: the same work ended three workers.
        """
        while True:
            try:
                if self._pending_loss is not None:
                    self._recover(self._pending_loss)
                return operation()
            except StateLost:
                raise
            except WorkerLost as error:
                if not self._keeps_log or error.reason == NO_WORKER_LEFT:
                    raise
                self._count_loss(error)
            except LinkLost as error:
                if not self._keeps_log:
                    raise
                self._count_loss(loss_of_target(error))

    def on_worker_lost(self, error: WorkerLost) -> None:
        """Accept the loss of a worker: the next operation recovers."""

    def after_step(self) -> None:
        """At the end of a step: write a checkpoint if it is due.

        Raises:
            StaleEpoch: another process has taken the session over.
        """
        self._collect_finished()
        writer = self.writer
        if writer.check_due():
            if writer.pending is not None:
                writer.skip()
            else:
                self._begin_checkpoint()
        elif self._replay_log.nbytes > REPLAY_BYTES:
            self._reduce_log()
        self.leave_draining_workers()
        if self._takeover is not None and self._takeover.is_possible:
            self.retry_on_loss(self._takeover.after_step)

    def save(self) -> Path:
        """Write a checkpoint now, wait for it, and return its folder.

        Raises:
            CheckpointError: it cannot be written; training may go on.
        """
        while True:
            self.wait()
            pending = self.retry_on_loss(self._begin_checkpoint)
            if pending is not None:
                self.wait()
            error = self.writer.error
            if error is None and pending is not None:
                self._uncertain = False
                return pending.draft.target
            assert error is not None
            if not (self._keeps_log and isinstance(error.__cause__, WorkerLost)):
                raise error
            self._count_loss(error.__cause__)

    def begin_anew(self) -> None:
        """Write a checkpoint, and let later recoveries begin with it.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._keeps_log:
            self.save()
            self._replay_log.drop_old()

    def change_cluster(self, cluster: Cluster) -> None:
        """Let later recoveries begin with another cluster."""
        self._cluster = cluster

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        if self.writer.pending is not None:
            self.writer.pending.wait(WRITE_SECONDS)
            self._collect_finished()

    def leave_draining_workers(self) -> None:
        """Leave workers that were asked to end: write a checkpoint, and continue with the
        others."""
        leaving = self._hosts.draining_workers()
        if not leaving or self._pending_loss is not None:
            return
        with suppress(CheckpointError):  # it is logged, and the checkpoint before suffices
            self.save()
        self._target_step = self._steps.committed
        names = ", ".join(f"worker {worker}" for worker in sorted(leaving))
        self._pending_loss = WorkerLost(f"{names} was asked to end", worker=min(leaving))
        self.retry_on_loss(lambda: None)

    def save_last_checkpoint(self) -> None:
        """Write the last checkpoint of a session that is asked to end."""
        step, folder = self._steps.committed, str(self.writer.store.root)
        try:
            self.save()
        except WorkerLost as error:
            if error.reason != NO_WORKER_LEFT:
                raise
            _log.tell("recovery.lost", step=step, reason=str(error))  # the one before suffices
        _log.tell("session.drained", step=step, folder=folder)

    def close(self, *, complete: bool) -> None:
        """Wait for the checkpoint that is being written.

        Args:
            complete: write one more, of the steps since.

        Raises:
            CheckpointError: the last one cannot be written; the one before is intact.
        """
        if self._takeover is not None:
            self._takeover.end_replacements()
        self.wait()
        if not complete or self._pending_loss is not None or self.writer.fenced:
            return
        if self.writer.saved_step != self._steps.committed or self.writer.error is not None:
            self._begin_checkpoint()
            self.wait()
        if self.writer.error is not None:  # no later checkpoint could replace it
            raise self.writer.error

    def load(self, take: Callable[[], None], read: Callable[[], Checkpoint]) -> None:
        """Load a checkpoint into the session, and write it as the newest of its own.

        After a crash the session continues from it, not from what was written before. The user may
        also overwrite the original.

        Args:
            take: takes the state of the checkpoint.
            read: reads it again, for a later recovery.
        """

        def anew() -> None:
            with defer_signals():  # a loaded state must not stay unwritten
                take()
                self.writer.restart()
                self._replay_log.restart(read)
                if not self._keeps_log:
                    self._begin_checkpoint()

        with self._note_interrupt():
            self.wait()
            self.writer.store.advance()  # checkpoints from now on count as newer than those before
            self.retry_on_loss(anew)
            if self._keeps_log:
                self._make_certain()
                self._replay_log.drop_old()
            else:
                self.wait()

    # Checkpoints --------------------------------------------------------------------------------

    def _begin_checkpoint(self) -> PendingCheckpoint | None:
        with defer_signals():  # the log must know of every checkpoint that is begun
            pending = self.writer.begin()
            if pending is not None and self._keeps_log:
                read = partial(load_renamed, pending.draft.target)
                self._writing = self._replay_log.begin_segment(read)
        return pending

    def _collect_finished(self) -> None:
        pending = self.writer.collect_finished()
        segment = self._writing if pending is not None else None
        if segment is None:
            return
        self._writing = None
        if self.writer.error is None:
            segment.written = True
            self._replay_log.drop_old(spare=1)  # the new checkpoint might turn out damaged

    def _reduce_log(self) -> None:
        """Shrink the log: drop what only older checkpoints need, then write a new checkpoint."""
        self._replay_log.drop_old()
        size = self._replay_log.nbytes
        if size > 2 * REPLAY_BYTES:
            self.wait()  # steps come faster than the disk can write
        if size > 4 * REPLAY_BYTES and self.writer.error is not None:
            _log.tell("recovery.lost", step=self._steps.committed, reason=str(self.writer.error))
            self._replay_log.clear()
        elif size > REPLAY_BYTES and self.writer.pending is None:
            self._begin_checkpoint()

    # Recovery -----------------------------------------------------------------------------------

    def _count_loss(self, error: WorkerLost) -> None:
        """Count a loss.

        Raises:
            WorkerLost: too many in a row.
            PoisonedTask: the same work ended three workers.
        """
        if self._pending_loss is None:
            self._target_step = self._steps_before_loss = self._steps.committed
        self._pending_loss = error
        self._losses_in_a_row += 1
        poisoned = self._poison_tracker.record_worker_loss(error, self._steps_before_loss)
        if poisoned is not None:
            raise poisoned from error
        if self._losses_in_a_row > MAX_RECOVERIES:
            raise WorkerLost(
                f"gave up at step {self._target_step}, after {MAX_RECOVERIES} recoveries in a row "
                f"without a step: {error}; the checkpoints in {self.writer.store.root} are intact",
                worker=error.worker, step=error.step, reason=error.reason, op=error.op,
            ) from error  # fmt: skip

    def _recover(self, error: WorkerLost) -> None:
        """Let mirrors take over; else get workers, restore the last checkpoint, and replay the
        steps since."""
        if self._takeover is not None and self._takeover.is_possible and not self._is_restoring:
            try:
                self._takeover.run(error)
            except StateLost as lost:
                _log.tell("mirrors.lost", step=self._target_step, reason=str(lost))
            else:
                self._pending_loss = None
                return
        started = time.monotonic()
        self._is_restoring = True
        _log.tell("session.recovering", step=self._target_step, reason=str(error))
        self._undo()
        self._deployment.undeploy(None)
        if self._takeover is not None:
            self._takeover.end_replacements()
        epoch = self.writer.store.advance()
        cluster = self._hosts.reopen(self._cluster, epoch, self._patience)
        if self.writer.pending is not None:
            self.writer.pending.wait(_FINISH_SECONDS)
            self._collect_finished()
        place, base = self._find_base()
        if self._takeover is not None:
            self._takeover.restart(cluster)
        same = cluster == self._deployment.cluster
        if not same:
            self._deployment.undeploy(cluster)
        self._state.restore(base, homes=same)
        steps = self._steps
        trace, steps.trace, steps.lost = steps.trace, None, None
        steps.committed = base.step
        count = 0
        try:
            for entry in self._replay_log.entries_from(place):
                self._replay(entry)
                count += isinstance(entry, CommittedStep)
        finally:
            self._steps_before_loss = steps.committed
            steps.trace, steps.committed = trace, self._target_step
        self._pending_loss, self._is_restoring = None, False
        self._hosts.meters.add("graphflow_recoveries_total")
        _log.tell(
            "session.recovered", step=self._target_step, epoch=epoch, workers=len(cluster.workers),
            replayed=count, seconds=round(time.monotonic() - started, 3),
        )  # fmt: skip

    def _replay(self, entry: CommittedStep | VariableWrite) -> None:
        """Repeat an entry of the log."""
        if isinstance(entry, VariableWrite):
            self._state.set(entry.node, entry.value.copy())
        else:
            self._steps.committed = entry.before
            self._run(entry.tensors, entry.feeds, not_begun)

    def _find_base(self) -> tuple[int, Checkpoint]:
        """Return the checkpoint to recover from, and the index of its segment in the log.

        Raises:
            StateLost: there is none.
        """
        try:
            return self._replay_log.find_base()
        except CheckpointError as error:
            raise StateLost(
                f"the session lost a worker ({self._pending_loss}), and no checkpoint leads to "
                f"step {self._target_step}: {error}; open a new session on "
                f"{self.writer.store.root}: it continues from the newest readable checkpoint"
            ) from None

"""Write a session's checkpoints in the background.

At the end of a step each worker copies its variables and continues. Threads write the copies during
the next steps. When all shards are on disk, the client writes the manifest and renames the folder.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import CheckpointError, GraphflowError, StaleEpoch
from graphflow.execution.checkpoint_matching import (
    Rename,
    rename_checkpoint,
)
from graphflow.execution.step_executor import StepExecutor
from graphflow.execution.variable_store import VariableStore
from graphflow.recovery.checkpoint_policy import CheckpointInterval
from graphflow.runtime.checkpoint import Checkpoint, save
from graphflow.runtime.checkpoint.folder import (
    CLIENT_SHARD,
    CheckpointDraft,
    signature,
    write_error_text,
)
from graphflow.runtime.checkpoint.manifest import CheckpointShard, Groups, Signature, VariablePiece
from graphflow.runtime.checkpoint.pieced_arrays import LazyArray
from graphflow.runtime.checkpoint.remote import shard_name
from graphflow.runtime.checkpoint.store import CheckpointStore
from graphflow.runtime.host.host_interface import Hosts, PendingSave
from graphflow.runtime.telemetry.logs import Log

Array = np.ndarray[Any, Any]
WRITE_SECONDS = 600.0
"""Time limit for writing all shards of a checkpoint."""

_log = Log("graphflow.session")


@dataclass
class PendingCheckpoint:
    """A checkpoint that is being written.

    Attributes:
        started: monotonic time of its start.
        outcome: the folder that was written, or why it failed; None while it is being written.
    """

    draft: CheckpointDraft
    started: float
    outcome: CheckpointError | StaleEpoch | str | None = None
    thread: threading.Thread | None = field(default=None, repr=False)

    @property
    def step(self) -> int:
        """The step whose state it holds."""
        return self.draft.step

    def wait(self, seconds: float) -> None:
        """Wait for its end, but at most so many seconds."""
        if self.thread is not None:
            self.thread.join(seconds)


@dataclass(frozen=True)
class _StateSnapshot:
    """The places of a session's variables at a step.

    Attributes:
        placed: signatures of those that workers hold, by worker.
        waiting: values of those that no worker holds.
        parts: layouts of those that are partitioned.
        unnamed: groups of those without names.
    """

    placed: Mapping[int, Mapping[str, Signature]]
    waiting: Mapping[str, Array | LazyArray]
    parts: Mapping[str, tuple[Signature, tuple[VariablePiece, ...]]]
    unnamed: Groups

    def variables(self) -> dict[str, Signature]:
        """Return the signatures of all variables, as the user knows them."""
        found = {name: signature(value) for name, value in self.waiting.items()}
        for kinds in self.placed.values():
            found |= kinds
        for name, (kind, parts) in self.parts.items():
            for piece, _ in parts:
                found.pop(piece, None)
            found[name] = kind
        return found


class CheckpointWriter:
    """Writes the checkpoints of a session, one at a time.

    Attributes:
        pending: the checkpoint that is being written, if any.
        saved_step: step of the last checkpoint that was begun; -1 if the state has changed
            since by other means than steps.
        fenced: True once another process has taken over the directory.
    """

    def __init__(
        self,
        store: CheckpointStore,
        every: CheckpointInterval,
        hosts: Hosts,
        state: VariableStore,
        steps: StepExecutor,
    ) -> None:
        self.store = store
        self._error: CheckpointError | None = None
        self.pending: PendingCheckpoint | None = None
        self.saved_step = -1
        self.fenced = False
        self._every = every
        self._hosts = hosts
        self._state = state
        self._steps = steps
        self._due_step = 0  # the step at which a checkpoint was last due
        self._due_time = time.monotonic()

    def resume(self, strict: bool, rename: Rename) -> Path | None:
        """Load the newest readable checkpoint; return its folder, or None if there is none.

        Raises:
            CheckpointError: there are checkpoints, but none can be read; or a name of `rename`
                is not in it.
        """
        for cleaned in self.store.cleaned:
            _log.tell("checkpoint.cleaned", folder=str(self.store.root), what=cleaned)
        ignored: list[str] = []
        found = self.store.newest(ignored.append)
        if found is None and ignored:
            raise CheckpointError(
                f"no checkpoint in {self.store.root} can be read: {'; '.join(ignored)}; remove "
                "them to begin anew, or give another directory"
            )
        for each in ignored:
            _log.tell("checkpoint.ignored", reason=each)
        if found is None:
            return None
        folder, checkpoint = found
        renamed = rename_checkpoint(checkpoint, rename, folder)
        self._state.load(renamed, str(folder), strict=strict)
        self._steps.committed = self.saved_step = self._due_step = checkpoint.step
        _log.tell("session.resumed", folder=str(folder), step=checkpoint.step)
        return folder

    @property
    def error(self) -> CheckpointError | None:
        """Why the last finished checkpoint could not be written; None if it was written."""
        outcome = self.pending.outcome if self.pending is not None else None
        if isinstance(outcome, CheckpointError):
            return outcome  # not collected yet; the next step does that
        return None if isinstance(outcome, str) else self._error

    def check_due(self) -> bool:
        """Return True if a checkpoint is due; the next one is then due an interval later."""
        step, now = self._steps.committed, time.monotonic()
        if not self._every.is_due(self._due_step, step, now - self._due_time):
            return False
        self._due_step, self._due_time = step, now
        return True

    def restart(self) -> None:
        """Count steps and seconds anew, from a state that was loaded and is not written yet."""
        self.saved_step, self._due_step = -1, self._steps.committed
        self._due_time = time.monotonic()

    def skip(self) -> None:
        """Log that a checkpoint is left out, because the one before is still being written."""
        assert self.pending is not None
        _log.tell(
            "checkpoint.skipped", folder=str(self.store.root), step=self._steps.committed,
            writing=self.pending.step, seconds=round(time.monotonic() - self.pending.started, 3),
        )  # fmt: skip

    def begin(self) -> PendingCheckpoint | None:
        """Start to write the present state; return None if that failed at once.

        Raises:
            StaleEpoch: another process has taken over.
        """
        step = self._steps.committed
        draft = None
        try:
            draft = self.store.begin(step)
            state = self._state
            held = _StateSnapshot(
                state.worker_signatures(),
                state.client_values(),
                state.shard_layouts(),
                state.unnamed_groups(),
            )
            saving = self._hosts.save(self.store.root, draft.folder.name, step, list(held.placed))
        except (OSError, GraphflowError) as error:
            if draft is not None:
                draft.discard()
            if isinstance(error, StaleEpoch):
                self.fenced = True
                raise
            self._note_failure(step, error)
            return None
        self.saved_step = step
        self.pending = pending = PendingCheckpoint(draft, time.monotonic())
        pending.thread = threading.Thread(
            target=self._write, args=(pending, saving, held),
            name="graphflow-checkpoint", daemon=True,
        )  # fmt: skip
        pending.thread.start()
        return pending

    def collect_finished(self) -> PendingCheckpoint | None:
        """Return the checkpoint that was being written, if it has ended since.

        Raises:
            StaleEpoch: another process has taken over.
        """
        pending = self.pending
        if pending is None or pending.outcome is None:
            return None
        self.pending = None
        if isinstance(pending.outcome, StaleEpoch):
            self.fenced = True
            raise pending.outcome
        if isinstance(pending.outcome, CheckpointError):
            self._note_failure(pending.step, pending.outcome)
        else:
            self._error = None
            self._count("written")
            _log.tell("checkpoint.written", step=pending.step, folder=pending.outcome,
                      seconds=round(time.monotonic() - pending.started, 3))  # fmt: skip
        return pending

    def _note_failure(self, step: int, error: BaseException) -> None:
        known = isinstance(error, CheckpointError)
        reason = (
            str(error) if known else write_error_text(self.store.root / f"step-{step:08d}", error)
        )
        self._error = error if isinstance(error, CheckpointError) else CheckpointError(reason)
        self._error.__cause__ = error.__cause__ if known else error
        self._count("failed")
        _log.tell("checkpoint.failed", step=step, reason=reason)

    def _count(self, outcome: str) -> None:
        meters, now = self._hosts.meters, time.monotonic()
        meters.add("graphflow_checkpoints_total", 1, outcome)
        if outcome == "written":
            meters.watch("graphflow_checkpoint_age_seconds", lambda: time.monotonic() - now)

    # On a thread of its own --------------------------------------------------------------------

    def _write(self, pending: PendingCheckpoint, saving: PendingSave, held: _StateSnapshot) -> None:
        draft = pending.draft
        try:
            outcome: CheckpointError | StaleEpoch | str
            for worker, written in saving(WRITE_SECONDS).items():
                if isinstance(written, CheckpointShard):
                    mine = tuple(held.placed[worker])
                    draft.add(CheckpointShard(written.file, written.sha256, written.nbytes, mine))
                else:
                    mine_only = {name: written[name] for name in held.placed[worker]}
                    draft.write(shard_name(worker), mine_only)
            if held.waiting:
                draft.write(CLIENT_SHARD, held.waiting)
            self.store.check_owner()
            pieces = {name: parts for name, (_, parts) in held.parts.items()}
            draft.commit(held.variables(), pieces, held.unnamed)
            self.store.prune()
            outcome = str(draft.target)
        except (StaleEpoch, CheckpointError) as error:
            outcome = error
        except Exception as error:  # whatever failed, the training goes on
            outcome = CheckpointError(write_error_text(draft.target, error))
            outcome.__cause__ = error
        finally:
            draft.discard()
        pending.outcome = outcome


def save_in_shards(
    checkpoint: Checkpoint, state: VariableStore, folder: str | os.PathLike[str]
) -> None:
    """Write a checkpoint from this process, in the shards that workers would write.

    Raises:
        CheckpointError: the folder cannot be written; its old content is intact.
    """
    known = checkpoint.variables  # partitioned variables are whole here
    shards = {
        shard_name(worker): own
        for worker, kinds in state.worker_signatures().items()
        if (own := [name for name in kinds if name in known])
    }
    held = {name for names in shards.values() for name in names}
    rest = [name for name in checkpoint.variables if name not in held]
    if rest:
        shards[CLIENT_SHARD] = rest
    save(checkpoint, folder, shards)

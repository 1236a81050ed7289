"""Checkpointing: when a session's state is written, by whom, and what became of it.

At a step's end each worker copies its variables and goes on; the copies are written beside the
steps that follow. Once all shards are on disk, the client writes the manifest and renames.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from graphflow.base.argument_checks import as_seconds, to_builtin
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, CheckpointError, GraphflowError, StaleEpoch
from graphflow.execution.checkpoint_matching import (
    Rename,
    check_rename,
    rename_checkpoint,
    rename_variables,
)
from graphflow.execution.step_executor import StepExecutor
from graphflow.execution.variable_store import VariableStore
from graphflow.runtime.checkpoint import Checkpoint, Manifest, files, load, save
from graphflow.runtime.checkpoint.folder import (
    CLIENT_SHARD,
    MANIFEST,
    CheckpointDraft,
    load_file,
    signature,
    write_error_text,
)
from graphflow.runtime.checkpoint.manifest import CheckpointShard, Groups, Signature, VariablePiece
from graphflow.runtime.checkpoint.remote import shard_name
from graphflow.runtime.checkpoint.store import CheckpointStore, folders, newest
from graphflow.runtime.host.host_interface import Hosts, PendingSave
from graphflow.runtime.telemetry.logs import Log

Array = np.ndarray[Any, Any]
EVERY, KEEP, REJOIN = "10min", 3, 10.0
"""What holds where a session says nothing else."""
WRITE_SECONDS = 600.0
"""In which all shards of a checkpoint have to be written."""

_log = Log("graphflow.session")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h|d)")
_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class CheckpointInterval:
    """How often a checkpoint is written: after so many steps, or so many seconds."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, every: Any) -> CheckpointInterval:
        """What the user means: a number of steps, or a time such as "10min".

        Raises:
            ArgumentError: anything else.
        """
        every = to_builtin(every)
        if isinstance(every, int) and not isinstance(every, bool) and every > 0:
            return cls(steps=every)
        match = _TIME.fullmatch(every.strip()) if isinstance(every, str) else None
        time_between = float(match[1]) * _UNITS[match[2]] if match is not None else 0.0
        if not (0 < time_between < math.inf):
            raise ArgumentError(
                "every is a number of steps above 0, or a time such as '10min', '30s' or '1h', "
                f"not {every!r}"
            )
        return cls(seconds=time_between)

    def is_due(self, before: int, step: int, seconds: float) -> bool:
        """Whether it is time, so many seconds and steps after the last one."""
        if self.steps is not None:
            return step // self.steps > before // self.steps
        return self.seconds is not None and step > before and seconds >= self.seconds


@dataclass(frozen=True)
class CheckpointPolicy:
    """What a user says of checkpoints: where, how often, how many, how long a lost worker is waited
    for, and how the first one meets the model: `strict`, `rename` (see `fitting`)."""

    folder: str | os.PathLike[str]
    every: CheckpointInterval
    keep: int
    rejoin: float
    strict: bool
    rename: Rename

    @classmethod
    def from_arguments(
        cls, folder: Any, every: Any, keep: Any, rejoin: Any, strict: Any, rename: Any
    ) -> CheckpointPolicy | None:
        """From a session's arguments; None where it has no directory for checkpoints.

        Raises:
            ArgumentError: one is wrong, or makes no sense without a directory.
        """
        names = check_rename(strict, rename, again=True)
        if folder is None:
            given = {
                "every": every,
                "keep": keep,
                "rejoin": rejoin,
                "strict": None if strict else False,
            }
            for name, value in {**given, "rename": rename}.items():
                if value is not None:
                    raise ArgumentError(f"{name}= is for sessions with a checkpoint= directory")
            return None
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise ArgumentError(f"checkpoint is a directory, not {folder!r}")
        keep = KEEP if keep is None else to_builtin(keep)
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ArgumentError(f"keep is a number of checkpoints above 0, not {keep!r}")
        waits = REJOIN if rejoin is None else as_seconds(rejoin)
        if waits is None:
            raise ArgumentError(f"rejoin is a number of seconds from 0 on, not {rejoin!r}")
        return cls(
            folder,
            CheckpointInterval.parse(EVERY if every is None else every),
            keep,
            waits,
            strict,
            names,
        )

    def store(self) -> CheckpointStore:
        """The directory, taken over.

        Raises:
            CheckpointError: it cannot be used.
        """
        return CheckpointStore(self.folder, self.keep)


@dataclass
class PendingCheckpoint:
    """A checkpoint that is being written.

    Attributes:
        outcome: how it ended; None while it is written.
    """

    draft: CheckpointDraft
    started: float
    outcome: CheckpointError | StaleEpoch | str | None = None
    thread: threading.Thread | None = field(default=None, repr=False)

    @property
    def step(self) -> int:
        """The step of which it is."""
        return self.draft.step

    def wait(self, seconds: float) -> None:
        """Wait for its end."""
        if self.thread is not None:
            self.thread.join(seconds)


@dataclass(frozen=True)
class _StateSnapshot:
    """Where the variables of a session are: with workers, by worker; or here; some in pieces."""

    placed: Mapping[int, Mapping[str, Signature]]
    waiting: Mapping[str, Array]
    parts: Mapping[str, tuple[Signature, tuple[VariablePiece, ...]]]
    unnamed: Groups

    def variables(self) -> dict[str, Signature]:
        """All of them, as the user knows them."""
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
        pending: the one that is being written.
        saved_step: the step of the last one that was begun; -1 where the state is another by now.
        fenced: whether it was told that another process has taken the directory over.
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
        self._due_step = 0  # the step at which it was last due
        self._due_time = time.monotonic()

    def resume(self, strict: bool, rename: Rename) -> Path | None:
        """Take up the newest checkpoint that can be read; where it is, if there is one.

        Raises:
            CheckpointError: there are some, but none can be read; or a name of `rename` is not in
                it.
        """
        for told in self.store.cleaned:
            _log.tell("checkpoint.cleaned", folder=str(self.store.root), what=told)
        ignored: list[str] = []
        found = self.store.newest(ignored.append)
        if found is None and ignored:
            raise CheckpointError(
                f"no checkpoint in {self.store.root} can be read: {'; '.join(ignored)}; remove "
                "them to begin anew, or give another directory"
            )
        for each in ignored:
            _log_ignored(each)
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
        """Why the last checkpoint that ended could not be written; None if it could."""
        outcome = self.pending.outcome if self.pending is not None else None
        if isinstance(outcome, CheckpointError):
            return outcome  # the next step will tell it, too
        return None if isinstance(outcome, str) else self._error

    def check_due(self) -> bool:
        """Whether it is time for a checkpoint; if so, the next one is due an interval later."""
        step, now = self._steps.committed, time.monotonic()
        if not self._every.is_due(self._due_step, step, now - self._due_time):
            return False
        self._due_step, self._due_time = step, now
        return True

    def restart(self) -> None:
        """Count steps and seconds from the state that was loaded, of which none is written yet."""
        self.saved_step, self._due_step = -1, self._steps.committed
        self._due_time = time.monotonic()

    def skip(self) -> None:
        """Leave one out, because the one before is still being written."""
        assert self.pending is not None
        _log.tell(
            "checkpoint.skipped", folder=str(self.store.root), step=self._steps.committed,
            writing=self.pending.step, seconds=round(time.monotonic() - self.pending.started, 3),
        )  # fmt: skip

    def begin(self) -> PendingCheckpoint | None:
        """Start to write the state as it is now; None if that failed at once.

        Raises:
            StaleEpoch: another session has taken over.
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
        """The checkpoint that was being written, if that has ended since.

        Raises:
            StaleEpoch: another session has taken over.
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
        told = (
            str(error) if known else write_error_text(self.store.root / f"step-{step:08d}", error)
        )
        self._error = error if isinstance(error, CheckpointError) else CheckpointError(told)
        self._error.__cause__ = error.__cause__ if known else error
        self._count("failed")
        _log.tell("checkpoint.failed", step=step, reason=told)

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
        except Exception as error:  # whatever it is, the training goes on
            outcome = CheckpointError(write_error_text(draft.target, error))
            outcome.__cause__ = error
        finally:
            draft.discard()
        pending.outcome = outcome


def _log_ignored(told: str) -> None:
    _log.tell("checkpoint.ignored", reason=told)


def read_checkpoint(
    state: VariableStore, folder: str | os.PathLike[str], step: int, *, strict: bool, rename: Rename
) -> tuple[Path, Checkpoint]:
    """A checkpoint with the model's names, and where it is: the folder itself, or the newest in it
    that is whole and fits the session's variables; or a single file of safetensors.

    Args:
        step: of a single file, which has none.

    Raises:
        CheckpointError: there is none, or a name of `rename` is not in it.
    """
    source = files.absolute_path(folder)
    if source.is_file():
        found = source, Checkpoint(load_file(source), step)
    elif not source.is_dir() or (source / MANIFEST).is_file() or not folders(source):
        found = source, load(source)
    else:
        found = _newest(state, source, strict=strict, rename=rename)
    place, checkpoint = found
    return place, rename_checkpoint(checkpoint, rename, place)


def _newest(
    state: VariableStore, source: Path, *, strict: bool, rename: Rename
) -> tuple[Path, Checkpoint]:
    """The newest checkpoint of a directory that is whole and fits."""

    def misfit(manifest: Manifest) -> str:
        return state.describe_mismatch(
            rename_variables(manifest.variables, rename, source), strict=strict
        )

    told: list[str] = []
    found = newest(source, told.append, misfit)
    if found is None:
        raise CheckpointError(f"no checkpoint in {source} can be used: {'; '.join(told)}")
    for each in told:
        _log_ignored(each)
    return found


def save_in_shards(
    checkpoint: Checkpoint, state: VariableStore, folder: str | os.PathLike[str]
) -> None:
    """Write a checkpoint from here, in the shards in which workers would have.

    Raises:
        CheckpointError: the folder cannot be written; what was there is intact.
    """
    known = checkpoint.variables  # of what is in pieces, the whole
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

"""Checkpoints in folders that a user names: `Session.save` and `Session.load`."""

from __future__ import annotations

import os

from graphflow.base.process.interrupts import defer_signals
from graphflow.execution.checkpoint_matching import Loaded, Rename
from graphflow.execution.step_executor import StepExecutor
from graphflow.execution.variable_store import VariableStore
from graphflow.recovery.checkpoint_reader import read_checkpoint
from graphflow.recovery.checkpoint_writer import save_in_shards
from graphflow.recovery.no_recovery import NoRecovery
from graphflow.recovery.recoverer import Recovery
from graphflow.runtime.checkpoint import Checkpoint


class NamedCheckpoints:
    """Writes the state of a session to folders, and takes it from them.

    Args:
        recovery: repeats what a lost worker interrupts.
        state: the variables.
        steps: counts the steps.
    """

    def __init__(
        self, recovery: Recovery | NoRecovery, state: VariableStore, steps: StepExecutor
    ) -> None:
        self._recovery = recovery
        self._state = state
        self._steps = steps

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write all variables that the session knows.

        Raises:
            CheckpointError: the folder cannot be written; its old content is intact.
        """
        state = self._state

        def write() -> None:
            values, copies = state.values(), state.copies()
            saved = Checkpoint(values, self._steps.committed, state.unnamed_groups(), copies)
            save_in_shards(saved, state, folder)

        self._recovery.retry_on_loss(write)

    def load(self, folder: str | os.PathLike[str], *, strict: bool, rename: Rename) -> Loaded:
        """Take variables and the step number from a checkpoint, and report what was loaded.

        Raises:
            CheckpointError: it is unreadable, or does not fit the variables; nothing is changed.
        """
        state, steps = self._state, self._steps
        source, checkpoint = read_checkpoint(
            state, folder, steps.committed, strict=strict, rename=rename
        )
        kept = self._recovery.retry_on_loss(lambda: state.values_beyond(checkpoint))

        def take() -> None:
            with defer_signals():  # an interrupt must not leave a mixture of two states
                state.load(checkpoint, str(source), strict=strict)
                steps.committed = checkpoint.step

        def reread() -> Checkpoint:
            """Read the checkpoint again after a loss, when variables have no values to compare
            with."""
            _, same = read_checkpoint(state, source, checkpoint.step, strict=False, rename=rename)
            return Checkpoint({**kept, **same.variables}, same.step, copies=same.copies)

        self._recovery.load(take, reread)
        report = state.report_loaded()
        assert report is not None
        return report

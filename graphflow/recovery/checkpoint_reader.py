"""Read the checkpoint that a user names: a folder, one of a directory, or a safetensors file."""

from __future__ import annotations

import os
from pathlib import Path

from graphflow.errors import CheckpointError
from graphflow.execution.checkpoint_matching import (
    Rename,
    rename_checkpoint,
    rename_variables,
)
from graphflow.execution.variable_store import VariableStore
from graphflow.runtime.checkpoint import Checkpoint, Manifest, files, load
from graphflow.runtime.checkpoint.folder import (
    MANIFEST,
    load_file,
)
from graphflow.runtime.checkpoint.store import folders, newest
from graphflow.runtime.telemetry.logs import Log

_log = Log("graphflow.session")


def read_checkpoint(
    state: VariableStore, folder: str | os.PathLike[str], step: int, *, strict: bool, rename: Rename
) -> tuple[Path, Checkpoint]:
    """Return the place of a checkpoint, and its content under the names of the model.

    The folder is a checkpoint; or a directory of several, of which the newest that is complete and
    fits is taken; or a file of safetensors.

    Args:
        step: step number for a safetensors file, which has none.

    Raises:
        CheckpointError: there is no such checkpoint, or a name of `rename` is not in it.
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
    """Return the newest checkpoint of a directory that is complete and fits the variables."""

    def misfit(manifest: Manifest) -> str:
        return state.describe_mismatch(
            rename_variables(manifest.variables, rename, source), strict=strict
        )

    ignored: list[str] = []
    found = newest(source, ignored.append, misfit)
    if found is None:
        raise CheckpointError(f"no checkpoint in {source} can be used: {'; '.join(ignored)}")
    for each in ignored:
        _log.tell("checkpoint.ignored", reason=each)
    return found

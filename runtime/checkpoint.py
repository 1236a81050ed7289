"""Checkpoints: variables by name in safetensors, with a manifest of digests, written so that a
crash leaves the old.

A checkpoint is a folder with `state.safetensors` (any safetensors reader opens it) and
`manifest.json`. It is written beside its place, synced to disk, and renamed. While an old one makes
room it is set aside, and `load` finds it there.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphflow.errors import CheckpointError

FORMAT = 1
_STATE = "state.safetensors"
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a session: variables by name, and how many steps were committed."""

    variables: Mapping[str, np.ndarray[Any, Any]]
    step: int


def save(checkpoint: Checkpoint, folder: str | os.PathLike[str]) -> None:
    """Write a checkpoint; one that is there already is replaced when the new one is complete.

    Raises:
        CheckpointError: the place cannot be written; what was there is intact.
    """
    from safetensors.numpy import save as to_bytes  # loads with its own extension module

    target = Path(os.path.abspath(folder))
    if "__metadata__" in checkpoint.variables:
        raise CheckpointError("the format keeps the name '__metadata__'; rename that variable")
    data = to_bytes({name: np.array(v, order="C") for name, v in checkpoint.variables.items()})
    manifest = {
        "format": FORMAT,
        "step": checkpoint.step,
        "sha256": {_STATE: hashlib.sha256(data).hexdigest()},
        "variables": {
            name: [v.dtype.name, list(v.shape)] for name, v in checkpoint.variables.items()
        },
    }
    fresh = None
    try:
        if target.exists() and not (target / _MANIFEST).is_file():
            raise CheckpointError(
                f"{target} exists and is no checkpoint; give a new folder, or remove it first"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        _write(fresh / _STATE, data)
        _write(fresh / _MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync(fresh)
        _replace(fresh, target)
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoint {target}: {error}; what was there before is intact"
        ) from error
    finally:
        if fresh is not None:  # it still has this name only if something went wrong
            shutil.rmtree(fresh, ignore_errors=True)


def load(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        CheckpointError: missing, truncated, changed since it was written, or of a newer format.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load as from_bytes

    source = _found(Path(os.path.abspath(folder)))
    try:
        manifest = json.loads((source / _MANIFEST).read_text())
        if manifest["format"] > FORMAT:
            raise CheckpointError(
                f"checkpoint {source} has format {manifest['format']}, this version reads up to "
                f"{FORMAT}; update graphflow"
            )
        data = (source / _STATE).read_bytes()
        digest, step = manifest["sha256"][_STATE], int(manifest["step"])
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{source} is no checkpoint: {error}; give a folder that Session.save wrote"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"cannot read checkpoint {source}: {error!r}; use an older one"
        ) from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(
            f"checkpoint {source} was changed or damaged after it was written: "
            f"the digest of {_STATE} differs; use an older checkpoint"
        )
    try:
        return Checkpoint(from_bytes(data), step)
    except SafetensorError as error:
        raise CheckpointError(f"cannot read checkpoint {source}: {error}") from error


def _found(target: Path) -> Path:
    """The checkpoint's place: where the old one was set aside, if saving stopped just then."""
    return target if target.exists() else next(iter(_aside(target)), target)


def _aside(target: Path) -> list[Path]:
    """Checkpoints that were set aside for a new one here."""
    name = glob.escape(target.name)
    return [file.parent for file in target.parent.glob(f".{name}-old-*/{name}/{_MANIFEST}")]


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(fresh: Path, target: Path) -> None:
    """Put the new folder in place of the old one, which goes only when the new one is there."""
    old = None
    try:
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            os.rename(target, old / target.name)
        os.rename(fresh, target)
    except BaseException:
        if old is not None:
            if (old / target.name).exists():
                os.rename(old / target.name, target)
            os.rmdir(old)
        raise
    _sync(target.parent)
    for aside in _aside(target):
        shutil.rmtree(aside.parent, ignore_errors=True)

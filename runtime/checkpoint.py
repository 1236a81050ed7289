"""Checkpoints: variables by name in safetensors, with a manifest of digests, written so that a
crash leaves the old.

A checkpoint is a folder with `state.safetensors` (any safetensors reader opens it) and
`manifest.json`. Complex numbers are stored as pairs of floats, (real, imaginary) along a last axis
of size 2, and named in the file's metadata under "complex"; the manifest holds every variable's own
dtype and shape. It is written beside its place, synced to disk, and renamed. While an old one makes
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

from graphflow.errors import CheckpointError, DTypeError
from graphflow.spec import as_dtype, real_dtype

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
    target = Path(os.path.abspath(folder))
    if "__metadata__" in checkpoint.variables:
        raise CheckpointError("the format keeps the name '__metadata__'; rename that variable")
    data = _to_bytes(checkpoint.variables)
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
    from safetensors import SafetensorError  # loads with its own extension module

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
        dtypes = {name: as_dtype(entry[0]) for name, entry in manifest["variables"].items()}
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{source} is no checkpoint: {error}; give a folder that Session.save wrote"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DTypeError) as error:
        raise CheckpointError(
            f"cannot read checkpoint {source}: {error!r}; use an older one"
        ) from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(
            f"checkpoint {source} was changed or damaged after it was written: "
            f"the digest of {_STATE} differs; use an older checkpoint"
        )
    try:
        return Checkpoint(_from_bytes(data, dtypes), step)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot read checkpoint {source}: {error!r}") from error


def _to_bytes(variables: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """The variables as a safetensors file."""
    from safetensors.numpy import save

    arrays = {name: np.array(value, order="C") for name, value in variables.items()}
    pairs = [name for name, array in arrays.items() if array.dtype.kind == "c"]
    for name in pairs:
        flat = arrays[name].reshape(-1).view(real_dtype(arrays[name].dtype))
        arrays[name] = flat.reshape(*arrays[name].shape, 2)
    data: bytes = save(arrays, {"complex": json.dumps(pairs)} if pairs else None)
    return data


def _from_bytes(
    data: bytes, dtypes: Mapping[str, np.dtype[Any]]
) -> dict[str, np.ndarray[Any, Any]]:
    """The variables of a safetensors file, as the manifest says what they are."""
    import safetensors

    read: Any = safetensors.deserialize  # typed in some versions, untyped in others
    variables = {}
    for name, entry in read(data):
        dtype, shape = dtypes[name], entry["shape"]
        array = np.frombuffer(entry["data"], dtype.newbyteorder("<")).astype(dtype, copy=False)
        variables[name] = array.reshape(shape[:-1] if dtype.kind == "c" else shape)
    return variables


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

"""One checkpoint: a folder with shards and a manifest. A crash while writing leaves the old one.

    CheckpointDraft.begin → shards, by whoever has the variables → commit: manifest, sync, rename

`load` reads the files of any version, and verifies every byte before it uses one.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Collection, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import CheckpointError
from graphflow.placement.clusters.machine.host_facts import host_memory
from graphflow.runtime.checkpoint import files
from graphflow.runtime.checkpoint.manifest import (
    CheckpointShard,
    Copies,
    Groups,
    Manifest,
    Signature,
    VariablePiece,
)
from graphflow.runtime.checkpoint.pieced_arrays import LazyArray, PiecedArray
from graphflow.runtime.checkpoint.shard import (
    encode_shard,
    map_arrays,
    read_all_arrays,
    read_arrays,
    read_metadata,
)

Array = np.ndarray[Any, Any]
MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 28
"""Largest manifest to read, in bytes; a variable, or a piece of one, takes some hundred."""
MAPPED_BYTES = 1 << 26
"""Bytes of a shard from which it is mapped into memory, and not read."""
CLIENT_SHARD = "client.safetensors"
"""The shard of variables that are not on a worker yet."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a session: its variables by name, and how many steps were committed.

    Attributes:
        unnamed: see `Manifest`.
        copies: of the variables whose copies have values of their own; their mean is the
            variable's.
    """

    variables: Mapping[str, Array | LazyArray]
    step: int
    unnamed: Groups = ()
    copies: Mapping[str, Copies] = field(default_factory=dict)

    @property
    def signatures(self) -> dict[str, Signature]:
        """Dtypes and shapes, by name."""
        return {name: signature(value) for name, value in self.variables.items()}


@dataclass
class CheckpointDraft:
    """A checkpoint that is being written, in a folder beside its place.

    Attributes:
        folder: where shards are written.
    """

    target: Path
    folder: Path
    step: int
    epoch: int
    shards: list[CheckpointShard] = field(default_factory=list)

    @classmethod
    def begin(cls, target: Path, step: int, epoch: int = 0) -> CheckpointDraft:
        """Make a new folder beside `target`.

        Raises:
            OSError: it cannot be made.
        """
        return cls(target, files.begin_folder(target), step, epoch)

    def write(self, file: str, variables: Mapping[str, Array | LazyArray]) -> None:
        """Write a shard from this process."""
        self.add(write_shard(self.folder / file, variables, self.step))

    def add(self, shard: CheckpointShard) -> None:
        """Add a shard that was written."""
        self.shards.append(shard)

    def commit(
        self,
        variables: Mapping[str, Signature],
        pieces: Mapping[str, tuple[VariablePiece, ...]] | None = None,
        unnamed: Groups = (),
    ) -> None:
        """Write the manifest, and put the checkpoint in its place.

        Args:
            pieces: of variables that are stored in pieces.
            unnamed: groups of variables that the session numbered, in order of creation.

        Raises:
            CheckpointError: a variable is in no shard.
            OSError: it cannot be written; the old checkpoint is intact.
        """
        shards = tuple(self.shards)
        manifest = Manifest(self.step, shards, variables, self.epoch, pieces or {}, unnamed)
        held = {name for shard in self.shards for name in shard.variables}
        missing = sorted(set(manifest.stored) - held)
        if missing:
            raise CheckpointError(f"no shard holds {', '.join(missing)}")
        files.write_new(self.folder / MANIFEST, [manifest.to_bytes()])
        files.put_in_place(self.folder, self.target)

    def discard(self) -> None:
        """Remove the draft, unless it was put in place."""
        files.remove_folder(self.folder)


def write_shard(
    path: str | os.PathLike[str],
    variables: Mapping[str, Array | LazyArray],
    step: int,
    within: int | None = None,
) -> CheckpointShard:
    """Write the variables of one worker to a file, and return its entry for the manifest."""
    parts = encode_shard(variables, {"step": str(step)})
    digest, size = files.write_new(path, parts, within)
    return CheckpointShard(os.path.basename(path), digest, size, tuple(variables))


def save(
    checkpoint: Checkpoint,
    folder: str | os.PathLike[str],
    shards: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Write a checkpoint in place of an older one, or of an empty folder.

    The old checkpoint is replaced once the new one is complete. A link stays, and its target is
    replaced.

    Args:
        shards: names of variables by file; default: one file for all.

    Raises:
        CheckpointError: the place cannot be written; the old content is intact.
    """
    target = files.resolve_links(folder)
    variables = checkpoint.variables
    pieced = {n: value.pieces for n, value in variables.items() if isinstance(value, PiecedArray)}
    parts: dict[str, Copies] = {**pieced, **checkpoint.copies}
    divided = shards if shards is not None else {"worker-0.safetensors": list(variables)}
    draft = None
    try:
        if target.exists() and not ((target / MANIFEST).is_file() or files.is_empty(target)):
            raise CheckpointError(
                f"{target} exists and is no checkpoint; give a new or an empty folder"
            )
        draft = CheckpointDraft.begin(target, checkpoint.step)
        for file, names in divided.items():
            whole = {name: variables[name] for name in names if name not in parts}
            copies = {
                _copy_name(name, i): value
                for name in names
                for i, (_, value) in enumerate(parts.get(name, ()))
            }
            draft.write(file, whole | copies)
        pieces = {
            name: tuple((_copy_name(name, i), spans) for i, (spans, _) in enumerate(copies))
            for name, copies in parts.items()
        }
        draft.commit(checkpoint.signatures, pieces, checkpoint.unnamed)
    except OSError as error:
        raise CheckpointError(write_error_text(target, error)) from error
    finally:
        if draft is not None:  # does nothing after a commit, which renames the folder
            draft.discard()


def _copy_name(name: str, number: int) -> str:
    """Return the name under which a shard holds one copy of a variable."""
    return f"{name}@{number}"


def load(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        CheckpointError: missing, truncated, changed since it was written, with a shard of another
            checkpoint, or of a newer format.
    """
    source = files.find_checkpoint(files.resolve_links(folder))
    manifest = read_manifest(source)
    stored: dict[str, Array] = {}
    try:
        for shard in manifest.shards:
            data = _read_shard(source, shard, manifest.step)
            dtypes = {n: manifest.dtype(n) for n in shard.variables}
            if isinstance(data, mmap.mmap):
                stored |= map_arrays(data, dtypes)
            else:
                stored |= read_arrays(data, dtypes)
        return Checkpoint(
            manifest.assemble(stored), manifest.step, manifest.unnamed, manifest.copies(stored)
        )
    except CheckpointError as error:
        raise CheckpointError(f"cannot read checkpoint {source}: {error}") from error


def load_file(source: Path) -> dict[str, Array]:
    """Return all arrays of a single safetensors file, whichever program wrote it.

    Raises:
        CheckpointError: it cannot be read, or is of another format.
    """
    try:
        return read_all_arrays(files.read_file(source, host_memory()))
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot read {source} as a safetensors file: {error}; give a folder that "
            "Session.save wrote, or read the file by its own program and give its arrays to s.set"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {source}: {error}") from error


def read_manifest(source: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder.

    Raises:
        CheckpointError: it is missing or invalid.
    """
    try:
        return Manifest.from_bytes(files.read_file(source / MANIFEST, _MAX_MANIFEST_BYTES))
    except FileNotFoundError as error:
        files_there = [place.name for place in sorted(source.glob("*.safetensors"))]
        or_file = f", or one of its files, such as {files_there[0]}" if files_there else ""
        raise CheckpointError(
            f"{source} is no checkpoint: {error}; give a folder that Session.save wrote{or_file}"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot read checkpoint {source}: {error}; use an older one"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot read checkpoint {source}: {error}; use an older one"
        ) from error


def _read_shard(source: Path, shard: CheckpointShard, step: int) -> bytes | mmap.mmap:
    """Return a shard's verified bytes; those of a large one stay in the file.

    Raises:
        CheckpointError: missing, damaged, or of another step.
    """
    if os.path.basename(shard.file) != shard.file:
        raise CheckpointError(f"its manifest names {shard.file!r}, which is not in the folder")
    try:
        data: bytes | mmap.mmap
        if shard.nbytes is not None and shard.nbytes >= MAPPED_BYTES:
            data = files.map_file(source / shard.file, shard.nbytes)
        else:
            data = files.read_file(source / shard.file, host_memory(), shard.nbytes)
    except files.WrongSize as error:
        raise CheckpointError(
            f"its shard {shard.file} has {error} bytes, {shard.nbytes} were written; use an older "
            "one"
        ) from None
    except FileNotFoundError:
        raise CheckpointError(f"its shard {shard.file} is missing; use an older one") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise CheckpointError(f"{error}; use an older one") from error
    if hashlib.sha256(data).hexdigest() == shard.sha256:
        return data
    of = read_metadata(data).get("step", str(step))
    if of != str(step):
        raise CheckpointError(f"its shard {shard.file} is of step {of}, not {step}; use another")
    raise CheckpointError(
        f"the digest of {shard.file} differs: it was changed or damaged after it was written; use "
        "an older one"
    )


def signature(value: Array | LazyArray) -> Signature:
    """Return an array's dtype and shape."""
    return value.dtype.name, value.shape


def write_error_text(target: Path, error: BaseException) -> str:
    """Return the message for a checkpoint that could not be written."""
    return f"cannot write checkpoint {target}: {error}; what was there before is intact"

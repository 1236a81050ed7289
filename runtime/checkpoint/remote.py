"""The shard that a worker writes for its coordinator, under the worker's own root.

The coordinator makes a checkpoint's folder with an unguessable name, and sends that name. A worker
that finds the folder under its own root shares the file system, and writes its shard there. Any
other worker sends its variables instead. A name from the wire is never used as a path unless it has
exactly the form of such a name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from graphflow.errors import CheckpointError, ProtocolError
from graphflow.runtime.checkpoint.folder import write_shard
from graphflow.runtime.checkpoint.manifest import CheckpointShard

Array = np.ndarray[Any, Any]

_FOLDER = re.compile(r"\.step-[0-9]{8,20}\.partial-[0-9a-f]{16}")
_FILE = re.compile(r"worker-(0|[1-9][0-9]{0,6})\.safetensors")


def shard_name(worker: int) -> str:
    """Return the file name of a worker's shard."""
    return f"worker-{worker}.safetensors"


def check_names(folder: str, file: str) -> None:
    """Refuse names that do not have the form of a checkpoint's folder and of a shard.

    Raises:
        ProtocolError: a separator, "..", NUL, or any other form.
    """
    for name, pattern in ((folder, _FOLDER), (file, _FILE)):
        if not pattern.fullmatch(name):
            raise ProtocolError(f"{name[:100]!r} does not name a checkpoint's folder or shard")


def write_under(
    root: str | os.PathLike[str] | None,
    folder: str,
    file: str,
    variables: Mapping[str, Array],
    step: int,
) -> CheckpointShard | None:
    """Write a shard into a folder under a root; return None if the folder does not exist.

    Raises:
        ProtocolError: a name has another form; nothing was touched.
        CheckpointError: the file cannot be written.
    """
    check_names(folder, file)
    if root is None:
        return None
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        within = os.open(os.path.join(root, folder), flags)
    except OSError:  # another file system, or a link in the folder's place
        return None
    try:
        return write_shard(file, variables, step, within)
    except OSError as error:
        raise CheckpointError(f"cannot write {file} in {root}: {error}") from error
    finally:
        os.close(within)

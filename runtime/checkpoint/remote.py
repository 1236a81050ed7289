"""What a worker writes for its coordinator: its shard, under a folder it was started with.

The coordinator makes a checkpoint's folder and tells its name, which nobody can guess. A worker
that finds this folder under its own root shares the file system, and writes there; any other sends
its variables instead. A name from the wire is never a path: it has to look exactly like one of
ours.
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
    """The file that a worker's variables are in."""
    return f"worker-{worker}.safetensors"


def check_names(folder: str, file: str) -> None:
    """Refuse names that are not those of a checkpoint's folder and of a shard.

    Raises:
        ProtocolError: a separator, "..", NUL, or anything else of another form.
    """
    for name, pattern in ((folder, _FOLDER), (file, _FILE)):
        if not pattern.fullmatch(name):
            raise ProtocolError(f"{name[:100]!r} is no name of a checkpoint's folder or shard")


def write_under(
    root: str | os.PathLike[str] | None,
    folder: str,
    file: str,
    variables: Mapping[str, Array],
    step: int,
) -> CheckpointShard | None:
    """Write a shard into a folder under a root; None where there is no such folder.

    Raises:
        ProtocolError: a name that is none of ours; nothing is touched.
        CheckpointError: the disk does not take it.
    """
    check_names(folder, file)
    if root is None:
        return None
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        within = os.open(os.path.join(root, folder), flags)
    except OSError:  # another file system, or a link that somebody put there
        return None
    try:
        return write_shard(file, variables, step, within)
    except OSError as error:
        raise CheckpointError(f"cannot write {file} in {root}: {error}") from error
    finally:
        os.close(within)

"""Files that appear whole or not at all: a draft beside the file takes its place."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from glob import escape
from pathlib import Path

_DRAFT = ".part"
_STALE_SECONDS = 3600.0
"""The age of a draft whose writer was killed."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that readers see its old content or its new content, and nothing between.

    The file gets the permissions of any new file. Text is written as UTF-8.

    Raises:
        OSError: the file cannot be written; it is as before.
    """
    _remove_stale_drafts(path)
    data = content.encode() if isinstance(content, str) else content
    descriptor, draft = _open_draft(path)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        draft.replace(path)
    except BaseException:  # Ctrl-C, too
        with suppress(OSError):
            draft.unlink()
        raise


def check_atomic_write(path: Path) -> None:
    """Check that the folder of a file takes drafts.

    Raises:
        OSError: it does not.
    """
    descriptor, draft = _open_draft(path)
    os.close(descriptor)
    draft.unlink()


def _open_draft(path: Path) -> tuple[int, Path]:
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}{_DRAFT}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(draft, flags, 0o666), draft  # the system takes the umask off these permissions


def _remove_stale_drafts(path: Path) -> None:
    """Remove the drafts of processes that were killed while they wrote the file."""
    for draft in path.parent.glob(f".{escape(path.name)}.*{_DRAFT}"):
        with suppress(OSError):  # another process removes them, too
            if time.time() - draft.stat().st_mtime > _STALE_SECONDS:
                draft.unlink()

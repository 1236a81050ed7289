"""Folders whose files ops may read in this process.

A session's own workers read what their user may read. A worker that serves others reads only below
the folders that it was started with.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from graphflow.errors import ArgumentError


class _Allowed:
    """The folders of this process; None: all."""

    folders: tuple[str, ...] | None = None


_allowed = _Allowed()


def restrict_data_folders(folders: Sequence[str] | None) -> None:
    """Allow ops of this process to read files below some folders only; None: all files."""
    _allowed.folders = None if folders is None else tuple(map(os.path.realpath, folders))


def check_data_file(path: str) -> str:
    """Return the real path of a file that ops may read.

    Raises:
        ArgumentError: this process may not read it for a session.
    """
    real, folders = os.path.realpath(path), _allowed.folders
    if folders is None or any(real.startswith(os.path.join(each, "")) for each in folders):
        return real
    raise ArgumentError(
        f"this worker reads no file {path!r} for sessions; start it with --allow-data and the "
        f"file's folder (allowed: {', '.join(folders) or 'none'})"
    )

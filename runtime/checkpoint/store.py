"""The checkpoint store: a directory that keeps the last few checkpoints of one session.

    ckpt/session.json               the session's name, secret, epoch and present writer
    ckpt/step-00000100/             checkpoints ckpt/step-00000200/

A process that opens the directory takes the next epoch. The process with the epoch before writes
nothing from then on.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from graphflow.errors import CheckpointError, StaleEpoch
from graphflow.runtime.checkpoint import files
from graphflow.runtime.checkpoint.folder import (
    MANIFEST,
    Checkpoint,
    CheckpointDraft,
    load,
    read_manifest,
    write_error_text,
)
from graphflow.runtime.checkpoint.manifest import Manifest

_SESSION = "session.json"
_MAX_SESSION_BYTES = 1 << 16  # largest session.json to read
_ABSENT_ERRORS = {
    getattr(errno, n) for n in ("ENOENT", "EISDIR", "EINVAL", "ENXIO", "ELOOP", "EFBIG")
}
"""Errors that mean that there is no session.json: nothing, a folder, a pipe, a socket, a link to
itself, or a file that is too large. Other errors may be transient, and hide a session."""
_STEP = re.compile(r"step-([0-9]{8,20})")
_LEFTOVER = re.compile(
    rf"\.({_STEP.pattern}\.(partial|old|gone)|{re.escape(_SESSION)}\.(partial|gone))-[0-9a-f]{{16}}"
)
"""Leftovers of a session's crash. Other names may belong to a process that is saving now."""
_HEX = re.compile(r"[0-9a-f]{32}")
_EPOCH = re.compile(r"[0-9]{1,18}")  # as many digits as messages can carry
_MAX_RESCANS = 20
"""How often a directory is listed again because a checkpoint was replaced while it was read."""


class CheckpointStore:
    """The checkpoints of one session.

    Args:
        root: the directory; made if it does not exist.
        keep: how many checkpoints to keep.

    Attributes:
        session, token: the name by which workers know the session, also after a restart, and the
            secret that proves that it is the same one.
        epoch: how often the session was begun or recovered.
        cleaned: descriptions of what was done about leftovers of a crash.

    Raises:
        CheckpointError: the directory cannot be used.
    """

    def __init__(self, root: str | os.PathLike[str], keep: int) -> None:
        self.root = files.absolute_path(root)
        self.keep = keep
        try:
            if (self.root / MANIFEST).is_file():
                raise CheckpointError(
                    f"{self.root} is one checkpoint; checkpoint= takes a directory for several: "
                    "give its parent, or load this one with s.load"
                )
            _check_links(self.root)
            files.make_folder(self.root)
            self.cleaned = files.clean_up(self.root, _LEFTOVER)
            self._owner = secrets.token_hex(16)
            noted = self._read_session()
            self.session = noted["session"] if noted else secrets.token_hex(16)
            self.token = noted["token"] if noted else secrets.token_hex(16)
            # Above the epochs of all checkpoints, or new ones would count as older.
            written = (_epoch(folder) or 0 for folder in folders(self.root))
            self.epoch = 1 + max(int(noted["epoch"]) if noted else 0, *written, 0)
            self._write_session()
        except OSError as error:
            raise CheckpointError(
                f"cannot keep checkpoints in {self.root}: {error}; give a directory that can be "
                "read and written"
            ) from error

    # The session ------------------------------------------------------------------------------

    def advance(self) -> int:
        """Begin the next epoch, which fences off all earlier ones.

        If the directory cannot be read or written, the workers still learn the epoch, and it is
        written with the next checkpoint.

        Raises:
            StaleEpoch: another process has begun one.
        """
        with suppress(OSError):
            self.check_owner()
        self.epoch += 1
        with suppress(OSError):
            self._write_session()
        return self.epoch

    def _write_session(self) -> None:
        content = {
            "session": self.session,
            "token": self.token,
            "epoch": self.epoch,
            "owner": self._owner,
        }
        files.replace_file(self.root / _SESSION, json.dumps(content).encode())

    def _rewrite_session(self) -> None:
        """Write session.json again if it is missing or outdated."""
        there = self._read_session()
        if there is None or there["epoch"] != str(self.epoch):
            self._write_session()

    def check_owner(self) -> None:
        """Check that the directory still belongs to this session.

        Raises:
            StaleEpoch: another process has taken it over.
        """
        there = self._read_session()
        if there is not None and there["owner"] != self._owner:
            raise StaleEpoch(
                f"another session has taken over {self.root}: it is at epoch {there['epoch']}, "
                f"this one at {self.epoch}; one directory is for one session at a time"
            )

    def _read_session(self) -> dict[str, str] | None:
        """Return the content of session.json; None if it is missing or invalid."""
        try:
            content = json.loads(files.read_file(self.root / _SESSION, _MAX_SESSION_BYTES))
            found = {key: str(content[key]) for key in ("session", "token", "epoch", "owner")}
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        except OSError as error:
            if error.errno in _ABSENT_ERRORS:
                return None
            raise
        names = all(_HEX.fullmatch(found[key]) for key in ("session", "token", "owner"))
        return found if names and _EPOCH.fullmatch(found["epoch"]) else None

    # Checkpoints ------------------------------------------------------------------------------

    def folders(self) -> list[Path]:
        """Return the folders of checkpoints, including damaged ones, the newest first."""
        return folders(self.root)

    def begin(self, step: int) -> CheckpointDraft:
        """Begin to write the checkpoint of a step.

        Raises:
            CheckpointError, StaleEpoch: it cannot be written.
        """
        target = self.root / f"step-{step:08d}"
        draft = None
        try:
            self.check_owner()
            # A worker may still have written to a draft that had failed.
            files.clean_up(self.root, _LEFTOVER)
            draft = CheckpointDraft.begin(target, step, self.epoch)
            self._rewrite_session()
            return draft
        except OSError as error:
            if draft is not None:
                draft.discard()
            raise CheckpointError(write_error_text(target, error)) from error

    def prune(self) -> None:
        """Remove all but the last few checkpoints; an unreadable one stays."""
        readable = [folder for folder in self.folders() if _epoch(folder) is not None]
        for folder in readable[self.keep :]:
            files.remove_folder(folder)

    def newest(self, skipped: Callable[[str], None]) -> tuple[Path, Checkpoint] | None:
        """Return the newest readable checkpoint and its folder; None if there is none.

        Args:
            skipped: called with the reason for each newer one that is left out.
        """
        return newest(self.root, skipped)


def folders(root: Path) -> list[Path]:
    """Return the checkpoints of a directory, including damaged ones, the newest first.

    A later epoch's checkpoint is newer, whatever its step: a session that went back to an older
    checkpoint continued from there.
    """
    found = [each for each in root.iterdir() if _STEP.fullmatch(each.name)]
    epochs = {each: _epoch(each) for each in found}
    latest = max((e for e in epochs.values() if e is not None), default=0)

    def age(folder: Path) -> tuple[int, int]:
        epoch = epochs[folder]
        return (latest if epoch is None else epoch, int(folder.name[5:]))

    return sorted(found, key=age, reverse=True)


def _check_links(root: Path) -> None:
    """Refuse a directory with a dangling link in its path.

    The link may lead to a disk that is not mounted. A directory made there would be hidden once it
    is.

    Raises:
        CheckpointError: a link leads nowhere.
    """
    for each in (root, *root.parents):
        if each.is_symlink() and not each.exists():
            raise CheckpointError(
                f"{each} is a link to {os.readlink(each)}, where nothing is; make a folder there "
                "(is its disk mounted?), or give another directory"
            )


def _epoch(folder: Path) -> int | None:
    """Return the epoch that wrote a checkpoint; None if its manifest cannot be read."""
    try:
        return read_manifest(folder).epoch
    except CheckpointError:
        return None


def newest(
    root: Path,
    skipped: Callable[[str], None],
    fits: Callable[[Manifest], str] = lambda manifest: "",
) -> tuple[Path, Checkpoint] | None:
    """Return the newest checkpoint of a directory that is readable and fits, and its folder.

    None if there is none.

    Args:
        skipped: called with the reason for each newer one that is left out.
        fits: says, by the manifest, why a checkpoint does not fit the session; "" if it fits.
    """
    left, passed = _MAX_RESCANS, set()
    waiting = folders(root)
    while waiting:
        folder = waiting.pop(0)
        was = _identity(folder)
        try:
            wrong = fits(read_manifest(folder))
            if not wrong:
                return folder, load(folder)
            skipped(f"{folder} is of another model: {wrong}")
        except CheckpointError as error:
            if left and _identity(folder) != was:  # its writer has replaced it meanwhile
                left -= 1
                waiting = [each for each in folders(root) if each not in passed]
                continue
            skipped(str(error))
        passed.add(folder)
    return None


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return an identity that differs for another folder of that name; None for no folder."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino

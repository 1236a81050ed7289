"""Store: a directory of checkpoints, of which the last few are kept.

    ckpt/session.json               the session: its name, secret and epoch, and who writes here
    ckpt/step-00000100/             checkpoints
    ckpt/step-00000200/

Whoever opens the directory takes the next epoch; one who had it before writes nothing from then on.
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
_MAX_SESSION_BYTES = 1 << 16  # bytes of one that is read
_ABSENT_ERRORS = {
    getattr(errno, n) for n in ("ENOENT", "EISDIR", "EINVAL", "ENXIO", "ELOOP", "EFBIG")
}
"""Errors where something else is in its place: nothing, a folder, a pipe, a socket, a link to
itself, too much. Any other may be gone with the next look, when another session may be noted."""
_STEP = re.compile(r"step-([0-9]{8,20})")
_LEFTOVER = re.compile(
    rf"\.({_STEP.pattern}\.(partial|old|gone)|{re.escape(_SESSION)}\.(partial|gone))-[0-9a-f]{{16}}"
)
"""What a crash leaves of a session; anything else may be what another process is just saving."""
_HEX = re.compile(r"[0-9a-f]{32}")
_EPOCH = re.compile(r"[0-9]{1,18}")  # as many as messages can tell
_MAX_RESCANS = 20
"""How often a directory is looked at again because what was being read was removed or replaced."""


class CheckpointStore:
    """The checkpoints of one session.

    Args:
        root: the directory; it is made if it is not there.
        keep: how many checkpoints stay.

    Attributes:
        session, token: the name under which workers know the session, also after a new start, and
            the secret that shows them that it is the same.
        epoch: how often the session was begun or recovered.

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
            # Above what wrote the checkpoints, too: else what is written now would count as older.
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
        """Begin the next epoch: all that is of earlier ones is fenced.

        Where the directory cannot be read or written, workers know of it all the same, and it is
        noted with the next checkpoint.

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
        told = {
            "session": self.session,
            "token": self.token,
            "epoch": self.epoch,
            "owner": self._owner,
        }
        files.replace_file(self.root / _SESSION, json.dumps(told).encode())

    def _rewrite_session(self) -> None:
        """Note what is not there any more, or could not be written when it was time."""
        there = self._read_session()
        if there is None or there["epoch"] != str(self.epoch):
            self._write_session()

    def check_owner(self) -> None:
        """Make sure that the directory is still this session's.

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
        """What is noted of the session; None where that makes no sense."""
        try:
            told = json.loads(files.read_file(self.root / _SESSION, _MAX_SESSION_BYTES))
            found = {key: str(told[key]) for key in ("session", "token", "epoch", "owner")}
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
        """Folders of checkpoints, the newest first; damaged ones, too."""
        return folders(self.root)

    def begin(self, step: int) -> CheckpointDraft:
        """Start to write the checkpoint of a step.

        Raises:
            CheckpointError, StaleEpoch: it cannot be written.
        """
        target = self.root / f"step-{step:08d}"
        draft = None
        try:
            self.check_owner()
            files.clean_up(
                self.root, _LEFTOVER
            )  # a worker may have written on to one that had failed
            draft = CheckpointDraft.begin(target, step, self.epoch)
            self._rewrite_session()
            return draft
        except OSError as error:
            if draft is not None:
                draft.discard()
            raise CheckpointError(write_error_text(target, error)) from error

    def prune(self) -> None:
        """Remove all checkpoints but the last few; one that cannot be read stays."""
        readable = [folder for folder in self.folders() if _epoch(folder) is not None]
        for folder in readable[self.keep :]:
            files.remove_folder(folder)

    def newest(self, skipped: Callable[[str], None]) -> tuple[Path, Checkpoint] | None:
        """The newest checkpoint that can be read, and where; None where there is none.

        Args:
            skipped: is told of each newer one, and why it is left out.
        """
        return newest(self.root, skipped)


def folders(root: Path) -> list[Path]:
    """The checkpoints of a directory, the newest first; damaged ones, too.

    What a later epoch wrote is newer, whatever its step: a session that went back to an older
    checkpoint goes on from there.
    """
    found = [each for each in root.iterdir() if _STEP.fullmatch(each.name)]
    epochs = {each: _epoch(each) for each in found}
    latest = max((e for e in epochs.values() if e is not None), default=0)

    def age(folder: Path) -> tuple[int, int]:
        epoch = epochs[folder]
        return (latest if epoch is None else epoch, int(folder.name[5:]))

    return sorted(found, key=age, reverse=True)


def _check_links(root: Path) -> None:
    """Refuse a directory on whose way a link leads nowhere: it may lead to a disk that is not
    mounted, and what was made there would be out of sight once it is.

    Raises:
        CheckpointError: see above.
    """
    for each in (root, *root.parents):
        if each.is_symlink() and not each.exists():
            raise CheckpointError(
                f"{each} is a link to {os.readlink(each)}, where nothing is; make a folder there "
                "(is its disk mounted?), or give another directory"
            )


def _epoch(folder: Path) -> int | None:
    """The epoch that wrote a checkpoint; None where its manifest cannot be read."""
    try:
        return read_manifest(folder).epoch
    except CheckpointError:
        return None


def newest(
    root: Path,
    skipped: Callable[[str], None],
    fits: Callable[[Manifest], str] = lambda manifest: "",
) -> tuple[Path, Checkpoint] | None:
    """The newest checkpoint of a directory that can be read and fits, and where; None where there
    is none.

    Args:
        skipped: is told of each newer one, and why it is left out.
        fits: why a checkpoint is not for this session, by its manifest; "" if it is.
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
            if left and _identity(folder) != was:  # its writer went on, and a newer one is there
                left -= 1
                waiting = [each for each in folders(root) if each not in passed]
                continue
            skipped(str(error))
        passed.add(folder)
    return None


def _identity(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from another one that took its name; None where there is none."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino

"""Store: a directory of checkpoints, of which the last few are kept.

    ckpt/session.json               which session writes here, and its epoch
    ckpt/step-00000100/             checkpoints
    ckpt/step-00000200/

Whoever opens the directory takes the next epoch; one who had it before writes nothing from then on.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from graphflow.errors import CheckpointError, StaleEpoch
from graphflow.runtime.checkpoint import files
from graphflow.runtime.checkpoint.folder import (
    MANIFEST,
    Checkpoint,
    Draft,
    load,
    read_manifest,
    unwritable,
)
from graphflow.runtime.checkpoint.manifest import Manifest

_SESSION = "session.json"
_STEP = re.compile(r"step-([0-9]{8,20})")
_NAME = re.compile(r"[0-9a-f]{32}")


class Store:
    """The checkpoints of one session.

    Args:
        root: the directory; it is made if it is not there.
        keep: how many checkpoints stay.

    Attributes:
        session: the name under which workers know the session, also after a new start.
        epoch: how often the session was begun or recovered.

    Raises:
        CheckpointError: the directory cannot be used.
    """

    def __init__(self, root: str | os.PathLike[str], keep: int) -> None:
        self.root = files.absolute(root)
        self.keep = keep
        try:
            if (self.root / MANIFEST).is_file():
                raise CheckpointError(
                    f"{self.root} is one checkpoint; checkpoint= takes a directory for several: "
                    "give its parent, or load this one with s.load"
                )
            if not self.root.is_dir():
                self.root.mkdir(parents=True)
            self.cleaned = files.clean(self.root)
            self.session, self.epoch = self._read_session() or (secrets.token_hex(16), 0)
            self.advance()
        except OSError as error:
            raise CheckpointError(
                f"cannot keep checkpoints in {self.root}: {error}; give a directory that can be "
                "written"
            ) from error

    # The session ------------------------------------------------------------------------------

    def advance(self) -> int:
        """Begin the next epoch: all that is of earlier ones is fenced.

        Raises:
            StaleEpoch: another process has begun one.
            OSError: it cannot be written.
        """
        self.check()
        self.epoch += 1
        told = {"session": self.session, "epoch": self.epoch}
        files.replace_file(self.root / _SESSION, json.dumps(told).encode())
        return self.epoch

    def check(self) -> None:
        """Make sure that the directory is still this session's.

        Raises:
            StaleEpoch: another process has taken it over.
        """
        there = self._read_session()
        if there is not None and there != (self.session, self.epoch):
            raise StaleEpoch(
                f"another session has taken over {self.root}: it is at epoch {there[1]}, this one "
                f"at {self.epoch}; one directory is for one session at a time"
            )

    def _read_session(self) -> tuple[str, int] | None:
        """The name and the epoch that are noted; None where there are none that make sense."""
        try:
            told = json.loads((self.root / _SESSION).read_bytes())
            name, epoch = str(told["session"]), int(told["epoch"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return (name, epoch) if _NAME.fullmatch(name) and epoch >= 0 else None

    # Checkpoints ------------------------------------------------------------------------------

    def folders(self) -> list[Path]:
        """Folders of checkpoints, the newest first; damaged ones, too."""
        return folders(self.root)

    def begin(self, step: int) -> Draft:
        """Start to write the checkpoint of a step.

        Raises:
            CheckpointError, StaleEpoch: it cannot be written.
        """
        target = self.root / f"step-{step:08d}"
        self.check()
        try:
            return Draft.begin(target, step, self.epoch)
        except OSError as error:
            raise CheckpointError(unwritable(target, error)) from error

    def prune(self) -> None:
        """Remove all checkpoints but the last few."""
        for folder in self.folders()[self.keep :]:
            files.remove(folder)

    def newest(self, skipped: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that can be read; None where there is none.

        Args:
            skipped: is told of each newer one, and why it is left out.
        """
        return newest(self.root, skipped)


def folders(root: Path) -> list[Path]:
    """The checkpoints of a directory, the newest first; damaged ones, too."""
    found = [each for each in root.iterdir() if _STEP.fullmatch(each.name)]
    return sorted(found, key=lambda each: (-int(each.name[5:]), each.name))


def newest(
    root: Path,
    skipped: Callable[[str], None],
    fits: Callable[[Manifest], str] = lambda manifest: "",
) -> Checkpoint | None:
    """The newest checkpoint of a directory that can be read and fits; None where there is none.

    Args:
        skipped: is told of each newer one, and why it is left out.
        fits: why a checkpoint is not for this session, by its manifest; "" if it is.
    """
    for folder in folders(root):
        try:
            wrong = fits(read_manifest(folder))
            if not wrong:
                return load(folder)
            skipped(f"{folder} is of another model: {wrong}")
        except CheckpointError as error:
            skipped(str(error))
    return None

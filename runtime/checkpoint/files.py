"""Files and folders that are there after a crash, whole, or not at all.

All that a checkpoint does to a disk goes through here: written, synced, then renamed. What a crash
leaves behind has a name by which the next start knows it, with 16 digits that were drawn:

    .NAME.partial-0123456789abcdef   was being written
    .NAME.old-0123456789abcdef       made room for a new NAME; it is NAME where that never came
    .NAME.gone-0123456789abcdef      was being removed

Anything else is the user's, however much it looks like it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from graphflow.base.argument_checks import format_value
from graphflow.base.interrupts import defer_signals
from graphflow.errors import CheckpointError

Buffer = bytes | memoryview
_MAX_NAME = 255  # bytes of a name in a path
_LEFTOVER = re.compile(r"\.(.+)\.(partial|old|gone)-[0-9a-f]{16}", re.DOTALL)
_PIECE = 8 * 2**20  # bytes, hashed and written by turns while they are in the cache


def write_new(
    path: str | os.PathLike[str],
    parts: Iterable[Buffer],
    within: int | None = None,
    mode: int = 0o666,
) -> tuple[str, int]:
    """Write a file that is not there yet, to the disk itself.

    Args:
        parts: its content, as bytes.
        within: descriptor of the folder that a relative path is in.

    Returns:
        Its SHA-256, and its size in bytes.

    Raises:
        OSError: it exists, or the disk does not take it.
    """
    digest, size = hashlib.sha256(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, mode, dir_fd=within)
    try:
        for part in parts:
            rest = memoryview(part)
            size += len(rest)
            while rest:
                written = os.write(file, rest[:_PIECE])
                digest.update(rest[:written])
                rest = rest[written:]
        os.fsync(file)
    finally:
        os.close(file)
    return digest.hexdigest(), size


def read_file(path: str | os.PathLike[str], most: int, size: int | None = None) -> bytes:
    """All of a file. Nothing else is waited for or read without an end: no pipe, no device.

    Args:
        most: bytes that it may have.
        size: bytes that it has, where that is known; one of another size is not read.

    Raises:
        OSError: it cannot be read, is no file, or is too large.
        WrongSize: it has another size.
    """
    with open(path, "rb", opener=_open_nonblocking) as file:
        there = os.fstat(file.fileno())
        if not stat.S_ISREG(there.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        if size is not None and there.st_size != size:
            raise WrongSize(there.st_size)
        if there.st_size > most:
            raise OSError(errno.EFBIG, f"{there.st_size} bytes, at most {most} are read", str(path))
        return file.read()


class WrongSize(Exception):
    """A file does not have the bytes that were written; how many it has."""


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """A folder that is there after a crash, too, and those above it."""
    if folder.is_dir():
        return
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        with suppress(PermissionError):  # one that may be written to, and not be listed
            sync_folder(each.parent)


def begin_folder(target: Path) -> Path:
    """A new folder beside a target, to write what will take its place."""
    make_folder(target.parent)
    for left in _leftovers_of(target, "partial"):
        remove_folder(left)
    partial = _temporary_name(target, "partial")
    os.mkdir(partial)
    return partial


def put_in_place(partial: Path, target: Path) -> None:
    """Rename a folder that is complete; one that was there goes when the new one is there.

    Raises:
        OSError: it cannot; what was there is there.
    """
    sync_folder(partial)
    old = None
    if os.path.lexists(target):
        old = _temporary_name(target, "old")
        os.rename(target, old)
    try:
        os.rename(partial, target)
    except BaseException:
        if old is not None:
            os.rename(old, target)
        raise
    sync_folder(target.parent)
    for each in _leftovers_of(target, "old"):
        remove_folder(each)


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file for its owner alone, in place of another, or of whatever else is there
    but a folder with something in it: a crash leaves either."""
    fresh = _temporary_name(path, "partial")
    try:
        write_new(fresh, [data], mode=0o600)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        os.rename(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder as a whole: one of which files are missing is never seen under its name."""
    name = folder.name
    gone = folder if name.startswith(".") else _temporary_name(folder, "gone")
    try:
        if gone is not folder:
            os.rename(folder, gone)
    except FileNotFoundError:
        return
    _remove_all(gone)


def find_checkpoint(target: Path) -> Path:
    """The place of a checkpoint: where it was set aside, if saving stopped just then."""
    return target if target.exists() else next(iter(_leftovers_of(target, "old")), target)


def clean_up(root: Path, ours: re.Pattern[str]) -> list[str]:
    """Remove what a crash left in a folder, and put back what had only made room. What was done,
    in words.

    Args:
        ours: what leftovers are called of those who write here; any other may still be written.
    """
    done = []
    for old, target in _list_leftovers(root, "old", ours):
        if not target.exists():
            os.rename(old, target)
            done.append(f"put {target.name} back")
    for kind in ("old", "partial", "gone"):
        for left, target in _list_leftovers(root, kind, ours):
            _remove_leftover(left, target, kind)
            done.append(f"removed {left.name}")
    return done


def _remove_leftover(folder: Path, target: Path, kind: str) -> None:
    """Remove what a crash left: first from where its writer, if that lives, would find it and put
    in its place what is half removed."""
    gone = folder
    if kind == "partial":
        gone = _temporary_name(target, "gone")
        try:
            os.rename(folder, gone)
        except FileNotFoundError:
            return  # it is in its place
    _remove_all(gone)


def _remove_all(place: Path) -> None:
    """Remove a folder with all that is in it, or what somebody put in its place: rmtree keeps a
    link, and waits for a pipe's other end."""
    if place.is_dir() and not place.is_symlink():
        with defer_signals():  # rmtree would close a descriptor twice, perhaps another thread's
            shutil.rmtree(place, ignore_errors=True)
    elif os.path.lexists(place):
        with suppress(OSError):
            place.unlink()


def absolute_path(folder: str | os.PathLike[str]) -> Path:
    """A path from the root.

    Raises:
        CheckpointError: no path, or one that no file can have.
    """
    try:
        path = os.path.abspath(folder)
    except TypeError:
        raise CheckpointError(f"a checkpoint's folder is a path, not {folder!r}") from None
    except OSError as error:
        raise CheckpointError(f"{folder!r} is in a folder that is gone: {error}") from error
    if not folder or not isinstance(path, str) or "\0" in path:
        raise CheckpointError(f"{folder!r} is no name of a folder")
    if any(len(os.fsencode(name)) > _MAX_NAME for name in Path(path).parts):
        raise CheckpointError(f"{format_value(folder)} is longer than the name of a folder may be")
    return Path(path)


def resolve_links(folder: str | os.PathLike[str]) -> Path:
    """A path from the root, without links: what is written takes the place of what they lead to.

    Raises:
        CheckpointError: as `absolute`.
    """
    return Path(os.path.realpath(absolute_path(folder)))


def is_empty(place: Path) -> bool:
    """Whether it is a folder without anything in it."""
    return place.is_dir() and not any(place.iterdir())


def _temporary_name(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{kind}-{secrets.token_hex(8)}"


def _leftovers_of(target: Path, kind: str) -> list[Path]:
    return [left for left, of in _list_leftovers(target.parent, kind) if of.name == target.name]


def _list_leftovers(
    root: Path, kind: str, ours: re.Pattern[str] = _LEFTOVER
) -> list[tuple[Path, Path]]:
    """What has names of ours in a folder, each with the place that it is to have, or had."""
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, PermissionError):  # one that may be written to, and not be listed
        return []
    matches = [
        match for name in names if ours.fullmatch(name) and (match := _LEFTOVER.fullmatch(name))
    ]
    return [(root / match[0], root / match[1]) for match in matches if match[2] == kind]

"""Files and folders that are either complete after a crash, or absent.

All writes of checkpoints go through here: write, sync, then rename. Leftovers of a crash have names
by which the next start finds them, with 16 random digits:

    .NAME.partial-0123456789abcdef   was being written .NAME.old-0123456789abcdef       was set
    aside for a new NAME, and is NAME if that never came .NAME.gone-0123456789abcdef      was being
    removed

All other names are the user's, however similar.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from graphflow.base.argument_checks import format_value
from graphflow.base.process.interrupts import defer_signals
from graphflow.errors import CheckpointError

Buffer = bytes | memoryview
_MAX_NAME = 255  # bytes of one name in a path
_LEFTOVER = re.compile(r"\.(.+)\.(partial|old|gone)-[0-9a-f]{16}", re.DOTALL)
_PIECE = 8 * 2**20  # bytes to write and then hash, while they are in the cache


def write_new(
    path: str | os.PathLike[str],
    parts: Iterable[Buffer],
    within: int | None = None,
    mode: int = 0o666,
) -> tuple[str, int]:
    """Write a new file, and sync it to disk.

    Args:
        parts: its content.
        within: descriptor of the folder that a relative path is in.

    Returns:
        Its SHA-256, and its size in bytes.

    Raises:
        OSError: the file exists, or cannot be written.
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
    """Return the content of a regular file. Pipes and devices, which might block, are refused.

    Args:
        most: largest size to read, in bytes.
        size: the expected size, if it is known.

    Raises:
        OSError: it cannot be read, is no regular file, or is too large.
        WrongSize: it does not have the expected size.
    """
    with open(path, "rb", opener=_open_nonblocking) as file:
        _check_regular(file.fileno(), path, most, size)
        return file.read()


def map_file(path: str | os.PathLike[str], size: int) -> mmap.mmap:
    """Return the content of a regular file of known size, which is read where it is looked at.

    Raises:
        OSError, WrongSize: see `read_file`.
    """
    with open(path, "rb", opener=_open_nonblocking) as file:
        _check_regular(file.fileno(), path, size, size)
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _check_regular(
    descriptor: int, path: str | os.PathLike[str], most: int, size: int | None
) -> None:
    """Check an open file; raises as `read_file`."""
    there = os.fstat(descriptor)
    if not stat.S_ISREG(there.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    if size is not None and there.st_size != size:
        raise WrongSize(there.st_size)
    if there.st_size > most:
        raise OSError(errno.EFBIG, f"{there.st_size} bytes, at most {most} are read", str(path))


class WrongSize(Exception):
    """The actual size of a file that does not have the expected one."""


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents so that they survive a crash."""
    if folder.is_dir():
        return
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        with suppress(PermissionError):  # a folder may be writable but not readable
            sync_folder(each.parent)


def begin_folder(target: Path) -> Path:
    """Make a new folder beside `target`, to write its replacement."""
    make_folder(target.parent)
    for left in _leftovers_of(target, "partial"):
        remove_folder(left)
    partial = _temporary_name(target, "partial")
    os.mkdir(partial)
    return partial


def put_in_place(partial: Path, target: Path) -> None:
    """Rename a complete folder to `target`, and remove what was there afterwards.

    Raises:
        OSError: it cannot be renamed; the old content is intact.
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


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a small file in place of another one.

    A crash leaves the old file or the new one. An empty folder in its place is replaced, too.

    Args:
        mode: its permissions; default: only its owner may read it.
    """
    _replace(path, lambda fresh: write_new(fresh, [data], mode=mode))


def replace_mapped(path: Path, size: int, fill: Callable[[mmap.mmap], None]) -> None:
    """Write a file of known size in place of another one; as `replace_file`.

    Args:
        fill: writes its content. The disk has room for it already.
    """

    def write(fresh: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(fresh, flags, 0o666)
        try:
            os.posix_fallocate(file, 0, size)  # or a full disk would end the process
            content = mmap.mmap(file, size)
            fill(content)
            content.flush()
            os.fsync(file)
        finally:
            os.close(file)

    _replace(path, write)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    fresh = _temporary_name(path, "partial")
    try:
        write(fresh)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        os.rename(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder so that it never appears incomplete under its name."""
    name = folder.name
    gone = folder if name.startswith(".") else _temporary_name(folder, "gone")
    try:
        if gone is not folder:
            os.rename(folder, gone)
    except FileNotFoundError:
        return
    _remove_all(gone)


def find_checkpoint(target: Path) -> Path:
    """Return the place of a checkpoint, or where a stopped save has set it aside."""
    return target if target.exists() else next(iter(_leftovers_of(target, "old")), target)


def clean_up(root: Path, ours: re.Pattern[str]) -> list[str]:
    """Remove a crash's leftovers in a folder, restore set-aside content, and return what was done.

    Args:
        ours: pattern of leftovers of this folder's only writer; others may still be in use.
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
    """Remove a leftover.

    A partial folder is renamed first: its writer, if that still runs, must not put it in place
    while it is half removed.
    """
    gone = folder
    if kind == "partial":
        gone = _temporary_name(target, "gone")
        try:
            os.rename(folder, gone)
        except FileNotFoundError:
            return  # its writer has put it in place
    _remove_all(gone)


def _remove_all(place: Path) -> None:
    """Remove a folder with its content, or the file, link or pipe in its place.

    `shutil.rmtree` would keep a link, and wait for the other end of a pipe.
    """
    if place.is_dir() and not place.is_symlink():
        with defer_signals():  # an interrupted rmtree may close a descriptor of another thread
            shutil.rmtree(place, ignore_errors=True)
    elif os.path.lexists(place):
        with suppress(OSError):
            place.unlink()


def absolute_path(folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder.

    Raises:
        CheckpointError: it is no path, or one that no file can have.
    """
    try:
        path = os.path.abspath(folder)
    except TypeError:
        raise CheckpointError(f"a checkpoint's folder is a path, not {folder!r}") from None
    except OSError as error:
        raise CheckpointError(f"{folder!r} is in a folder that is gone: {error}") from error
    if not folder or not isinstance(path, str) or "\0" in path:
        raise CheckpointError(f"{folder!r} is not a valid folder name")
    if any(len(os.fsencode(name)) > _MAX_NAME for name in Path(path).parts):
        raise CheckpointError(f"{format_value(folder)} is longer than a folder name may be")
    return Path(path)


def resolve_links(folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path without links, so that a save replaces the link's target.

    Raises:
        CheckpointError: as `absolute_path`.
    """
    return Path(os.path.realpath(absolute_path(folder)))


def is_empty(place: Path) -> bool:
    """Return True if a path is an empty folder."""
    return place.is_dir() and not any(place.iterdir())


def _temporary_name(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{kind}-{secrets.token_hex(8)}"


def _leftovers_of(target: Path, kind: str) -> list[Path]:
    return [left for left, of in _list_leftovers(target.parent, kind) if of.name == target.name]


def _list_leftovers(
    root: Path, kind: str, ours: re.Pattern[str] = _LEFTOVER
) -> list[tuple[Path, Path]]:
    """Return the leftovers of a kind in a folder, each with the path that it had or was to have."""
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, PermissionError):  # a folder may be writable but not readable
        return []
    matches = [
        match for name in names if ours.fullmatch(name) and (match := _LEFTOVER.fullmatch(name))
    ]
    return [(root / match[0], root / match[1]) for match in matches if match[2] == kind]

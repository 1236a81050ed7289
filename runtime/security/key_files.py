"""Files that hold keys: read, written whole, and refused if others could have changed them.

This module knows permissions and file systems. `keys` knows what the files say.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphflow.errors import KeyFileError

_FILE_CAP = 400  # bytes of a key file
_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
FileState = tuple[int, ...]
"""Numbers that change when a file is written or replaced; empty if there is none."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from adding to `folder` between reading it and writing a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise KeyFileError(f"{folder} cannot be written: {error.strerror}") from error
    try:
        with suppress(OSError):  # some network file systems lock no folders: go on unlocked
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_new(path: Path, text: str, mode: int) -> None:
    """Create a file that is complete as soon as it is there, because a worker may be reading."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, draft = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                os.fchmod(handle, mode)
                file.write(text + "\n")
            os.link(draft, path)
        except FileExistsError:
            raise KeyFileError(f"{path} is there already; give another name") from None
        finally:
            os.unlink(draft)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {error.strerror}") from error


def files_in(folder: Path, suffix: str) -> list[Path]:
    """Return the files with that suffix, sorted by name; none if there is no such folder.

    A folder that exists and cannot be read is an error. Taken for empty, it would end the sessions
    of all trusted keys.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == suffix)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise KeyFileError(f"the keys in {folder} cannot be read: {error.strerror}") from error


def is_gone(path: Path) -> bool:
    """Return True if the file is surely gone."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False  # unknown
    return False


def read_key_file(path: Path) -> str:
    """Return the first bytes of a key file as text.

    Raises:
        KeyFileError: It cannot be read.
    """
    try:
        if not path.is_file() and path.exists():
            raise KeyFileError(f"{path} is not a plain file; put the key itself there")
        with path.open("rb") as file:
            return file.read(_FILE_CAP).decode("ascii")
    except FileNotFoundError as error:
        raise KeyFileError(f"{path} is a link to a file that is not there") from error
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read as a key: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path} cannot be read as a key: it is no text") from error


def check_private(path: Path) -> None:
    """Check that nobody else could have read or written a secret file.

    Raises:
        KeyFileError: Somebody could, or it cannot be examined.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise KeyFileError(f"there is no key {path}; `graphflow keys new` makes one") from None
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"{path} is not a plain file; put the key itself there")
    if status.st_uid != os.getuid():
        raise KeyFileError(
            f"{path} belongs to another user; make a key of your own (`graphflow keys new`)"
        )
    if status.st_mode & 0o077:
        raise KeyFileError(
            f"{path} can be read by others, so its secret may be known: make a new key, or, if you "
            f"are sure that nobody has, `chmod 600 {path}`"
        )


def check_not_writable_by_others(path: Path) -> FileState:
    """Return the state of a trusted file, or of their folder; () if there is none.

    Raises:
        KeyFileError: Somebody else could change it, or it cannot be examined.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        raise KeyFileError(f"{path} can be changed by others: `chmod go-w {path}`")
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_dev, status.st_ino, status.st_size, *times


def lacks_descriptors(error: KeyFileError) -> bool:
    """Return True if the error is only that this process can open no file for now."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _DESCRIPTORS

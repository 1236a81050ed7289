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
_MOUNTED = 0o440  # the mode that a mounted secret may have
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

    Two kinds of files are private: a file of this user that only this user can access, and a
    mounted one. A mounted file belongs to root, has no writer, and no readers but root and a group
    of this process. A link is followed if it stays in its folder, as in a Kubernetes Secret.

    Raises:
        KeyFileError: Somebody could, or it cannot be examined.
    """
    try:
        if path.is_symlink():
            _check_link_stays_inside(path)
        status = path.stat()
    except FileNotFoundError:
        raise KeyFileError(f"there is no key {path}; `graphflow keys new` makes one") from None
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"{path} is not a plain file; put the key itself there")
    if status.st_uid == 0 and not status.st_mode & ~_MOUNTED & 0o777 and _is_own_group(status):
        return
    if status.st_uid != os.getuid():
        raise KeyFileError(
            f"{path} belongs to another user; make a key of your own (`graphflow keys new`), or "
            "mount the file as root's, with mode 0440 and a group of this process"
        )
    if status.st_mode & 0o077:
        raise KeyFileError(
            f"{path} can be read by others, so its secret may be known: make a new key, or, if you "
            f"are sure that nobody has, `chmod 600 {path}` (in a mount: mode 0400 or 0440)"
        )


def _is_own_group(status: os.stat_result) -> bool:
    """Return True if this process is in the file's group, or the group is root's.

    systemd leaves root's group on a credential, and admits the service by an access control list.
    """
    return status.st_gid in (0, os.getegid(), *os.getgroups())


def _check_link_stays_inside(path: Path) -> None:
    """Check that a link, and the links that it leads to, end in the folder of `path`.

    Raises:
        KeyFileError: The link leads out of the folder.
        OSError: The link cannot be followed.
    """
    folder = path.parent.resolve(strict=True)
    try:
        target = path.resolve(strict=True)
    except RuntimeError:  # a circle of links, before Python 3.13
        raise KeyFileError(f"{path} is a link that leads to itself") from None
    if not target.is_relative_to(folder):
        raise KeyFileError(f"{path} is a link that leads out of {folder}; put the key itself there")


def check_not_writable_by_others(path: Path) -> FileState:
    """Return the state of a trusted file, or of their folder; () if there is none.

    On a read-only file system nobody can change either, whatever the mode says: Kubernetes mounts
    Secrets and ConfigMaps as folders of mode 1777, read-only.

    Raises:
        KeyFileError: Somebody else could change it, or it cannot be examined.
    """
    try:
        status = path.stat()
        read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    if status.st_uid not in (os.getuid(), 0) or (status.st_mode & 0o022 and not read_only):
        raise KeyFileError(f"{path} can be changed by others: `chmod go-w {path}`")
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_dev, status.st_ino, status.st_size, *times


def lacks_descriptors(error: KeyFileError) -> bool:
    """Return True if the error is only that this process can open no file for now."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _DESCRIPTORS

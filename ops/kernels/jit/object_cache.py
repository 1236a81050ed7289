"""Object code on disk: what one process compiled, the next one loads.

An entry is a file named by the hash of all that the code depends on: the program text, the version
of LLVM, the processor and its features. It holds a digest of its content, so that a damaged one is
compiled anew; it is written beside its place and moved there, so that processes at the same time
never see half of one. The folder is kept below a size: the entries that were not used for longest
go first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from graphflow.base.digest import sha256
from graphflow.base.environment import folder_setting, home_folder
from graphflow.base.lazy_dataclass import dataclass

LIMIT = 64 << 20
"""Bytes that all entries may take."""

_SUFFIX = ".kernel"
_TOGETHER = ".kernels"  # code of several entries, which name this file
_ELSEWHERE = b"graphflow: in "
_DIGEST = 32  # bytes of a SHA-256 digest


def cache_folder() -> Path:
    """Return the user's folder for what graphflow keeps between processes."""
    own, base = folder_setting("GRAPHFLOW_CACHE"), folder_setting("XDG_CACHE_HOME")
    return own or (base or home_folder() / ".cache") / "graphflow"


@dataclass(frozen=True)
class CacheUsage:
    """The size of a cache."""

    folder: Path
    entries: int
    nbytes: int


class ObjectCache:
    """A folder of entries: bytes by key.

    Args:
        limit: bytes that the entries may take. After a write, the least recently used ones beyond
            it are removed.
    """

    def __init__(self, folder: Path | None = None, limit: int = LIMIT) -> None:
        self.folder = (cache_folder() if folder is None else folder) / "kernels"
        self.limit = limit
        self._written = self.limit  # the first write looks at what other processes wrote

    def get(self, key: str) -> bytes | None:
        """Return an entry, or None if it is missing or damaged.

        Entries are code that would run. If another user can write to the folder, all count as
        missing.
        """
        if not self._is_private():
            return None
        data = self._read(self._path(key))
        if data is not None and data.startswith(_ELSEWHERE):
            place = data[len(_ELSEWHERE) :].decode("ascii", "replace")
            data = self._read(self.folder / Path(place).name)
        return data

    def _is_private(self) -> bool:
        """Return whether only this user, or root, can write to the folder."""
        try:
            status = self.folder.stat()
        except OSError:
            return False
        return status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022

    def put(self, key: str, data: bytes) -> None:
        """Store an entry, if the folder is writable."""
        self.put_all([key], data)

    def put_all(self, keys: Sequence[str], data: bytes) -> None:
        """Store one content for several keys, if the folder is writable.

        The content is stored once, named by its hash, and each key's entry names that file.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if len(keys) > 1:
                place = self.folder / f"{sha256(data).hex()}{_TOGETHER}"
                self._write(place, data)
                data = _ELSEWHERE + place.name.encode()
            for key in keys:
                self._write(self._path(key), data)
        except OSError:
            return  # full or read-only disk: the next process compiles again
        if self._written > self.limit // 16:
            self._written = 0
            self._trim()

    def _read(self, path: Path) -> bytes | None:
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, data = content[:_DIGEST], content[_DIGEST:]
        if not data or sha256(data) != digest:
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)  # marks it as recently used
        return data

    def _write(self, path: Path, data: bytes) -> None:
        from tempfile import mkstemp  # slow to load, and only for new code

        handle, beside = mkstemp(dir=self.folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(sha256(data) + data)
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise
        self._written += len(data)

    def usage(self) -> CacheUsage:
        files = self._files()
        entries = sum(path.suffix == _SUFFIX for _, _, path in files)
        return CacheUsage(self.folder, entries, sum(size for _, size, _ in files))

    def clear(self) -> tuple[CacheUsage, list[OSError]]:
        """Remove all entries; returns what was removed, and the errors for what is left."""
        entries = nbytes = 0
        refused: list[OSError] = []
        try:
            paths = sorted(self._paths())
        except (FileNotFoundError, NotADirectoryError):
            paths = []  # nothing was ever kept
        except OSError as error:
            paths, refused = [], [error]
        for path in paths:
            try:
                size = path.lstat().st_size
                path.unlink()
            except FileNotFoundError:
                continue  # another process removed it
            except OSError as error:
                refused.append(error)
                continue
            entries += path.suffix == _SUFFIX
            nbytes += size
        return CacheUsage(self.folder, entries, nbytes), refused

    def _path(self, key: str) -> Path:
        return self.folder / f"{sha256(key.encode()).hex()}{_SUFFIX}"

    def _paths(self) -> list[Path]:
        kept = (_SUFFIX, _TOGETHER, ".tmp")
        return [path for path in self.folder.iterdir() if path.suffix in kept]

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return the time of last use, size and path of each entry."""
        found = []
        try:
            for path in self._paths():
                with suppress(OSError):  # another process removed it
                    status = path.stat()
                    found.append((status.st_mtime, status.st_size, path))
        except OSError:
            return []
        return found

    def _trim(self) -> None:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self.limit:
                return
            with suppress(OSError):
                path.unlink()
            total -= size

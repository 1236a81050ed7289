"""The files behind a source: how another process opens them, and whether they are the same there.

gf.data.npy(x="x.npy") ─SourceFiles→ JSON in an attribute of a node ─open_source→ the same rows
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.data.sources.array_source import ArraySource, MappedFiles
from graphflow.data.sources.image_folder import ImageFolder
from graphflow.data.sources.source import Source
from graphflow.data.sources.sparse_rows import read_svmlight
from graphflow.data.sources.table_files import TableFiles
from graphflow.errors import ArgumentError

_SAMPLES, _SAMPLE_BYTES = 16, 4096
"""Parts of a file that its digest covers, at equal distances, and the bytes of each."""

Stamp = tuple[int, int]
"""Size in bytes and time of the last change in nanoseconds."""


@dataclass(frozen=True)
class SourceFiles:
    """Files, and how a source is opened from them.

    Attributes:
        kind: the function of `gf.data`.
        paths: of the files, or of the folder of images.
        options: further arguments, as plain data.
    """

    kind: str
    paths: tuple[str, ...]
    options: tuple[Any, ...] = ()

    def absolute(self) -> SourceFiles:
        """Return the same with absolute paths."""
        return SourceFiles(self.kind, tuple(map(os.path.abspath, self.paths)), self.options)

    def digests(self) -> list[str]:
        """Return a digest of each file's content, or of the names and sizes of images.

        A digest covers the size and up to 64 KiB: all of a small file, parts of a large one.
        """
        return [_digest(path, _stamp(path)) for path in self.paths]


def open_source(files: SourceFiles, at: str) -> Source:
    """Open a source.

    Args:
        at: begins each error.

    Raises:
        ArgumentError: a file cannot be read as what it should be.
    """
    try:
        return _OPENERS[files.kind](at, files.paths, *files.options)
    except (OSError, ValueError, TypeError, BadZipFile) as error:
        named = ", ".join(map(repr, files.paths[:3]))
        raise ArgumentError(f"{at}: {named}: {error}") from error


def _open_npy(at: str, paths: Sequence[str], names: Sequence[str]) -> Source:
    return MappedFiles(at, dict(zip(names, paths, strict=True)))


def _open_npz(at: str, paths: Sequence[str]) -> Source:
    with ZipFile(paths[0]) as stored:
        return ArraySource(
            at, {name.removesuffix(".npy"): _read_array(stored, name) for name in stored.namelist()}
        )


def _read_array(stored: ZipFile, name: str) -> Any:
    with stored.open(name) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _open_tables(kind: str) -> Callable[..., Source]:
    return lambda at, paths, *options: TableFiles(at, kind, paths, *options)


_OPENERS: dict[str, Callable[..., Source]] = {
    "npy": _open_npy,
    "npz": _open_npz,
    **{kind: _open_tables(kind) for kind in ("parquet", "arrow", "csv", "json_lines")},
    "images": lambda at, paths, size, channels: ImageFolder(at, paths[0], tuple(size), channels),
    "svmlight": lambda at, paths, columns: read_svmlight(at, paths[0], columns),
}


def _stamp(path: str) -> Stamp:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


@lru_cache(maxsize=4096)
def _digest(path: str, stamp: Stamp) -> str:
    """Return the digest of a file, or of a folder's names and sizes."""
    hashed = hashlib.sha256()
    if os.path.isdir(path):
        for file in sorted(p for p in Path(path).rglob("*") if p.is_file()):
            hashed.update(f"{file.relative_to(path)}\0{file.stat().st_size}\n".encode())
        return hashed.hexdigest()[:16]
    size = stamp[0]
    hashed.update(str(size).encode())
    with open(path, "rb") as stream:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            hashed.update(stream.read())
        else:
            for number in range(_SAMPLES):
                stream.seek(number * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                hashed.update(stream.read(_SAMPLE_BYTES))
    return hashed.hexdigest()[:16]

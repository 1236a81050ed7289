"""A disk that loses its power: what may be left of what a process did to a tree of files.

Calls go to the real file system, and are noted. A disk keeps what was synced: of a file its bytes,
of a folder its names. Of what came later it may have kept anything: of each file some of the bytes,
or room without them; of each folder the changes up to some point. `Disk.leavings` writes out trees
as they may be found after a failure at any moment.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


@dataclass
class _File:
    data: bytes = b""
    synced: bytes = b""


@dataclass
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)  # as they were synced
    changes: list[dict[str, _File | _Folder]] = field(default_factory=list)  # since, one by one

    @property
    def now(self) -> dict[str, _File | _Folder]:
        return dict(self.changes[-1] if self.changes else self.names)


Choose = Callable[[list[Any]], Any]
"""Which one of some states, of which the first is what was synced and the last what is there."""


class Disk:
    """The disk under a folder, from the moment on at which it is made.

    Attributes:
        calls: what was done to it, by name.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[str] = []
        self._moments: list[Callable[[Callable[[], None]], None]] = []
        self._known: dict[tuple[int, int], _File | _Folder] = {}
        self._top = self._record_tree(root)
        self._at = lambda: None
        self._draw = random.Random(0)

    def _record_tree(self, place: Path) -> Any:
        """What is there at the beginning is kept."""
        node: _File | _Folder
        if place.is_dir():
            node = _Folder({each.name: self._record_tree(each) for each in place.iterdir()})
        else:
            node = _File(place.read_bytes(), place.read_bytes())
        self._known[_identity(os.stat(place))] = node
        return node

    @contextmanager
    def watch(self, failing: Callable[[], None]) -> Iterator[None]:
        """Notes what is done in the block.

        Args:
            failing: called after each call that changes the disk: the power may fail now.
        """
        self._at = failing
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir"):
                patch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
            yield

    def leavings(self, place: Path, more: int = 4) -> Iterator[Path]:
        """Trees that may be found if the power fails now, each in a folder of its own.

        What was synced and nothing else; all there is; all of one file or folder that is not
        synced and nothing else; and some more, at random.
        """
        unsure = [id(node) for node in self._known.values() if _states(node)[1:]]
        ways: list[Callable[[Any], Choose]] = [lambda node: _first, lambda node: _last]
        ways += [lambda node, one=one: _last if id(node) == one else _first for one in unsure]
        ways += [lambda node: self._draw.choice for _ in range(more if unsure else 0)]
        trees = (_read_remains(self._top, way) for way in ways)
        for number, tree in enumerate({repr(tree): tree for tree in trees}.values()):
            _write_out(tree, place / str(number))
            yield place / str(number)

    # Calls ---------------------------------------------------------------------------------------

    def _note(self, name: str) -> None:
        self.calls.append(name)
        self._at()

    def _folder(self, path: Any, dir_fd: int | None) -> tuple[_Folder | None, str]:
        """The folder in which a path is, if it is ours, and its name there."""
        head, name = os.path.split(os.fspath(path))
        stat = os.fstat(dir_fd) if dir_fd is not None else os.stat(head or ".")
        assert dir_fd is None or not head
        found = self._known.get(_identity(stat))
        assert found is None or isinstance(found, _Folder)
        return found, name

    def _change(self, folder: _Folder, call: str, **names: _File | _Folder | None) -> None:
        now = folder.now | names
        folder.changes.append({name: node for name, node in now.items() if node is not None})
        self._note(call)

    def _forget(self, gone: _File | _Folder | None) -> None:
        """One that is removed: the next file may have its number."""
        self._known = {each: node for each, node in self._known.items() if node is not gone}

    def _open(self, call: Callable[..., int]) -> Callable[..., int]:
        def open_file(
            path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
        ) -> int:
            file = call(path, flags, mode, dir_fd=dir_fd)
            if flags & os.O_CREAT:
                folder, name = self._folder(path, dir_fd)
                there = self._known.get(_identity(os.fstat(file)))
                if isinstance(there, _File):
                    there.data = b"" if flags & os.O_TRUNC else there.data
                elif folder is not None:
                    node = self._known[_identity(os.fstat(file))] = _File()
                    self._change(folder, "open", **{name: node})
            return file

        return open_file

    def _write(self, call: Callable[..., int]) -> Callable[..., int]:
        def write(file: int, data: Any) -> int:
            count = call(file, data)
            node = self._known.get(_identity(os.fstat(file)))
            if isinstance(node, _File):
                node.data += bytes(data[:count])
                self._note("write")
            return count

        return write

    def _fsync(self, call: Callable[..., None]) -> Callable[..., None]:
        def fsync(file: int) -> None:  # the disk below need not
            node = self._known.get(_identity(os.fstat(file)))
            if isinstance(node, _File):
                node.synced = node.data
            elif node is not None:
                node.names, node.changes = node.now, []
            if node is not None:
                self._note("fsync")

        return fsync

    def _mkdir(self, call: Callable[..., None]) -> Callable[..., None]:
        def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            call(path, mode, dir_fd=dir_fd)
            folder, name = self._folder(path, dir_fd)
            if folder is not None:
                node = self._known[_identity(os.stat(path, dir_fd=dir_fd))] = _Folder()
                self._change(folder, "mkdir", **{name: node})

        return mkdir

    def _rename(self, call: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any) -> None:
            call(source, target)
            folder, old = self._folder(source, None)
            other, new = self._folder(target, None)
            assert folder is other, "nothing of ours goes to another folder"
            if folder is not None:
                self._forget(folder.now.get(new))
                self._change(folder, "rename", **{old: None, new: folder.now[old]})

        return rename

    def _unlink(self, call: Callable[..., None]) -> Callable[..., None]:
        return self._wrap_removal("unlink", call)

    def _rmdir(self, call: Callable[..., None]) -> Callable[..., None]:
        return self._wrap_removal("rmdir", call)

    def _wrap_removal(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            call(path, dir_fd=dir_fd)
            folder, gone = self._folder(path, dir_fd)
            if folder is not None:
                self._forget(folder.now[gone])
                self._change(folder, name, **{gone: None})

        return remove


def _states(node: _File | _Folder) -> list[Any]:
    """What a disk may have of a file or a folder, from what was synced to what is there."""
    if isinstance(node, _Folder):
        return [node.names, *node.changes]
    if not node.data.startswith(node.synced):
        return [node.synced, b"", node.data]
    if node.data == node.synced:
        return [node.data]
    half = (len(node.synced) + len(node.data)) // 2
    room = node.synced + bytes(len(node.data) - len(node.synced))
    return [node.synced, room, node.data[:half], node.data]


def _read_remains(node: _File | _Folder, way: Callable[[Any], Choose]) -> bytes | dict[str, Any]:
    """What is left of a file or a folder: bytes, or what is left by name."""
    found: Any = way(node)(_states(node))
    if isinstance(node, _File):
        return bytes(found)
    return {name: _read_remains(child, way) for name, child in found.items()}


def _write_out(tree: bytes | dict[str, Any], place: Path) -> None:
    if isinstance(tree, bytes):
        place.write_bytes(tree)
        return
    place.mkdir(parents=True)
    for name, child in tree.items():
        _write_out(child, place / name)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _first(states: list[T]) -> T:
    return states[0]


def _last(states: list[T]) -> T:
    return states[-1]

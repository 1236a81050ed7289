"""Arenas: the memory that a device's programs lie in, all in the same.

One of them runs at a time, and nothing in an arena outlasts the step that made it. So a program
takes the memory of those before it, compiled for other sizes or of other fetches, where it has room
there. Where it has not, more is made than it needs: sizes that grow step by step would otherwise
leave a trail of arenas that are all too small. What is not touched takes no memory on a CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import DeviceOutOfMemory, TransportError
from graphflow.runtime.memory.backend import DeviceBackend
from graphflow.runtime.transport.shared_memory import SharedMemorySegment

_GROWTH = 1.5
"""How much larger than the last arena the next one is at least: all of them together are then at
most three times as large as the last one."""


@dataclass(eq=False)
class Arena:
    """Memory of several programs; it goes with the last of them.

    Attributes:
        memory: flat bytes.
        segment: what other processes find it by, if they can reach it.
        taken: bytes of it that programs use, from its beginning.
    """

    memory: Any
    segment: SharedMemorySegment | None = None
    used_bytes: int = 0


class Arenas:
    """The arenas of one device; new programs use the newest."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._on_host = backend.xp is np  # a GPU's memory no other process maps
        self._newest: Callable[[], Arena | None] = lambda: None

    def reserve(self, nbytes: int, shared: bool) -> Arena:
        """One for a program of so many bytes.

        Args:
            shared: whether other processes of this host are to reach it, if they can.

        Raises:
            DeviceOutOfMemory: there is not so much memory.
        """
        shared = shared and self._on_host
        arena = self._newest()
        if arena is None or not _has_room(arena, nbytes, shared):
            grown = 0 if arena is None else int(arena.memory.nbytes * _GROWTH)
            arena = self._create(nbytes, grown, shared)
            self._newest = weakref.ref(arena)
        arena.used_bytes = max(arena.used_bytes, nbytes)
        return arena

    def _create(self, nbytes: int, grown: int, shared: bool) -> Arena:
        if shared:
            with suppress(TransportError):
                segment = SharedMemorySegment.create(max(nbytes, grown, 1), empty=True)
                segment.reserve(0, nbytes)
                return Arena(segment.memory, segment)
        if grown > nbytes:
            with suppress(DeviceOutOfMemory):
                return Arena(self._backend.empty(grown))
        return Arena(self._backend.empty(nbytes))


def _has_room(arena: Arena, nbytes: int, shared: bool) -> bool:
    if nbytes > arena.memory.nbytes or (shared and arena.segment is None):
        return False
    if arena.segment is not None:
        try:
            arena.segment.reserve(0, nbytes)
        except TransportError:
            return False
    return True

"""Arenas: memory that all programs of a device share.

A device runs one program at a time, and nothing in an arena outlives its step. So programs for
other sizes or other fetches use the same memory. If a program needs more, the new arena is larger
than the program: sizes that grow step by step would otherwise leave a trail of arenas that are all
too small. On a CPU, pages that no program touches take no physical memory.
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
"""Least ratio of an arena's size to that of the arena before it. All arenas together are then at
most three times as large as the last one."""


@dataclass(eq=False)
class Arena:
    """Memory of several programs. It is freed with the last of them.

    Attributes:
        memory: flat bytes.
        segment: the shared memory that holds it, if other processes can map it.
        used_bytes: bytes that programs use, from the beginning.
    """

    memory: Any
    segment: SharedMemorySegment | None = None
    used_bytes: int = 0


class Arenas:
    """The arenas of one device. New programs use the newest one."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._on_host = backend.xp is np  # no other process can map a GPU's memory
        self._newest: Callable[[], Arena | None] = lambda: None

    def reserve(self, nbytes: int, shared: bool) -> Arena:
        """Return an arena with room for a program: the newest one if it is large enough.

        Args:
            nbytes: size of the program's arena plan.
            shared: whether other processes of this host should be able to map it. If they cannot,
                the arena is private.

        Raises:
            DeviceOutOfMemory: the device has too little memory.
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

"""Large initial values that sessions of this process share without copies.

The values lie in an anonymous file (memfd). The graph maps the file read-only. Each session maps it
copy-on-write: the kernel shares a page until the session writes to it.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from bisect import bisect
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SMALL = 1 << 16
"""Arrays below this many bytes are copied instead."""


class Pages(mmap.mmap):
    """An anonymous file, mapped read-only; arrays that lie in it keep it open."""

    descriptor: int

    def __new__(cls, nbytes: int) -> Pages:
        descriptor = os.memfd_create("values", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            self = super().__new__(
                cls, descriptor, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ
            )
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        _all.add(self)
        return self

    def view(self, start: int, count: int) -> Array:
        """Return `count` bytes of the file from `start` on as a read-only array."""
        return np.frombuffer(self, np.uint8, count, start)

    @property
    def address(self) -> int:
        """Address of the mapping."""
        return int(np.frombuffer(self, np.uint8, 1).__array_interface__["data"][0])


_all: weakref.WeakSet[Pages] = weakref.WeakSet()


def is_supported() -> bool:
    """Return True if this system has anonymous files."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def round_to_pages(nbytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class PrivatePages:
    """One session's copy-on-write mappings."""

    def __init__(self) -> None:
        self._maps: weakref.WeakKeyDictionary[Pages, mmap.mmap] = weakref.WeakKeyDictionary()
        self._given: list[tuple[int, int]] = []  # first and last address of arrays, in order

    def array(self, value: Array) -> Array | None:
        """Return writable memory of this session that holds a value; None if it has to be copied.

        A copy is needed if the value does not start at a page of such a file, or if some of its
        pages were given out before and may have been written to.
        """
        address = value.__array_interface__["data"][0]
        extent = (address, address + value.nbytes - 1)
        if value.nbytes < SMALL or address % mmap.PAGESIZE:
            return None
        at = bisect(self._given, extent)
        around = self._given[max(0, at - 1) : at + 1]
        if any(first <= extent[1] and address <= last for first, last in around):
            return None
        for pages in list(_all):
            start = address - pages.address
            if 0 <= start <= len(pages) - value.nbytes and value.flags.c_contiguous:
                if pages not in self._maps:
                    self._maps[pages] = mmap.mmap(
                        pages.descriptor, len(pages), flags=mmap.MAP_PRIVATE
                    )
                self._given.insert(at, extent)
                memory = np.frombuffer(self._maps[pages], np.uint8, value.nbytes, start)
                return memory.view(value.dtype).reshape(value.shape)
        return None


__all__ = ["SMALL", "Pages", "PrivatePages", "is_supported", "round_to_pages"]

"""Large initial values that sessions of this process read without a copy of their own.

The values lie in a file without a name, which only this process knows. The graph maps it for
reading. A session maps it as its own: the kernel shares each page until the session writes to it.
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
"""Bytes below which an array is not worth pages of its own."""


class Pages(mmap.mmap):
    """A file without a name, mapped for reading; arrays that lie in it keep it open."""

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
        """Bytes of the file as an array, which nobody can write to."""
        return np.frombuffer(self, np.uint8, count, start)

    @property
    def address(self) -> int:
        """Where the file is mapped."""
        return int(np.frombuffer(self, np.uint8, 1).__array_interface__["data"][0])


_all: weakref.WeakSet[Pages] = weakref.WeakSet()


def is_supported() -> bool:
    """Return True if this system has files without a name."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def round_to_pages(nbytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class PrivatePages:
    """One session's own mappings of pages: what it writes to them, nobody else sees."""

    def __init__(self) -> None:
        self._maps: weakref.WeakKeyDictionary[Pages, mmap.mmap] = weakref.WeakKeyDictionary()
        self._given: list[tuple[int, int]] = []  # first and last address of arrays, in order

    def array(self, value: Array) -> Array | None:
        """Memory that holds a value of some pages, to be written to.

        None where it has to be copied: the value does not begin a page of this kind, or some of it
        was given before and may have been written to.
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

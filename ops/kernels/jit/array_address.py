"""Addresses of numpy arrays, and aligned memory.

numpy's own ways (`array.__array_interface__`, `array.ctypes`) build a description for each call and
take a microsecond. An array object holds its address in a word at a fixed offset, which compiled
extensions rely on. That word is read directly if a probe shows that it is there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

_OFFSET = object.__basicsize__
"""Bytes of the header of all Python objects, before the pointer to the elements."""
_word = ctypes.c_size_t.from_address

ALIGNMENT = 64
"""Bytes of a cache line and of the widest register. Every buffer starts at a multiple, so that
alignment never changes the path that a kernel takes."""


def address(array: Any) -> int:
    """Return the address of a numpy array's elements."""
    return _address_reader()(array)


def align_up(place: int) -> int:
    """Round an address, or a size, up to `ALIGNMENT`."""
    return -(-place // ALIGNMENT) * ALIGNMENT


def empty_aligned(nbytes: int) -> np.ndarray[Any, Any]:
    """Return uninitialised aligned memory, as a flat uint8 array."""
    memory: np.ndarray[Any, Any] = np.empty(nbytes + ALIGNMENT - 1, np.uint8)
    # Not a slice: an empty slice would begin where the memory does.
    return np.ndarray(nbytes, np.uint8, memory, -address(memory) % ALIGNMENT)


@cache
def _address_reader() -> Callable[[Any], int]:
    block = np.arange(24, dtype=np.float32).reshape(4, 6)
    probes = (block, block[1:, 2:], np.zeros(()), block.view(np.uint8), np.zeros((0, 3)))
    if all(_object_address(array) == _interface_address(array) for array in probes):
        return _object_address
    return _interface_address


def _object_address(array: Any) -> int:
    if not isinstance(array, np.ndarray):
        return _interface_address(array)
    return _word(id(array) + _OFFSET).value


def _interface_address(array: Any) -> int:
    place: int = array.__array_interface__["data"][0]
    return place

"""Where arrays are in memory, and memory where vectors are loaded fastest.

What numpy offers (`array.__array_interface__`, `array.ctypes`) builds a description for every call
and takes a microsecond. An array object says it in a word at a fixed offset, which every numpy has
kept for the sake of code compiled against it; that is read directly if it is seen to hold here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

_OFFSET = object.__basicsize__
"""Bytes of what all Python objects begin with; then comes the pointer to the elements."""
_word = ctypes.c_size_t.from_address

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register. Every buffer starts at a multiple, so that
alignment never changes a kernel's path."""


def address(array: Any) -> int:
    """Where a numpy array's elements begin."""
    return _address_reader()(array)


def align_up(place: int) -> int:
    """The first place from there on where a buffer may start; of sizes, how far buffers are
    apart."""
    return -(-place // ALIGNMENT) * ALIGNMENT


def empty_aligned(nbytes: int) -> np.ndarray[Any, Any]:
    """Uninitialised memory where a buffer may start, as a flat uint8 array."""
    memory: np.ndarray[Any, Any] = np.empty(nbytes + ALIGNMENT - 1, np.uint8)
    # A slice of nothing would begin where the memory does.
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

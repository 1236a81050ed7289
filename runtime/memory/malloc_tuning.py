"""The heap of a worker's C library: what a step's arrays leave free serves those of the next.

By default it gives freed memory back as soon as there is more than twice the largest array so far,
and the system then clears every page anew: of 4 MB, for as long as they take to arrive.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from graphflow.base.environment import setting

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_USER_SETTINGS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
)  # what a user says of the same
_MMAP_THRESHOLD_BYTES = 32 << 20  # bytes: the most that glibc takes for itself


def raise_trim_threshold() -> None:
    """Keeps up to 64 MB, as glibc would by itself once it has freed an array of 32 MB; elsewhere,
    and where the environment says what to do, nothing changes."""
    library = _glibc()
    if library is not None and not any(map(setting, _USER_SETTINGS)):
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_THRESHOLD_BYTES)


def trim_heap() -> None:
    """Gives all of it back to the system."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> Any:
    """glibc; None where there is another one."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None

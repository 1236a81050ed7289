"""malloc settings of a worker: memory that one step's arrays free serves the next step's arrays.

By default glibc returns freed memory to the system once it exceeds twice the largest array so far.
The system then clears every page anew. For 4 MB that takes as long as receiving them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from graphflow.base.environment import setting

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
# Environment variables by which users set the same thresholds.
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_MMAP_THRESHOLD_BYTES = 32 << 20  # the largest that glibc would choose by itself


def raise_trim_threshold() -> None:
    """Let glibc keep up to 64 MB of freed memory, as it does once it has freed a 32 MB array.

    Nothing changes with another C library, or if the environment sets a threshold.
    """
    library = _glibc()
    if library is not None and not any(map(setting, _USER_SETTINGS)):
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_THRESHOLD_BYTES)


def trim_heap() -> None:
    """Return all freed memory to the system."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> Any:
    """Return glibc; None if the process has another C library."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None

"""Scratch memory of kernels, kept by each thread.

Kernels take blocks of bounded size. Allocating each anew would take more time in page faults than
the copies into it.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from graphflow.ops.kernels.jit.array_address import empty_aligned
from graphflow.ops.kernels.jit.call_recorder import current_recorder

_MOST_KEPT_BYTES = 1 << 26  # bytes; larger buffers are freed after use
LEAST_SLOT_BYTES = 1 << 12
_local = threading.local()


def scratch(xp: Any, slot: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an uninitialised C-contiguous array, aligned to 64 bytes.

    It is valid until this thread asks for the same slot again.
    """
    if xp is not np:
        return xp.empty(shape, dtype)
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    kept: dict[str, Any] = _local.__dict__
    recorder = current_recorder()
    if recorder is not None:
        slot = recorder.slot(slot, nbytes)
        if recorder.recording is not None:
            return recorder.recording.scratch(slot, shape, dtype)
    buffer = kept.get(slot)
    if nbytes > _MOST_KEPT_BYTES:
        buffer = empty_aligned(nbytes)
    elif buffer is None or buffer.nbytes < nbytes:
        buffer = kept[slot] = empty_aligned(max(nbytes, LEAST_SLOT_BYTES))
    if recorder is not None:
        recorder.keep(buffer)
    return buffer[:nbytes].view(dtype).reshape(shape)

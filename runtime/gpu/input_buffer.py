"""Buffers on a GPU that each step fills: feeds and tensors from other devices."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from graphflow.errors import ShapeError
from graphflow.ir.spec import TensorSpec, nbytes
from graphflow.runtime.gpu.gpu_backend import DeviceCopy, GpuBackend, pinned_view
from graphflow.runtime.memory.backend import new_array


class InputBuffer:
    """A buffer on a GPU that each step fills from the host or from another GPU.

    Two pinned buffers alternate: one is filled while the other may still be uploading. A copy from
    another GPU is kept alive until this GPU has read it.

    Attributes:
        array: the buffer; always the same array.
    """

    def __init__(self, backend: GpuBackend, spec: TensorSpec) -> None:
        self._backend = backend
        self._spec = spec
        self._size = nbytes(spec)
        self.array = new_array(backend, spec)
        self._pinned: list[Any] = []
        self._sent: list[Any] = [None, None]
        self._turn = 0
        self._unread: deque[tuple[DeviceCopy, Any]] = deque()  # and when each has been read

    def __call__(self, array: Any) -> None:
        """Fill the buffer, for all work that is started from now on.

        Raises:
            ShapeError: the array has another shape or dtype.
        """
        if tuple(array.shape) != self._spec.shape or array.dtype != self._spec.dtype:
            raise ShapeError(f"expected {self._spec}, got {array.dtype}{tuple(array.shape)}")
        if not self._size:
            return
        with self._backend.translate_errors():
            if isinstance(array, DeviceCopy):
                self._from_device(array)
            else:
                self._from_host(np.asarray(array))

    def _from_device(self, copy: DeviceCopy) -> None:
        stream, unread = self._backend.stream, self._unread
        while unread and (len(unread) > 1 or unread[0][1].done):
            unread.popleft()[1].synchronize()
        stream.wait_event(copy.ready)
        self.array.data.copy_from_device_async(copy.array.data, self._size, stream)
        unread.append((copy, self._backend.record_event(stream)))

    def _from_host(self, host: np.ndarray[Any, Any]) -> None:
        backend = self._backend
        if not self._pinned:
            allocate = backend.xp.cuda.alloc_pinned_memory
            self._pinned = [allocate(self._size), allocate(self._size)]
            backend.pools.pinned += 2 * _pinned_bytes(self._size)
        turn = self._turn = 1 - self._turn
        if self._sent[turn] is not None:
            self._sent[turn].synchronize()
        pinned = self._pinned[turn]
        np.copyto(pinned_view(pinned, self._size).view(host.dtype).reshape(host.shape), host)
        backend.upload(self.array, pinned, self._size)
        self._sent[turn] = backend.uploaded


def _pinned_bytes(size: int) -> int:
    """Return the bytes that CuPy's pinned pool takes for `size`: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0

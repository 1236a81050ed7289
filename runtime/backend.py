"""Backend: what a program needs of a device's kind: its array module, memory, and how data gets in
and out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np

from graphflow.device import DeviceName
from graphflow.errors import DeviceError
from graphflow.ops.kernels.threads import Pool, using
from graphflow.runtime.memory import ALIGNMENT


class Backend(Protocol):
    """A device's array module `xp`, and the ways between host and device."""

    xp: Any

    def empty(self, nbytes: int) -> Any: ...

    def to_device(self, array: Any) -> Any: ...

    def to_host(self, array: Any) -> np.ndarray[Any, Any]: ...

    def synchronize(self) -> None: ...

    def active(self) -> Any: ...


class CpuBackend:
    """numpy. BLAS keeps to one thread while a program runs; our own pool splits the rows."""

    xp = np

    def __init__(self, threads: int = 1) -> None:
        self._pool = Pool(threads)

    def empty(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Uninitialised bytes at an aligned address."""
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + nbytes]

    def to_device(self, array: Any) -> np.ndarray[Any, Any]:
        """The array itself if it is contiguous and aligned, else a copy that is."""
        array = np.asarray(array)
        if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
            return array
        copy = self.empty(array.nbytes).view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return copy

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy that the caller owns."""
        return np.array(array, order="C")

    def synchronize(self) -> None:
        """Nothing to wait for."""

    @contextmanager
    def active(self) -> Iterator[None]:
        with _one_blas_thread(), using(self._pool):
            yield


class GpuBackend:
    """CuPy on one device."""

    def __init__(self, index: int) -> None:
        self.xp = _cupy()
        self._device = self.xp.cuda.Device(index)

    def empty(self, nbytes: int) -> Any:
        with self._device:
            return self.xp.empty(nbytes, np.uint8)

    def to_device(self, array: Any) -> Any:
        with self._device:
            return self.xp.ascontiguousarray(self.xp.asarray(array))

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        with self._device:
            host: np.ndarray[Any, Any] = self.xp.asnumpy(array)
            return host

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._device:
            yield
            self.synchronize()


def backend_for(device: DeviceName, threads: int) -> Backend:
    """The backend of a full device name.

    Raises:
        DeviceError: a GPU is asked for and CuPy or the GPU is missing.
    """
    if device.kind == "gpu":
        return GpuBackend(device.index or 0)
    return CpuBackend(threads)


def _cupy() -> Any:
    try:
        import cupy  # heavy, and only here
    except ImportError as error:
        raise DeviceError("a gpu device needs CuPy: pip install 'graphflow[gpu]'") from error
    return cupy


class _BlasLimit:
    """Holds BLAS to one thread while any program of the process runs, and then restores it."""

    def __init__(self) -> None:
        from threadpoolctl import ThreadpoolController  # scans loaded libraries: once, when needed

        self._lock = threading.Lock()
        self._users = 0
        self._before: list[int] = []
        controllers = ThreadpoolController().lib_controllers
        self._blas = [c for c in controllers if c.user_api == "blas"]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = [c.get_num_threads() for c in self._blas]
                for c, n in zip(self._blas, self._before, strict=True):
                    if n != 1:
                        c.set_num_threads(1)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    for c, n in zip(self._blas, self._before, strict=True):
                        if n != 1:
                            c.set_num_threads(n)


@cache
def _blas_limit() -> _BlasLimit:
    return _BlasLimit()


def _one_blas_thread() -> Any:
    return _blas_limit()()

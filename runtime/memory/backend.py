"""Device backends: a device's array module, its memory, and copies to and from the host.

`CpuBackend` is here. The GPU's (`runtime/gpu/gpu_backend.py`) is loaded only if a GPU is named.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from graphflow.base.process.blas_threads import one_blas_thread
from graphflow.errors import DeviceError, DeviceOutOfMemory
from graphflow.ir.spec import BFLOAT16, TensorSpec, nbytes
from graphflow.ops.kernels.jit.array_address import ALIGNMENT, address, empty_aligned
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool
from graphflow.ops.kernels.jit.thread_team import ThreadTeam

Array = np.ndarray[Any, np.dtype[Any]]
ResultExporter = Callable[[Array], Array | None]
"""Copies a result to memory that another process maps; returns None if it stays in this process."""


class DeviceBackend(Protocol):
    """A device as programs see it: array module, memory, and copies to and from the host.

    Attributes:
        xp: array module, numpy or CuPy.
        threads: threads that share a kernel's work.
        export_result: copies results that leave the process; None if none do.
    """

    xp: Any
    threads: int
    export_result: ResultExporter | None

    @property
    def team(self) -> ThreadTeam | None:
        """The threads that share native calls; None for one thread, and on a GPU."""

    def empty(self, nbytes: int) -> Any:
        """Return uninitialised bytes of the device."""

    def to_device(self, array: Any) -> Any:
        """Return a contiguous array of the device: the given one, or a copy."""

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a copy that the caller owns."""

    def to_hosts(self, arrays: Sequence[Any], export: ResultExporter | None = None) -> list[Array]:
        """Return copies that the caller owns, or that `export` makes."""

    def write(self, memory: Any, value: Any) -> None:
        """Copy `value` into an array of the device."""

    def hand_over(self, array: Any, kind: str) -> Any:
        """Return an array for another device of this process; `kind` is "cpu" or "gpu"."""

    def synchronize(self) -> None:
        """Wait until all started work is done."""

    def active(self) -> Any:
        """Return a context manager in which work is started on the device."""

    def close(self) -> None:
        """Release the device's threads, streams and memory."""


class CpuBackend:
    """A CPU by numpy. BLAS uses one thread while a program runs; our own pool splits the rows.

    Args:
        threads: threads that share a kernel's work.
    """

    xp: Any = np

    def __init__(self, threads: int = 1) -> None:
        self.export_result: ResultExporter | None = None
        self._pool = Pool(threads)
        self.threads = self._pool.threads
        self._scratch: Array = empty_aligned(0)
        self.team = self._pool.team

    def empty(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return uninitialised bytes at an aligned address.

        Raises:
            DeviceOutOfMemory: memory is short.
        """
        return self._allocate(nbytes)

    def _allocate(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return uninitialised bytes at an aligned address.

        If memory is short, garbage is collected and the allocation tried once more.

        Raises:
            DeviceOutOfMemory: memory is short even then.
        """
        for is_last in (False, True):
            try:
                return empty_aligned(nbytes)
            except (MemoryError, ValueError):  # ValueError: larger than the address space
                if is_last:
                    break
                gc.collect()
        raise DeviceOutOfMemory(
            f"this host cannot allocate {nbytes / 1e9:.3g} GB ({nbytes:,} bytes); feed smaller "
            "batches, or use more workers"
        )

    def shared_scratch(self, nbytes: int) -> Array:
        """Return scratch memory for native calls, which run one at a time.

        A program asks for all that its kernels need (`scratch_use.py`) before it compiles them. The
        buffer grows by half at least, since earlier programs keep what they got.
        """
        if self._scratch.nbytes < nbytes:
            self._scratch = self._allocate(max(nbytes, 3 * self._scratch.nbytes // 2))
        return self._scratch

    def to_device(self, array: Any) -> np.ndarray[Any, Any]:
        """Return the array itself if it is contiguous and aligned, else a copy that is."""
        given: np.ndarray[Any, Any] = np.asarray(array)
        if given.flags.c_contiguous and address(given) % ALIGNMENT == 0:
            return given
        copy: np.ndarray[Any, Any] = self.empty(given.nbytes).view(given.dtype)
        copy = copy.reshape(given.shape)
        np.copyto(copy, given)
        return copy

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a copy that the caller owns."""
        return np.array(array, order="C")

    def to_hosts(self, arrays: Sequence[Any], export: ResultExporter | None = None) -> list[Array]:
        """Return copies that the caller owns, or that `export` makes."""
        if export is None:
            return [np.array(array, order="C") for array in arrays]
        return [export_or_copy(array, export) for array in arrays]

    def write(self, memory: Any, value: Any) -> None:
        """Copy `value` into an array."""
        memory[...] = value

    def hand_over(self, array: Any, kind: str) -> Any:
        """Return the array itself: its buffer lasts until the step ends, and is read by then."""
        return array if isinstance(array, np.ndarray) else np.array(array)

    def synchronize(self) -> None:
        """Return at once: work on a CPU is done when its call returns."""

    def active(self) -> Any:
        """Return a context manager in which kernels use this device's threads."""
        return _ActiveCpu(self._pool)

    def close(self) -> None:
        """End the pool's threads. A kernel that still runs finishes on its own thread."""
        self._pool.close()


def new_array(backend: DeviceBackend, spec: TensorSpec) -> Any:
    """Return an uninitialised array of a device; the spec's sizes are numbers.

    Raises:
        DeviceOutOfMemory: memory is short.
    """
    return backend.empty(nbytes(spec)).view(spec.dtype).reshape(spec.shape)


def export_or_copy(array: Array, export: ResultExporter | None) -> Array:
    """Copy an array of the host's memory by `export`, or plainly if that declines."""
    exported = None if export is None else export(array)
    return np.array(array, order="C") if exported is None else exported


class _ActiveCpu:
    """Context of a program on a CPU. A generator would take twice as long to enter."""

    def __init__(self, pool: Pool) -> None:
        self._using = use_pool(pool)

    def __enter__(self) -> None:
        one_blas_thread().__enter__()
        try:
            self._using.__enter__()
        except BaseException:  # Ctrl-C
            one_blas_thread().__exit__()
            raise

    def __exit__(self, *exception: Any) -> None:
        self._using.__exit__(*exception)
        one_blas_thread().__exit__()


def require_dtype(xp: Any, dtype: np.dtype[Any]) -> None:
    """Refuse a dtype that a device's array module lacks.

    Raises:
        DeviceError: the dtype is bfloat16, and CuPy is older than 14.
    """
    if dtype == BFLOAT16 and xp is not np and int(xp.__version__.split(".")[0]) < 14:
        raise DeviceError(
            f"CuPy {xp.__version__} has no bfloat16; update it to 14, use float16, or place such "
            "tensors on a cpu"
        )

"""Backend: what a program needs of a device's kind: its array module, memory, and how data gets in
and out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from graphflow.base.blas_threads import one_blas_thread
from graphflow.errors import DeviceError, DeviceOutOfMemory
from graphflow.ir.spec import BFLOAT16
from graphflow.ops.kernels.jit.array_address import ALIGNMENT, address, empty_aligned
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool

Array = np.ndarray[Any, np.dtype[Any]]
ResultExporter = Callable[[Array], Array | None]
"""Copies an array to where another process sees it; None where it belongs to its own."""


class DeviceBackend(Protocol):
    """A device's array module `xp`, the threads that share a kernel's work, and the ways between
    host and device.

    Attributes:
        keep: where results go that leave the process.
    """

    xp: Any
    threads: int
    export_result: ResultExporter | None

    def empty(self, nbytes: int) -> Any: ...

    def to_device(self, array: Any) -> Any: ...

    def to_host(self, array: Any) -> np.ndarray[Any, Any]: ...

    def to_hosts(
        self, arrays: Sequence[Any], keep: ResultExporter | None = None
    ) -> list[Array]: ...

    def write(self, memory: Any, value: Any) -> None:
        """Fill an array of the device."""

    def hand_over(self, array: Any, kind: str) -> Any:
        """An array for another device of this process, of that kind."""

    def synchronize(self) -> None: ...

    def active(self) -> Any: ...

    def close(self) -> None: ...


class CpuBackend:
    """numpy. BLAS keeps to one thread while a program runs; our own pool splits the rows."""

    xp: Any = np

    def __init__(self, threads: int = 1) -> None:
        self.export_result: ResultExporter | None = None
        self._pool = Pool(threads)
        self.threads = self._pool.threads

    def empty(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Uninitialised bytes at an aligned address. Where there are not enough, what nobody refers
        to is freed, and it is tried once more.

        Raises:
            DeviceOutOfMemory: there are not enough then, either.
        """
        for is_last in (False, True):
            try:
                return empty_aligned(nbytes)
            except (MemoryError, ValueError):  # numpy's word for more than any address reaches
                if is_last:
                    break
                gc.collect()
        raise DeviceOutOfMemory(
            f"{nbytes / 1e9:.3g} GB cannot be had on this host ({nbytes:,} bytes); feed smaller "
            "batches, or use more workers"
        )

    def to_device(self, array: Any) -> np.ndarray[Any, Any]:
        """The array itself if it is contiguous and aligned, else a copy that is."""
        given: np.ndarray[Any, Any] = np.asarray(array)
        if given.flags.c_contiguous and address(given) % ALIGNMENT == 0:
            return given
        copy: np.ndarray[Any, Any] = self.empty(given.nbytes).view(given.dtype)
        copy = copy.reshape(given.shape)
        np.copyto(copy, given)
        return copy

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy that the caller owns."""
        return np.array(array, order="C")

    def to_hosts(self, arrays: Sequence[Any], keep: ResultExporter | None = None) -> list[Array]:
        """Copies that the caller owns, or that `keep` makes."""
        return [export_or_copy(array, keep) for array in arrays]

    def write(self, memory: Any, value: Any) -> None:
        """Fill an array."""
        memory[...] = value

    def hand_over(self, array: Any, kind: str) -> Any:
        """The array itself: its buffer keeps until the step ends, and by then it was read."""
        return array if isinstance(array, np.ndarray) else np.array(array)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def active(self) -> Any:
        return _ActiveCpu(self._pool)

    def close(self) -> None:
        """End the threads; what still runs goes on without them."""
        self._pool.close()


def export_or_copy(array: Array, keep: ResultExporter | None) -> Array:
    """A copy of an array of this host's memory."""
    kept = None if keep is None else keep(array)
    return np.array(array, order="C") if kept is None else kept


class _ActiveCpu:
    """While a program runs on a CPU. A class, because a generator takes twice as long to enter."""

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
    """Refuse a dtype that a device's array module does not have.

    Raises:
        DeviceError: bfloat16, and a CuPy before 14.
    """
    if dtype == BFLOAT16 and xp is not np and int(xp.__version__.split(".")[0]) < 14:
        raise DeviceError(
            f"CuPy {xp.__version__} has no bfloat16; update it to 14, use float16, or place such "
            "tensors on a cpu"
        )

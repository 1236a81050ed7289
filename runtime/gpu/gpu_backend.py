"""A GPU through CuPy: its streams, its memory, and copies to and from the host.

Kernels run on one stream. Uploads and downloads have a stream each, and events order the three.
Feeds go through two alternating pinned buffers to a fixed address, where captured work finds them.
Fetches come through pinned memory. The arena and each variable are plain allocations. Ops that
allocate memory take it from the device's pools, which count their allocations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import (
    CompileError,
    DeviceError,
    DeviceLost,
)
from graphflow.ops.kernels.codegen.region import Region
from graphflow.ops.kernels.cuda.cupy_module import capture_graph, import_cupy
from graphflow.ops.kernels.cuda.nvrtc import compile_module
from graphflow.ops.kernels.cuda.region_kernels import CudaKernel, cuda_kernel, is_wide, module_text
from graphflow.runtime.gpu.cublas import Cublas
from graphflow.runtime.gpu.cudnn import Cudnn
from graphflow.runtime.gpu.memory_pools import GpuMemory, GpuMemoryPools
from graphflow.runtime.memory.backend import Array, ResultExporter, export_or_copy

_KERNELS_PER_MODULE = 64
"""Kernels that are compiled in one translation unit."""
_VECTOR_BYTES = 16
"""Bytes of a vector load; addresses must be multiples of it."""
_DEBUG_HINT = (
    "its steps are started ahead, so to see which op it was, set CUDA_LAUNCH_BLOCKING=1 and "
    "GRAPHFLOW_CUDA_GRAPHS=off"
)


@dataclass(frozen=True)
class DeviceCopy:
    """A copy of a tensor for another GPU of this process, and the event of its completion."""

    array: Any
    ready: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the tensor."""
        dtype: np.dtype[Any] = self.array.dtype
        return dtype


class GpuBackend:
    """A GPU as a `Backend`.

    Args:
        index: the CUDA device.

    Attributes:
        kernels: kernels of libraries, by op, sizes and attributes.
        pools: the GPU's memory.

    Raises:
        DeviceError: CuPy or the GPU is missing.
    """

    threads = 1
    team: None = None

    def __init__(self, index: int) -> None:
        self.xp = cupy = import_cupy()
        self.index = index
        self.export_result: ResultExporter | None = None
        self.kernels: dict[Any, Any] = {}
        self._functions: dict[str, Any] = {}
        self._is_capturing = False
        self._errors = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)
        try:
            self._device = cupy.cuda.Device(index)
            with self._device:
                self.stream = cupy.cuda.Stream(non_blocking=True)
                self._upload_stream = cupy.cuda.Stream(non_blocking=True)
                self._download_stream = cupy.cuda.Stream(non_blocking=True)
                self.pools = GpuMemoryPools(cupy, index)
                properties = cupy.cuda.runtime.getDeviceProperties(index)
                self._step_begun = self.uploaded = self.record_event(self.stream)
        except self._errors as error:
            raise DeviceError(f"gpu:{index} cannot be used: {error}") from error
        self.processors = int(properties["multiProcessorCount"])
        _refuse_uploads(cupy)

    # Streams and errors -------------------------------------------------------------------------

    @contextmanager
    def active(self) -> Iterator[None]:
        """Start work on the device's stream, with memory from its pool.

        Raises:
            DeviceError: a CUDA call failed.
        """
        with (
            self.translate_errors(),
            self._device,
            self.stream,
            self.xp.cuda.using_allocator(self.pools.allocate),
        ):
            yield

    @contextmanager
    def side_stream(self, stream: Any) -> Iterator[None]:
        """Start another thread's work on a stream of its own, in parallel with the program.

        Its memory does not count as allocated by the program's steps.
        """
        with self._device, stream, self.xp.cuda.using_allocator(self.pools.persistent.malloc):
            yield

    def synchronize(self) -> None:
        """Wait for the device's work.

        Raises:
            DeviceError: the work failed.
        """
        with self.translate_errors(), self._device:
            self.stream.synchronize()

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Raise errors of CUDA calls as DeviceError or DeviceLost that names the device.

        CUDA is asynchronous, so the failing call may report an earlier failure.
        """
        try:
            yield
        except self._errors as error:
            if self._is_capturing:  # the capture itself may refuse the call
                raise
            lost = self.lost_error()
            raise lost or DeviceError(f"gpu:{self.index} failed: {error}; {_DEBUG_HINT}") from error

    def lost_error(self) -> DeviceLost | None:
        """Return why this process cannot use the device any more; None if it can.

        After an illegal address or a memory failure, CUDA fails every further call.
        """
        if self._is_capturing:
            return None  # a capture refuses to synchronise, lost or not
        try:
            self.stream.synchronize()
        except self._errors as error:
            return DeviceLost(
                f"gpu:{self.index} failed: {error}; this process cannot use it any more: start it "
                f"anew; {_DEBUG_HINT}"
            )
        return None

    def try_out(self) -> int:
        """Let the device add two arrays, and return how many bytes of its memory are free.

        Raises:
            DeviceError: the sum is wrong, or a CUDA call failed.
            Exception: of CuPy, if it cannot compile or lacks a library.
        """
        with self.active():
            few = self.to_device(np.arange(8, dtype=np.float32))
            total = self.to_host(few + few)
            free, _ = self.xp.cuda.runtime.memGetInfo()
        if not np.array_equal(total, 2 * np.arange(8)):
            raise DeviceError(f"gpu:{self.index} computes wrong sums")
        return int(free)

    def begin_step(self) -> None:
        """Begin a step: its uploads wait until earlier steps have read the buffers."""
        self._step_begun = self.record_event(self.stream)

    @cached_property
    def cublas(self) -> Cublas:
        """The GPU's cuBLAS handle.

        Raises:
            Exception: raised by nvmath if cuBLAS is missing or fails.
        """
        with self.active():
            return Cublas(self.xp, self.stream.ptr, self.pools.persistent.malloc)

    @cached_property
    def cudnn(self) -> Cudnn:
        """The GPU's cuDNN handle.

        Raises:
            Exception: cuDNN is missing or fails.
        """
        with self.active():
            return Cudnn(self.stream.ptr)

    def close(self) -> None:
        """Wait for the device's work, and release memory and libraries.

        Plans of Fourier transforms, which use the pool's memory, and pinned memory belong to CuPy.
        They are released, too. Errors are suppressed: a device that failed has reported it before.
        """
        xp, pools = self.xp, self.pools
        self.kernels.clear()
        for end in (
            self.stream.synchronize,
            *(
                self.__dict__.pop(name).close
                for name in ("cublas", "cudnn")
                if name in self.__dict__
            ),
            lambda: xp.fft.config.get_plan_cache().clear(),
            *(pool.free_all_blocks for pool in (pools.op, pools.persistent, pools.graph)),
            lambda: xp.get_default_pinned_memory_pool().free_all_blocks(),
        ):
            with suppress(Exception), self._device:
                end()

    def record_event(self, stream: Any) -> Any:
        """Return an event that a stream reaches after its work so far."""
        with self._device:
            event = self.xp.cuda.Event(disable_timing=True)
            event.record(stream)
            return event

    # Memory -------------------------------------------------------------------------------------

    def empty(self, nbytes: int) -> Any:
        """Return uninitialised bytes: a plain allocation, not one from a pool."""
        with self.translate_errors(), self._device:
            return self.xp.ndarray((nbytes,), np.uint8, memptr=self.pools.allocate_buffer(nbytes))

    @property
    def allocations(self) -> int:
        """Number of allocations by ops so far."""
        return self.pools.allocations

    def memory_usage(self) -> GpuMemory:
        """Return the bytes that are in use, by purpose."""
        return self.pools.usage()

    # Copies -------------------------------------------------------------------------------------

    def to_device(self, array: Any) -> Any:
        """Return a contiguous array of this device: the given one, or a finished copy."""
        if isinstance(array, self.xp.ndarray) and array.flags.c_contiguous:
            return array
        host = np.asarray(array)
        with self.active(), self.xp.cuda.using_allocator(self.pools.persistent.malloc):
            there = self.xp.empty(host.nbytes, np.uint8)
            if host.nbytes:
                there.set(_bytes(host))
            self.stream.synchronize()
            return there.view(host.dtype).reshape(host.shape)

    def write(self, memory: Any, value: Any) -> None:
        """Copy `value` into an array of this device, before any work that is started later."""
        with self.active():
            self.xp.copyto(memory, self.to_device(value))
            self.stream.synchronize()

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a copy that the caller owns."""
        return self.to_hosts((array,))[0]

    def to_hosts(self, arrays: Sequence[Any], export: ResultExporter | None = None) -> list[Array]:
        """Return copies that the caller owns, or that `export` makes.

        All go through pinned memory, with one wait.
        """
        if not arrays:
            return []
        landed = []
        with self.active():
            given = [self.xp.ascontiguousarray(a).reshape(a.shape) for a in arrays]
            self._download_stream.wait_event(self.record_event(self.stream))
            for array in given:
                pinned = self.xp.cuda.alloc_pinned_memory(max(int(array.nbytes), 1))
                if array.nbytes:
                    array.data.copy_to_host_async(
                        pinned.ptr, int(array.nbytes), self._download_stream
                    )
                landed.append((pinned, array))
            self._download_stream.synchronize()
        views = [
            pinned_view(pinned, int(array.nbytes)).view(array.dtype).reshape(array.shape)
            for pinned, array in landed
        ]
        return [export_or_copy(view, export) for view in views]

    def hand_over(self, array: Any, kind: str) -> Any:
        """Return a copy for another device of this process; `kind` is "cpu" or "gpu"."""
        if kind == "cpu":
            return self.to_host(array)
        with self.active():
            return DeviceCopy(self.xp.copy(array), self.record_event(self.stream))

    def upload(self, buffer: Any, pinned: Any, size: int) -> None:
        """Copy pinned memory to a buffer, for all work that is started from now on.

        The copy waits for the readers of earlier steps, up to `begin_step`. The event `uploaded`
        is its completion.
        """
        with self._device:
            self._upload_stream.wait_event(self._step_begun)
            buffer.data.copy_from_host_async(pinned.ptr, size, self._upload_stream)
            self.uploaded = self.record_event(self._upload_stream)
            self.stream.wait_event(self.uploaded)

    # Kernels ------------------------------------------------------------------------------------

    def compile(self, kernels: Sequence[CudaKernel]) -> None:
        """Compile the missing kernels, many in one translation unit.

        Raises:
            CompileError: CUDA's compiler refuses a kernel.
        """
        missing = {k.name: k for k in kernels if k.name not in self._functions}
        names = list(missing)
        with self.translate_errors(), self._device:
            for first in range(0, len(names), _KERNELS_PER_MODULE):
                some = names[first : first + _KERNELS_PER_MODULE]
                text = module_text(missing[name] for name in some)
                try:
                    module = compile_module(self.xp, text)
                    for name in some:
                        self._functions[name] = module.get_function(name)
                except Exception as error:  # from CuPy's compiler or the driver
                    refused = CompileError(f"CUDA kernels do not compile: {error}")
                    raise self.lost_error() or refused from error

    def make_launcher(
        self, region: Region, sizes: tuple[int, ...]
    ) -> Callable[[Sequence[Any]], None]:
        """Return a region's kernel for some sizes, as a function of operands and results."""
        kernel = cuda_kernel(region, is_wide(sizes))
        self.compile([kernel])
        function, processors = self._functions[kernel.name], self.processors
        grids = {aligned: kernel.grid(sizes, aligned, processors) for aligned in (False, True)}
        numbers = {
            aligned: tuple(np.uint64(n) for n in grid.numbers) for aligned, grid in grids.items()
        }
        if grids[False].numbers[0] == 0 or (region.over == "columns" and sizes[-1] == 0):
            return lambda arrays: None  # nothing to store

        def launch(arrays: Sequence[Any]) -> None:
            aligned = all(array.data.ptr % _VECTOR_BYTES == 0 for array in arrays)
            grid = grids[aligned]
            function((grid.blocks,), (grid.threads,), (*arrays, *numbers[aligned]))

        return launch

    # Graphs -------------------------------------------------------------------------------------

    @contextmanager
    def graph_memory(self) -> Iterator[None]:
        """Take memory from the pool for work that is captured now or later.

        A replay writes to the same addresses as the capture, so nothing else may use them. The
        driver cannot allocate during a capture; by then the pool has the memory that the first run
        took. Graphs of one stream run one after the other and share the pool.
        """
        with self.xp.cuda.using_allocator(self.pools.allocate_for_graphs):
            yield

    def capture(self, run: Callable[[], None]) -> Any:
        """Return a graph of the work that `run` starts on the stream."""
        self._is_capturing = _capturing.now = True
        try:
            with self.graph_memory():
                return capture_graph(self.xp, self.stream, run)
        finally:
            self._is_capturing = _capturing.now = False

    def replay(self, graph: Any) -> None:
        """Start the work of a graph on the stream."""
        with self.translate_errors():
            graph.launch(self.stream)


_capturing = threading.local()


def _refuse_uploads(cupy: Any) -> None:
    """Refuse copies from the host during a capture: a replay would copy what is there then.

    CuPy allocates pinned memory for such a copy, from one allocator for all threads.
    """

    def allocate(size: int) -> Any:
        if getattr(_capturing, "now", False):
            raise DeviceError("a CUDA graph cannot copy an array from the host to the GPU")
        return pool.malloc(size)

    pool = cupy.get_default_pinned_memory_pool()
    cupy.cuda.set_pinned_memory_allocator(allocate)


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def pinned_view(pinned: Any, size: int) -> np.ndarray[Any, Any]:
    """Return pinned memory as an array of bytes."""
    return np.frombuffer(pinned, np.uint8, size)

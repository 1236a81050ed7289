"""A GPU through CuPy: its streams, its memory, and copies to and from the host.

Kernels run on one stream. Uploads and downloads have a stream each, and events order the three.
Feeds go through two alternating pinned buffers to a fixed address, where captured work finds them.
Fetches come through pinned memory. The arena and each variable are plain allocations. Ops that
allocate memory take it from the device's pools, which count their allocations.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
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
    DeviceOutOfMemory,
    ShapeError,
)
from graphflow.ir.spec import TensorSpec, nbytes
from graphflow.ops.kernels.codegen.region import Region
from graphflow.ops.kernels.cuda.cupy_module import capture_graph, import_cupy
from graphflow.ops.kernels.cuda.nvrtc import compile_module
from graphflow.ops.kernels.cuda.region_kernels import CudaKernel, cuda_kernel, is_wide, module_text
from graphflow.ops.kernels.jit.array_address import ALIGNMENT
from graphflow.runtime.gpu.cublas import Cublas
from graphflow.runtime.gpu.cudnn import Cudnn
from graphflow.runtime.memory.backend import Array, ResultExporter, export_or_copy

_KERNELS_PER_MODULE = 64
"""Kernels that are compiled in one translation unit."""
_VECTOR_BYTES = 16
"""Bytes of a vector load; addresses must be multiples of it."""
_DEBUG_HINT = (
    "its steps are started ahead, so to see which op it was, set CUDA_LAUNCH_BLOCKING=1 and "
    "GRAPHFLOW_CUDA_GRAPHS=off"
)

_lock = threading.Lock()
_backends: weakref.WeakSet[GpuBackend] = weakref.WeakSet()
"""All backends of this process. If one lacks memory, the pools of all on its GPU are trimmed."""


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of a GPU's memory, and of the host's memory for it.

    Attributes:
        plain: live plain allocations: arenas, variables, buffers of feeds.
        pool: the most that ops have allocated for themselves.
        persistent: constants, tensors on their way, and workspaces of libraries.
        pinned: the host's pinned memory for feeds.
    """

    plain: int
    pool: int
    persistent: int
    pinned: int


@dataclass(frozen=True)
class DeviceCopy:
    """A copy of a tensor for another GPU of this process, and the event of its completion."""

    array: Any
    ready: Any

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self.array.dtype
        return dtype


class GpuBackend:
    """A GPU as a `Backend`.

    Args:
        index: the CUDA device.

    Attributes:
        kernels: kernels of libraries, by op, sizes and attributes.
        allocations: number of allocations by ops so far.
        pinned: bytes of pinned memory for feeds.

    Raises:
        DeviceError: CuPy or the GPU is missing.
    """

    threads = 1

    def __init__(self, index: int) -> None:
        self.xp = cupy = import_cupy()
        self.index = index
        self.export_result: ResultExporter | None = None
        self.allocations = 0
        self.pinned = 0
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
                self._op_pool = cupy.cuda.MemoryPool()
                self._persistent_pool = cupy.cuda.MemoryPool()
                self._graph_pool = cupy.cuda.MemoryPool(self._allocate_plain)
                properties = cupy.cuda.runtime.getDeviceProperties(index)
                self._step_begun = self.uploaded = self.record_event(self.stream)
        except self._errors as error:
            raise DeviceError(f"gpu:{index} cannot be used: {error}") from error
        self.processors = int(properties["multiProcessorCount"])
        _refuse_uploads(cupy)
        # CuPy's own class does not support weak references, which report when memory is freed.
        self._plain_memory_class = type("Plain", (cupy.cuda.Memory,), {})
        self._plain_bytes = 0
        with _lock:
            _backends.add(self)

    # Where work goes ----------------------------------------------------------------------------

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
            self.xp.cuda.using_allocator(self._allocate),
        ):
            yield

    @contextmanager
    def side_stream(self, stream: Any) -> Iterator[None]:
        """Start another thread's work on a stream of its own, in parallel with the program.

        Its memory does not count as allocated by the program's steps.
        """
        with self._device, stream, self.xp.cuda.using_allocator(self._persistent_pool.malloc):
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
            return Cublas(self.xp, self.stream.ptr, self._persistent_pool.malloc)

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
        xp = self.xp
        self.kernels.clear()
        for end in (
            self.stream.synchronize,
            *(
                self.__dict__.pop(name).close
                for name in ("cublas", "cudnn")
                if name in self.__dict__
            ),
            lambda: xp.fft.config.get_plan_cache().clear(),
            *(
                pool.free_all_blocks
                for pool in (self._op_pool, self._persistent_pool, self._graph_pool)
            ),
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
        size = max(nbytes, ALIGNMENT)
        with self.translate_errors(), self._device:
            memory = self._allocate_or_trim(size, self._plain_memory_class)
            self._plain_bytes += size
            weakref.finalize(memory, self._on_freed, size)
            place = self.xp.cuda.MemoryPointer(memory, 0)
            return self.xp.ndarray((nbytes,), np.uint8, memptr=place)

    def _on_freed(self, size: int) -> None:
        self._plain_bytes -= size

    def _allocate(self, nbytes: int) -> Any:
        self.allocations += 1
        return self._allocate_or_trim(nbytes, self._op_pool.malloc)

    def _allocate_for_graphs(self, nbytes: int) -> Any:
        self.allocations += 1
        return self._graph_pool.malloc(nbytes)

    def _allocate_plain(self, nbytes: int) -> Any:
        """Allocate from the driver, for the pool of captured work.

        If memory is short, CuPy's own allocator would free blocks of this pool. A graph may still
        write to them.
        """
        cuda = self.xp.cuda
        return self._allocate_or_trim(nbytes, lambda size: cuda.MemoryPointer(cuda.Memory(size), 0))

    def _allocate_or_trim(self, size: int, take: Callable[[int], Any]) -> Any:
        """Allocate memory; if it is short, trim this process's pools on the GPU and try again.

        Raises:
            DeviceOutOfMemory: memory is short even then.
        """
        cuda = self.xp.cuda
        errors = (cuda.runtime.CUDARuntimeError, cuda.memory.OutOfMemoryError)
        try:
            return take(size)
        except errors as error:
            if not _is_out_of_memory(error):
                raise
        with _lock:
            here = [each for each in _backends if each.index == self.index]
        pools = [pool for each in here for pool in (each._op_pool, each._persistent_pool)]
        for pool in (*pools, self.xp.get_default_memory_pool()):
            pool.free_all_blocks()
        try:
            return take(size)
        except errors as error:
            free, total = cuda.runtime.memGetInfo()
            raise DeviceOutOfMemory(
                f"gpu:{self.index} has {free / 1e9:.3g} of {total / 1e9:.3g} GB free, and "
                f"{size / 1e9:.3g} GB ({size:,} bytes) are needed ({error}); feed smaller batches, "
                "checkpoint layers (gf.checkpoint), or use more devices"
            ) from None

    def memory_usage(self) -> GpuMemory:
        pool, kept, repeated = (
            int(pool.total_bytes())
            for pool in (self._op_pool, self._persistent_pool, self._graph_pool)
        )
        return GpuMemory(self._plain_bytes, pool + repeated, kept, self.pinned)

    # In and out ---------------------------------------------------------------------------------

    def to_device(self, array: Any) -> Any:
        """Return a contiguous array of this device: the given one, or a finished copy."""
        if isinstance(array, self.xp.ndarray) and array.flags.c_contiguous:
            return array
        host = np.asarray(array)
        with self.active(), self.xp.cuda.using_allocator(self._persistent_pool.malloc):
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
        return [
            export_or_copy(
                _view(pinned, int(array.nbytes)).view(array.dtype).reshape(array.shape), export
            )
            for pinned, array in landed
        ]

    def hand_over(self, array: Any, kind: str) -> Any:
        """Return a copy for another device of this process; `kind` is "cpu" or "gpu"."""
        if kind == "cpu":
            return self.to_host(array)
        with self.active():
            return DeviceCopy(self.xp.copy(array), self.record_event(self.stream))

    def input_buffer(self, spec: TensorSpec) -> InputBuffer:
        """Make the buffer of a feed or a received tensor."""
        return InputBuffer(self, spec)

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
        with self.xp.cuda.using_allocator(self._allocate_for_graphs):
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
        with self.translate_errors():
            graph.launch(self.stream)


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
        self.array = backend.empty(self._size).view(spec.dtype).reshape(spec.shape)
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

    def _from_device(self, handed: DeviceCopy) -> None:
        stream, unread = self._backend.stream, self._unread
        while unread and (len(unread) > 1 or unread[0][1].done):
            unread.popleft()[1].synchronize()
        stream.wait_event(handed.ready)
        self.array.data.copy_from_device_async(handed.array.data, self._size, stream)
        unread.append((handed, self._backend.record_event(stream)))

    def _from_host(self, host: np.ndarray[Any, Any]) -> None:
        backend = self._backend
        if not self._pinned:
            allocate = backend.xp.cuda.alloc_pinned_memory
            self._pinned = [allocate(self._size), allocate(self._size)]
            backend.pinned += 2 * _pinned_bytes(self._size)
        turn = self._turn = 1 - self._turn
        if self._sent[turn] is not None:
            self._sent[turn].synchronize()
        pinned = self._pinned[turn]
        np.copyto(_view(pinned, self._size).view(host.dtype).reshape(host.shape), host)
        backend.upload(self.array, pinned, self._size)
        self._sent[turn] = backend.uploaded


_capturing = threading.local()


def _refuse_uploads(cupy: Any) -> None:
    """Refuse copies from the host during a capture: a replay would copy what is there then.

    CuPy allocates pinned memory for such a copy, from one allocator for all threads.
    """

    def allocate(size: int) -> Any:
        if getattr(_capturing, "now", False):
            raise DeviceError("an array of the host's cannot be copied to a GPU in a CUDA graph")
        return pool.malloc(size)

    pool = cupy.get_default_pinned_memory_pool()
    cupy.cuda.set_pinned_memory_allocator(allocate)


def _pinned_bytes(size: int) -> int:
    """Return the bytes that CuPy's pinned pool takes for `size`: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def _is_out_of_memory(error: Exception) -> bool:
    """Return True if memory is short, not if, for example, a capture forbids to allocate."""
    return isinstance(error, MemoryError) or "cudaErrorMemoryAllocation" in str(error)


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _view(pinned: Any, size: int) -> np.ndarray[Any, Any]:
    """Return pinned memory as an array of bytes."""
    return np.frombuffer(pinned, np.uint8, size)

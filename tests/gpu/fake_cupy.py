"""A stand-in for CuPy that runs late: streams are queues that run when the host waits for them.

Arrays live in memory of numpy's, filled with noise until something is written there. What has a
place to write to waits in its stream's queue; what makes a new array takes memory, and runs when
the queue has run up to it. So a copy that no event orders, or a host that reads what it did not
wait for, finds noise or what was there before. Generated kernels run as the host's compiler sees
them (`cuda_on_cpu.py`). A capture collects instead of queueing, and what no capture may hold (a
wait, an allocation, a copy that waits) raises and is noted in `violations`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from graphflow.placement.calibration import calibrate
from graphflow.placement.calibration.measure_gpu import gpu_product
from graphflow.placement.clusters.machine import machine_devices
from tests.gpu.cuda_on_cpu import EmulatedModule
from tests.placement.speeds import profile, speeds

_NOISE = 0xA5
_VIEWS = (
    np.diagonal, np.expand_dims, np.flip, np.moveaxis, np.rollaxis, np.squeeze, np.swapaxes,
    np.transpose,
)  # fmt: skip
"""Functions whose results are views of their argument, as CuPy's are."""


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


class CUDADriverError(RuntimeError):
    """As CuPy's, of launches."""


class OutOfMemoryError(MemoryError):
    """As CuPy's."""


class World:
    """What one test's devices did."""

    def __init__(self, devices: int, memory: int) -> None:
        self.devices = devices
        self.memory = memory
        self.taken = 0
        self.crossings: list[str] = []
        self.violations: list[str] = []
        self.launches = 0
        self.replays = 0
        self.kept: list[Any] = []  # what tasks point to
        self.lock = threading.RLock()
        self.local = threading.local()
        self.pool, self.pinned, self.plans = MemoryPool(), MemoryPool(), Plans()
        self.pinned_by: Callable[[int], Any] = alloc_pinned_memory
        self.null = Stream.__new__(Stream)
        self.null.start(self, "null")

    def stream(self) -> Stream:
        stack = getattr(self.local, "streams", [])
        return stack[-1] if stack else self.null

    def forbid(self, what: str) -> None:
        """Raise where the current stream is capturing."""
        if self.stream().collected is not None:
            self.violations.append(what)
            raise CUDARuntimeError(f"cudaErrorStreamCaptureUnsupported: {what}")

    def enqueue(self, task: Callable[[], Any]) -> None:
        self.stream().add(task)

    def settle(self, what: str) -> None:
        """Let the current stream run, for something that needs its values now."""
        self.forbid(what)
        self.stream().drain()

    def upload(self, size: int) -> None:
        """Take pinned memory for a copy from the host, as CuPy does."""
        self.crossings.append("up")
        self.pinned_by(size)

    def allocate(self, size: int) -> MemoryPointer:
        allocator = getattr(self.local, "allocator", None)
        found: MemoryPointer = (self.pool.malloc if allocator is None else allocator)(size)
        return found


_world: World


class Stream:
    ptr = 1

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        assert non_blocking, "a stream that waits for the default stream cannot be captured"
        self.start(_world, "stream")

    def start(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.queue: list[Callable[[], Any]] = []
        self.collected: list[Callable[[], Any]] | None = None

    def __enter__(self) -> Stream:
        if not hasattr(self.world.local, "streams"):
            self.world.local.streams = []
        self.world.local.streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.world.local.streams.pop()

    def add(self, task: Callable[[], Any]) -> None:
        with self.world.lock:
            (self.queue if self.collected is None else self.collected).append(task)

    def drain(self, until: Event | None = None) -> None:
        """Run what waits, up to an event's record."""
        with self.world.lock:
            while self.queue and (until is None or not until.done):
                self.queue.pop(0)()

    def synchronize(self) -> None:
        if self.collected is not None:
            self.world.violations.append("a wait")
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: a wait")
        self.drain()

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.add(event.run_until_reached)

    def begin_capture(self, mode: int | None = None) -> None:
        assert mode == Runtime.streamCaptureModeThreadLocal
        assert self.collected is None
        self.collected = []

    def is_capturing(self) -> bool:
        return self.collected is not None

    def end_capture(self) -> Graph:
        assert self.collected is not None
        graph, self.collected = Graph(self.collected), None
        return graph


class Graph:
    def __init__(self, tasks: list[Callable[[], Any]]) -> None:
        self.tasks = tasks

    def launch(self, stream: Stream | None = None) -> None:
        _world.replays += 1
        for task in self.tasks:
            (stream or _world.stream()).add(task)


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.done = True
        self.stream: Stream | None = None

        self.timed = not disable_timing
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.done, self.stream = False, stream or _world.null
        self.stream.add(self._pass)

    def _pass(self) -> None:
        self.done, self.at = True, perf_counter()

    def run_until_reached(self) -> None:
        if self.stream is not None:
            self.stream.drain(self)

    def synchronize(self) -> None:
        _world.forbid("a wait for an event")
        self.run_until_reached()


def get_elapsed_time(start: Event, end: Event) -> float:
    """Milliseconds from when the stream reached one event to the other."""
    if not (start.timed and end.timed and start.stream and end.stream):
        raise CUDARuntimeError("cudaErrorInvalidResourceHandle: an event that no stream recorded")
    if not (start.done and end.done):
        raise CUDARuntimeError("cudaErrorNotReady: device not ready")
    return (end.at - start.at) * 1e3


class Memory:
    def __init__(self, size: int) -> None:
        if _world.stream().collected is not None:
            _world.forbid("cudaMalloc")
        if _world.taken + size > _world.memory:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        _world.taken += size
        self.world, self.size = _world, size
        self.bytes = np.full(size + 256, _NOISE, np.uint8)
        self.bytes = self.bytes[-self.bytes.ctypes.data % 256 :][:size]
        self.ptr = self.bytes.ctypes.data

    def __del__(self) -> None:
        if hasattr(self, "bytes"):
            self.world.taken -= self.size


class MemoryPointer:
    def __init__(self, mem: Memory | Block, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset

    def copy_from_host_async(self, mem: int, size: int, stream: Any = None) -> None:
        self._copy("in", self.ptr, mem, size, stream)

    def copy_to_host_async(self, mem: int, size: int, stream: Any = None) -> None:
        self._copy("out", mem, self.ptr, size, stream)

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        # It may go back to its pool, and hold something else by then: who copies it has to wait.
        _world.kept.append(getattr(src.mem, "_memory", src.mem))
        self._copy("across", self.ptr, src.ptr, size, stream)

    def _copy(self, way: str, to: int, source: int, size: int, stream: Any) -> None:
        _world.crossings.append(way)
        _world.kept.append(self.mem)
        (stream or _world.stream()).add(lambda: ctypes.memmove(to, source, size))


class Block:
    """Memory of a pool's: it goes back there, and the device does not get it."""

    def __init__(self, memory: Memory, held: list[Memory]) -> None:
        self._memory, self._held = memory, held
        self.size, self.bytes, self.ptr = memory.size, memory.bytes, memory.ptr

    def __del__(self) -> None:
        self._held.append(self._memory)


class MemoryPool:
    def __init__(self, allocator: Callable[[int], MemoryPointer] | None = None) -> None:
        self._allocator = allocator
        self._total = 0
        self.held: list[Memory] = []

    def malloc(self, size: int) -> MemoryPointer:
        self._total += size
        for memory in self.held:
            if memory.size == size:
                self.held.remove(memory)
                return MemoryPointer(Block(memory, self.held), 0)
        if self._allocator is not None:
            return MemoryPointer(Block(self._allocator(size).mem, self.held), 0)  # type: ignore[arg-type]
        try:
            with suppress(CUDARuntimeError):
                return MemoryPointer(Block(Memory(size), self.held), 0)
            self.free_all_blocks()  # as CuPy does before it gives up
            return MemoryPointer(Block(Memory(size), self.held), 0)
        except CUDARuntimeError as error:
            raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes") from error

    def total_bytes(self) -> int:
        return self._total

    def free_all_blocks(self) -> None:
        self.held.clear()


class Plans(list[Any]):
    """Plans of Fourier transforms, which keep memory."""


class Pinned(np.ndarray):
    """Page-locked memory."""

    @property
    def ptr(self) -> int:
        return self.ctypes.data


def alloc_pinned_memory(size: int) -> Pinned:
    memory = np.full(size, 0xEE, np.uint8).view(Pinned)
    _world.kept.append(memory)
    return memory


def unwrap_arrays(value: Any) -> Any:
    """The same with arrays as numpy's own: work that is yet to run keeps no memory from a pool."""
    if isinstance(value, ndarray):
        if value.memory is None or not value.size:
            return value.view(np.ndarray)
        start = value.__array_interface__["data"][0] - value.memory.ptr
        return np.ndarray(value.shape, value.dtype, value.memory.bytes, start, value.strides)
    if isinstance(value, tuple | list):
        return type(value)(map(unwrap_arrays, value))
    if isinstance(value, dict):
        return {k: unwrap_arrays(v) for k, v in value.items()}
    return value


def copy_to_device(value: Any) -> Any:
    """A result of numpy's in memory of the device's."""
    if isinstance(value, tuple | list):
        return type(value)(map(copy_to_device, value))
    if isinstance(value, np.ndarray | np.generic):
        made = ndarray(np.shape(value), value.dtype)
        made.view(np.ndarray)[...] = value
        return made
    return value


class ndarray(np.ndarray):
    """An array of a device."""

    memory: Any

    def __new__(
        cls, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None
    ) -> ndarray:
        shape = tuple(shape) if isinstance(shape, Sequence) else (int(shape),)
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        pointer = _world.allocate(max(size, 1)) if memptr is None else memptr
        start = pointer.ptr - pointer.mem.ptr
        flat = pointer.mem.bytes[start : start + size].view(dtype).reshape(shape)
        made: ndarray = flat.view(cls)
        made.memory = pointer.mem
        return made

    def __array_finalize__(self, other: Any) -> None:
        self.memory = getattr(other, "memory", None)

    @property
    def data(self) -> MemoryPointer:  # type: ignore[override]
        address = self.__array_interface__["data"][0]
        if self.memory is None or not self.size:
            return types.SimpleNamespace(ptr=address)  # type: ignore[return-value]
        return MemoryPointer(self.memory, address - self.memory.ptr)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return _call_numpy(getattr(ufunc, method), args, kwargs)

    def __array_function__(self, func: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
        return _call_numpy(func, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if all(k is None or k is Ellipsis or isinstance(k, int | slice | np.integer) for k in keys):
            if not any(k is Ellipsis for k in keys):
                keys = (*keys, Ellipsis)
            return super().__getitem__(keys)
        if any(type(k) in (list, np.ndarray) for k in keys):
            _world.upload(8 * len(keys))
        mine, key = unwrap_arrays(self), unwrap_arrays(key)
        anywhere = tuple(
            np.zeros_like(k) if isinstance(k, np.ndarray) and k.dtype != bool else k for k in keys
        )
        return make_arrays("an index", lambda: mine[key], lambda: mine[unwrap_arrays(anywhere)])

    def __setitem__(self, key: Any, value: Any) -> None:
        _host_array(value)
        mine, key, value = unwrap_arrays(self), unwrap_arrays(key), unwrap_arrays(value)
        _world.enqueue(lambda: mine.__setitem__(key, value))

    def set(self, host: np.ndarray, stream: Any = None) -> None:
        assert type(host) is np.ndarray and host.dtype == self.dtype
        _world.crossings.append("in")
        mine, copy = self.view(np.ndarray), host.copy()
        (stream or _world.stream()).add(lambda: np.copyto(mine, copy))

    def get(self) -> np.ndarray:
        _world.settle("a copy to the host")
        _world.crossings.append("out")
        return np.array(self.view(np.ndarray))

    def fill(self, value: Any) -> None:
        self[...] = value

    def copy(self, order: Any = "C") -> Any:
        return _call_numpy(np.array, (self,), {})

    def astype(self, dtype: Any, copy: bool = True, **rest: Any) -> Any:  # type: ignore[override]
        mine = unwrap_arrays(self)
        return make_arrays("a conversion", lambda: mine.astype(dtype))

    def sort(self, axis: int = -1, kind: Any = None) -> None:  # type: ignore[override]
        _world.allocate(1)  # what sorting needs
        mine = self.view(np.ndarray)
        _world.enqueue(lambda: np.ndarray.sort(mine, axis))

    def item(self, *args: Any) -> Any:
        return self.get().item(*args)

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __index__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def tolist(self) -> Any:
        return self.get().tolist()


def make_arrays(
    what: str, compute: Callable[[], Any], alike: Callable[[], Any] | None = None
) -> Any:
    """New arrays: at once, or, in a capture, in their time and in memory that is taken now; `alike`
    gives some of their sizes."""
    if _world.stream().collected is None:
        _world.settle(what)
        return copy_to_device(compute())
    with np.errstate(all="ignore"):
        found = (alike or compute)()  # of noise, for the sizes
    several = isinstance(found, tuple | list)
    places = [ndarray(np.shape(v), np.asarray(v).dtype) for v in (found if several else [found])]

    targets = unwrap_arrays(places)

    def run() -> None:
        with np.errstate(all="ignore"):
            results = compute()
        for target, value in zip(targets, results if several else [results], strict=True):
            target[...] = value

    _world.enqueue(run)
    return type(found)(places) if several else places[0]


def _host_array(value: Any) -> None:
    if type(value) is np.ndarray and value.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")


def _call_numpy(function: Any, args: Any, kwargs: Any) -> Any:
    """A function of numpy's over arrays of the device: later where it has a place for its result,
    at once where it makes one."""
    for value in args:
        _host_array(value)
    if function in _VIEWS:
        return function._implementation(*args, **kwargs)
    if function is np.broadcast_to:
        return function._implementation(*args, **kwargs, subok=True)
    out = kwargs.get("out")
    if out is None and function is not np.copyto:
        name = getattr(function, "__name__", str(function))
        given, named = unwrap_arrays(args), unwrap_arrays(kwargs)
        return make_arrays(f"{name} makes an array", lambda: function(*given, **named))
    given, named = unwrap_arrays(args), unwrap_arrays(kwargs)
    if function is np.copyto:
        _world.enqueue(lambda: np.copyto(*given, **named))
        return None

    def run() -> None:
        with np.errstate(all="ignore"):
            function(*given, **named)

    _world.enqueue(run)
    return out[0] if isinstance(out, tuple) and len(out) == 1 else out


class Device:
    compute_capability = "90"

    def __init__(self, index: int = 0) -> None:
        if index >= _world.devices:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self.id = index

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: object) -> None:
        """Devices share one memory here."""


class Runtime:
    CUDARuntimeError = CUDARuntimeError
    streamCaptureModeThreadLocal = 1

    @staticmethod
    def getDeviceCount() -> int:
        return _world.devices

    @staticmethod
    def deviceGetPCIBusId(index: int) -> str:
        return f"FFFF:FF:{index:02X}.0"

    @staticmethod
    def memGetInfo() -> tuple[int, int]:
        return _world.memory - _world.taken, _world.memory

    @staticmethod
    def getDeviceProperties(index: int) -> dict[str, Any]:
        return {"l2CacheSize": 1 << 22, "multiProcessorCount": 2, "name": b"Imaginary 1000",
                "totalGlobalMem": _world.memory, "major": 9, "minor": 0}  # fmt: skip


class Module:
    """Kernels of a source: what it is compiled to is itself here."""

    def load(self, code: bytes) -> None:
        self._module = EmulatedModule(code.decode())

    def get_function(self, name: str) -> Callable[..., None]:
        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            assert all(isinstance(a, ndarray | np.uint64) for a in args)
            assert all(a.flags.c_contiguous for a in args if isinstance(a, ndarray))
            given = unwrap_arrays(args)
            _world.launches += 1
            _world.enqueue(lambda: self._module.launch(name, grid[0], block[0], given))

        return launch


def compile_using_nvrtc(source: str, options: tuple[str, ...]) -> tuple[bytes, None]:
    assert {"--fmad=false", "--ftz=false"} <= set(options)
    return source.encode(), None


def _asarray(a: Any, dtype: Any = None) -> Any:
    if isinstance(a, ndarray) and dtype in (None, a.dtype):
        return a
    if isinstance(a, ndarray):
        return a.astype(dtype)
    array = np.asarray(a, dtype)
    _world.upload(max(array.nbytes, 1))
    _world.settle("a copy from the host")
    return copy_to_device(array)


@contextmanager
def using_allocator(allocator: Any) -> Iterator[None]:
    before = getattr(_world.local, "allocator", None)
    _world.local.allocator = allocator
    try:
        yield
    finally:
        _world.local.allocator = before


class _Cupy(types.ModuleType):
    """The module: CuPy's own names, and numpy's functions over its arrays."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found):
            return found

        def function(*args: Any, **kwargs: Any) -> Any:
            return _call_numpy(found, args, kwargs)

        function.__name__ = name
        return function


def install(
    monkeypatch: pytest.MonkeyPatch,
    devices: int = 1,
    memory: int = 1 << 30,
    version: str = "14.2.0",
) -> World:
    """Make `import cupy` give this; returns what it notes."""
    global _world  # noqa: PLW0603 - CuPy's state is a module's, too
    _world = World(devices, memory)
    module: Any = _Cupy("cupy")
    module.__version__ = version
    module.ndarray = ndarray
    tricks = np.lib.stride_tricks
    module.lib = types.SimpleNamespace(
        stride_tricks=types.SimpleNamespace(
            as_strided=functools.partial(tricks.as_strided, subok=True),
            sliding_window_view=functools.partial(tricks.sliding_window_view, subok=True),
        )
    )
    module.asarray = _asarray
    module.get_default_pinned_memory_pool = lambda: types.SimpleNamespace(
        malloc=alloc_pinned_memory
    )
    module.asnumpy = lambda a: a.get()
    module.empty = lambda shape, dtype=float: ndarray(shape, dtype)
    module.ascontiguousarray = lambda a: a if a.flags.c_contiguous else a.copy()
    module.get_default_memory_pool = lambda: _world.pool
    module.get_default_pinned_memory_pool = lambda: _world.pinned
    plans = types.SimpleNamespace(get_plan_cache=lambda: _world.plans)
    module.fft = types.SimpleNamespace(config=plans, **vars(np.fft))
    memory_module = types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    module.cuda = types.SimpleNamespace(
        Device=Device, runtime=Runtime, Stream=Stream, Event=Event, Memory=Memory, Graph=Graph,
        driver=types.SimpleNamespace(CUDADriverError=CUDADriverError), MemoryPointer=MemoryPointer,
        MemoryPool=MemoryPool, memory=memory_module, using_allocator=using_allocator,
        alloc_pinned_memory=alloc_pinned_memory, get_current_stream=_world.stream,
        set_pinned_memory_allocator=lambda by: setattr(_world, "pinned_by", by),
        get_elapsed_time=get_elapsed_time,
        compiler=types.SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc),
        function=types.SimpleNamespace(Module=Module),
        nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", module)
    afresh = functools.cache(machine_devices._look_for_gpus.__wrapped__)
    monkeypatch.setattr(machine_devices, "_look_for_gpus", afresh)
    monkeypatch.setattr(calibrate, "measure_machine", _speeds)
    return _world


def _speeds(kinds: Sequence[str]) -> dict[str, Any]:
    """Made up: what this takes says nothing of a GPU."""
    told = {"gpu": {"product": gpu_product()}}
    return {**profile(), "devices": {kind: speeds(**told.get(kind, {})) for kind in kinds}}


def current() -> World:
    """What the stand-in that is installed notes."""
    return _world

"""The measurements of a GPU: the time that it is busy, apart from the host's time to start it.

Programs replay CUDA graphs, where the host starts no kernels. So kernels are timed by GPU events
around some calls in a row. Other work in front keeps the GPU busy until the host has started them
all. The launch time of a kernel is that of a nearly empty kernel in a graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from math import ceil, prod
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from graphflow.ir.op import REGISTRY, Op, Sample
from graphflow.ir.spec import TensorSpec
from graphflow.ops.kernels.cuda.cupy_module import capture_graph, gpu_name, import_cupy
from graphflow.placement.calibration.measure import (
    MATRICES,
    KernelTimer,
    ScaledSample,
    class_medians,
    lower_quartile,
    make_monotonic,
    make_scaler,
    measure_handoff,
    scale_sample,
)
from graphflow.placement.calibration.roofline import is_generated
from graphflow.placement.clusters.machine.host_facts import gpu_memory

SIDES = (192, 640, 2048, 1 << 20, 1 << 24)
"""Sizes of the larger samples: the largest that fits and does not take long."""
LARGER = (*MATRICES, 1024, 2048, 4096)
"""Sides of the matrix products."""
STREAMS = (1 << 19, 1 << 21, 1 << 23, 1 << 25, 1 << 27)
"""Elements of arrays that lie in ever slower memory."""
SAMPLE = 256 << 20
"""Bytes that a sample's arrays may take."""
FROM_HOST = 4 << 20
"""Bytes of arrays that the host has to make."""
SPARSE = 64
"""Bytes for each flop above which a sample mostly occupies memory."""
SAMPLE_SECONDS = 0.03
"""Seconds that a larger sample may take."""
LONG = 2e-3
"""Seconds of a call from which two calls are enough."""
FLIGHT = 200e-6
"""Seconds of the host's work that is timed in a row at most."""
MAX_CALLS = 16
"""Calls in a row."""
KERNELS = 64
"""Kernels of the graph by which a launch is timed."""
FILLER_ELEMENTS = 1 << 25
"""Elements of the array that keeps the GPU busy meanwhile."""
BLOCK = 1 << 16
"""Random numbers that samples repeat."""
SINGLE = ("add", "multiply", "sqrt", "exp", "tanh")
"""Ops that are one kernel in programs and in CuPy; they stand for all generated kernels.

CuPy would compile over a hundred others for this alone, which takes a minute the first time.
"""
UNMEASURED = (
    "solve", "triangular_solve", "inv", "cholesky", "qr", "eigh", "eigvalsh", "svd", "svdvals",
    "pinv", "lstsq", "det", "slogdet", "cofactor", "count_above", "nonzero", "unique",
)  # fmt: skip
"""Ops that get the medians of their class: cuSOLVER takes seconds to start."""


def measure_gpu() -> dict[str, Any]:
    """Return the speeds of the first GPU; see `profile_file.Profile`.

    Raises:
        DeviceError: CuPy is not installed, or finds no GPU.
    """
    with _exclusive_stream() as (cupy, stream), np.errstate(all="ignore"):
        return _measure_speeds(cupy, stream)


def _measure_speeds(cupy: Any, stream: Any) -> dict[str, Any]:
    """Return the speeds of the GPU. Its arrays are freed when this frame ends."""
    clock = GpuKernelTimer(cupy, stream)
    traffic, ops = clock.traffic(STREAMS), clock.ops()
    tables = {"float32": "float32", "float64": "float64", "other": "int32"}
    if _has_nvmath():  # else products of 16 bits are computed in float32
        tables["float16"] = "float16"
    products = {
        name: clock.matmul(dtype, LARGER[:-2] if name == "other" else LARGER, clock.least, traffic)
        for name, dtype in tables.items()
    }
    return {
        "product": gpu_product(),
        "launch": clock.launch,
        "call": median(clock.called.values()),
        "handoff": measure_handoff(),
        "cache_bytes": int(cupy.cuda.runtime.getDeviceProperties(0)["l2CacheSize"]) or 1,
        "traffic": traffic,
        "matmul": products,
        "ops": ops,
        "classes": class_medians(ops),
        "contention": {"threads": [1], "compute": [1.0], "memory": [1.0]},
    }


def measure_gpu_link(sizes: Sequence[int], rounds: int = 7) -> list[float]:
    """Return the seconds of transfers between the host and the first GPU: the mean of both
    directions.

    They go by way of pinned memory, as feeds and fetches do.

    Raises:
        DeviceError: CuPy is not installed, or finds no GPU.
    """
    with _exclusive_stream() as (cupy, stream):
        return [_time_crossing(cupy, stream, size, rounds) for size in sizes]


def _time_crossing(cupy: Any, stream: Any, size: int, rounds: int) -> float:
    """Return the seconds of one size to the GPU and back, the mean of both directions."""
    host, there = np.ones(size, np.uint8), cupy.empty(size, np.uint8)
    pinned = cupy.cuda.alloc_pinned_memory(size)
    landed = np.frombuffer(pinned, np.uint8, size)
    inward, outward = [], []
    for _ in range(rounds + 1):  # the first one warms up
        start = perf_counter()
        np.copyto(landed, host)
        there.data.copy_from_host_async(pinned.ptr, size, stream)
        stream.synchronize()
        middle = perf_counter()
        there.data.copy_to_host_async(pinned.ptr, size, stream)
        stream.synchronize()
        np.copyto(host, landed)
        inward.append(middle - start)
        outward.append(perf_counter() - middle)
    return (lower_quartile(inward[1:]) + lower_quartile(outward[1:])) / 2


def gpu_product() -> str | None:
    """Return what the speeds of a GPU depend on: its name, and the libraries that compute on it;
    None where there is none."""
    try:
        cupy = import_cupy()
        name = gpu_name(cupy.cuda.runtime.getDeviceProperties(0))
    except Exception:  # no CuPy, no driver, no device: CuPy's own errors
        return None
    return f"{name}, CuPy {cupy.__version__}" + (", nvmath-python" if _has_nvmath() else "")


def _has_nvmath() -> bool:
    """Return True if programs multiply by nvmath-python, which graphs take."""
    return find_spec("nvmath") is not None


@contextmanager
def _exclusive_stream() -> Iterator[tuple[Any, Any]]:
    """Yield CuPy and a stream of the first GPU; free the memory that was used."""
    gpu_memory("gpu:0")  # raises an error about what is missing
    cupy = import_cupy()
    with cupy.cuda.Device(0):
        stream = cupy.cuda.Stream(non_blocking=True)
        try:
            with stream:
                yield cupy, stream
        finally:
            stream.synchronize()
            gc.collect()  # frees arrays of ops that failed, which their errors refer to
            with suppress(Exception):  # plans of transforms hold memory
                cupy.fft.config.get_plan_cache().clear()
            cupy.get_default_memory_pool().free_all_blocks()


class GpuKernelTimer(KernelTimer):
    """Times kernels on a GPU, by its current stream.

    Attributes:
        least: Seconds of a nearly empty kernel that a call starts.
        launch: Seconds of the same kernel in a graph that is replayed.
        called: By op, seconds of a call from Python.
    """

    def __init__(self, cupy: Any, stream: Any) -> None:
        super().__init__("gpu", cupy, stream.synchronize, perf_counter)
        self.room = cupy.cuda.runtime.memGetInfo()[0] / 4
        self.called: dict[str, float] = {}
        self._stream = stream
        self._blocks: dict[tuple[Any, ...], Any] = {}
        self._held = cupy.ones(max(1, min(FILLER_ELEMENTS, int(self.room / 16))), "float32")
        few = cupy.ones(8, "float32")
        small = partial(cupy.add, few, few, out=few)
        self._occupy_gpu_once()
        self._pass = self._time_between_events(self._occupy_gpu_once, MAX_CALLS) / MAX_CALLS
        self.least = self.busy(small)
        self.launch = self._time_replay(small)

    def busy(self, call: Callable[[], object], rounds: int = 3) -> float:
        """Return the seconds that a call keeps the GPU busy, without the host's time to start it.

        A call that waits for the GPU counts as a whole.
        """
        call()
        self._synchronize()
        start = perf_counter()
        call()
        started = perf_counter() - start
        self._synchronize()
        whole = max(perf_counter() - start, 1e-8)
        number = max(1, min(MAX_CALLS, int(FLIGHT / max(started, 1e-8)), int(LONG / whole)))
        times = []
        for _ in range(rounds if whole < LONG else 2):
            self._occupy_gpu(min(1.5 * started * number, SAMPLE_SECONDS))
            times.append(self._time_between_events(call, number) / number)
        return lower_quartile(times)

    def _time_between_events(self, call: Callable[[], object], number: int) -> float:
        """Return the seconds between two events around calls."""
        events = self._xp.cuda.Event(), self._xp.cuda.Event()
        events[0].record(self._stream)
        for _ in range(number):
            call()
        events[1].record(self._stream)
        events[1].synchronize()
        return max(float(self._xp.cuda.get_elapsed_time(*events)) / 1e3, 1e-9)

    def _occupy_gpu(self, seconds: float) -> None:
        """Give the GPU other work for about so many seconds."""
        for _ in range(min(1000, ceil(seconds / self._pass))):
            self._occupy_gpu_once()

    def _occupy_gpu_once(self) -> None:
        """Give the GPU one piece of other work."""
        self._xp.add(self._held, self._held, out=self._held)

    def _time_replay(self, small: Callable[[], object]) -> float:
        """Return the seconds of a small kernel among others in a graph.

        If no graph can be made, return those of a call.
        """

        def several() -> None:
            for _ in range(KERNELS):
                small()

        try:
            graph = capture_graph(self._xp, self._stream, several)
        except self._xp.cuda.runtime.CUDARuntimeError:
            return self.seconds(small)
        return self.busy(partial(graph.launch, self._stream)) / KERNELS

    def ops(self) -> dict[str, dict[str, float]]:
        """Return launch and rate of every op that has a sample and is not in `UNMEASURED`.

        A generated kernel computes as fast as the best of `SINGLE`. Its passes over memory are
        counted separately.
        """
        found = super().ops()
        single = [found[name] for name in SINGLE if "rate" in found.get(name, {})]
        best = max(single, key=lambda entry: entry["rate"], default={})
        for name, entry in found.items():
            if is_generated(REGISTRY[name]) and "rate" in best and "rate" not in entry:
                entry |= {key: best[key] for key in ("rate", "itemsize")}
        return found

    def _measure_op(self, op: Op) -> dict[str, float] | None:
        """Return launch and rate of an op; None if it is not measured.

        Graphs start the kernels that programs generate, and those of captured ops. Other ops are
        called.
        """
        if op.name in UNMEASURED:
            return None
        if op.alias or (is_generated(op) and op.name not in SINGLE):
            return {"launch": self.launch}
        small = self.call(op, scale_sample(op, lambda size: size))
        if small is None:
            return None
        called = self.called[op.name] = self.seconds(small)
        least = self.busy(small)
        entry = {"launch": called}
        if is_generated(op):
            entry = {"launch": self.launch}
        elif self._is_captured(small):
            entry = {"launch": self.launch if op.rate is not None else min(called, least)}
        if op.rate is not None:
            return entry
        found = self._choose_larger_sample(op, called, least)
        if found is not None:
            case, run = found
            beyond = self.busy(run) - least
            if beyond >= least:  # else it is mostly the launch
                entry |= {"rate": case.amount / beyond, "itemsize": case.itemsize}
        return entry

    def _is_captured(self, call: Callable[[], object]) -> bool:
        """Return True if graphs take an op. They take no products of CuPy's, but
        nvmath-python's.
        """
        try:
            capture_graph(self._xp, self._stream, call)
        except NotImplementedError:
            return _has_nvmath()
        except Exception:  # the op waits for the GPU, or copies from the host
            return False
        return True

    def _choose_larger_sample(
        self, op: Op, called: float, least: float
    ) -> tuple[ScaledSample, Callable[[], object]] | None:
        """Return the largest sample that fits and is expected not to take long.

        The smallest sample's time beyond a call is the basis of that expectation.
        """
        fit = [
            case
            for side in SIDES
            if (case := scale_sample(op, make_scaler(side))) and self._fits(case)
        ]
        run = self.call(op, fit[0]) if fit else None
        if run is None:
            return None
        beyond = max(self.busy(run, 1) - least, 1e-7)
        for case in reversed(fit[1:]):
            if called + beyond * case.amount / fit[0].amount < SAMPLE_SECONDS:
                large = self.call(op, case)
                if large is not None:
                    return case, large
        return fit[0], run

    def _fits(self, case: ScaledSample) -> bool:
        """Return True if there is room for a case, and what it does grows with what it takes."""
        most = SAMPLE if case.sample.make is None else FROM_HOST
        return case.bytes <= min(most, self.room, SPARSE * case.amount)

    def array(self, spec: TensorSpec, sample: Sample) -> Any:
        """Return random elements in the bounds of a sample, repeated, on the GPU.

        If the sample makes its arrays by a function, they are on the host.
        """
        if sample.make is not None:
            return super().array(spec, sample)
        key = spec.dtype, sample.low, sample.high, sample.classes
        if key not in self._blocks:
            block = super().array(TensorSpec((BLOCK,), spec.dtype), sample)
            self._blocks[key] = self._xp.asarray(block)
        sizes: Any = spec.shape
        size = prod(sizes)
        return self._xp.tile(self._blocks[key], max(1, -(-size // BLOCK)))[:size].reshape(sizes)

    def traffic(self, streams: tuple[int, ...]) -> list[list[float]]:
        """Return [bytes, seconds beyond a launch] of adding float32 arrays of growing size.

        Times never fall.
        """
        points = super().traffic(streams)
        beyond = [[size, max(taken - self.least, 1e-9)] for size, taken in points]
        told = [size / taken for size, taken in beyond if taken >= self.least] or [
            beyond[-1][0] / beyond[-1][1]
        ]
        return make_monotonic(beyond, max(told))

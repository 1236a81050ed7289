"""The measurements of calibration: ops' kernels, run as programs run them, with BLAS on one thread.

Every op with samples is timed twice: on its sample (the launch) and on a larger one (its rate in
the cache). The machine may be busy with other work. So kernels on a CPU are timed by the processor
time of their thread, which stands still meanwhile, and the lower quartile of some rounds counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.blas_threads import one_blas_thread
from graphflow.base.process.interrupts import is_interrupt
from graphflow.ir.op import REGISTRY, Op, Sample, owner_module
from graphflow.ir.spec import Size, TensorSpec, is_inexact, nbytes
from graphflow.ops.kernels.jit.amx_permission import may_use_amx
from graphflow.ops.kernels.jit.call_table_driver import driver
from graphflow.ops.kernels.jit.thread_pool import Pool
from graphflow.placement.calibration.roofline import interpolate_seconds, op_class, work
from graphflow.placement.clusters.machine.host_facts import cache_bytes, cores, numa_nodes

SIDE = 192
"""Rows and columns of the larger samples: some hundred KiB, which second-level caches hold."""
_VISIBLE = 0.1
"""The share of a launch that a larger sample's work has to take: less is noise, which makes rates
of any size. Such an op has the rate of its class. Random ops, which are a class, keep theirs."""
MATRICES = (8, 24, 64, 128, 256, 512, 640)
"""Sides of the matrix products."""
STREAMS = (1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23)
"""Elements of arrays that lie in ever slower memory; few caches hold the last."""
ROUNDS = 7
TURNS = 4
"""Sets of operands of a matrix product."""
LEAST = 60e-6
"""Seconds of one timing at least."""
LONG = 5e-3
"""Seconds of a call from which two calls are enough: noise is a small part of it."""
PATIENCE = 0.25
"""Seconds from which a matrix product is too long to be timed."""


def measure_cpu() -> dict[str, Any]:
    """Return the speeds of one thread of this machine; see `profile_file.Profile`."""
    with one_blas_thread(), np.errstate(all="ignore"):
        clock = KernelTimer("cpu", np, lambda: None, thread_time)
        ops, traffic = clock.ops(), clock.traffic(STREAMS)
        launch = ops["matmul"]["launch"]
        products = {
            "float32": clock.matmul("float32", MATRICES, launch, traffic),
            "float64": clock.matmul("float64", MATRICES, launch, traffic),
            "other": clock.matmul("int32", MATRICES[:4], launch, traffic),
        }
        if may_use_amx():
            products["bfloat16"] = clock.matmul("bfloat16", MATRICES, launch, traffic)
        return {
            "launch": median(entry["launch"] for entry in ops.values()),
            "handoff": measure_job(),
            "cache_bytes": cache_bytes(2) or 1 << 20,
            "traffic": traffic,
            "random_rows": clock.random_rows_factor(traffic),
            "matmul": products,
            "ops": ops,
            "classes": class_medians(ops),
            "contention": _contention(),
        }


@dataclass(frozen=True)
class ScaledSample:
    """An op's sample with scaled sizes.

    Attributes:
        amount: Flops, or bytes of an op without.
        itemsize: Of its largest elements.
        bytes: Of all inputs and outputs.
    """

    sample: Sample
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attrs: Mapping[str, Any]
    amount: float
    itemsize: int
    bytes: int


class KernelTimer:
    """Times kernels on one device of a kind, by the seconds of a clock.

    Attributes:
        room: Bytes that the arrays of a measurement may take.
    """

    room = float("inf")

    def __init__(
        self, kind: str, xp: Any, synchronize: Callable[[], None], now: Callable[[], float]
    ) -> None:
        self.kind = kind
        self._xp = xp
        self._synchronize = synchronize
        self._now = now
        self._random = np.random.default_rng(0)

    def seconds(self, call: Callable[[], object], rounds: int = ROUNDS) -> float:
        """Return the seconds of a call; each round is long enough to be timed."""
        call()
        once = self._time_calls(call, 1)
        if once > LONG:
            return min(once, self._time_calls(call, 1))
        number = max(1, min(1000, int(LEAST / max(once, 1e-8))))
        return lower_quartile([self._time_calls(call, number) for _ in range(rounds)])

    def busy(self, call: Callable[[], object], rounds: int = ROUNDS) -> float:
        """Return the seconds that a call keeps the device busy: on a CPU all of it."""
        return self.seconds(call, rounds)

    def _time_calls(self, call: Callable[[], object], number: int) -> float:
        self._synchronize()
        start = self._now()
        for _ in range(number):
            call()
        self._synchronize()
        return (self._now() - start) / number

    def ops(self) -> dict[str, dict[str, float]]:
        """Return launch and rate of every op of ours that computes and has a sample.

        A user's op is not run: it may end the process or block, and may belong to another session.
        """
        found: dict[str, dict[str, float]] = {}
        for op in [each for each in list(REGISTRY.values()) if owner_module(each) is None]:
            computes = (op.pure or op.random) and (op.kernel or op.expr)
            if op.samples and computes and self.kind in op.device_kinds:
                entry = self._measure_op(op)
                if entry is not None:
                    found[op.name] = entry
        return found

    def _measure_op(self, op: Op) -> dict[str, float] | None:
        """Return launch and rate of an op; None if it cannot run."""
        small = self.call(op, scale_sample(op, lambda size: size))
        if small is None:
            return None
        entry = {"launch": self.seconds(small)}
        large = None if op.alias or op.rate is not None else scale_sample(op, make_scaler(SIDE))
        run = self.call(op, large)
        if large is not None and run is not None:
            busy = max(self.seconds(run, 3) - entry["launch"], 1e-8)
            is_visible = op.random or busy > _VISIBLE * entry["launch"]
            if large.amount >= 4 * SIDE and is_visible:  # it grew
                entry |= {"rate": large.amount / busy, "itemsize": large.itemsize}
        return entry

    def call(self, op: Op, case: ScaledSample | None) -> Callable[[], object] | None:
        """Return a function that runs a case as a program does, or None if the op cannot."""
        if case is None:
            return None
        try:
            run = _bind_kernel(self._xp, op, case.attrs, case.outputs)
            arrays = [self.array(s, case.sample) for s in case.inputs]
            if case.sample.make is not None:
                arrays = case.sample.make(arrays)
            arrays = [self._xp.asarray(a) for a in arrays]
            if op.in_place and op.into is not None and op.rate is None:
                run = partial(op.into, self._xp, arrays[0], **case.attrs)  # copies nothing
            run(*arrays)
        except Exception as error:  # the sample does not scale: its attributes depend on its sizes
            if is_interrupt(error):
                raise
            return None
        return partial(run, *arrays)

    def array(self, spec: TensorSpec, sample: Sample) -> Any:
        """Return random elements in the bounds of a sample, on the host."""
        shape: Any = spec.shape
        if is_inexact(spec.dtype):
            array = self._random.uniform(sample.low, sample.high, shape)
        else:
            array = self._random.integers(0, 2 if spec.dtype.kind == "b" else sample.classes, shape)
        return np.asarray(array, spec.dtype)

    def matmul(
        self, dtype: str, sides: tuple[int, ...], launch: float, traffic: list[list[float]]
    ) -> list[list[float]]:
        """Return [flops, seconds beyond launch and traffic] of square products; times never fall.

        Several sets of operands alternate, because in a step those of the last product have left
        the cache.
        """
        points: list[list[float]] = []
        for n in sides:
            flops, size = 2.0 * n**3, float(n * n * np.dtype(dtype).itemsize)
            later = points and points[-1][1] * flops / points[-1][0] > PATIENCE
            if later or (3 * TURNS + 1) * size > self.room:
                break
            taken = self.busy(self._product(dtype, n))
            moved = interpolate_seconds(traffic, 3.0 * size)
            points.append([flops, max(taken - launch - moved, taken / 2, 1e-9)])
        # the small ones are mostly launch: the rest of them is noise
        return make_monotonic(points, max(flops / taken for flops, taken in points[-2:]))

    def _product(self, dtype: str, n: int) -> Callable[[], None]:
        """Return a function that multiplies square matrices, with the next set of operands each
        time.
        """
        into = REGISTRY["matmul"].into
        assert into is not None
        a = self._xp.asarray(self.array(TensorSpec((n, n), np.dtype(dtype)), _UNIT))
        turns = cycle([(self._xp.empty_like(a), a.copy(), a.copy()) for _ in range(TURNS)])
        return partial(_call_next, partial(into, self._xp), turns)

    def traffic(self, streams: tuple[int, ...]) -> list[list[float]]:
        """Return [bytes, seconds] of adding float32 arrays of growing size; times never fall."""
        points = []
        for elements in streams:
            if 12 * elements > self.room:
                break
            a, b, out = (self._xp.ones(elements, "float32") for _ in range(3))
            taken = self.busy(partial(self._xp.add, a, b, out=out), 3)
            points.append([12.0 * elements, taken])
        return make_monotonic(points)

    def random_rows_factor(self, traffic: list[list[float]]) -> float:
        """Return how many times longer rows anywhere in a large array take than a stream.

        Args:
            traffic: the seconds of streams, as `traffic` returns them.
        """
        rows, width, some = 1 << 17, 64, 1 << 12
        table, out = np.ones((rows, width), "float32"), np.empty((some, width), "float32")
        places = [self._random.integers(0, rows, some) for _ in range(4 * TURNS)]
        take = partial(np.take, table, axis=0, mode="wrap")
        turns = cycle([(each,) for each in places])
        taken = self.busy(lambda: take(*next(turns), out=out))
        stream = interpolate_seconds(traffic, table.nbytes) * 2 * out.nbytes / table.nbytes
        return max(1.0, taken / stream)


_UNIT = Sample((), low=-1.0, high=1.0)


def make_monotonic(points: list[list[float]], best: float = float("inf")) -> list[list[float]]:
    """Return [amount, seconds] with seconds that never fall and are no faster than `best`."""
    least = 0.0
    for point in points:
        point[1] = least = max(least, point[1], point[0] / best)
    return points


def lower_quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile: other work of a machine only makes things slower."""
    return sorted(seconds)[len(seconds) // 4]


def make_scaler(side: int) -> Callable[[Size], Size]:
    """Return a function that enlarges the sizes of a sample, except numbers of examples or
    channels.
    """
    return lambda size: side if isinstance(size, int) and size > 2 else size


def scale_sample(op: Op, scale: Callable[[Size], Size]) -> ScaledSample | None:
    """Return an op's first sample with scaled sizes; None if the op refuses them."""
    sample = op.samples[0]
    inputs = tuple(s.with_shape(map(scale, s.shape)) for s in sample.inputs)
    attrs = {
        name: tuple(map(scale, value)) if name == "shape" else value
        for name, value in sample.attrs.items()
    }
    try:
        specs = op.infer(*inputs, **attrs)
        outputs = (specs,) if isinstance(specs, TensorSpec) else specs
        amount = work(op, inputs, outputs, attrs)
        return ScaledSample(
            sample, inputs, outputs, attrs, amount.flops or amount.bytes,
            max((s.dtype.itemsize for s in (*outputs, *inputs)), default=1),
            sum(map(nbytes, (*inputs, *outputs))),
        )  # fmt: skip
    except Exception as error:  # attributes depend on the sample's sizes
        if is_interrupt(error):
            raise
        return None


def _call_next(call: Callable[..., None], turns: Iterator[tuple[Any, ...]]) -> None:
    """Call with the next operands."""
    call(*next(turns))


def _bind_kernel(
    xp: Any, op: Op, attrs: Mapping[str, Any], outputs: tuple[TensorSpec, ...]
) -> Callable[..., None]:
    """Return the kernel as a program runs it: into allocated buffers."""
    buffers = tuple(xp.empty(s.shape, s.dtype) for s in outputs)
    if op.alias:
        return lambda x: x.reshape(outputs[0].shape)
    if op.into is not None and not op.random:
        return partial(op.into, xp, buffers[0] if len(buffers) == 1 else buffers, **attrs)

    def run(*arrays: Any) -> None:
        for buffer, result in zip(buffers, op.run(xp, arrays, attrs), strict=True):
            xp.copyto(buffer, result)

    return run


def class_medians(ops: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return medians over the ops of each class, for ops that were not measured."""
    members: dict[str, list[Mapping[str, float]]] = {}
    for name, entry in ops.items():
        if "rate" in entry:
            members.setdefault(op_class(REGISTRY[name]), []).append(entry)
    return {
        kind: {key: median(entry[key] for entry in of_kind) for key in of_kind[0]}
        for kind, of_kind in sorted(members.items())
    }


# Threads --------------------------------------------------------------------------------------


def measure_job(rounds: int = 200) -> float:
    """Return the seconds that two threads take for a shared kernel beside its work."""
    times = []
    with closing(Pool(2)) as pool:
        entries = np.array([(driver().walk.address, 0, 0, 0, 0)] * 2, np.uint64)  # do nothing
        for _ in range(rounds):
            start = perf_counter()
            pool.run_entries(entries, 2)
            times.append(perf_counter() - start)
    return lower_quartile(times)


def measure_handoff(rounds: int = 200) -> float:
    """Return the seconds to hand something to a waiting thread of this process."""
    go, done = threading.Lock(), threading.Lock()
    go.acquire()
    done.acquire()

    def answer() -> None:
        for _ in range(rounds):
            go.acquire()
            done.release()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    times = []
    for _ in range(rounds):
        start = perf_counter()
        go.release()
        done.acquire()
        times.append(perf_counter() - start)
    thread.join()
    return lower_quartile(times) / 2


_MOST_THREADS = 16


def _contention() -> dict[str, list[float]]:
    """Measure how many times longer each of several busy threads takes than one alone.

    Measured for two threads, for a NUMA node's cores and for all cores (16 at most). Threads of
    one process stand for processes, because the kernels hold no interpreter lock.
    """
    most = min(cores(), _MOST_THREADS)
    counts = sorted({min(n, most) for n in (1, 2, len(numa_nodes()[0]), most)})
    products = [_matmul_call() for _ in range(counts[-1])]
    streams = [_stream_call() for _ in range(counts[-1])]
    return {
        "threads": [float(n) for n in counts],
        "compute": _slowdown(products, counts),
        "memory": _slowdown(streams, counts),
    }


def _matmul_call() -> Callable[[], object]:
    a = np.ones((256, 256), np.float32)
    out = np.empty_like(a)
    return lambda: np.matmul(a, a.copy(), out=out)


def _stream_call() -> Callable[[], object]:
    a = np.ones(1 << 21, np.float32)
    out = np.zeros_like(a)
    return lambda: np.add(a, a, out=out)


def _slowdown(calls: list[Callable[[], object]], counts: list[int]) -> list[float]:
    """Return for each count of threads how many times longer their calls take than one alone."""
    # The quickest rounds: other work on one of the cores would look like contention.
    rounds = [[_time_concurrently(calls[:n]) for n in counts] for _ in range(3 * ROUNDS)]
    times = [min(of_count) for of_count in zip(*rounds, strict=True)]
    factors = [max(1.0, t / times[0]) for t in times]
    return [float(f) for f in np.maximum.accumulate(factors)]


def _time_concurrently(calls: list[Callable[[], object]], seconds: float = 0.01) -> float:
    """Return the mean processor seconds of a call while each thread repeats its own."""
    barrier = threading.Barrier(len(calls))
    means = [0.0] * len(calls)

    def repeat(i: int) -> None:
        with np.errstate(all="ignore"), nullcontext():
            barrier.wait()
            start, own, number = perf_counter(), thread_time(), 0
            while number == 0 or perf_counter() - start < seconds:  # it may be delayed
                calls[i]()
                number += 1
            means[i] = (thread_time() - own) / number

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(means) / len(means)

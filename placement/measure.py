"""The measurements of calibration: ops' kernels, run as a program runs them, BLAS on one thread.

Every op with samples is timed twice: on its sample (what a launch takes) and on a larger one (its
rate in the cache). The machine may be busy with other things: kernels on a CPU are timed by the
processor time of their thread, which stands still meanwhile, and of some rounds a quick one counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from graphflow.blas import one_thread
from graphflow.op import REGISTRY, Op, Sample, owner
from graphflow.ops.kernels.cupy_module import imported_cupy
from graphflow.placement.host import cache_bytes, cores, gpu_memory
from graphflow.placement.rates import MATMUL, interpolated, op_class, work
from graphflow.spec import Size, TensorSpec, is_inexact

SIDE = 192
"""Rows and columns of the larger samples: some hundred KiB, which any second-level cache holds."""
MATRICES = (8, 24, 64, 128, 256, 512, 640)
"""Sides of the matrix products."""
STREAMS = (1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23)
"""Elements of arrays that lie in ever slower memory; few caches hold the last."""
ROUNDS = 7
TURNS = 4
"""Sets of operands of a matrix product."""
LEAST = 60e-6
"""Seconds that one timing lasts at least."""
LONG = 5e-3
"""Seconds of a call from which two will do: a moment's noise is little of it."""


def measure_device(kind: str) -> dict[str, Any]:
    """Speeds of one device of a kind, of one thread where it is a CPU; see `calibrate.Profile`."""
    xp, synchronize = _array_module(kind)
    with one_thread(), np.errstate(all="ignore"):
        clock = _Clock(xp, synchronize, thread_time if kind == "cpu" else perf_counter)
        ops, traffic = clock.ops(), clock.traffic()
        products = {
            name: clock.matmul(dtype, sides, ops["matmul"]["launch"], traffic)
            for name, dtype, sides in (
                ("float32", "float32", MATRICES),
                ("float64", "float64", MATRICES),
                ("other", "int32", MATRICES[:4]),
            )
        }
        speeds = {
            "launch": median(entry["launch"] for entry in ops.values()),
            "handoff": measure_handoff(),
            "cache_bytes": _cache_bytes(kind),
            "traffic": traffic,
            "matmul": products,
            "ops": ops,
            "classes": _classes(ops),
            "contention": _contention() if kind == "cpu" else _ALONE,
        }
    return speeds


_ALONE = {"threads": [1], "compute": [1.0], "memory": [1.0]}


def _array_module(kind: str) -> tuple[Any, Callable[[], None]]:
    if kind == "cpu":
        return np, lambda: None
    gpu_memory("gpu:0")  # says what is missing
    cupy = imported_cupy()
    return cupy, cupy.cuda.get_current_stream().synchronize


def _cache_bytes(kind: str) -> int:
    """Size of the last cache that a core has for itself (a GPU: of its second level)."""
    if kind == "gpu":
        return 32 << 20
    return cache_bytes(2) or 1 << 20


class _Clock:
    """Times kernels on one device, by a clock's seconds."""

    def __init__(self, xp: Any, synchronize: Callable[[], None], now: Callable[[], float]) -> None:
        self._xp = xp
        self._synchronize = synchronize
        self._now = now
        self._random = np.random.default_rng(0)

    def seconds(self, call: Callable[[], object], rounds: int = ROUNDS) -> float:
        """Seconds of a call, each round long enough to be timed."""
        call()
        once = self._once(call, 1)
        if once > LONG:
            return min(once, self._once(call, 1))
        number = max(1, min(1000, int(LEAST / max(once, 1e-8))))
        return quick([self._once(call, number) for _ in range(rounds)])

    def _once(self, call: Callable[[], object], number: int) -> float:
        self._synchronize()
        start = self._now()
        for _ in range(number):
            call()
        self._synchronize()
        return (self._now() - start) / number

    def ops(self) -> dict[str, dict[str, float]]:
        """Launch and rate of every op of our own that computes and has a sample: one of a user's
        may end the process that tries it, or wait, and is another session's perhaps."""
        found: dict[str, dict[str, float]] = {}
        for op in [each for each in list(REGISTRY.values()) if owner(each) is None]:
            if op.samples and (op.pure or op.random) and (op.kernel or op.expr):
                entry = self._op(op)
                if entry is not None:
                    found[op.name] = entry
        return found

    def _op(self, op: Op) -> dict[str, float] | None:
        small = self._call(op, op.samples[0], lambda size: size)
        if small is None:
            return None
        entry = {"launch": self.seconds(small[0])}
        large = None if op.alias or op.name in MATMUL else self._call(op, op.samples[0], _grown)
        if large is not None:
            run, amount, itemsize = large
            busy = max(self.seconds(run, 3) - entry["launch"], 1e-8)
            if amount >= 4 * SIDE:  # it grew
                entry |= {"rate": amount / busy, "itemsize": itemsize}
        return entry

    def _call(
        self, op: Op, sample: Sample, scale: Callable[[Size], Size]
    ) -> tuple[Callable[[], object], float, int] | None:
        """A sample, scaled: as a program runs it, with its work and the size of its elements."""
        inputs = tuple(s.with_shape(map(scale, s.shape)) for s in sample.inputs)
        attrs = {
            name: tuple(map(scale, value)) if name == "shape" else value
            for name, value in sample.attrs.items()
        }
        try:
            specs = op.infer(*inputs, **attrs)
            outputs = (specs,) if isinstance(specs, TensorSpec) else specs
            run = _bound(self._xp, op, attrs, outputs)
            arrays = [self._array(s, sample) for s in inputs]
            if sample.make is not None:
                arrays = sample.make(arrays)
            arrays = [self._xp.asarray(a) for a in arrays]
            run(*arrays)
        except Exception:  # the sample does not scale: attributes speak of its sizes
            return None
        amount = work(op, inputs, outputs, attrs)
        return (
            partial(run, *arrays),
            amount.flops or amount.bytes,
            max((s.dtype.itemsize for s in (*outputs, *inputs)), default=1),
        )

    def _array(self, spec: TensorSpec, sample: Sample) -> Any:
        shape: Any = spec.shape
        if is_inexact(spec.dtype):
            array = self._random.uniform(sample.low, sample.high, shape)
        else:
            array = self._random.integers(0, 2 if spec.dtype.kind == "b" else sample.classes, shape)
        return np.asarray(array, spec.dtype)

    def matmul(
        self, dtype: str, sides: tuple[int, ...], launch: float, traffic: list[list[float]]
    ) -> list[list[float]]:
        """[flops, seconds beyond launch and traffic] of square products; times never fall.

        Several sets of operands take turns: in a step, the last product's are gone from the cache.
        """
        into = REGISTRY["matmul"].into
        assert into is not None
        points: list[list[float]] = []
        for n in sides:
            a = self._xp.asarray(self._random.uniform(-1, 1, (n, n)).astype(dtype))
            turns = cycle([(self._xp.empty_like(a), a.copy(), a.copy()) for _ in range(TURNS)])
            taken = self.seconds(partial(_next_turn, partial(into, self._xp), turns), ROUNDS)
            moved = interpolated(traffic, 3.0 * a.nbytes)
            points.append([2.0 * n**3, max(taken - launch - moved, taken / 2, 1e-9)])
        best = max(flops / taken for flops, taken in points[-2:])
        least = 0.0
        for point in points:  # the first ones are mostly launch: what is left of them is noise
            point[1] = least = max(least, point[1], point[0] / best)
        return points

    def traffic(self) -> list[list[float]]:
        """[bytes, seconds] of adding float32 arrays of growing size; times never fall."""
        points, least = [], 0.0
        for elements in STREAMS:
            a, b, out = (self._xp.ones(elements, "float32") for _ in range(3))
            taken = self.seconds(partial(self._xp.add, a, b, out=out), 3)
            least = max(least, taken)
            points.append([12.0 * elements, least])
        return points


def quick(seconds: Sequence[float]) -> float:
    """The lower quartile: what else a machine does makes things slower, never faster."""
    return sorted(seconds)[len(seconds) // 4]


def _grown(size: Size) -> Size:
    return SIDE if isinstance(size, int) and size > 2 else size


def _next_turn(call: Callable[..., None], turns: Iterator[tuple[Any, ...]]) -> None:
    """The call, with the operands whose turn it is."""
    call(*next(turns))


def _bound(
    xp: Any, op: Op, attrs: Mapping[str, Any], outputs: tuple[TensorSpec, ...]
) -> Callable[..., None]:
    """The kernel as a program runs it: into buffers that are there already."""
    buffers = tuple(xp.empty(s.shape, s.dtype) for s in outputs)
    if op.alias:
        return lambda x: x.reshape(outputs[0].shape)
    if op.into is not None and not op.random:
        return partial(op.into, xp, buffers[0] if len(buffers) == 1 else buffers, **attrs)

    def run(*arrays: Any) -> None:
        for buffer, result in zip(buffers, op.run(xp, arrays, attrs), strict=True):
            xp.copyto(buffer, result)

    return run


def _classes(ops: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Medians over the ops of each class, for ops that could not be measured."""
    members: dict[str, list[Mapping[str, float]]] = {}
    for name, entry in ops.items():
        if "rate" in entry:
            members.setdefault(op_class(REGISTRY[name]), []).append(entry)
    return {
        kind: {key: median(entry[key] for entry in of_kind) for key in of_kind[0]}
        for kind, of_kind in sorted(members.items())
    }


# Threads --------------------------------------------------------------------------------------


def measure_handoff(rounds: int = 200) -> float:
    """Seconds to hand something to a waiting thread of this process."""
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
    return quick(times) / 2


def _contention() -> dict[str, list[float]]:
    """How much slower each of several busy threads is than one: two, and all cores (eight at most).

    Threads of one process stand for processes: the kernels hold no interpreter lock.
    """
    counts = sorted({n for n in (1, 2, min(cores(), 8)) if n <= cores()})
    products = [_product() for _ in range(counts[-1])]
    streams = [_stream() for _ in range(counts[-1])]
    return {
        "threads": [float(n) for n in counts],
        "compute": _slowdown(products, counts),
        "memory": _slowdown(streams, counts),
    }


def _product() -> Callable[[], object]:
    a = np.ones((256, 256), np.float32)
    out = np.empty_like(a)
    return lambda: np.matmul(a, a.copy(), out=out)


def _stream() -> Callable[[], object]:
    a = np.ones(1 << 21, np.float32)
    out = np.zeros_like(a)
    return lambda: np.add(a, a, out=out)


def _slowdown(calls: list[Callable[[], object]], counts: list[int]) -> list[float]:
    # The quietest rounds: a stranger on one of the cores would look like contention of our own.
    rounds = [[_together(calls[:n]) for n in counts] for _ in range(3 * ROUNDS)]
    times = [min(of_count) for of_count in zip(*rounds, strict=True)]
    factors = [max(1.0, t / times[0]) for t in times]
    return [float(f) for f in np.maximum.accumulate(factors)]


def _together(calls: list[Callable[[], object]], seconds: float = 0.01) -> float:
    """Mean processor seconds of a call while each thread repeats its own."""
    barrier = threading.Barrier(len(calls))
    means = [0.0] * len(calls)

    def repeat(i: int) -> None:
        with np.errstate(all="ignore"), nullcontext():
            barrier.wait()
            start, own, number = perf_counter(), thread_time(), 0
            while perf_counter() - start < seconds:
                calls[i]()
                number += 1
            means[i] = (thread_time() - own) / number

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(means) / len(means)

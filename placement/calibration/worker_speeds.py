"""Worker speeds: the share of its machine's speed that each worker gets at the moment.

    a probe on each worker, all at once ─reports→ speeds_of ─{worker: share}→ with_speeds

Calibration measures processor time, which stands still while a worker waits for a processor. So a
worker that its container or a neighbour holds back looks as fast as the others. The probe counts
how often a worker computes a fixed kernel in some wall time. Shares are momentary: they are not
kept with the profile of the machine.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from graphflow.base.process.blas_threads import one_blas_thread
from graphflow.placement.calibration.cluster_rates import host_name
from graphflow.placement.calibration.measure import lower_quartile
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.machine.host_facts import cores

SETTLE_SECONDS = 0.1
"""Seconds of load before a probe counts. A container limits the time within periods of 0.1 s; what
is left of the first one would look like full speed."""
PROBE_SECONDS = 0.1
"""Seconds that count: a whole period."""
NOISE = 0.2
"""A share of at least 1 - NOISE of the fastest worker's counts as full speed."""
LEAST_SPEED = 0.01
_SIDE = 256  # rows of the matrices that the probe multiplies: a fraction of a millisecond

SpeedReport = Mapping[str, Any]
"""{"rate": kernels in a second of wall time, of each thread; "seconds": processor seconds of one
kernel; "threads": that computed at the same time; "cores": that the process may use}"""


def probe_speed(threads: int) -> dict[str, Any]:
    """Compute a fixed kernel on some threads for `SETTLE_SECONDS` and `PROBE_SECONDS`.

    Return a `SpeedReport`.
    """
    found: list[tuple[float, float]] = []
    others = [
        threading.Thread(target=lambda: found.append(_probe_thread()), daemon=True)
        for _ in range(threads - 1)
    ]
    with one_blas_thread():
        for thread in others:
            thread.start()
        found.append(_probe_thread())
        for thread in others:
            thread.join()
    return {
        "rate": sum(rate for rate, _ in found) / threads,
        "seconds": min(seconds for _, seconds in found),
        "threads": threads,
        "cores": cores(),
    }


def _probe_thread() -> tuple[float, float]:
    """Return kernels in a second of wall time, and processor seconds of one kernel."""
    a = np.ones((_SIDE, _SIDE), np.float32)
    out = np.empty_like(a)
    until = perf_counter() + SETTLE_SECONDS
    while perf_counter() < until:
        np.matmul(a, a, out=out)
    times: list[float] = []
    start = now = perf_counter()
    own = thread_time()
    while now < start + PROBE_SECONDS:
        np.matmul(a, a, out=out)
        before, own, now = own, thread_time(), perf_counter()
        times.append(own - before)
    return len(times) / (now - start), lower_quartile(times)


def is_speed_report(report: Any) -> bool:
    """Return True if a worker's answer is a `SpeedReport` with sane numbers."""
    return isinstance(report, dict) and all(
        isinstance(value := report.get(name), int | float) and 0 < value < float("inf")
        for name in ("rate", "seconds", "threads", "cores")
    )


def better_report(one: SpeedReport, other: SpeedReport) -> SpeedReport:
    """Return the better numbers of two reports of a worker: other work only makes it slower."""
    return {
        **one,
        "rate": max(one["rate"], other["rate"]),
        "seconds": min(one["seconds"], other["seconds"]),
    }


def speeds_of(reports: Mapping[int, SpeedReport], cluster: Cluster) -> dict[int, float]:
    """Return the share of its machine's speed that each worker gets, the fastest worker being 1.

    Workers of a host with more threads than cores take turns, which the cost model knows. What a
    probe finds there depends on these turns, so all of them count as equal.

    Args:
        reports: By worker, of probes that ran at the same time.
    """
    shares = {}
    for worker, report in reports.items():
        host = host_name(cluster, worker)
        beside = [each for other, each in reports.items() if host_name(cluster, other) == host]
        seconds = min(each["seconds"] for each in beside)
        crowded = sum(each["threads"] for each in beside) > report["cores"]
        shares[worker] = 1.0 if crowded else report["rate"] * seconds
    fastest = max(shares.values())
    return {worker: as_speed(share / fastest) for worker, share in shares.items()}


def as_speed(share: float) -> float:
    """Return a share as a speed: 1 if it differs from 1 by no more than the noise."""
    return 1.0 if share >= 1.0 - NOISE else max(share, LEAST_SPEED)


def is_alike(one: float, other: float) -> bool:
    """Return True if two speeds differ by no more than the noise."""
    return min(one, other) >= (1.0 - NOISE) * max(one, other)


def with_speeds(cluster: Cluster, speeds: Mapping[int, float]) -> Cluster:
    """Return a cluster whose devices have the speeds of their workers.

    Speeds concern CPUs that were measured. The numbers of a cluster file precede them.
    """
    workers = tuple(
        replace(
            worker,
            devices=tuple(
                device
                if device.is_described or device.kind != "cpu"
                else replace(device, speed=speeds.get(worker.index, 1.0))
                for device in worker.devices
            ),
        )
        for worker in cluster.workers
    )
    return replace(cluster, workers=workers)

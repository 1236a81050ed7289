"""What benchmarks share: missing peers are left out, turns interleave, figures are ratios."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from threadpoolctl import threadpool_limits

RESULTS = Path(__file__).resolve().parents[1] / "results"
FLOORS = ("matmuls",)
"""Contenders that are no libraries: they do a part of the work."""
PAUSE_SECONDS = 0.2
Steps = dict[str, Callable[..., object]]


def pinned(threads: int) -> None:
    """Hold this process, and all libraries that it is going to import, to so many processors."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    threadpool_limits(threads)  # numpy is there already


def interleaved(
    steps: Mapping[str, Callable[[], object]], rounds: int, each: int = 5
) -> dict[str, list[float]]:
    """Seconds a step of each contender, in turns of `each` steps; the first two turns warm up.

    Threads of libraries poll for work for some time after a step, and would take a core from the
    next contender: OpenBLAS's for 2^28 cycles, more than a tenth of a second. So each turn begins
    with a pause and, if it has several, an untimed step.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            time.sleep(PAUSE_SECONDS)
            if each > 1:
                step()
            for _ in range(each):
                start = time.perf_counter()
                step()
                taken = time.perf_counter() - start
                if turn > 1:
                    seconds[name].append(taken)
    return seconds


def report(
    title: str,
    seconds: Mapping[str, list[float]],
    ours: str = "graphflow",
    goal: float | None = None,
) -> dict[str, Any]:
    """Print medians and our ratio to each peer; the same as plain data.

    Args:
        goal: what our ratio to the best peer is to be at most.
    """
    medians = {name: median(times) for name, times in seconds.items()}
    print(f"\n{title}")
    for name, value in sorted(medians.items(), key=lambda item: item[1]):
        note = "" if name == ours else f"   graphflow / {name} = {medians[ours] / value:.2f}"
        print(f"  {name:<20} {value * 1e3:9.3f} ms{note}")
    result: dict[str, Any] = {
        "title": title,
        "median_seconds": medians,
        "ratios": {name: medians[ours] / v for name, v in medians.items() if name != ours},
    }
    peers = {name: r for name, r in result["ratios"].items() if name not in FLOORS}
    if goal is not None and peers:
        best = max(peers, key=peers.__getitem__)
        result |= {"goal": goal, "best_peer": best, "ratio_to_best": peers[best]}
        verdict = "reached" if peers[best] <= goal else "missed"
        print(f"  to the best, {best}: {peers[best]:.2f}; goal {goal}: {verdict}", flush=True)
    return result


def write(name: str, results: list[dict[str, Any]], output: Path | None) -> None:
    """One JSON file with the figures and the machine they are from."""
    path = output or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }
    path.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")
    print(f"\nwrote {path}")


def _processor() -> str:
    """The processor's own name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((s.split(":")[1].strip() for s in lines if s.startswith("model name")), "")


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=40, help="turns of five steps")
    parser.add_argument("--output", type=Path, default=None, help="JSON file")
    return parser


def pinned_arguments(description: str, rounds: int = 40) -> argparse.Namespace:
    """The options of a benchmark that runs on so many processors; the process is held to them."""
    parser = arguments(description)
    parser.add_argument("--threads", type=int, default=1, help="processors for each contender")
    parser.set_defaults(rounds=rounds)
    options = parser.parse_args()
    pinned(options.threads)
    return options


def optional(name: str, make: Callable[[], Callable[[], object]]) -> Steps:
    """A contender by name, or nothing (and a line that says so) where its library is missing."""
    try:
        return {name: make()}
    except ImportError as error:
        print(f"{name} is left out: {error} (pip install -e '.[bench]')")
        return {}

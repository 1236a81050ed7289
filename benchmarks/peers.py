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

RESULTS = Path(__file__).resolve().parent / "results"


def interleaved(
    steps: Mapping[str, Callable[[], object]], rounds: int, each: int = 5
) -> dict[str, list[float]]:
    """Seconds a step of each contender, in turns of `each` steps; the first two turns warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            for _ in range(each):
                start = time.perf_counter()
                step()
                taken = time.perf_counter() - start
                if turn > 1:
                    seconds[name].append(taken)
    return seconds


def report(
    title: str, seconds: Mapping[str, list[float]], ours: str = "graphflow"
) -> dict[str, Any]:
    """Print medians and our ratio to each peer; the same as plain data."""
    medians = {name: median(times) for name, times in seconds.items()}
    print(f"\n{title}")
    for name, value in sorted(medians.items(), key=lambda item: item[1]):
        note = "" if name == ours else f"   graphflow / {name} = {medians[ours] / value:.2f}"
        print(f"  {name:<14} {value * 1e3:9.3f} ms{note}")
    return {
        "title": title,
        "median_seconds": medians,
        "ratios": {name: medians[ours] / v for name, v in medians.items() if name != ours},
    }


def write(name: str, results: list[dict[str, Any]], output: Path | None) -> None:
    """One JSON file with the figures and the machine they are from."""
    path = output or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    path.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")
    print(f"\nwrote {path}")


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=40, help="turns of five steps")
    parser.add_argument("--output", type=Path, default=None, help="JSON file")
    return parser


def optional(
    name: str, make: Callable[[], Callable[[], object]]
) -> dict[str, Callable[[], object]]:
    """A contender by name, or nothing (and a line that says so) where its library is missing."""
    try:
        return {name: make()}
    except ImportError as error:
        print(f"{name} is left out: {error} (pip install -e '.[bench]')")
        return {}

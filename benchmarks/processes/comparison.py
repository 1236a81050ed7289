"""graphflow beside TensorFlow, JAX, PyTorch, Ray and Dask: the figures of docs/start/comparison.md.

    python benchmarks/processes/comparison.py [--parts size import steps tasks] [--output FILE]

- size: bytes on disk of each library with what it requires.
- import: seconds of the import in a fresh interpreter.
- steps: the same training steps in each library, one process each, which take turns: seconds from
  the import to the first loss with empty caches, of a step, and the most memory of the process.
- tasks: round trips to worker processes, beside Dask and Ray (benchmarks/processes/arrays.py).

Libraries that are not installed are left out. Each part ends with rows of a Markdown table.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
from import_time import seconds_to_import
from install_size import installed_bytes
from library_process import CONTENDERS, MODELS, LibraryProcess
from peers import PAUSE_SECONDS, arguments, report, write
from training import agree

DISTRIBUTIONS = {
    "graphflow": ("graphflow",),
    "torch": ("torch",),
    "jax": ("jax",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "ray": ("ray",),
    "distributed": ("distributed",),
}
"""Names of the distribution that holds a module, of which one is installed."""
BLOCK_SECONDS = 0.4
"""Length of a turn: so short that a slow moment of the machine meets all."""


def measure_sizes() -> list[dict[str, Any]]:
    """Return and print the size on disk of each library."""
    sizes: dict[str, int] = {}
    for module, names in DISTRIBUTIONS.items():
        for name in names:
            try:
                sizes[module] = installed_bytes(name)
            except ImportError as error:
                print(f"{module} is left out: {error}")
            else:
                print(f"  {name} {version(name)}: {sizes[module] / 1e6:.0f} MB")
                break
    row("install, MB", {name: size / 1e6 for name, size in sizes.items()})
    return [{"title": "size on disk", "bytes": sizes}]


def measure_imports(runs: int) -> list[dict[str, Any]]:
    """Return and print the seconds of each import; a first round fills the system's caches."""
    seconds: dict[str, list[float]] = {}
    for turn in range(runs + 1):
        for module in DISTRIBUTIONS:
            try:
                taken = seconds_to_import(module)
            except subprocess.CalledProcessError:
                continue
            if turn:
                seconds.setdefault(module, []).append(taken)
    row("import, s", {name: median(taken) for name, taken in seconds.items()})
    return [report("import", seconds)]


def measure_steps(model: str, threads: int, rounds: int) -> dict[str, Any]:
    """Return and print the figures of one model's training step with so many threads."""
    title = f"{model}, {threads} thread{'s' * (threads > 1)}"
    with ExitStack() as stack:
        processes: dict[str, LibraryProcess] = {}
        for contender in CONTENDERS:
            if (model, contender) == ("lstm", "torch.compile"):
                continue  # it unrolls the loop, which takes minutes
            try:
                processes[contender] = LibraryProcess(model, contender, threads)
            except ImportError as error:
                print(f"{contender} is left out: {error}")
            else:
                stack.callback(processes[contender].close)
        agree(title, {name: process.told["losses"] for name, process in processes.items()})
        seconds = by_turns(processes, rounds)
    result = report(title, seconds)
    firsts = {name: process.told["first"] for name, process in processes.items()}
    peaks = {name: process.told["peak"] for name, process in processes.items()}
    noise = {}
    for name, taken in seconds.items():
        low, middle, high = quantiles(taken, n=4)
        noise[name] = (high - low) / middle
    row("a step, ms", {name: median(taken) * 1e3 for name, taken in seconds.items()})
    print("noise: " + ", ".join(f"{name} {part:.0%}" for name, part in noise.items()))
    row("import to first loss, s", firsts)
    row("most memory, MB", {name: peak / 1e6 for name, peak in peaks.items()})
    return {**result, "noise": noise, "first_seconds": firsts, "peak_bytes": peaks}


def by_turns(processes: Mapping[str, LibraryProcess], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each library's steps; the first step of each turn does not count."""
    counts = {
        name: max(1, round(BLOCK_SECONDS / min(process.step(3))))
        for name, process in processes.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in processes}
    for _ in range(rounds):
        for name, process in processes.items():
            time.sleep(PAUSE_SECONDS)  # threads of the library before may poll for a while
            seconds[name] += process.step(counts[name] + 1)[1:]
    return seconds


def measure_tasks(rounds: int) -> list[dict[str, Any]]:
    """Return and print round trips to workers, and work on arrays that workers hold."""
    from arrays import compare_peers

    return compare_peers(rounds)


def row(title: str, figures: Mapping[str, float]) -> None:
    """Print one row of a Markdown table, with graphflow's ratio to each."""
    ours = figures.get("graphflow")
    told = [
        f"{name} {value:.3g}" + (f" ({ours / value:.2f})" if ours and name != "graphflow" else "")
        for name, value in figures.items()
    ]
    print(f"| {title} | {' | '.join(told)} |", flush=True)


def main() -> None:
    parser = arguments((__doc__ or "").partition("\n\n")[0])
    parts = ("size", "import", "steps", "tasks")
    parser.add_argument("--parts", nargs="*", default=parts, choices=parts)
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    parser.add_argument("--threads", nargs="*", type=int, default=(1, 2), help="of the steps")
    parser.set_defaults(rounds=8)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed library has its bytecode
    results = []
    if "size" in options.parts:
        results += measure_sizes()
    if "import" in options.parts:
        results += measure_imports(options.rounds)
    if "steps" in options.parts:
        results += [
            measure_steps(model, threads, options.rounds)
            for threads in options.threads
            for model in options.models
        ]
    if "tasks" in options.parts:
        results += measure_tasks(options.rounds)
    write("comparison", results, options.output)


if __name__ == "__main__":
    main()

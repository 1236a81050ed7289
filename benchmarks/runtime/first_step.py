"""How long the first step of a model takes: fresh processes, timed from after the import.

    python benchmarks/runtime/first_step.py [--threads 1] [--runs 3] [--output FILE]

The graph is written, differentiated, placed and compiled, and one step is run, with empty caches
on all sides; "warm" is graphflow once more with the cache that its last process filled (JAX and
torch keep none by default). Processes run by turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
from peers import arguments, pinned, report, write

NAMES = ("mlp", "gpt", "lenet", "resnet", "lstm", "logistic", "chain")
CONTENDERS = ("graphflow", "warm", "jax", "torch")
GOAL = 0.5  # of JAX's time


def maker(name: str, library: str) -> Callable[[], Callable[[], object]]:
    """What writes a model's step in a library; its arrays are there already."""
    import chain
    import gpt
    import logistic
    import lstm
    import mlp
    import training
    import vision

    if name == "chain":
        chains = {"graphflow": chain.graphflow_chain, "jax": chain.jax_chain}
        return {**chains, "torch": chain.torch_chain}[library]
    models: dict[str, Callable[[], training.Model]] = {
        "mlp": partial(mlp.model, 128),
        "gpt": gpt.model,
        "lstm": lstm.model,
        "logistic": logistic.dense,
        "lenet": lambda: vision.models()["lenet"],
        "resnet": lambda: vision.models()["resnet"],
    }
    steps: dict[str, Callable[[training.Model], Any]] = {
        "graphflow": training.Ours,
        "jax": training.jax_step,
        "torch": training.torch_step,
    }
    return partial(steps[library], models[name]())


def child(name: str, library: str, threads: int) -> None:
    """Print the seconds that a first step takes in this process."""
    pinned(threads)
    module = __import__(library)
    if library == "jax":
        module.numpy.zeros(1).block_until_ready()  # its backend starts here, with the import
    make = maker(name, library)
    start = time.perf_counter()
    make()()
    print(json.dumps(time.perf_counter() - start))


def seconds_of(name: str, contender: str, threads: int, cache: str) -> float:
    """Seconds of a first step in a process of its own.

    Raises:
        ImportError: the contender's library is not there.
    """
    library = "graphflow" if contender == "warm" else contender
    command = [sys.executable, str(Path(__file__).resolve()), "--child", name, library]
    command += ["--threads", str(threads)]
    environment = {**os.environ, "GRAPHFLOW_CACHE": cache}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        told = done.stderr.strip().splitlines()[-1]
        raise ImportError(told) if told.startswith("ModuleNotFoundError") else SystemExit(told)
    return float(json.loads(done.stdout.splitlines()[-1]))


def measured(name: str, runs: int, threads: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as cache:
            for contender in list(seconds):
                try:
                    seconds[contender].append(seconds_of(name, contender, threads, cache))
                except ImportError as error:
                    print(f"{contender} is left out: {error}")
                    del seconds[contender]
    return seconds


def main() -> None:
    parser = arguments("first steps")
    parser.add_argument("--threads", type=int, default=1, help="processors for each contender")
    parser.add_argument("--runs", type=int, default=3, help="processes of each contender")
    parser.add_argument("--models", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "LIBRARY"), help="measure here")
    options = parser.parse_args()
    if options.child:
        child(*options.child, options.threads)
        return
    results = []
    for name in options.models:
        result = report(f"first step, {name}", measured(name, options.runs, options.threads))
        if "jax" in result["ratios"]:
            ratio = result["ratios"]["jax"]
            result |= {"goal": GOAL, "best_peer": "jax", "ratio_to_best": ratio}
            print(f"  to JAX: {ratio:.2f}; goal {GOAL}", flush=True)
        results.append(result)
    write("first_step", results, options.output)


if __name__ == "__main__":
    main()

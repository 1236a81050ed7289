"""A training step of one library in a process of its own, which takes steps when it is asked to.

LibraryProcess ─"number of steps"→ python library_process.py MODEL CONTENDER THREADS ─seconds→

So libraries take turns without a thread or a page of memory in common. Each process starts with
empty caches for what it compiles.
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

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
from memory import most_resident
from peers import pinned
from training import AGREEING

MODELS = ("mlp", "lstm", "gpt", "resnet")
CONTENDERS = ("graphflow", "torch", "torch.compile", "jax", "tensorflow")


class LibraryProcess:
    """A model's training step by one contender.

    Attributes:
        told: seconds from before the library's import to the first loss, the first losses, and the
            most bytes of the process in memory.

    Raises:
        ImportError: the library is not there.
    """

    def __init__(self, model: str, contender: str, threads: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        command = [sys.executable, __file__, model, contender, str(threads)]
        caches = {
            name: f"{self._folder.name}/{name}"
            for name in ("GRAPHFLOW_CACHE", "TORCHINDUCTOR_CACHE_DIR")
        }
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, **caches, **quiet},
        )  # fmt: skip
        self.told: dict[str, Any] = self._answer()

    def step(self, count: int) -> list[float]:
        """Take so many steps, and return the seconds of each."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        seconds: list[float] = self._answer()
        return seconds

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)
        self._folder.cleanup()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        lines = self._process.communicate()[1].strip().splitlines()
        told = lines[-1] if lines else f"exit status {self._process.returncode}"
        missing = told.startswith("ModuleNotFoundError")
        raise ImportError(told) if missing else SystemExit(told)


def maker(model: str, contender: str) -> Callable[[], Callable[[], float]]:
    """Return the function that writes a model's step; its arrays are there already."""
    import gpt
    import lstm
    import mlp
    import training
    import vision

    models: dict[str, Callable[[], training.Model]] = {
        "mlp": partial(mlp.model, 128),
        "lstm": lstm.model,
        "gpt": gpt.model,
        "resnet": lambda: vision.models()["resnet"],
    }
    made = models[model]()
    return {
        "graphflow": partial(training.Ours, made),
        "torch": partial(training.torch_step, made),
        "torch.compile": partial(training.torch_step, made, True, made.layout),
        "jax": partial(training.jax_step, made),
        "tensorflow": partial(training.tensorflow_step, made),
    }[contender]


def import_library(contender: str, threads: int) -> None:
    """Import a contender's library, held to so many threads."""
    library = __import__(contender.partition(".")[0])
    if contender == "tensorflow":
        library.config.threading.set_intra_op_parallelism_threads(threads)
        library.config.threading.set_inter_op_parallelism_threads(threads)


def serve(model: str, contender: str, threads: int) -> None:
    """Tell of the first steps, then take as many as each line of the input asks for."""
    pinned(threads)
    make = maker(model, contender)
    start = time.perf_counter()
    import_library(contender, threads)
    step = make()
    losses = [step()]
    first = time.perf_counter() - start
    losses += [step() for _ in range(AGREEING - 1)]
    answer({"first": first, "losses": losses, "peak": most_resident()})
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        answer(seconds)


def answer(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))

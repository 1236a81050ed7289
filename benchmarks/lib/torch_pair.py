"""Two processes of torch.distributed that take a step together for each line that they read.

TorchPair([script, …]) ─"step"→ script --rank R --store S: `serve_steps` ─loss→ TorchPair
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

PROCESSES = 2


class TorchPair:
    """A step of two processes, which wait for a line each.

    Args:
        script: a Python file and its arguments, which calls `serve_steps`.

    Raises:
        ImportError: there is no torch, or its processes did not start.
    """

    def __init__(self, script: Sequence[str]) -> None:
        if find_spec("torch") is None:
            raise ImportError("No module named 'torch'")
        self._folder = tempfile.TemporaryDirectory()
        command = [sys.executable, *script, "--store", f"{self._folder.name}/store"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for rank in range(PROCESSES)
        ]  # fmt: skip
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise ImportError("torch.distributed did not start")

    def __call__(self) -> float:
        """Return the mean loss of a step."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("step\n")
            process.stdin.flush()
        losses = []
        for process in self._processes:
            assert process.stdout is not None
            losses.append(float(process.stdout.readline()))
        return sum(losses) / len(losses)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.communicate(timeout=30)
        self._folder.cleanup()


@contextmanager
def process_group(rank: int, store: str) -> Iterator[None]:
    """Join the other process by gloo, for the duration of a block."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES
    )
    yield
    distributed.destroy_process_group()


def serve_steps(step: Callable[[], float]) -> None:
    """Take a step for each line of the standard input, and print its loss."""
    print("ready", flush=True)
    for _ in sys.stdin:
        print(step(), flush=True)

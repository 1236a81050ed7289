"""The first file that a launched worker or nursery runs: imports the very graphflow that its parent
runs.

It is run by path, and finds the package by where it lies itself, so that `sys.path` stays as it is:
nothing next to a checkout can shadow the standard library, and no other installed graphflow is
taken for the parent's.
"""

from __future__ import annotations

import importlib
import signal
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def import_own_package() -> None:
    """Puts the package that this file belongs to, as `graphflow`, in its place."""
    root = Path(__file__).absolute().parents[3]  # not resolved: the packages may be links
    spec = PathFinder.find_spec("graphflow", [str(root)])
    if spec is None or spec.loader is None:
        raise ImportError(f"no graphflow in {root}")
    package = module_from_spec(spec)
    sys.modules["graphflow"] = package
    spec.loader.exec_module(package)


def main(arguments: list[str]) -> int:
    """Runs a worker, or a nursery of workers; returns the exit status."""
    own: list[str] | None = arguments
    if arguments[:1] == ["--nursery"]:
        own = importlib.import_module("graphflow.runtime.launch.fork_server").serve_forks(
            int(arguments[1])
        )
    if own is None:
        return 0
    status: int = importlib.import_module("graphflow.runtime.worker.serving").main(own)
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, during imports too
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # held back from the beginning
    import_own_package()
    sys.exit(main(sys.argv[1:]))

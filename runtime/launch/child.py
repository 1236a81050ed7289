"""The script that a launched worker or fork server runs first: it imports its parent's graphflow.

It is run by path, and finds the package by its own location, so that `sys.path` stays as it is.
Nothing next to a checkout can then shadow the standard library, and no other installed graphflow
replaces the parent's.
"""

from __future__ import annotations

import importlib
import signal
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def import_own_package() -> None:
    """Import the package that contains this file, as `graphflow`."""
    root = Path(__file__).absolute().parents[3]  # not resolved, because the packages may be links
    spec = PathFinder.find_spec("graphflow", [str(root)])
    if spec is None or spec.loader is None:
        raise ImportError(f"no graphflow in {root}")
    package = module_from_spec(spec)
    sys.modules["graphflow"] = package
    spec.loader.exec_module(package)


def main(arguments: list[str]) -> int:
    """Run a worker, or a fork server; return the exit status."""
    own: list[str] | None = arguments
    if arguments[:1] == ["--fork-server"]:
        own = importlib.import_module("graphflow.runtime.launch.fork_server").serve_forks(
            int(arguments[1])
        )
    if own is None:
        return 0
    status: int = importlib.import_module("graphflow.runtime.worker.serving").main(own)
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, during imports too
    # The parent has blocked SIGINT until now, see `start_process`.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    import_own_package()
    sys.exit(main(sys.argv[1:]))

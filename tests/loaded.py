"""Python processes that start as forks of one that has loaded the package.

A worker or a script takes most of a second of CPU time to load its modules, and tests start
hundreds of them. Unless a test is about starting, its process comes from a preloaded server. It has
its own arguments, environment, directory and streams, takes signals, and ends as any other process.
The server itself runs this file, too.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from graphflow.runtime.launch.fork_server import ForkedProcess, ForkServer, can_fork, serve_forks

ROOT = Path(__file__).resolve().parents[1]
MARK = ("GRAPHFLOW_TEST", uuid.uuid4().hex)
"""An environment variable that marks all processes started here; /proc shows it, also for forks."""

_START = 60.0  # seconds for a process to start on a busy machine
_KEPT = (signal.SIGINT, signal.SIGHUP)  # a child inherits whether these are ignored
_LOADED = (
    "graphflow.cli.main", "graphflow.sessions.session", "graphflow.parallel",
    "graphflow.runtime.client.remote_hosts",
    "graphflow.runtime.checkpoint", "typer._adapters",
)  # fmt: skip
"""Modules that commands and scripts load beside those of workers."""


class PreloadedServer(ForkServer):
    """Starts processes as forks of one that is kept. Thread-safe."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        super().__init__({**environment, MARK[0]: MARK[1]}, __file__)
        self._asking = threading.Lock()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path | None = None
    ) -> ForkedProcess:
        """Start a process with text streams.

        Args:
            command: what follows `python`: "-c" and a text, "-m" and a module, or a file; then
                its arguments.
        """
        asked = {
            "command": list(command),
            "environment": dict(environment),
            "folder": str(folder or Path.cwd()),
            "ignored": [each for each in _KEPT if signal.getsignal(each) is signal.SIG_IGN],
        }
        with self._asking, open(os.devnull, "wb") as nothing:
            until = time.monotonic() + _START
            forked = self.fork([json.dumps(asked)], [nothing.fileno()] * 2, until)
        forked.stdin.close()
        forked.stdout, forked.stderr = map(io.TextIOWrapper, (forked.stdout, forked.stderr))
        return forked


_kept: list[PreloadedServer] = []


def preloaded_server() -> PreloadedServer | None:
    """Return this process's server, started on first use; None if processes cannot be forked."""
    if _kept and not _kept[0].is_alive:
        close_servers()
    if not _kept and can_fork():
        _kept.append(PreloadedServer())
    return _kept[0] if _kept else None


def close_servers() -> None:
    """End the server, if there is one."""
    while _kept:
        _kept.pop().close()


def start_python(
    command: Sequence[str], environment: Mapping[str, str], folder: Path | None = None
) -> Any:
    """Start a process as `subprocess.Popen` with text streams; a fork where possible."""
    if (keeper := preloaded_server()) is not None:
        return keeper.start(command, environment, folder)
    return subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=folder, env=environment,
    )  # fmt: skip


def run_python(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path | None = None,
    seconds: float = 100.0,
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end, as `subprocess.run`."""
    process = start_python(command, environment, folder)
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
    timer = threading.Timer(seconds, process.kill)
    reader.start()
    timer.start()
    try:
        with process.stdout, process.stderr:
            output = process.stdout.read()
            reader.join()
        return subprocess.CompletedProcess(command, process.wait(seconds), output, *errors)
    finally:
        timer.cancel()
        process.kill()


# In the process that is kept, and in its forks -------------------------------------------------


def run_request(asked: Mapping[str, Any]) -> None:
    """Continue, in a fork, as the process that was requested."""
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    for each in _KEPT:
        ignored = each in asked["ignored"]
        meant = signal.default_int_handler if each is signal.SIGINT else signal.SIG_DFL
        signal.signal(each, signal.SIG_IGN if ignored else meant)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    # The server's own streams are files, whose positions forks would share.
    sys.stdout = sys.__stdout__ = open_stream(1, sys.stdout)
    sys.stderr = sys.__stderr__ = open_stream(2, sys.stderr)
    how, *rest = asked["command"]
    sys.modules["__main__"] = main = ModuleType("__main__")
    further = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [each for each in further if each and each not in sys.path]
    sys.path.insert(0, "" if how in ("-c", "-m") else str(Path(how).parent))
    sys.argv = [how, *rest[how in ("-c", "-m") :]]
    if how == "-c":
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif how == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        main.__file__ = how
        exec(compile(Path(how).read_bytes(), how, "exec"), main.__dict__)


def open_stream(descriptor: int, like: Any) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, like.encoding, like.errors, write_through=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _name in _LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(_name)
    _told = serve_forks(int(sys.argv[2]))
    if _told is not None:
        run_request(json.loads(_told[0]))

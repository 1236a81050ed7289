"""Workers that somebody else started, as users do: real processes at addresses."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests import loaded
from tests.house.sources import ROOT

USERS = ("-m", "graphflow", "worker")
"""The command by which users start one."""


@contextmanager
def serve_worker(
    *options: str,
    command: Sequence[str | Path] = USERS,
    listen: str = "tcp://127.0.0.1:*",
    **environment: str,
) -> Iterator[str]:
    """A worker, until it is asked to end, which it does without an error; its address."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    told = [*map(str, command), "--listen", listen, *options]
    pipe = subprocess.PIPE
    process: Any = (
        loaded.start_python(told, given, ROOT)
        if command is USERS
        else subprocess.Popen(
            [sys.executable, *told], stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=given
        )
    )
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
    reader.start()
    try:
        yield process.stdout.readline().partition(" listening on ")[2].split()[0]
    finally:
        process.terminate()
        status = process.wait(20)
        reader.join()
        process.stdout.close()
        process.stderr.close()
        assert status == 0, errors


def segments_of(pid: int) -> int:
    """How many segments of shared memory a process holds."""
    found = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has just been closed
            found += "/memfd:graphflow" in os.readlink(descriptor)
    return found

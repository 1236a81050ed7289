"""Workers that somebody else started, as users do: real processes at addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.house.sources import ROOT

USERS = ("-m", "graphflow", "worker")
"""The command by which users start one."""


@contextmanager
def serving(
    *options: str,
    command: Sequence[str | Path] = USERS,
    listen: str = "tcp://127.0.0.1:*",
    **environment: str,
) -> Iterator[str]:
    """A worker, until it is asked to end, which it does without an error; its address."""
    process = subprocess.Popen(
        [sys.executable, *command, "--listen", listen, *options],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process.stdout.readline().partition(" listening on ")[2].split()[0]
    finally:
        process.terminate()
        status = process.wait(20)
        process.stdout.close()
        assert status == 0


def segments_of(pid: int) -> int:
    """How many segments of shared memory a process holds."""
    folder = Path(f"/proc/{pid}/fd")
    return sum("/memfd:graphflow" in os.readlink(fd) for fd in folder.iterdir())

"""The state of one worker of a session, as `Session.workers` shows it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from graphflow.base.formatting import show_bytes
from graphflow.base.lazy_dataclass import dataclass
from graphflow.runtime.telemetry.metrics import resident_bytes

UP, LOST, SILENT = "up", "lost", "silent"


@dataclass(frozen=True)
class WorkerState:
    """One worker of a session.

    Attributes:
        index: its number in device names, such as "/worker:1/cpu:0".
        address: where it listens; "" for the session's own process.
        host: the name of its host; "" if it did not answer.
        pid: its process id on its host; None if it did not answer.
        devices: their names.
        state: "up"; "lost", for the session; or "silent", if it did not answer within two seconds.
        reason: why it is lost or silent; "" if it is up.
        memory: resident memory of its process in bytes; None if it did not answer.
    """

    index: int
    address: str
    host: str
    pid: int | None
    devices: tuple[str, ...]
    state: str
    reason: str = ""
    memory: int | None = None

    def __str__(self) -> str:
        where = self.address or "this process"
        process = "" if self.pid is None else f", pid {self.pid}"
        memory = "" if self.memory is None else f", {show_bytes(self.memory)}"
        reason = f" ({self.reason})" if self.reason else ""
        devices = ", ".join(self.devices)
        return f"worker {self.index} at {where}{process}: {self.state}{reason}, {devices}{memory}"


def describe_own_process(devices: Sequence[str]) -> WorkerState:
    """Return the state of a session's only worker if that is this process."""
    return WorkerState(
        0, "", socket.gethostname(), os.getpid(), tuple(devices), UP, memory=resident_bytes()
    )

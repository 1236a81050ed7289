"""An actor that holds one worker process: what Ray and Dask run on their nodes.

The process is the actor's child and ends with it. Calls return at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphflow.runtime.launch.piped_worker import PipedWorker
from graphflow.runtime.launch.worker_launcher import worker_command
from graphflow.runtime.worker.announcement import Announcement


class HolderReport(NamedTuple):
    """The state of a holder's process: its announcement, its exit status, its last lines."""

    announcement: Announcement | None
    status: int | None
    log: str


class WorkerHolder:
    """One worker process, which listens at an address of this node.

    Args:
        address: the node's address, or "" for that of this host in Ray.
        options: of `graphflow worker`.
        env: variables to set for it.
    """

    def __init__(self, address: str, options: Sequence[str], env: Mapping[str, str]) -> None:
        if not address:
            import ray

            address = ray.util.get_node_ip_address()
        command = worker_command(f"tcp://{address}:*", options)
        self._worker = PipedWorker(command, env)

    def report(self) -> HolderReport:
        """Return the state of the process."""
        worker = self._worker
        return HolderReport(worker.announcement, worker.exit_status(), worker.log)

    def end(self) -> None:
        """End the process."""
        self._worker.end()

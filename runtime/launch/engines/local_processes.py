"""Workers as processes of this host that listen on loopback; for trying what other launchers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.runtime.launch.engines.piped_launcher import PipedLauncher, WorkerPlace
from graphflow.runtime.launch.worker_launcher import worker_command


class Processes(PipedLauncher):
    """Starts `graphflow worker` processes on this host.

    `gf.Cluster.local` starts faster, since it forks them.
    """

    def place(self, index: int, options: Sequence[str], env: Mapping[str, str]) -> WorkerPlace:
        command = worker_command("tcp://127.0.0.1:*", options)
        return WorkerPlace(command, "process of this host", "127.0.0.1")

"""The workers of a cluster as a session's hosts: variables, checkpoints and measurements.

Programs and steps are in `remote_steps`, the choice of workers in `worker_membership`, and how
workers join an open session in `worker_admission`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphflow.base.addresses import is_loopback
from graphflow.runtime.checkpoint.manifest import CheckpointShard
from graphflow.runtime.checkpoint.remote import shard_name
from graphflow.runtime.checkpoint.store import CheckpointStore
from graphflow.runtime.client.remote_steps import (
    REQUEST_SECONDS,
    DistributedProgram,
    RemoteSteps,
    copy_if_borrowed,
)
from graphflow.runtime.host.host_interface import PendingSave, SavedPart
from graphflow.runtime.protocol.coordinator import DEAD_AFTER, GRACE
from graphflow.runtime.protocol.coordinator_events import (
    BeginOperation,
    Order,
)
from graphflow.runtime.wire.messages import (
    Adopt,
    Array,
    Forget,
    Measure,
    Measured,
    Probe,
    Probed,
    Read,
    Save,
    Saved,
    Write,
)

if TYPE_CHECKING:
    from graphflow.placement.clusters.cluster import Cluster

_SAVE_SECONDS = 600.0  # for the shards of a checkpoint


class RemoteHosts(RemoteSteps):
    """The workers of a cluster, opened for one session.

    Methods may be called from any thread. Steps run one at a time.
    """

    can_be_lost = True

    can_begin_ahead = True

    computing_threads: Set[int] = frozenset()

    def __init__(
        self,
        cluster: Cluster,
        *,
        deadline: float,
        host: str | None = None,
        ops: Sequence[str] = (),
        dead_after: float = DEAD_AFTER,
        store: CheckpointStore | None = None,
        trial: bool = False,
    ) -> None:
        """Join the workers at the cluster's addresses, or start local ones.

        Args:
            deadline: seconds until all workers are ready.
            host: `path.py:Name`, another host class in started workers, for tests.
            ops: names of modules of users' ops that the workers import.
            dead_after: seconds out of reach until a worker is lost.
            store: the session's checkpoint store, with its name, secret and epoch.
            trial: workers do not count what the session does.

        Raises:
            ModuleNotAllowed: a worker was not started with one of `ops` allowed.
            RendezvousTimeout: a worker did not start, answer, or reach another in time.
            VersionMismatch: a worker runs other code, or another Python.
            ClusterError: a worker lacks a device of the cluster.
            TransportError: an address cannot be used.
        """
        super().__init__(store, ops=ops, dead_after=dead_after, trial=trial)
        self._join(cluster, deadline, host)

    @property
    def is_single_host(self) -> bool:
        """True if all workers are on this host."""
        return all(map(is_loopback, self._addresses))

    # Variables -----------------------------------------------------------------------------------

    def read(self, worker: int, variable: str) -> Array:
        """Return the value of a variable after the last committed step."""
        request = next(self._requests)
        order = Order(Read(request, variable))
        replies = self._ask(request, {worker: order}, REQUEST_SECONDS)
        return copy_if_borrowed(replies.arrays[worker][variable])

    def write(self, worker: int, variable: str, value: Array) -> None:
        """Set a variable."""
        request = next(self._requests)
        order = Order(Write(request, variable), [("value", variable, np.asarray(value))])
        self._ask(request, {worker: order}, REQUEST_SECONDS)

    def forget(self, programs: Sequence[str], variables: Mapping[int, Sequence[str]]) -> None:
        """Drop programs, and variables by worker, which live elsewhere from now on."""
        there: dict[int, list[str]] = {worker: [] for worker in variables}
        for name in programs:
            for worker in self._programs.pop(name, DistributedProgram(())).workers:
                there.setdefault(worker, []).append(name)
        for worker in self.lost_workers():
            there.pop(worker, None)
        if there:
            request = next(self._requests)
            orders = {
                worker: Order(Forget(request, names, list(variables.get(worker, ()))))
                for worker, names in there.items()
            }
            self._ask(request, orders, REQUEST_SECONDS)

    def adopt(self, worker: int, moved: Mapping[str, str], copied: Mapping[str, str]) -> None:
        """Let mirrors on a worker take the place of variables that were lost."""
        request = next(self._requests)
        order = Order(Adopt(request, dict(moved), dict(copied)))
        self._ask(request, {worker: order}, REQUEST_SECONDS)

    # Checkpoints ---------------------------------------------------------------------------------

    def save(self, root: Path, folder: str, step: int, workers: Sequence[int]) -> PendingSave:
        """Have workers copy their variables now, and write or send the copies in the background."""
        loop, request = self._require_loop(), next(self._requests)
        files = {worker: shard_name(worker) for worker in workers}
        orders = {w: Order(Save(request, folder, file, step)) for w, file in files.items()}
        operation = loop.submit(BeginOperation(request, orders, _SAVE_SECONDS))

        def wait(seconds: float) -> dict[int, SavedPart]:
            replies = loop.finish(operation, seconds)
            written: dict[int, SavedPart] = {}
            for worker, message in replies.messages.items():
                assert isinstance(message, Saved)
                arrays = {str(n): array for n, array in replies.arrays[worker].items()}
                shard = CheckpointShard(files[worker], message.sha256, message.nbytes, ())
                written[worker] = shard if message.sha256 else arrays
            return written

        return wait

    # Measuring -----------------------------------------------------------------------------------

    def measure(self) -> dict[int, dict[str, Any]]:
        """Return the calibration of each worker's machine.

        Workers measure one after the other: those of one machine would slow each other down.
        """
        reports = {}
        for worker in self._present_workers():
            request = next(self._requests)
            replies = self._ask(request, {worker: Order(Measure(request))}, REQUEST_SECONDS)
            message = replies.messages[worker]
            assert isinstance(message, Measured)
            reports[worker] = message.report
        return self._complete(reports)

    def _present_workers(self) -> list[int]:
        """Return the workers that take part, without those that are waited for."""
        away = self._require_loop().unwelcomed_workers()
        return [worker for worker in self._living_workers() if worker not in away]

    def _complete(self, reports: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return reports of the cluster's workers; others have the parts of those that were
        lost."""
        first = next(iter(reports.values()))
        return {worker: reports.get(worker, first) for worker in range(self._cluster_size)}

    def probe_speeds(self) -> dict[int, dict[str, Any]]:
        """Return a report of each worker's present speed; all of them compute at the same time."""
        request = next(self._requests)
        orders = {w: Order(Measure(request, probes=True)) for w in self._present_workers()}
        replies = self._ask(request, orders, REQUEST_SECONDS)
        reports = {}
        for worker, message in replies.messages.items():
            assert isinstance(message, Measured)
            reports[worker] = message.report
        return self._complete(reports)

    def probe_link(self, source: int, target: int, nbytes: int, repeats: int) -> float:
        """Return the median time in seconds that `nbytes` take from one worker to another.

        It is half of a round trip.

        Raises:
            StepTimeout: the target did not answer; the error names the link.
        """
        request = next(self._requests)
        order = Order(Probe(request, target, nbytes, repeats, REQUEST_SECONDS))
        replies = self._ask(request, {source: order}, REQUEST_SECONDS + GRACE)
        message = replies.messages[source]
        assert isinstance(message, Probed)
        return message.seconds

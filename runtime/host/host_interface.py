"""The interface `Hosts` of a session to all its workers, and the embedded session's one.

The workers are this process (`LocalHosts`), or other processes (`client.remote_hosts`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from graphflow.base.process.interrupts import defer_signals
from graphflow.errors import SessionError
from graphflow.placement.clusters.cluster import Cluster
from graphflow.runtime.checkpoint.manifest import CheckpointShard
from graphflow.runtime.checkpoint.remote import shard_name, write_under
from graphflow.runtime.host.host import DeviceHost
from graphflow.runtime.host.worker_state import WorkerState, describe_own_process
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.program.program import has_called_commit
from graphflow.runtime.telemetry.metrics import Meters
from graphflow.runtime.wire.step_values import StepResult, TensorParcel

Array = np.ndarray[Any, Any]


class DirectStep(Protocol):
    """Runs the steps of one program for given sizes, with less overhead than `Hosts.step`."""

    def __call__(
        self, step: int, draws: int, feeds: Mapping[str, Array], deadline: float
    ) -> list[Array] | None:
        """Run a step; return the fetches in the order in which `add` was given them.

        None if this function does not apply any more, and the step was not run.
        """


SavedPart = CheckpointShard | Mapping[str, Array]
"""A worker's part of a checkpoint: the shard that it has written, or its variables."""


ASKED_TO_END = "it was asked to end"
"""The reason of `WorkerLost` of a worker that the session has left at its request."""
LEFT = "it has left the session"
"""The reason of `WorkerLost` of a worker that the session needs no more."""
NO_WORKER_LEFT = "nobody answers"
"""The reason of `WorkerLost` if no worker is left to continue with."""


class PendingSave(Protocol):
    """A checkpoint that workers are writing: the function that waits for it."""

    def __call__(self, seconds: float) -> dict[int, SavedPart]:
        """Wait for the part of each worker.

        Raises:
            CheckpointError: a worker could not write.
            WorkerLost, StepTimeout: a worker was lost, or is late.
        """


class Hosts(Protocol):
    """The operations of a session on its workers.

    Attributes:
        can_be_lost: the workers are other processes.
        can_begin_ahead: a step may begin before the step before it is decided.
        computing_threads: threads of this process that compute parts of steps, besides the calling
            one.
        meters: metrics of the session.
    """

    can_be_lost: bool
    can_begin_ahead: bool
    computing_threads: Set[int]
    meters: Meters

    @property
    def is_single_host(self) -> bool:
        """True if all workers are on this host."""

    def worker_states(
        self, devices: Mapping[int, Sequence[str]], ask: bool = True
    ) -> tuple[WorkerState, ...]:
        """Return the state of each worker.

        Args:
            devices: by worker.
            ask: ask each worker for its process and memory; it may be silent for two seconds.
        """

    def add(self, program: str, partitions: Mapping[int, Sequence[Partition]]) -> None:
        """Give each worker its partitions of a program."""

    def step(
        self,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[int, Mapping[str, Array]],
        trace: bool,
        deadline: float,
    ) -> StepResult:
        """Run a step: all workers compute, then all commit; or raise the error of one.

        After an error nothing has changed.
        """

    def wait_for_clocks(self) -> None:
        """Wait, before a traced step, until times of all workers can be converted to ours."""

    def begin(
        self,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[int, Mapping[str, Array]],
        deadline: float,
        follows: int,
    ) -> Any:
        """Begin a step before the one that it follows is decided; return a handle for `finish`.

        None if steps only run one after the other.
        """

    def finish(self, pending: Any) -> StepResult:
        """Decide a step that was begun; as `step`."""

    def undo(self, pending: Sequence[Any]) -> None:
        """End steps that were begun; nothing of them happens."""

    def has_committed(self, step: int, error: BaseException) -> bool:
        """Return True if the last step had committed when an interrupt ended it.

        Args:
            error: the exception that the interrupt raised.
        """

    def prepare(self, program: str, bindings: Mapping[str, int]) -> None:
        """Compile a program for the sizes of coming steps."""

    def direct_step(self, program: str, bindings: Mapping[str, int]) -> DirectStep | None:
        """Return a faster function for untraced steps of these sizes; None if there is none."""

    def read(self, worker: int, variable: str) -> Array:
        """Return a copy of a variable's value."""

    def write(self, worker: int, variable: str, value: Array) -> None:
        """Set a variable."""

    def forget(self, programs: Sequence[str], variables: Mapping[int, Sequence[str]]) -> None:
        """Drop programs, and variables by worker, which live elsewhere from now on."""

    def adopt(self, worker: int, moved: Mapping[str, str], copied: Mapping[str, str]) -> None:
        """Let mirrors on a worker take the place of variables that were lost.

        Args:
            moved: for each new name the variable that has this name from now on.
            copied: for each new name the variable whose value it gets.
        """

    def lost_workers(self) -> set[int]:
        """Return the workers that were lost since the session began or was reopened."""

    def leave(self, workers: Collection[int], reason: str) -> None:
        """Leave some workers, which count as lost from then on, with their state."""

    @property
    def starts_workers(self) -> bool:
        """True if the session starts its workers itself, and so can replace them at once."""

    def replace(self, lost: int, gives_up: Callable[[], bool]) -> int:
        """Let a new process join in place of a lost worker, and return its number.

        Args:
            gives_up: is asked now and then whether to wait no longer.
        """

    def join(self, address: str | None, key: str | None, devices: Sequence[str]) -> int:
        """Let one more process join the session, and return its number.

        Args:
            address: where it listens; None to start it on this machine.
            key: its public key, or the key's name.
            devices: the devices that it must have, such as "cpu:0".
        """

    def dismiss(self, worker: int) -> None:
        """Leave a worker for good, and end its process if the session has started it."""

    def save(self, root: Path, folder: str, step: int, workers: Sequence[int]) -> PendingSave:
        """Copy the variables of some workers now, and write their shards in the background.

        Args:
            root: the directory of the session's checkpoints.
            folder: the checkpoint's folder under `root`.
        """

    def draining_workers(self) -> set[int]:
        """Return the workers that were asked to end, and wait for the session to leave."""

    def on_draining(self, callback: Callable[[], None]) -> None:
        """Register a callback that is called, on another thread, when a worker is asked to end."""

    def leave_draining(self) -> None:
        """Leave the workers that were asked to end. They count as lost, with their state."""

    def reopen(self, cluster: Cluster, epoch: int, patience: Callable[[], float]) -> Cluster:
        """Begin anew, without state, at a higher epoch, on the available workers of a cluster.

        Returns the cluster of these workers.

        Args:
            patience: returns for how many seconds to wait for missing workers; it is called again
                meanwhile, and may then return less.

        Raises:
            WorkerLost: no worker is available.
        """

    def cancel(self) -> None:
        """End the step that runs, with an error for its caller. Callable from any thread."""

    def close(self) -> None:
        """End the session on all workers. Idempotent."""


class LocalHosts:
    """The embedded session: one host, in this process.

    Args:
        devices: full names of the devices of worker 0.
        threads: per device; None: an equal share of the cores.
    """

    can_be_lost = False

    can_begin_ahead = False

    is_single_host = True

    def __init__(self, devices: Sequence[str], threads: int | None) -> None:
        self.meters = Meters()
        self._host = DeviceHost(0, devices, threads, _no_other_worker)
        self._host.open("")
        self.computing_threads = self._host.computing_threads("")
        self._committed = -1

    def worker_states(
        self, devices: Mapping[int, Sequence[str]], ask: bool = True
    ) -> tuple[WorkerState, ...]:
        return (describe_own_process(devices[0]),)

    def open_gpu(self, device: str) -> int:
        """Open a GPU of this process for the session, and return how many of its bytes are free.

        Raises:
            DeviceError: it cannot be opened, or does not compute; the session is as before.
        """
        return self._host.open_gpu("", device)

    def add(self, program: str, partitions: Mapping[int, Sequence[Partition]]) -> None:
        for each in partitions.values():
            self._host.add("", program, each)

    def step(
        self,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[int, Mapping[str, Array]],
        trace: bool,
        deadline: float,
    ) -> StepResult:
        try:
            computed = self._host.compute(
                "", program, step, bindings, feeds.get(0, {}), trace, deadline
            )
        except BaseException:
            self._host.abort("", step)
            raise
        with defer_signals() if self._host.has_changes("") else nullcontext():
            self._host.commit("", step)
            self._committed = step
        return StepResult(dict(computed.fetches), [*computed.spans], dict(computed.peak))

    def has_committed(self, step: int, error: BaseException) -> bool:
        return self._committed == step or has_called_commit(error)

    def wait_for_clocks(self) -> None:
        pass  # there is one clock

    def begin(
        self,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[int, Mapping[str, Array]],
        deadline: float,
        follows: int,
    ) -> None:
        """Return None: the calling thread computes, so nothing can begin earlier."""

    def finish(self, pending: Any) -> StepResult:
        raise SessionError("an embedded session cannot begin a step ahead of its turn")

    def undo(self, pending: Sequence[Any]) -> None:
        """Do nothing: no step was begun."""

    def prepare(self, program: str, bindings: Mapping[str, int]) -> None:
        self._host.prepare("", program, bindings)

    def direct_step(self, program: str, bindings: Mapping[str, int]) -> DirectStep | None:
        found = self._host.direct_program("", program, bindings)
        if found is None:
            return None
        compiled, host, compute = found, self._host, found.direct

        def run(
            step: int, draws: int, feeds: Mapping[str, Array], deadline: float
        ) -> list[Array] | None:
            if compiled.is_free:
                return None
            host.set_deadline("", deadline)
            values = compute(feeds, step, draws)
            if compiled.commits_in_one_call:
                compiled.commit()
            elif compiled.commits:
                with defer_signals():
                    compiled.commit()
                    self._committed = step
            return values

        return run

    def read(self, worker: int, variable: str) -> Array:
        return self._host.read("", variable)

    def write(self, worker: int, variable: str, value: Array) -> None:
        self._host.write("", variable, value)

    def forget(self, programs: Sequence[str], variables: Mapping[int, Sequence[str]]) -> None:
        self._host.forget("", programs, variables.get(0, ()))

    def adopt(self, worker: int, moved: Mapping[str, str], copied: Mapping[str, str]) -> None:
        self._host.adopt("", moved, copied)

    def lost_workers(self) -> set[int]:
        return set()

    def leave(self, workers: Collection[int], reason: str) -> None:
        """Do nothing: the only worker is this process."""

    starts_workers = False

    def replace(self, lost: int, gives_up: Callable[[], bool]) -> int:
        raise SessionError("an embedded session has no other workers")

    def join(self, address: str | None, key: str | None, devices: Sequence[str]) -> int:
        raise SessionError("an embedded session has no other workers; open one on a cluster")

    def dismiss(self, worker: int) -> None:
        """Do nothing: the only worker is this process."""

    def save(self, root: Path, folder: str, step: int, workers: Sequence[int]) -> PendingSave:
        copies = self._host.snapshot("") if workers else {}

        def write(seconds: float) -> dict[int, SavedPart]:
            if not workers:
                return {}
            written = write_under(root, folder, shard_name(0), copies, step)
            return {0: copies if written is None else written}

        return write

    def draining_workers(self) -> set[int]:
        return set()

    def on_draining(self, callback: Callable[[], None]) -> None:
        """Do nothing: this process is the session's own."""

    def leave_draining(self) -> None:
        """Do nothing: there is no other worker."""

    def reopen(self, cluster: Cluster, epoch: int, patience: Callable[[], float]) -> Cluster:
        return cluster

    def cancel(self) -> None:
        """Do nothing: kernels of this process run to their end."""

    def close(self) -> None:
        self._host.close("")


def _no_other_worker(parcel: TensorParcel) -> None:
    raise SessionError(f"an embedded session has no worker {parcel.target_worker}")

"""The host: runs the partitions of any number of sessions on the devices of one process.

The embedded session has one host, and each worker process has one. A host knows no sockets. Its
devices run in parallel, one thread each, and hand tensors over by reference. A tensor for another
worker goes to `outbox`; one from another worker comes in through `deliver`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from time import monotonic
from typing import Any

import numpy as np

from graphflow.base.process.blas_threads import one_blas_thread
from graphflow.errors import GraphflowError, SessionError
from graphflow.placement.clusters.machine.host_facts import default_threads, on_all_cores
from graphflow.runtime.host.device_backends import DeviceBackends
from graphflow.runtime.host.session_state import SessionState
from graphflow.runtime.memory.backend import ResultExporter
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.program.program import Program
from graphflow.runtime.transport.tensor_mailbox import TransferObserver
from graphflow.runtime.wire.graph_limits import GraphLimits
from graphflow.runtime.wire.step_values import (
    CREDIT_PREFIX,
    EXCHANGE_PREFIX,
    Computed,
    HostUsage,
    Key,
    TensorParcel,
)

Array = np.ndarray[Any, Any]

_SIGNAL_PREFIXES = (EXCHANGE_PREFIX, CREDIT_PREFIX)
"""Prefixes of keys that are no edges: signals between devices. Edges have numbers."""


class DeviceHost:
    """The devices of one process.

    Args:
        worker: this process's index in the cluster.
        devices: full names, "/worker:0/cpu:0".
        threads: per device; None: see `default_threads`.
        outbox: takes a tensor for another worker; must not block.
        limits: on programs from the wire.
        alone: nothing else in this process uses BLAS, whose thread count programs may then set.
    """

    def __init__(
        self,
        worker: int,
        devices: Sequence[str],
        threads: int | None,
        outbox: Callable[[TensorParcel], None],
        limits: GraphLimits | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self.worker = worker
        self._alone = alone
        self._limits = limits or GraphLimits()
        self.devices = tuple(devices)
        self._count = threads or default_threads(max(1, len(self.devices)))
        self._outbox = outbox
        self._sessions: dict[str, SessionState] = {}

    def open(self, session: str) -> None:
        """Begin a session without state, with threads of its own."""
        backends = DeviceBackends(self.devices, self._count)
        self._sessions[session] = SessionState(session, self.worker, backends, self._outbox)
        if self._alone:
            one_blas_thread().__enter__()

    def open_gpu(self, session: str, device: str) -> int:
        """Open a further device, a GPU, for a session between two steps.

        Return how many bytes of its memory are free.

        Raises:
            DeviceError: it cannot be opened, or does not compute; the session is as before.
        """
        return self._session(session).open_gpu(device)

    def computing_threads(self, session: str) -> Set[int]:
        """Return the threads of a session that compute parts of steps, besides the calling one."""
        return self._sessions[session].computing_threads

    def close(self, session: str) -> None:
        """Drop a session with its programs and its state, and end its threads."""
        state = self._sessions.pop(session, None)
        if state is not None:
            state.close()
            if self._alone:
                one_blas_thread().__exit__(None, None, None)

    def load(self, session: str, program: str, header: bytes, buffers: list[Array]) -> None:
        """Take a program from the wire.

        Raises:
            ProtocolError, GraphLimitError: it does not verify.
        """
        from graphflow.runtime.wire.graph_codec import decode  # loads msgpack

        self.add(session, program, decode(header, buffers, self._limits))

    def add(self, session: str, program: str, partitions: Sequence[Partition]) -> None:
        """Take a program's partitions for devices of this host, and create its new variables."""
        self._session(session).add(program, partitions)

    def compute(
        self,
        session: str,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[str, Array],
        trace: bool,
        deadline: float,
    ) -> Computed:
        """Run the compute part of a step on all devices of this host; blocks.

        Args:
            deadline: seconds from now until waits for tensors fail.

        Raises:
            OpError: a kernel failed.
            StepTimeout: a tensor did not arrive in time.
        """
        return self._session(session).compute(program, step, bindings, feeds, trace, deadline)

    def direct_program(
        self, session: str, program: str, bindings: Mapping[str, int]
    ) -> Program | None:
        """Return the compiled program for these sizes, if it alone computes a step.

        None if a step has further devices, or edges between devices.
        """
        return self._session(session).direct_program(program, dict(bindings))

    def prepare(self, session: str, program: str, bindings: Mapping[str, int]) -> None:
        """Compile a program for the sizes of coming steps, on all devices of this host."""
        self._session(session).prepare(program, dict(bindings))

    def set_deadline(self, session: str, seconds: float) -> None:
        """Set how long from now a step of a `direct_program` may take."""
        self._session(session).mail.deadline = monotonic() + seconds

    def commit(self, session: str, step: int) -> None:
        """Apply the assignments of the computed step."""
        self._session(session).commit(step)

    def has_changes(self, session: str) -> bool:
        """Return True if committing the computed step would assign a variable."""
        return self._session(session).has_changes()

    def abort(self, session: str, step: int) -> None:
        """Drop the step; nothing of it was applied."""
        self._session(session).abort(step)

    def deliver(self, session: str, step: int, edge: Key, array: Array) -> None:
        """Take a tensor from another worker; it may arrive before its step begins."""
        state = self._sessions.get(session)
        if state is not None and (isinstance(edge, int) or edge.startswith(_SIGNAL_PREFIXES)):
            state.mail.put(step, edge, array)  # anything else is no key of a program

    def connect_mail(
        self,
        session: str,
        attend: Callable[[Callable[[], bool], float], bool],
        wake: Callable[[], None],
        carried: TransferObserver,
        keep: ResultExporter | None = None,
    ) -> None:
        """Connect a session's mailbox to its worker's sockets (see `TensorMailbox`).

        Args:
            attend: receives tensors on a waiting thread.
            wake: wakes the thread that receives.
            carried: is told of tensors that need no message.
            keep: gives memory for results.
        """
        state = self._session(session)
        state.mail.attend, state.mail.wake, state.mail.on_transfer = attend, wake, carried
        state.set_result_memory(keep)

    def cancel(self, session: str, step: int, reason: GraphflowError) -> None:
        """End every wait of the step with an error."""
        state = self._sessions.get(session)
        if state is not None:
            state.mail.cancel(step, reason)

    def read(self, session: str, variable: str) -> Array:
        """Return a copy of a variable's value."""
        return self._session(session).read(variable)

    def snapshot(self, session: str) -> dict[str, Array]:
        """Return copies of all variables, as of the last commit."""
        return self._session(session).snapshot()

    def write(self, session: str, variable: str, value: Array) -> None:
        """Set a variable.

        Raises:
            VariableError: unknown here, or of another shape or dtype.
        """
        self._session(session).write(variable, value)

    def forget(self, session: str, programs: Sequence[str], variables: Sequence[str]) -> None:
        """Drop programs, and variables that live elsewhere from now on; ignore unknown names."""
        self._session(session).forget(programs, variables)

    def adopt(self, session: str, moved: Mapping[str, str], copied: Mapping[str, str]) -> None:
        """Give variables other names; see `Adopt`.

        Raises:
            VariableError: there is no variable to move or copy.
        """
        self._session(session).adopt(moved, copied)

    def usage(self, session: str) -> HostUsage:
        """Return a session's memory use and its waits. Callable from any thread."""
        state = self._sessions.get(session)
        return state.usage() if state is not None else HostUsage()

    def measure(self) -> dict[str, Any]:
        """Return this machine's speeds as plain data for the cost model; calibrate if need be."""
        from graphflow.placement.calibration.calibrate import machine_profile

        with on_all_cores():
            return machine_profile(self.devices)

    def probe_speed(self) -> dict[str, Any]:
        """Return a report of how fast this process is at the moment, with all its threads busy."""
        from graphflow.placement.calibration.worker_speeds import probe_speed

        return probe_speed(self._count * len(self.devices))

    def _session(self, session: str) -> SessionState:
        state = self._sessions.get(session)
        if state is None and not session:  # an embedded session that another thread has closed
            raise SessionError("the session is closed; open another one")
        if state is None:
            raise SessionError(f"session {session!r} is not open on worker {self.worker}")
        return state

"""Host: runs the partitions of any number of sessions on the devices of one process; knows no
sockets.

The embedded session has one; each worker process has one. Devices of a host run beside each other,
one thread each, and hand tensors over by reference; a tensor for another worker goes to `outbox`,
one from there comes in through `deliver`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from time import monotonic
from typing import Any

import numpy as np

from graphflow.base.blas_threads import one_blas_thread
from graphflow.errors import GraphflowError, SessionError
from graphflow.ir.device_name import DeviceName
from graphflow.placement.clusters.host_facts import cores, on_all_cores
from graphflow.runtime.host.device_backends import backend_for
from graphflow.runtime.host.session_state import SessionState
from graphflow.runtime.memory.backend import ResultExporter
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.program.program import Program
from graphflow.runtime.transport.tensor_mailbox import TransferObserver
from graphflow.runtime.wire.graph_limits import GraphLimits
from graphflow.runtime.wire.messages import (
    CREDIT_PREFIX,
    EXCHANGE_PREFIX,
    Computed,
    HostUsage,
    Key,
    TensorParcel,
)

Array = np.ndarray[Any, Any]

_SIGNAL_PREFIXES = (EXCHANGE_PREFIX, CREDIT_PREFIX)
"""What keys of what goes between devices begin with, beside edges, which are numbered."""


class DeviceHost:
    """The devices of one process.

    Args:
        worker: this process's index in the cluster.
        devices: full names, "/worker:0/cpu:0".
        threads: per device; None: the cores shared out.
        outbox: takes a tensor for another worker; must not block.
        limits: what it takes on of programs from the wire.
        alone: nothing else in this process uses BLAS, which then stays as programs need it.
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
        self._count = threads or max(1, cores() // max(1, len(self.devices)))
        self._outbox = outbox
        self._sessions: dict[str, SessionState] = {}

    def open(self, session: str) -> None:
        """Begin a session with no state, and threads of its own.

        Raises:
            DeviceError: a device is not to be had here.
        """
        backends = {d: backend_for(DeviceName.parse(d), self._count) for d in self.devices}
        self._sessions[session] = SessionState(session, self.worker, backends, self._outbox)
        if self._alone:
            one_blas_thread().__enter__()

    def computing_threads(self, session: str) -> Set[int]:
        """The threads of a session that compute parts of steps, beside the one that asks."""
        return self._sessions[session].computing_threads

    def close(self, session: str) -> None:
        """Forget a session, its programs and its state; its threads end."""
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
            deadline: seconds from now after which waits for tensors are given up.

        Raises:
            OpError: a kernel failed.
            StepTimeout: a tensor did not come in time.
        """
        return self._session(session).compute(program, step, bindings, feeds, trace, deadline)

    def direct_program(
        self, session: str, program: str, bindings: Mapping[str, int]
    ) -> Program | None:
        """The one that computes a program's steps of these sizes, compiled; None where a step takes
        more than it: other devices, or edges between them."""
        return self._session(session).direct_program(program, dict(bindings))

    def prepare(self, session: str, program: str, bindings: Mapping[str, int]) -> None:
        """Compile a program for the sizes of coming steps, on all devices of this host."""
        self._session(session).prepare(program, dict(bindings))

    def set_deadline(self, session: str, seconds: float) -> None:
        """How long from now a step that is run by way of `ready` may take."""
        self._session(session).mail.deadline = monotonic() + seconds

    def commit(self, session: str, step: int) -> None:
        """Apply the assignments of the computed step."""
        self._session(session).commit(step)

    def has_changes(self, session: str) -> bool:
        """Whether committing the computed step would assign anything."""
        return self._session(session).has_changes()

    def abort(self, session: str, step: int) -> None:
        """Forget the step; nothing of it was applied."""
        self._session(session).abort(step)

    def deliver(self, session: str, step: int, edge: Key, array: Array) -> None:
        """Take a tensor from another worker; it may come before its step begins."""
        state = self._sessions.get(session)
        if state is not None and (isinstance(edge, int) or edge.startswith(_SIGNAL_PREFIXES)):
            state.mail.put(step, edge, array)  # edges of programs are numbered

    def connect_mail(
        self,
        session: str,
        attend: Callable[[Callable[[], bool], float], bool],
        wake: Callable[[], None],
        carried: TransferObserver,
        keep: ResultExporter | None = None,
    ) -> None:
        """Set how a waiting thread receives a tensor itself, and how another thread wakes it (see
        `TensorMailbox`); who hears of tensors that need no message; and where results go."""
        state = self._session(session)
        state.mail.attend, state.mail.wake, state.mail.on_transfer = attend, wake, carried
        state.set_result_memory(keep)

    def cancel(self, session: str, step: int, reason: GraphflowError) -> None:
        """Wake every wait of the step with an error."""
        state = self._sessions.get(session)
        if state is not None:
            state.mail.cancel(step, reason)

    def read(self, session: str, variable: str) -> Array:
        """A copy of a variable's value."""
        return self._session(session).read(variable)

    def snapshot(self, session: str) -> dict[str, Array]:
        """Copies of all variables, as the last commit left them."""
        return self._session(session).snapshot()

    def write(self, session: str, variable: str, value: Array) -> None:
        """Set a variable.

        Raises:
            VariableError: unknown here, or of another shape or dtype.
        """
        self._session(session).write(variable, value)

    def forget(self, session: str, programs: Sequence[str], variables: Sequence[str]) -> None:
        """Let go of programs, and of variables that live elsewhere from now on; unknown ones are
        none."""
        self._session(session).forget(programs, variables)

    def usage(self, session: str) -> HostUsage:
        """What a session takes of memory now, and what it waits for; from any thread."""
        state = self._sessions.get(session)
        return state.usage() if state is not None else HostUsage()

    def measure(self) -> dict[str, Any]:
        """This machine's speeds, as calibrated before or now, and then kept here: plain data for
        the cost model."""
        from graphflow.placement.calibration.calibrate import machine_profile

        with on_all_cores():
            return machine_profile(self.devices)

    def _session(self, session: str) -> SessionState:
        state = self._sessions.get(session)
        if state is None and not session:  # an embedded one, which another thread has closed
            raise SessionError("the session is closed; open another one")
        if state is None:
            raise SessionError(f"session {session!r} is not open on worker {self.worker}")
        return state

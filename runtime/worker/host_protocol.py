"""The interface of the host that runs a session's partitions, and the factory of the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from graphflow.errors import GraphflowError
from graphflow.runtime.transport.tensor_mailbox import TransferObserver
from graphflow.runtime.wire.graph_limits import GraphLimits
from graphflow.runtime.wire.messages import Array
from graphflow.runtime.wire.step_values import Computed, HostUsage, Key, TensorParcel
from graphflow.runtime.worker.link_probe import DriveUntil


class HostProtocol(Protocol):
    """The interface of `DeviceHost` that a session needs. Tests put other hosts in its place.

    `cancel` and `deliver` come from other threads, and may come before the step's `compute`. They
    also come from a thread of the host, if that thread waits in the callback of `connect_mail`.
    """

    def open(self, session: str) -> None: ...
    def close(self, session: str) -> None: ...
    def load(self, session: str, program: str, header: bytes, buffers: list[Array]) -> None: ...
    def prepare(self, session: str, program: str, bindings: dict[str, int]) -> None: ...
    def compute(
        self,
        session: str,
        program: str,
        step: int,
        bindings: dict[str, int],
        feeds: dict[str, Array],
        trace: bool,
        deadline: float,
    ) -> Computed: ...
    def commit(self, session: str, step: int) -> None: ...
    def abort(self, session: str, step: int) -> None: ...
    def deliver(self, session: str, step: int, edge: Key, array: Array) -> None: ...
    def connect_mail(
        self,
        session: str,
        attend: DriveUntil,
        wake: Callable[[], None],
        carried: TransferObserver,
        keep: Callable[[Array], Array | None],
    ) -> None: ...
    def cancel(self, session: str, step: int, reason: GraphflowError) -> None: ...
    def read(self, session: str, variable: str) -> Array: ...
    def snapshot(self, session: str) -> dict[str, Array]: ...
    def write(self, session: str, variable: str, value: Array) -> None: ...
    def forget(self, session: str, programs: Sequence[str], variables: Sequence[str]) -> None: ...
    def adopt(self, session: str, moved: dict[str, str], copied: dict[str, str]) -> None: ...
    def usage(self, session: str) -> HostUsage: ...
    def measure(self) -> dict[str, Any]: ...
    def probe_speed(self) -> dict[str, Any]: ...


HostFactory = Callable[
    [int, Sequence[str], int | None, Callable[[TensorParcel], None]], HostProtocol
]


def default_factory(
    worker: int,
    devices: Sequence[str],
    threads: int | None,
    outbox: Callable[[TensorParcel], None],
    *,
    limits: GraphLimits | None = None,
) -> HostProtocol:
    """Return a `DeviceHost`, whose libraries load with the first session."""
    from graphflow.runtime.host.host import DeviceHost

    host: HostProtocol = DeviceHost(worker, devices, threads, outbox, limits, alone=True)
    return host

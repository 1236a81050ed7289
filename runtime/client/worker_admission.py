"""Workers that join a session which is open on others, and workers that leave it for good."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from graphflow.errors import ClusterError, SessionError
from graphflow.runtime.checkpoint.store import CheckpointStore
from graphflow.runtime.client.fast_path_loop import FastPathLoop
from graphflow.runtime.client.handshake import LEASE, Rendezvous
from graphflow.runtime.client.worker_membership import (
    POLL_SECONDS,
    REOPEN_SECONDS,
    WorkerMembership,
)
from graphflow.runtime.host.host_interface import LEFT
from graphflow.runtime.protocol.coordinator_events import AddWorker, WorkerGone
from graphflow.runtime.protocol.worker import MAX_LEASE
from graphflow.runtime.security.keys import WORKER, Keyring

_GREET_SECONDS = 1.0  # for a worker that is to join to answer, before it is asked again


class WorkerAdmission(WorkerMembership):
    """The workers of a session, which may join and leave while it is open.

    Args:
        store, ops, dead_after, trial: see `WorkerMembership`.
    """

    def __init__(
        self, store: CheckpointStore | None, *, ops: Sequence[str], dead_after: float, trial: bool
    ) -> None:
        super().__init__(store, ops=ops, dead_after=dead_after, trial=trial)
        self._admission = threading.RLock()  # two threads may let workers join

    @property
    def starts_workers(self) -> bool:
        """True if the session starts its workers itself, and so can replace them at once."""
        return self._local is not None

    def replace(self, lost: int, gives_up: Callable[[], bool]) -> int:
        """Let a new process join in place of a lost worker, and return its number.

        Steps may run meanwhile, on other threads. A worker of another machine is waited for at the
        address of the lost one.

        Args:
            gives_up: is asked now and then whether to wait no longer.

        Raises:
            GraphflowError: no process started or answered, or it cannot take part.
        """
        local = self._local
        if local is not None:
            until = time.monotonic() + REOPEN_SECONDS
            return self._admit(lambda: local.replace(lost, until), "", (), gives_up)
        address = self._addresses[lost]
        return self._admit(lambda: address, self._keys[lost], (), gives_up)

    def join(self, address: str | None, key: str | None, devices: Sequence[str]) -> int:
        """Let one more process join the session, and return its number.

        Args:
            address: where it listens; None to start it on this machine.
            key: its public key, or the key's name.
            devices: the devices that it must have, such as "cpu:0".

        Raises:
            GraphflowError: no process started or answered, or it cannot take part.
        """
        until, local = time.monotonic() + REOPEN_SECONDS, self._local
        public = Keyring().key_of(key, WORKER) if key is not None else ""

        def find_address() -> str:
            return local.start(until) if address is None and local is not None else address or ""

        number = self._admit(find_address, public, devices, lambda: time.monotonic() > until)
        self._cluster_size = number + 1
        return number

    def dismiss(self, worker: int) -> None:
        """Leave a worker for good, and end its process if the session has started it."""
        is_ending = worker in self.draining_workers()
        self.leave([worker], LEFT)
        if self._local is not None and not is_ending:
            self._local.end(worker)

    def _admit(
        self,
        find_address: Callable[[], str],
        key: str,
        devices: Sequence[str],
        gives_up: Callable[[], bool],
    ) -> int:
        """Let a process take part in the session, and return its number.

        Args:
            find_address: returns its address; may start it.
            devices: the devices that it must have.
            gives_up: is asked after each second without an answer whether to wait no longer.
        """
        # Started processes have the order of workers' numbers, and need not be waited for long.
        with self._admission if self._local is not None else nullcontext():
            address = find_address()
            while True:
                number = self._try_admit(address, key, devices, gives_up)
                if number is not None:
                    return number

    def _try_admit(
        self, address: str, key: str, devices: Sequence[str], gives_up: Callable[[], bool]
    ) -> int | None:
        """Let a process take part in the session, and return its number; None if another one with a
        higher number was quicker. Workers join in the order of their numbers."""
        loop = self._require_loop()
        with self._admission:
            number = self._connect_to(address, key, loop)
        count = number + 1
        rendezvous = Rendezvous(
            self.session, self._addresses[:count], self._keys[:count], loop, self._requests,
            self._ask,
        )  # fmt: skip
        try:
            while (welcome := rendezvous.wait_answer(number, _GREET_SECONDS)) is None:
                if gives_up():
                    raise SessionError(f"worker {number} at {address} did not answer")
            if lacking := [name for name in devices if name not in welcome.devices]:
                raise ClusterError(
                    f"worker {number} at {address} has {', '.join(welcome.devices)}, but not "
                    f"{', '.join(lacking)}; start it with `graphflow worker --devices "
                    f"{','.join(devices)}`"
                )
            with self._admission:
                if number < self._last_joined:
                    loop.post(WorkerGone(number, "another one joined first", ended=False))
                    return None
                lease = MAX_LEASE if self._local is not None else LEASE
                until, waiting = time.monotonic() + REOPEN_SECONDS, self._waiting - {number}
                absent = self.lost_workers() | waiting
                rendezvous.add(number, absent, until, self._ops, self._trial, lease)
                self._waiting, self._last_joined = waiting, number
        except BaseException as error:
            loop.post(WorkerGone(number, f"it could not join: {error}", ended=False))
            raise
        return number

    def _connect_to(self, address: str, key: str, loop: FastPathLoop) -> int:
        """Open the connection to one more worker, and return its number.

        Raises:
            SessionError: the connection cannot be opened.
        """
        until, number = time.monotonic() + REOPEN_SECONDS, len(self._addresses)
        loop.post(AddWorker(address, key))
        while len(self._addresses) == number:
            if time.monotonic() > until or loop is not self._loop:
                raise SessionError(f"worker {number} at {address} could not be connected to")
            time.sleep(POLL_SECONDS)
        self._keys.append(key)
        self._waiting.add(number)
        return number


__all__ = ["WorkerAdmission"]

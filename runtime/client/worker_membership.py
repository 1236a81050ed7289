"""Membership: the workers that take part in a session, from its start to its end.

Workers are started or joined, left when they are to end, and joined anew after losses.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from graphflow.base.process.interrupts import defer_signals, is_interrupt
from graphflow.base.progress import show_wait
from graphflow.errors import (
    ClusterError,
    GraphflowError,
    RendezvousTimeout,
    SessionError,
    WorkerLost,
)
from graphflow.runtime.checkpoint.store import CheckpointStore
from graphflow.runtime.client.fast_path_loop import FastPathLoop
from graphflow.runtime.client.handshake import Rendezvous, find_answering, load_keys
from graphflow.runtime.client.io_loop import SLACK
from graphflow.runtime.client.session_activity import SessionActivity
from graphflow.runtime.client.worker_states import ask_workers
from graphflow.runtime.host.host_interface import ASKED_TO_END
from graphflow.runtime.host.worker_state import WorkerState
from graphflow.runtime.launch.launched_workers import with_contacts
from graphflow.runtime.launch.launcher import Launcher
from graphflow.runtime.launch.local import LocalWorkers
from graphflow.runtime.protocol.coordinator_events import (
    BeginOperation,
    CancelSteps,
    Order,
    Replies,
    WorkerGone,
)
from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.wire.messages import Close

if TYPE_CHECKING:
    from graphflow.placement.clusters.cluster import Cluster

_MAX_DEADLINE = 1e9  # seconds for workers to start; clocks and queues overflow at ten times as many
_CLOSE_SECONDS = 1.0  # for the workers to confirm that the session is closed
POLL_SECONDS = 0.001
REOPEN_SECONDS = 15.0  # for running workers to begin a session anew
_STARTS = 3  # attempts to start local workers, if one is ended before the session is open
_MEET_SECONDS = 5.0  # for running workers to reach each other

_log = Log("graphflow.coordinator")


class WorkerMembership:
    """The workers of a session, once `_join` has found or started them.

    Args:
        store: the session's checkpoint store, with its name, secret and epoch.
        ops: names of modules of users' ops that the workers import.
        dead_after: seconds out of reach until a worker is lost.
        trial: workers do not count what the session does.
    """

    def __init__(
        self, store: CheckpointStore | None, *, ops: Sequence[str], dead_after: float, trial: bool
    ) -> None:
        self.session = store.session if store is not None else secrets.token_hex(16)
        self.token = store.token if store is not None else secrets.token_hex(16)
        self._store = store
        self._dead_after = dead_after
        self._activity = SessionActivity(self.session)
        self.meters = self._activity.meters
        self._requests = itertools.count(1)
        self._ops = list(ops)
        self._trial = trial
        self._draining_callback: Callable[[], None] | None = None
        self._suspects: set[int] = set()  # workers lost in this epoch
        self._waiting: set[int] = set()  # workers that are to join, and do not take part yet
        self._last_joined = 0
        # Workers to leave out, so that the others reach each other.
        self._unreachable: set[int] = set()
        self._local: Launcher | None = None
        self._loop: FastPathLoop | None = None

    # Start, and start anew -----------------------------------------------------------------------

    def _join(self, cluster: Cluster, deadline: float, host: str | None) -> None:
        """Join the workers at the cluster's addresses, or start local ones, in `deadline`
        seconds."""
        deadline = min(deadline, _MAX_DEADLINE)
        until = time.monotonic() + deadline
        epoch = self._store.epoch if self._store is not None else 1
        for left in reversed(range(_STARTS)):
            try:
                self._local = _launch_local(cluster, deadline, host, self._ops, self._store)
                self._connect(cluster, until, epoch)
                return
            except BaseException as error:
                if is_interrupt(error) and self._local is None:
                    # Otherwise workers elsewhere would wait for their lease to end.
                    with defer_signals():
                        self._close_on(range(len(cluster.workers)))
                self._abandon()
                if not (left and isinstance(error, WorkerLost) and cluster.kind == "local"):
                    raise
            deadline = max(0.0, until - time.monotonic())

    def _connect(
        self, cluster: Cluster, until: float, epoch: int, meeting: float = math.inf
    ) -> None:
        """Begin the session on all workers of a cluster.

        Args:
            meeting: seconds for the workers to reach each other.
        """
        self._addresses = (
            self._local.addresses
            if self._local
            else [worker.address or "" for worker in cluster.workers]
        )
        self._cluster_size = len(cluster.workers)
        self._waiting, self._last_joined = set(), self._cluster_size - 1
        self._keys, pair, ring = load_keys(cluster, len(self._addresses))
        self._pair, self._is_insecure = pair, cluster.insecure
        with defer_signals():  # an interrupt could leave its thread running after the sockets close
            self._loop = FastPathLoop(
                self.session, self._addresses, insecure=cluster.insecure, local=self._local,
                pair=pair, ring=ring, keys=self._keys, activity=self._activity,
                epoch=epoch, token=self.token, dead_after=self._dead_after,
            )  # fmt: skip
            self._loop.on_draining = self._draining_callback
            self._finalizer = weakref.finalize(
                self, _shut_down, self._loop, self._local, os.getpid()
            )
        rendezvous = Rendezvous(
            self.session, self._addresses, self._keys, self._loop, self._requests, self._ask
        )
        self._unreachable = rendezvous.unreachable
        with show_wait(rendezvous.describe_waiting, rendezvous.log_waiting):
            rendezvous.run(cluster, until, meeting, self._ops, self._trial)
        _log.tell(
            "cluster.ready", session=self.session, workers=self._addresses,
            seconds=time.monotonic() - self._activity.opened,
        )  # fmt: skip

    def reopen(self, cluster: Cluster, epoch: int, patience: Callable[[], float]) -> Cluster:
        """Begin the session anew, at a higher epoch.

        Started processes that have ended are started again. Other workers have some seconds to come
        back; then the session goes on without them.

        Args:
            patience: returns for how many seconds to wait; called again while workers are missing.

        Raises:
            WorkerLost: no worker is there, or one was lost meanwhile.
        """
        leaving: set[int] = set()
        if self._loop is not None:
            leaving = self.draining_workers() | self._unreachable
            self._suspects |= {*self._loop.loss_reasons()}
            self._close_on(leaving - {*self._loop.loss_reasons()})
            self._finalizer.detach()
            self._loop.stop()
            self._loop = None
        try:
            if self._local is not None:
                self._local.end_after(len(cluster.workers))
                self._local.restart_ended(
                    self._suspects, leaving, min(cluster.deadline, _MAX_DEADLINE)
                )
            else:
                ending = {self._addresses[worker] for worker in leaving}
                if cluster.launched is not None:
                    lost = {self._addresses[worker] for worker in self._suspects}
                    contacts = cluster.launched.relocate(lost, patience)
                    cluster = with_contacts(cluster, contacts)
                cluster = find_answering(cluster, patience, ending, self.session, self._dead_after)
            until, self._unreachable = time.monotonic() + REOPEN_SECONDS, set()
            self._connect(cluster, until, epoch, max(patience(), _MEET_SECONDS))
        except (RendezvousTimeout, SessionError, ClusterError) as error:
            if self._loop is not None:  # a frozen worker may not be lost yet
                self._suspects |= {*self._loop.unwelcomed_workers()}
            raise WorkerLost(f"a worker was lost while the session began anew: {error}") from error
        self._suspects.clear()
        return cluster

    def draining_workers(self) -> set[int]:
        """Return the workers that were asked to end, and wait for the session to leave."""
        return (
            self._loop.draining - {*self._loop.loss_reasons()} if self._loop is not None else set()
        )

    def on_draining(self, callback: Callable[[], None]) -> None:
        """Register a method to call, on another thread, when a worker is asked to end.

        The registration does not keep the method's object alive.
        """
        method = weakref.WeakMethod(callback)

        def tell() -> None:
            there = method()
            if there is not None:
                there()

        self._draining_callback = tell
        if self._loop is not None:
            self._loop.on_draining = tell

    def leave_draining(self) -> None:
        """Leave the workers that were asked to end. They count as lost, with their state."""
        self.leave(self.draining_workers(), ASKED_TO_END)

    def lost_workers(self) -> set[int]:
        """Return the workers that were lost in this epoch."""
        return set(self._loop.loss_reasons()) if self._loop is not None else set()

    def leave(self, workers: Collection[int], reason: str) -> None:
        """Leave some workers, which count as lost from then on, with their state."""
        if not workers:
            return
        self._close_on(workers)
        loop = self._require_loop()
        for worker in workers:
            loop.post(WorkerGone(worker, reason, ended=False))
        until = time.monotonic() + _CLOSE_SECONDS
        while not self.lost_workers().issuperset(workers) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def _close_on(self, workers: Collection[int]) -> None:
        """Close the session on some workers, so that they may end."""
        request = next(self._requests)
        with suppress(GraphflowError):
            self._ask(request, {w: Order(Close(request)) for w in workers}, _CLOSE_SECONDS)

    # Orders, and the end -------------------------------------------------------------------------

    def _ask(
        self, request: int, orders: Mapping[int, Order], seconds: float, step: int = 0
    ) -> Replies:
        try:
            return self._require_loop().ask(
                BeginOperation(request, orders, seconds, step), seconds + SLACK
            )
        except BaseException as error:
            if is_interrupt(error):
                self.cancel()
            raise

    def _require_loop(self) -> FastPathLoop:
        """Return the I/O loop.

        Raises:
            SessionError: the session is closed.
        """
        if self._loop is None:
            raise SessionError("the session is closed")
        return self._loop

    def _abandon(self) -> None:
        with defer_signals():  # an interrupt would leave the rest running
            loop, self._loop = self._loop, None
            _shut_down(loop, self._local, os.getpid())
            if loop is not None:
                self._finalizer.detach()

    def cancel(self) -> None:
        """Abort the step that runs, if any; for other threads.

        The step's caller gets SessionError, unless the step was decided already. Ctrl-C in `step`
        does the same.
        """
        if self._loop is not None:
            self._loop.post(CancelSteps())

    def close(self) -> None:
        """Close the session on its workers, and end those that were started. Idempotent."""
        if self._loop is None:
            self._abandon()  # a failed recovery may leave started processes
            return
        request = next(self._requests)
        orders = {worker: Order(Close(request)) for worker in self._living_workers()}
        try:
            if orders:
                self._ask(request, orders, _CLOSE_SECONDS)
        except GraphflowError as error:
            _log.tell("session.unconfirmed", session=self.session, reason=str(error))
        finally:
            self._abandon()
            self._activity.on_session_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def worker_states(
        self, devices: Mapping[int, Sequence[str]], ask: bool = True
    ) -> tuple[WorkerState, ...]:
        """Return the state of each worker.

        Args:
            devices: by worker.
            ask: ask those that are not lost for their process and memory.
        """
        return ask_workers(
            self._addresses, devices, lost=self._require_loop().loss_reasons(), keys=self._keys,
            pair=self._pair, insecure=self._is_insecure, ask=ask,
        )  # fmt: skip

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that were started for this session."""
        return self._local.pids if self._local else []

    def _living_workers(self) -> list[int]:
        lost = self._loop.loss_reasons() if self._loop else {}
        return [worker for worker in range(len(self._addresses)) if worker not in lost]


def _shut_down(loop: FastPathLoop | None, local: Launcher | None, owner: int) -> None:
    if os.getpid() != owner:  # in a fork: threads, sockets and workers belong to the parent
        return
    if loop is not None:
        loop.stop()
    if local is not None:
        local.stop()


def _launch_local(
    cluster: Cluster,
    deadline: float,
    host: str | None,
    ops: Sequence[str],
    store: CheckpointStore | None,
) -> Launcher | None:
    if cluster.kind != "local":
        return None
    devices = cluster.workers[0].devices
    threads = next((device.threads for device in devices if device.threads is not None), None)
    names = [device.name.rpartition("/")[2] for device in devices]
    return LocalWorkers(
        len(cluster.workers), devices=names, threads=threads, deadline=deadline, host=host,
        ops=ops, checkpoints=str(store.root) if store is not None else None,
    )  # fmt: skip

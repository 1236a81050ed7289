"""Membership: which workers take part in a session, from its start to its end.

They are started or joined, asked, left when they are to end, and joined anew after losses.
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

from graphflow.base.interrupts import defer_signals, is_interrupt
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

_MAX_DEADLINE = 1e9  # seconds for workers to come up; clocks and queues end at ten times as many
_CLOSE_SECONDS = 1.0  # for the workers to confirm that the session is closed
_REOPEN_SECONDS = 15.0  # for workers that are there to begin a session anew
_STARTS = 3  # of local workers, where something ends one before the session is open
_MEET_SECONDS = 5.0  # that workers which are there may take to reach each other

_log = Log("graphflow.coordinator")


class WorkerMembership:
    """The workers of a session, once `_join` has found or started them.

    Args:
        store: where the session's checkpoints are, with its name, its secret and its epoch.
        ops: names of the modules of users' ops that the workers import.
        dead_after: seconds out of reach after which a worker is lost.
        trial: whether workers do not count what the session does.
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
        self._suspects: set[int] = set()  # workers that were lost since the session last began
        self._unreachable: set[int] = (
            set()
        )  # workers without which the others would reach each other
        self._local: Launcher | None = None
        self._loop: FastPathLoop | None = None

    # Start, and start anew -----------------------------------------------------------------------

    def _join(self, cluster: Cluster, deadline: float, host: str | None) -> None:
        """Joins the workers at the cluster's addresses, or starts local ones, within some
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
                    with defer_signals():  # else other machines' workers wait for a lease to end
                        self._close_on(range(len(cluster.workers)))
                self._abandon()
                if not (left and isinstance(error, WorkerLost) and cluster.kind == "local"):
                    raise
            deadline = max(0.0, until - time.monotonic())

    def _connect(
        self, cluster: Cluster, until: float, epoch: int, meeting: float = math.inf
    ) -> None:
        """Begins the session on all workers of a cluster, who have some seconds for `meeting` each
        other."""
        self._addresses = (
            self._local.addresses
            if self._local
            else [worker.address or "" for worker in cluster.workers]
        )
        self._keys, pair = load_keys(cluster, len(self._addresses))
        with defer_signals():  # else its thread might be left running while the sockets are closed
            self._loop = FastPathLoop(
                self.session, self._addresses, insecure=cluster.insecure, local=self._local,
                pair=pair, keys=self._keys, activity=self._activity,
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
        """Begins the session anew, at a higher epoch. Own processes that have ended are started
        again; other workers have some seconds to come back, and then it goes on without them.

        Args:
            patience: how many seconds, asked again while they are waited for.

        Raises:
            WorkerLost: none is there, or one was lost meanwhile.
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
                self._local.restart_ended(
                    self._suspects, leaving, min(cluster.deadline, _MAX_DEADLINE)
                )
            else:
                ending = {self._addresses[worker] for worker in leaving}
                cluster = find_answering(cluster, patience, ending, self.session, self._dead_after)
            until, self._unreachable = time.monotonic() + _REOPEN_SECONDS, set()
            self._connect(cluster, until, epoch, max(patience(), _MEET_SECONDS))
        except (RendezvousTimeout, SessionError, ClusterError) as error:
            if self._loop is not None:  # one that is frozen, but was not missed yet
                self._suspects |= {*self._loop.strangers()}
            raise WorkerLost(f"a worker was lost while the session began anew: {error}") from error
        self._suspects.clear()
        return cluster

    def draining_workers(self) -> set[int]:
        """The workers that were asked to end, and wait for the session to go elsewhere."""
        return (
            self._loop.draining - {*self._loop.loss_reasons()} if self._loop is not None else set()
        )

    def on_draining(self, told: Callable[[], None]) -> None:
        """Has a method called, on another thread, when a worker is asked to end; it does not keep
        its object alive."""
        method = weakref.WeakMethod(told)

        def tell() -> None:
            there = method()
            if there is not None:
                there()

        self._draining_callback = tell
        if self._loop is not None:
            self._loop.on_draining = tell

    def leave_draining(self) -> None:
        """Leaves the workers that were asked to end, with what they hold: they are lost."""
        leaving = self.draining_workers()
        self._close_on(leaving)
        for worker in leaving:
            if self._loop is not None:
                self._loop.post(WorkerGone(worker, "it was asked to end", ended=False))

    def _close_on(self, workers: Collection[int]) -> None:
        """Has workers forget the session, so that they may end."""
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
        """The way to the workers.

        Raises:
            SessionError: the session is closed.
        """
        if self._loop is None:
            raise SessionError("the session is closed")
        return self._loop

    def _abandon(self) -> None:
        with defer_signals():  # else nobody would end the rest
            loop, self._loop = self._loop, None
            _shut_down(loop, self._local, os.getpid())
            if loop is not None:
                self._finalizer.detach()

    def cancel(self) -> None:
        """Aborts the step that runs, if any: its caller gets SessionError, unless it was decided
        already. For other threads; Ctrl-C in `step` does the same."""
        if self._loop is not None:
            self._loop.post(CancelSteps())

    def close(self) -> None:
        """Closes the session on its workers, and ends those that were started. Idempotent."""
        if self._loop is None:
            self._abandon()  # of a recovery that failed, own processes may be left
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

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes that were started for this session."""
        return self._local.pids if self._local else []

    def _living_workers(self) -> list[int]:
        lost = self._loop.loss_reasons() if self._loop else {}
        return [worker for worker in range(len(self._addresses)) if worker not in lost]


def _shut_down(loop: FastPathLoop | None, local: Launcher | None, owner: int) -> None:
    if os.getpid() != owner:  # a fork that ends: threads, sockets and workers are its parent's
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

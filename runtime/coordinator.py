"""The hosts of a cluster as a session sees them: orders for workers, and what they come to.

How orders travel is the loop's business, see `loop`.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphflow.errors import (
    ClusterError,
    GraphflowError,
    RendezvousTimeout,
    SessionError,
    WorkerLost,
)
from graphflow.progress import telling, waiting
from graphflow.runtime.activity import SessionActivity
from graphflow.runtime.checkpoint.manifest import Shard
from graphflow.runtime.checkpoint.remote import shard_name
from graphflow.runtime.checkpoint.store import Store
from graphflow.runtime.foreign import check_modules
from graphflow.runtime.hosts import NOBODY, Ready, Saving, Written
from graphflow.runtime.launch.local import LocalWorkers
from graphflow.runtime.logs import Log
from graphflow.runtime.loop import SLACK, Loop, Pending
from graphflow.runtime.messages import (
    Array,
    Chunk,
    Close,
    Compute,
    Done,
    Forget,
    Hello,
    Load,
    Measure,
    Measured,
    Meet,
    Met,
    Open,
    Prepare,
    Probe,
    Probed,
    Read,
    Save,
    Saved,
    Small,
    Span,
    StepResult,
    Welcome,
    Write,
    changed,
)
from graphflow.runtime.protocol.coordinator import DEAD_AFTER, GRACE
from graphflow.runtime.protocol.orders import (
    Begin,
    Cancel,
    Gone,
    Order,
    Release,
    Replies,
)
from graphflow.runtime.protocol.stream import Version
from graphflow.runtime.security.keys import COORDINATOR, WORKER, KeyPair, Keyring
from graphflow.runtime.session_state import DRAWS, FAILED
from graphflow.runtime.wire import SMALL_TOGETHER, small

if TYPE_CHECKING:
    from graphflow.placement.cluster import Cluster
    from graphflow.runtime.partition import Partition

LEASE = 30.0  # seconds without a ping after which a worker forgets the session
_CLOSE_SECONDS = 1.0  # for the workers to confirm that the session is closed
_REQUEST_SECONDS = 300.0  # for loading, reading, writing and measuring
_SAVE_SECONDS = 600.0  # for the shards of a checkpoint
_REOPEN_SECONDS = 15.0  # for workers that are there to begin a session anew
_ANSWER_SECONDS = 2.0  # that a worker which is there may take to say so
_MEET_SECONDS = 5.0  # that workers which are there may take to reach each other

_LEAVING = frozenset({"assign", "collective_start", "host_call", "print"})

_log = Log("graphflow.coordinator")


@dataclass(frozen=True)
class _Program:
    """What workers have of a program: the names of their feeds, and those of all fetches."""

    workers: Sequence[int]
    feeds: Mapping[int, Sequence[str]] = field(default_factory=dict)
    fetches: Sequence[tuple[int, str]] = ()
    free: bool = False  # a step of it changes nothing that another one reads, or that is seen


@dataclass(frozen=True)
class Begun:
    """A step that was begun and is not decided."""

    step: int
    deadline: float
    request: int
    pending: Pending


class RemoteHosts:
    """The workers of a cluster, opened for one session.

    Methods may be called from any thread; steps come one at a time.
    """

    can_be_lost = True

    begins = True

    def __init__(
        self,
        cluster: Cluster,
        *,
        deadline: float,
        host: str | None = None,
        ops: Sequence[str] = (),
        dead_after: float = DEAD_AFTER,
        store: Store | None = None,
        trial: bool = False,
    ) -> None:
        """Joins the workers at the cluster's addresses, or starts local ones.

        Args:
            deadline: seconds until all workers are ready.
            host: `path.py:Name`, another host in started workers, for tests.
            ops: names of the modules of users' ops that the workers import.
            dead_after: seconds out of reach after which a worker is lost.
            store: where the session's checkpoints are, with its name, its secret and its epoch.
            trial: whether workers do not count what it does.

        Raises:
            ModuleNotAllowed: a worker was not started with one of `ops` allowed.
            RendezvousTimeout: a worker did not start, answer, or reach another in time.
            VersionMismatch: a worker runs other code, or another Python.
            ClusterError: a worker does not have the devices that the cluster says.
            TransportError: an address cannot be used.
        """
        until = time.monotonic() + deadline
        self.session = store.session if store is not None else secrets.token_hex(16)
        self.token = store.token if store is not None else secrets.token_hex(16)
        self._dead_after = dead_after
        self._activity = SessionActivity(self.session)
        self.meters = self._activity.meters
        self._requests = itertools.count(1)
        self._programs: dict[str, _Program] = {}
        self._last_step = -1
        self._failed = 0  # steps
        self._stepping = threading.Lock()
        self._ops = list(ops)
        self._trial = trial
        self._told_draining: Callable[[], None] | None = None
        self._suspects: set[int] = set()  # workers that were lost since the session last began
        self._apart: set[int] = set()  # workers without which the others would reach each other
        self._local = _launch(cluster, deadline, host, ops, store)
        self._loop: Loop | None = None
        try:
            self._connect(cluster, until, store.epoch if store is not None else 1)
        except BaseException:
            self._abandon()
            raise

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
        self._keys, pair = _keys(cluster, len(self._addresses))
        self._loop = Loop(
            self.session, self._addresses, insecure=cluster.insecure, local=self._local,
            pair=pair, keys=self._keys, activity=self._activity,
            epoch=epoch, token=self.token, dead_after=self._dead_after,
        )  # fmt: skip
        self._loop.on_draining = self._told_draining
        self._end = weakref.finalize(self, _shut, self._loop, self._local, os.getpid())
        with waiting(self._missing, self._tell_missing):
            self._meet(cluster, until, meeting)
        _log.tell(
            "cluster.ready", session=self.session, workers=self._addresses,
            seconds=time.monotonic() - self._activity.opened,
        )  # fmt: skip

    # Programs and steps --------------------------------------------------------------------------

    def add(self, program: str, partitions: Mapping[int, Sequence[Partition]]) -> None:
        """Gives each worker its partitions of a program; raises as `load` does.

        Raises:
            ModuleNotAllowed: an op or a host function is of a module that is not among `ops`.
        """
        from graphflow.runtime.codec import encode as encode_partitions

        check_modules(partitions, self._ops)
        self.load(program, {w: encode_partitions(mine) for w, mine in partitions.items()})
        self._programs[program] = _Program(
            list(partitions),
            {w: [name for part in mine for name in part.feeds] for w, mine in partitions.items()},
            [(w, name) for w, mine in partitions.items() for part in mine for name in part.fetches],
            not any(_is_seen(part) for mine in partitions.values() for part in mine),
        )

    def load(self, program: str, partitions: Mapping[int, tuple[bytes, list[Array]]]) -> None:
        """Gives each worker its partition of a program: header and constants.

        Raises:
            GraphLimitError: a worker refuses the partition.
            WorkerLost: a worker was lost before or meanwhile.
        """
        orders = {}
        request = next(self._requests)
        for worker, (header, buffers) in partitions.items():
            parts = [np.frombuffer(header, np.uint8), *buffers]
            arrays = [("part", index, part) for index, part in enumerate(parts)]
            orders[worker] = Order(Load(request, program, len(parts)), arrays)
        started = time.monotonic()
        with telling(f"loading a program on {len(orders)} workers"):
            self._ask(request, orders, _REQUEST_SECONDS)
        self._programs[program] = _Program(list(partitions))
        _log.tell(
            "program.loaded", session=self.session, program=program, workers=list(partitions),
            bytes=sum(array.nbytes for o in orders.values() for _, _, array in o.arrays),
            seconds=time.monotonic() - started,
        )  # fmt: skip

    def step(
        self,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[int, Mapping[str, Array]],
        trace: bool,
        deadline: float,
    ) -> StepResult:
        """Runs one step on the workers of a program; returns when it is decided to commit.

        Args:
            step: larger than that of every step before, failed ones included.
            bindings: sizes of the program's symbolic dims.
            feeds: by worker and name.
            trace: whether spans are measured.
            deadline: seconds.

        Raises:
            OpError, CheckError: an op failed; nothing has changed.
            StepTimeout: the deadline passed; nothing has changed.
            WorkerLost: a worker died, froze or cannot be reached; its state is gone.
            SessionError: cancelled, closed, an unknown program, or a step that is not new.
        """
        with self._stepping:
            if trace and self._loop is not None:
                self._loop.meet_clocks()
            loaded = self._loaded(program)
            order = Compute(0, program, dict(bindings), [], trace, deadline)
            return _result(self._step(loaded, order, step, feeds))

    def _step(
        self,
        loaded: _Program,
        order: Compute,
        step: int,
        feeds: Mapping[int, Mapping[str, Array]],
    ) -> Replies:
        """Runs a step, of which `order` says all but its request and its feeds; by one thread at a
        time."""
        request, orders = self._orders(loaded, order, step, feeds)
        began = time.monotonic()
        try:
            replies = self._ask(request, orders, order.deadline, step)
        except BaseException as error:
            self._failed += 1
            self._activity.aborted(step, time.monotonic() - began, error)
            raise
        self._activity.committed(step, time.monotonic() - began, replies.nbytes)
        return replies

    def begin(
        self,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[int, Mapping[str, Array]],
        deadline: float,
        follows: int,
    ) -> Begun:
        """Begins a step that is not decided before `finish`; its feeds travel at once, and it
        computes as soon as the step that it `follows` has committed (-1: now).

        Raises:
            SessionError: closed, an unknown program, or a step that is not new.
        """
        with self._stepping:
            if self._loop is None:
                raise SessionError("the session is closed")
            loaded = self._loaded(program)
            order = Compute(
                0, program, dict(bindings), [], False, deadline, follows=follows, free=loaded.free
            )
            request, orders = self._orders(loaded, order, step, feeds)
            begin = Begin(request, orders, deadline, step, follows, held=True)
            return Begun(step, deadline, request, self._loop.submit(begin))

    def finish(self, begun: Begun) -> StepResult:
        """Decides a step that was begun, the first of those that are not decided; as `step`."""
        with self._stepping:
            if self._loop is None:
                raise SessionError("the session is closed")
            began = time.monotonic()
            self._loop.add(Release(begun.request))
            try:
                # Its own deadline runs from when it may compute.
                seconds = 2 * begun.deadline + SLACK
                replies = self._loop.finish(begun.request, begun.pending, seconds)
            except BaseException as error:
                self._failed += 1
                if isinstance(error, KeyboardInterrupt):
                    self.cancel()
                self._activity.aborted(begun.step, time.monotonic() - began, error)
                raise
            self._activity.committed(begun.step, time.monotonic() - began, replies.nbytes)
            return _result(replies)

    def undo(self, begun: Sequence[Begun]) -> None:
        """Ends steps that were begun and are not decided: nothing of them happens."""
        self._failed += 1
        self.cancel()
        for each in begun:
            with suppress(GraphflowError):
                if self._loop is not None:
                    self._loop.finish(each.request, each.pending, SLACK)

    def _loaded(self, program: str) -> _Program:
        loaded = self._programs.get(program)
        if loaded is None:
            raise SessionError(f"program {program!r} is not loaded")
        return loaded

    def _orders(
        self,
        loaded: _Program,
        order: Compute,
        step: int,
        feeds: Mapping[int, Mapping[str, Array]],
    ) -> tuple[int, dict[int, Order]]:
        """What the workers of a program are told of a step, under a new request."""
        if step <= self._last_step:
            raise SessionError(f"step {step} is not after step {self._last_step}")
        self._last_step = step
        if self._failed:
            order.bindings[FAILED] = self._failed
        request = next(self._requests)
        orders = {}
        for worker in loaded.workers:
            given = feeds.get(worker)
            if given:
                orders[worker] = self._fed(changed(order, request=request), worker, given)
            else:
                orders[worker] = Order(changed(order, request=request))
        return request, orders

    def _fed(self, order: Compute, worker: int, feeds: Mapping[str, Array]) -> Order:
        """The order with its feeds: in it, in shared memory, or before it."""
        inside: list[Small] = []
        before: list[str] = []
        arrays = []
        room, nbytes = SMALL_TOGETHER, 0
        for name, array in feeds.items():
            nbytes += array.nbytes
            found = small(name, array) if room > 0 else None
            if found is not None:
                inside.append(found)
                room -= len(found)
            else:
                before.append(name)
                sent: Array | Chunk = array
                if self._loop is not None:
                    sent = self._loop.lend(worker, "feed", order.request, name, array)
                arrays.append(("feed", name, sent))
        self._activity.fed(nbytes)
        return Order(changed(order, feeds=before, small=inside), arrays)

    def cancel(self) -> None:
        """Aborts the step that runs, if any: its caller gets SessionError, unless it was decided
        already. For other threads; Ctrl-C in `step` does the same."""
        if self._loop is not None:
            self._loop.post(Cancel())

    # Variables -----------------------------------------------------------------------------------

    def read(self, worker: int, variable: str) -> Array:
        """The value of a variable after the last committed step."""
        request = next(self._requests)
        order = Order(Read(request, variable))
        replies = self._ask(request, {worker: order}, _REQUEST_SECONDS)
        return _owned(replies.arrays[worker][variable])

    def write(self, worker: int, variable: str, value: Array) -> None:
        """Sets a variable."""
        request = next(self._requests)
        order = Order(Write(request, variable), [("value", variable, np.asarray(value))])
        self._ask(request, {worker: order}, _REQUEST_SECONDS)

    def prepare(self, program: str, bindings: Mapping[str, int]) -> None:
        """Lets the workers compile a program for the sizes of coming steps.

        Raises:
            WorkerLost: a worker was lost before or meanwhile.
        """
        request = next(self._requests)
        order = Order(Prepare(request, program, dict(bindings)))
        orders = dict.fromkeys(self._programs[program].workers, order)
        self._ask(request, orders, _REQUEST_SECONDS)

    def ready(self, program: str, bindings: Mapping[str, int]) -> Ready | None:
        """Steps whose feeds are of known sizes: nothing is left to be found out about them."""
        loaded = self._programs[program]
        if not loaded.feeds:
            return None

        order = Compute(0, program, {}, [], False, math.inf)

        def run(
            step: int, draws: int, feeds: Mapping[str, Array], deadline: float
        ) -> list[Array] | None:
            if self._programs.get(program) is not loaded:
                return None
            given = {}
            for worker, names in loaded.feeds.items():
                given[worker] = {name: feeds[name] for name in names}
            told = changed(order, bindings={**bindings, DRAWS: draws}, deadline=deadline)
            with self._stepping:
                arrays = self._step(loaded, told, step, given).arrays
            return [_owned(arrays[worker][name]) for worker, name in loaded.fetches]

        return run

    def forget(self, programs: Sequence[str], variables: Mapping[int, Sequence[str]]) -> None:
        """Lets go of programs, and of variables by worker: they live elsewhere from now on."""
        there: dict[int, list[str]] = {worker: [] for worker in variables}
        for name in programs:
            for worker in self._programs.pop(name, _Program(())).workers:
                there.setdefault(worker, []).append(name)
        if there:
            request = next(self._requests)
            orders = {
                worker: Order(Forget(request, names, list(variables.get(worker, ()))))
                for worker, names in there.items()
            }
            self._ask(request, orders, _REQUEST_SECONDS)

    # Checkpoints and recovery --------------------------------------------------------------------

    def save(self, root: Path, folder: str, step: int, workers: Sequence[int]) -> Saving:
        """Has workers copy their variables at once, and write or send them by and by."""
        if self._loop is None:
            raise SessionError("the session is closed")
        loop, request = self._loop, next(self._requests)
        files = {worker: shard_name(worker) for worker in workers}
        orders = {w: Order(Save(request, folder, file, step)) for w, file in files.items()}
        pending = loop.submit(Begin(request, orders, _SAVE_SECONDS))

        def wait(seconds: float) -> dict[int, Written]:
            replies = loop.finish(request, pending, seconds)
            written: dict[int, Written] = {}
            for worker, message in replies.messages.items():
                assert isinstance(message, Saved)
                arrays = {str(n): array for n, array in replies.arrays[worker].items()}
                shard = Shard(files[worker], message.sha256, message.nbytes, ())
                written[worker] = shard if message.sha256 else arrays
            return written

        return wait

    def reopen(self, cluster: Cluster, epoch: int, seconds: float) -> Cluster:
        """Begins the session anew, at a higher epoch. Own processes that have ended are started
        again; other workers have some seconds to come back, and then it goes on without them.

        Raises:
            WorkerLost: none is there, or one was lost meanwhile.
        """
        leaving: set[int] = set()
        if self._loop is not None:
            leaving = self.draining() | self._apart
            self._suspects |= {*self._loop.lost()}
            self._release(leaving - {*self._loop.lost()})
            self._end.detach()
            self._loop.stop()
            self._loop = None
        self._programs.clear()
        try:
            if self._local is not None:
                self._local.renew(self._suspects, leaving, cluster.deadline)
            else:
                ending = {self._addresses[worker] for worker in leaving}
                cluster = self._answering(cluster, seconds, ending)
            until, self._apart = time.monotonic() + _REOPEN_SECONDS, set()
            self._connect(cluster, until, epoch, max(seconds, _MEET_SECONDS))
        except (RendezvousTimeout, SessionError) as error:
            if self._loop is not None:  # one that is frozen, but was not missed yet
                self._suspects |= {*self._loop.strangers()}
            raise WorkerLost(f"a worker was lost while the session began anew: {error}") from error
        self._suspects.clear()
        return cluster

    def draining(self) -> set[int]:
        """The workers that were asked to end, and wait for the session to go elsewhere."""
        return self._loop.draining - {*self._loop.lost()} if self._loop is not None else set()

    def on_draining(self, told: Callable[[], None]) -> None:
        """Has a method called, on another thread, when a worker is asked to end; it does not keep
        its object alive."""
        method = weakref.WeakMethod(told)

        def tell() -> None:
            there = method()
            if there is not None:
                there()

        self._told_draining = tell
        if self._loop is not None:
            self._loop.on_draining = tell

    def let_go(self) -> None:
        """Leaves the workers that were asked to end, with what they hold: they are lost."""
        leaving = self.draining()
        self._release(leaving)
        for worker in leaving:
            if self._loop is not None:
                self._loop.post(Gone(worker, "it was asked to end", ended=False))

    def _release(self, workers: Collection[int]) -> None:
        """Has workers forget the session, so that they may end."""
        request = next(self._requests)
        with suppress(GraphflowError):
            self._ask(request, {w: Order(Close(request)) for w in workers}, _CLOSE_SECONDS)

    def _answering(self, cluster: Cluster, seconds: float, ending: Collection[str]) -> Cluster:
        """The workers of a cluster that answer within some seconds, without those that are about to
        end as long as there are others."""
        addresses = [worker.address or "" for worker in cluster.workers]
        keys, pair = _keys(cluster, len(addresses))
        until = time.monotonic() + max(seconds, _ANSWER_SECONDS)
        loop = Loop(
            secrets.token_hex(16), addresses, insecure=cluster.insecure, local=None, pair=pair,
            keys=keys, activity=SessionActivity(self.session), epoch=1,
            token=secrets.token_hex(16), dead_after=self._dead_after,
        )  # fmt: skip
        others = [worker for worker, address in enumerate(addresses) if address not in ending]
        if not others:
            time.sleep(min(seconds, _ANSWER_SECONDS))  # until they have ended, and perhaps are back
        try:
            asked = {}
            for worker in others or range(len(addresses)):
                hello = _hello(next(self._requests))
                begin = Begin(hello.request, {worker: Order(hello)}, _left(until))
                asked[worker] = (hello.request, loop.submit(begin))
            there = []
            for worker, (request, pending) in asked.items():
                with suppress(RendezvousTimeout, WorkerLost):
                    loop.finish(request, pending, _left(until) + SLACK)
                    there.append(worker)
        finally:
            loop.stop()
        if not there:
            raise WorkerLost(
                f"none of the workers at {', '.join(addresses)} answered within "
                f"{max(seconds, _ANSWER_SECONDS):g} s; the session goes on from its last "
                "checkpoint when it is opened again, or asked again, and they are there",
                reason=NOBODY,
            )
        return cluster.without(set(range(len(addresses))) - {*there})

    # Measuring -----------------------------------------------------------------------------------

    def measure(self) -> dict[int, dict[str, Any]]:
        """The calibration of each worker's machine, one worker after the other: those of one
        machine would slow each other down."""
        reports = {}
        for worker in range(len(self._addresses)):
            request = next(self._requests)
            replies = self._ask(request, {worker: Order(Measure(request))}, _REQUEST_SECONDS)
            message = replies.messages[worker]
            assert isinstance(message, Measured)
            reports[worker] = dict(message.report)
        return reports

    def probe_link(self, source: int, target: int, nbytes: int, repeats: int) -> float:
        """The median time in seconds that `nbytes` take from one worker to another: half of a
        round trip.

        Raises:
            StepTimeout: the target did not answer; the link is named.
        """
        request = next(self._requests)
        order = Order(Probe(request, target, nbytes, repeats, _REQUEST_SECONDS))
        replies = self._ask(request, {source: order}, _REQUEST_SECONDS + GRACE)
        message = replies.messages[source]
        assert isinstance(message, Probed)
        return message.seconds

    # Start and end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the session on its workers, and ends those that were started. Idempotent."""
        if self._loop is None:
            self._abandon()  # of a recovery that failed, own processes may be left
            return
        request = next(self._requests)
        orders = {worker: Order(Close(request)) for worker in self._living()}
        try:
            if orders:
                self._ask(request, orders, _CLOSE_SECONDS)
        except GraphflowError as error:
            _log.tell("session.unconfirmed", session=self.session, reason=str(error))
        finally:
            self._abandon()
            self._activity.ended()

    def __enter__(self) -> RemoteHosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes that were started for this session."""
        return self._local.pids if self._local else []

    def _living(self) -> list[int]:
        lost = self._loop.lost() if self._loop else {}
        return [worker for worker in range(len(self._addresses)) if worker not in lost]

    def _missing(self, seconds: float) -> str:
        """What the rendezvous waits for, for whoever watches."""
        return f"waiting for {', '.join(self._awaited())}, {seconds:.0f} s"

    def _tell_missing(self, seconds: float) -> None:
        _log.tell(
            "cluster.waiting", session=self.session, seconds=round(seconds, 1),
            workers=self._awaited(),
        )  # fmt: skip

    def _awaited(self) -> list[str]:
        missing = self._loop.awaited() if self._loop else []
        return [f"worker {each} at {self._addresses[each]}" for each in missing] or ["the workers"]

    def _meet(self, cluster: Cluster, until: float, meeting: float) -> None:
        """Versions, sessions, and the links between the workers: the readiness barrier."""
        hello = _hello(next(self._requests))
        workers = range(len(self._addresses))
        try:
            replies = self._ask(hello.request, {w: Order(hello) for w in workers}, _left(until))
        except RendezvousTimeout as error:
            raise self._refused() or self._frozen() or error from None
        for worker in workers:
            welcome = replies.messages[worker]
            assert isinstance(welcome, Welcome)
            self._check_devices(cluster, worker, welcome)
        request = next(self._requests)
        shown = self._keys if any(self._keys) else []
        orders = {
            w: Order(Open(request, w, self._addresses, LEASE, self._ops, shown, self._trial))
            for w in workers
        }
        self._ask(request, orders, _left(until))
        request, left = next(self._requests), min(_left(until), meeting)
        meet = {worker: Order(Meet(request, left)) for worker in workers}
        replies = self._ask(request, meet, left + GRACE)
        pairs = [
            (worker, other)
            for worker, message in replies.messages.items()
            if isinstance(message, Met)
            for other in message.missing
        ]
        if pairs:
            self._apart = left_out(pairs)
            raise RendezvousTimeout(self._told_apart(pairs, left))

    def _told_apart(self, pairs: Sequence[tuple[int, int]], seconds: float) -> str:
        where = self._addresses
        told = ", ".join(f"worker {b} at {where[b]} did not answer worker {a}" for a, b in pairs)
        return (
            f"the workers do not reach each other: {told} within {seconds:g} s; can these "
            "addresses be reached from there?"
        )

    def _refused(self) -> RendezvousTimeout | None:
        """What to say if workers did not answer because of keys."""
        assert self._loop is not None
        refused = self._loop.refused()
        if not refused:
            return None
        where = ", ".join(f"worker {w} at {self._addresses[w]}" for w in refused)
        return RendezvousTimeout(
            f"{where} and this process do not trust each other's keys; there, run `graphflow keys "
            "add` with the .public file of this machine's key; here, check that the cluster file "
            "has the worker's key (`graphflow keys list` shows both), and that it is not frozen"
        )

    def _frozen(self) -> RendezvousTimeout | None:
        """What to say if workers did not answer though their ports are open."""
        assert self._loop is not None
        silent = self._loop.silent()
        if not silent:
            return None
        where = ", ".join(f"worker {w} at {self._addresses[w]}" for w in silent)
        return RendezvousTimeout(
            f"{where} took the connection and said nothing: its process is frozen or overloaded, "
            "or it is no graphflow worker"
        )

    def _check_devices(self, cluster: Cluster, worker: int, welcome: Welcome) -> None:
        wanted = [device.name.rpartition("/")[2] for device in cluster.workers[worker].devices]
        missing = [name for name in wanted if name not in welcome.devices]
        if missing:
            raise ClusterError(
                f"worker {worker} at {self._addresses[worker]} has {', '.join(welcome.devices)}, "
                f"but not {', '.join(missing)} as the cluster says; start it with "
                f"`graphflow worker --devices {','.join(wanted)}`, or change the cluster"
            )

    def _ask(
        self, request: int, orders: Mapping[int, Order], seconds: float, step: int = 0
    ) -> Replies:
        if self._loop is None:
            raise SessionError("the session is closed")
        try:
            return self._loop.ask(Begin(request, orders, seconds, step), seconds + SLACK)
        except KeyboardInterrupt:
            self.cancel()
            raise

    def _abandon(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            self._end.detach()
        _shut(loop, self._local, os.getpid())


def _shut(loop: Loop | None, local: LocalWorkers | None, owner: int) -> None:
    if os.getpid() != owner:  # a fork that ends: threads, sockets and workers are its parent's
        return
    if loop is not None:
        loop.stop()
    if local is not None:
        local.stop()


def _launch(
    cluster: Cluster, deadline: float, host: str | None, ops: Sequence[str], store: Store | None
) -> LocalWorkers | None:
    if cluster.kind != "local":
        return None
    devices = cluster.workers[0].devices
    threads = next((device.threads for device in devices if device.threads is not None), None)
    names = [device.name.rpartition("/")[2] for device in devices]
    return LocalWorkers(
        len(cluster.workers), devices=names, threads=threads, deadline=deadline, host=host,
        ops=ops, checkpoints=str(store.root) if store is not None else None,
    )  # fmt: skip


def _keys(cluster: Cluster, count: int) -> tuple[list[str], KeyPair | None]:
    """The workers' public keys ("" where there is none), and our own pair if there are any.

    Raises:
        KeyFileError: a key is unknown here, or our own cannot be used.
    """
    if cluster.kind == "local":
        return [""] * count, None
    ring = Keyring()
    found = [ring.key_of(each.key, WORKER) if each.key else "" for each in cluster.workers]
    needed = any(found) or cluster.key is not None
    return found, ring.own(cluster.key, COORDINATOR) if needed else None


def _is_seen(part: Partition) -> bool:
    """Whether a step of a partition leaves anything behind, even if it is undone; or meets others
    in memory that they share."""
    return any(node.op.name in _LEAVING for node in part.graph.walk())


def _hello(request: int) -> Hello:
    own = Version.own()
    return Hello(request, own.version, own.wire, own.python)


def left_out(pairs: Sequence[tuple[int, int]]) -> set[int]:
    """The workers without which all others reach each other: again and again the one with the most
    pairs that do not, of several the last."""
    left, out = set(pairs), set()
    while left:
        counts = Counter(worker for pair in left for worker in pair)
        worst = max(counts, key=lambda worker: (counts[worker], worker))
        out.add(worst)
        left = {pair for pair in left if worst not in pair}
    return out


def _left(until: float) -> float:
    return max(0.05, until - time.monotonic())


def _result(replies: Replies) -> StepResult:
    fetches: dict[str, Array] = {}
    spans: list[Span] = replies.spans
    peak: dict[str, int] = {}
    for worker, message in replies.messages.items():
        assert isinstance(message, Done)
        peak |= message.peak
        fetches |= {str(name): _owned(array) for name, array in replies.arrays[worker].items()}
    return StepResult(fetches, spans, peak, replies.errors)


def _owned(array: Array) -> Array:
    """An array that belongs to the caller: what is lent is copied, and thereby returned."""
    return array if array.flags.writeable else array.copy("K")

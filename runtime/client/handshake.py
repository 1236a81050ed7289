"""The rendezvous of a session and its workers, before anything is computed.

Each worker reports its version and its devices, opens the session, and reaches every other worker.
Each failure is reported with the worker's name and address.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from graphflow.errors import (
    ClusterError,
    GraphflowError,
    ProtocolError,
    RendezvousTimeout,
    WorkerLost,
)
from graphflow.runtime.client.io_loop import SLACK, SessionIOLoop
from graphflow.runtime.client.session_activity import SessionActivity
from graphflow.runtime.host.host_interface import NO_WORKER_LEFT
from graphflow.runtime.protocol.coordinator import GRACE
from graphflow.runtime.protocol.coordinator_events import BeginOperation, Order, Replies
from graphflow.runtime.protocol.reliable_stream import Version
from graphflow.runtime.protocol.worker import MAX_LEASE
from graphflow.runtime.security.keys import COORDINATOR, WORKER, KeyPair, Keyring
from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.transport.interface import HANDSHAKE_ENDED
from graphflow.runtime.wire.messages import Hello, Join, Meet, Met, Open, Welcome

if TYPE_CHECKING:
    from graphflow.placement.clusters.cluster import Cluster

LEASE = 30.0  # seconds without a ping until a worker forgets the session
_POLL_SECONDS = 0.05  # seconds between two checks whether workers are still waited for
_ANSWER_SECONDS = 2.0  # that a running worker may take to answer
_NO_TRUST = (
    "and this process do not trust each other's keys; there, run `graphflow keys add` with the "
    ".public file of this machine's key; here, check that the cluster file has the worker's key "
    "(`graphflow keys list` shows both), and that it is not frozen, and takes more connections "
    "(its log tells of those over `--max-connections`); on loopback a worker shows a key only if "
    "it was started with `--key`"
)
_CLOSED = (
    "were started on this machine, and cannot be connected to: is its loopback interface up "
    "(`ip link set lo up`), and open to its own processes?"
)
_FROZEN = (
    "took the connection and said nothing: its process is frozen or overloaded, or it is no "
    "graphflow worker; look there, and end it if need be"
)

_log = Log("graphflow.coordinator")


class AskWorkers(Protocol):
    """Sends workers orders under a request number, and waits some seconds for the replies."""

    def __call__(self, request: int, orders: Mapping[int, Order], seconds: float) -> Replies: ...


class Rendezvous:
    """The sequence from addresses to workers that are ready.

    Attributes:
        unreachable: workers without which the others would reach each other, once `run` has failed
            for that reason.
    """

    def __init__(
        self,
        session: str,
        addresses: Sequence[str],
        keys: Sequence[str],
        loop: SessionIOLoop,
        requests: Iterator[int],
        ask: AskWorkers,
    ) -> None:
        self.unreachable: set[int] = set()
        self._session = session
        self._addresses = list(addresses)
        self._keys = list(keys)
        self._loop = loop
        self._requests = requests
        self._ask = ask

    def describe_waiting(self, seconds: float) -> str:
        """Return the progress text: which workers the rendezvous waits for."""
        return f"waiting for {', '.join(self._waiting_names())}, {seconds:.0f} s"

    def log_waiting(self, seconds: float) -> None:
        _log.tell(
            "cluster.waiting", session=self._session, seconds=round(seconds, 1),
            workers=self._waiting_names(),
        )  # fmt: skip

    def _waiting_names(self) -> list[str]:
        missing = self._loop.unanswered_workers()
        return [self._worker_name(worker) for worker in missing] or ["the workers"]

    def _worker_name(self, worker: int) -> str:
        return f"worker {worker} at {self._addresses[worker]}"

    def run(
        self,
        cluster: Cluster,
        until: float,
        meeting_seconds: float,
        ops: Sequence[str],
        trial: bool,
    ) -> None:
        """Exchange versions, open the session, and check all links between workers."""
        hello = _make_hello(next(self._requests))
        workers = range(len(self._addresses))
        try:
            replies = self._ask(
                hello.request, {w: Order(hello) for w in workers}, _seconds_left(until)
            )
        except RendezvousTimeout as error:
            raise self._explain_silence(cluster) or error from None
        for worker in workers:
            welcome = replies.messages[worker]
            assert isinstance(welcome, Welcome)
            if wrong := _describe_missing_devices(cluster, worker, welcome):
                raise ClusterError(
                    f"{self._worker_name(worker)} {wrong}; start it with `graphflow worker "
                    f"--devices {','.join(_required_devices(cluster, worker))}`, or change "
                    "the cluster"
                )
        if same := self._loop.duplicate_workers():
            raise ClusterError(
                f"{' and '.join(map(self._worker_name, same))} are one process, reached by two "
                "names; each worker needs a `graphflow worker` of its own, at a port of its own"
            )
        request = next(self._requests)
        shown = self._keys if any(self._keys) else []
        # Processes started here end with this one, so they may wait for it without a limit.
        lease = MAX_LEASE if cluster.kind == "local" else LEASE
        orders = {
            w: Order(Open(request, w, self._addresses, lease, list(ops), shown, trial))
            for w in workers
        }
        self._ask(request, orders, _seconds_left(until))
        request, left = next(self._requests), min(_seconds_left(until), meeting_seconds)
        meet = {worker: Order(Meet(request, left)) for worker in workers}
        replies = self._ask(request, meet, left + GRACE)
        pairs = [
            (worker, other)
            for worker, message in replies.messages.items()
            if isinstance(message, Met)
            for other in message.missing
        ]
        if not {other for _, other in pairs} <= {*workers}:
            raise ProtocolError(
                f"a worker does not reach workers that the session, of {len(workers)} workers, "
                f"does not have: {pairs[:5]}; do all of them run the same code?"
            )
        if pairs:
            self.unreachable |= workers_to_leave_out(pairs)
            raise RendezvousTimeout(self._unreachable_text(pairs, left))

    def wait_answer(self, worker: int, seconds: float) -> Welcome | None:
        """Wait some seconds for a worker's answer; return None if none comes."""
        hello = _make_hello(next(self._requests))
        try:
            welcome = self._ask(hello.request, {worker: Order(hello)}, seconds).messages[worker]
        except RendezvousTimeout:
            return None
        assert isinstance(welcome, Welcome)
        return welcome

    def add(
        self,
        worker: int,
        lost: Collection[int],
        until: float,
        ops: Sequence[str],
        trial: bool,
        lease: float,
    ) -> None:
        """Let a worker that has answered join a session that is open on others.

        Args:
            worker: its number, the highest.
            lost: workers that do not take part any more.
        """
        same = self._loop.duplicate_workers()
        if worker in same:
            first = next((each for each in same if each != worker), worker)
            what = "was lost" if first in lost else "takes part already"
            raise ClusterError(
                f"{self._worker_name(worker)} is the process of worker {first}, which {what}; "
                "start another `graphflow worker`"
            )
        peers = ["" if each in lost else address for each, address in enumerate(self._addresses)]
        request = next(self._requests)
        join = Join(request, worker, self._addresses[worker], self._keys[worker])
        others = [each for each, address in enumerate(peers) if address and each != worker]
        # First, so that links to an earlier process at this address are gone.
        self._ask(request, {each: Order(join) for each in others}, _seconds_left(until))
        shown = self._keys if any(self._keys) else []
        request = next(self._requests)
        opening = Open(request, worker, peers, lease, list(ops), shown, trial)
        self._ask(request, {worker: Order(opening)}, _seconds_left(until))
        request, left = next(self._requests), _seconds_left(until)
        replies = self._ask(request, {worker: Order(Meet(request, left))}, left + GRACE)
        met = replies.messages[worker]
        assert isinstance(met, Met)
        if met.missing:
            pairs = [(worker, other) for other in met.missing]
            raise RendezvousTimeout(self._unreachable_text(pairs, left))

    def _unreachable_text(self, pairs: Sequence[tuple[int, int]], seconds: float) -> str:
        failures = ", ".join(f"{self._worker_name(b)} did not answer worker {a}" for a, b in pairs)
        return (
            f"the workers do not reach each other: {failures} within {seconds:g} s; can these "
            "addresses be reached from there?"
        )

    def _explain_silence(self, cluster: Cluster) -> RendezvousTimeout | None:
        """Return the error of workers that did not answer, if their connections tell the reason."""
        # Workers started here are known to listen, so a closed port is the network's fault.
        closed = self._loop.unwelcomed_workers() if cluster.kind == "local" else []
        refused = self._loop.refused_workers()
        for workers, why in (
            ([worker for worker in refused if self._keys[worker]], _NO_TRUST),
            (refused, f'{HANDSHAKE_ENDED}; look there, or name its key (key = "box1")'),
            (self._loop.silent_workers(), _FROZEN),
            (closed, _CLOSED),
        ):
            if workers:
                return RendezvousTimeout(f"{', '.join(map(self._worker_name, workers))} {why}")
        return None


def _required_devices(cluster: Cluster, worker: int) -> list[str]:
    return [device.name.rpartition("/")[2] for device in cluster.workers[worker].devices]


def _describe_missing_devices(cluster: Cluster, worker: int, welcome: Welcome) -> str:
    """Say which of its devices a worker lacks; "" if it has all."""
    missing = [name for name in _required_devices(cluster, worker) if name not in welcome.devices]
    has = ", ".join(welcome.devices)
    return f"has {has}, but not {', '.join(missing)} as the cluster says" if missing else ""


def find_answering(
    cluster: Cluster,
    patience: Callable[[], float],
    ending: Collection[str],
    session: str,
    dead_after: float,
) -> Cluster:
    """Return the cluster of the workers that answer in time and can be used.

    Workers that are about to end are left out, as long as there are others.

    Args:
        patience: returns for how many seconds to wait; called again while workers are missing.
        ending: addresses of workers that are about to end.
    """
    addresses = [worker.address or "" for worker in cluster.workers]
    keys, pair, ring = load_keys(cluster, len(addresses))
    started, most = time.monotonic(), max(patience(), _ANSWER_SECONDS)
    loop = SessionIOLoop(
        secrets.token_hex(16), addresses, insecure=cluster.insecure, local=None, pair=pair,
        ring=ring, keys=keys, activity=SessionActivity(session), epoch=1,
        token=secrets.token_hex(16), dead_after=dead_after,
    )  # fmt: skip
    others = [
        worker
        for worker, address in enumerate(addresses)
        if address not in ending and worker not in cluster.left
    ]
    if not others:
        time.sleep(min(patience(), _ANSWER_SECONDS))  # until they have ended, and may be back
    try:
        asked = {}
        for worker in others or range(len(addresses)):
            hello = _make_hello(worker + 1)
            begin = BeginOperation(hello.request, {worker: Order(hello)}, most)
            asked[worker] = loop.submit(begin)
        while late := [each for each in asked.values() if each.outcome is None]:
            left = max(patience(), _ANSWER_SECONDS)
            if time.monotonic() > started + (left if left < most else most + SLACK):
                break
            late[0].wait(_POLL_SECONDS)
        outcomes = {worker: pending.outcome for worker, pending in asked.items()}
    finally:
        loop.stop()
    there, unfit = set(), []
    for worker, outcome in outcomes.items():
        if wrong := _describe_unfit(cluster, worker, outcome):
            unfit.append(f"worker {worker} at {addresses[worker]} {wrong}")
            _log.tell("worker.unfit", session=session, address=addresses[worker], reason=wrong)
        elif isinstance(outcome, Replies):
            there.add(worker)
    if not there:
        raise WorkerLost(
            f"none of the workers at {', '.join(addresses)} answered within {most:g} s with the "
            f"cluster's devices{''.join(f'; {each}' for each in unfit)}; the session continues "
            "from its last checkpoint when it is opened or called again, once they are back",
            reason=NO_WORKER_LEFT,
        )
    return cluster.without({*range(len(addresses))} - there)


def _describe_unfit(cluster: Cluster, worker: int, outcome: Replies | GraphflowError | None) -> str:
    """Say why the session cannot use a worker that answered; "" if it can, or if none answered."""
    if isinstance(outcome, ProtocolError):
        return str(outcome)  # another version
    if not isinstance(outcome, Replies):
        return ""
    welcome = outcome.messages[worker]
    assert isinstance(welcome, Welcome)
    return _describe_missing_devices(cluster, worker, welcome)


def load_keys(cluster: Cluster, count: int) -> tuple[list[str], KeyPair | None, Keyring]:
    """Return the workers' public keys ("" for none), this process's own pair if there are any, and
    the keyring that holds it.

    Raises:
        KeyFileError: a key is unknown here, or the own key cannot be used.
    """
    ring = Keyring(cluster.launched.keys_folder if cluster.launched is not None else None)
    if cluster.kind == "local":
        return [""] * count, None, ring
    found = [ring.key_of(each.key, WORKER) if each.key else "" for each in cluster.workers]
    needed = any(found) or cluster.key is not None
    return found, ring.own_pair(cluster.key, COORDINATOR) if needed else None, ring


def _make_hello(request: int) -> Hello:
    own = Version.own()
    return Hello(request, own.version, own.wire, own.python)


def workers_to_leave_out(pairs: Sequence[tuple[int, int]]) -> set[int]:
    """Return the workers without which all others reach each other.

    Greedy: repeatedly the worker in most of the pairs, of several the last one.
    """
    left, out = set(pairs), set()
    while left:
        counts = Counter(worker for pair in left for worker in pair)
        worst = max(counts, key=lambda worker: (counts[worker], worker))
        out.add(worst)
        left = {pair for pair in left if worst not in pair}
    return out


def _seconds_left(until: float) -> float:
    return max(0.05, until - time.monotonic())

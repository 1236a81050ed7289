"""What a coordinator knows of each worker, and whether it is alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from itertools import pairwise
from math import inf

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import (
    GraphflowError,
    LinkLost,
    RendezvousTimeout,
    StepTimeout,
    VersionMismatch,
    WorkerLost,
)
from graphflow.runtime.protocol.clock_sync import Clock
from graphflow.runtime.protocol.coordinator_events import Gone
from graphflow.runtime.protocol.operations import Operation
from graphflow.runtime.protocol.reliable_stream import Stream, Version
from graphflow.runtime.wire.chunk_assembler import ChunkAssembler
from graphflow.runtime.wire.messages import Hello, Key, Open

BEAT = 1.0  # seconds between two pings
_LINK_SILENCE = 3.0  # seconds that a transport may need to notice that a link is down
# Of the time to be lost, for one that speaks without an answer: longer than a cut of 3 s and what
# it takes to be asked and to answer after it, and not only just after its interpreter was held.
_ANSWERS, _SPEAKS = 0.82, 0.2
_SMALL = 1 << 16  # bytes on their way that delay no answer for long
_ASKS = 0.5  # seconds between two times that a worker asks another one
_STEADY = 2.0  # seconds in which who was silent before answers everybody else, too


@dataclass
class Peer:
    """A worker as its coordinator sees it."""

    index: int
    address: str
    stream: Stream
    heard: float
    clock: Clock
    since: float = 0.0  # when it began to speak without a pause
    inbox: ChunkAssembler = field(default_factory=ChunkAssembler)
    welcomed: bool = False
    process: int = 0  # the number of the one that has welcomed us
    opening: bool = False  # it was told of the session
    opened: bool = False  # it knows the session: before, it would not know what a Ping is of
    left: bool = False  # it was asked to close the session, and has
    link: bool = False  # the transport vouches for the process
    down: str = ""  # why the link is not up
    hears: float = 0.0  # when it was last known to hear us
    asked: float = inf  # since when it has not answered what it was asked
    deaf: float = inf  # since when it speaks without hearing us
    commits: int = -1  # the step that it is to commit, but was not told of yet
    gone: Gone | None = None  # once it is lost

    def __str__(self) -> str:
        return f"worker {self.index} at {self.address}"

    def hear(self, now: float) -> None:
        """It speaks."""
        if now > self.heard + 2 * BEAT:
            self.since = now
        self.heard = now

    def heeds(self, at: float) -> None:
        """It has heard what was sent to it at a time."""
        if at > self.hears:
            self.hears = at
        self.asked = self.deaf = inf

    def lost(self, what: str, operation: Operation | None = None) -> WorkerLost:
        """The error of who needs this worker after it is lost."""
        gone = self.gone
        assert gone is not None
        why = f"its process has ended, {gone.reason}" if gone.ended else gone.reason
        died_in = f", in {gone.op}" if gone.op else ""
        return WorkerLost(
            f"{self} {what}: {why}{died_in}",
            worker=self.index,
            step=operation.number if operation is not None else None,
            reason=gone.reason,
            op=gone.op,
            program=operation.computing(self.index) if operation is not None else "",
            ended=gone.ended,
        )

    def mismatch(self, its: Version, ours: Version) -> VersionMismatch:
        """The error of a worker that runs something else."""
        return VersionMismatch(
            f"{self} runs {its}, this process runs {ours}; install the same version on both"
        )

    @property
    def absence(self) -> str:
        """What may be the reason why it has not answered at all."""
        if self.link:
            return (
                "it took the connection, but an op holds its Python interpreter, or it has too "
                "much to do; wait for that, or look there"
            )
        if self.down:
            return (
                "it took the connection and ended it again, with as many as it takes (`graphflow "
                "worker --max-connections`), or because its process ended; its log tells"
            )
        return "is `graphflow worker --listen ADDRESS` running there?"

    def lateness(self, now: float) -> str:
        """What is known of why it has not finished."""
        silent = now - self.heard
        if silent <= 2 * BEAT:
            return f"{self} had not finished"
        if self.link:
            return (
                f"{self} had not finished, and says nothing for {silent:.1f} s though its process "
                "lives: an op holds its Python interpreter (the GIL)"
            )
        return f"{self} cannot be reached for {silent:.1f} s"


def late(operation: Operation, peers: Sequence[Peer], now: float) -> GraphflowError:
    """The error of an operation that passed its deadline."""
    if operation.late:
        return kept_waiting(operation, peers, now)
    seconds = operation.begin.seconds
    waiting = [peers[worker] for worker in sorted(operation.waiting)]
    if isinstance(operation.first, Hello | Open):
        return RendezvousTimeout(
            "; ".join(
                f"{peer} did not answer within {seconds:.3g} s: {peer.absence}" for peer in waiting
            )
        )
    return StepTimeout(
        f"{operation.what} passed its deadline of {seconds:g} s: "
        f"{', '.join(peer.lateness(now) for peer in waiting)}; "
        "raise the deadline if the work is expected to take longer"
    )


def kept_waiting(operation: Operation, peers: Sequence[Peer], now: float) -> StepTimeout:
    """The error of a step in which workers have waited in vain: that of the last one in their
    chain, who waited for one that did not."""
    chain = operation.chain()
    told = operation.late[chain[-1] if chain[-1] in operation.late else chain[-2]]
    assert told.worker is not None
    more = [peers[told.worker].lateness(now)] if operation.may_wait(told.worker) else []
    if len(chain) > 2:
        more += [f"worker {one} waited for worker {other}" for one, other in pairwise(chain)]
    text = f"{told} ({'; '.join(more)})" if more else str(told)
    error = StepTimeout(text, worker=told.worker)
    for note in told.__notes__:
        error.add_note(note)
    return error


def apart(source: Peer, target: Peer, operation: Operation, edge: Key) -> LinkLost:
    """The error of a step whose workers do not reach each other."""
    return LinkLost(
        f"{operation.what}: {source} sent edge {edge}, but {target} did not take it, though both "
        "answer this process: what is between the two is cut, or refuses connections; mend that, "
        "and run it again: nothing has changed",
        source=source.index, target=target.index, step=operation.number, edge=edge,
    )  # fmt: skip


class Watch:
    """Who is lost by silence: workers that no link vouches for, after `dead_after` seconds.

    Attributes:
        due: when the first of them is lost, at the earliest.
    """

    def __init__(self, peers: Sequence[Peer], dead_after: float) -> None:
        self.due = inf
        self._peers = peers
        self._dead_after = dead_after
        self._unsure: set[int] = set()

    def up(self, peer: Peer, now: float) -> None:
        """The transport vouches for it from now on."""
        peer.link, peer.down = True, ""
        peer.hear(now)
        peer.heeds(now)
        self._unsure.discard(peer.index)

    def down(self, peer: Peer, reason: str, now: float) -> None:
        """The transport does not any more."""
        if peer.link and now > peer.heard + _LINK_SILENCE + BEAT:
            # What silenced it before was an op that held its interpreter, not the link.
            peer.heard = now - _LINK_SILENCE
        peer.link, peer.down = False, reason
        self.begin(peer)

    def begin(self, peer: Peer) -> None:
        """Watches a worker, once it has shown that it is there; before, the rendezvous has a
        deadline."""
        if peer.welcomed and not peer.link and not peer.gone:
            self._unsure.add(peer.index)
            self.due = min(self.due, peer.heard + self._dead_after)

    def end(self, peer: Peer) -> None:
        """It is lost."""
        self._unsure.discard(peer.index)

    def overdue(self, now: float) -> list[Gone]:
        """Those that were silent for too long."""
        if now < self.due:
            return []
        found = []
        for worker in sorted(self._unsure):
            peer = self._peers[worker]
            if now >= peer.heard + self._dead_after:
                silent = f"silent for {now - peer.heard:.1f} s"
                reason = f"{peer.down} ({silent})" if peer.down else silent
                found.append(Gone(worker, reason, ended=False))
                self._unsure.discard(worker)
        heard = (self._peers[worker].heard for worker in self._unsure)
        self.due = min(heard, default=inf) + self._dead_after
        return found

    def is_cut(self, peer: Peer, asked: int, now: float) -> bool:
        """Whether it is by the link that a worker has not answered another one, who asked so many
        times: it answers us, and not only just again after its interpreter was held."""
        speaks = peer.gone is None and now <= peer.heard + 2 * BEAT and now > peer.since + _STEADY
        return speaks and peer.deaf == inf and asked * _ASKS >= self._dead_after

    def is_deaf(self, peer: Peer, now: float) -> bool:
        """Whether a worker that speaks has answered nothing for too long: the network is cut in one
        direction. One whose interpreter was held answers as soon as it speaks; and nothing is told
        by one that still has much to receive before a question."""
        if peer.gone or now <= peer.asked + _SPEAKS * self._dead_after:
            return False
        peer.deaf = min(peer.deaf, now)
        waits = (
            now < peer.deaf + _SPEAKS * self._dead_after
            or now < peer.asked + _ANSWERS * self._dead_after
        )
        return not waits and peer.stream.outbound.pending_bytes <= _SMALL

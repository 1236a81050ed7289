"""The coordinator's knowledge of each worker, and the detection of lost ones.

The module also words the errors of waits that failed: a deadline, a worker that blocks others, a
cut link.
"""

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
from graphflow.runtime.protocol.clock_sync import PeerClock
from graphflow.runtime.protocol.coordinator_events import WorkerGone
from graphflow.runtime.protocol.operations import Operation
from graphflow.runtime.protocol.reliable_stream import ReliableStream, Version
from graphflow.runtime.wire.chunk_assembler import ChunkAssembler
from graphflow.runtime.wire.messages import Hello, Open
from graphflow.runtime.wire.step_values import Key

BEAT = 1.0  # seconds between two pings
_LINK_SILENCE = 3.0  # seconds that a transport may need to notice that a link is down
# Fractions of `dead_after`, for a worker that speaks but answers nothing. They outlast a cut of 3 s
# with the question and answer after it, and a worker that has only just released its interpreter.
_ANSWERS, _SPEAKS = 0.82, 0.2
_SMALL = 1 << 16  # bytes in flight that do not delay an answer for long
_ASKS = 0.5  # seconds between two acknowledgement requests of a worker
_STEADY = 2.0  # seconds after which a worker that was silent has caught up with all peers


@dataclass
class Peer:
    """A worker as its coordinator sees it."""

    index: int
    address: str
    stream: ReliableStream
    heard_at: float
    clock: PeerClock
    speaking_since: float = 0.0  # when its present uninterrupted messages began
    inbox: ChunkAssembler = field(default_factory=ChunkAssembler)
    welcomed: bool = False
    process: int = 0  # the random number of the process that sent Welcome
    opening: bool = False  # its Open was sent
    opened: bool = False  # it knows the session; before that, it could not attribute a Ping
    left: bool = False  # it has closed the session on request
    is_linked: bool = False  # the transport is connected to its process
    down_reason: str = ""  # why it is not
    heard_us_at: float = 0.0  # when it last proved that it receives us
    asked_at: float = inf  # when the oldest open question was asked
    deaf_since: float = inf  # since when it speaks without receiving us
    commit_owed: int = -1  # the committed step that it was not told of yet
    gone: WorkerGone | None = None  # once it is lost

    def __str__(self) -> str:
        return f"worker {self.index} at {self.address}"

    def note_heard(self, now: float) -> None:
        """Record that a message arrived from it."""
        if now > self.heard_at + 2 * BEAT:
            self.speaking_since = now
        self.heard_at = now

    def note_hears_us(self, at: float) -> None:
        """Record that it received a message that was sent at time `at`."""
        if at > self.heard_us_at:
            self.heard_us_at = at
        self.asked_at = self.deaf_since = inf

    def loss_error(self, what: str, operation: Operation | None = None) -> WorkerLost:
        """Return the error for operations that need this worker after it was lost."""
        gone = self.gone
        assert gone is not None
        why = f"its process has ended, {gone.reason}" if gone.ended else gone.reason
        died_in = f", in {gone.op}" if gone.op else ""
        return WorkerLost(
            f"{self} {what}: {why}{died_in}",
            worker=self.index,
            step=operation.step_number if operation is not None else None,
            reason=gone.reason,
            op=gone.op,
            program=operation.unfinished_program(self.index) if operation is not None else "",
            ended=gone.ended,
        )

    def mismatch_error(self, its: Version, ours: Version) -> VersionMismatch:
        """Return the error of a worker that runs another version."""
        return VersionMismatch(
            f"{self} runs {its}, this process runs {ours}; install the same version on both"
        )

    @property
    def absence_hint(self) -> str:
        """The likely reason why the worker has not answered at all, with a remedy."""
        if self.is_linked:
            return (
                "it took the connection, but an op holds its Python interpreter, or it has too "
                "much to do; wait for that, or look there"
            )
        if self.down_reason:
            return (
                "it took the connection and ended it again, with as many as it takes (`graphflow "
                "worker --max-connections`), or because its process ended; its log tells"
            )
        return "is `graphflow worker --listen ADDRESS` running there?"

    def describe_lateness(self, now: float) -> str:
        """Describe why the worker is late, for the StepTimeout message."""
        silent = now - self.heard_at
        if silent <= 2 * BEAT:
            return f"{self} had not finished"
        if self.is_linked:
            return (
                f"{self} had not finished, and says nothing for {silent:.1f} s though its process "
                "lives: an op holds its Python interpreter (the GIL)"
            )
        return f"{self} cannot be reached for {silent:.1f} s"


def deadline_error(operation: Operation, peers: Sequence[Peer], now: float) -> GraphflowError:
    """Return the error of an operation that passed its deadline."""
    if operation.peer_timeouts:
        return blocked_error(operation, peers, now)
    seconds = operation.begin.seconds
    waiting = [peers[worker] for worker in sorted(operation.waiting)]
    if isinstance(operation.first_order, Hello | Open):
        return RendezvousTimeout(
            "; ".join(
                f"{peer} did not answer within {seconds:.3g} s: {peer.absence_hint}"
                for peer in waiting
            )
        )
    return StepTimeout(
        f"{operation.description} passed its deadline of {seconds:g} s: "
        f"{', '.join(peer.describe_lateness(now) for peer in waiting)}; "
        "raise the deadline if the work is expected to take longer"
    )


def blocked_error(operation: Operation, peers: Sequence[Peer], now: float) -> StepTimeout:
    """Return the error of a step in which workers waited for other workers until the deadline.

    It is the report of the last worker in the chain of waits: the one that waited for a worker
    which was not waiting itself.
    """
    chain = operation.blocking_chain()
    report = operation.peer_timeouts[
        chain[-1] if chain[-1] in operation.peer_timeouts else chain[-2]
    ]
    assert report.worker is not None
    more = (
        [peers[report.worker].describe_lateness(now)]
        if operation.may_report_wait(report.worker)
        else []
    )
    if len(chain) > 2:
        more += [f"worker {one} waited for worker {other}" for one, other in pairwise(chain)]
    text = f"{report} ({'; '.join(more)})" if more else str(report)
    error = StepTimeout(text, worker=report.worker)
    for note in report.__notes__:
        error.add_note(note)
    return error


def unreachable_error(source: Peer, target: Peer, operation: Operation, edge: Key) -> LinkLost:
    """Return the error of a step whose workers do not reach each other."""
    return LinkLost(
        f"{operation.description}: {source} sent edge {edge}, but {target} did not take it, "
        "though both answer this process: the network between them is cut, or refuses "
        "connections; repair it, and run the step again (no variable has changed)",
        source=source.index, target=target.index, step=operation.step_number, edge=edge,
    )  # fmt: skip


class FailureDetector:
    """Detector of workers that are lost by silence.

    A worker without a connection is lost after `dead_after` seconds without a message.

    Attributes:
        due: the earliest time at which a watched worker can be lost.
    """

    def __init__(self, peers: Sequence[Peer], dead_after: float) -> None:
        self.due = inf
        self._peers = peers
        self._dead_after = dead_after
        self._unsure: set[int] = set()

    def link_up(self, peer: Peer, now: float) -> None:
        """Stop the timeout of a worker whose connection is up."""
        peer.is_linked, peer.down_reason = True, ""
        peer.note_heard(now)
        peer.note_hears_us(now)
        self._unsure.discard(peer.index)

    def link_down(self, peer: Peer, reason: str, now: float) -> None:
        """Start the timeout of a worker whose connection ended."""
        if peer.is_linked and now > peer.heard_at + _LINK_SILENCE + BEAT:
            # An op held its interpreter before: that silence is not the link's.
            peer.heard_at = now - _LINK_SILENCE
        peer.is_linked, peer.down_reason = False, reason
        self.watch(peer)

    def watch(self, peer: Peer) -> None:
        """Watch a worker for silence, once it has sent Welcome.

        Before that, the rendezvous has a deadline of its own.
        """
        if peer.welcomed and not peer.is_linked and not peer.gone:
            self._unsure.add(peer.index)
            self.due = min(self.due, peer.heard_at + self._dead_after)

    def unwatch(self, peer: Peer) -> None:
        """Stop watching a worker that is lost."""
        self._unsure.discard(peer.index)

    def pop_overdue(self, now: float) -> list[WorkerGone]:
        """Return the workers that were silent for too long, and stop watching them."""
        if now < self.due:
            return []
        found = []
        for worker in sorted(self._unsure):
            peer = self._peers[worker]
            if now >= peer.heard_at + self._dead_after:
                silent = f"silent for {now - peer.heard_at:.1f} s"
                reason = f"{peer.down_reason} ({silent})" if peer.down_reason else silent
                found.append(WorkerGone(worker, reason, ended=False))
                self._unsure.discard(worker)
        heard = (self._peers[worker].heard_at for worker in self._unsure)
        self.due = min(heard, default=inf) + self._dead_after
        return found

    def is_cut(self, peer: Peer, asked: int, now: float) -> bool:
        """Return True if a cut link is the reason why `peer` did not answer another worker.

        That worker has asked `asked` times in vain, while `peer` answers this process, and has done
        so for a while: a worker that has only just released its interpreter still owes others their
        answers.
        """
        speaks = (
            peer.gone is None
            and now <= peer.heard_at + 2 * BEAT
            and now > peer.speaking_since + _STEADY
        )
        return speaks and peer.deaf_since == inf and asked * _ASKS >= self._dead_after

    def is_deaf(self, peer: Peer, now: float) -> bool:
        """Return True if a worker speaks, but has answered nothing for too long.

        The network is then cut in one direction. A worker whose interpreter was held answers as
        soon as it speaks again. A worker with much data still in flight before the question proves
        nothing.
        """
        if peer.gone or now <= peer.asked_at + _SPEAKS * self._dead_after:
            return False
        peer.deaf_since = min(peer.deaf_since, now)
        waits = (
            now < peer.deaf_since + _SPEAKS * self._dead_after
            or now < peer.asked_at + _ANSWERS * self._dead_after
        )
        return not waits and peer.stream.outbound.pending_bytes <= _SMALL

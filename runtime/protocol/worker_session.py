"""One session in the worker's machine: the orders that it has accepted, and its answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import field
from math import inf

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ProtocolError
from graphflow.runtime.protocol.reliable_stream import (
    Inbound,
    OutgoingMessage,
    ReceiveStatus,
    ReliableStream,
)
from graphflow.runtime.protocol.remote_errors import error_by_name, failure_message
from graphflow.runtime.protocol.worker_events import (
    CancelStep,
    Job,
    Outcome,
    Route,
    RunJob,
    SendMessage,
    WorkerAction,
)
from graphflow.runtime.wire.array_codec import (
    SMALL_TOTAL_BYTES,
    decode_small,
    encode_small,
    message_parts,
)
from graphflow.runtime.wire.chunk_assembler import ChunkAssembler
from graphflow.runtime.wire.frame_codec import SPANS_A_MESSAGE
from graphflow.runtime.wire.messages import (
    COORDINATOR,
    Abort,
    Array,
    Chunk,
    Commit,
    Compute,
    Done,
    Envelope,
    Measure,
    Measured,
    Meet,
    Message,
    Met,
    Open,
    Ping,
    Pong,
    Probe,
    Probed,
    Read,
    Ready,
    Save,
    Saved,
    Small,
    Spans,
)
from graphflow.runtime.wire.step_values import Computed, Key, step_of

_UNANSWERED = (Commit, Abort, Chunk)
_FETCHING = (Compute, Read, Save)
_RESULTS = (Computed, np.ndarray)

AHEAD = 8  # steps that may wait for another step of their session to commit


@dataclass
class WorkerSession:
    """One epoch of a session on a worker."""

    route: Route
    stream: ReliableStream  # with the coordinator
    worker_count: int  # of workers
    lease: float
    heard_at: float
    inbox: ChunkAssembler
    far: bool = False  # the coordinator may be on another host
    fast_route: Route = b""  # the coordinator's fast channel, if it has one
    last_begun: int = -1  # the last step that has begun to compute
    program: str = ""  # its program
    last_ping: float = -inf  # its time, by the coordinator's clock
    last_settled: int = -1  # the last step that was committed or aborted
    # Steps begun and not settled; several only if all but the first are free.
    open_steps: deque[int] = field(default_factory=deque)
    last_committed: int = -1
    # Steps that wait for another to commit.
    waiting_steps: deque[RunJob] = field(default_factory=deque)
    # Messages from other workers; the links number the messages to them.
    peers: dict[int, Inbound] = field(default_factory=dict)

    def __post_init__(self) -> None:
        outbound = self.stream.outbound
        self.name, self.epoch, self.token = outbound.session, outbound.epoch, outbound.token

    def is_current(
        self, arrival: ReceiveStatus, envelope: Envelope, message: Message, answered: int
    ) -> bool:
        """Return True if a message that is not next in order proves the coordinator's presence.

        A recorded message that is played back proves nothing.

        Args:
            answered: the last resend request that was answered before this message.
        """
        if isinstance(message, Ping):
            is_new = message.sent > self.last_ping
            self.last_ping = max(self.last_ping, message.sent)
            return is_new
        if arrival is ReceiveStatus.DUPLICATE:  # a coordinator waits for the answer to it
            return isinstance(message, Open) and envelope.sequence == self.stream.inbound.received
        return arrival is ReceiveStatus.MISSING or self.stream.outbound.answered_attempt > answered

    # Orders ------------------------------------------------------------------------------------

    def take_arrays(self, purpose: str, request: int, names: Iterable[Key]) -> dict[Key, Array]:
        """Return the arrays that were sent before an order.

        Raises:
            ProtocolError: an array is missing.
        """
        return {name: self.inbox.take(COORDINATOR, purpose, request, name) for name in names}

    def accept_step(self, message: Compute, step: int) -> list[WorkerAction]:
        """Begin a step, now or once the step that it follows has committed.

        Raises:
            ProtocolError: the step is not new, an array is missing or wrong, or too many steps
                wait.
        """
        last = self.waiting_steps[-1].step if self.waiting_steps else self.last_begun
        if step <= max(last, self.last_settled):
            raise ProtocolError(f"step {step_of(step)} is not after step {step_of(last)}")
        arrays = self.take_arrays("feed", message.request, message.feeds) if message.feeds else {}
        if message.small:
            arrays.update(map(decode_small, message.small))
        run = RunJob(self.name, message, step, self.epoch, arrays)
        if message.follows < 0 or message.follows == self.last_committed or self._is_free(message):
            return [self.begin_step(run, message)]
        if message.follows == last and last > self.last_settled:
            if len(self.waiting_steps) >= AHEAD:
                raise ProtocolError(f"more than {AHEAD} steps wait for another to commit")
            self.waiting_steps.append(run)
        return []  # otherwise the step that it follows was aborted

    def _is_free(self, message: Compute) -> bool:
        """Return True if a step need not wait until the step that it follows has committed."""
        begun = bool(self.open_steps) and self.open_steps[-1] == message.follows
        return begun and message.free and message.program == self.program and not self.waiting_steps

    def begin_step(self, run: RunJob, order: Compute) -> RunJob:
        """Record a step as begun."""
        self.last_begun, self.program = run.step, order.program
        self.open_steps.append(run.step)
        return run

    def settle(self, message: Commit | Abort, step: int) -> list[WorkerAction]:
        """Settle a step. A commit includes all earlier steps, an abort all later ones."""
        if step not in self.open_steps:
            # It has not begun: its order was refused, or it waits for another step.
            while self.waiting_steps and step <= self.waiting_steps[-1].step:
                self.waiting_steps.pop()
            return []
        if isinstance(message, Commit):
            return self._commit(message, step)
        last = self.open_steps[-1]
        while self.open_steps and self.open_steps[-1] >= step:
            self.inbox.forget("edge", self.open_steps.pop())
        self.waiting_steps.clear()
        if not self.open_steps:
            self.last_settled = last
        woken = CancelStep(self.name, last, error_by_name(message.error, message.text))
        return [woken, RunJob(self.name, message, last, self.epoch)]

    def commit_first(self) -> int:
        """Record that the first of the open steps has committed."""
        step = self.last_settled = self.last_committed = self.open_steps.popleft()
        if not self.inbox.is_empty:
            self.inbox.forget("edge", step)
        return step

    def _commit(self, message: Commit, step: int) -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        while self.open_steps and self.open_steps[0] <= step:
            actions.append(RunJob(self.name, message, self.commit_first(), self.epoch))
        if self.waiting_steps and not self.open_steps:
            following = self.waiting_steps.popleft()
            assert isinstance(following.job, Compute)
            actions.append(self.begin_step(following, following.job))
        return actions

    # Answers -----------------------------------------------------------------------------------

    def send_unnumbered(self, message: Message, step: int = 0) -> SendMessage:
        """Return the action that sends the coordinator a message of `UNNUMBERED`."""
        return self.make_send(self.stream.send_unnumbered(message, step))

    def reply(
        self, message: Message, step: int = 0, data: memoryview | None = None
    ) -> list[WorkerAction]:
        """Return the actions that send the coordinator a message, once the window has room."""
        return [self.make_send(outgoing) for outgoing in self.stream.send(message, step, data)]

    def make_send(self, outgoing: OutgoingMessage) -> SendMessage:
        """Return the action that sends a message over the coordinator's present route.

        A Pong always takes the main route: it proves that this route works.
        """
        envelope, message, data = outgoing
        fast_route = b"" if type(message) is Pong else self.fast_route
        return SendMessage(
            self.route, envelope, message, data, fast_route, self.stream.outbound.acknowledged
        )

    def send_result(self, job: Job, step: int, outcome: Outcome) -> list[WorkerAction]:
        """Return the actions that send the result of a job that did not fail."""
        if isinstance(outcome, _RESULTS):
            assert isinstance(job, _FETCHING)
            try:
                return self._send_arrays(job, step, outcome)
            except ProtocolError as error:
                return self.reply(failure_message(job.request, error), step)
        assert not isinstance(job, _UNANSWERED)
        if isinstance(outcome, Saved):
            return self.reply(outcome)
        if isinstance(job, Measure):
            return self.reply(Measured(job.request, outcome))
        if isinstance(job, Meet) and isinstance(outcome, list):
            return self.reply(Met(job.request, outcome))
        if isinstance(job, Probe) and isinstance(outcome, float):
            return self.reply(Probed(job.request, outcome))
        return self.reply(Ready(job.request))

    def _send_arrays(
        self, job: Compute | Read | Save, step: int, outcome: Computed | Array
    ) -> list[WorkerAction]:
        if isinstance(outcome, Computed):
            computed = outcome
        else:
            assert isinstance(job, Read)
            computed = Computed({job.variable: outcome})
        # Arrays are split before anything is numbered: one that cannot travel leaves no trace.
        inside: list[Small] = []
        room = 0 if isinstance(job, Save) else SMALL_TOTAL_BYTES
        cut = []
        names = []
        for name, array in computed.fetches.items():
            found = (
                encode_small(name, array) if room > 0 and isinstance(array, np.ndarray) else None
            )
            if found is not None:
                inside.append(found)
                room -= len(found)
            else:
                names.append(name)
                cut += message_parts("fetch", job.request, name, array, far=self.far)
        if not (cut or computed.spans or isinstance(job, Save)):
            peak = dict(computed.peak)
            return self.reply(Done(job.request, [], peak, inside), step)  # most results
        peak = {device: int(nbytes) for device, nbytes in computed.peak.items()}
        messages: list[tuple[Message, memoryview | None]] = [
            (Spans(job.request, [*computed.spans[start : start + SPANS_A_MESSAGE]]), None)
            for start in range(0, len(computed.spans), SPANS_A_MESSAGE)
        ]
        messages += cut
        saved = isinstance(job, Save)
        end = Saved(job.request, "", 0, names) if saved else Done(job.request, names, peak, inside)
        messages.append((end, None))
        return [action for message, data in messages for action in self.reply(message, step, data)]

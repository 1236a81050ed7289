"""One session as its worker's machine sees it: the orders it has taken, and what it answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import field
from math import inf

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ProtocolError
from graphflow.runtime.protocol.reliable_stream import Arrival, Inbound, Letter, Stream
from graphflow.runtime.protocol.remote_errors import error_of, failed
from graphflow.runtime.protocol.worker_events import (
    Job,
    Outcome,
    Route,
    Run,
    Send,
    Wake,
    WorkerAction,
)
from graphflow.runtime.wire.chunk_assembler import ChunkAssembler
from graphflow.runtime.wire.frame_codec import (
    SMALL_TOTAL_BYTES,
    SPANS_A_MESSAGE,
    decode_small,
    encode_small,
    message_parts,
)
from graphflow.runtime.wire.messages import (
    COORDINATOR,
    Abort,
    Array,
    Chunk,
    Commit,
    Compute,
    Computed,
    Done,
    Envelope,
    Key,
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
    step_of,
)

_UNANSWERED = (Commit, Abort, Chunk)
_FETCHING = (Compute, Read, Save)
_RESULTS = (Computed, np.ndarray)

AHEAD = 8  # steps that a session may have waiting for another to commit


@dataclass
class Served:
    """One epoch of a session on a worker."""

    route: Route
    stream: Stream  # with the coordinator
    count: int  # of workers
    lease: float
    heard: float
    inbox: ChunkAssembler
    far: bool = False  # the coordinator may be on another host
    lane: Route = b""  # the way for short messages, if the coordinator has one
    begun: int = -1  # the last step that was computed or is being computed
    program: str = ""  # its program
    pinged: float = -inf  # when, by the coordinator's clock
    settled: int = -1  # the last step that was committed or aborted
    # Steps that were begun and are not settled: several only if all but the first are free.
    open: deque[int] = field(default_factory=deque)
    committed: int = -1
    ahead: deque[Run] = field(default_factory=deque)  # steps that wait for one to commit
    # From the workers that sent anything; what goes to them is numbered by the links.
    peers: dict[int, Inbound] = field(default_factory=dict)

    def __post_init__(self) -> None:
        told = self.stream.outbound
        self.name, self.epoch, self.token = told.session, told.epoch, told.token
        """The session's, which of its epochs this is, and its secret."""

    def is_said_now(
        self, arrival: Arrival, envelope: Envelope, message: Message, answered: int
    ) -> bool:
        """Whether a message, not the next in number, can be of now, and so shows that the
        coordinator is there, and by which way: what was recorded and is played back does not.

        Args:
            answered: the last request to send again that was answered before it.
        """
        if isinstance(message, Ping):
            is_new = message.sent > self.pinged
            self.pinged = max(self.pinged, message.sent)
            return is_new
        if arrival is Arrival.DUPLICATE:  # nothing follows before this one was answered
            return isinstance(message, Open) and envelope.sequence == self.stream.inbound.received
        return arrival is Arrival.MISSING or self.stream.outbound.resent > answered

    # Orders ------------------------------------------------------------------------------------

    def take(self, purpose: str, request: int, names: Iterable[Key]) -> dict[Key, Array]:
        """The arrays that were sent before an order.

        Raises:
            ProtocolError: one was not.
        """
        return {name: self.inbox.take(COORDINATOR, purpose, request, name) for name in names}

    def compute(self, message: Compute, step: int) -> list[WorkerAction]:
        """Begins a step, now or when the one that it follows has committed.

        Raises:
            ProtocolError: it is not new, an array is missing or wrong, or too many wait.
        """
        last = self.ahead[-1].step if self.ahead else self.begun
        if step <= max(last, self.settled):
            raise ProtocolError(f"step {step_of(step)} is not after step {step_of(last)}")
        arrays = self.take("feed", message.request, message.feeds) if message.feeds else {}
        if message.small:
            arrays.update(map(decode_small, message.small))
        run = Run(self.name, message, step, self.epoch, arrays)
        if message.follows < 0 or message.follows == self.committed or self._is_free(message):
            return [self.begin(run, message)]
        if message.follows == last and last > self.settled:
            if len(self.ahead) >= AHEAD:
                raise ProtocolError(f"more than {AHEAD} steps wait for another to commit")
            self.ahead.append(run)
        return []  # else the step that it follows was aborted

    def _is_free(self, message: Compute) -> bool:
        """Whether a step need not wait for the one that it follows to commit."""
        begun = bool(self.open) and self.open[-1] == message.follows
        return begun and message.free and message.program == self.program and not self.ahead

    def begin(self, run: Run, order: Compute) -> Run:
        """Begins a step."""
        self.begun, self.program = run.step, order.program
        self.open.append(run.step)
        return run

    def settle(self, message: Commit | Abort, step: int) -> list[WorkerAction]:
        """Ends a step: a commit also those before it, an abort also those after it, which follow
        it."""
        if step not in self.open:
            # It has not begun: its order was refused here, or it follows another one.
            while self.ahead and step <= self.ahead[-1].step:
                self.ahead.pop()
            return []
        if isinstance(message, Commit):
            return self._commit(message, step)
        last = self.open[-1]
        while self.open and self.open[-1] >= step:
            self.inbox.forget("edge", self.open.pop())
        self.ahead.clear()
        if not self.open:
            self.settled = last
        woken = Wake(self.name, last, error_of(message.error, message.text))
        return [woken, Run(self.name, message, last, self.epoch)]

    def conclude(self) -> int:
        """The first of the steps that are open has committed."""
        step = self.settled = self.committed = self.open.popleft()
        if not self.inbox.is_empty:
            self.inbox.forget("edge", step)
        return step

    def _commit(self, message: Commit, step: int) -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        while self.open and self.open[0] <= step:
            actions.append(Run(self.name, message, self.conclude(), self.epoch))
        if self.ahead and not self.open:
            following = self.ahead.popleft()
            assert isinstance(following.job, Compute)
            actions.append(self.begin(following, following.job))
        return actions

    # Answers -----------------------------------------------------------------------------------

    def tell(self, message: Message, step: int = 0) -> Send:
        """A message of `UNNUMBERED` for the coordinator."""
        return self.sent(self.stream.tell(message, step))

    def reply(
        self, message: Message, step: int = 0, data: memoryview | None = None
    ) -> list[WorkerAction]:
        """A message for the coordinator, as soon as the window has room for it."""
        return [self.sent(letter) for letter in self.stream.send(message, step, data)]

    def sent(self, letter: Letter) -> Send:
        """A letter on its way to where the coordinator is now. An answer to a ping goes the way
        that can take everything, for that is the one whose end would have to be noticed."""
        envelope, message, data = letter
        lane = b"" if type(message) is Pong else self.lane
        return Send(self.route, envelope, message, data, lane, self.stream.outbound.acknowledged)

    def answer(self, job: Job, step: int, outcome: Outcome) -> list[WorkerAction]:
        """What a job that was asked for ended with, if that is no error."""
        if isinstance(outcome, _RESULTS):
            assert isinstance(job, _FETCHING)
            try:
                return self._results(job, step, outcome)
            except ProtocolError as error:
                return self.reply(failed(job.request, error), step)
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

    def _results(
        self, job: Compute | Read | Save, step: int, outcome: Computed | Array
    ) -> list[WorkerAction]:
        if isinstance(outcome, Computed):
            computed = outcome
        else:
            assert isinstance(job, Read)
            computed = Computed({job.variable: outcome})
        # All arrays are cut before anything is numbered: one that cannot travel leaves no trace.
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
            return self.reply(Done(job.request, [], peak, inside), step)  # as most of the time
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

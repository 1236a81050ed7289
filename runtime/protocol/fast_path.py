"""The protocol's fast path for the common step.

In the common step all workers get the same order at once, no earlier step is undecided, all feeds
are inside the order, and each worker answers with one message. For it both machines have methods
that go from frame to frame with a quarter of the calls. A small step mostly waits for three Python
interpreters on few cores, so these calls are its time.

If anything else has to be considered, a method here returns None and has changed nothing; the
general `handle` then does the work. Both paths leave the same state, so that each message may take
either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np

from graphflow.errors import ProtocolError
from graphflow.runtime.protocol.coordinator import GRACE, CoordinatorMachine
from graphflow.runtime.protocol.coordinator_events import BeginOperation, CoordinatorAction, Order
from graphflow.runtime.protocol.operations import Operation
from graphflow.runtime.protocol.reliable_stream import NumberedFrame
from graphflow.runtime.protocol.worker import WorkerMachine
from graphflow.runtime.protocol.worker_events import (
    JobFinished,
    MessageReceived,
    Route,
    RunJob,
    WorkerAction,
)
from graphflow.runtime.protocol.worker_session import WorkerSession
from graphflow.runtime.wire.array_codec import SMALL_TOTAL_BYTES, decode_small, encode_small
from graphflow.runtime.wire.messages import Array, Compute, Done, Small
from graphflow.runtime.wire.step_frame_codec import SharedOrder, StepCodec
from graphflow.runtime.wire.step_values import Computed, Key

_DONE = Done(0, [], {})  # stands for any fast answer: only the fetched arrays differ


class SteadyStateStep(NamedTuple):
    """A step for the fast path: one order for all workers, which differ only in their small feeds.

    See `BeginOperation` for the other fields.
    """

    request: int
    step: int
    order: Compute
    workers: Sequence[int]
    fed: Mapping[int, list[Small]]


class FastPathCoordinator(CoordinatorMachine):
    """Coordinator machine that can also begin and decide steps by the fast path."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._codecs: list[StepCodec | None] = []
        super().__init__(*args, **options)

    def _add_peer(self, address: str) -> None:
        super()._add_peer(address)
        said = self._session, self._epoch, len(self._codecs), self._token
        self._codecs.append(StepCodec.for_worker(*said))

    def begin_step(self, steady: SteadyStateStep, now: float) -> list[NumberedFrame] | None:
        """Begin a step; return the frame for each worker, or None if the fast path does not
        apply."""
        request, step, order, workers, fed = steady
        same = SharedOrder.from_compute(order)
        if same is None or self._operations or self._fenced is not None:
            return None
        peers = self._peers
        if self._losses and any(peers[worker].gone is not None for worker in workers):
            return None
        for worker in workers:
            if not peers[worker].stream.is_clear or self._codecs[worker] is None:
                return None
        numbered_frames = []
        for worker in workers:
            peer, codec = peers[worker], self._codecs[worker]
            assert codec is not None
            stream, inside = peer.stream, fed.get(worker, [])
            number, received = stream.take_number()
            commits, peer.commit_owed = peer.commit_owed, -1
            frame = codec.write_order(step, number, received, request, commits, inside, same)
            numbered_frames.append(stream.outbound.keep_frame(step, frame))
        self._commits_owed.difference_update(workers)
        if not self._commits_owed:
            self._commit_at = inf
        orders = dict.fromkeys(workers, tuple.__new__(Order, (order, ())))
        begin = tuple.__new__(BeginOperation, (request, orders, order.deadline, step, -1, False))
        operation = Operation(begin, now)
        operation.deadline += GRACE
        self._operations[request] = operation
        return numbered_frames

    def accept_answer(
        self, worker: int, frame: bytes, now: float
    ) -> list[CoordinatorAction] | None:
        """Return the actions after a worker's answer; None if the fast path does not apply."""
        codec = self._codecs[worker]
        read = None if codec is None else codec.read_answer(frame)
        if read is None or self._fenced is not None:
            return None
        _, sequence, acknowledged, request, sent = read
        peer, operation = self._peers[worker], self._operations.get(request)
        if operation is None or worker not in operation.waiting or operation.peer_timeouts:
            return None
        if (
            not operation.is_step
            or peer.gone is not None
            or not peer.opened
            or peer.asked_at != inf
        ):
            return None
        if acknowledged <= peer.stream.outbound.acknowledged:  # it must acknowledge its order
            return None
        arrays: dict[Key, Array] = {}
        try:
            for each in sent:
                name, arrays[name] = decode_small(each, aligned=False)
        except ProtocolError:
            return None
        if not peer.stream.accept_next(sequence, acknowledged):
            return None
        self._now = now
        peer.note_heard(now)
        peer.note_hears_us(now)
        operation.replies.messages[worker] = _DONE
        operation.replies.arrays[worker] = arrays
        operation.waiting.discard(worker)
        return self._end_if_answered(operation)


class FastPathWorker(WorkerMachine):
    """Worker machine that can also take orders and answer them by the fast path."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._codecs: dict[Route, tuple[WorkerSession, StepCodec]] = {}  # by fast route

    def accept_order(self, route: Route, frame: bytes, now: float) -> RunJob | None:
        """Return the job for an order over a fast route; None if the fast path does not apply."""
        known = self._codecs.get(route)
        if known is None:
            return None
        session, codec = known
        read = codec.read_order(frame)
        if (
            read is None
            or session.fast_route != route
            or self._sessions.get(session.name) is not session
        ):
            return None
        step, sequence, acknowledged, message = read
        commits, begun = message.commits, session.open_steps
        if session.waiting_steps or step <= session.last_begun or step <= session.last_settled:
            return None
        if (len(begun) != 1 or begun[0] != commits) if commits >= 0 else begun:
            return None
        arrays: dict[Key, Array] = {}
        try:
            for sent in message.small:
                name, arrays[name] = decode_small(sent, aligned=False)
        except ProtocolError:
            return None
        if not session.stream.accept_next(sequence, acknowledged):
            return None
        session.heard_at = now
        if commits >= 0:
            session.commit_first()
        said = session.name, message, step, session.epoch, arrays, "", commits
        return session.begin_step(tuple.__new__(RunJob, said), message)

    def encode_answer(self, finished: JobFinished) -> tuple[Route, Route, NumberedFrame] | None:
        """Return the fast route, the main route and the frame for a computed step.

        None if the fast path does not apply: the results are not all small, or the window is full.
        """
        name, job, step, epoch, outcome = finished
        if type(job) is not Compute or type(outcome) is not Computed:
            return None
        session = self._sessions.get(name)
        known = self._codecs.get(session.fast_route) if session is not None else None
        if known is None or known[0] is not session or session.epoch != epoch:
            return None
        stream = session.stream
        if step <= session.last_settled or outcome.spans or outcome.peak or not stream.is_clear:
            return None
        inside, room = [], SMALL_TOTAL_BYTES
        try:
            for key, array in outcome.fetches.items():
                sent = encode_small(key, array) if isinstance(array, np.ndarray) else None
                if sent is None or room <= 0:
                    return None
                inside.append(sent)
                room -= len(sent)
        except ProtocolError:
            return None
        number, received = stream.take_number()
        frame = known[1].write_answer(step, number, received, job.request, inside)
        return session.fast_route, session.route, stream.outbound.keep_frame(step, frame)

    def _receive(self, event: MessageReceived, now: float) -> list[WorkerAction]:
        actions = super()._receive(event, now)
        if event.is_fast and type(event.message) is Compute and event.route not in self._codecs:
            self._learn_fast_route(event)
        return actions

    def _learn_fast_route(self, event: MessageReceived) -> None:
        """Remember the codec of a session whose coordinator speaks over a fast route."""
        session = self._sessions.get(event.envelope.session)
        if session is None or session.fast_route != event.route:
            return
        self._codecs = {
            route: known
            for route, known in self._codecs.items()
            if known[0] is not session and known[0] is self._sessions.get(known[0].name)
        }
        worker = session.stream.outbound.origin
        codec = StepCodec.for_worker(session.name, session.epoch, worker, session.token)
        if codec is not None:
            self._codecs[event.route] = session, codec

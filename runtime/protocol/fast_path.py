"""The short way of steps that repeat: nearly every step is told to all its workers at once, follows
none that is not decided, brings what it needs along, and is answered in one message.

For these the machines of both sides have a way of a quarter of the calls, from frame to frame,
since three interpreters on few cores are what a small step waits for. Where anything else is to be
thought of, the methods here say None, and have changed nothing: then `handle` does it. Both leave
the same behind, so that each message may go either way.
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
from graphflow.runtime.wire.frame_codec import SMALL_TOTAL_BYTES, decode_small, encode_small
from graphflow.runtime.wire.messages import (
    Array,
    Compute,
    Computed,
    Done,
    Key,
    Small,
)
from graphflow.runtime.wire.step_frame_codec import SharedOrder, StepCodec

_DONE = Done(0, [], {})  # of which nothing is asked that is not known


class SteadyStateStep(NamedTuple):
    """A step that is begun by itself: an order that is the same for all its workers but for the
    small arrays in it. As `Begin`."""

    request: int
    step: int
    order: Compute
    workers: Sequence[int]
    fed: Mapping[int, list[Small]]


class FastPathCoordinator(CoordinatorMachine):
    """A coordinator's machine that begins and decides steps by the short way, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        said = self._session, self._epoch
        self._codecs = [
            StepCodec.for_worker(*said, peer.index, self._token) for peer in self._peers
        ]

    def begin_step(self, repeat: SteadyStateStep, now: float) -> list[NumberedFrame] | None:
        """What each of its workers is told for a step to begin."""
        request, step, order, workers, fed = repeat
        same = SharedOrder.from_compute(order)
        if same is None or self._operations or self._losses or self._fenced is not None:
            return None
        peers = self._peers
        for worker in workers:
            if not peers[worker].stream.is_clear or self._codecs[worker] is None:
                return None
        told = []
        for worker in workers:
            peer, dialogue = peers[worker], self._codecs[worker]
            assert dialogue is not None
            stream, inside = peer.stream, fed.get(worker, [])
            number, received = stream.take_number()
            commits, peer.commit_owed = peer.commit_owed, -1
            frame = dialogue.write_order(step, number, received, request, commits, inside, same)
            told.append(stream.outbound.keep_frame(step, frame))
        self._commits_owed.difference_update(workers)
        if not self._commits_owed:
            self._commit_at = inf
        orders = dict.fromkeys(workers, tuple.__new__(Order, (order, ())))
        begin = tuple.__new__(BeginOperation, (request, orders, order.deadline, step, -1, False))
        operation = Operation(begin, now)
        operation.deadline += GRACE
        self._operations[request] = operation
        return told

    def accept_answer(
        self, worker: int, frame: bytes, now: float
    ) -> list[CoordinatorAction] | None:
        """What to do about a worker's answer in a step."""
        dialogue = self._codecs[worker]
        read = None if dialogue is None else dialogue.read_answer(frame)
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
        if acknowledged <= peer.stream.outbound.acknowledged:  # it says that it has heard its order
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
    """A worker's machine that takes orders of steps and answers them by the short way, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._codecs: dict[Route, tuple[WorkerSession, StepCodec]] = {}  # by lane

    def accept_order(self, route: Route, frame: bytes, now: float) -> RunJob | None:
        """What to do about the order of a step that came over a lane."""
        known = self._codecs.get(route)
        if known is None:
            return None
        session, dialogue = known
        read = dialogue.read_order(frame)
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
        """What to answer when a step was computed: over a lane, or the connection beside it."""
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
        """Knows from now on who speaks over a lane, if that is the one of a session's
        coordinator."""
        session = self._sessions.get(event.envelope.session)
        if session is None or session.fast_route != event.route:
            return
        self._codecs = {
            route: known
            for route, known in self._codecs.items()
            if known[0] is not session and known[0] is self._sessions.get(known[0].name)
        }
        worker = session.stream.outbound.origin
        dialogue = StepCodec.for_worker(session.name, session.epoch, worker, session.token)
        if dialogue is not None:
            self._codecs[event.route] = session, dialogue

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
from graphflow.runtime.protocol.coordinator_events import Begin, CoordinatorAction, Order
from graphflow.runtime.protocol.operations import Operation
from graphflow.runtime.protocol.reliable_stream import Told
from graphflow.runtime.protocol.worker import WorkerMachine
from graphflow.runtime.protocol.worker_events import Finished, Received, Route, Run, WorkerAction
from graphflow.runtime.protocol.worker_session import Served
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


class Repeat(NamedTuple):
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
        self._dialogues = [
            StepCodec.for_worker(*said, peer.index, self._token) for peer in self._peers
        ]

    def repeat(self, repeat: Repeat, now: float) -> list[Told] | None:
        """What each of its workers is told for a step to begin."""
        request, step, order, workers, fed = repeat
        same = SharedOrder.from_compute(order)
        if same is None or self._operations or self._losses or self._fenced is not None:
            return None
        peers = self._peers
        for worker in workers:
            if not peers[worker].stream.is_clear or self._dialogues[worker] is None:
                return None
        told = []
        for worker in workers:
            peer, dialogue = peers[worker], self._dialogues[worker]
            assert dialogue is not None
            stream, inside = peer.stream, fed.get(worker, [])
            number, received = stream.number()
            commits, peer.commits = peer.commits, -1
            frame = dialogue.write_order(step, number, received, request, commits, inside, same)
            told.append(stream.outbound.keep(step, frame))
        self._owed.difference_update(workers)
        if not self._owed:
            self._commit_at = inf
        orders = dict.fromkeys(workers, tuple.__new__(Order, (order, ())))
        begin = tuple.__new__(Begin, (request, orders, order.deadline, step, -1, False))
        operation = Operation(begin, now)
        operation.deadline += GRACE
        self._operations[request] = operation
        return told

    def answered(self, worker: int, frame: bytes, now: float) -> list[CoordinatorAction] | None:
        """What to do about a worker's answer in a step."""
        dialogue = self._dialogues[worker]
        read = None if dialogue is None else dialogue.read_answer(frame)
        if read is None or self._fenced is not None:
            return None
        _, sequence, acknowledged, request, sent = read
        peer, operation = self._peers[worker], self._operations.get(request)
        if operation is None or worker not in operation.waiting or operation.late:
            return None
        if not operation.is_step or peer.gone is not None or not peer.opened or peer.asked != inf:
            return None
        if acknowledged <= peer.stream.outbound.acknowledged:  # it says that it has heard its order
            return None
        arrays: dict[Key, Array] = {}
        try:
            for each in sent:
                name, arrays[name] = decode_small(each, aligned=False)
        except ProtocolError:
            return None
        if not peer.stream.follows(sequence, acknowledged):
            return None
        self._now = now
        peer.hear(now)
        peer.heeds(now)
        operation.replies.messages[worker] = _DONE
        operation.replies.arrays[worker] = arrays
        operation.waiting.discard(worker)
        return self._taken(operation)


class FastPathWorker(WorkerMachine):
    """A worker's machine that takes orders of steps and answers them by the short way, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._known: dict[Route, tuple[Served, StepCodec]] = {}  # by lane

    def repeated(self, route: Route, frame: bytes, now: float) -> Run | None:
        """What to do about the order of a step that came over a lane."""
        known = self._known.get(route)
        if known is None:
            return None
        session, dialogue = known
        read = dialogue.read_order(frame)
        if read is None or session.lane != route or self._sessions.get(session.name) is not session:
            return None
        step, sequence, acknowledged, message = read
        commits, begun = message.commits, session.open
        if session.ahead or step <= session.begun or step <= session.settled:
            return None
        if (len(begun) != 1 or begun[0] != commits) if commits >= 0 else begun:
            return None
        arrays: dict[Key, Array] = {}
        try:
            for sent in message.small:
                name, arrays[name] = decode_small(sent, aligned=False)
        except ProtocolError:
            return None
        if not session.stream.follows(sequence, acknowledged):
            return None
        session.heard = now
        if commits >= 0:
            session.conclude()
        said = session.name, message, step, session.epoch, arrays, "", commits
        return session.begin(tuple.__new__(Run, said), message)

    def answer(self, finished: Finished) -> tuple[Route, Route, Told] | None:
        """What to answer when a step was computed: over a lane, or the connection beside it."""
        name, job, step, epoch, outcome = finished
        if type(job) is not Compute or type(outcome) is not Computed:
            return None
        session = self._sessions.get(name)
        known = self._known.get(session.lane) if session is not None else None
        if known is None or known[0] is not session or session.epoch != epoch:
            return None
        stream = session.stream
        if step <= session.settled or outcome.spans or outcome.peak or not stream.is_clear:
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
        number, received = stream.number()
        frame = known[1].write_answer(step, number, received, job.request, inside)
        return session.lane, session.route, stream.outbound.keep(step, frame)

    def _receive(self, event: Received, now: float) -> list[WorkerAction]:
        actions = super()._receive(event, now)
        if event.lane and type(event.message) is Compute and event.route not in self._known:
            self._meet(event)
        return actions

    def _meet(self, event: Received) -> None:
        """Knows from now on who speaks over a lane, if that is the one of a session's
        coordinator."""
        session = self._sessions.get(event.envelope.session)
        if session is None or session.lane != event.route:
            return
        self._known = {
            route: known
            for route, known in self._known.items()
            if known[0] is not session and known[0] is self._sessions.get(known[0].name)
        }
        worker = session.stream.outbound.origin
        dialogue = StepCodec.for_worker(session.name, session.epoch, worker, session.token)
        if dialogue is not None:
            self._known[event.route] = session, dialogue

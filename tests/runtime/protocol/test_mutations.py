"""The simulator's invariants find what breaks the protocol: each of its safeguards is taken away,
one after the other, and the worlds of the default run have to see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hmac import compare_digest
from typing import Any
from unittest import mock

import pytest

from graphflow.errors import StaleEpoch, StaleSession
from graphflow.runtime.protocol import coordinator, worker
from graphflow.runtime.protocol import reliable_stream as stream
from graphflow.runtime.protocol.coordinator import CoordinatorMachine
from graphflow.runtime.protocol.fast_path import FastPathCoordinator, FastPathWorker
from graphflow.runtime.protocol.operations import Operation
from graphflow.runtime.protocol.peer_liveness import FailureDetector
from graphflow.runtime.protocol.reliable_stream import Inbound, Outbound, ReceiveStatus
from graphflow.runtime.protocol.worker import WorkerMachine
from graphflow.runtime.protocol.worker_events import RunJob
from graphflow.runtime.protocol.worker_session import WorkerSession
from graphflow.runtime.wire.messages import UNNUMBERED, Abort, Chunk, Commit, Hello, Open
from tests.runtime.protocol.simulator import Violation, check
from tests.runtime.protocol.test_protocol import SEEDS

QUICK = 200
"""Worlds in which the default run finds what is easily found."""

Mutation = Callable[[], Any]  # what makes it hold for a while


def _fence(envelope: Any, epoch: int, token: str, *, by: str) -> Any:
    if by == "token" and not compare_digest(envelope.token.encode(), token.encode()):
        return StaleSession("of another session")
    return StaleEpoch("of another epoch") if by == "epoch" and envelope.epoch != epoch else None


@contextmanager
def fence(by: str) -> Iterator[None]:
    def half(envelope: Any, epoch: int, token: str) -> Any:
        return _fence(envelope, epoch, token, by=by)

    with ExitStack() as held:
        for module in (coordinator, worker):
            held.enter_context(mock.patch.object(module, "stale_error", half))
        yield


def patch_with(kind: type, name: str, make: Callable[[Any], Any]) -> Mutation:
    """Another method in the place of one, made of that."""
    return lambda: mock.patch.object(kind, name, make(getattr(kind, name)))


def skips_gaps(take: Any) -> Any:
    """What is missing counts as received: it is acknowledged before it was applied."""

    def mutant(self: Inbound, envelope: Any, message: Any, data: Any) -> Any:
        if not isinstance(message, UNNUMBERED) and envelope.sequence > self.received + 1:
            self.received = envelope.sequence - 1
        return take(self, envelope, message, data)

    return mutant


def repeats(take: Any) -> Any:
    """A message that comes twice is applied twice."""

    def mutant(self: Inbound, envelope: Any, message: Any, data: Any) -> Any:
        arrival, told = take(self, envelope, message, data)
        return (ReceiveStatus.FRESH if arrival is ReceiveStatus.DUPLICATE else arrival), told

    return mutant


def twice(settle: Any) -> Any:
    """What a worker is told of a step is done twice."""

    def mutant(self: WorkerSession, message: Any, step: int) -> Any:
        actions = settle(self, message, step)
        return [*actions, *(each for each in actions if isinstance(each, RunJob))]

    return mutant


def commits_what_was_aborted(settle: Any) -> Any:
    def mutant(self: WorkerSession, message: Any, step: int) -> Any:
        return settle(self, Commit() if isinstance(message, Abort) else message, step)

    return mutant


def decides_with_the_first(accept: Any) -> Any:
    """The first worker that has computed decides for all."""

    def mutant(self: Operation, number: int, message: Any, inbox: Any) -> None:
        accept(self, number, message, inbox)
        if self.is_step:
            self.waiting.clear()
            for other in self.begin.orders:
                self.replies.arrays.setdefault(other, self.replies.arrays[number])

    return mutant


def runs_ahead(compute: Any) -> Any:
    """A step does not wait for the one that it follows."""

    def mutant(self: WorkerSession, message: Any, step: int) -> Any:
        return compute(self, replace(message, follows=-1), step)

    return mutant


def forgets_commits(tell: Any) -> Any:
    """A commit that rides on no order is not told."""

    def mutant(self: CoordinatorMachine, number: int) -> Any:
        self._peers[number].commit_owed = -1
        self._commits_owed.discard(number)
        return []

    return mutant


def takes_damage(intact: Any) -> Any:
    return lambda message, data: isinstance(message, Chunk) or intact(message, data)


def forgets_what_is_sent(post: Any) -> Any:
    """A message is let go of when it is sent, and not when it is acknowledged."""

    def mutant(self: Outbound, *given: Any) -> Any:
        letter = post(self, *given)
        self._kept.pop()
        return letter

    return mutant


def never_late(end: Any) -> Any:
    """A deadline that has passed ends nothing."""

    def mutant(self: CoordinatorMachine, operation: Operation, error: Any) -> Any:
        return [] if self._now >= operation.deadline else end(self, operation, error)

    return mutant


def drops_nobody(tick: Any) -> Any:
    """Who is told of a higher epoch goes on with the old one."""

    def mutant(self: WorkerMachine, *given: Any) -> Any:
        return []

    return mutant


def opens_for_any_process(unknown: Any) -> Any:
    """What was meant for the process before opens a session here."""

    def mutant(self: WorkerMachine, event: Any, now: float) -> Any:
        if isinstance(event.message, Open):
            event = event._replace(envelope=event.envelope._replace(step=self._process))
        return unknown(self, event, now)

    return mutant


def forgets_what_was_closed(drop: Any) -> Any:
    def mutant(self: WorkerMachine, names: Any, error: Any) -> Any:
        actions = drop(self, names, error)
        self._closed.clear()
        return actions

    return mutant


def calls_once(call: Any) -> Any:
    """What begins a session is not repeated."""

    def mutant(self: CoordinatorMachine, peer: Any) -> Any:
        return [each for each in call(self, peer) if not isinstance(each.message, Hello | Open)]

    return mutant


def takes_results_of_any_epoch(finish: Any) -> Any:
    def mutant(self: WorkerMachine, event: Any) -> Any:
        session = self._sessions.get(event.session)
        return finish(self, event if session is None else event._replace(epoch=session.epoch))

    return mutant


def leaves_a_commit_out(order: Any) -> Any:
    """A commit that would ride on an order does not."""

    def mutant(self: CoordinatorMachine, operation: Operation, worker: int) -> Any:
        self._peers[worker].commit_owed = -1
        self._commits_owed.discard(worker)
        return order(self, operation, worker)

    return mutant


def aborts_silently(send: Any) -> Any:
    def mutant(self: CoordinatorMachine, worker: int, message: Any, *given: Any) -> Any:
        return [] if isinstance(message, Abort) else send(self, worker, message, *given)

    return mutant


def asks_once(ask: Any) -> Any:
    """What is missing is asked for by one attempt, whatever becomes of the answer."""

    def mutant(self: Inbound, *, is_new: bool) -> Any:
        return ask(self, is_new=is_new and not self._attempt)

    return mutant


def goes_on_after_a_failure(go_on: Any) -> Any:
    """What follows a step that failed runs all the same."""

    def mutant(self: CoordinatorMachine, decided: Operation, error: Any) -> Any:
        return go_on(self, decided, None)

    return mutant


def keeps_what_followed(settle: Any) -> Any:
    """Steps that wait for one that is aborted go on waiting."""

    def mutant(self: WorkerSession, message: Any, step: int) -> Any:
        ahead = list(self.waiting_steps)
        actions = settle(self, message, step)
        if isinstance(message, Abort):
            self.waiting_steps.extend(each for each in ahead if each not in self.waiting_steps)
        return actions

    return mutant


def commits_nothing(repeated: Any) -> Any:
    """Who is told shortly of the next step does not commit the one before it."""

    def mutant(self: FastPathWorker, *given: Any) -> Any:
        run = repeated(self, *given)
        return run and run._replace(commits=-1)

    return mutant


def decides_with_the_first_short_answer(answered: Any) -> Any:
    def mutant(self: FastPathCoordinator, *given: Any) -> Any:
        actions = answered(self, *given)
        steps = self._operations.steps()
        if actions != [] or not steps[0].replies.arrays:
            return actions
        for other in steps[0].waiting:
            steps[0].replies.arrays[other] = next(iter(steps[0].replies.arrays.values()))
        return self._end(steps[0], None)

    return mutant


def keeps_no_answer(answer: Any) -> Any:
    """What was answered shortly is not kept, to be sent again."""

    def mutant(self: FastPathWorker, finished: Any) -> Any:
        told = answer(self, finished)
        if told is not None:
            self._sessions[finished.session].stream.outbound._kept.pop()
        return told

    return mutant


MUTATIONS: dict[str, Mutation] = {
    "no look at the epoch": lambda: fence("token"),
    "no look at the token": lambda: fence("epoch"),
    "acknowledged before it was applied": patch_with(Inbound, "receive", skips_gaps),
    "what comes twice is applied twice": patch_with(Inbound, "receive", repeats),
    "committed twice": patch_with(WorkerSession, "settle", twice),
    "aborted, and committed all the same": patch_with(
        WorkerSession, "settle", commits_what_was_aborted
    ),
    "the first who has computed decides": patch_with(Operation, "accept", decides_with_the_first),
    "a step before the one that it follows": patch_with(WorkerSession, "accept_step", runs_ahead),
    "a commit that nobody is told": patch_with(CoordinatorMachine, "_send_commit", forgets_commits),
    "damage that counts as whole": lambda: mock.patch.object(
        stream, "_is_intact", takes_damage(stream._is_intact)
    ),
    "nothing is kept to send again": patch_with(Outbound, "post", forgets_what_is_sent),
    "nothing is sent again": patch_with(Outbound, "resend", lambda again: lambda self, request: []),
    "windows without an end": patch_with(
        Outbound, "has_room", lambda room: lambda self, nbytes: True
    ),
    "deadlines that end nothing": patch_with(CoordinatorMachine, "_end", never_late),
    "nobody is lost by silence": patch_with(
        FailureDetector, "pop_overdue", lambda o: lambda self, now: []
    ),
    "who takes over is not obeyed": patch_with(WorkerMachine, "_handle_stale", drops_nobody),
    "an opening for any process": patch_with(
        WorkerMachine, "_handle_unknown", opens_for_any_process
    ),
    "closed sessions are forgotten": patch_with(
        WorkerMachine, "_close_sessions", forgets_what_was_closed
    ),
    "who does not answer is called once": patch_with(CoordinatorMachine, "_contact", calls_once),
    "results of any epoch count": patch_with(
        WorkerMachine, "_handle_result", takes_results_of_any_epoch
    ),
    "a commit rides on nothing": patch_with(CoordinatorMachine, "_send_order", leaves_a_commit_out),
    "nobody is told to abort": patch_with(CoordinatorMachine, "_send", aborts_silently),
    "what is missing is asked for once": patch_with(Inbound, "_request_resend", asks_once),
    "a step after one that failed": patch_with(
        CoordinatorMachine, "_start_followers", goes_on_after_a_failure
    ),
    "a step that waits survives an abort": patch_with(WorkerSession, "settle", keeps_what_followed),
    "the short way commits nothing": patch_with(FastPathWorker, "accept_order", commits_nothing),
    "the short way decides with the first": patch_with(
        FastPathCoordinator, "accept_answer", decides_with_the_first_short_answer
    ),
    "short answers are not kept": patch_with(FastPathWorker, "encode_answer", keeps_no_answer),
}
EASY = (
    "no look at the epoch", "acknowledged before it was applied", "committed twice",
    "the short way commits nothing",
)  # fmt: skip


@pytest.mark.parametrize(
    "broken",
    [name if name in EASY else pytest.param(name, marks=pytest.mark.slow) for name in MUTATIONS],
)
def test_a_protocol_without_one_of_its_safeguards_is_found_out(broken: str) -> None:
    worlds = QUICK if broken in EASY else SEEDS
    with MUTATIONS[broken](), pytest.raises(Violation):
        check(range(worlds))

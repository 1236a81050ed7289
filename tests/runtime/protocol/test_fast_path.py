"""The short way of steps does what the long one does: whoever takes it finds the machines as after
the long one, and says the same; where it is not for a message, nothing has changed."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from graphflow.errors import OpError
from graphflow.runtime.protocol import coordinator_events as c
from graphflow.runtime.protocol import worker_events as w
from graphflow.runtime.protocol.fast_path import (
    FastPathCoordinator,
    FastPathWorker,
    SteadyStateStep,
)
from graphflow.runtime.protocol.reliable_stream import ACK_EVERY, WINDOW, Outbound, Version
from graphflow.runtime.wire import array_codec
from graphflow.runtime.wire import frame_codec as wire
from graphflow.runtime.wire.messages import (
    COORDINATOR,
    Abort,
    Commit,
    Compute,
    Done,
    Envelope,
    Hello,
    Open,
    Ping,
    replace_fields,
)
from graphflow.runtime.wire.step_frame_codec import StepCodec
from graphflow.runtime.wire.step_values import Computed

SESSION, TOKEN = "5" * 32, "7" * 32
LANE = b"lane 1"
X = array_codec.encode_small("x", np.arange(4, dtype="float32"))
assert X is not None
ORDER = Compute(0, "p", {"@draws": 3, "n": -4}, [], False, 5.0)


def state(value: Any) -> Any:
    """What an object holds, to be compared: what answers say is not, only that there are some."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, StepCodec):
        return "dialogue"
    if isinstance(value, Done):
        return "done"
    if isinstance(value, Outbound):  # it keeps messages or their frames
        return state(value.__dict__ | {"_kept": [*value.all_from(0)]})
    if isinstance(value, dict):
        return {key: state(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque):
        return type(value).__name__, [state(each) for each in value]
    if dataclasses.is_dataclass(value) or type(value).__module__.startswith("graphflow"):
        fields = getattr(value, "__dict__", None)
        return (type(value).__name__, state(fields)) if fields is not None else value
    return value


class Cluster:
    """A session over machines of two workers, whose messages come at once."""

    def __init__(self, workers: int = 2) -> None:
        addresses = [f"tcp://127.0.0.1:{7000 + index}" for index in range(workers)]
        self.now = 10.0
        self.coordinator = FastPathCoordinator(SESSION, addresses, self.now, 1, TOKEN)
        self.workers = [FastPathWorker(["cpu:0"], process=index) for index in range(workers)]
        self.request = self.step = 0
        self.runs: list[tuple[int, w.RunJob]] = []
        self.settled: list[c.SettleOperation] = []
        own = Version.own()
        self.ask(lambda number, _: Hello(number, own.version, own.wire, own.python))
        self.ask(lambda number, worker: Open(number, worker, addresses, 30.0))

    def ask(self, message: Any, step: int = 0) -> None:
        self.request += 1
        orders = {i: c.Order(message(self.request, i)) for i, _ in enumerate(self.workers)}
        self.act(
            self.coordinator.handle(c.BeginOperation(self.request, orders, 5.0, step), self.now)
        )

    def act(self, actions: Any) -> None:
        for action in actions:
            if isinstance(action, c.SendToWorker):
                self.give(action.worker, action.envelope, action.message, action.data)
            elif isinstance(action, c.SettleOperation):
                self.settled.append(action)

    def give(self, worker: int, envelope: Any, message: Any, data: Any = None) -> None:
        lane = not isinstance(message, Hello | Open | Ping)
        event = w.MessageReceived(LANE if lane else b"route", envelope, message, data, lane)
        self.do(worker, self.workers[worker].handle(event, self.now))

    def do(self, worker: int, actions: Any) -> None:
        for action in actions:
            if isinstance(action, w.SendMessage):
                said = c.WorkerMessageReceived(worker, action.envelope, action.message, action.data)
                self.act(self.coordinator.handle(said, self.now))
            elif isinstance(action, w.RunJob):
                self.run(worker, action)

    def run(self, worker: int, run: w.RunJob) -> None:
        if run.commits >= 0:  # as two jobs, one after the other
            self.run(worker, w.RunJob(run.session, Commit(), run.commits, run.epoch))
        self.runs.append((worker, run._replace(commits=-1)))
        if isinstance(run.job, Open):
            finished = w.JobFinished(run.session, run.job, run.step, run.epoch, None)
            self.do(worker, self.workers[worker].handle(finished, self.now))

    def encode_next_order(self, worker: int, *, step: int | None = None, **fields: Any) -> bytes:
        """The frame of the next order for a worker, if nobody changes anything of it."""
        outbound = self.coordinator.stream(worker).outbound
        commits = self.coordinator._peers[worker].commit_owed
        told = {"request": self.request + 1, "commits": commits, "small": [X], **fields}
        number = self.step + 1 if step is None else step
        envelope = Envelope(
            SESSION, 1, COORDINATOR, number, outbound.last_sent + 1, outbound.received, TOKEN
        )
        return wire.encode(envelope, replace_fields(ORDER, **told))

    def whole_step(self, *, short: Any = lambda what: False, small: bool = True) -> None:
        """A step from its order to its end, in which `short` says who takes the short way."""
        self.request, self.step = self.request + 1, self.step + 1
        workers = range(len(self.workers))
        fed = {0: [X]} if small else {}
        if short("repeat"):
            repeat = SteadyStateStep(self.request, self.step, ORDER, list(workers), fed)
            told = self.coordinator.begin_step(repeat, self.now)
            assert told is not None
            sends = [
                c.SendToWorker(i, *wire.decode(frame), None, known)
                for i, (frame, _, known) in zip(workers, told, strict=True)
            ]
            assert [each.envelope.sequence for each in sends] == [number for _, number, _ in told]
        else:
            orders = {
                i: c.Order(replace_fields(ORDER, request=self.request, small=fed.get(i, [])))
                for i in workers
            }
            begin = c.BeginOperation(self.request, orders, ORDER.deadline, self.step)
            sends = self.coordinator.handle(begin, self.now)
        self.now += 0.001
        for send in sends:
            frame = wire.encode(send.envelope, send.message)
            if short("order"):
                run = self.workers[send.worker].accept_order(LANE, frame, self.now)
                assert run is not None
                self.run(send.worker, run)
            else:
                self.give(send.worker, *wire.decode(frame))
        self.now += 0.001
        for i in workers:
            self.answer(i, short)

    def answer(self, worker: int, short: Any) -> None:
        run = self.runs[-1][1] if self.runs[-1][0] == worker else None
        run = run or next(run for i, run in reversed(self.runs) if i == worker)
        y = {"y": np.full(3, self.step, "int64")} if worker else {}
        finished = w.JobFinished(run.session, run.job, run.step, run.epoch, Computed(y))
        if short("answer"):
            found = self.workers[worker].encode_answer(finished)
            assert found is not None
            lane, route, (frame, number, known) = found
            send = w.SendMessage(route, *wire.decode(frame), None, lane, known)
            assert send.envelope.sequence == number
        else:
            (send,) = self.workers[worker].handle(finished, self.now)  # type: ignore[misc]
        frame = wire.encode(send.envelope, send.message)
        if short("answered"):
            actions = self.coordinator.accept_answer(worker, frame, self.now)
            assert actions is not None
            self.act(actions)
        else:
            self.act(
                self.coordinator.handle(
                    c.WorkerMessageReceived(worker, send.envelope, send.message), self.now
                )
            )


def run_one_step() -> Cluster:
    """One whose workers know who speaks over the lane."""
    cluster = Cluster()
    cluster.whole_step()
    return cluster


def test_both_ways_leave_the_same_behind_and_say_the_same() -> None:
    one, other = run_one_step(), run_one_step()
    choice = random.Random(5)
    for number in range(300):  # beyond what is acknowledged together
        one.whole_step(small=number % 3 > 0)
        other.whole_step(small=number % 3 > 0, short=lambda what: choice.random() < 0.7)
        assert state(one.coordinator) == state(other.coordinator)
        assert [state(each) for each in one.workers] == [state(each) for each in other.workers]
        assert [state(each) for each in one.runs[-4:]] == [state(each) for each in other.runs[-4:]]
        assert state(one.settled[-1]) == state(other.settled[-1])
    assert len(one.settled) == 303 and all(
        isinstance(each.outcome, c.Replies) for each in one.settled
    )


def test_a_step_by_the_short_way_fetches_what_was_computed() -> None:
    cluster = run_one_step()
    cluster.whole_step(short=lambda what: True)
    (_, settled) = cluster.settled[-2:]
    assert isinstance(settled.outcome, c.Replies)
    found = settled.outcome.arrays[1]["y"]
    assert found.tolist() == [2, 2, 2] and found.flags.writeable
    fed = next(run for i, run in reversed(cluster.runs) if i == 0 and isinstance(run.job, Compute))
    assert fed.arrays["x"].tolist() == [0, 1, 2, 3]


def list_unlike_orders(cluster: Cluster) -> Iterator[tuple[str, bytes, bytes]]:
    """Orders that are not for the short way: why, the route that they come by, and the frame."""
    right = cluster.encode_next_order(0)
    yield "another lane", b"lane 2", right
    yield "traced", LANE, cluster.encode_next_order(0, trace=True)
    yield "free", LANE, cluster.encode_next_order(0, free=True)
    yield "after another step", LANE, cluster.encode_next_order(0, follows=cluster.step)
    yield "with feeds that come before it", LANE, cluster.encode_next_order(0, feeds=["x"])
    yield "that commits another step", LANE, cluster.encode_next_order(0, commits=cluster.step - 1)
    yield "that commits nothing", LANE, cluster.encode_next_order(0, commits=-1)
    yield "of a step that was", LANE, cluster.encode_next_order(0, step=cluster.step)
    damaged = bytearray(X)
    damaged[-1] ^= 1
    yield "with a damaged array", LANE, cluster.encode_next_order(0, small=[X, bytes(damaged)])
    yield "with half an array", LANE, cluster.encode_next_order(0, small=[X[:4]])
    envelope, message = wire.decode(right)
    for name, changes in {
        "after a gap": {"sequence": envelope.sequence + 1},
        "once more": {"sequence": envelope.sequence - 1},
        "of another session": {"session": "6" * 32},
        "of another epoch": {"epoch": 2},
        "of a worker": {"origin": 1},
        "without the secret": {"token": "8" * 32},
    }.items():
        yield name, LANE, wire.encode(envelope._replace(**changes), message)
    yield "no order", LANE, wire.encode(envelope, Abort("OpError", "it failed"))
    yield "a ping", LANE, wire.encode(envelope, Ping())
    yield "nothing", LANE, b""
    yield "half of it", LANE, right[: len(right) // 2]
    yield "more than it", LANE, right + b"\0"


def test_an_order_unlike_the_one_before_is_left_for_the_long_way() -> None:
    cluster = run_one_step()
    cluster.whole_step()
    worker = cluster.workers[0]
    before, names = state(worker), []
    for name, route, frame in list_unlike_orders(cluster):
        assert worker.accept_order(route, frame, cluster.now) is None, name
        assert state(worker) == before, name
        names.append(name)
    assert len(names) > 20
    assert worker.accept_order(LANE, cluster.encode_next_order(0), cluster.now) is not None


def test_an_answer_that_is_not_expected_is_left_for_the_long_way() -> None:
    cluster, stopped = run_one_step(), run_one_step()
    request, step = cluster.request + 1, cluster.step + 1
    repeat = SteadyStateStep(request, step, ORDER, [0, 1], {})
    assert cluster.coordinator.begin_step(repeat, cluster.now) is not None
    inbound, outbound = (
        cluster.coordinator.stream(1).inbound, cluster.coordinator.stream(1).outbound,
    )  # fmt: skip
    right = Envelope(SESSION, 1, 1, step, inbound.received + 1, outbound.last_sent, TOKEN)
    done = Done(request, [], {}, [X])
    before = state(cluster.coordinator)
    for envelope, message in (
        (right._replace(sequence=right.sequence + 1), done),
        (right._replace(sequence=right.sequence - 1), done),
        (right._replace(acknowledged=right.acknowledged - 1), done),
        (right._replace(origin=0), done),
        (right._replace(epoch=2), done),
        (right._replace(token="8" * 32), done),
        (right._replace(session="6" * 32), done),
        (right, replace_fields(done, request=request - 1)),
        (right, replace_fields(done, fetches=["y"])),
        (right, replace_fields(done, peak={"cpu:0": 5})),
        (right, replace_fields(done, small=[X[:-1] + b"?"])),
    ):
        frame = wire.encode(envelope, message)
        assert cluster.coordinator.accept_answer(1, frame, cluster.now) is None
        assert state(cluster.coordinator) == before
    frame = wire.encode(right, done)
    assert cluster.coordinator.accept_answer(1, frame, cluster.now) == []
    assert cluster.coordinator.accept_answer(1, frame, cluster.now) is None, "it has answered"
    assert stopped.coordinator.accept_answer(1, frame, cluster.now) is None, "nothing is under way"


def test_a_step_is_not_begun_shortly_beside_others_or_after_a_loss() -> None:
    cluster, lost, full = run_one_step(), run_one_step(), run_one_step()
    repeat = SteadyStateStep(cluster.request + 1, cluster.step + 1, ORDER, [0, 1], {})
    for order in (
        replace_fields(ORDER, deadline=float("inf")),
        replace_fields(ORDER, bindings={"n": 1 << 70}),
        replace_fields(ORDER, bindings={"n" * 2000: 1}),
    ):
        before = state(cluster.coordinator)
        assert cluster.coordinator.begin_step(repeat._replace(order=order), cluster.now) is None
        assert state(cluster.coordinator) == before
    lost.coordinator.handle(c.WorkerGone(1, "killed by signal 9"), cluster.now)
    assert lost.coordinator.begin_step(repeat, cluster.now) is None
    stream = full.coordinator.stream(0)
    while stream.is_clear:
        stream.send(Commit(), 1)
    assert stream.outbound.pending == WINDOW
    assert full.coordinator.begin_step(repeat, cluster.now) is None
    assert cluster.coordinator.begin_step(repeat, cluster.now) is not None
    again = repeat._replace(request=repeat.request + 1, step=repeat.step + 1)
    assert cluster.coordinator.begin_step(again, cluster.now) is None, "one is under way"


def test_a_worker_answers_the_long_way_what_is_not_for_the_short_one() -> None:
    cluster = run_one_step()
    worker = cluster.workers[1]
    run = worker.accept_order(LANE, cluster.encode_next_order(1), cluster.now)
    assert run is not None and run.commits == cluster.step
    right = w.JobFinished(run.session, run.job, run.step, run.epoch, Computed({"y": np.ones(2)}))
    before = state(worker)
    for finished in (
        right._replace(session="6" * 32),
        right._replace(epoch=2),
        right._replace(step=run.step - 1),
        right._replace(job=Commit()),
        right._replace(outcome=OpError("it failed")),
        right._replace(outcome=Computed({"y": np.ones(1 << 20)})),
        right._replace(outcome=Computed({"y": np.array(["text"])})),
        right._replace(outcome=Computed({}, [("/worker:1/cpu:0", "add", 1, 2)])),
        right._replace(outcome=Computed({}, [], {"cpu:0": 4})),
        right._replace(outcome=Computed({str(i): np.ones(1500) for i in range(40)})),
    ):
        assert worker.encode_answer(finished) is None
        assert state(worker) == before
    assert worker.encode_answer(right) is not None


def test_who_only_answers_is_told_now_and_then_that_its_answers_came() -> None:
    cluster = Cluster(1)
    cluster.whole_step()
    inbound = cluster.coordinator.stream(0).inbound
    inbound._unacknowledged = ACK_EVERY - 1
    assert not cluster.coordinator.stream(0).accept_next(inbound.received + 1, 0)


def test_a_worker_knows_lanes_only_as_long_as_they_and_their_sessions_last() -> None:
    cluster = run_one_step()
    worker = cluster.workers[0]
    frame = cluster.encode_next_order(0)
    envelope, message = wire.decode(frame)
    worker.handle(w.MessageReceived(b"lane 2", envelope, message, None, True), cluster.now)
    assert set(worker._codecs) == {b"lane 2"}, "the session has another lane"
    worker.handle(w.EndWorker("it was asked to end"), cluster.now)
    following = envelope._replace(sequence=envelope.sequence + 1, step=envelope.step + 1)
    told = replace_fields(message, commits=envelope.step)
    assert worker.accept_order(b"lane 2", wire.encode(following, told), cluster.now) is None


@pytest.mark.parametrize("token", ["t" * 2000, "t" * 100_000])
def test_a_secret_that_is_too_long_for_packed_frames_goes_the_long_way(token: str) -> None:
    assert StepCodec.for_worker("s", 1, 0, token) is None
    coordinator = FastPathCoordinator("s", ["tcp://127.0.0.1:7000"], 0.0, 1, token)
    assert coordinator.begin_step(SteadyStateStep(1, 1, ORDER, [0], {}), 0.0) is None
    worker = FastPathWorker(["cpu:0"])
    opening = Envelope("s", 1, COORDINATOR, 0, 1, 0, token)
    message = Open(1, 0, ["tcp://127.0.0.1:7000"], 30.0)
    worker.handle(w.MessageReceived(b"route", opening, message), 0.0)
    order = w.MessageReceived(LANE, opening._replace(step=1, sequence=2), ORDER, None, True)
    assert any(isinstance(each, w.RunJob) for each in worker.handle(order, 0.0))
    assert not worker._codecs

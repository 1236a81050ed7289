"""Both state machines together, in worlds made from seeds, and alone where that says more."""

from __future__ import annotations

import sys
from types import FrameType
from unittest import mock

import numpy as np
import pytest

from graphflow.errors import (
    LinkLost,
    OpError,
    ProtocolError,
    RendezvousTimeout,
    SessionError,
    StaleEpoch,
    StepTimeout,
    VersionMismatch,
    WorkerLost,
)
from graphflow.runtime.protocol import coordinator_events as c
from graphflow.runtime.protocol import worker_events as w
from graphflow.runtime.protocol.coordinator import CoordinatorMachine
from graphflow.runtime.protocol.reliable_stream import Version
from graphflow.runtime.protocol.remote_errors import error_from_message
from graphflow.runtime.protocol.worker import MAX_SESSIONS, WorkerMachine
from graphflow.runtime.protocol.worker_session import WorkerSession
from graphflow.runtime.wire.array_codec import encode_small, split_array
from graphflow.runtime.wire.messages import (
    COORDINATOR,
    UNNUMBERED,
    Abort,
    Ack,
    Broken,
    Chunk,
    Close,
    Commit,
    Compute,
    Done,
    Draining,
    Envelope,
    Failed,
    Fenced,
    Hello,
    Load,
    Open,
    Ping,
    Pong,
    Read,
    Ready,
    Resend,
    Tensor,
    Unreached,
    Welcome,
    Write,
)
from graphflow.runtime.wire.step_values import Computed
from tests.runtime.protocol.simulator import Violation, World, check, small_windows

SEEDS = 2000
BLOCKS = 20


@pytest.mark.every(10)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_in_every_world_all_steps_are_done_exactly_once_whatever_happens(block: int) -> None:
    check(range(block * SEEDS // BLOCKS, (block + 1) * SEEDS // BLOCKS))


@pytest.mark.parametrize("seed", [4356, 17920, 771024, 1007673, 7737795, 7760997])
def test_worlds_that_once_broke_a_promise_keep_it(seed: int) -> None:
    check(range(seed, seed + 1))


def test_worlds_see_losses_failures_timeouts_cancellations_and_stale_coordinators() -> None:
    kinds: set[str] = set()
    with small_windows():
        for seed in range(150):
            kinds |= {line.split()[1].rstrip(":") for line in World(seed).run().log}
    assert kinds >= {"OpError", "WorkerLost", "SessionError", "StepTimeout"}


def test_a_world_is_the_same_again_from_the_same_seed_and_reads_no_clock() -> None:
    def history(seed: int) -> tuple[list[str], int, float]:
        world = World(seed).run()
        return world.log, world.messages, world.now

    with small_windows():
        once = [history(seed) for seed in range(20)]
        with (
            mock.patch("time.time", side_effect=AssertionError),
            mock.patch("time.monotonic", side_effect=AssertionError),
        ):
            assert [history(seed) for seed in range(20)] == once


@pytest.mark.parametrize(
    "workers",
    [1000, pytest.param(10_000, marks=pytest.mark.slow)],  # the larger takes half a minute
)
def test_a_step_is_one_message_each_way_for_each_worker(workers: int) -> None:
    steps = 3
    world = World(0, workers=workers, sessions=1, steps=steps, quiet=True).run()
    others = world.messages["Read"] // workers + world.messages["Write"] // workers
    assert world.messages["Compute"] == steps * workers
    assert world.messages["Done"] == steps * workers + world.messages["Read"]
    # A commit is told by itself only before an order that is no step.
    assert world.messages["Commit"] <= others * workers
    assert world.messages["Abort"] == 0 == world.messages["Resend"]


@pytest.mark.slow
def test_what_the_machines_do_grows_no_faster_than_the_number_of_workers() -> None:
    def lines_a_message(workers: int) -> float:
        count = 0

        def trace(frame: FrameType, event: str, argument: object) -> object:
            nonlocal count
            count += event == "line"
            return trace if "/runtime/protocol/" in frame.f_code.co_filename else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            world = World(0, workers=workers, sessions=1, steps=3, quiet=True).run()
        finally:
            sys.settrace(before)
        return count / world.messages.total()

    few, many = lines_a_message(30), lines_a_message(240)
    assert many < 1.1 * few


def test_a_world_that_breaks_a_promise_names_its_seed_and_how_to_run_it_again() -> None:
    def answer_nothing(self: WorkerSession, message: Commit | Abort, step: int) -> list[object]:
        return []

    with (
        mock.patch.object(WorkerSession, "settle", answer_nothing),
        pytest.raises(Violation, match=r"soak --schedules 1 --seed \d+"),
    ):
        check(range(200))


# The coordinator alone -------------------------------------------------------------------------


class Desk:
    """A coordinator's machine, with workers that say what a test wants."""

    def __init__(self, workers: int = 2, *, welcomed: int | None = None, process: int = 0) -> None:
        addresses = [f"tcp://127.0.0.1:{7000 + index}" for index in range(workers)]
        self.machine = CoordinatorMachine("s", addresses, 0.0)
        self.sent = [0] * workers
        self.process = process
        self.begin(1, dict.fromkeys(range(workers), Hello(1, "", 0, "")), 0.0)
        for worker in range(workers if welcomed is None else welcomed):
            self.welcome(worker, 1, 0.0)
            self.sent[worker] = 1

    def welcome(self, worker: int, number: int, now: float) -> list:
        own = Version.own()
        welcome = Welcome(1, own.version, own.wire, own.python, ["cpu:0"])
        envelope = Envelope("s", 1, worker, self.process + worker, number, 1)
        return self.machine.handle(c.WorkerMessageReceived(worker, envelope, welcome), now)

    def begin(self, request: int, messages: dict, now: float, step: int = 0) -> list:
        orders = {worker: c.Order(message) for worker, message in messages.items()}
        return self.machine.handle(c.BeginOperation(request, orders, 2.0, step), now)

    def step(self, request: int, step: int, now: float) -> list:
        compute = Compute(request, "p", {}, [], False, 2.0)
        return self.begin(request, dict.fromkeys(range(len(self.sent)), compute), now, step)

    def hear(self, worker: int, message: object, now: float, data: object = None) -> list:
        self.sent[worker] += not isinstance(message, UNNUMBERED)
        received = self.machine.stream(worker).outbound.last_sent
        envelope = Envelope("s", 1, worker, 0, self.sent[worker], received)
        return self.machine.handle(c.WorkerMessageReceived(worker, envelope, message, data), now)


def find_settlement(actions: list) -> c.SettleOperation:
    (found,) = [action for action in actions if isinstance(action, c.SettleOperation)]
    return found


def list_receivers(actions: list, kind: type) -> list[int]:
    return [
        a.worker for a in actions if isinstance(a, c.SendToWorker) and isinstance(a.message, kind)
    ]


def test_who_does_not_answer_is_told_with_what_is_known_of_its_connection() -> None:
    desk = Desk(3, welcomed=0)
    for event in (c.LinkUp(1), c.LinkUp(2), c.LinkDown(2, "its process ended")):
        desk.machine.handle(event, 0.1)
    error = find_settlement(desk.machine.handle(c.CoordinatorTick(), 2.0)).outcome
    nobody, busy, ended = str(error).split("; worker ")
    assert "7000 did not answer within 2 s: is `graphflow worker --listen" in nobody
    assert "7001 did not answer within 2 s: it took the connection, but an op holds" in busy
    assert "7002 did not answer within 2 s: it took the connection and ended it" in ended


def test_a_step_commits_when_the_last_worker_has_computed() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    assert desk.hear(0, Done(2, [], {"/worker:0/cpu:0": 5}), 0.1) == []
    actions = desk.hear(1, Done(2, [], {}), 0.2)
    replies = find_settlement(actions).outcome
    due = desk.machine.wake_at(0.2)
    assert due < 0.21 and list_receivers(desk.machine.handle(c.CoordinatorTick(), due), Commit) == [
        0,
        1,
    ]
    assert isinstance(replies, c.Replies) and set(replies.messages) == {0, 1}


def test_commits_that_ride_along_leave_nothing_to_wake_up_for() -> None:
    desk = Desk()
    at = 0.0
    for step in range(1, 5):
        desk.step(step + 1, step, at)
        assert desk.machine.wake_at(at) > at + 0.1
        desk.hear(0, Done(step + 1, [], {}), at + 0.001)
        desk.hear(1, Done(step + 1, [], {}), at + 0.002)
        at += 0.003
        assert at < desk.machine.wake_at(at) < at + 0.005


def test_one_failure_aborts_the_step_everywhere_with_the_remote_traceback() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    desk.hear(0, Done(2, [], {}), 0.1)
    actions = desk.hear(1, Failed(2, "OpError", "matmul_1 failed", "Traceback: line 7"), 0.2)
    assert list_receivers(actions, Abort) == [0, 1]
    error = find_settlement(actions).outcome
    assert isinstance(error, OpError) and "matmul_1 failed" in str(error)
    assert "worker 1" in error.__notes__[0] and "line 7" in error.__notes__[0]


def test_an_error_class_that_is_not_graphflows_is_not_looked_up_elsewhere() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    error = find_settlement(desk.hear(1, Failed(2, "annotations", "x", ""), 0.2)).outcome
    assert type(error) is OpError


def test_a_late_step_times_out_after_a_grace_and_names_who_had_not_finished() -> None:
    desk = Desk()
    desk.step(2, 9, 0.0)
    desk.hear(0, Done(2, [], {}), 0.1)
    assert not [
        a for a in desk.machine.handle(c.CoordinatorTick(), 2.1) if isinstance(a, c.SettleOperation)
    ]
    actions = desk.machine.handle(c.CoordinatorTick(), 2.6)
    assert list_receivers(actions, Abort) == [0, 1]
    error = find_settlement(actions).outcome
    assert isinstance(error, StepTimeout)
    assert "step 9" in str(error) and "worker 1" in str(error) and "worker 0" not in str(error)


def test_a_worker_whose_process_ends_is_lost_at_once_and_the_others_are_told_to_abort() -> None:
    desk = Desk()
    desk.step(2, 3, 0.0)
    actions = desk.machine.handle(c.WorkerGone(1, "killed by signal 9", 'softmax "x"'), 0.1)
    assert list_receivers(actions, Abort) == [0]
    error = find_settlement(actions).outcome
    assert isinstance(error, WorkerLost)
    assert "worker 1" in str(error) and "step 3" in str(error) and "signal 9" in str(error)
    assert (error.worker, error.step, error.reason) == (1, 3, "killed by signal 9")
    assert (error.op, error.program, error.ended) == ('softmax "x"', "p", True)
    again = find_settlement(desk.step(3, 4, 0.2)).outcome
    assert isinstance(again, WorkerLost)


def test_silence_is_death_unless_the_transport_vouches_for_the_process() -> None:
    desk = Desk()
    desk.machine.handle(c.LinkUp(0), 0.0)
    desk.step(2, 3, 3.5)
    desk.machine.handle(c.CoordinatorTick(), 4.4)
    assert not desk.machine.loss_reasons() and desk.machine.wake_at(4.4) == 4.5
    actions = desk.machine.handle(c.CoordinatorTick(), 4.5)
    assert "worker 1" in str(find_settlement(actions).outcome) and set(
        desk.machine.loss_reasons()
    ) == {1}


def test_a_link_that_comes_back_in_time_costs_nothing_and_one_that_does_not_the_worker() -> None:
    desk = Desk()
    desk.machine.handle(c.LinkUp(0), 0.0)
    desk.machine.handle(c.LinkUp(1), 0.0)
    desk.hear(0, Pong(), 7.0)
    assert desk.machine.handle(c.LinkDown(0, "cut off"), 9.0) == []
    assert desk.machine.handle(c.LinkDown(1, "cut off"), 9.0) == []  # it was quiet since 0.0
    desk.machine.handle(c.CoordinatorTick(), 10.4)
    assert desk.machine.wake_at(10.4) == 10.5  # the transport vouched for it 3 s before
    desk.machine.handle(c.LinkUp(1), 10.4)
    desk.step(2, 3, 10.5)
    desk.machine.handle(c.CoordinatorTick(), 11.0)
    assert not desk.machine.loss_reasons()
    actions = desk.machine.handle(c.CoordinatorTick(), 11.5)
    error = find_settlement(actions).outcome
    assert isinstance(error, WorkerLost) and not error.ended
    assert error.worker == 0 and "cut off (silent for 4.5 s)" in error.reason


def test_a_worker_whose_op_holds_the_interpreter_is_late_but_not_dead() -> None:
    desk = Desk()
    for worker in range(2):
        desk.machine.handle(c.LinkUp(worker), 0.0)
    desk.begin(2, dict.fromkeys(range(2), Compute(2, "p", {}, [], False, 30.0)), 0.0, 3)
    desk.hear(0, Pong(), 2.0)
    error = find_settlement(desk.machine.handle(c.CoordinatorTick(), 2.5)).outcome
    assert isinstance(error, StepTimeout) and not desk.machine.loss_reasons()
    assert "worker 1" in str(error) and "holds its Python interpreter" in str(error)
    assert "worker 0 at tcp://127.0.0.1:7000 had not finished" in str(error)


def report_unreached(desk: Desk, asked: int, now: float, step: int = 3) -> list:
    """Worker 0 says that worker 1 takes nothing of edge 5."""
    envelope = Envelope("s", 1, 0, step, desk.sent[0], 0)
    return desk.machine.handle(c.WorkerMessageReceived(0, envelope, Unreached(1, asked, 5)), now)


def test_workers_that_both_answer_but_do_not_reach_each_other_end_their_step_by_name() -> None:
    desk = Desk()
    desk.begin(2, dict.fromkeys(range(2), Compute(2, "p", {}, [], False, 30.0)), 0.0, 3)
    for second in range(1, 6):
        for worker in range(2):
            desk.hear(worker, Pong(), float(second))
    assert report_unreached(desk, 8, 5.0) == [], "it may still heal"
    assert report_unreached(desk, 9, 5.0, step=2) == [], "of a step that is over"
    actions = report_unreached(desk, 9, 5.0)
    assert list_receivers(actions, Abort) == [0, 1] and not desk.machine.loss_reasons()
    error = find_settlement(actions).outcome
    assert isinstance(error, LinkLost) and isinstance(error, StepTimeout)
    assert (error.source, error.target, error.step, error.edge) == (0, 1, 3, 5)
    assert "worker 0 at" in str(error) and "worker 1 at" in str(error) and "edge 5" in str(error)


def test_a_worker_whose_interpreter_was_held_is_not_taken_for_cut_off_from_another() -> None:
    desk = Desk()
    for worker in range(2):
        desk.machine.handle(c.LinkUp(worker), 0.0)
    desk.begin(2, dict.fromkeys(range(2), Compute(2, "p", {}, [], False, 30.0)), 0.0, 3)
    assert report_unreached(desk, 12, 6.0) == [], "it says nothing to us either"
    desk.hear(1, Pong(), 6.1)
    assert report_unreached(desk, 13, 6.2) == [], "it has just begun to answer"
    for now in (7.0, 8.0, 9.0):
        desk.hear(1, Pong(), now)
    assert isinstance(find_settlement(report_unreached(desk, 18, 9.1)).outcome, LinkLost)


def test_no_heartbeat_goes_to_a_worker_that_does_not_know_the_session_yet() -> None:
    desk = Desk()
    assert not list_receivers(desk.machine.handle(c.CoordinatorTick(), 1.1), Ping)
    addresses = [f"tcp://127.0.0.1:{7000 + index}" for index in range(2)]
    desk.begin(2, {w: Open(2, w, addresses, 30.0, [], []) for w in range(2)}, 1.2)
    assert list_receivers(desk.machine.handle(c.CoordinatorTick(), 2.2), Open) == [
        0,
        1,
    ]  # it may have been lost
    desk.hear(0, Ready(2), 2.3)
    assert list_receivers(desk.machine.handle(c.CoordinatorTick(), 3.2), Ping) == [0]


def test_one_who_has_answered_the_first_call_is_not_lost_while_others_are_awaited() -> None:
    desk = Desk(welcomed=1)
    for now in range(1, 12):
        actions = desk.machine.handle(c.CoordinatorTick(), float(now))
        assert list_receivers(actions, Hello) == [0, 1]
        for send in actions:
            if isinstance(send, c.SendToWorker) and send.worker == 0:
                desk.welcome(0, send.envelope.sequence, float(now))
    assert not desk.machine.loss_reasons()
    desk.machine.handle(c.CoordinatorTick(), 15.6)
    assert set(desk.machine.loss_reasons()) == {0}, "it does not answer any more"


def test_a_session_is_opened_on_the_process_that_has_answered_the_first_call() -> None:
    desk = Desk(process=70)
    addresses = [f"tcp://127.0.0.1:{7000 + index}" for index in range(2)]
    opened = desk.begin(2, {w: Open(2, w, addresses, 30.0, [], []) for w in range(2)}, 1.2)
    assert [send.envelope.step for send in opened] == [70, 71]


def test_a_worker_that_never_answers_the_first_call_is_a_rendezvous_timeout() -> None:
    machine = CoordinatorMachine("s", ["tcp://127.0.0.1:7001"], 0.0)
    order = c.Order(Hello(1, "", 0, ""))
    machine.handle(c.BeginOperation(1, {0: order}, 5.0), 0.0)
    error = find_settlement(machine.handle(c.CoordinatorTick(), 5.0)).outcome
    assert isinstance(error, RendezvousTimeout) and "graphflow worker" in str(error)


def test_other_versions_are_refused_with_both_named() -> None:
    machine = CoordinatorMachine("s", ["tcp://127.0.0.1:7001"], 0.0)
    machine.handle(c.BeginOperation(1, {0: c.Order(Hello(1, "", 0, ""))}, 5.0), 0.0)
    welcome = Welcome(1, "9.9.9", 1, "3.11", ["cpu:0"])
    event = c.WorkerMessageReceived(0, Envelope("s", 1, 0, 0, 1), welcome)
    error = find_settlement(machine.handle(event, 0.1)).outcome
    assert isinstance(error, VersionMismatch)
    assert "9.9.9" in str(error) and Version.own().version in str(error)


def test_what_is_missing_is_asked_for_once_and_then_taken_in_order() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    ((chunk, data),) = split_array("fetch", 2, "y", np.arange(2))
    late = [
        c.WorkerMessageReceived(0, Envelope("s", 1, 0, 1, 3), Done(2, ["y"], {})),
        c.WorkerMessageReceived(0, Envelope("s", 1, 0, 1, 4), Done(9, [], {})),
    ]
    asked = [a.message for event in late for a in desk.machine.handle(event, 0.1)]
    assert asked.count(Resend(2, 1)) == 1
    desk.machine.handle(c.WorkerMessageReceived(0, Envelope("s", 1, 0, 1, 2), chunk, data), 0.2)
    desk.machine.handle(late[0], 0.2)
    replies = find_settlement(desk.hear(1, Done(2, [], {}), 0.3)).outcome
    assert isinstance(replies, c.Replies) and replies.arrays[0]["y"].tolist() == [0, 1]


def test_a_message_that_comes_twice_counts_once_and_one_of_another_epoch_never() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    done = c.WorkerMessageReceived(0, Envelope("s", 1, 0, 0, 2), Done(2, [], {}))
    stale = c.WorkerMessageReceived(1, Envelope("s", 0, 1, 0, 2), Done(2, [], {}))
    assert desk.machine.handle(done, 0.1) == desk.machine.handle(done, 0.1) == []
    (answer,) = desk.machine.handle(stale, 0.1)
    assert isinstance(answer.message, Fenced)
    desk.sent[0] = 2
    assert isinstance(find_settlement(desk.hear(1, Done(2, [], {}), 0.2)).outcome, c.Replies)


def test_the_next_step_carries_the_commit_and_any_other_order_follows_it() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    for worker in range(2):
        desk.hear(worker, Done(2, [], {}), 0.1)
    first, second = desk.step(3, 2, 0.101)
    assert first.message.commits == second.message.commits == 1
    assert not list_receivers(desk.machine.handle(c.CoordinatorTick(), 0.2), Commit)
    for worker in range(2):
        desk.hear(worker, Done(3, [], {}), 0.3)
    commit, read = desk.begin(4, {0: Read(4, "w")}, 0.301)
    assert isinstance(commit.message, Commit) and commit.envelope.step == 2
    assert isinstance(read.message, Read)
    assert list_receivers(desk.machine.handle(c.CoordinatorTick(), 0.4), Commit) == [1]


def begin_ahead(desk: Desk, request: int, step: int, follows: int, *, free: bool) -> list:
    """Begins a step that is not decided before it is released."""
    order = Compute(request, "p", {}, [], False, 2.0, follows=follows, free=free)
    orders = {worker: c.Order(order) for worker in range(2)}
    return desk.machine.handle(
        c.BeginOperation(request, orders, 2.0, step, follows, is_held=True), 0.0
    )


def test_free_steps_need_no_word_in_between_and_others_do() -> None:
    for free in (True, False):
        desk = Desk()
        begin_ahead(desk, 2, 1, -1, free=free)
        begin_ahead(desk, 3, 2, 1, free=free)
        for worker in range(2):
            desk.hear(worker, Done(2, [], {}), 0.1)
        released = desk.machine.handle(c.ReleaseStep(2), 0.1)
        orders = [
            (a.message.request, a.message.commits)
            for a in released
            if isinstance(a, c.SendToWorker)
        ]
        assert orders == ([] if free else [(3, 1), (3, 1)])  # no commit is a message of its own
        actions = begin_ahead(desk, 4, 3, 2, free=free)
        carried = [a.message.commits for a in actions if isinstance(a, c.SendToWorker)]
        assert carried == ([1, 1] if free else [])  # else it waits here for step 2


def test_a_free_step_that_fails_early_is_told_when_the_one_before_it_is_decided() -> None:
    desk = Desk()
    begin_ahead(desk, 2, 1, -1, free=True)
    begin_ahead(desk, 3, 2, 1, free=True)
    desk.hear(0, Done(2, [], {}), 0.1)
    assert desk.hear(0, Failed(3, "OpError", "bad", ""), 0.1) == []
    desk.hear(1, Done(2, [], {}), 0.1)
    actions = desk.machine.handle(c.ReleaseStep(2), 0.2)
    ends = {a.request: a.outcome for a in actions if isinstance(a, c.SettleOperation)}
    assert isinstance(ends[2], c.Replies) and isinstance(ends[3], OpError)
    told_to_0 = [a.message for a in actions if isinstance(a, c.SendToWorker) and a.worker == 0]
    assert [type(message) for message in told_to_0] == [Commit, Abort]  # in this order


def test_a_step_that_fails_takes_those_that_follow_it_along_free_or_not() -> None:
    for free in (True, False):
        desk = Desk()
        begin_ahead(desk, 2, 1, -1, free=free)
        begin_ahead(desk, 3, 2, 1, free=free)
        if free:
            desk.hear(0, Done(3, [], {}), 0.1)
        actions = desk.hear(0, Failed(2, "OpError", "bad", ""), 0.1)
        ends = {a.request: a.outcome for a in actions if isinstance(a, c.SettleOperation)}
        assert isinstance(ends[2], OpError) and "was not run" in str(ends[3])
        assert desk.machine.handle(c.ReleaseStep(3), 0.2) == []


def test_a_step_is_not_decided_before_the_one_that_it_follows() -> None:
    for free in (True, False):
        desk = Desk()
        begin_ahead(desk, 2, 1, -1, free=free)
        begin_ahead(desk, 3, 2, 1, free=free)
        refused = find_settlement(desk.machine.handle(c.ReleaseStep(3), 0.1))
        assert refused.request == 3 and isinstance(refused.outcome, SessionError)
        assert "step 2 was to be decided before step 1" in str(refused.outcome)
        for worker in range(2):
            desk.hear(worker, Done(2, [], {}), 0.1)
        actions = desk.machine.handle(c.ReleaseStep(2), 0.2)
        ends = {a.request: a.outcome for a in actions if isinstance(a, c.SettleOperation)}
        assert isinstance(ends[2], c.Replies) and isinstance(ends[3], SessionError)
        assert list_receivers(actions, Abort) == (
            [0, 1] if free else []
        )  # of what they were ordered to do


def test_a_coordinator_that_another_one_replaced_is_told_so_and_ends_all_it_does() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    answer = Fenced("StaleEpoch", "session s has epoch 3 by now")
    event = c.WorkerMessageReceived(1, Envelope("s", 3, 1, 1, 0), answer)
    error = find_settlement(desk.machine.handle(event, 0.1)).outcome
    assert isinstance(error, StaleEpoch) and "epoch 3" in str(error) and "epoch 1" in str(error)
    assert isinstance(find_settlement(desk.step(3, 2, 0.2)).outcome, StaleEpoch)
    assert desk.machine.handle(c.CoordinatorTick(), 5.0) == []


def test_a_worker_that_was_told_to_close_the_session_may_say_that_it_does_not_know_it() -> None:
    stale = Fenced("StaleSession", "it does not know the session any more: it was closed")

    def says(desk: Desk, worker: int) -> list[c.CoordinatorAction]:
        event = c.WorkerMessageReceived(worker, Envelope("s", 1, worker, 0, 0), stale)
        return desk.machine.handle(event, 1.1)

    desk = Desk()
    assert list_receivers(desk.begin(2, {worker: Close(2) for worker in range(2)}, 0.0), Close) == [
        0,
        1,
    ]
    desk.hear(0, Ready(2), 0.1)
    assert says(desk, 0) == []  # others have not closed it yet
    end = find_settlement(says(desk, 1))  # its answer comes by another way, later
    assert isinstance(end.outcome, c.Replies) and not desk.machine.loss_reasons()
    assert desk.hear(1, Ready(2), 1.2) == []
    stranger = Desk()
    says(stranger, 1)
    assert [*stranger.machine.loss_reasons()] == [1]


def test_a_worker_that_missed_a_recovery_is_told_so_and_not_listened_to() -> None:
    machine = CoordinatorMachine("s", ["tcp://127.0.0.1:7001"], 0.0, epoch=2, token="t")
    event = c.WorkerMessageReceived(0, Envelope("s", 1, 0, 0, 1, token="t"), Done(2, [], {}))
    (sent,) = machine.handle(event, 0.1)
    assert isinstance(sent.message, Fenced) and sent.message.error == "StaleEpoch"
    assert sent.envelope.epoch == 2
    stranger = c.WorkerMessageReceived(0, Envelope("s", 2, 0, 0, 1, token="guess"), Done(2, [], {}))
    assert machine.handle(stranger, 0.1) == []


def test_a_window_that_is_full_holds_back_what_is_sent_until_it_is_acknowledged() -> None:
    desk = Desk()
    big = np.zeros(40 << 20, np.uint8)
    order = c.Order(Write(3, "w"), [("value", "w", big), ("value", "v", big)])
    sent = desk.machine.handle(c.BeginOperation(3, {0: order}, 2.0), 0.0)
    assert sum(len(action.data) for action in sent) == 64 << 20
    acknowledged = sent[-1].envelope.sequence
    event = c.WorkerMessageReceived(0, Envelope("s", 1, 0, 0, 1, acknowledged), Ack())
    rest = desk.machine.handle(event, 0.1)
    assert sum(len(a.data) for a in rest if a.data is not None) == 16 << 20
    assert isinstance(rest[-1].message, Write)


def test_a_result_that_was_announced_but_not_sent_loses_the_worker() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    error = find_settlement(desk.hear(0, Done(2, ["loss"], {}), 0.1)).outcome
    assert isinstance(error, WorkerLost) and "not sent" in str(error)


def test_cancelling_aborts_the_step_but_no_other_request() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    desk.begin(3, {0: Read(3, "w")}, 0.0)
    actions = desk.machine.handle(c.CancelSteps(), 0.1)
    assert list_receivers(actions, Abort) == [0, 1]
    assert find_settlement(actions).request == 2 and isinstance(
        find_settlement(actions).outcome, SessionError
    )


def test_an_array_that_cannot_travel_is_refused_and_leaves_no_gap() -> None:
    desk = Desk()
    before = desk.step(2, 1, 0.0)[0].envelope.sequence
    order = c.Order(Write(3, "w"), [("value", "a", np.zeros(2)), ("value", "w", np.array([None]))])
    with pytest.raises(ProtocolError, match="object"):
        desk.machine.handle(c.BeginOperation(3, {0: order}, 2.0), 0.1)
    (sent,) = desk.begin(4, {0: Read(4, "w")}, 0.2)
    assert sent.envelope.sequence == before + 1


# A worker alone --------------------------------------------------------------------------------


class Shop:
    """A worker's machine with one open session, worker 0 of 2, ordered by the route b"boss"."""

    def __init__(self, lease: float = 10.0) -> None:
        self.machine = WorkerMachine(["cpu:0"])
        self.sent: dict[int, int] = {}
        peers = ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"]
        self.opened = self.order(Open(1, 0, peers, lease), 0.0)
        self.machine.handle(w.JobFinished("s", self.opened[0].job, 0, 1, None), 0.0)

    def order(self, message: object, now: float, step: int = 0, data: object = None) -> list:
        return self.say(COORDINATOR, message, now, step, data)

    def say(
        self, origin: int, message: object, now: float, step: int = 0, data: object = None
    ) -> list:
        self.sent[origin] = self.sent.get(origin, 0) + (not isinstance(message, UNNUMBERED))
        envelope = Envelope("s", 1, origin, step, self.sent[origin])
        route = b"boss" if origin == COORDINATOR else b"peer"
        return self.machine.handle(w.MessageReceived(route, envelope, message, data), now)

    def tensor(self, step: int, array: np.ndarray, now: float = 1.0) -> list:
        ((chunk, data),) = split_array("edge", step, "e", array)
        return self.say(1, chunk, now, step, data)


def compute(request: int) -> Compute:
    return Compute(request, "p", {}, [], False, 5.0)


def make_following_step(
    request: int, follows: int, *, free: bool = True, program: str = "p"
) -> Compute:
    return Compute(request, program, {}, [], False, 5.0, follows=follows, free=free)


def runs(actions: list) -> list[tuple[str, int]]:
    return [(type(a.job).__name__, a.step) for a in actions if isinstance(a, w.RunJob)]


def test_a_worker_computes_free_steps_of_one_program_at_once_and_others_after_the_commit() -> None:
    shop = Shop()
    assert runs(shop.order(compute(2), 1.0, step=1)) == [("Compute", 1)]
    assert runs(shop.order(make_following_step(3, 1), 1.0, step=2)) == [("Compute", 2)]
    assert runs(shop.order(make_following_step(4, 2), 1.0, step=3)) == [("Compute", 3)]
    assert runs(shop.order(make_following_step(5, 3, program="q"), 1.0, step=4)) == []
    assert runs(shop.order(make_following_step(6, 4, program="q"), 1.0, step=5)) == []
    commits = shop.order(Commit(), 2.0, step=2)
    assert runs(commits) == [("Commit", 1), ("Commit", 2)]
    assert runs(shop.order(Commit(), 2.0, step=3)) == [("Commit", 3), ("Compute", 4)]
    assert runs(shop.order(Commit(), 2.0, step=4)) == [("Commit", 4), ("Compute", 5)]


def test_a_worker_that_is_told_to_abort_a_step_ends_those_that_follow_it_and_no_other() -> None:
    shop = Shop()
    shop.order(compute(2), 1.0, step=1)
    for step in (2, 3):
        shop.order(make_following_step(step + 1, step - 1), 1.0, step=step)
    shop.order(make_following_step(5, 3, free=False), 1.0, step=4)
    assert runs(shop.order(Commit(), 2.0, step=1)) == [("Commit", 1)]
    actions = shop.order(Abort("SessionError", "no"), 2.0, step=2)
    assert runs(actions) == [("Abort", 3)]
    (wake,) = [a for a in actions if isinstance(a, w.CancelStep)]
    assert wake.step == 3
    late = w.JobFinished("s", make_following_step(4, 2), 3, 1, Computed())
    assert shop.machine.handle(late, 2.0) == []
    assert shop.order(Abort("SessionError", "no"), 2.0, step=4) == []
    assert runs(shop.order(compute(9), 3.0, step=9)) == [("Compute", 9)]


def test_answers_go_by_the_lane_that_the_coordinator_used_and_to_pings_never() -> None:
    shop = Shop()
    read = w.MessageReceived(
        b"lane 1", Envelope("s", 1, COORDINATOR, 0, 2), Read(2, "w"), is_fast=True
    )
    (run,) = shop.machine.handle(read, 1.0)
    done = w.JobFinished("s", run.job, 0, 1, np.zeros(3))
    (answer,) = shop.machine.handle(done, 1.0)
    assert (answer.route, answer.fast_route) == (b"boss", b"lane 1")
    ping = w.MessageReceived(b"new", Envelope("s", 1, COORDINATOR, 0, 2), Ping(sent=1.0))
    (pong,) = shop.machine.handle(ping, 1.0)
    assert (pong.route, pong.fast_route) == (b"new", b"")


def test_what_is_played_back_takes_no_answers_away_and_keeps_no_session_alive() -> None:
    shop = Shop(lease=10.0)
    shop.order(compute(2), 1.0, step=1)
    ping = Envelope("s", 1, COORDINATOR, 0, 2)
    shop.machine.handle(w.MessageReceived(b"boss", ping, Ping(sent=5.0)), 2.0)
    recorded = [
        (shop.opened[0].job, ping._replace(sequence=1)),
        (compute(2), ping._replace(step=1)),
        (Ping(sent=4.0), ping),
        (Ping(sent=5.0), ping),
        (Resend(1, 0), ping),
        (Ack(asks=True), ping),
    ]
    for message, envelope in recorded:
        told = shop.machine.handle(w.MessageReceived(b"thief", envelope, message), 9.0)
        assert b"thief" not in [a.route for a in told if isinstance(a, w.SendMessage)]
        assert not isinstance(message, Ping) or told == []
    (answer,) = shop.machine.handle(w.JobFinished("s", compute(2), 1, 1, Computed()), 9.0)
    assert answer.route == b"boss"
    assert shop.machine.handle(w.WorkerTick(), 11.9) and shop.machine.sessions == ["s"]
    shop.machine.handle(w.WorkerTick(), 12.1)
    assert shop.machine.sessions == []


def test_a_link_is_told_of_what_small_tensors_acknowledge_together() -> None:
    shop = Shop()
    sent = encode_small(3, np.arange(3.0))
    assert sent is not None
    told = []
    for number in range(1, 30):
        envelope = Envelope("s", 1, 1, number, number, number)
        actions = shop.machine.handle(w.MessageReceived(b"peer", envelope, Tensor(sent)), 1.0)
        told += [action for action in actions if isinstance(action, w.UpdatePeerLink)]
    assert [each.acknowledged for each in told] == [8, 16, 24]
    assert [each.received for each in told] == [8, 16, 24]


def test_a_worker_says_who_it_is_before_any_session() -> None:
    machine = WorkerMachine(["cpu:0", "cpu:1"])
    event = w.MessageReceived(b"x", Envelope("s", 1, COORDINATOR, 0, 1), Hello(1, "0", 1, "3.11"))
    (sent,) = machine.handle(event, 0.0)
    assert isinstance(sent.message, Welcome) and sent.message.devices == ["cpu:0", "cpu:1"]
    assert machine.sessions == []


def test_an_order_without_the_sessions_token_is_answered_with_stale_session() -> None:
    shop = Shop()
    event = w.MessageReceived(
        b"stranger", Envelope("s", 1, COORDINATOR, 1, 2, token="guess"), Close(9)
    )
    (answer,) = shop.machine.handle(event, 1.0)
    assert answer.route == b"stranger" and answer.message.error == "StaleSession"
    assert answer.envelope.token == "guess" and shop.machine.sessions == ["s"]


def test_a_reconnected_coordinator_is_answered_where_it_is_now() -> None:
    shop = Shop()
    ping = w.MessageReceived(b"new way", Envelope("s", 1, COORDINATOR, 0, 1), Ping())
    (answer,) = shop.machine.handle(ping, 1.0)
    assert answer.route == b"new way"


def test_a_recovery_opens_the_session_anew_and_fences_the_epoch_before_it() -> None:
    shop = Shop()
    shop.order(compute(2), 1.0, step=1)
    again = Envelope("s", 2, COORDINATOR, 0, 2)
    opening = Open(1, 0, ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"], 10.0)
    wake, close, run = shop.machine.handle(w.MessageReceived(b"next", again, opening), 2.0)
    assert isinstance(wake, w.CancelStep) and isinstance(wake.error, StaleEpoch)
    assert isinstance(close.job, Close) and close.epoch == 1
    assert isinstance(run.job, Open) and run.epoch == 2
    late = w.JobFinished("s", compute(2), 1, 1, Computed({}, [], {}))
    assert shop.machine.handle(late, 2.1) == []
    (answer,) = shop.order(Commit(), 2.2, step=1)
    assert answer.message.error == "StaleEpoch" and answer.envelope.epoch == 2
    assert answer.route == b"boss"
    assert shop.tensor(1, np.arange(3.0)) == []


def test_a_worker_that_was_frozen_over_a_recovery_gives_up_its_epoch() -> None:
    shop = Shop()
    shop.order(compute(2), 1.0, step=1)
    told = w.MessageReceived(
        b"next", Envelope("s", 2, COORDINATOR, 0, 0), Fenced("StaleEpoch", "epoch 2 by now")
    )
    wake, close = shop.machine.handle(told, 9.0)
    assert isinstance(wake.error, StaleEpoch) and isinstance(close.job, Close)
    assert shop.machine.sessions == []


def test_an_opening_that_is_played_back_after_the_session_ended_opens_nothing() -> None:
    shop = Shop()
    opening = shop.opened[0].job
    shop.order(Close(5), 1.0)
    replayed = w.MessageReceived(b"stranger", Envelope("s", 1, COORDINATOR, 0, 1), opening)
    (answer,) = shop.machine.handle(replayed, 2.0)
    assert answer.message.error == "StaleSession" and shop.machine.sessions == []


def test_an_opening_that_was_meant_for_the_process_before_opens_nothing() -> None:
    machine = WorkerMachine(["cpu:0"], process=2)
    opening = Open(1, 0, ["tcp://127.0.0.1:7000"], 10.0)
    late = w.MessageReceived(b"boss", Envelope("s", 1, COORDINATOR, 1, 2), opening)
    (answer,) = machine.handle(late, 0.0)
    assert answer.message.error == "StaleSession" and "restarted" in answer.message.text
    assert machine.sessions == []
    hello = w.MessageReceived(
        b"boss", Envelope("s", 2, COORDINATOR, 0, 1), Hello(1, "0", 1, "3.11")
    )
    (welcome,) = machine.handle(hello, 1.0)
    mine = Envelope("s", 2, COORDINATOR, welcome.envelope.step, 2)
    assert machine.handle(w.MessageReceived(b"boss", mine, opening), 2.0)[0].job is opening


def test_an_epoch_that_was_open_in_the_process_before_is_told_so_beside_a_lower_one() -> None:
    shop = Shop()
    ping = w.MessageReceived(b"next", Envelope("s", 2, COORDINATOR, 0, 9, 7), Ping())
    (answer,) = shop.machine.handle(ping, 1.0)
    assert answer.message.error == "StaleSession" and answer.route == b"next"
    assert answer.envelope.epoch == 2 and shop.machine.sessions == ["s"]


def test_a_damaged_piece_of_an_array_is_asked_for_again() -> None:
    shop = Shop()
    ((chunk, data),) = split_array("edge", 1, "e", np.arange(3.0))
    damaged = bytes(data)[:-1] + b"!"
    (heard,) = shop.say(1, chunk, 1.0, 1, damaged)
    assert (
        isinstance(heard, w.UpdatePeerLink) and heard.told == Resend(1, 1) and heard.received == 0
    )
    shop.sent[1] -= 1
    heard, deliver = shop.say(1, chunk, 1.1, 1, data)
    assert isinstance(deliver, w.DeliverTensor) and deliver.array.tolist() == [0, 1, 2]
    assert heard.told is None and heard.received == 1


def test_a_damaged_small_array_is_asked_for_again() -> None:
    shop = Shop()
    sent = encode_small("e", np.arange(3.0))
    assert sent is not None
    damaged = sent[:-1] + b"!"
    (heard,) = shop.say(1, Tensor(damaged), 1.0, 1)
    assert isinstance(heard, w.UpdatePeerLink) and heard.told == Resend(1, 1)
    shop.sent[1] -= 1
    (deliver,) = shop.say(1, Tensor(sent), 1.1, 1)
    assert isinstance(deliver, w.DeliverTensor) and deliver.array.tolist() == [0, 1, 2]


def test_a_worker_that_is_asked_to_end_tells_its_sessions_and_takes_no_more() -> None:
    shop = Shop()
    (told,) = shop.machine.handle(w.DrainWorker(20.0), 1.0)
    assert told.message == Draining(20.0) and told.route == b"boss"
    other = w.MessageReceived(b"x", Envelope("t", 1, COORDINATOR, 0, 1), shop.opened[0].job)
    (refused,) = shop.machine.handle(other, 1.1)
    assert isinstance(refused.message, Failed) and "worker 0 at tcp:" in refused.message.text
    shop.order(Close(7), 2.0)
    assert shop.machine.sessions == []


def test_a_session_is_parked_while_its_coordinator_is_silent_and_goes_on_when_it_is_not() -> None:
    shop = Shop(lease=30.0)
    shop.order(compute(2), 1.0, step=1)
    assert shop.machine.parked_sessions(4.0) == [] and shop.machine.parked_sessions(8.0) == ["s"]
    assert not [
        a
        for a in shop.machine.handle(w.WorkerTick(), 20.0)
        if isinstance(a, w.RunJob | w.CancelStep)
    ]
    (run,) = shop.order(Commit(), 25.0, step=1)
    assert isinstance(run.job, Commit) and shop.machine.parked_sessions(25.0) == []


def test_tensors_of_a_step_are_delivered_before_it_starts_and_dropped_after_it_ended() -> None:
    shop = Shop()
    _, early = shop.tensor(1, np.arange(3.0))
    assert isinstance(early, w.DeliverTensor) and early.array.tolist() == [0, 1, 2]
    shop.order(compute(2), 1.0, step=1)
    shop.order(Abort("StepTimeout", "late"), 1.0, step=1)
    (heard,) = shop.tensor(1, np.arange(3.0))
    assert isinstance(heard, w.UpdatePeerLink)
    assert isinstance(shop.tensor(2, np.arange(3.0))[1], w.DeliverTensor)


def test_an_abort_wakes_the_step_and_its_result_is_not_reported() -> None:
    shop = Shop()
    shop.order(compute(2), 1.0, step=1)
    wake, run = shop.order(Abort("WorkerLost", "worker 1 died"), 1.1, step=1)
    assert isinstance(wake, w.CancelStep) and isinstance(wake.error, WorkerLost)
    assert isinstance(run, w.RunJob) and isinstance(run.job, Abort)
    late = w.JobFinished("s", compute(2), 1, 1, Computed({}, [], {}))
    assert shop.machine.handle(late, 1.2) == []


def test_a_commit_that_fails_breaks_the_session() -> None:
    shop = Shop()
    shop.order(compute(2), 1.0, step=1)
    shop.order(Commit(), 1.1, step=1)
    actions = shop.machine.handle(w.JobFinished("s", Commit(), 1, 1, OSError("disk")), 1.2)
    assert isinstance(actions[0].message, Broken) and shop.machine.sessions == []


def test_a_silent_coordinator_loses_its_session_and_a_ping_keeps_it() -> None:
    shop = Shop(lease=10.0)
    assert isinstance(shop.order(Ping(), 8.0)[0].message, Pong)
    assert not [a for a in shop.machine.handle(w.WorkerTick(), 17.0) if isinstance(a, w.RunJob)]
    shop.order(compute(2), 17.0, step=1)
    for now in (21.0, 25.0):
        shop.machine.handle(w.WorkerTick(), now)
    wake, run = shop.machine.handle(w.WorkerTick(), 27.1)[-2:]
    assert isinstance(wake, w.CancelStep) and isinstance(run.job, Close)
    (answer,) = shop.order(Ping(), 29.0)
    assert isinstance(answer.message, Fenced) and "lease" in answer.message.text


def test_a_worker_that_was_stopped_does_not_take_that_time_for_silence() -> None:
    """All of a machine may have been: it waits for its coordinator as long as it would have."""
    shop = Shop(lease=10.0)
    shop.machine.handle(w.WorkerTick(), 1.0)
    shop.machine.handle(w.WorkerTick(), 100.0)
    assert shop.machine.sessions == ["s"] and shop.machine.parked_sessions(102.0) == []
    shop.machine.handle(w.WorkerTick(), 104.0)
    shop.machine.handle(w.WorkerTick(), 108.0)
    assert shop.machine.sessions == ["s"]
    shop.machine.handle(w.WorkerTick(), 109.1)
    assert shop.machine.sessions == []


def test_two_sessions_on_one_worker_do_not_see_each_other() -> None:
    shop = Shop()
    other = Envelope("t", 1, COORDINATOR, 0, 1)
    opening = Open(1, 1, ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"], 10.0)
    shop.machine.handle(w.MessageReceived(b"other", other, opening), 0.5)
    assert shop.machine.sessions == ["s", "t"]
    stolen = Envelope("s", 1, COORDINATOR, 0, 2, token="of t")
    (refused,) = shop.machine.handle(w.MessageReceived(b"other", stolen, Close(5)), 1.0)
    assert refused.message.error == "StaleSession" and shop.machine.sessions == ["s", "t"]
    closing = shop.order(Close(2), 1.0)
    assert isinstance(closing[-1].message, Ready) and shop.machine.sessions == ["t"]


def test_a_step_must_be_newer_than_the_ones_before_it() -> None:
    shop = Shop()
    shop.order(compute(2), 1.0, step=4)
    (answer,) = shop.order(compute(3), 1.0, step=4)
    assert isinstance(answer.message, Failed) and answer.message.error == "ProtocolError"


def test_a_feed_that_was_announced_but_not_sent_is_an_error_of_that_request() -> None:
    shop = Shop()
    (answer,) = shop.order(Compute(2, "p", {}, ["x"], False, 5.0), 1.0, step=1)
    assert isinstance(answer.message, Failed) and "x" in answer.message.text
    assert isinstance(shop.order(compute(3), 1.0, step=2)[0], w.RunJob)


def test_arrays_of_a_program_arrive_in_parts() -> None:
    shop = Shop()
    for index, part in enumerate([np.frombuffer(b"head", np.uint8), np.eye(2)]):
        ((chunk, data),) = split_array("part", 2, index, part)
        assert shop.order(chunk, 1.0, data=data) == []
    (run,) = shop.order(Load(2, "p", 2), 1.0)
    assert run.arrays[0].tobytes() == b"head" and run.arrays[1].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("purpose", ["fetch", "feed", "nonsense"])
def test_a_peer_that_sends_what_is_not_a_peers_to_send_breaks_the_session(purpose: str) -> None:
    shop = Shop()
    chunk = Chunk(purpose, 1, "e", "float32", [1], [0], 4, 0)
    actions = shop.say(1, chunk, 1.0, data=b"\0" * 4)
    assert isinstance(actions[0].message, Broken) and "worker 1" in actions[0].message.reason


@pytest.mark.parametrize("lease", [0.0, -1.0, 1e300, float("inf"), float("nan")])
def test_nobody_parks_a_session_for_good(lease: float) -> None:
    machine = WorkerMachine(["cpu:0"])
    opening = Open(1, 0, ["tcp://127.0.0.1:7000"], lease)
    (answer,) = machine.handle(w.MessageReceived(b"x", Envelope("s", 1, -1, 0, 1), opening), 0.0)
    assert isinstance(answer.message, Failed) and "lease" in answer.message.text
    assert not machine.parked_sessions(60.0)


def test_a_session_has_a_short_name_for_it_is_remembered() -> None:
    machine = WorkerMachine(["cpu:0"])
    opening = Open(1, 0, ["tcp://127.0.0.1:7000"], 10.0)
    for length in (64, 65):
        name = "s" * length
        (answer,) = machine.handle(
            w.MessageReceived(b"x", Envelope(name, 1, -1, 0, 1), opening), 0.0
        )
    assert isinstance(answer.message, Failed) and "65 characters" in answer.message.text
    assert machine.sessions == ["s" * 64]


def test_too_many_sessions_are_refused() -> None:
    machine = WorkerMachine(["cpu:0"])
    opening = Open(1, 0, ["tcp://127.0.0.1:7000"], 10.0)
    for index in range(MAX_SESSIONS):
        machine.handle(w.MessageReceived(b"x", Envelope(f"s{index}", 1, -1, 0, 1), opening), 0.0)
    (answer,) = machine.handle(w.MessageReceived(b"x", Envelope("more", 1, -1, 0, 1), opening), 0.0)
    assert isinstance(answer.message, Failed)
    assert "worker 0 at tcp://127.0.0.1:7000 serves" in answer.message.text


def test_what_a_worker_raises_gives_no_orders_to_a_terminal() -> None:
    error = error_from_message(
        Failed(1, "OpError", "red \x1b[31m\nand\r back", "at\tline\x07\n"), "worker 1"
    )
    assert str(error) == "red \\x1b[31m\nand\\r back"
    assert error.__notes__ == ["Traceback on worker 1:\nat\\tline\\x07\n"]

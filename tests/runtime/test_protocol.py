"""Both state machines together, in worlds made from seeds, and alone where that says more."""

from __future__ import annotations

import numpy as np
import pytest

from graphflow.errors import (
    OpError,
    ProtocolError,
    RendezvousTimeout,
    SessionError,
    StepTimeout,
    VersionMismatch,
    WorkerLost,
)
from graphflow.runtime.messages import (
    COORDINATOR,
    Abort,
    Broken,
    Chunk,
    Close,
    Commit,
    Compute,
    Computed,
    Done,
    Envelope,
    Failed,
    Hello,
    Load,
    Open,
    Ping,
    Pong,
    Read,
    Ready,
    Welcome,
    Write,
)
from graphflow.runtime.protocol import coordinator as c
from graphflow.runtime.protocol import jobs as w
from graphflow.runtime.protocol.stream import Version
from graphflow.runtime.protocol.worker import MAX_SESSIONS, WorkerMachine
from graphflow.runtime.wire import chunks
from tests.runtime.simulator import World

SEEDS = 300


def undecided(world: World) -> set[tuple[int, str, int]]:
    """Steps that a worker started and was never told the end of, though it could have been."""
    return {
        (index, session, step)
        for index, session, step in world.started - world.told
        if world.alive[index]
        and index not in world.coordinators[session].lost()
        and session in world.machines[index].sessions
    }


@pytest.mark.parametrize("block", range(10))
def test_in_every_world_a_step_is_committed_or_aborted_everywhere_and_every_wait_ends(
    block: int,
) -> None:
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        world = World(seed)
        world.run()
        assert not world.violations, (seed, world.violations)
        assert not undecided(world), (seed, "a worker that lives was never told")
        verdicts: dict[tuple[str, int], set[str]] = {}
        for (_, session, step), verdict in world.applied.items():
            verdicts.setdefault((session, step), set()).add(verdict)
        for (session, step), found in verdicts.items():
            committed = isinstance(world.outcomes[session, step], c.Replies)
            assert found == {"Commit" if committed else "Abort"}, (seed, session, step)
        for name in world.coordinators:
            assert (name, 1) in world.outcomes, (seed, "the rendezvous did not end")
            if isinstance(world.outcomes.get((name, 2)), c.Replies):
                for request in range(3, 3 + world.steps):
                    assert (name, request) in world.outcomes, (seed, name, request)


def test_worlds_see_commits_failures_losses_and_cancellations() -> None:
    kinds: dict[str, int] = {}
    for seed in range(60):
        world = World(seed)
        world.run()
        for (_, request), outcome in world.outcomes.items():
            if request > 2:
                kinds[type(outcome).__name__] = kinds.get(type(outcome).__name__, 0) + 1
    assert kinds.keys() == {"Replies", "OpError", "WorkerLost", "SessionError", "StepTimeout"}


def test_a_world_is_the_same_again_from_the_same_seed() -> None:
    def history(seed: int) -> list[str]:
        world = World(seed)
        world.run()
        return [f"{key} {type(value).__name__}" for key, value in world.outcomes.items()]

    assert history(11) == history(11)


# The coordinator alone -------------------------------------------------------------------------


class Desk:
    """A coordinator's machine, with workers that say what a test wants."""

    def __init__(self, workers: int = 2) -> None:
        addresses = [f"tcp://127.0.0.1:{7000 + index}" for index in range(workers)]
        self.machine = c.CoordinatorMachine("s", addresses, 0.0)
        self.sent = [0] * workers
        own = Version.own()
        self.begin(1, dict.fromkeys(range(workers), Hello(1, "", 0, "")), 0.0)
        for worker in range(workers):
            self.hear(worker, Welcome(1, own.version, own.wire, own.python, ["cpu:0"]), 0.0)

    def begin(self, request: int, messages: dict, now: float, step: int = 0) -> list:
        orders = {worker: c.Order(message) for worker, message in messages.items()}
        return self.machine.handle(c.Begin(request, orders, 2.0, step), now)

    def step(self, request: int, step: int, now: float) -> list:
        compute = Compute(request, "p", {}, [], False, 2.0)
        return self.begin(request, dict.fromkeys(range(len(self.sent)), compute), now, step)

    def hear(self, worker: int, message: object, now: float, data: object = None) -> list:
        self.sent[worker] += 1
        envelope = Envelope("s", 1, worker, 0, self.sent[worker])
        return self.machine.handle(c.Received(worker, envelope, message, data), now)


def settled(actions: list) -> c.Settle:
    (found,) = [action for action in actions if isinstance(action, c.Settle)]
    return found


def told(actions: list, kind: type) -> list[int]:
    return [a.worker for a in actions if isinstance(a, c.Send) and isinstance(a.message, kind)]


def test_a_step_commits_when_the_last_worker_has_computed() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    assert desk.hear(0, Done(2, [], {"/worker:0/cpu:0": 5}), 0.1) == []
    actions = desk.hear(1, Done(2, [], {}), 0.2)
    assert told(actions, Commit) == [0, 1]
    replies = settled(actions).outcome
    assert isinstance(replies, c.Replies) and set(replies.messages) == {0, 1}


def test_one_failure_aborts_the_step_everywhere_with_the_remote_traceback() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    desk.hear(0, Done(2, [], {}), 0.1)
    actions = desk.hear(1, Failed(2, "OpError", "matmul_1 failed", "Traceback: line 7"), 0.2)
    assert told(actions, Abort) == [0, 1]
    error = settled(actions).outcome
    assert isinstance(error, OpError) and "matmul_1 failed" in str(error)
    assert "worker 1" in error.__notes__[0] and "line 7" in error.__notes__[0]


def test_an_error_class_that_is_not_graphflows_is_not_looked_up_elsewhere() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    error = settled(desk.hear(1, Failed(2, "annotations", "x", ""), 0.2)).outcome
    assert type(error) is OpError


def test_a_late_step_times_out_after_a_grace_and_names_who_had_not_finished() -> None:
    desk = Desk()
    desk.step(2, 9, 0.0)
    desk.hear(0, Done(2, [], {}), 0.1)
    assert not [a for a in desk.machine.handle(c.Tick(), 2.1) if isinstance(a, c.Settle)]
    actions = desk.machine.handle(c.Tick(), 2.6)
    assert told(actions, Abort) == [0, 1]
    error = settled(actions).outcome
    assert isinstance(error, StepTimeout)
    assert "step 9" in str(error) and "worker 1" in str(error) and "worker 0" not in str(error)


def test_a_worker_whose_link_breaks_is_lost_and_the_others_are_told_to_abort() -> None:
    desk = Desk()
    desk.step(2, 3, 0.0)
    actions = desk.machine.handle(c.LinkDown(1, "killed by signal 9"), 0.1)
    assert told(actions, Abort) == [0]
    error = settled(actions).outcome
    assert isinstance(error, WorkerLost)
    assert "worker 1" in str(error) and "step 3" in str(error) and "signal 9" in str(error)
    again = settled(desk.step(3, 4, 0.2)).outcome
    assert isinstance(again, WorkerLost)


def test_silence_is_death_unless_the_transport_vouches_for_the_process() -> None:
    desk = Desk()
    desk.machine.handle(c.LinkUp(0), 0.0)
    desk.step(2, 3, 3.0)
    actions = desk.machine.handle(c.Tick(), 4.1)
    assert "worker 1" in str(settled(actions).outcome) and set(desk.machine.lost()) == {1}


def test_no_heartbeat_goes_to_a_worker_that_does_not_know_the_session_yet() -> None:
    desk = Desk()
    assert not told(desk.machine.handle(c.Tick(), 1.1), Ping)
    addresses = [f"tcp://127.0.0.1:{7000 + index}" for index in range(2)]
    desk.begin(2, {w: Open(2, w, addresses, 30.0, [], []) for w in range(2)}, 1.2)
    assert told(desk.machine.handle(c.Tick(), 2.2), Ping) == [0, 1]


def test_a_worker_that_never_answers_the_first_call_is_a_rendezvous_timeout() -> None:
    machine = c.CoordinatorMachine("s", ["tcp://127.0.0.1:7001"], 0.0)
    order = c.Order(Hello(1, "", 0, ""))
    machine.handle(c.Begin(1, {0: order}, 5.0), 0.0)
    error = settled(machine.handle(c.Tick(), 5.0)).outcome
    assert isinstance(error, RendezvousTimeout) and "graphflow worker" in str(error)


def test_other_versions_are_refused_with_both_named() -> None:
    machine = c.CoordinatorMachine("s", ["tcp://127.0.0.1:7001"], 0.0)
    machine.handle(c.Begin(1, {0: c.Order(Hello(1, "", 0, ""))}, 5.0), 0.0)
    welcome = Welcome(1, "9.9.9", 1, "3.11", ["cpu:0"])
    event = c.Received(0, Envelope("s", 1, 0, 0, 1), welcome)
    error = settled(machine.handle(event, 0.1)).outcome
    assert isinstance(error, VersionMismatch)
    assert "9.9.9" in str(error) and Version.own().version in str(error)


def test_a_gap_in_the_numbers_means_that_messages_were_lost() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    desk.sent[0] += 1
    error = settled(desk.hear(0, Done(2, [], {}), 0.1)).outcome
    assert isinstance(error, WorkerLost) and "reconnection" in str(error)


def test_a_message_that_comes_twice_counts_once_and_one_of_another_epoch_never() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    done = c.Received(0, Envelope("s", 1, 0, 0, 2), Done(2, [], {}))
    stale = c.Received(1, Envelope("s", 0, 1, 0, 2), Done(2, [], {}))
    assert desk.machine.handle(done, 0.1) == desk.machine.handle(done, 0.1) == []
    assert desk.machine.handle(stale, 0.1) == []
    desk.sent[0] = 2
    assert told(desk.hear(1, Done(2, [], {}), 0.2), Commit) == [0, 1]


def test_a_result_that_was_announced_but_not_sent_loses_the_worker() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    error = settled(desk.hear(0, Done(2, ["loss"], {}), 0.1)).outcome
    assert isinstance(error, WorkerLost) and "not sent" in str(error)


def test_cancelling_aborts_the_step_but_no_other_request() -> None:
    desk = Desk()
    desk.step(2, 1, 0.0)
    desk.begin(3, {0: Read(3, "w")}, 0.0)
    actions = desk.machine.handle(c.Cancel(), 0.1)
    assert told(actions, Abort) == [0, 1]
    assert settled(actions).request == 2 and isinstance(settled(actions).outcome, SessionError)


def test_an_array_that_cannot_travel_is_refused_and_leaves_no_gap() -> None:
    desk = Desk()
    before = desk.step(2, 1, 0.0)[0].envelope.sequence
    order = c.Order(Write(3, "w"), [("value", "a", np.zeros(2)), ("value", "w", np.array([None]))])
    with pytest.raises(ProtocolError, match="object"):
        desk.machine.handle(c.Begin(3, {0: order}, 2.0), 0.1)
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
        self.machine.handle(w.Finished("s", self.opened[0].job, 0, 1, None), 0.0)

    def order(self, message: object, now: float, step: int = 0, data: object = None) -> list:
        return self.say(COORDINATOR, message, now, step, data)

    def say(
        self, origin: int, message: object, now: float, step: int = 0, data: object = None
    ) -> list:
        self.sent[origin] = self.sent.get(origin, 0) + 1
        envelope = Envelope("s", 1, origin, step, self.sent[origin])
        route = b"boss" if origin == COORDINATOR else b"peer"
        return self.machine.handle(w.Received(route, envelope, message, data), now)

    def tensor(self, step: int, array: np.ndarray, now: float = 1.0) -> list:
        ((chunk, data),) = chunks("edge", step, "e", array)
        return self.say(1, chunk, now, step, data)


def compute(request: int) -> Compute:
    return Compute(request, "p", {}, [], False, 5.0)


def test_a_worker_says_who_it_is_before_any_session() -> None:
    machine = WorkerMachine(["cpu:0", "cpu:1"])
    event = w.Received(b"x", Envelope("s", 1, COORDINATOR, 0, 1), Hello(1, "0", 1, "3.11"))
    (sent,) = machine.handle(event, 0.0)
    assert isinstance(sent.message, Welcome) and sent.message.devices == ["cpu:0", "cpu:1"]
    assert machine.sessions == []


def test_orders_that_come_another_way_than_the_coordinators_are_dropped() -> None:
    shop = Shop()
    event = w.Received(b"stranger", Envelope("s", 1, COORDINATOR, 1, 2), Close(9))
    assert shop.machine.handle(event, 1.0) == [] and shop.machine.sessions == ["s"]


def test_tensors_of_a_step_are_delivered_before_it_starts_and_dropped_after_it_ended() -> None:
    shop = Shop()
    (early,) = shop.tensor(1, np.arange(3.0))
    assert isinstance(early, w.Deliver) and early.array.tolist() == [0, 1, 2]
    shop.order(compute(2), 1.0, step=1)
    shop.order(Abort("StepTimeout", "late"), 1.0, step=1)
    assert shop.tensor(1, np.arange(3.0)) == []
    assert isinstance(shop.tensor(2, np.arange(3.0))[0], w.Deliver)


def test_an_abort_wakes_the_step_and_its_result_is_not_reported() -> None:
    shop = Shop()
    shop.order(compute(2), 1.0, step=1)
    wake, run = shop.order(Abort("WorkerLost", "worker 1 died"), 1.1, step=1)
    assert isinstance(wake, w.Wake) and isinstance(wake.error, WorkerLost)
    assert isinstance(run, w.Run) and isinstance(run.job, Abort)
    late = w.Finished("s", compute(2), 1, 1, Computed({}, [], {}))
    assert shop.machine.handle(late, 1.2) == []


def test_a_commit_that_fails_breaks_the_session() -> None:
    shop = Shop()
    shop.order(compute(2), 1.0, step=1)
    shop.order(Commit(), 1.1, step=1)
    actions = shop.machine.handle(w.Finished("s", Commit(), 1, 1, OSError("disk")), 1.2)
    assert isinstance(actions[0].message, Broken) and shop.machine.sessions == []


def test_a_silent_coordinator_loses_its_session_and_a_ping_keeps_it() -> None:
    shop = Shop(lease=10.0)
    assert isinstance(shop.order(Ping(), 8.0)[0].message, Pong)
    assert shop.machine.handle(w.Tick(), 17.0) == []
    shop.order(compute(2), 17.0, step=1)
    wake, run = shop.machine.handle(w.Tick(), 28.0)
    assert isinstance(wake, w.Wake) and isinstance(run.job, Close)
    (answer,) = shop.order(Ping(), 29.0)
    assert isinstance(answer.message, Broken) and "lease" in answer.message.reason


def test_two_sessions_on_one_worker_do_not_see_each_other() -> None:
    shop = Shop()
    other = Envelope("t", 1, COORDINATOR, 0, 1)
    opening = Open(1, 1, ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"], 10.0)
    shop.machine.handle(w.Received(b"other", other, opening), 0.5)
    assert shop.machine.sessions == ["s", "t"]
    stolen = Envelope("s", 1, COORDINATOR, 0, 2)
    assert shop.machine.handle(w.Received(b"other", stolen, Close(5)), 1.0) == []
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
    assert isinstance(shop.order(compute(3), 1.0, step=2)[0], w.Run)


def test_arrays_of_a_program_arrive_in_parts() -> None:
    shop = Shop()
    for index, part in enumerate([np.frombuffer(b"head", np.uint8), np.eye(2)]):
        ((chunk, data),) = chunks("part", 2, index, part)
        assert shop.order(chunk, 1.0, data=data) == []
    (run,) = shop.order(Load(2, "p", 2), 1.0)
    assert run.arrays[0].tobytes() == b"head" and run.arrays[1].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("purpose", ["fetch", "feed", "nonsense"])
def test_a_peer_that_sends_what_is_not_a_peers_to_send_breaks_the_session(purpose: str) -> None:
    shop = Shop()
    chunk = Chunk(purpose, 1, "e", "float32", [1], [0], 4, 0)
    actions = shop.say(1, chunk, 1.0, data=b"\0" * 4)
    assert isinstance(actions[0].message, Broken) and "worker 1" in actions[0].message.reason


def test_too_many_sessions_are_refused() -> None:
    machine = WorkerMachine(["cpu:0"])
    opening = Open(1, 0, ["tcp://127.0.0.1:7000"], 10.0)
    for index in range(MAX_SESSIONS):
        machine.handle(w.Received(b"x", Envelope(f"s{index}", 1, -1, 0, 1), opening), 0.0)
    (answer,) = machine.handle(w.Received(b"x", Envelope("more", 1, -1, 0, 1), opening), 0.0)
    assert isinstance(answer.message, Failed) and "sessions" in answer.message.text

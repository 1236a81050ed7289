"""Who is blamed for a step that is late: the worker that kept the others waiting."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphflow.errors import OpError, StepTimeout, WorkerLost
from graphflow.runtime.protocol import coordinator_events as c
from graphflow.runtime.protocol.coordinator import GRACE
from graphflow.runtime.transport.tensor_mailbox import Awaited, TensorMailbox
from graphflow.runtime.wire.messages import Compute, Done, Failed
from tests.runtime.protocol.test_protocol import Desk, find_settlement


def make_timeout(awaits: int, edge: int = 0) -> Failed:
    text = f"step 3: edge {edge} from worker {awaits} did not come"
    return Failed(2, "StepTimeout", text, "a traceback", awaits)


def ends(actions: list) -> bool:
    return any(isinstance(action, c.SettleOperation) for action in actions)


@st.composite
def waits(draw: st.DrawFn) -> tuple[dict[int, int], list[int], list[int]]:
    """Who waits for whom, in trees of which each root computes; the roots that end soon; and in
    which order all others speak."""
    count = draw(st.integers(2, 7))
    names = draw(st.permutations(range(count)))
    roots = draw(st.integers(1, count - 1))
    above = {
        names[i]: names[draw(st.integers(0, i - 1))] for i in range(roots, count)
    }  # one that waits does so for one before it
    ended = [root for root in names[:roots] if draw(st.booleans())]
    return above, ended, draw(st.permutations(sorted([*above, *ended])))


@given(waits())
@example(({1: 0, 2: 1}, [], [2, 1]))  # the last of the chain speaks first
@example(({1: 0, 2: 1}, [0], [2, 0, 1]))
def test_whoever_speaks_first_the_blame_is_on_one_that_waited_for_nobody(
    world: tuple[dict[int, int], list[int], list[int]],
) -> None:
    above, ended, speaking = world
    desk = Desk(len(set(above) | set(above.values()) | set(ended)))
    names = {name: at for at, name in enumerate(sorted({*above, *above.values(), *ended}))}
    desk.step(2, 3, 0.0)
    now, actions = 2.0, []
    for worker in speaking:
        now += 0.01
        said = make_timeout(names[above[worker]]) if worker in above else Done(2, [], {})
        actions = desk.hear(names[worker], said, now)
        if ends(actions):
            break
    else:
        assert desk.machine.wake_at(now) <= 2.0 + GRACE + 0.01
        actions = desk.machine.handle(c.CoordinatorTick(), 2.0 + GRACE + 0.01)
    error = find_settlement(actions).outcome
    assert isinstance(error, StepTimeout) and error.worker is not None
    blamed = next(name for name, at in names.items() if at == error.worker)
    assert blamed not in above
    assert f"edge 0 from worker {error.worker} did not come" in str(error)
    assert "a traceback" in error.__notes__[0]


def test_the_blame_tells_the_whole_chain_and_what_is_known_of_its_end() -> None:
    desk = Desk(4)
    desk.step(2, 3, 0.0)
    for worker in (3, 2, 1):
        assert not ends(desk.hear(worker, make_timeout(worker - 1, edge=worker - 1), 2.0)), (
            "it may tell"
        )
    error = find_settlement(desk.machine.handle(c.CoordinatorTick(), 2.0 + GRACE)).outcome
    assert str(error) == (
        "step 3: edge 0 from worker 0 did not come (worker 0 at tcp://127.0.0.1:7000 cannot be "
        "reached for 2.5 s; worker 3 waited for worker 2; worker 2 waited for worker 1; "
        "worker 1 waited for worker 0)"
    )


def test_who_waits_in_a_circle_is_told_of_at_once() -> None:
    desk = Desk(3)
    desk.step(2, 3, 0.0)
    assert not ends(desk.hear(0, make_timeout(1), 2.0)) and not ends(
        desk.hear(1, make_timeout(2), 2.0)
    )
    error = find_settlement(desk.hear(2, make_timeout(0), 2.0)).outcome
    assert isinstance(error, StepTimeout) and error.worker in (0, 1, 2)


@pytest.mark.parametrize("how", ["op", "lost", "loop"])
def test_what_kept_the_others_waiting_is_told_instead_of_their_waits(how: str) -> None:
    desk = Desk(3)
    desk.step(2, 3, 0.0)
    assert not ends(desk.hear(2, make_timeout(1), 2.0)) and not ends(
        desk.hear(1, make_timeout(0), 2.0)
    )
    if how == "lost":
        error = find_settlement(
            desk.machine.handle(c.WorkerGone(0, "killed by signal 9"), 2.1)
        ).outcome
        assert isinstance(error, WorkerLost)
    elif how == "op":
        error = find_settlement(desk.hear(0, Failed(2, "OpError", "singular", ""), 2.1)).outcome
        assert isinstance(error, OpError)
    else:
        said = Failed(2, "StepTimeout", "step 3: a loop was in iteration 7", "")
        error = find_settlement(desk.hear(0, said, 2.1)).outcome
        assert isinstance(error, StepTimeout) and "iteration 7" in str(error)


def test_a_worker_that_blames_nobody_of_the_session_is_lost() -> None:
    desk = Desk(2)
    desk.step(2, 3, 0.0)
    assert isinstance(find_settlement(desk.hear(0, make_timeout(2), 2.0)).outcome, WorkerLost)


def test_a_step_that_waited_in_vain_before_the_one_it_follows_is_decided_ends_with_it() -> None:
    """A free step's deadline on its worker may pass while the coordinator's has not begun."""
    desk = Desk(2)
    desk.begin(2, {0: Compute(2, "p", {}, [], False, 60.0, free=True)}, 0.0, 3)
    orders = {w: c.Order(Compute(3, "p", {}, [], False, 2.0, free=True)) for w in (0, 1)}
    desk.machine.handle(c.BeginOperation(3, orders, 2.0, 4, follows=3), 0.0)
    said = Failed(3, "StepTimeout", "step 4: edge 0 did not come", "", 0)
    assert not ends(desk.hear(1, said, 1.0))
    assert not ends(desk.machine.handle(c.CoordinatorTick(), 1.0 + GRACE))
    assert desk.machine.wake_at(1.0 + GRACE) > 1.0 + GRACE, "there is nothing to do yet"
    actions = desk.hear(0, Done(2, [], {}), 1.6)
    outcomes = [action.outcome for action in actions if isinstance(action, c.SettleOperation)]
    assert isinstance(outcomes[0], c.Replies) and isinstance(outcomes[1], StepTimeout)


# On one worker ---------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["here", "there"])
def test_a_device_that_waits_for_another_one_of_its_worker_blames_who_that_waits_for(
    first: str,
) -> None:
    mail = TensorMailbox(worker=1)
    mail.deadline = time.monotonic() + 0.3
    asleep = threading.Event()

    def await_for(awaited: Awaited, seconds: float) -> StepTimeout:
        def look(_: float) -> bool:
            asleep.wait(seconds)  # who looks later finds the other one's wait over
            return False

        with pytest.raises(StepTimeout) as failure:
            mail.wait_until(5, awaited, look)
        return failure.value

    far, near = Awaited("edge 0 from /worker:0/cpu:0", 0), Awaited("edge 1 from /worker:1/cpu:1", 1)
    with ThreadPoolExecutor(2) as pool:
        there = pool.submit(await_for, far, 0.31 if first == "there" else 0.35)
        here = pool.submit(await_for, near, 0.35 if first == "there" else 0.31)
        errors = there.result(20), here.result(20)
    assert [error.worker for error in errors] == [0, 0]
    assert all("edge 0 from /worker:0/cpu:0 did not come" in str(error) for error in errors)
    assert mail.waits == {}
    mail.deadline = 0.0
    with pytest.raises(StepTimeout, match="edge 1 from /worker:1/cpu:1") as failure:
        mail.take(6, 1, near)
    assert failure.value.worker == 1, "of an earlier step nothing is told"

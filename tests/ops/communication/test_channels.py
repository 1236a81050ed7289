"""Channels between parties: every order is a function, and what cannot go on says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import DifferentiationError, GraphError, OpError, ShapeError
from graphflow.frontend.concurrent_loops import ConcurrentLoops, Party, replay_order
from graphflow.frontend.interpreter import evaluate
from graphflow.ops.communication.channel_scheduler import random_order
from graphflow.ops.communication.channels import replayed_feeds
from tests.ops.communication.servers import by_hand, server_and_workers

START = np.linspace(0.1, 1.0, 5)


def test_the_planned_order_takes_workers_in_turn() -> None:
    weights, order, _ = server_and_workers(START, [2, 3, 1])
    result, came = evaluate([weights, order])
    assert came.tolist() == [0, 1, 2, 0, 1, 1]
    assert came.dtype == np.int32
    np.testing.assert_array_equal(result, by_hand(START, came, 3))


@pytest.mark.slow  # of windows of parameter servers, a thousand orders run by default
def test_a_thousand_random_orders_are_functions_of_their_order() -> None:
    turns = [2, 3, 2]
    weights, order, seen = server_and_workers(START, turns)
    given_order = gf.placeholder("int32", (sum(turns),))
    again, came_again, seen_again = server_and_workers(START, turns, given_order)
    orders = set()
    for seed in range(1000):
        with random_order(seed):
            result, came, *views = evaluate([weights, order, *seen])
        assert np.bincount(came, minlength=3).tolist() == turns
        np.testing.assert_array_equal(result, by_hand(START, came, 3))
        orders.add(tuple(came))
        if seed % 20 == 0:  # a run that is given the order has no choice
            with random_order(seed + 1):
                replayed = evaluate([again, came_again, *seen_again], {given_order: came})
            for one, other in zip(replayed, [result, came, *views], strict=True):
                np.testing.assert_array_equal(one, other)
    assert len(orders) > 100  # of 210


@pytest.mark.parametrize("jit", ["on", "off"])
def test_one_device_runs_the_planned_order(jit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFLOW_JIT", jit)
    weights, order, seen = server_and_workers(START, [2, 3, 1])
    expected = evaluate([weights, order, *seen])
    with gf.Session() as session:
        for _ in range(2):
            found = session.run([weights, order, *seen])
            np.testing.assert_array_equal(found[1], expected[1])
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-15)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
def test_any_order_can_be_given(data: st.DataObject, turns: list[int]) -> None:
    order = data.draw(st.permutations([k for k, count in enumerate(turns) for _ in range(count)]))
    weights, came, _ = server_and_workers(START, turns, np.array(order, np.int32))
    result, found = evaluate([weights, came])
    assert found.tolist() == order
    np.testing.assert_array_equal(result, by_hand(START, order, len(turns)))


def build_bounded_server(turns: int, workers: int, bound: int) -> tuple[Any, ...]:
    """A server that answers a worker only if no other one is further behind than a bound."""
    loops = ConcurrentLoops()
    push = [loops.channel((), "int32") for _ in range(workers)]
    pull = [loops.channel((), "int32") for _ in range(workers)]

    def serve(party: Party) -> Any:
        def turn(state: Any, _: Any) -> Any:
            clocks, waiting = state
            which, _clock = party.merge(push)
            me = gf.equal(gf.arange(workers), which)
            clocks, waiting = clocks + gf.astype(me, "int32"), gf.logical_or(waiting, me)
            lead = clocks - gf.min(gf.where(clocks >= turns, np.int32(2**30), clocks))
            answered = gf.logical_and(waiting, gf.logical_or(lead <= bound, clocks >= turns))
            party.send_where(pull, gf.min(clocks), answered)
            return (clocks, gf.logical_and(waiting, gf.logical_not(answered))), (which, lead)

        idle = (np.zeros(workers, np.int32), np.zeros(workers, np.bool_))
        return party.scan(turn, idle, length=turns * workers)[1]

    def work(k: int) -> Any:
        def run(party: Party) -> Any:
            def turn(clock: Any, _: Any) -> Any:
                party.send(push[k], clock)
                least = party.receive(pull[k])
                return clock + 1, clock + 1 - least

            return party.scan(turn, np.int32(0), length=turns)[1]

        return run

    loops.add(serve)
    for k in range(workers):
        loops.add(work(k))
    return tuple(loops.build())


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_gate_holds_in_every_order(bound: int) -> None:
    (order, _), *leads = build_bounded_server(turns=4, workers=3, bound=bound)
    widest = 0
    for seed in range(60):
        with random_order(seed):
            _, *found = evaluate([order, *leads])
        widest = max(widest, *(int(lead[:-1].max()) for lead in found))
    assert widest <= bound
    assert widest > 0 or bound == 0


def test_a_message_of_several_parts_stays_together() -> None:
    loops = ConcurrentLoops()
    keys = [loops.channel((), "int32") for _ in range(3)]
    rows = [loops.channel((2,), "float64") for _ in range(3)]

    def take(party: Party) -> Any:
        def turn(_: Any, __: Any) -> Any:
            which, key = party.merge(keys)
            _, row = party.merge(rows, which)
            return np.int32(0), (which, key, row)

        return party.scan(turn, np.int32(0), length=6)[1]

    def give(k: int) -> Any:
        def run(party: Party) -> Any:
            for i in range(2):
                party.send(keys[k], np.int32(10 * k + i))
                party.send(rows[k], np.array([k, i], float))
            return np.int32(0)

        return run

    loops.add(take)
    for k in range(3):
        loops.add(give(k))
    which, key, row = loops.build()[0]
    for seed in range(30):
        with random_order(seed):
            ks, numbers, values = evaluate([which, key, row])
        np.testing.assert_array_equal(numbers // 10, ks)
        np.testing.assert_array_equal(values, np.stack([ks, numbers % 10], 1))


def test_branches_and_while_loops_send_and_receive() -> None:
    loops = ConcurrentLoops()
    ask, tell = loops.channel((), "int32"), loops.channel((), "int32")

    def halve(party: Party) -> Any:
        def step(state: Any) -> Any:
            n, count = state
            party.send(ask, n)
            return party.receive(tell), count + 1

        last = party.while_loop(lambda state: state[0] > 1, step, (np.int32(27), np.int32(0)))
        party.send(ask, np.int32(0))
        return last

    def answer(party: Party) -> Any:
        def step(state: Any) -> Any:
            n, _ = state

            def reply() -> Any:
                party.send(tell, gf.where(n % 2 == 0, n // 2, 3 * n + 1))
                return party.receive(ask)

            return reply(), n

        first = party.receive(ask)
        n, _ = party.while_loop(lambda state: state[0] > 0, step, (first, first))
        return party.cond(n > 0, lambda: party.receive(ask), lambda: n)

    loops.add(halve)
    loops.add(answer)
    (last, count), end = loops.build()
    assert [int(x) for x in evaluate([last, count, end])] == [1, 111, 0]


def test_parties_that_wait_in_a_circle_are_told_who_waits_for_what() -> None:
    loops = ConcurrentLoops()
    here, there = loops.channel((), "float64"), loops.channel((), "float64")

    def wait(first: Any, second: Any) -> Any:
        def run(party: Party) -> Any:
            x = party.receive(first)
            party.send(second, x)
            return x

        return run

    loops.add(wait(here, there))
    loops.add(wait(there, here))
    x, _ = loops.build()
    with pytest.raises(OpError, match="party 0 waits for a tensor of channel 0; party 1 waits"):
        evaluate([x])
    with gf.Session() as session, pytest.raises(OpError, match="wait in a circle"):
        session.run(x)


def test_a_channel_bounds_how_far_its_sender_is_ahead() -> None:
    loops = ConcurrentLoops()
    many, one = loops.channel((), "float64"), loops.channel((), "float64")

    def send(party: Party) -> Any:
        party.send(many, 1.0)
        party.send(many, 2.0)
        party.send(one, 3.0)
        return np.float64(0)

    def receive(party: Party) -> Any:
        return party.receive(one), party.receive(many), party.receive(many)

    loops.add(send)
    loops.add(receive)
    _, received = loops.build()
    with pytest.raises(OpError, match="party 0 waits for room in channel 0"):
        evaluate([*received])


def test_errors_of_a_party_come_out_and_end_the_others() -> None:
    weights, _, _ = server_and_workers(START, [2, 2], np.array([0, 1, 2, 0], np.int32))
    with pytest.raises(OpError, match="asks for channel 2, and it has 2"):
        evaluate([weights])


def test_bad_graphs_are_refused() -> None:
    loops = ConcurrentLoops()
    channel = loops.channel((2,), "float32")
    with pytest.raises(GraphError, match=r"carry float32\(2,\), and float32\(3,\) is sent"):
        loops.add(lambda party: party.send(channel, np.zeros(3, np.float32)))
    with pytest.raises(GraphError, match="channels of one spec"):
        loops.add(lambda party: party.merge([channel, loops.channel((), "int32")]))
    with pytest.raises(GraphError, match="add a party"):
        loops.build()
    loops.add(lambda party: party.receive(channel))
    with pytest.raises(GraphError, match=r"parties \[\] send into channel 0, and parties \[0\]"):
        loops.build()
    for mask in (np.ones(2, np.bool_), np.ones(1, np.float32)):
        with pytest.raises(ShapeError, match="one bool for each of 1 channels"):
            loops.add(lambda party, m=mask: party.send_where([channel], np.zeros(2, "f4"), m))
    with pytest.raises(ShapeError, match="one int32"):
        loops.add(lambda party: party.merge([channel], np.float32(1)))
    weights, _, _ = server_and_workers(START, [1])
    x = gf.placeholder("float64", (5,))
    through, _, _ = server_and_workers(x, [1])
    assert weights.shape == (5,)
    with pytest.raises(DifferentiationError, match="concurrent"):
        gf.gradients(gf.sum(through), [x])


def test_ops_of_channels_run_in_parties_only() -> None:
    party = Party()
    party.send(ConcurrentLoops().channel((), "float64"), 1.0)
    with pytest.raises(GraphError, match="outside of a concurrent node"):
        evaluate([party.token])


def test_an_order_that_came_goes_into_a_placeholder() -> None:
    wanted = gf.placeholder("int32", (3,), name="wanted")
    _, came, _ = server_and_workers(START, [2, 1], wanted)
    order = replay_order(came, wanted)
    (found,) = evaluate([order], {wanted: np.array([1, -1, -1], np.int32)})
    assert found.tolist() == [1, 0, 0]
    assert list(replayed_feeds([came, order], [found, found])) == [wanted.node]
    with pytest.raises(GraphError, match="the order is a placeholder"):
        replay_order(came, came)
    with pytest.raises(ShapeError, match=r"int32\(3,\), and the order that is fed is int32\(4,\)"):
        replay_order(came, gf.placeholder("int32", (4,)))

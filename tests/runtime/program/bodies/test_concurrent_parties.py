"""Parties on workers: real processes whose loops run different numbers of iterations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import GraphflowError, NonFiniteError, OpError, StepTimeout, WorkerLost
from graphflow.frontend.concurrent_loops import ConcurrentLoops, Party, replay_order
from graphflow.ir.op import REGISTRY, Tensor, make_node
from tests.faults import hazards
from tests.ops.communication.servers import by_hand, server_and_workers
from tests.runtime.program import crashes
from tests.runtime.program.bodies.test_loop_edge_flow_control import resident

MB = 1 << 20
START = np.linspace(0.1, 1.0, 5)


def workers(count: int, deadline: float = 30, **options: Any) -> gf.Session:
    cluster = gf.Cluster.local(count, threads=1)
    ops = ["tests.faults.hazards", "tests.runtime.program.crashes"]
    return gf.Session(cluster, trial=False, deadline=deadline, ops=ops, **options)


def places(count: int) -> list[str]:
    return [f"/worker:{i}" for i in range(count)]


@pytest.mark.every(2)
@pytest.mark.parametrize("shared", ["on", "off"])
def test_an_order_given_back_gives_the_same_bits(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", shared)
    turns = [7, 2, 4]
    weights, order, seen = server_and_workers(START, turns, pins=places(4))
    wanted = gf.placeholder("int32", (sum(turns),))
    again, came_again, seen_again = server_and_workers(START, turns, wanted, places(4))
    rng = np.random.default_rng(3)
    with workers(4) as session:
        for _ in range(6):
            result, came, *views = session.run([weights, order, *seen])
            assert np.bincount(came).tolist() == turns
            np.testing.assert_array_equal(result, by_hand(START, came, 3))
            replayed = session.run([again, came_again, *seen_again], {wanted: came})
            for one, other in zip(replayed, [result, came, *views], strict=True):
                np.testing.assert_array_equal(one, other)
        for _ in range(6):
            drawn = rng.permutation(came)
            result, came = session.run([again, came_again], {wanted: drawn})
            np.testing.assert_array_equal(came, drawn)
            np.testing.assert_array_equal(result, by_hand(START, drawn, 3))


def test_parties_may_share_workers() -> None:
    turns = [5, 3, 4]
    for pins in (["/worker:0", "/worker:0", "/worker:1", "/worker:1"], ["/worker:1"] * 4):
        weights, order, seen = server_and_workers(START, turns, pins=pins)
        with workers(2) as session:
            for _ in range(3):
                result, came, *_ = session.run([weights, order, *seen])
                np.testing.assert_array_equal(result, by_hand(START, came, 3))


@pytest.mark.parametrize(
    ("shared", "where"),
    [
        ("on", "apart"),
        pytest.param("off", "apart", marks=pytest.mark.slow),
        pytest.param("on", "together", marks=pytest.mark.slow),
    ],
)
def test_only_the_rows_in_use_of_a_ragged_channel_travel(
    shared: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parties send prefixes of rows, of sizes that change from turn to turn, and get sums."""
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", shared)
    most, turns = 9, 12
    loops = ConcurrentLoops()
    push = [loops.channel((most, 2), "float64", ragged=True) for _ in range(2)]
    counts = [loops.channel((), "int64") for _ in range(2)]
    pull = [loops.channel((most, 2), "float64", ragged=True) for _ in range(2)]

    def make_used_rows(x: Tensor, number: Tensor) -> Tensor:
        attrs = {"lookups": 1, "rows": 1, "piece": 4}
        return make_node(REGISTRY["used_rows"], (x, number), attrs).outputs[0]

    def serve(party: Party) -> Any:
        def turn(total: Any, _: Any) -> Any:
            which, number = party.merge(counts)
            _, rows = party.merge(push, which)
            known = gf.arange(most) < number
            total = total + gf.where(gf.expand_dims(known, 1), rows, 0.0)
            party.send_where(pull, make_used_rows(total, number), gf.equal(gf.arange(2), which))
            return total, number

        return party.scan(turn, np.zeros((most, 2)), length=2 * turns)

    def work(k: int) -> Any:
        def run(party: Party) -> Any:
            def turn(seen: Any, i: Any) -> Any:
                number = (i * 5 + k) % (most + 1)
                party.send(counts[k], number)
                party.send(
                    push[k], make_used_rows(gf.ones((most, 2), "float64") * (k + 1.0), number)
                )
                return seen + party.receive(pull[k])[0, 0], None

            return party.scan(turn, np.float64(0), np.arange(turns))[0]

        return run

    pins = places(3) if where == "apart" else ["/worker:1"] * 3
    loops.add(serve, pins[0])
    for k in range(2):
        loops.add(work(k), pins[k + 1])
    (total, numbers), *_ = loops.build()
    sizes = np.array([[(i * 5 + k) % (most + 1) for i in range(turns)] for k in range(2)])
    wanted = sum((k + 1.0) * (np.arange(most)[None] < sizes[k][:, None]).sum(0) for k in range(2))
    with workers(3 if where == "apart" else 2) as session:
        for _ in range(3):
            with session.trace() as trace:
                found, came = session.run([total, numbers])
            np.testing.assert_array_equal(found, np.stack([wanted, wanted], 1))
            assert sorted(came) == sorted(sizes.reshape(-1))
            moved = sum(e.bytes * e.count for e in trace.edges)
            assert where != "apart" or moved == 2 * sizes.sum() * 2 * 8 + 2 * turns * 8


def test_what_is_left_in_a_channel_is_gone_with_its_step() -> None:
    """The receiver takes two of five tensors; the next step begins with the first again."""
    loops = ConcurrentLoops()
    base = gf.placeholder("float64", ())
    channel = loops.channel((), "float64")

    def give(party: Party) -> Any:
        def turn(x: Any, _: Any) -> Any:
            party.send(channel, x)
            return x + 1.0, None

        return party.scan(turn, base, length=5)[0]

    def take(party: Party) -> Any:
        return party.scan(lambda _, __: (0.0, party.receive(channel)), 0.0, length=2)[1]

    loops.add(give, "/worker:0")
    loops.add(take, "/worker:1")
    last, taken = loops.build()
    with workers(2) as session:
        for step in range(8):
            result, values = session.run([last, taken], {base: 10.0 * step})
            assert result == 10 * step + 5
            assert values.tolist() == [10 * step, 10 * step + 1]


@pytest.mark.parametrize("shared", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_a_slow_receiver_holds_its_sender_back(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 MB cross, and the receiver takes a second to receive the first."""
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", shared)
    loops = ConcurrentLoops()
    channel = loops.channel((MB // 8,), "float64")
    start = gf.placeholder("float64", (MB // 8,))

    def give(party: Party) -> Any:
        def turn(x: Any, _: Any) -> Any:
            party.send(channel, x)
            return x + 1.0, None

        return party.scan(turn, start, length=400)[0][0]

    def take(party: Party) -> Any:
        def turn(total: Any, _: Any) -> Any:
            x = party.receive(channel)
            return total + hazards.sleep(x[0], seconds=0.005), None

        return party.scan(turn, np.float64(0), length=400)[0]

    loops.add(give, "/worker:0")
    loops.add(take, "/worker:1")
    _, total = loops.build()
    feeds = {start: np.zeros(MB // 8)}
    with workers(2, 60) as session:
        session.warmup(total)
        pids = session._life.hosts.pids
        before = [resident(pid) for pid in pids]
        for _ in range(2):  # as messages, and through a ring
            assert session.run(total, feeds) == 400 * 399 / 2
        growth = [resident(pid) - then for pid, then in zip(pids, before, strict=True)]
    assert max(growth) < 100 * MB


ANY = np.full(4, -1, np.int32)


def disturbed_window(hazard: Any, pins: Sequence[str], wanted: Any = None) -> tuple[Any, ...]:
    """Two workers of two turns; at (party, turn) of a placeholder, a hazard happens."""
    at = gf.placeholder("int32", (2,))

    def disturb(party: int, turn: Any, x: Tensor) -> Tensor:
        here = gf.logical_and(gf.equal(at[0], party), gf.equal(at[1], turn))
        return gf.cond(here, lambda: hazard(x), lambda: x)

    state = gf.variable(START, name="weights")
    weights, order, _ = server_and_workers(state, [2, 2], wanted, pins, disturb)
    if wanted is not None:
        order = replay_order(order, wanted)
    return at, state, gf.assign(state, weights), order


CASES = [(party, turn) for party in (1, 2) for turn in (0, 1)] + [(0, turn) for turn in range(4)]


@pytest.mark.every(3)
@pytest.mark.parametrize(("party", "turn"), CASES)
def test_each_party_may_die_in_each_turn(party: int, turn: int, tmp_path: Path) -> None:
    """Workers that are left do it again, after the runs before it, in the orders that came."""
    bomb = tmp_path / "bomb"
    wanted = gf.placeholder("int32", (4,))
    at, state, step, order = disturbed_window(
        lambda x: crashes.crash_once(x, path=str(bomb)), places(3), wanted
    )
    with workers(3, checkpoint=tmp_path / "saved") as session:
        before = START
        for _ in range(3):  # as messages, and through rings
            _, came = session.run([step, order], {at: [-1, 0], wanted: ANY})
            before = by_hand(before, came, 2)
        bomb.touch()
        _, came = session.run([step, order], {at: [party, turn], wanted: ANY})
        assert not bomb.exists()
        np.testing.assert_array_equal(session.get(state), by_hand(before, came, 2))


def test_a_party_that_dies_is_reported(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb"
    at, _, step, order = disturbed_window(
        lambda x: crashes.crash_once(x, path=str(bomb)), places(3)
    )
    with workers(3) as session:
        session.run([step, order], {at: [-1, 0]})
        bomb.touch()
        with pytest.raises(WorkerLost, match="worker 1"):
            session.run([step, order], {at: [1, 1]})


def test_a_party_that_fails_ends_the_others_and_changes_nothing() -> None:
    at, state, step, order = disturbed_window(hazards.fail, places(3))
    with workers(3) as session:
        for party, turn in [(1, 0), (0, 3), (2, 1), (0, 0), (1, 1)]:
            _, came = session.run([step, order], {at: [-1, 0]})
            before = session.get(state)
            with pytest.raises(OpError, match="ZeroDivisionError"):
                session.run([step, order], {at: [party, turn]})
            np.testing.assert_array_equal(session.get(state), before)
            _, came = session.run([step, order], {at: [-1, 0]})
            np.testing.assert_array_equal(session.get(state), by_hand(before, came, 2))


def test_parties_of_one_worker_end_each_other() -> None:
    pins = ["/worker:0", "/worker:1", "/worker:1"]
    at, state, step, order = disturbed_window(hazards.fail, pins)
    with workers(2) as session:
        for party in (1, 2, 0):
            before = session.get(state)
            with pytest.raises(GraphflowError, match="ZeroDivisionError"):
                session.run([step, order], {at: [party, 1]})
            np.testing.assert_array_equal(session.get(state), before)
            session.run([step, order], {at: [-1, 0]})


def test_a_party_that_waits_in_vain_is_ended_by_the_deadline() -> None:
    loops = ConcurrentLoops()
    here, there = loops.channel((), "float64"), loops.channel((), "float64")

    def wait(first: Any, second: Any) -> Any:
        def run(party: Party) -> Any:
            x = party.merge([first])[1]
            party.send(second, x)
            return x

        return run

    loops.add(wait(here, there), "/worker:0")
    loops.add(wait(there, here), "/worker:1")
    x, _ = loops.build()
    ready = gf.constant(1.0) + 1.0
    with workers(2, deadline=2) as session:
        with pytest.raises(StepTimeout, match=r"the first of edge .* did not come"):
            session.run(x)
        assert session.run(ready) == 2.0


def test_the_trace_shows_each_turn() -> None:
    weights, order, _ = server_and_workers(START, [3, 2], pins=places(3))
    with workers(3) as session:
        for _ in range(3):
            session.run([weights, order])
        with session.trace() as trace:
            session.run([weights, order])
        transfers = [e for e in trace.steps[-1].events if e.kind == "transfer"]
    assert len(transfers) == 2 * (3 + 2) + 2  # a push and a reply a turn, and the first weights
    assert sum(e.bytes or 0 for e in transfers) == 12 * START.nbytes


def test_results_of_parties_are_checked() -> None:
    start = gf.placeholder("float64", (5,))
    weights, order, _ = server_and_workers(start, [2, 1], pins=places(3))
    with workers(3, check_finite=True) as session:
        session.run([weights, order], {start: START})
        with pytest.raises(NonFiniteError):
            session.run([weights, order], {start: np.full(5, 1e200)})
        session.run([weights, order], {start: START})


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_many_turns_take_no_more_memory_than_few() -> None:
    """100,000 turns, after 10,000 that warm up."""
    weights, order, _ = server_and_workers(START, [5000, 5000], pins=places(3))
    with workers(3, 120) as session:
        session.run(weights)
        pids = session._life.hosts.pids
        before = [resident(pid) for pid in pids]
        for _ in range(10):
            _, came = session.run([weights, order])
            assert np.bincount(came).tolist() == [5000, 5000]
        growth = [resident(pid) - then for pid, then in zip(pids, before, strict=True)]
    assert max(growth) < 16 * MB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_a_servers_state_and_channels_stay_within_the_planned_memory() -> None:
    """A server carries 64 MB, and the two exchange 2 MB a turn, for 60 turns."""
    elements, size = 8 * MB, MB // 4
    with gf.device("/worker:0"):
        weights = gf.variable(np.zeros(elements), name="weights")
    loops = ConcurrentLoops()
    push, pull = (loops.channel((size,), "float64") for _ in range(2))

    def serve(party: Party) -> Any:
        def turn(state: Any, _: Any) -> Any:
            gradient = party.receive(push)
            rows = gf.arange(size)
            state = gf.scatter_nd(state, gf.reshape(rows, (size, 1)), gradient, reduction="add")
            party.send(pull, state[:size])
            return state, None

        return party.scan(turn, weights, length=60)[0]

    def work(party: Party) -> Any:
        def turn(x: Any, _: Any) -> Any:
            party.send(push, x + 1.0)
            return party.receive(pull), None

        return party.scan(turn, gf.zeros((size,), dtype="float64"), length=60)[0]

    loops.add(serve, "/worker:0")
    loops.add(work, "/worker:1")
    served, worked = loops.build()
    with gf.device("/worker:0"):
        step = [gf.sum(served), REGISTRY["group"](gf.assign(weights, served)), worked[0]]
    with workers(2) as session:
        session.run(gf.sum(weights))
        pids = session._life.hosts.pids
        before = [resident(pid) for pid in pids]
        for _ in range(3):
            session.run(step)
        growth = [resident(pid) - then for pid, then in zip(pids, before, strict=True)]
        planned = [each.predicted for each in session.memory(step).values()]
    assert planned[0] < 2.5 * 8 * elements
    first = 160 * MB  # libraries, and messages before there are rings
    assert all(have < plan + first for have, plan in zip(growth, planned, strict=True))


def test_a_branch_sends_though_the_next_op_of_its_party_sends_elsewhere() -> None:
    """Once channels are edges, no op reads the token of the branch."""
    loops = ConcurrentLoops()
    asked, doubled, plain = (loops.channel((), "float32") for _ in range(3))

    def server(party: Party) -> Any:
        def turn(total: Any, yes: Any) -> Any:
            value = party.receive(asked)
            party.cond(yes > 0.0, lambda: party.send(doubled, value * 2.0), lambda: None)
            party.send(plain, value)
            return total + value, value

        return party.scan(turn, np.float32(0.0), np.ones(5, "float32"))[0]

    def worker(party: Party) -> Any:
        def turn(value: Any, _: Any) -> Any:
            party.send(asked, value)
            return party.receive(doubled) - party.receive(plain) + 1.0, value

        return party.scan(turn, np.float32(1.0), np.ones(5, "float32"))[0]

    loops.add(server, pin="/worker:0")
    loops.add(worker, pin="/worker:1")
    fetches = loops.build()
    with gf.Session(gf.Cluster.local(2, threads=1), trial=False, deadline=20) as s:
        assert s.run(fetches) == [15.0, 6.0]

"""Results that bodies compute in the slots from which they are sent: which ones, and their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.concurrent_loops import ConcurrentLoops, Party
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Tensor, make_node
from graphflow.runtime.memory.live_ranges import ResultBuffer
from graphflow.runtime.memory.memory_layout import plan_layout
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.program.bodies.slot_results import (
    MIN_BYTES,
    SlotResult,
    find_slot_results,
)

SIZE = MIN_BYTES // 8
CPU = "/worker:0/cpu:0"


def make_recv(edge: int, size: int = SIZE) -> Tensor:
    attrs = {"edge": edge, "source": "/worker:1/cpu:0", "shape": (size,), "dtype": "float64"}
    return make_node(REGISTRY["recv"], (), attrs).outputs[0]


def make_send(edge: int, value: Tensor) -> Tensor:
    attrs = {"edge": edge, "target": "/worker:1/cpu:0"}
    return make_node(REGISTRY["send"], (value,), attrs).outputs[0]


def body(*outputs: Tensor, state: tuple[Tensor, Tensor] | None = None) -> list[SlotResult]:
    """The slots of a body's results; the body may have a state, with its next value."""
    own = () if state is None else state[1:]
    graph = Graph([*outputs, *own])
    feeds = tuple(graph.names[node] for node in graph.placeholders)
    part = Partition(CPU, graph, feeds, {str(i): result for i, result in enumerate(own)})
    buffers = [] if state is None else [ResultBuffer(state[1], state[0])]
    return find_slot_results(part, plan_layout(part, {}, buffers))


def test_the_slot_of_a_result_is_asked_for_after_the_receive_before_it() -> None:
    doubled = make_recv(1) * 2.0
    root = gf.sqrt(make_recv(2))
    found = body(make_send(3, doubled), make_send(4, root))
    assert [(each.tensor, each.edges, each.is_result) for each in found] == [
        (doubled, (3,), False),
        (root, (4,), False),
    ]
    assert [each.after and each.after.attrs["edge"] for each in found] == [1, 2]
    x = gf.placeholder("float64", (SIZE,))
    (alone,) = body(make_send(3, x * 2.0))
    assert alone.after is None


def test_a_small_result_has_no_slot() -> None:
    assert not body(make_send(3, make_recv(1, SIZE - 1) * 2.0))
    assert body(make_send(3, make_recv(1, SIZE) * 2.0))


def test_the_next_state_of_a_loop_may_be_computed_in_a_slot_of_any_worker() -> None:
    state = gf.placeholder("float64", (SIZE,))
    after = state + make_recv(1)
    mask = gf.constant(np.array([True, False]))
    attrs = {"edges": (3, 4), "targets": ("/worker:1/cpu:0", "/worker:2/cpu:0")}
    send = make_node(REGISTRY["send_where"], (after, mask), attrs).outputs[0]
    (found,) = body(send, state=(state, after))
    assert (found.tensor, found.edges, found.is_result) == (after, (3, 4), True)


def test_a_tensor_that_the_body_does_not_make_is_copied() -> None:
    x = gf.placeholder("float64", (SIZE,))
    assert not body(make_send(3, x))
    assert not body(make_send(3, x), state=(x, x + 1.0))
    assert not body(make_send(3, make_recv(1)))
    assert not body(make_send(3, gf.constant(np.ones(SIZE))))
    assert not body(make_send(3, gf.reshape(x * 2.0, (2, -1))))


def test_an_edge_that_is_sent_to_twice_has_no_slot_for_its_results() -> None:
    x = make_recv(1)
    assert not body(make_send(3, x * 2.0), make_send(3, x * 3.0))
    first = make_send(3, x * 2.0)
    (found,) = body(first, make_send(3, make_recv(2) * 3.0))
    assert found.after is not None and found.after.attrs["edge"] == 2


def test_a_buffer_that_a_later_result_takes_over_is_no_slot() -> None:
    """A later kernel may change the buffer of its input in place, which nobody reads then."""
    x = gf.reshape(make_recv(1), (SIZE // 2, 2))
    ids = gf.placeholder("int64", (1,))
    made = x * 2.0
    first = make_send(3, made)
    rows = gf.constant(np.ones((1, 2)))
    changed = REGISTRY["update_rows"](made, ids, rows, gf.constant(np.int64(1)))
    assert not body(first, make_send(4, changed))


def exchange(server: str, worker: str, side: int) -> list[Tensor]:
    """A worker that sends an elementwise result and a product, and reads both again afterwards."""
    turns = 5
    loops = ConcurrentLoops()
    pull, push, more = (loops.channel((side, side), "float64") for _ in range(3))
    matrix = np.random.default_rng(0).normal(size=(side, side)) / side

    def serve(party: Party) -> Any:
        def turn(total: Any, _: Any) -> Any:
            party.send(pull, total)
            return total * 0.5 + party.receive(push) - party.receive(more), None

        return party.scan(turn, gf.constant(matrix), length=turns)[0]

    def work(party: Party) -> Any:
        def turn(seen: Any, _: Any) -> Any:
            weights = party.receive(pull)
            gradient = weights * weights + 1.0
            party.send(push, gradient)
            product = gradient @ weights
            party.send(more, product)
            return seen + gf.sum(gradient) + gf.sum(product * gradient), None

        return party.scan(turn, np.float64(0), length=turns)[0]

    loops.add(serve, server)
    loops.add(work, worker)
    return [*loops.build()]


@pytest.mark.parametrize(
    ("shared", "side", "threads"),
    [
        ("on", 256, 1),
        pytest.param("off", 256, 1, marks=pytest.mark.slow),
        pytest.param("on", 1024, 2, marks=pytest.mark.slow),  # more than caches keep
    ],
)
def test_slots_change_no_bits(
    shared: str, side: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", shared)
    together = exchange("/worker:0", "/worker:0", side)
    apart = exchange("/worker:0", "/worker:1", side)
    cluster = gf.Cluster.local(2, threads=threads)
    with gf.Session(cluster, trial=False, deadline=60) as session:
        wanted = session.run(together)
        for _ in range(3):  # the first agrees on rings
            for found, expected in zip(session.run(apart), wanted, strict=True):
                np.testing.assert_array_equal(found, expected)

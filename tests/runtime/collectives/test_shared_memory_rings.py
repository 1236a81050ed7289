"""Rings of edges in loops: what goes in comes out in order, whichever end is ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.errors import OpError, ProtocolError, StepTimeout
from graphflow.ir.spec import TensorSpec, spec
from graphflow.runtime.collectives.group_setup import HandshakeChannel
from graphflow.runtime.collectives.ring_ends import MAX_SEGMENT_BYTES, LoopEdges
from graphflow.runtime.collectives.shared_memory_rings import LoopRings, agree_on_rings
from graphflow.runtime.memory.ring_sizes import RING_BYTES, slot_count
from graphflow.runtime.transport.shared_memory import SharedMemorySegment, has_shared_memory
from graphflow.runtime.transport.tensor_mailbox import Awaited, TensorMailbox
from graphflow.runtime.wire.step_values import EDGE_BITS

pytestmark = pytest.mark.skipif(not has_shared_memory(), reason="no shared memory here")
EDGES = {1: spec("float64", (3,)), 2: spec("float64", (3,)), 3: spec("float64", (0,))}


@dataclass
class Owner:
    """A worker's session, whose handshakes go to a dict that all workers share."""

    told: dict[Any, bytes]
    mail: TensorMailbox = field(default_factory=TensorMailbox)
    generation: int = 0
    open_edges: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.mail.deadline = threading.TIMEOUT_MAX

    def handshake_channel(self, step: int, key: Any, purpose: str) -> HandshakeChannel:
        def send(what: str, worker: int, data: bytes) -> None:
            self.told[step, key, what] = data

        def receive(what: str, worker: int) -> bytes:
            return self.told[step, key, what]

        return HandshakeChannel(0, send, receive, lambda: None, SharedMemorySegment.attach)


def ends(
    specs: dict[int, TensorSpec], told: dict[Any, bytes] | None = None
) -> tuple[LoopRings, LoopRings]:
    """The sender's and the receiver's rings, on which they have not agreed yet."""
    told = {} if told is None else told
    awaited = {edge: Awaited(f"edge {edge}", 1) for edge in specs}
    edges = LoopEdges(1, awaited, dict(specs))
    none: frozenset[int] = frozenset()
    sender = LoopRings(Owner(told), "p", "here", {"there": edges}, {}, none)
    receiver = LoopRings(Owner(told), "p", "there", {}, {"here": edges}, none)
    return sender, receiver


@pytest.fixture
def agreed() -> Iterator[tuple[LoopRings, LoopRings]]:
    sender, receiver = ends(EDGES)
    agree_on_rings([receiver, sender], 0)
    yield sender, receiver
    sender.close()
    receiver.close()


def key(edge: int, number: int) -> int:
    return edge | number << EDGE_BITS


def test_the_ends_agree_and_forget_alike() -> None:
    sender, receiver = ends(EDGES)
    assert not sender.is_agreed and not receiver.is_agreed
    receiver.offer(0)
    sender.attach(0)
    sender.confirm(0)
    receiver.confirm(0)
    assert sender.senders.keys() == receiver.receivers.keys() == EDGES.keys()
    for rings in (sender, receiver):
        rings.owner.generation += 1  # a step failed
        rings.begin_step()
        assert not rings.is_agreed
        assert not rings.senders and not rings.receivers and not rings.owner.open_edges


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4))
def test_any_number_of_tensors_comes_out_in_order(steps: list[tuple[int, int]]) -> None:
    """In each step one end sends so many, and the other receives as many of them as it likes."""
    sender, receiver = ends(EDGES)
    receiver.offer(0)
    sender.attach(0)
    for rings in (sender, receiver):
        rings.confirm(0)
    slots = slot_count(EDGES[1])
    for step, (sent, received) in enumerate(steps):
        received = min(sent, received)
        sent = min(sent, received + slots - 1)  # more would wait

        def send(step: int = step, sent: int = sent) -> None:
            for number in range(sent):
                sender.senders[1].send(step, key(1, number), np.full(3, 100.0 * step + number))

        thread = threading.Thread(target=send)
        thread.start()
        for number in range(received):
            receiver.receivers[1].release(number)
            found = receiver.receivers[1].receive(step, key(1, number))
            assert found.tolist() == [100.0 * step + number] * 3
            assert not found.flags.writeable
        thread.join()
        sender.end_step()
        receiver.end_step()
    sender.close()
    receiver.close()


def test_a_tensor_may_be_computed_in_its_slot(agreed: tuple[LoopRings, LoopRings]) -> None:
    sender, receiver = agreed
    ring = sender.senders[1]
    for number in range(slot_count(EDGES[1])):
        slot = ring.free_slot(number)
        assert slot is not None
        slot[...] = number
        assert ring.send(1, key(1, number), slot)
    assert ring.free_slot(slot_count(EDGES[1])) is None  # the receiver has given none back
    for number in range(2):
        assert receiver.receivers[1].receive(1, key(1, number)).tolist() == [number] * 3
    receiver.receivers[1].release(1)
    assert ring.free_slot(slot_count(EDGES[1])) is not None
    assert ring.free_slot(slot_count(EDGES[1]) + 1) is None


@pytest.mark.parametrize("rows", [None, 5])
def test_copies_of_large_tensors_bypass_the_caches(
    rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They bring the same bytes, also of arrays with gaps and of the first rows only."""
    monkeypatch.setattr("graphflow.runtime.transport.nontemporal_copy._last_cache", lambda: 1)
    large = spec("float64", (1 << 10, 300))
    sender, receiver = ends({1: large})
    agree_on_rings([receiver, sender], 0)
    values = np.random.default_rng(0).normal(size=(1 << 10, 600))[:rows]
    for number, array in enumerate([values[:, ::2], values[:, ::2].copy()]):
        sender.senders[1].send(1, key(1, number), array)
        found = receiver.receivers[1].receive(1, key(1, number))
        np.testing.assert_array_equal(found, array)
    sender.close()
    receiver.close()


def test_a_merge_takes_what_is_there(agreed: tuple[LoopRings, LoopRings]) -> None:
    sender, receiver = agreed
    about = Awaited("any")
    sender.senders[2].send(1, key(2, 0), np.ones(3))
    assert receiver.wait_for_any(1, (1, 2, 3), (0, 0, 0), 0, about) == 1
    sender.senders[1].send(1, key(1, 0), np.ones(3))
    assert receiver.wait_for_any(1, (1, 2, 3), (0, 0, 0), 0, about) == 0
    assert receiver.wait_for_any(1, (1, 2, 3), (0, 0, 0), 1, about) == 1
    timer = threading.Timer(0.1, lambda: sender.senders[3].send(1, key(3, 0), np.ones(0)))
    timer.start()
    assert receiver.wait_for_any(1, (1, 2, 3), (1, 1, 0), 0, about) == 2
    timer.join()


def test_a_merge_waits_for_rings_and_messages(agreed: tuple[LoopRings, LoopRings]) -> None:
    sender, receiver = agreed
    mail, about = receiver.owner.mail, Awaited("any")
    for numbers, place in (((0, 0), 1), ((1, 0), 0)):
        for delay in (0.0, 0.05):

            def arrive(place: int = place, numbers: tuple[int, int] = numbers) -> None:
                if place:
                    mail.put(1, key(9, numbers[1]), np.ones(3))
                else:
                    for number in (0, 1):
                        sender.senders[1].send(1, key(1, number), np.ones(3))

            timer = threading.Timer(delay, arrive)
            timer.start()
            assert receiver.wait_for_any(1, (1, 9), numbers, 0, about) == place
            timer.join()


def test_waits_end_with_their_step(agreed: tuple[LoopRings, LoopRings]) -> None:
    sender, receiver = agreed
    for number in range(slot_count(EDGES[1])):
        sender.senders[1].send(1, key(1, number), np.ones(3))
    waits = [
        lambda: sender.senders[1].send(1, key(1, 16), np.ones(3)),
        lambda: receiver.receivers[2].receive(1, key(2, 0)),
        lambda: receiver.wait_for_any(1, (2, 3), (0, 0), 0, Awaited("any")),
    ]
    for rings, wait in zip((sender, receiver, receiver), waits, strict=True):
        rings.owner.mail.deadline = 0.0
        with pytest.raises(StepTimeout, match="did not come before the deadline"):
            wait()
        rings.owner.mail.deadline = threading.TIMEOUT_MAX
        timer = threading.Timer(0.05, rings.owner.mail.cancel, (1, OpError("it was enough")))
        timer.start()
        with pytest.raises(OpError, match="it was enough"):
            wait()
        timer.join()
        rings.owner.mail = TensorMailbox()
        rings.owner.mail.deadline = threading.TIMEOUT_MAX


def test_rings_have_few_slots_for_large_tensors() -> None:
    sizes = [1, 4096, 1 << 20, 16 << 20]
    assert [slot_count(spec("uint8", (size,))) for size in sizes] == [16, 16, 4, 2]
    assert RING_BYTES // (1 << 20) == 4
    sender, receiver = ends({1: spec("uint8", (MAX_SEGMENT_BYTES,)), 2: spec("uint8", (8,))})
    receiver.offer(0)
    sender.attach(0)
    assert list(sender.senders) == [2]  # the other one has messages
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    "row",
    [(9, 64, 192, 2), (1, 63, 192, 2), (1, 64, 1 << 40, 2), (1, -64, 192, 2), (1, 64, 192, 1)],
)
def test_places_that_cannot_be_are_refused(row: tuple[int, ...]) -> None:
    told: dict[Any, bytes] = {}
    sender, receiver = ends(EDGES, told)
    receiver.offer(0)
    ((where, data),) = told.items()
    token = data.partition(b",")[0]
    told[where] = token + b", [" + str(list(row)).encode() + b"]]"
    with pytest.raises(ProtocolError, match=r"names a ring of edge \d that cannot be"):
        sender.attach(0)
    sender.close()
    receiver.close()

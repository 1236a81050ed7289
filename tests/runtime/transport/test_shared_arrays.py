"""Arrays between processes: the same bits by every way, and nothing left behind by any end."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import GraphflowError, ProtocolError, WorkerLost
from graphflow.placement.clusters.cluster import Cluster
from graphflow.runtime.transport.shared_memory import has_shared_memory
from graphflow.runtime.transport.shared_memory_arrays import (
    LEND_MIN_BYTES,
    SharedArrayPool,
    SharedArrayReader,
)
from graphflow.runtime.wire import array_codec
from graphflow.runtime.wire import frame_codec as wire
from graphflow.runtime.wire.chunk_assembler import ChunkAssembler
from graphflow.runtime.wire.messages import Chunk
from graphflow.runtime.worker.peer_link import PeerLink
from tests.faults.running import resident, stop
from tests.runtime.workers import segments_of

needs_memory = pytest.mark.skipif(not has_shared_memory(), reason="no anonymous shared memory here")
SIZES = [1, LEND_MIN_BYTES // 4 - 1, LEND_MIN_BYTES // 4, 70_001, 3_000_000]


def session(monkeypatch: pytest.MonkeyPatch, shared: bool) -> gf.Session:
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", "on" if shared else "off")
    return gf.Session(Cluster.local(workers=2, threads=1), deadline=60, trial=False)


def send_round_trip() -> tuple[Any, Any, Any]:
    x = gf.placeholder("float32", (None,), name="x")
    with gf.device("/worker:0"):
        first = gf.exp(x)
    with gf.device("/worker:1"):
        second = first * 1.5 - x
    with gf.device("/worker:0"):
        return x, second, gf.tanh(second) + first


@needs_memory
def test_all_ways_of_an_array_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, second, third = send_round_trip()
    random = np.random.default_rng(0)
    feeds = [random.normal(size=size).astype("float32") for size in SIZES for _ in range(3)]
    found = []
    for shared in (True, False):
        with session(monkeypatch, shared) as s:
            found.append([s.run([second, third], {x: feed}) for feed in feeds])
            loop = s._life.hosts._loop
            assert any(loans.pool.is_attached for loans in loop.array_memory) == shared
            assert bool(loop._borrowed_memory) == shared  # results come in the same way
    with gf.Session() as s:
        x, second, third = send_round_trip_here()
        found.append([s.run([second, third], {x: feed}) for feed in feeds])
    for ways in zip(*found, strict=True):
        for arrays in zip(*ways, strict=True):
            assert len({array.tobytes() for array in arrays}) == 1
            assert all(array.flags.writeable for array in arrays)


def send_round_trip_here() -> tuple[Any, Any, Any]:
    x = gf.placeholder("float32", (None,), name="x")
    first = gf.exp(x)
    second = first * 1.5 - x
    return x, second, gf.tanh(second) + first


@needs_memory
def test_what_was_fetched_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    x, second, _ = send_round_trip()
    with session(monkeypatch, True) as s:
        kept = [s.run(second, {x: np.full(100_000, k, "float32")}) for k in range(6)]
        for k, array in enumerate(kept):
            assert np.allclose(array, np.exp(np.float32(k)) * 1.5 - k)


@needs_memory
def test_shared_memory_stays_bounded_over_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _, third = send_round_trip()
    feed = np.ones(1 << 18, "float32")
    with session(monkeypatch, True) as s:
        for _ in range(4):
            s.run(third, {x: feed})
        before = [segments_of(pid) for pid in s._life.hosts.pids]
        for _ in range(30):
            s.run(third, {x: feed})
        assert [segments_of(pid) for pid in s._life.hosts.pids] == before
        assert (
            sum(loans.pool.lent_bytes for loans in s._life.hosts._loop.array_memory)
            < 8 * feed.nbytes
        )


@needs_memory
def test_a_step_that_has_ended_keeps_none_of_its_feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next one needs as much memory again, which lies in no cache."""
    x, _, third = send_round_trip()
    with session(monkeypatch, True) as s:
        for _ in range(20):
            s.run(third, {x: np.ones(1 << 18, "float32")})
        lenders = [loans.pool for loans in s._life.hosts._loop.array_memory]
        assert [each.lent_bytes for each in lenders] == [0, 0]
        assert [len(slots) for each in lenders for slots in each._slots.values()] == [1, 1]


@pytest.mark.every(2)
@needs_memory
@pytest.mark.parametrize("number", [signal.SIGKILL])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_dies_in_a_transfer_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, number: int, victim: int
) -> None:
    x, _, third = send_round_trip()
    feed = {x: np.ones(4 << 20, "float32")}
    with session(monkeypatch, True) as s:
        for _ in range(2):
            s.run(third, feed)
        pids = list(s._life.hosts.pids)
        future = s.run_async(third, feed)
        time.sleep(0.005)
        os.kill(pids[victim], number)
        started = time.monotonic()
        with pytest.raises(WorkerLost):
            for _ in range(3):
                future.result(20)
                future = s.run_async(third, feed)
        assert time.monotonic() - started < 10
    assert not any(_segments(pid) for pid in pids)
    assert not [name for name in os.listdir("/dev/shm") if "graphflow" in name]


@needs_memory
def test_a_session_that_closes_lets_go_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x, second, _ = send_round_trip()
    gc.collect()  # what other tests left
    before = _segments(os.getpid())
    with session(monkeypatch, True) as s:
        for _ in range(3):
            s.run(second, {x: np.ones(100_000, "float32")})
        assert _segments(os.getpid()) > before
        del s
    assert _segments(os.getpid()) == before  # at once: nothing waits for cycles to be found


def _segments(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return 0
    return sum("/memfd:graphflow" in line for line in lines)


# A link, by hand -------------------------------------------------------------------------------


class Wire:
    """A channel that keeps what is sent."""

    address = "tcp://127.0.0.1:1"

    def __init__(self) -> None:
        import threading

        self.lock = threading.RLock()
        self.sent: list[Any] = []

    def send_unlocked(self, frames: Any) -> bool:
        self.sent.append(wire.decode_frames([bytes(frame) for frame in frames]))
        return True

    def close(self) -> None:
        self.sent.append(None)


@pytest.fixture
def link() -> Iterator[tuple[PeerLink, Wire]]:
    from graphflow.runtime.protocol.reliable_stream import Outbound

    channel = Wire()
    made = PeerLink(channel, Outbound("s" * 32, 1, 0, "t"))
    yield made, channel
    made.close()


def send(link: PeerLink, array: Any) -> None:
    link.send("edge", 1, 7, array, owned=True, should_continue=lambda: False)


@needs_memory
def test_a_link_offers_memory_and_lends_once_it_is_taken(link: tuple[PeerLink, Wire]) -> None:
    made, channel = link
    array = np.arange(LEND_MIN_BYTES, dtype="float32")
    send(made, array)
    offer, chunk = (type(message).__name__ for _, message, _ in channel.sent)
    assert (offer, chunk) == ("Share", "Chunk")
    borrower = SharedArrayReader(channel.sent[0][1].token)
    send(made, array)
    _, lent, data = channel.sent[-1]
    assert isinstance(lent, Chunk) and lent.slot and data is None
    inbox = ChunkAssembler()
    borrowed = array_codec.BorrowedBuffer(
        lambda: borrower.borrow(lent.slot, lent.turn, lent.nbytes)
    )
    assert inbox.add(0, lent, borrowed)
    back = inbox.take(0, "edge", 1, 7)
    assert (back == array).all() and back.dtype == array.dtype


@needs_memory
def test_a_link_without_room_sends_the_bytes(link: tuple[PeerLink, Wire]) -> None:
    made, channel = link
    made._array_pool = SharedArrayPool(2 * LEND_MIN_BYTES)
    SharedArrayReader(made._array_pool.offer())
    send(made, np.zeros(LEND_MIN_BYTES, np.uint8))
    send(made, np.zeros(4 * LEND_MIN_BYTES, np.uint8))
    first, second = channel.sent
    assert first[1].slot and first[2] is None
    assert not second[1].slot and len(second[2]) == 4 * LEND_MIN_BYTES


def test_a_small_tensor_is_one_frame(link: tuple[PeerLink, Wire]) -> None:
    made, channel = link
    send(made, np.float32([1, 2]))
    ((_, message, data),) = channel.sent
    assert type(message).__name__ == "Tensor" and data is None
    assert array_codec.decode_small(message.array)[1].tolist() == [1, 2]


@needs_memory
@pytest.mark.parametrize(
    ("field", "value"),
    [("slot", 3), ("slot", 1 << 50), ("nbytes", 1 << 40), ("turn", 0), ("dtype", "object"),
     ("shape", [1 << 20, 1 << 20]), ("offset", 4 << 20), ("axes", [0, 0])],
)  # fmt: skip
def test_a_lent_array_that_contradicts_itself_is_refused(field: str, value: Any) -> None:
    lender = SharedArrayPool()
    borrower = SharedArrayReader(lender.offer())
    chunk = array_codec.lend_array("edge", 1, 7, np.zeros(LEND_MIN_BYTES, np.uint8), lender.lend)
    assert chunk is not None
    fields = {**chunk.__dict__, field: value}
    if field == "nbytes":
        fields["shape"] = [value]
    wrong = Chunk(**fields)
    borrowed = array_codec.BorrowedBuffer(
        lambda: borrower.borrow(wrong.slot, wrong.turn, wrong.nbytes)
    )
    with pytest.raises((ProtocolError, GraphflowError)):
        ChunkAssembler(1 << 50).add(0, wrong, borrowed)


@pytest.mark.every(2)
@pytest.mark.parametrize("shared", [True, False])
def test_a_slow_consumer_holds_its_producer_and_memory_stays_bounded(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    if shared and not has_shared_memory():
        pytest.skip("no anonymous shared memory here")
    x, _, third = send_round_trip()
    feed = np.ones(1 << 20, "float32")
    with session(monkeypatch, shared) as s:
        for _ in s.run(third, [{x: feed}] * 6, steps=6):
            pass
        producer, consumer = s._life.hosts.pids
        before = resident(producer) + resident(consumer)
        results = s.run(third, ({x: feed} for _ in range(9)), steps=9)
        for number, array in enumerate(results):
            if number % 3 == 0:  # a consumer that takes nothing for a while
                stop(consumer)
                time.sleep(0.2)
                os.kill(consumer, signal.SIGCONT)
            assert array.shape == feed.shape
        after = resident(producer) + resident(consumer)
    assert after - before < 9 * feed.nbytes, "what is under way does not grow with the steps"

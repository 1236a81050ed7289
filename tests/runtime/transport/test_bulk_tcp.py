"""Pipes: what workers send each other over a connection of its own, in order, never in the way."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ProtocolError, TransportError
from graphflow.runtime.transport import bulk_tcp as pipes
from graphflow.runtime.transport.bulk_tcp import (
    MAX_CHANNELS,
    BulkChannel,
    BulkReceivers,
    BulkSender,
    accept_offer,
)
from graphflow.runtime.wire.array_codec import CHUNK_BYTES
from graphflow.runtime.wire.frame_codec import CONTROL_CAP
from tests.runtime.security.test_connection_guard import wait_for

ADDRESS = "tcp://127.0.0.1:7001"
MB = 1 << 20


def encode_frames(*frames: bytes) -> bytes:
    """A message as it travels."""
    second = len(frames[1]) if len(frames) > 1 else pipes._NO_SECOND_FRAME
    body = b"".join(frames)
    return pipes._HEAD.pack(len(frames[0]), second) + body + xxhash.xxh3_64(body).digest()


@pytest.fixture
def outlet() -> Iterator[BulkSender]:
    made = BulkSender(ADDRESS)
    yield made
    made.close()


@pytest.fixture
def ends(outlet: BulkSender) -> Iterator[tuple[BulkChannel, BulkChannel]]:
    """The end that sends, and the one that receives."""
    found: list[BulkChannel] = []
    accept_offer(outlet.offer(), ADDRESS, found.append)
    assert wait_for(lambda: found and outlet.channel)
    near = outlet.channel
    assert near is not None
    yield near, found[0]
    found[0].close()


def receive_message(pipe: BulkChannel) -> list[bytes]:
    """The next message."""
    frames = wait_for(pipe.receive)
    assert frames is not None
    return [bytes(frame) for frame in frames]


FRAMES = [
    [b"\x93head"],
    [b"\x93head", b"data"],
    [b"\x93head", b""],
    [b"\x93" * CONTROL_CAP],
    [b"\x93", os.urandom(CHUNK_BYTES)],
    [b"\x93", os.urandom(pipes._PIECE_BYTES)],
    [b"\x93", os.urandom(pipes._PIECE_BYTES + 1)],
]


@pytest.mark.parametrize(
    "frames", FRAMES, ids=["one", "two", "empty", "long", "long data", "a piece", "more"]
)
def test_messages_come_as_they_were_sent(
    ends: tuple[BulkChannel, BulkChannel], frames: list[bytes]
) -> None:
    near, far = ends
    assert far.receive() is None
    for _ in range(3):
        assert near.send(frames)
        assert receive_message(far) == frames


def test_what_is_not_read_at_once_waits_without_its_sender(
    ends: tuple[BulkChannel, BulkChannel],
) -> None:
    near, far = ends
    blocks = [np.full(CHUNK_BYTES, n, np.uint8) for n in range(24)]
    began = time.monotonic()
    for number, block in enumerate(blocks):
        assert near.send([b"%d" % number, block.data])
    assert time.monotonic() - began < 2.0, "a sender waits for no reader"
    for number, block in enumerate(blocks):
        assert receive_message(far) == [b"%d" % number, block.tobytes()]
    assert far.receive() is None
    assert near.send([b"after"])
    assert receive_message(far) == [b"after"]


def test_bytes_that_come_one_at_a_time_become_messages(
    ends: tuple[BulkChannel, BulkChannel],
) -> None:
    near, far = ends
    frames = [b"head", b"data!"]
    packed = encode_frames(*frames)
    for byte in packed[:-1]:
        near._socket.send(bytes([byte]))
        assert far.receive() is None
    near._socket.send(packed[-1:])
    assert receive_message(far) == frames


def test_who_dribbles_does_not_keep_its_reader(ends: tuple[BulkChannel, BulkChannel]) -> None:
    near, far = ends
    stop = threading.Event()
    near._socket.send(pipes._HEAD.pack(4, CHUNK_BYTES))

    def dribble() -> None:
        while not stop.is_set():
            near._socket.send(b"x")
            time.sleep(0.0005)

    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        for _ in range(5):
            began = time.monotonic()
            assert far.receive() is None
            assert time.monotonic() - began < 0.5
    finally:
        stop.set()
        thread.join()


def test_nothing_overtakes_what_went_another_way(ends: tuple[BulkChannel, BulkChannel]) -> None:
    near, far = ends
    assert near.send_in_order([b"a"], 1, 0)
    near.last_over_zmq = 3  # 2 and 3 went by ZeroMQ
    assert not near.send_in_order([b"d"], 4, 2)
    assert not near.send_in_order([b"e"], 5, 3)  # 4 is under way there
    assert near.send_in_order([b"f"], 6, 5)
    assert [receive_message(far), receive_message(far)] == [[b"a"], [b"f"]]


def test_a_pipe_that_ends_says_so_and_sends_nothing(
    outlet: BulkSender, ends: tuple[BulkChannel, BulkChannel]
) -> None:
    near, far = ends
    far.close()
    assert wait_for(lambda: not near.send([b"x"]))
    assert near.ended and outlet.channel is None
    assert outlet.offer(), "there may be another one"


def test_a_message_that_breaks_off_goes_another_way_whole(
    ends: tuple[BulkChannel, BulkChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ends
    put, pieces = near._write_parts, []

    def ends_after_one(*given: Any) -> bool:
        pieces.append(given)
        near.ended = len(pieces) > 1
        return put(*given)

    monkeypatch.setattr(near, "_write_parts", ends_after_one)
    assert not near.send_in_order([b"head", bytes(CHUNK_BYTES)], 7, 6)
    assert near.last_over_zmq == 7 and len(pieces) == 2
    near.close()
    with pytest.raises(TransportError):
        for _ in range(100):
            assert far.receive() is None


def test_the_end_of_its_sender_is_seen(ends: tuple[BulkChannel, BulkChannel]) -> None:
    near, far = ends
    near._socket.send(pipes._HEAD.pack(4, 100) + b"head and a part")
    assert far.receive() is None
    near.close()
    with pytest.raises(TransportError, match="closed its bulk connection"):
        wait_for(far.receive)


@pytest.mark.parametrize("place", [8, 10, 13, 40, -9, -8, -1])
def test_a_flipped_bit_is_seen(ends: tuple[BulkChannel, BulkChannel], place: int) -> None:
    near, far = ends
    frames = [b"head", bytes(range(60))]
    packed = bytearray(encode_frames(*frames))
    near._socket.send(packed)
    assert receive_message(far) == frames
    packed[place] ^= 4
    near._socket.send(packed)
    with pytest.raises(ProtocolError, match="wrong checksum"):
        wait_for(far.receive)


@pytest.mark.parametrize(
    "sizes", [(0, 0), (CONTROL_CAP + 1, 0), (4, CHUNK_BYTES + 1), (0xFFFFFFFF, 0xFFFFFFFF)]
)
def test_sizes_that_no_message_has_are_refused_before_memory_is_taken(
    ends: tuple[BulkChannel, BulkChannel], sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ends
    monkeypatch.setattr(
        pipes, "empty_aligned", lambda size: pytest.fail(f"{size} bytes were taken")
    )
    near._socket.send(pipes._HEAD.pack(*sizes))
    with pytest.raises(ProtocolError, match="bytes"):
        wait_for(far.receive)


def test_any_bytes_are_messages_or_refused(ends: tuple[BulkChannel, BulkChannel]) -> None:
    near, far = ends

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
    @given(st.binary(min_size=1, max_size=64))
    def check(data: bytes) -> None:
        far._frames, far._wanted = [], [far._head]
        near._socket.send(data)
        try:
            while (frames := far.receive()) is not None:
                assert 1 <= len(frames) <= 2 and len(frames[0]) > 0
        except ProtocolError:
            far._socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                far._socket.recv(4096)
            far._socket.setblocking(True)

    check()


# Offers ------------------------------------------------------------------------------------------


def test_an_offer_is_for_who_knows_the_secret(outlet: BulkSender) -> None:
    token = outlet.offer()
    port = int(token.split()[1])
    assert outlet.offer() == "", "one stands already"
    for said in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(64), b"0" * 64):
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            stranger.sendall(said)
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    assert outlet.channel is None
    found: list[BulkChannel] = []
    accept_offer(token, ADDRESS, found.append)
    assert wait_for(lambda: found and outlet.channel)
    found[0].close()
    with pytest.raises(OSError):  # nobody listens there any more
        socket.create_connection(("127.0.0.1", port), 1).close()


def test_who_says_nothing_does_not_keep_others_out(
    outlet: BulkSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipes, "_GREETING_SECONDS", 0.2)
    token = outlet.offer()
    with socket.create_connection(("127.0.0.1", int(token.split()[1])), 5):
        found: list[BulkChannel] = []
        accept_offer(token, ADDRESS, found.append)
        assert wait_for(lambda: found and outlet.channel)
    found[0].close()


def test_an_offer_ends_with_its_time_or_with_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "_OFFER_SECONDS", 0.2)
    outlet = BulkSender(ADDRESS)
    first = outlet.offer()
    second = wait_for(outlet.offer)
    assert first and second and first != second
    began = time.monotonic()
    monkeypatch.setattr(pipes, "_OFFER_SECONDS", 60.0)
    assert wait_for(outlet.offer)
    outlet.close()
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(
    ("token", "known"),
    [
        ("{token}", "tcp://127.0.0.1:7002"),  # as of a proxy
        ("{token}", "tcp://127.0.0.2:7001"),
        ("{token} ", ADDRESS),
        ("pipe 1", ADDRESS),
        ("pipe 99999 " + "0" * 64 + " " + ADDRESS, ADDRESS),
        ("", ADDRESS),
    ],
)
def test_an_offer_that_leads_elsewhere_is_not_taken(
    outlet: BulkSender, token: str, known: str
) -> None:
    found: list[BulkChannel] = []
    accept_offer(token.format(token=outlet.offer()), known, found.append)
    time.sleep(0.1)
    assert not found and outlet.channel is None


def test_a_worker_that_listens_everywhere_offers_none() -> None:
    assert BulkSender("tcp://*:7001").offer() == ""


def test_a_process_reads_from_so_many_and_no_more() -> None:
    taken = BulkReceivers()
    ours, theirs = zip(*(socket.socketpair() for _ in range(MAX_CHANNELS + 1)), strict=True)
    made: list[Any] = [FakePipe(each) for each in ours]
    routes = [taken.add("a" if n % 2 else "b", each) for n, each in enumerate(made)]
    assert None not in routes[:MAX_CHANNELS] and routes[MAX_CHANNELS] is None
    assert made[MAX_CHANNELS].closed and not any(each.closed for each in made[:MAX_CHANNELS])
    assert len(taken.routes_of("a")) == MAX_CHANNELS // 2
    assert taken.drop(taken.routes_of("a")[0]) is not None
    assert taken.drop(b"pipe 0") is None
    assert taken.add("a", made[MAX_CHANNELS]) is not None
    for each in (*ours, *theirs):
        each.close()


class FakePipe:
    def __init__(self, sock: socket.socket) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


# Sessions ----------------------------------------------------------------------------------------


def send_to_and_fro(x: gf.Tensor) -> gf.Tensor:
    with gf.device("/worker:0"):
        there = x * 2.0
        total = gf.variable(np.zeros((), "float32"), name="total")
    with gf.device("/worker:1"):
        back = there + 1.0
    with gf.device("/worker:0"):
        counted = gf.assign(total, total + 1.0)
        return back + counted


def connections(pids: list[int]) -> int:
    """Established TCP connections of some processes, both ends counted."""
    inodes = set()
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
            except OSError:
                continue
            if found:
                inodes.add(found[1])
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in list(table)[1:]]
    return sum(row[9] in inodes and row[3] == "01" for row in rows)


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="reads Linux's table of sockets")
def test_workers_without_shared_memory_have_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", "off")
    x = gf.placeholder("float32", (None,), name="x")
    result = send_to_and_fro(x)
    rng = np.random.default_rng(0)
    with gf.Session(gf.Cluster.local(workers=2, threads=1), trial=False) as s:
        hosts: Any = s._life.hosts
        step = 0

        def run(size: int) -> None:
            nonlocal step
            step += 1
            fed = rng.random(size, "float32")
            want = (fed * np.float32(2) + np.float32(1)) + np.float32(step)
            assert np.array_equal(s.run(result, {x: fed}), want)

        run(10)
        before = connections(hosts.pids)
        for size in (MB, MB // 4, 3 * MB, 1000, 20_000) * 3:
            run(size)
        there = wait_for(lambda: run(MB) or connections(hosts.pids) == before + 4)
        assert there, "a pipe each way, of two ends"


def test_there_is_no_pipe_beside_shared_memory_or_lanes() -> None:
    x = gf.placeholder("float32", (None,), name="x")
    result = send_to_and_fro(x)
    with gf.Session(gf.Cluster.local(workers=2, threads=1), trial=False) as s:
        hosts: Any = s._life.hosts
        fed = np.ones(MB, "float32")
        s.run(result, {x: fed})
        before = connections(hosts.pids)
        for _ in range(5):
            s.run(result, {x: fed})
        assert connections(hosts.pids) == before

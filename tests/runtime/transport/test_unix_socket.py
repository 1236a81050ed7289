"""Lanes: short messages of processes of one user on one host, in order, and never in the way."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ProtocolError, TransportError
from graphflow.runtime.transport.shared_memory import has_shared_memory
from graphflow.runtime.transport.unix_socket import (
    MESSAGE_CAP,
    UnixSocketChannel,
    UnixSocketListener,
    split_packet,
)

pytestmark = pytest.mark.skipif(not has_shared_memory(), reason="lanes are of Linux")


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def lanes(address: str) -> Iterator[UnixSocketListener]:
    made = UnixSocketListener(address)
    yield made
    made.close()


def connect_both_ends(
    lanes: UnixSocketListener, address: str
) -> tuple[UnixSocketChannel, UnixSocketChannel, bytes]:
    """Both ends of a lane, and its route at the worker."""
    near = UnixSocketChannel.connect(address)
    assert near is not None
    admitted = lanes.accept()
    assert admitted is not None
    return near, admitted[1], admitted[0]


def copy_frames(frames: Any) -> list[bytes] | None:
    return None if frames is None else [bytes(frame) for frame in frames]


FRAMES = [
    [b"\x93head"],
    [b"\x93head", b"data"],
    [b"\x93head", b""],
    [b"\x93" * MESSAGE_CAP],
    [b"\x93", b"d" * (MESSAGE_CAP - 1)],
]


@pytest.mark.parametrize("frames", FRAMES, ids=["one", "two", "empty", "long", "long data"])
def test_messages_come_as_they_were_sent_in_both_directions(
    lanes: UnixSocketListener, address: str, frames: list[bytes]
) -> None:
    near, far, _ = connect_both_ends(lanes, address)
    for sender, receiver in ((near, far), (far, near)):
        assert receiver.receive() is None
        assert sender.send(frames)
        assert copy_frames(receiver.receive()) == frames
    near.close()


def test_what_does_not_fit_is_left_to_another_way(lanes: UnixSocketListener, address: str) -> None:
    near, far, _ = connect_both_ends(lanes, address)
    assert not near.send([b"x" * (MESSAGE_CAP + 1)])
    assert not near.send([b"x", b"y" * MESSAGE_CAP])
    sent = 0
    while near.send([b"%7d" % sent]):  # until its reader is far behind
        sent += 1
    assert sent > 100
    assert copy_frames(far.receive()) == [b"      0"]
    near.close()


def test_nothing_overtakes_what_went_another_way(lanes: UnixSocketListener, address: str) -> None:
    near, far, _ = connect_both_ends(lanes, address)
    assert near.send_in_order([b"a"], 1, 0)
    assert not near.send_in_order([b"b" * (MESSAGE_CAP + 1)], 2, 1)
    assert not near.send_in_order([b"c"], 3, 1)  # 2 is under way
    assert not near.send_in_order([b"d"], 4, 2)  # and so is 3
    assert near.send_in_order([b"e"], 5, 4)
    assert [copy_frames(far.receive()) for _ in range(3)] == [[b"a"], [b"e"], None]
    near.close()


def test_a_lane_that_ends_says_so_and_sends_nothing(
    lanes: UnixSocketListener, address: str
) -> None:
    near, far, route = connect_both_ends(lanes, address)
    assert lanes.get(route) is far
    lanes.drop(route)
    assert lanes.get(route) is None
    with pytest.raises(TransportError, match="closed its Unix socket"):
        near.receive()
    assert not near.send([b"x"])
    near.close()


def test_there_is_no_lane_where_nobody_listens_or_by_another_address(
    lanes: UnixSocketListener, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(address.rpartition(":")[2])
    assert UnixSocketChannel.connect(f"tcp://127.0.0.2:{port}") is None  # as of a proxy
    assert UnixSocketChannel.connect(f"tcp://127.0.0.1:{port % 65535 + 1}") is None
    assert UnixSocketChannel.connect("tcp://10.0.0.1:7001") is None
    assert UnixSocketListener("tcp://10.0.0.1:7001").fileno() == -1
    assert UnixSocketListener("").fileno() == -1
    assert UnixSocketListener(address).fileno() == -1  # the name is taken
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", "off")
    assert UnixSocketChannel.connect(address) is None


def test_so_many_lanes_are_let_in_and_no_more(address: str) -> None:
    lanes = UnixSocketListener(address, most=2)
    ends = [UnixSocketChannel.connect(address) for _ in range(3)]
    admitted = [lanes.accept() for _ in range(3)]
    assert [each is not None for each in admitted] == [True, True, False]
    assert ends[2] is not None
    with pytest.raises(TransportError):
        ends[2].receive()
    assert admitted[0] is not None
    lanes.drop(admitted[0][0])
    ends.append(UnixSocketChannel.connect(address))
    assert lanes.accept() is not None
    lanes.close()
    for each in ends:
        assert each is not None
        each.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_nobody_else_is_let_in_and_none_is_taken_from_somebody_else(
    lanes: UnixSocketListener, address: str
) -> None:
    def stranger() -> int:
        """Whether another user finds a lane, and is heard on a socket of its own making."""
        os.setuid(65534)
        if UnixSocketChannel.connect(address) is not None:
            return 1
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
            own.connect(f"\0graphflow {address}")
            own.settimeout(5)
            with suppress(BrokenPipeError, ConnectionResetError):
                own.send(b"let me in")
            with suppress(ConnectionResetError):
                return 2 if own.recv(100) else 0
        return 0

    child = os.fork()
    if child == 0:
        try:
            os._exit(stranger())
        finally:
            os._exit(9)
    admitted = []
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        admitted.append(lanes.accept())
    assert not any(admitted)


def test_any_packet_is_two_frames_at_most_or_is_refused() -> None:
    @given(st.binary(max_size=64) | st.binary(max_size=16).map(lambda rest: b"\0" + rest))
    def check(packet: bytes) -> None:
        try:
            frames = split_packet(packet)
        except ProtocolError:
            return
        assert 1 <= len(frames) <= 2
        assert sum(map(len, frames)) <= len(packet)

    check()
    with pytest.raises(ProtocolError, match="more than"):
        split_packet(b"x" * (MESSAGE_CAP + 100))


# Sessions ----------------------------------------------------------------------------------------


def compute_across_workers(x: gf.Tensor) -> gf.Tensor:
    with gf.device("/worker:0"):
        doubled = x * 2.0
        total = gf.variable(np.zeros(3, "float32"), name="total")
    with gf.device("/worker:1"):
        more = doubled + 1.0
    with gf.device("/worker:0"):
        return gf.assign(total, total + more)


@pytest.fixture(scope="module")
def session() -> Iterator[gf.Session]:
    with gf.Session(gf.Cluster.local(workers=2, threads=1), trial=False) as made:
        yield made


def lane_of(session: gf.Session, worker: int) -> Any:
    return session._life.hosts._loop._connections[worker].fast_channel  # type: ignore[attr-defined]


def test_sessions_of_this_host_have_lanes_and_go_on_without(session: gf.Session) -> None:
    x = gf.placeholder("float32", (3,), name="x")
    fetch = compute_across_workers(x)
    feed = {x: np.arange(3, dtype="float32")}
    for step in range(1, 12):
        if step == 4:
            assert lane_of(session, 0) is not None and lane_of(session, 1) is not None
            lane_of(session, 0)._socket.shutdown(socket.SHUT_RDWR)
        if step == 8:
            assert lane_of(session, 0) is None and lane_of(session, 1) is not None
        found = session.run(fetch, feed)
        np.testing.assert_array_equal(found, step * (feed[x] * 2 + 1))


def test_garbage_on_a_lane_ends_that_lane_and_nothing_else(session: gf.Session) -> None:
    address = session._life.hosts._addresses[1]  # type: ignore[attr-defined]
    x = gf.placeholder("float32", (3,), name="x")
    with gf.device("/worker:1"):
        fetch = x + 1.0
    session.run(fetch, {x: np.ones(3, "float32")})
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0\xff\xff\xff\xff", b"\x93" * 70_000, b"\0"):
        stranger = UnixSocketChannel.connect(address)
        assert stranger is not None
        stranger._socket.setblocking(True)
        stranger._socket.settimeout(5)
        stranger._socket.send(garbage)
        assert stranger._socket.recv(100) == b""
        stranger.close()
        assert session.run(fetch, {x: np.ones(3, "float32")})[0] == 2
    assert lane_of(session, 1) is not None


def test_nothing_is_left_of_a_worker_that_was_killed() -> None:
    with gf.Session(gf.Cluster.local(workers=1, threads=1), trial=False) as session:
        hosts: Any = session._life.hosts
        name = f"@graphflow {hosts._addresses[0]}"
        assert name in Path("/proc/net/unix").read_text()
        os.kill(hosts.pids[0], signal.SIGKILL)
        assert hosts._local.wait_exit(0, 5.0) is not None
        assert name not in Path("/proc/net/unix").read_text()

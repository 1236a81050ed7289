"""The door of a listener: real connections that are too many, silent, or send what never ends."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from graphflow.errors import AddressInUse
from graphflow.runtime.security import connection_guard as door
from graphflow.runtime.transport.tcp import TcpChannel, TcpListener
from graphflow.runtime.wire.array_codec import CHUNK_BYTES
from tests.faults.hostile.strangers import is_closed

SECONDS = 10.0
ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def wait_for(what: Callable[[], Any], seconds: float = SECONDS) -> Any:
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "nothing happened in time"
        time.sleep(0.005)
    return found


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("tcp://").split(":")
    made = socket.create_connection((host, int(port)))
    made.settimeout(SECONDS)
    return made


def connect_with_handshake(address: str) -> socket.socket:
    """A connection that speaks ZMTP by hand: its greeting and READY are done."""
    made = connect(address)
    made.sendall(ZMTP)
    with made.makefile("rb", buffering=0) as answers:
        greeting = b""
        while len(greeting) < 64:
            greeting += answers.read(64 - len(greeting)) or b""
        made.sendall(READY)
        assert answers.read(1) == b"\x04"  # its READY
    return made


class Served:
    """A listener whose messages are read by a thread, which blames nobody."""

    def __init__(self, context: Any, most: int | None = None) -> None:
        self.listener = TcpListener(context, "tcp://127.0.0.1:*", insecure=False, most=most)
        self.messages: list[tuple[bytes, list[Any], str]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._end.is_set():
            while (message := self.listener.receive()) is not None:
                self.messages.append(message)
            self.listener.socket.poll(20)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self.listener.close()


@pytest.fixture
def context() -> Iterator[Any]:
    context: Any = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def served(context: Any) -> Iterator[Served]:
    made = Served(context, most=20)
    yield made
    made.close()


@pytest.fixture
def late_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor tells of connections half a second late."""
    arrive = door.ConnectionLimiter._add_connection

    def arrive_late(self: door.ConnectionLimiter, descriptor: int) -> None:
        time.sleep(0.5)
        arrive(self, descriptor)

    monkeypatch.setattr(door.ConnectionLimiter, "_add_connection", arrive_late)


@pytest.fixture
def listener(context: Any) -> Iterator[TcpListener]:
    """Read by the test."""
    made = TcpListener(context, "tcp://127.0.0.1:*", insecure=False)
    yield made
    made.close()


@pytest.fixture
def channel(context: Any, listener: TcpListener) -> Iterator[TcpChannel]:
    """To the listener."""
    made = TcpChannel(context, listener.address, insecure=False, watch=True)
    yield made
    made.close()


def test_those_who_say_nothing_make_room_for_who_does(served: Served, context: Any) -> None:
    channel = TcpChannel(context, served.listener.address, insecure=False, watch=True)
    channel.send([b"hello"])
    wait_for(lambda: served.messages)
    silent = [connect(served.listener.address) for _ in range(60)]
    wait_for(lambda: 0 < served.listener.limiter.connections <= 20)
    late = TcpChannel(context, served.listener.address, insecure=False)
    late.send([b"late"])
    wait_for(lambda: [m for m in served.messages if bytes(m[1][0]) == b"late"])
    assert False not in channel.read_link_changes()
    for each in (*silent, channel, late):
        each.close()
    wait_for(lambda: served.listener.limiter.connections == 0)


def connection(
    host: str, since: float, received: int, route: bytes | None, heard: float = 100.0
) -> Any:
    return door._TrackedConnection(0, (host, 1), since, heard, received, route)


def test_who_comes_pushes_nobody_out_who_is_served() -> None:
    served = connection("a", 10.0, 500, b"1")
    talker = connection("a", 99.0, 1 << 20, b"2")
    cut_off = connection("b", 5.0, 1 << 20, b"3", heard=97.0)  # and may be here anew
    silent = [connection("c", 98.0, 0, None), connection("c", 97.0, 0, None)]
    everybody = [served, talker, cut_off, *silent]
    order = [*reversed(silent), cut_off, talker, served]
    assert door._select_surplus(everybody, 5, 100.0) == order
    assert door._select_surplus(everybody, 2, 100.0) == order[:2]


def test_many_of_one_host_keep_nobody_of_another_from_saying_who_it_is(served: Served) -> None:
    host, port = served.listener.address.removeprefix("tcp://").split(":")
    friend = socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0))
    many = [connect(served.listener.address) for _ in range(60)]
    for each in many:
        with contextlib.suppress(OSError):  # it made room already
            each.sendall(ZMTP)  # more than the friend has said so far
    wait_for(lambda: 0 < served.listener.limiter.connections <= 20)
    assert not is_closed(friend, 0.5)  # looks at the door come each 0.2 s
    for each in (*many, friend):
        each.close()


def test_silence_is_not_waited_for_longer_than_a_handshake(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr(door, "SILENCE_SECONDS", 0.3)
    web = connect(served.listener.address)
    web.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")  # ZeroMQ waits for 71 more bytes
    assert is_closed(web, 3.0)
    web.close()


def test_time_in_which_the_process_was_stopped_is_no_silence(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_SECONDS", 2.0)
    web = connect(served.listener.address)
    wait_for(lambda: served.listener.limiter.connections == 1)
    monkeypatch.setattr(door, "monotonic", lambda: time.monotonic() + 50.0)
    assert not is_closed(web, 0.7)
    assert is_closed(web, 5.0)
    web.close()


def test_a_peer_with_a_heartbeat_stays_though_it_says_nothing(
    monkeypatch: pytest.MonkeyPatch, served: Served, context: Any
) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_SECONDS", 1.8)
    monkeypatch.setattr(door, "SILENCE_SECONDS", 1.8)
    channel = TcpChannel(context, served.listener.address, insecure=False, watch=True)
    time.sleep(3.2)
    assert channel.read_link_changes() == [True] and served.listener.limiter.connections == 1
    channel.close()


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def flood(sock: socket.socket, frame: bytes, seconds: float) -> float:
    """Sends frames of one message that does not end; the seconds until the connection did."""
    started = time.monotonic()
    batch = frame * max(1, (1 << 18) // len(frame))
    while time.monotonic() < started + seconds:
        try:
            sock.sendall(batch)
        except OSError:
            return time.monotonic() - started
    raise AssertionError("the connection was not ended")


@pytest.mark.parametrize("size", [1 << 20, 100, 0])
def test_a_message_without_an_end_ends_its_connection(
    served: Served, context: Any, size: int
) -> None:
    channel = TcpChannel(context, served.listener.address, insecure=False, watch=True)
    channel.send([b"hello"])
    wait_for(lambda: served.messages)
    before = _rss()
    sock = connect_with_handshake(served.listener.address)
    head = bytes([1, size]) if size < 256 else b"\x03" + struct.pack(">Q", size)
    flood(sock, head + bytes(size), SECONDS)
    assert _rss() - before < (256 << 20 if size else 1 << 30)  # a frame of no byte takes 64 of them
    channel.send([b"still here"])
    wait_for(lambda: len(served.messages) == 2)
    assert False not in channel.read_link_changes()
    sock.close()
    channel.close()


def test_a_flood_is_seen_from_its_first_byte_on(
    served: Served, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = door.check_interval
    monkeypatch.setattr(door, "check_interval", lambda n: looks(n) if n > 1 << 20 else 10 * SECONDS)
    channel = TcpChannel(context, served.listener.address, insecure=False, watch=True)
    channel.send([b"hello"])
    sock = connect_with_handshake(served.listener.address)
    wait_for(lambda: served.listener.limiter.connections == 2)
    time.sleep(0.5)  # who is quiet is not looked at
    flood(sock, b"\x03" + struct.pack(">Q", 1 << 16) + bytes(1 << 16), SECONDS)
    assert False not in channel.read_link_changes()
    sock.close()
    channel.close()


def test_large_messages_that_wait_to_be_read_end_nothing(
    listener: TcpListener, channel: TcpChannel
) -> None:
    for _ in range(120):
        channel.send([b"head", bytes(CHUNK_BYTES)])
    time.sleep(1.0)  # nobody reads
    for _ in range(120):
        assert len(wait_for(listener.receive)[1]) == 2
    assert channel.read_link_changes() == [True]


def test_a_monitor_that_is_late_takes_no_honest_peer_for_another(
    late_news: None, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load the first messages of a connection come before the news of the connection."""
    monkeypatch.setattr(door, "UNFRAMED_CAP", 1 << 20)
    served = Served(context)
    channel = TcpChannel(context, served.listener.address, insecure=False, watch=True)
    for number in range(60):
        channel.send([b"head", bytes(100_000)])
        wait_for(lambda number=number: len(served.messages) > number)
        time.sleep(0.02)
    assert channel.read_link_changes() == [True] and served.listener.limiter.connections == 1
    channel.close()
    served.close()


def test_frames_beyond_those_of_a_valid_message_are_passed_over_in_turns(
    served: Served, context: Any
) -> None:
    sock: Any = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.connect(served.listener.address)
    sock.send_multipart([b"x"] * 50_000)
    sock.send_multipart([b"after"])
    wait_for(lambda: len(served.messages) == 2)
    assert [len(m[1]) for m in served.messages] == [3, 1]
    sock.close()


def test_who_keeps_sending_what_is_not_valid_is_dropped(
    listener: TcpListener, channel: TcpChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "monotonic", lambda: -7e3)  # below 0, as clocks that are shifted
    for _ in range(int(door.STRIKES)):
        channel.send([b"nonsense"])
        route, _, _ = wait_for(listener.receive)
        assert False not in channel.read_link_changes()
        listener.limiter.report_invalid(route, "nonsense")
    wait_for(lambda: False in channel.read_link_changes())
    wait_for(lambda: True in channel.read_link_changes())  # it may come again
    channel.send([b"too much"])
    again, _, _ = wait_for(listener.receive)
    assert again != route
    listener.limiter.report_invalid(again, "too large", door.STRIKES)
    wait_for(lambda: False in channel.read_link_changes())


def test_who_is_blamed_before_the_monitor_tells_of_the_connection_is_dropped(
    late_news: None, listener: TcpListener, channel: TcpChannel
) -> None:
    channel.send([b"too much"])
    route, _, _ = wait_for(listener.receive)
    assert listener.limiter.connections == 0
    listener.limiter.report_invalid(route, "too large", door.STRIKES)
    wait_for(lambda: False in channel.read_link_changes())


def test_who_comes_is_not_taken_for_who_had_the_descriptor_before(
    listener: TcpListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        door, "check_interval", lambda _: SECONDS
    )  # a look is only at who comes and goes
    brief = connect_with_handshake(listener.address)
    wait_for(lambda: listener.limiter.connections == 1)
    brief.sendall(b"\x00\x08nonsense")
    route, _, _ = wait_for(listener.receive)
    listener.limiter.report_invalid(route, "nonsense", door.STRIKES - 1)
    brief.close()
    wait_for(lambda: listener.limiter.connections == 0)
    silent = connect(listener.address)
    wait_for(lambda: listener.limiter.connections == 1)
    other = connect(listener.address)
    wait_for(lambda: listener.limiter.connections == 2)  # the first was looked at
    assert [each.route for each in listener.limiter._connections.values()] == [None, None]
    listener.limiter.report_invalid(route, "nonsense")
    assert not is_closed(silent, 0.5)
    for each in (silent, other):
        each.close()


@pytest.mark.parametrize("late", [True, False], ids=["read after", "read before"])
def test_what_an_ended_connection_sent_harms_nobody_who_has_its_descriptor(
    late: bool, listener: TcpListener, context: Any
) -> None:
    """A busy worker reads the messages of a peer that was killed when another has its place."""
    ended = context.socket(zmq.DEALER)
    ended.connect(listener.address)
    ended.send(b"old")
    wait_for(lambda: listener.limiter.connections == 1)
    wait_for(listener.has_message)
    channel = TcpChannel(context, listener.address, insecure=False, watch=True)
    ended.close(linger=0)
    channel.send([b"new"])
    routes = {}
    while len(routes) < 2:
        route, frames, _ = wait_for(listener.receive)
        routes[bytes(frames[0])] = route
    descriptor = listener.limiter._senders[routes[b"new"]].descriptor
    listener.limiter._senders.pop(
        routes[b"old"], None
    )  # it is met when its descriptor is the other's
    if not late:
        listener.limiter._senders.pop(routes[b"new"])
        listener.limiter._routes.pop(descriptor)
    listener.limiter.register(routes[b"old"], descriptor)
    if not late:
        listener.limiter.register(routes[b"new"], descriptor)
    assert listener.limiter._senders[routes[b"new"]].descriptor == descriptor
    listener.limiter.report_invalid(routes[b"old"], "nonsense", door.STRIKES)
    time.sleep(0.3)
    assert False not in channel.read_link_changes(), "the one that lives is not dropped"
    connections = [
        each for each in listener.limiter._connections.values() if each.route is not None
    ]
    assert [each.route for each in connections] == [routes[b"new"]]
    channel.close()


def test_what_is_not_valid_is_forgiven_with_time_and_what_is_of_no_use_counts_little(
    listener: TcpListener, channel: TcpChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel.send([b"hello"])
    route, _, _ = wait_for(listener.receive)
    now = time.monotonic()
    for fifth in range(100):
        monkeypatch.setattr(door, "monotonic", lambda fifth=fifth: now + fifth / 5)
        listener.limiter.report_invalid(route, "nonsense", 0.1)
        for _ in range(int(0.09 / door.STRAY_WEIGHT)):
            listener.report_stray(route)
    time.sleep(0.3)
    assert channel.read_link_changes() == [True]
    for _ in range(int((door.STRIKES + 2) / door.STRAY_WEIGHT)):
        listener.report_stray(route)
    wait_for(lambda: False in channel.read_link_changes())


def test_the_cap_follows_the_limit_on_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = door.resource.RLIM_INFINITY
    for limit, most in ((1024, 256), (20, 16), (1 << 20, 4096), (endless, 4096)):
        monkeypatch.setattr(door.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert door.connection_cap() == most


def test_a_door_leaves_nothing_behind_that_its_context_would_wait_for() -> None:
    context: Any = zmq.Context()
    listener = TcpListener(context, "tcp://127.0.0.1:*", insecure=False)
    with pytest.raises(AddressInUse):
        TcpListener(context, listener.address, insecure=False)
    listener.close()
    ended = threading.Thread(target=context.term, daemon=True)
    ended.start()
    ended.join(SECONDS)
    assert not ended.is_alive()


def test_a_message_whose_connection_is_not_known_any_more_is_still_a_message(context: Any) -> None:
    listener = TcpListener(context, "tcp://127.0.0.1:*", insecure=False)
    own: Any = zmq.Context()
    inside: Any = own.socket(zmq.DEALER)
    inside.connect(listener.address)
    inside.send(b"hello")
    wait_for(lambda: listener.socket.poll(10))
    inside.close(linger=0)
    own.term()
    route, frames, _ = wait_for(listener.receive)
    assert [bytes(frame) for frame in frames] == [b"hello"]
    listener.limiter.report_invalid(route, "nonsense", door.STRIKES)
    listener.limiter.register(b"other", -1)
    listener.limiter.report_invalid(b"other", "nonsense", door.STRIKES)
    listener.close()

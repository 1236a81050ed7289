"""Sockets on loopback: addresses, what is refused, and what a link tells of its other end."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from graphflow.errors import AddressInUse, InsecureAddress, TransportError
from graphflow.runtime.polling.wakeup import WakeupFd
from graphflow.runtime.transport import transport_of
from graphflow.runtime.transport.tcp import TcpChannel, TcpListener, check_address
from graphflow.runtime.wire.array_codec import CHUNK_BYTES

SECONDS = 5.0


@pytest.fixture
def context() -> Iterator[Any]:
    context: Any = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def listener(context: Any) -> TcpListener:
    return TcpListener(context, "tcp://127.0.0.1:*", insecure=False)


def wait_for(what: Callable[[], Any]) -> Any:
    until = time.monotonic() + SECONDS
    while not (found := what()):
        assert time.monotonic() < until, "nothing happened in time"
        time.sleep(0.005)
    return found


DESCRIPTORS = """
import os, resource, sys, zmq
from graphflow.errors import TransportError
from graphflow.runtime.transport.tcp import TcpChannel, TcpListener
there = len(os.listdir("/proc/self/fd"))
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
limit = lambda more: resource.setrlimit(resource.RLIMIT_NOFILE, (there + more, most))
for few in range(1, 16):
    limit(few)
    try:
        TcpChannel(zmq.Context(), "tcp://127.0.0.1:1", insecure=False)
    except TransportError as error:
        assert "ulimit -n" in str(error)
    else:
        sys.exit(f"{few} were enough")
limit(64)
context = zmq.Context()
listener = TcpListener(context, "tcp://127.0.0.1:*", insecure=False)
TcpChannel(context, listener.address, insecure=False)
limit(len(os.listdir("/proc/self/fd")) - there)
zmq.Frame(bytes(1 << 20), copy=False)  # needs none that it has not
print("ended well")
"""


@pytest.mark.fault(48)
def test_where_few_descriptors_are_left_a_socket_is_refused_and_zeromq_ends_no_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DESCRIPTORS], capture_output=True, text=True, check=False
    )
    assert done.stdout == "ended well\n", done.stderr


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:7001",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:seven",
        "tcp://127.0.0.1:70000",
        "tcp://127.0.0.1:7001/path",
        "tcp://a b:7001",
        "",
    ],
)
def test_a_malformed_address_is_an_error_that_shows_the_form(address: str) -> None:
    with pytest.raises(TransportError, match="tcp://"):
        transport_of(address).check_address(address, insecure=True, listening=True)


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(TransportError, match="tcp://"):
        transport_of("rdma://host:1")


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:7001", "tcp://*:7001", "tcp://10.0.0.1:7001"])
def test_an_address_beyond_loopback_needs_the_insecure_flag(address: str) -> None:
    with pytest.raises(InsecureAddress, match="--insecure"):
        check_address(address, insecure=False, listening=True)
    assert check_address(address, insecure=True, listening=True).port == 7001


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "[::1]"])
def test_loopback_addresses_need_no_flag(host: str) -> None:
    assert check_address(f"tcp://{host}:7001", insecure=False, listening=False).loopback


def test_only_a_listener_may_leave_the_port_open() -> None:
    assert check_address("tcp://127.0.0.1:*", insecure=False, listening=True).port == 0
    with pytest.raises(TransportError):
        check_address("tcp://127.0.0.1:*", insecure=False, listening=False)


def test_a_taken_port_is_named_with_a_remedy(context: Any, listener: TcpListener) -> None:
    with pytest.raises(AddressInUse, match=f"{listener.address}.*another port"):
        TcpListener(context, listener.address, insecure=False)


def test_an_address_of_another_machine_cannot_be_listened_at(context: Any) -> None:
    with pytest.raises(TransportError, match=r"192\.0\.2\.1"):
        TcpListener(context, "tcp://192.0.2.1:7001", insecure=True)


def test_frames_go_both_ways(context: Any, listener: TcpListener) -> None:
    channel = TcpChannel(context, listener.address, insecure=False)
    big = memoryview(bytes(range(256)) * (CHUNK_BYTES // 256))
    assert channel.send([b"head", big])
    route, frames, _ = wait_for(listener.receive)
    assert bytes(frames[0]) == b"head" and frames[1] == big
    assert listener.send(route, [b"back"])
    assert [bytes(frame) for frame in wait_for(channel.receive)] == [b"back"]
    channel.close()


def test_sending_to_a_peer_that_is_gone_is_no_failure(listener: TcpListener) -> None:
    assert listener.send(b"nobody", [b"x"])


def test_a_link_tells_when_its_peer_comes_and_goes(context: Any, listener: TcpListener) -> None:
    channel = TcpChannel(context, listener.address, insecure=False, watch=True)
    assert wait_for(channel.read_link_changes) == [True]
    listener.close()
    assert wait_for(channel.read_link_changes)[0] is False
    channel.close()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        bytes(range(256)) * 50,
        b"",
    ],
    ids=["HTTP", "TLS", "garbage", "silence"],
)
def test_other_protocols_disturb_nobody(context: Any, listener: TcpListener, noise: bytes) -> None:
    host, port = listener.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(noise)
        channel = TcpChannel(context, listener.address, insecure=False)
        channel.send([b"hello"])
        _, frames, _ = wait_for(listener.receive)
        assert bytes(frames[0]) == b"hello"
        channel.close()


def test_an_oversized_frame_closes_the_connection_it_came_by(
    context: Any, listener: TcpListener
) -> None:
    stranger = context.socket(zmq.DEALER)
    stranger.connect(listener.address)
    stranger.send(bytes(CHUNK_BYTES + 1))
    channel = TcpChannel(context, listener.address, insecure=False)
    channel.send([b"hello"])
    _, frames, _ = wait_for(listener.receive)
    assert bytes(frames[0]) == b"hello" and listener.receive() is None
    channel.close()


def test_of_an_endless_message_only_the_first_frames_are_kept(
    context: Any, listener: TcpListener
) -> None:
    channel = TcpChannel(context, listener.address, insecure=False)
    channel.send([b"x"] * 500)
    _, frames, _ = wait_for(listener.receive)
    assert len(frames) == 3
    channel.close()


def test_many_wake_ups_before_a_drain_are_one() -> None:
    wakeup = WakeupFd()
    for _ in range(100_000):
        wakeup.wake()
    poller = zmq.Poller()
    poller.register(wakeup.fileno(), zmq.POLLIN)
    assert poller.poll(0)
    wakeup.drain()
    assert not poller.poll(0)
    wakeup.close()
    wakeup.wake()

"""What is under way over a connection: counted by hand, and over real ones."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import zmq

from graphflow.errors import AddressInUse
from graphflow.runtime.security.receive_accounting import (
    HEARTBEAT_RATE,
    UNFRAMED_CAP,
    UNKNOWN_COUNT,
    SocketHandle,
    UnframedByteCounter,
    check_interval,
)
from graphflow.runtime.transport.tcp import TcpChannel, TcpListener
from tests.runtime.security.test_connection_guard import wait_for

DAY = 86_400


def test_what_was_taken_is_whole_and_what_came_since_is_under_way() -> None:
    inflow = UnframedByteCounter()
    assert inflow.count(1000, 0, 1.0) == 1000
    assert inflow.count(5000, 0, 1.0) == 5000
    assert inflow.count(9000, 3, 1.0) == 0
    assert inflow.count(9700, 3, 1.0) == 700
    assert inflow.count(9900, 4, 1.0) == 0


@pytest.mark.parametrize("bytes_a_second", [16, 82])  # without keys, and with keys
@pytest.mark.parametrize("pause", [0.2, 0.5, 60.0])
def test_heartbeats_alone_are_never_under_way_for_long(bytes_a_second: int, pause: float) -> None:
    inflow, most = UnframedByteCounter(), 0
    for look in range(10_000):
        now = 7.0 + look * pause
        most = max(most, inflow.count(int(now) * bytes_a_second, 0, now))
    assert most < 1000


def test_a_message_that_comes_slowly_is_under_way_all_the_same() -> None:
    inflow = UnframedByteCounter()
    for second in range(600):
        under_way = inflow.count(second * 100_000, 0, float(second))
    assert (
        under_way == pytest.approx(599 * (100_000 - HEARTBEAT_RATE), abs=1)
        and under_way > UNFRAMED_CAP
    )


def test_clocks_that_stand_still_or_go_back_forgive_nothing_and_charge_nothing() -> None:
    inflow = UnframedByteCounter()
    assert inflow.count(1000, 0, 5.0) == 1000
    assert inflow.count(1000, 0, 5.0) == 1000
    assert inflow.count(1000, 0, -DAY) == 1000


def test_a_count_that_is_too_low_once_does_not_charge_what_was_whole() -> None:
    inflow = UnframedByteCounter()
    assert inflow.count(9000, 3, 1.0) == 0
    assert inflow.count(2000, 3, 1.0) == 0
    assert inflow.count(9100, 3, 1.0) == 100


def test_of_a_connection_that_may_have_been_there_for_long_only_what_comes_later_counts() -> None:
    inflow = UnframedByteCounter(UNKNOWN_COUNT)
    assert inflow.count(1 << 30, 7, 1.0) == 0
    assert inflow.count((1 << 30) + 500, 7, 1.0) == 500


def test_who_has_much_under_way_is_looked_at_often() -> None:
    assert check_interval(0) == check_interval(UNFRAMED_CAP // 4) == 0.2
    assert check_interval(UNFRAMED_CAP // 2) == 0.005


def listen_when_free(context: Any, address: str) -> TcpListener:
    """A listener where another one was a moment ago, which ZeroMQ is about to close."""
    found: list[TcpListener] = []

    def listens() -> bool:
        with suppress(AddressInUse):
            found.append(TcpListener(context, address, insecure=False))
        return bool(found)

    wait_for(listens)
    return found[0]


@pytest.mark.parametrize("kind", ["a file", "a socket that is not connected", "nothing"])
def test_a_descriptor_that_is_no_connection_any_more_is_none_and_leaves_nothing_open(
    kind: str,
) -> None:
    with open(os.devnull) as file, socket.socket() as alone:
        number = {"a file": file.fileno(), "nothing": -1}.get(kind, alone.fileno())
        before = len(os.listdir("/proc/self/fd"))
        with SocketHandle(number) as connection:
            assert connection.peer is None and connection.bytes_received() is None
            assert not connection.reset()
        assert len(os.listdir("/proc/self/fd")) == before


def now_under_way(channel: TcpChannel) -> int:
    channel.read_link_changes()
    return channel.count_unframed(time.monotonic())


def wait_for_under_way(channel: TcpChannel, fits: Callable[[int], bool]) -> int:
    """What is under way, when it fits."""
    found: list[int] = []
    wait_for(lambda: found.append(now_under_way(channel)) or fits(found[-1]))
    return found[-1]


@pytest.mark.parametrize("take", [True, False])
def test_another_connection_counts_anew(take: bool) -> None:
    """Whether or not messages of the first one were taken, which is 1 MB and then much less."""
    context: Any = zmq.Context()
    first = TcpListener(context, "tcp://127.0.0.1:*", insecure=False)
    channel = TcpChannel(context, first.address, insecure=False, watch=True)
    channel.send([b"hello"])
    route, _, _ = wait_for(first.receive)
    for _ in range(10):
        first.send(route, [bytes(100_000)])
    assert wait_for_under_way(channel, lambda much: much > 1_000_000) < 1_010_000
    for _ in range(10 * take):
        assert channel.receive()
    assert (now_under_way(channel) == 0) == take
    first.close()
    wait_for(lambda: now_under_way(channel) == 0)
    again = listen_when_free(context, first.address)
    wait_for(lambda: True in channel.read_link_changes())
    assert now_under_way(channel) < 1000
    channel.send([b"hello"])
    route, _, _ = wait_for(again.receive)
    again.send(route, [bytes(100_000)])
    assert wait_for_under_way(channel, lambda much: much > 99_000) < 101_000
    channel.close()
    again.close()
    context.destroy(linger=0)


def test_what_was_taken_before_it_is_known_of_another_connection_does_not_count() -> None:
    """Its descriptor may have the number of the one before, and be looked at for that one."""
    context: Any = zmq.Context()
    first = TcpListener(context, "tcp://127.0.0.1:*", insecure=False)
    channel = TcpChannel(context, first.address, insecure=False, watch=True)
    wait_for(lambda: channel.read_link_changes() == [True])
    channel.send([b"hello"])
    route, _, _ = wait_for(first.receive)
    first.send(route, [b"hello"])
    wait_for(channel.receive)
    first.close()
    again = listen_when_free(context, first.address)

    def hello() -> Any:  # the first ones may still go to the connection that ends
        return channel.send([b"hello"]) and again.receive()

    route, _, _ = wait_for(hello)
    again.send(route, [bytes(1_000_000)])
    wait_for(channel.receive)
    for number in range(1000):
        with SocketHandle(number, channel._peer) as connection:
            if (connection.bytes_received() or 0) > 1_000_000:
                channel._descriptor = number
    assert channel.count_unframed(time.monotonic()) == 0
    assert channel.read_link_changes() == [False, True]
    assert channel.count_unframed(time.monotonic()) == 0
    channel.close()
    again.close()
    context.destroy(linger=0)


def test_a_connection_that_is_dropped_is_made_anew_and_one_that_is_left_is_not() -> None:
    context: Any = zmq.Context()
    listener = TcpListener(context, "tcp://127.0.0.1:*", insecure=False)
    channel = TcpChannel(context, listener.address, insecure=False, watch=True)
    wait_for(lambda: channel.read_link_changes() == [True])
    channel.reset()
    seen: list[bool] = []
    wait_for(lambda: seen.extend(channel.read_link_changes()) or seen == [False, True])
    wait_for(lambda: listener.limiter.connections == 1)
    channel.disconnect()
    channel.disconnect()
    wait_for(lambda: not channel.has_message() and listener.limiter.connections == 0)
    time.sleep(0.4)  # it would have come again
    assert not channel.has_message() and listener.limiter.connections == 0
    assert not channel.send([b"nobody"]) and now_under_way(channel) == 0
    channel.close()
    listener.close()
    context.destroy(linger=0)

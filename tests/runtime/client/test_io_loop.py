"""The sockets of one session: what was opened is closed however a session ends before it begins."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import CodeType
from typing import Any

import pytest
import zmq

import graphflow as gf
from graphflow.errors import (
    GraphflowError,
    ProtocolError,
    RendezvousTimeout,
    SessionError,
    TransportError,
    WorkerLost,
)
from graphflow.placement.clusters.devices import Device, Worker
from graphflow.runtime.client import io_loop as loop
from graphflow.runtime.client import worker_membership as membership
from graphflow.runtime.client.pending_operation import PendingOperation
from graphflow.runtime.client.session_activity import SessionActivity
from graphflow.runtime.polling.wakeup import EpollWaiter, WakeupFd
from graphflow.runtime.protocol.coordinator_events import BeginOperation, Order, WorkerGone
from graphflow.runtime.protocol.reliable_stream import Version
from graphflow.runtime.security import receive_accounting as inflow
from graphflow.runtime.transport import tcp
from graphflow.runtime.wire.array_codec import CHUNK_BYTES, checksum
from graphflow.runtime.wire.frame_codec import WIRE_VERSION, encode
from graphflow.runtime.wire.messages import Chunk, Close, Envelope, Hello, Welcome
from graphflow.runtime.worker import worker_status as status
from tests.faults.running import resident
from tests.interrupts import interrupt_at
from tests.runtime.security.test_connection_guard import wait_for


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What has a `close` and was opened."""
    made: list[Any] = []
    zmq.Frame(b"\0", copy=False, copy_threshold=0)  # pyzmq's own context comes with the first
    for owner, name in ((zmq, "Context"), (loop, "WakeupFd"), (loop, "EpollWaiter")):
        kind = getattr(owner, name)

        def make(kind: Any = kind) -> Any:
            made.append(kind())
            return made[-1]

        monkeypatch.setattr(owner, name, make)
    return made


def begin(address: str = "tcp://127.0.0.1:1") -> loop.SessionIOLoop:
    return loop.SessionIOLoop(
        "a" * 32, [address], insecure=False, local=None, pair=None, keys=[""],
        activity=SessionActivity("a" * 32), epoch=1, token="t", dead_after=4.5,
    )  # fmt: skip


def is_closed(each: Any) -> bool:
    if isinstance(each, WakeupFd):
        return each.fileno() < 0
    if isinstance(each, EpollWaiter):
        return each._epoll is None or each._epoll.closed
    return bool(each.closed)


def fail(error: Exception) -> Any:
    def raise_error(*args: object, **kwargs: object) -> Any:
        raise error

    return raise_error


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (loop, "WakeupFd"),
        (loop, "EpollWaiter"),
        (EpollWaiter, "add"),
        (loop.threading.Thread, "start"),
    ],
)
def test_a_session_that_cannot_begin_leaves_nothing_open(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    none_left = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(owner, name, fail(none_left))
    with pytest.raises(TransportError, match=r"Too many open files.*ulimit"):
        begin()
    assert opened and all(map(is_closed, opened))


def test_a_thread_that_cannot_be_started_leaves_nothing_open(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.threading.Thread, "start", fail(RuntimeError("no more threads")))
    with pytest.raises(RuntimeError, match="no more threads"):
        begin()
    assert len(opened) == 3 and all(map(is_closed, opened))


def test_a_session_that_is_stopped_leaves_nothing_open(opened: list[Any]) -> None:
    begin().stop()
    assert len(opened) == 3 and all(map(is_closed, opened))


def test_a_session_that_its_own_thread_stops_leaves_nothing_open(opened: list[Any]) -> None:
    session, came = begin(), list[BaseException]()

    def stop() -> None:  # as the garbage collector may
        try:
            session.stop()
        except BaseException as error:
            came.append(error)

    session._deferred.append(stop)
    session._wakeup.wake()
    session._thread.join(10.0)
    assert not came and not session._thread.is_alive()
    assert len(opened) == 3 and all(map(is_closed, opened))


def test_a_session_that_is_stopped_while_another_thread_waits_leaves_nothing_open(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, drives, came = begin(), threading.Event(), list[GraphflowError]()
    pending = session.submit(BeginOperation(1, {0: Order(Close(1))}, 20.0))

    def turn(pending: PendingOperation, until: float) -> None:
        drives.set()
        time.sleep(0.1)  # the session is stopped meanwhile

    monkeypatch.setattr(session, "_turn", turn)

    def wait() -> None:
        try:
            session.finish(pending, 20.0)
        except GraphflowError as error:
            came.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    drives.wait()
    session.stop()
    thread.join(10.0)
    assert not thread.is_alive() and type(came[0]) is SessionError
    assert len(opened) == 3 and all(map(is_closed, opened))


def test_who_has_an_outcome_waits_for_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    session, waited, mine = begin(), list[float](), threading.get_ident()
    sleep = session._waiter.wait

    def record_sleep(seconds: float, awake: float = 0.0) -> list[int]:
        if threading.get_ident() == mine:
            waited.append(seconds)
        return sleep(seconds, awake)

    monkeypatch.setattr(session._waiter, "wait", record_sleep)
    session.add(WorkerGone(0, "it ended"))
    for request in range(1, 9):
        with pytest.raises(WorkerLost):
            session.ask(BeginOperation(request, {0: Order(Close(request))}, 20.0), 20.0)
    session.stop()
    assert waited and max(waited) <= 0


def receive_endlessly(seconds: float) -> Any:
    """A `receive` by which valid messages come faster than they are read, for some seconds."""
    own = Version.own()
    welcome = Welcome(1, own.version, own.wire, own.python, ["cpu:0"])
    said = encode(Envelope("", 0, 0, 0, 1), welcome)
    until = time.monotonic() + seconds
    return lambda *_: [said] if time.monotonic() < until else None


def test_who_talks_without_an_end_keeps_nobody_from_a_deadline() -> None:
    made = begin()
    try:
        channel = made._connections[0].channel
        channel.has_message, channel.receive = lambda: True, receive_endlessly(4.0)
        started = time.monotonic()
        hello = Hello(2, "1.0", WIRE_VERSION, "3.12")
        with pytest.raises(RendezvousTimeout):
            made.ask(BeginOperation(2, {0: Order(hello)}, 0.2), 1.0)
        assert time.monotonic() - started < 2.0
    finally:
        made.stop()


def test_who_talks_without_an_end_keeps_no_question_for_status_from_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp.TcpChannel, "receive", receive_endlessly(4.0))
    started = time.monotonic()
    (found,) = status.request_reports([status.WorkerAddress("tcp://127.0.0.1:1")], seconds=0.2)
    assert isinstance(found, RendezvousTimeout)
    assert time.monotonic() - started < 2.0


FRAME = b"\x03" + (1 << 16).to_bytes(8, "big") + bytes(1 << 16)  # and more of them follow


@contextmanager
def serve_flood(frames: int) -> Iterator[tuple[str, list[int]]]:
    """Somebody at an address who sends a message without an end to whoever connects, up to so many
    frames, one a millisecond; and how many were sent by each connection."""
    ready, sent = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER", list[int]()

    def answer() -> None:
        with suppress(OSError):
            while True:
                there, _ = listener.accept()
                sent.append(0)
                with there, suppress(OSError):
                    flood(there)

    def flood(there: socket.socket) -> None:
        there.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
        there.recv(64, socket.MSG_WAITALL)
        there.sendall(ready)
        for _ in range(frames):
            there.sendall(FRAME)
            sent[-1] += 1
            time.sleep(0.001)
        while there.recv(4096):
            pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", sent
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5.0)
    assert not thread.is_alive()


def test_a_message_without_an_end_fills_no_memory_of_who_asks_for_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status, "UNFRAMED_CAP", 100_000)
    with serve_flood(4) as (address, _):
        (found,) = status.request_reports([status.WorkerAddress(address)], seconds=2.0)
    assert isinstance(found, ProtocolError) and "without an end" in str(found)


@pytest.mark.parametrize("asked", [True, False])
def test_a_message_without_an_end_fills_no_memory_of_a_session(asked: bool) -> None:
    """While somebody waits for what was asked, and while nobody does."""
    before = resident(os.getpid())
    with serve_flood(4000) as (address, sent):
        made = begin(address)
        try:
            started = time.monotonic()
            if asked:
                hello = Hello(2, "1.0", WIRE_VERSION, "3.12")
                with pytest.raises(GraphflowError) as failed:
                    made.ask(BeginOperation(2, {0: Order(hello)}, 4.0), 5.0)
                assert resident(os.getpid()) - before < 64 << 20
                assert failed.type is WorkerLost and "without an end" in str(failed.value)
            else:
                wait_for(made.loss_reasons, 4.0)
                assert resident(os.getpid()) - before < 64 << 20
            assert time.monotonic() - started < 3.0
            assert made.loss_reasons() == {0: inflow.ENDLESS_MESSAGE}
            time.sleep(0.3)  # for it to come again, which it may not
            count = sent[:]
            time.sleep(0.2)
            assert sent == count and len(sent) == 1
        finally:
            made.stop()


def test_large_messages_that_wait_while_a_session_is_held_up_lose_nobody() -> None:
    """300 MB, of which nobody takes any three times for long enough to look twice."""
    context: Any = zmq.Context()
    listener = tcp.TcpListener(context, "tcp://127.0.0.1:*", insecure=False)
    data = bytes(CHUNK_BYTES)
    chunk = Chunk("fetch", 9, "x", "uint8", [CHUNK_BYTES], [0], CHUNK_BYTES, 0, checksum(data))
    said = encode(Envelope("b" * 32, 1, 0, 0, 1), chunk)  # another session's: of no use here
    made = begin(listener.address)
    try:
        own = Version.own()
        made.submit(
            BeginOperation(2, {0: Order(Hello(2, own.version, own.wire, own.python))}, 60.0)
        )
        made._wakeup.wake()
        route, _, _ = wait_for(listener.receive)
        channel = made._connections[0].channel
        for number in range(300):
            if number % 100 == 0:
                wait_for(lambda number=number: channel._received == number)
                made._deferred.append(lambda: time.sleep(0.5))
                made._wakeup.wake()
            wait_for(lambda: listener.send(route, [said, data]))
        wait_for(lambda: channel._received == 300)
        assert made.loss_reasons() == {} and channel.read_link_changes() == []
    finally:
        made.stop()
        listener.close()
        context.destroy(linger=0)


def is_opening(code: CodeType) -> bool:
    return code.co_filename in (loop.__file__, membership.__file__)


@pytest.mark.slow  # a session opens for each line
def test_ctrl_c_at_any_line_of_an_opening_stops_its_thread_before_the_sockets_are_closed(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def part(*args: object) -> Any:
        raise SessionError("no need to meet")

    monkeypatch.setattr(membership, "Rendezvous", part)
    worker = Worker(0, "tcp://127.0.0.1:1", (Device("/worker:0/cpu:0", "cpu", 1 << 30),))
    cluster, count, tracer = gf.Cluster((worker,), kind="remote"), 0, sys.gettrace()
    for count in itertools.count(1):
        before = {*threading.enumerate()}
        members = membership.WorkerMembership(None, ops=(), dead_after=4.5, trial=False)
        sys.settrace(interrupt_at(count, is_opening))
        try:
            members._join(cluster, 5.0, None)
        except KeyboardInterrupt:
            pass
        except SessionError:
            break  # it ended before that many lines
        finally:
            sys.settrace(tracer)
        del members
        if not {*threading.enumerate()} <= before:
            gc.collect()  # what was interrupted while it ended goes with its session
        assert {*threading.enumerate()} <= before
        assert all(map(is_closed, opened))
    assert count > 50 and len(opened) > 100
    assert "loop.failed" not in capfd.readouterr().err

"""Lanes: short messages between two processes of a host over a Unix socket, beside ZeroMQ.

On its way through ZeroMQ a message is handed from thread to thread three times, which takes ten
times as long as the kernel needs to wake its reader. So who connects to a worker at a loopback
address looks for a lane there, too: its name is made of the address, so that none is found through
a proxy, from another host or from another network namespace, where the address is not the worker's
own. Only processes of the same user are let in, and none by this user to anybody else.

A lane never waits: what is too long for it, or has no room, goes by ZeroMQ, and so does all that
follows until it is acknowledged, for the order. A lane that ends is no loss: ZeroMQ stays, and what
was on its way is asked for again.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from graphflow.base.addresses import is_loopback
from graphflow.errors import ProtocolError, TransportError
from graphflow.runtime.transport.shared_memory import has_shared_memory

MESSAGE_CAP = 64 << 10  # of a message; longer ones gain nothing
_SEND_BUFFER_BYTES = 1 << 20  # bytes on their way
_TWO_FRAMES = b"\0"  # the first byte where two frames follow; a control frame never begins with it
_TWO_FRAMES_BYTE = _TWO_FRAMES[0]
_HEAD = struct.Struct("<cI")  # that, and the length of the first frame
_PACKET_CAP = MESSAGE_CAP + _HEAD.size
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class OrderedSideChannel:
    """One end of a way beside ZeroMQ, on which nothing overtakes what went there."""

    last_over_zmq = 0
    """The number of the last message that went by ZeroMQ instead."""

    _socket: socket.socket

    def fileno(self) -> int:
        """What to poll."""
        return self._socket.fileno()

    def send_in_order(self, frames: Sequence[Any], number: int, acknowledged: int) -> bool:
        """Sends a message with a number, unless it has to go by ZeroMQ: this way does not take it,
        or it would overtake one that went there and is not among those that have been
        acknowledged."""
        if self.last_over_zmq <= acknowledged and self.send(frames):
            return True
        self.last_over_zmq = number
        return False

    def send(self, frames: Sequence[Any]) -> bool:
        """Sends the frames of a message; False if it has to go another way."""
        raise NotImplementedError


class UnixSocketChannel(OrderedSideChannel):
    """One end of a lane. Sending is for one thread at a time, receiving for another."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._socket = sock

    @staticmethod
    def connect(address: str) -> UnixSocketChannel | None:
        """The lane to the worker that listens at an address; None where there is none."""
        name = _abstract_name(address)
        if not name:
            return None
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None  # no more file descriptors: what cannot do without will tell
        try:
            sock.setblocking(False)
            sock.connect(name)
            if _is_same_user(sock):
                return UnixSocketChannel(sock)
        except OSError:
            pass  # nobody listens, or too many wait to be let in
        sock.close()
        return None

    def send(self, frames: Sequence[Any]) -> bool:
        """Sends the frames of a message; False if it has to go another way."""
        head = frames[0]
        if len(frames) > 1:
            if len(head) + len(frames[1]) > MESSAGE_CAP:
                return False
            head = b"".join((_HEAD.pack(_TWO_FRAMES, len(head)), head, frames[1]))
        elif len(head) > MESSAGE_CAP:
            return False
        try:
            self._socket.send(head)
        except OSError:
            return False  # full, or the other process has ended
        return True

    def receive(self) -> list[Any] | None:
        """The frames of the next message; None if there is none now.

        Raises:
            TransportError: the lane has ended.
            ProtocolError: what came is no message.
        """
        try:
            packet = self._socket.recv(_PACKET_CAP + 1)
        except BlockingIOError:
            return None
        except OSError as error:
            raise TransportError(f"the lane has ended: {error.strerror}") from error
        if not packet:
            raise TransportError("the other process has ended its lane")
        if packet[0] != _TWO_FRAMES_BYTE and len(packet) <= _PACKET_CAP:  # nearly always
            return [packet]
        return split_packet(packet)

    def close(self) -> None:
        """Ends it."""
        self._socket.close()


def split_packet(packet: bytes) -> list[Any]:
    """The frames in a packet of a lane.

    Raises:
        ProtocolError: it is too long, or ends before its first frame does.
    """
    if len(packet) > _PACKET_CAP:
        raise ProtocolError(f"a message of more than {MESSAGE_CAP} bytes came over a lane")
    if packet[:1] != _TWO_FRAMES:
        return [packet]
    start = _HEAD.size
    end = start + _HEAD.unpack_from(packet)[1] if len(packet) >= start else math.inf
    if end > len(packet):
        raise ProtocolError(f"a message of a lane ends after {len(packet)} bytes, within a frame")
    return [packet[start : int(end)], memoryview(packet)[int(end) :]]


class UnixSocketListener:
    """Where a worker lets lanes in: `most` at a time. For one thread only."""

    def __init__(self, address: str, most: int = 512) -> None:
        self._most = most
        self._socket: socket.socket | None = None
        self._lanes: dict[bytes, UnixSocketChannel] = {}
        self._count = 0
        name = _abstract_name(address)
        if not name:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.bind(name)
            sock.listen(64)
            sock.setblocking(False)
            self._socket = sock
        except OSError:
            sock.close()  # the name is taken: there are no lanes then

    def fileno(self) -> int:
        """What to poll for those who knock; -1 if nobody can."""
        return self._socket.fileno() if self._socket is not None else -1

    def accept(self) -> tuple[bytes, UnixSocketChannel] | None:
        """Lets the next one in: the route that it has from now on."""
        assert self._socket is not None
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return None
        if not _is_same_user(sock) or len(self._lanes) >= self._most:
            sock.close()
            return None
        self._count += 1
        route = b"lane %d" % self._count
        self._lanes[route] = lane = UnixSocketChannel(sock)
        return route, lane

    def get(self, route: bytes) -> UnixSocketChannel | None:
        """The lane of a route, if it is one."""
        return self._lanes.get(route)

    def drop(self, route: bytes) -> None:
        """Ends a lane."""
        lane = self._lanes.pop(route, None)
        if lane is not None:
            lane.close()

    def close(self) -> None:
        """Ends all of them."""
        for route in list(self._lanes):
            self.drop(route)
        if self._socket is not None:
            self._socket.close()


def _abstract_name(address: str) -> str:
    """Where a worker at an address listens for lanes: a name without a file, which ends with the
    socket; "" where there are none."""
    return "" if not is_loopback(address) or not has_shared_memory() else f"\0graphflow {address}"


def _is_same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end is of this user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid == os.geteuid()

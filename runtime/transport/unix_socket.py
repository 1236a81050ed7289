"""Unix socket side channels: short messages between two processes of a host, beside ZeroMQ.

ZeroMQ hands a message from thread to thread three times. That takes ten times as long as the kernel
needs to wake the reader of a socket. So a process that connects to a worker at a loopback address
also looks for the worker's Unix socket. The socket's abstract name is made of the address. Through
a proxy, from another host or from another network namespace the worker has another address, so no
socket of that name is found. Both ends check that the other process is of the same user.

A side channel never waits. A message that is too long, or finds the buffer full, goes over ZeroMQ.
All messages after it do the same until it is acknowledged, so that none overtakes it. If a side
channel ends, nothing is lost: the protocol sends again what was not acknowledged, over ZeroMQ.
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

MESSAGE_CAP = 64 << 10  # bytes; longer messages gain nothing
_SEND_BUFFER_BYTES = 1 << 20
_TWO_FRAMES = b"\0"  # the first byte where two frames follow; a control frame never begins with it
_TWO_FRAMES_BYTE = _TWO_FRAMES[0]
_HEAD = struct.Struct("<cI")  # that, and the length of the first frame
_PACKET_CAP = MESSAGE_CAP + _HEAD.size
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class OrderedSideChannel:
    """One end of a connection beside ZeroMQ; none of its messages overtakes one over ZeroMQ."""

    last_over_zmq = 0
    """The number of the last message that went over ZeroMQ instead."""

    _socket: socket.socket

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    def send_in_order(self, frames: Sequence[Any], number: int, acknowledged: int) -> bool:
        """Send message `number` if it overtakes nothing; return False if it must go over ZeroMQ.

        It must if an earlier message went there and is later than `acknowledged`, the last one that
        the peer has received, or if `send` refuses it.
        """
        if self.last_over_zmq <= acknowledged and self.send(frames):
            return True
        self.last_over_zmq = number
        return False

    def send(self, frames: Sequence[Any]) -> bool:
        """Send the frames of a message; return False if the message must go over ZeroMQ."""
        raise NotImplementedError


class UnixSocketChannel(OrderedSideChannel):
    """One end of a Unix socket side channel.

    Sending is for one thread at a time, receiving for another.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._socket = sock

    @staticmethod
    def connect(address: str) -> UnixSocketChannel | None:
        """Connect to the Unix socket of the worker at `address`; return None if there is none."""
        name = _abstract_name(address)
        if not name:
            return None
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None  # out of file descriptors: callers that need one raise an error
        try:
            sock.setblocking(False)
            sock.connect(name)
            if _is_same_user(sock):
                return UnixSocketChannel(sock)
        except OSError:
            pass  # nobody listens, or the backlog is full
        sock.close()
        return None

    def send(self, frames: Sequence[Any]) -> bool:
        """Send the frames of a message; return False if the message must go over ZeroMQ."""
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
            return False  # the buffer is full, or the peer has ended
        return True

    def receive(self) -> list[Any] | None:
        """Return the frames of the next message, or None.

        Raises:
            TransportError: The connection has ended.
            ProtocolError: The packet is no message.
        """
        try:
            packet = self._socket.recv(_PACKET_CAP + 1)
        except BlockingIOError:
            return None
        except OSError as error:
            raise TransportError(
                f"the Unix socket connection has ended: {error.strerror}"
            ) from error
        if not packet:
            raise TransportError("the other process has closed its Unix socket connection")
        if packet[0] != _TWO_FRAMES_BYTE and len(packet) <= _PACKET_CAP:  # nearly always
            return [packet]
        return split_packet(packet)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def split_packet(packet: bytes) -> list[Any]:
    """Return the frames in a packet.

    Raises:
        ProtocolError: The packet is too long, or ends before its first frame does.
    """
    if len(packet) > _PACKET_CAP:
        raise ProtocolError(f"a message of more than {MESSAGE_CAP} bytes came over a Unix socket")
    if packet[:1] != _TWO_FRAMES:
        return [packet]
    start = _HEAD.size
    end = start + _HEAD.unpack_from(packet)[1] if len(packet) >= start else math.inf
    if end > len(packet):
        raise ProtocolError(
            f"a message over a Unix socket ends after {len(packet)} bytes, within a frame"
        )
    return [packet[start : int(end)], memoryview(packet)[int(end) :]]


class UnixSocketListener:
    """A worker's Unix socket with its connections, `most` at a time. For one thread only."""

    def __init__(self, address: str, most: int = 512) -> None:
        self._most = most
        self._socket: socket.socket | None = None
        self._channels: dict[bytes, UnixSocketChannel] = {}
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
            sock.close()  # the name is taken: no side channels then

    def fileno(self) -> int:
        """Return the descriptor to poll for new connections; -1 if nobody can connect."""
        return self._socket.fileno() if self._socket is not None else -1

    def accept(self) -> tuple[bytes, UnixSocketChannel] | None:
        """Accept the next connection and return it with its route.

        Return None if there is none, it is another user's, or there are `most` already.
        """
        assert self._socket is not None
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return None
        if not _is_same_user(sock) or len(self._channels) >= self._most:
            sock.close()
            return None
        self._count += 1
        route = b"lane %d" % self._count
        self._channels[route] = channel = UnixSocketChannel(sock)
        return route, channel

    def get(self, route: bytes) -> UnixSocketChannel | None:
        """Return the connection of `route`, or None."""
        return self._channels.get(route)

    def drop(self, route: bytes) -> None:
        """Close the connection of `route`, if it is one."""
        channel = self._channels.pop(route, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Close all connections and the listening socket."""
        for route in list(self._channels):
            self.drop(route)
        if self._socket is not None:
            self._socket.close()


def _abstract_name(address: str) -> str:
    """Return the abstract socket name of the worker at `address`; "" where there can be none.

    Abstract names have no file, so the kernel frees them with the socket.
    """
    return "" if not is_loopback(address) or not has_shared_memory() else f"\0graphflow {address}"


def _is_same_user(sock: socket.socket) -> bool:
    """Return True if the process at the other end runs as the same user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid == os.geteuid()

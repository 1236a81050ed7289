"""Bytes that a connection has received, by the kernel's count, beyond complete messages.

ZeroMQ collects the frames of a message in its own memory until the last one has come, however many
there are, and reports none of them. So both ends compare the bytes that came over a connection with
the messages that were received: a listener (`connection_guard.py`) and a channel.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import socket
import struct
import sys
import termios
from math import inf
from typing import Any

from graphflow.base.lazy_dataclass import dataclass

UNFRAMED_CAP = 10 << 20
"""Bytes of one incomplete message. A valid message has at most half as many."""
ENDLESS_MESSAGE = (
    f"it sends a message without an end: more than {UNFRAMED_CAP >> 20} MiB are under way"
)
"""The error about a peer with more than UNFRAMED_CAP bytes of an incomplete message."""
HEARTBEAT_RATE = 128
"""Bytes a second that belong to no message: heartbeats of both ends, encrypted 82."""
UNKNOWN_COUNT = -1
"""A count of received messages for a connection that may be older: unknown."""

_LOOK_SECONDS = 0.2
_CLOSE_LOOK_SECONDS = 0.005  # while some connection has many bytes under way
_MUCH = UNFRAMED_CAP // 4
_TCP_INFO_BYTES_RECEIVED = 128  # where struct tcp_info of Linux has them: 64 bits
_NOTHING = bytes(16)  # an address of no family


def check_interval(under_way: int) -> float:
    """Return the seconds until the next check if some connection has so many bytes under way."""
    return _CLOSE_LOOK_SECONDS if under_way > _MUCH else _LOOK_SECONDS


@dataclass
class UnframedByteCounter:
    """Counts the bytes of one connection that belong to no received message."""

    messages: int = 0  # that had been received when `framed` was noted
    framed: float = 0.0  # bytes of these messages and of heartbeats
    checked_at: float = inf  # time of the last check

    def count(self, received: int, messages: int, now: float) -> int:
        """Return an upper bound of the bytes that belong to no received message.

        Bytes that came with the last messages since the check before count as theirs.

        Args:
            received: Bytes since the connection began.
            messages: Messages that were received from it.
            now: Seconds.
        """
        if messages != self.messages:
            self.messages, self.framed = messages, received
        beats = HEARTBEAT_RATE * max(0.0, now - self.checked_at)
        self.checked_at = now
        if received <= self.framed:  # more may come between two questions to the kernel
            return 0
        self.framed = min(received, self.framed + beats)
        return int(received - self.framed)


class SocketHandle:
    """A duplicate of the descriptor of a connection of ZeroMQ's.

    The duplicate stays valid if ZeroMQ closes its own, whose number may then be another
    connection's. `peer` is the peer's address. It is None if the descriptor is no connection any
    more, or the peer is another one than expected.
    """

    def __init__(self, descriptor: int, peer: Any = None) -> None:
        self.peer: Any = None
        self._own: socket.socket | None = None
        try:
            own = os.dup(descriptor)
        except OSError:
            return
        try:
            self._own = socket.socket(fileno=own)
            found = self._own.getpeername()
        except OSError:  # it is no socket, or not connected
            if self._own is None:
                os.close(own)
            return
        if peer is None or peer == found:
            self.peer = found

    def bytes_received(self) -> int | None:
        """Return the bytes that ZeroMQ has read; None if the system does not tell."""
        if self.peer is None or self._own is None or sys.platform != "linux":
            return None
        try:
            told = self._own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            waiting = array.array("i", [0])
            fcntl.ioctl(self._own, termios.FIONREAD, waiting)
            (arrived,) = struct.unpack_from("<Q", told, _TCP_INFO_BYTES_RECEIVED)
        except (OSError, struct.error):
            return None
        return int(arrived) - waiting[0]

    def reset(self) -> bool:
        """End the connection as if the peer had; return True if it was there."""
        if self.peer is None or self._own is None:
            return False
        try:
            self._own.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
        # A peer that goes on sending keeps a shut socket busy. Connecting it to nothing resets it.
        ctypes.CDLL(None).connect(self._own.fileno(), _NOTHING, len(_NOTHING))
        return True

    def __enter__(self) -> SocketHandle:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.close()

"""What comes over a connection, by the kernel's count, and how much of it is no whole message yet.

ZeroMQ collects the frames of a message in its own memory until the last one has come, however many
there are, and tells nobody. So whoever has connections compares the bytes that came over each with
the messages that were taken from it: who listens (`connection_guard.py`), and who has connected
(`Channel`).
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
"""Bytes of one message that is not whole; a valid one has at most half as many."""
ENDLESS_MESSAGE = (
    f"it sends a message without an end: more than {UNFRAMED_CAP >> 20} MiB are under way"
)
"""What to say of who has more than UNDER_WAY under way."""
HEARTBEAT_RATE = 128
"""Bytes a second that belong to no message: heartbeats of both ends, which encrypted are 82."""
UNKNOWN_COUNT = -1
"""Messages that were taken from a connection that may have been there for a while: not known."""

_LOOK_SECONDS = 0.2
_CLOSE_LOOK_SECONDS = 0.005  # while somebody has much under way
_MUCH = UNFRAMED_CAP // 4
_TCP_INFO_BYTES_RECEIVED = 128  # where struct tcp_info of Linux has them: 64 bits
_NOTHING = bytes(16)  # an address of no family


def check_interval(under_way: int) -> float:
    """Seconds until the next look, when the most that a connection has under way is so much."""
    return _CLOSE_LOOK_SECONDS if under_way > _MUCH else _LOOK_SECONDS


@dataclass
class UnframedByteCounter:
    """What of the bytes of one connection belongs to messages that were taken."""

    messages: int = 0  # that had been taken when `whole` was noted
    framed: float = 0.0  # bytes that belong to them, and heartbeats
    checked_at: float = inf  # when, last

    def count(self, received: int, messages: int, now: float) -> int:
        """Bytes that belong to no message that was taken, at most; what came with the last ones
        since the look before counts as theirs.

        Args:
            received: bytes, since the connection began.
            messages: that were taken.
        """
        if messages != self.messages:
            self.messages, self.framed = messages, received
        beats = HEARTBEAT_RATE * max(0.0, now - self.checked_at)
        self.checked_at = now
        if received <= self.framed:  # the kernel is asked twice, and more may come in between
            return 0
        self.framed = min(received, self.framed + beats)
        return int(received - self.framed)


class SocketHandle:
    """A connection of ZeroMQ's, by a descriptor of our own: it stays what it is while we look.

    `peer` is None where the descriptor is no connection any more, or not the one that was meant.
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
        """Bytes that ZeroMQ has read of it; None where the system does not tell."""
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
        """Ends it, as if the other side had; whether it was there."""
        if self.peer is None or self._own is None:
            return False
        try:
            self._own.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
        # Who goes on sending keeps a socket busy that is shut: "connected to nothing" resets it.
        ctypes.CDLL(None).connect(self._own.fileno(), _NOTHING, len(_NOTHING))
        return True

    def __enter__(self) -> SocketHandle:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.close()

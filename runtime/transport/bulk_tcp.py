"""Bulk TCP: arrays from one worker to another over a connection of their own, beside ZeroMQ.

ZeroMQ hands a piece of an array to a thread that sends it. At the other end a thread reads it and
hands it over, and the receiver copies it to its place. A bulk connection is written by the sender's
own thread and read by the thread that waits, straight into the memory where the bytes stay. That
takes half of the time.

The sender offers a connection in a message of the session: a port, a secret and its own address.
The receiver connects if that is the address by which it knows the sender, so that no connection
leads past a proxy. Nothing is encrypted, so workers with keys have no bulk connections. If one ends
or damages a message, nothing is lost: the protocol sends again over ZeroMQ.
"""

from __future__ import annotations

import re
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from hmac import compare_digest
from typing import Any

import xxhash

from graphflow.base.addresses import parse_tcp
from graphflow.errors import ProtocolError, TransportError
from graphflow.ops.kernels.jit.array_address import empty_aligned
from graphflow.runtime.transport.unix_socket import OrderedSideChannel
from graphflow.runtime.wire.array_codec import CHUNK_BYTES
from graphflow.runtime.wire.frame_codec import CONTROL_CAP

TOKEN_WORD = "pipe"
"""The first word of an offer's token."""

MAX_CHANNELS = 64
"""Connections that a process reads from. Each may hold a message that is not complete."""

_TOKEN = re.compile(TOKEN_WORD + r" (\d{1,5}) ([0-9a-f]{64}) (\S{1,256})")
_SECRET_LENGTH = 64  # characters
_OFFER_SECONDS = 5.0  # for which an offer stands
_GREETING_SECONDS = 1.0  # for a new connection to show the secret
_HEAD = struct.Struct("<II")  # bytes of the first frame, and of the second or that there is none
_NO_SECOND_FRAME = 0xFFFFFFFF
_CHECKSUM_BYTES = 8  # after the frames
_PIECE_BYTES = 512 << 10  # sent at once: what a second-level cache holds
_SOCKET_TIMEOUT = struct.pack("@ll", 0, 2000)  # 2 ms for a read or write that makes no progress
_USER_TIMEOUT_MS = 2000  # for the peer to acknowledge bytes: as long as ZeroMQ's heartbeats
_JOIN_SECONDS = 1.0  # for the writer thread to end


class BulkChannel(OrderedSideChannel):
    """One end of a bulk connection: the one that sends, or the one that receives.

    Sending is for one thread at a time. What the socket does not take at once, a writer thread
    sends.

    Attributes:
        ended: True if it takes nothing any more.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, way, _SOCKET_TIMEOUT)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
        self._socket = sock
        self.ended = False
        self._left: deque[memoryview] = deque()  # for the writer thread
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        self._head = memoryview(bytearray(_HEAD.size))
        self._tail = memoryview(bytearray(_CHECKSUM_BYTES))
        self._frames: list[Any] = []  # of the message that is arriving
        self._pieces: list[list[memoryview]] = []  # of these frames, not complete
        self._seal = xxhash.xxh3_64()  # of the complete pieces
        self._wanted: list[memoryview] = [self._head]  # where its next bytes go

    # Sending -------------------------------------------------------------------------------------

    def send(self, frames: Sequence[Any]) -> bool:
        """Send the frames of a message; return False if the message must go over ZeroMQ.

        Waits for some milliseconds at most. The frames must not change before the message is
        acknowledged.
        """
        head = frames[0]
        data = memoryview(frames[1]) if len(frames) > 1 else None
        sizes = _HEAD.pack(len(head), _NO_SECOND_FRAME if data is None else len(data))
        seal = xxhash.xxh3_64(head)
        if data is None:
            return self._write_parts(sizes, head, seal.digest())
        # Piece by piece, so that the checksum reads each from the cache, at both ends.
        before: tuple[Any, ...] = (sizes, head)
        last = max(0, len(data) - 1) // _PIECE_BYTES * _PIECE_BYTES
        for start in range(0, last, _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            seal.update(piece)
            if not self._write_parts(*before, piece):
                return False  # the receiver discards a part of a message
            before = ()
        seal.update(data[last:])
        return self._write_parts(*before, data[last:], seal.digest())

    def _write_parts(self, *given: Any) -> bool:
        """Send some bytes now or later; return False if the connection has ended."""
        if self.ended:
            return False
        parts = [memoryview(each) for each in given]
        if not self._left:
            try:
                parts = _drop_bytes(parts, self._socket.sendmsg(parts))
            except BlockingIOError:
                pass
            except OSError:
                self.ended = True
                return False
        if parts:
            self._queue_parts(parts)
        return True

    def _queue_parts(self, parts: Sequence[memoryview]) -> None:
        """Leave some bytes to the writer thread."""
        with self._changed:
            self._left += parts
            if self._writer is None:
                self._writer = threading.Thread(target=self._run_writer, name="pipe", daemon=True)
                self._writer.start()
            self._changed.notify()

    def _run_writer(self) -> None:
        """Send what the socket did not take at once."""
        while not self.ended:
            with self._changed:
                while not (self._left or self.ended):
                    self._changed.wait()
            try:
                while self._left and not self.ended:
                    part = self._left[0]
                    sent = self._socket.send(part)
                    # Only now: while the queue is empty, `_write_parts` sends by itself.
                    if sent == len(part):
                        self._left.popleft()
                    else:
                        self._left[0] = part[sent:]
            except BlockingIOError:
                continue
            except OSError:
                self.ended = True

    # Receiving -----------------------------------------------------------------------------------

    def receive(self) -> list[Any] | None:
        """Return the frames of the next message.

        Return None if it is not complete and nothing came for some milliseconds.

        Raises:
            TransportError: The connection has ended.
            ProtocolError: The bytes are no message.
        """
        while True:
            try:
                count = self._socket.recvmsg_into(self._wanted, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                return None
            except OSError as error:
                raise TransportError(f"the bulk connection has ended: {error.strerror}") from error
            if not count:
                raise TransportError("the other process has closed its bulk connection")
            self._wanted = _drop_bytes(self._wanted, count)
            if self._wanted:
                return None
            if not self._frames:
                self._start_message(*_HEAD.unpack(self._head))
            else:
                for piece in self._pieces[0]:
                    self._seal.update(piece)
                del self._pieces[0]
                if not self._pieces:
                    return self._finish_message()
            self._wanted = (
                self._pieces[0] if len(self._pieces) > 1 else [*self._pieces[0], self._tail]
            )

    def _start_message(self, first: int, second: int) -> None:
        """Allocate the frames of the message whose sizes have come."""
        two = second != _NO_SECOND_FRAME
        if not 0 < first <= CONTROL_CAP or (two and second > CHUNK_BYTES):
            raise ProtocolError(
                f"a message over a bulk connection claims frames of {first} and {second} bytes"
            )
        head = bytearray(first)
        self._frames, self._pieces = [head], [[memoryview(head)]]
        self._seal = xxhash.xxh3_64()
        if two:
            data = empty_aligned(second).data
            self._frames.append(data)
            self._pieces[0].append(data[:_PIECE_BYTES])
            self._pieces += [
                [data[at : at + _PIECE_BYTES]] for at in range(_PIECE_BYTES, second, _PIECE_BYTES)
            ]

    def _finish_message(self) -> list[Any]:
        """Return the message that has come, if its checksum is right."""
        frames, self._frames, self._wanted = self._frames, [], [self._head]
        if self._tail != self._seal.digest():
            raise ProtocolError("a message over a bulk connection has the wrong checksum")
        return frames

    def close(self) -> None:
        """Close the connection."""
        self.ended = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the writer thread
        with self._changed:
            self._changed.notify()
        if self._writer is not None:
            self._writer.join(_JOIN_SECONDS)
        self._socket.close()


def _drop_bytes(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of `parts` after their first `count` bytes."""
    for index, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[index + 1 :]]
        count -= part.nbytes
    return []


class BulkSender:
    """Offers bulk connections to one other worker.

    Args:
        address: Where this worker listens, as it knows itself.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: BulkChannel | None = None
        self._offer: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def channel(self) -> BulkChannel | None:
        """The connection, if there is one that has not ended."""
        channel = self._channel
        if channel is not None and channel.ended:
            self._channel = None
            channel.close()
            return None
        return channel

    def offer(self) -> str:
        """Return the token of a new offer, which stands for some seconds.

        Return "" while an offer stands, or if no connection is possible.
        """
        if self._channel is not None or (self._thread is not None and self._thread.is_alive()):
            return ""
        parts = parse_tcp(self._address)
        if parts is None or (host := parts.host) == "*":
            return ""  # of another transport, or it does not know its own address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            return ""  # out of file descriptors: callers that need one raise an error
        try:
            listening.bind((host, 0))
            listening.listen(1)
        except OSError:
            listening.close()
            return ""
        secret = secrets.token_hex(_SECRET_LENGTH // 2)
        self._offer = listening
        self._thread = threading.Thread(
            target=self._accept, args=(listening, secret), name="pipe-offer", daemon=True
        )
        self._thread.start()
        return f"{TOKEN_WORD} {listening.getsockname()[1]} {secret} {self._address}"

    def _accept(self, listening: socket.socket, secret: str) -> None:
        """Accept the peer that shows the secret."""
        until = time.monotonic() + _OFFER_SECONDS
        with listening:
            while (left := until - time.monotonic()) > 0:
                try:
                    listening.settimeout(left)
                    sock, _ = listening.accept()
                except OSError:
                    return  # nobody connected in time, or the offer was withdrawn
                try:
                    if compare_digest(_read_secret(sock), secret.encode()):
                        self._channel = BulkChannel(sock)
                        return
                except OSError:
                    pass  # the peer closed the connection, or sent nothing
                sock.close()

    def close(self) -> None:
        """Close the connection, or withdraw the offer."""
        if self._offer is not None:
            with suppress(OSError):
                self._offer.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
        if self._thread is not None:
            self._thread.join(_GREETING_SECONDS + _JOIN_SECONDS)
        if self._channel is not None:
            self._channel.close()


def _read_secret(sock: socket.socket) -> bytes:
    """Return the first bytes that a peer sends, as many as a secret has."""
    until = time.monotonic() + _GREETING_SECONDS
    said = b""
    while len(said) < _SECRET_LENGTH:
        sock.settimeout(max(1e-3, until - time.monotonic()))
        more = sock.recv(_SECRET_LENGTH - len(said))
        if not more:
            break
        said += more
    return said


def accept_offer(token: str, known: str, admit: Callable[[BulkChannel], None]) -> None:
    """Connect to the worker that made an offer, on a thread of its own.

    Nothing happens if the token is malformed or the connection fails.

    Args:
        known: The address of the sender, as this process knows it.
        admit: Takes the receiving end.
    """
    parts = _TOKEN.fullmatch(token)
    if parts is None or parts[3] != known:
        return
    address = parse_tcp(known)
    if address is None:
        return
    place, secret = (address.host, int(parts[1])), parts[2].encode()

    def connect() -> None:
        try:
            sock = socket.create_connection(place, _GREETING_SECONDS)
        except OSError:
            return  # a firewall, or the sender is gone
        try:
            sock.sendall(secret)
            admit(BulkChannel(sock))
        except OSError:
            sock.close()

    threading.Thread(target=connect, name="pipe-join", daemon=True).start()


class BulkReceivers:
    """The receiving ends of a process, each of one session. For one thread only."""

    def __init__(self) -> None:
        self._channels: dict[bytes, tuple[str, BulkChannel]] = {}
        self._count = 0

    def add(self, session: str, channel: BulkChannel) -> bytes | None:
        """Return the route of a new receiving end, or close it and return None above the cap."""
        if len(self._channels) >= MAX_CHANNELS:
            channel.close()
            return None
        self._count += 1
        route = b"pipe %d" % self._count
        self._channels[route] = session, channel
        return route

    def routes_of(self, session: str) -> list[bytes]:
        """Return the routes of a session's receiving ends."""
        return [route for route, (owner, _) in self._channels.items() if owner == session]

    def drop(self, route: bytes) -> BulkChannel | None:
        """Forget the receiving end of `route` and return it for closing; None if it is none."""
        return self._channels.pop(route, ("", None))[1]

"""Pipes: what one worker sends another over a TCP connection of its own, beside ZeroMQ.

ZeroMQ hands a piece of an array to a thread that sends it, at the other end a thread to one that
reads it, and that one copies it to where it stays. A pipe is written by who sends, and read by who
waits, straight to where the bytes stay, while they come. It takes half of the time.

Who sends offers a pipe in a message of the session, by a port, a secret and its own address; who
receives connects, if that is the address by which it knows the sender, so that none leads past a
proxy. Nothing in it is encrypted: between workers with keys there is none. A pipe that ends, or
brings what is no message, is no loss: ZeroMQ stays, and what was on its way is asked for again.
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
from graphflow.runtime.wire.frame_codec import CHUNK_BYTES, CONTROL_CAP

TOKEN_WORD = "pipe"
"""What the token of an offer begins with."""

MAX_CHANNELS = 64
"""Pipes that a process reads from: each may hold a message that is not whole."""

_TOKEN = re.compile(TOKEN_WORD + r" (\d{1,5}) ([0-9a-f]{64}) (\S{1,256})")
_SECRET_LENGTH = 64  # characters
_OFFER_SECONDS = 5.0  # seconds for which an offer stands
_GREETING_SECONDS = 1.0  # seconds for who connects to show the secret
_HEAD = struct.Struct("<II")  # bytes of the first frame, and of the second; `_ONE`: there is none
_NO_SECOND_FRAME = 0xFFFFFFFF
_CHECKSUM_BYTES = 8  # bytes after the frames, by which damage is seen
_PIECE_BYTES = 512 << 10  # bytes that are sent at once: what a second-level cache holds
_SOCKET_TIMEOUT = struct.pack(
    "@ll", 0, 2000
)  # 2 ms, for a connection that takes or brings nothing more
_USER_TIMEOUT_MS = 2000  # milliseconds for the other end to take what was sent: as ZeroMQ's silence
_JOIN_SECONDS = 1.0  # seconds for the thread that writes to end


class BulkChannel(OrderedSideChannel):
    """One end of a pipe: the one that `send`s, or the one that `receive`s.

    Sending is for one thread at a time; what the connection does not take at once, a thread writes.
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
        """Whether it takes nothing any more."""
        self._left: deque[memoryview] = deque()  # for the thread that writes
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        self._head = memoryview(bytearray(_HEAD.size))
        self._tail = memoryview(bytearray(_CHECKSUM_BYTES))
        self._frames: list[Any] = []  # of the message that comes
        self._pieces: list[list[memoryview]] = []  # of these, that are not whole
        self._seal = xxhash.xxh3_64()  # of those that are
        self._wanted: list[memoryview] = [self._head]  # where its next bytes go

    # Sending -------------------------------------------------------------------------------------

    def send(self, frames: Sequence[Any]) -> bool:
        """Sends the frames of a message, which are not written to before it is acknowledged; False
        if it has to go another way. Waits for some milliseconds at most."""
        head = frames[0]
        data = memoryview(frames[1]) if len(frames) > 1 else None
        sizes = _HEAD.pack(len(head), _NO_SECOND_FRAME if data is None else len(data))
        seal = xxhash.xxh3_64(head)
        if data is None:
            return self._write_parts(sizes, head, seal.digest())
        # Piece by piece, so that each is in the caches when it is looked at, at both ends at once.
        before: tuple[Any, ...] = (sizes, head)
        last = max(0, len(data) - 1) // _PIECE_BYTES * _PIECE_BYTES
        for start in range(0, last, _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            seal.update(piece)
            if not self._write_parts(*before, piece):
                return False  # a message of which a part has come is none
            before = ()
        seal.update(data[last:])
        return self._write_parts(*before, data[last:], seal.digest())

    def _write_parts(self, *given: Any) -> bool:
        """Sends some bytes, now or later; False if the pipe has ended."""
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
        with self._changed:
            self._left += parts
            if self._writer is None:
                self._writer = threading.Thread(target=self._run_writer, name="pipe", daemon=True)
                self._writer.start()
            self._changed.notify()

    def _run_writer(self) -> None:
        """Writes what the connection did not take at once."""
        while not self.ended:
            with self._changed:
                while not (self._left or self.ended):
                    self._changed.wait()
            try:
                while self._left and not self.ended:
                    part = self._left[0]
                    sent = self._socket.send(part)
                    # Only now may others write: what waits is in the order of the messages.
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
        """The frames of the next message; None if it is not whole yet, after some milliseconds in
        which nothing came.

        Raises:
            TransportError: the pipe has ended.
            ProtocolError: what came is no message.
        """
        while True:
            try:
                count = self._socket.recvmsg_into(self._wanted, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                return None
            except OSError as error:
                raise TransportError(f"the pipe has ended: {error.strerror}") from error
            if not count:
                raise TransportError("the other process has ended its pipe")
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
        """For the frames that follow."""
        two = second != _NO_SECOND_FRAME
        if not 0 < first <= CONTROL_CAP or (two and second > CHUNK_BYTES):
            raise ProtocolError(f"a message of a pipe says that it has {first} and {second} bytes")
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
        """The message that has come."""
        frames, self._frames, self._wanted = self._frames, [], [self._head]
        if self._tail != self._seal.digest():
            raise ProtocolError("a message of a pipe is not what was sent")
        return frames

    def close(self) -> None:
        """Ends it."""
        self.ended = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who writes
        with self._changed:
            self._changed.notify()
        if self._writer is not None:
            self._writer.join(_JOIN_SECONDS)
        self._socket.close()


def _drop_bytes(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of some parts after so many bytes."""
    for index, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[index + 1 :]]
        count -= part.nbytes
    return []


class BulkSender:
    """Where a link to another worker gets a pipe from.

    Args:
        address: where this worker listens, as it knows itself.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._pipe: BulkChannel | None = None
        self._offer: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def channel(self) -> BulkChannel | None:
        """The pipe, if there is one that has not ended."""
        pipe = self._pipe
        if pipe is not None and pipe.ended:
            self._pipe = None
            pipe.close()
            return None
        return pipe

    def offer(self) -> str:
        """The token of an offer, which stands for some seconds; "" while one does, and where there
        can be none."""
        if self._pipe is not None or (self._thread is not None and self._thread.is_alive()):
            return ""
        parts = parse_tcp(self._address)
        if parts is None or (host := parts.host) == "*":
            return ""  # of another transport, or it does not know its own address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            return ""  # no more file descriptors: what cannot do without will tell
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
        """Waits for who knows the secret."""
        until = time.monotonic() + _OFFER_SECONDS
        with listening:
            while (left := until - time.monotonic()) > 0:
                try:
                    listening.settimeout(left)
                    sock, _ = listening.accept()
                except OSError:
                    return  # nobody came, or it was closed
                try:
                    if compare_digest(_read_secret(sock), secret.encode()):
                        self._pipe = BulkChannel(sock)
                        return
                except OSError:
                    pass  # it went away, or said nothing
                sock.close()

    def close(self) -> None:
        """Ends the pipe, or the offer."""
        if self._offer is not None:
            with suppress(OSError):
                self._offer.shutdown(socket.SHUT_RDWR)  # wakes who waits there
        if self._thread is not None:
            self._thread.join(_GREETING_SECONDS + _JOIN_SECONDS)
        if self._pipe is not None:
            self._pipe.close()


def _read_secret(sock: socket.socket) -> bytes:
    """What somebody says who has connected."""
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
    """Takes an offer, on a thread of its own; nothing happens if that cannot be.

    Args:
        known: the address of who offers, as this process knows it.
        admit: takes the end that receives.
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
            return  # a firewall, or who offered is gone
        try:
            sock.sendall(secret)
            admit(BulkChannel(sock))
        except OSError:
            sock.close()

    threading.Thread(target=connect, name="pipe-join", daemon=True).start()


class BulkReceivers:
    """The ends that a process reads from, each of a session. For one thread only."""

    def __init__(self) -> None:
        self._pipes: dict[bytes, tuple[str, BulkChannel]] = {}
        self._count = 0

    def add(self, session: str, pipe: BulkChannel) -> bytes | None:
        """The route that a pipe has from now on; None if there are as many as can be."""
        if len(self._pipes) >= MAX_CHANNELS:
            pipe.close()
            return None
        self._count += 1
        route = b"pipe %d" % self._count
        self._pipes[route] = session, pipe
        return route

    def routes_of(self, session: str) -> list[bytes]:
        """The routes of those of a session."""
        return [route for route, (owner, _) in self._pipes.items() if owner == session]

    def drop(self, route: bytes) -> BulkChannel | None:
        """Forgets the pipe of a route, if it is one, which is to be closed."""
        return self._pipes.pop(route, ("", None))[1]

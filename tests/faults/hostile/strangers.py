"""Whoever else may be on a network: peers that speak ZeroMQ by hand, sockets that speak anything,
and a client that runs its steps meanwhile and must not notice."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import zmq

import graphflow as gf
from graphflow.runtime.protocol.reliable_stream import Version
from graphflow.runtime.security.keys import KeyPair
from graphflow.runtime.wire.array_codec import checksum
from graphflow.runtime.wire.frame_codec import decode, encode
from graphflow.runtime.wire.messages import (
    COORDINATOR,
    Chunk,
    Envelope,
    Hello,
    Message,
    Open,
    Welcome,
)

SECONDS = 10.0
"""For an answer; twice what it takes at worst, for others use the machine, too."""


class Stranger:
    """A peer with a DEALER of its own, which sends any frames.

    Args:
        pair: the key that it shows; None: none.
        server: the public key that it takes the worker's to be, in hexadecimal digits.
    """

    def __init__(self, address: str, pair: KeyPair | None = None, server: str = "") -> None:
        self.address = address
        self.session, self.token = secrets.token_hex(16), secrets.token_hex(16)
        self._sent = 0
        self._process = 0  # the number of the one that has welcomed us
        self._context: Any = zmq.Context()
        self.socket: Any = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, 5000)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a connection that is ended stays so
        if pair is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server))
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(pair.public.key))
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(address)

    def envelope(self, step: int = 0, origin: int = COORDINATOR) -> Envelope:
        """That of its next message."""
        self._sent += 1
        return Envelope(self.session, 1, origin, step, self._sent, 0, self.token)

    def send(self, *frames: bytes) -> None:
        """One message of any frames; nothing where the connection has been ended already."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(frames)

    def tell(self, message: Message, data: bytes | None = None, origin: int = COORDINATOR) -> None:
        """A message of the protocol, with the next number."""
        step = self._process if isinstance(message, Open) else 0
        head = encode(self.envelope(step, origin), message)
        self.send(*([head] if data is None else [head, data]))

    def answer(self, seconds: float = SECONDS) -> Message | None:
        """The next message that comes back; None where none does in time."""
        if not self.socket.poll(int(seconds * 1000)):
            return None
        envelope, message = decode(self.socket.recv_multipart()[0])
        if isinstance(message, Welcome):
            self._process = envelope.step
        return message

    def ask(self, message: Message, expected: str, seconds: float = SECONDS) -> Any:
        """Sends a message and waits for an answer of a kind; others are passed over."""
        self.tell(message)
        until = time.monotonic() + seconds
        while (found := self.answer(until - time.monotonic())) is not None:
            if type(found).__name__ == expected:
                return found
        raise AssertionError(f"no {expected} in answer to a {type(message).__name__}")

    def open(self) -> None:
        """A session of its own on the worker, as any client would begin one."""
        own = Version.own()
        self.ask(Hello(1, own.version, own.wire, own.python), "Welcome")
        self.ask(Open(2, 0, [self.address], 30.0), "Ready")

    def give(self, purpose: str, number: int, name: int | str, data: bytes, **header: Any) -> None:
        """An array of bytes, in one chunk; `header` says otherwise."""
        fields = {"dtype": "uint8", "shape": [len(data)], "axes": [0], "nbytes": len(data),
                  "offset": 0, "checksum": checksum(data), **header}  # fmt: skip
        self.tell(Chunk(purpose, number, name, **fields), data)

    def is_dropped(self, seconds: float = SECONDS) -> bool:
        """Whether the worker ends the connection in time."""
        return bool(self._monitor.poll(int(seconds * 1000)))

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=0)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Bystander:
    """A client that runs steps on a worker while something else happens to that.

    Leaving the context asserts that all steps were committed once, in good time.
    """

    def __init__(self, cluster: Path, slowest: float = 5.0) -> None:
        self._session = gf.Session(cluster)
        self._slowest = slowest
        self._end = threading.Event()
        self._count = gf.variable(np.zeros((), "float32"), name="count")
        self._step = gf.assign(self._count, self._count + 1.0)
        self._session.run(self._step)
        self.steps = 1
        self.seconds: list[float] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                started = time.monotonic()
                self._session.run(self._step)
                self.seconds.append(time.monotonic() - started)
                self.steps += 1
                time.sleep(0.005)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Bystander:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(SECONDS)
        try:
            if kind is None:
                self._judge()
        finally:
            self._session.close()

    def _judge(self) -> None:
        assert not self._thread.is_alive(), "a step hangs"
        assert self._error is None, f"a step failed: {self._error!r}"
        assert self.steps > 1 and self._session.get(self._count) == self.steps
        assert max(self.seconds) < self._slowest, f"a step took {max(self.seconds):.2f} s"


def open_silent_connection(address: str) -> socket.socket:
    """A connection that says nothing yet."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    made = socket.create_connection((host, int(port)))
    made.settimeout(SECONDS)
    return made


def are_closed(sockets: Sequence[socket.socket], seconds: float) -> bool:
    """Whether the other side ends all of these in time."""
    until = time.monotonic() + seconds
    return all(is_closed(each, max(0.01, until - time.monotonic())) for each in sockets)


def is_closed(sock: socket.socket, seconds: float) -> bool:
    """Whether the other side ends a connection in time."""
    sock.settimeout(seconds)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def ports(pid: int) -> list[int]:
    """The TCP ports that a process listens at."""
    mine = set()
    for place in Path(f"/proc/{pid}/fd").iterdir():
        try:
            mine.add(str(place.readlink()))
        except OSError:
            continue
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                found.add(int(words[1].rsplit(":", 1)[1], 16))
    return sorted(found)

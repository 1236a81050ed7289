"""Contexts and sockets of ZeroMQ: how they are created, limited and given heartbeats."""

from __future__ import annotations

import os
from typing import Any

import zmq

from graphflow.errors import TransportError
from graphflow.runtime.wire.array_codec import CHUNK_BYTES

_FRAME_CAP = CHUNK_BYTES  # of one frame; control frames have a lower cap of their own
_ENCRYPTION_BYTES = 64  # more than encryption adds to a frame: ZeroMQ counts it as it travels
_HIGH_WATER = 1000  # messages in a socket's queue
_HEARTBEAT_MS = 1000
_DESCRIPTORS_NEEDED = 16  # for a socket, its context's threads and pyzmq's own
_ABANDONED: list[zmq.Context[Any]] = []


def open_context() -> zmq.Context[Any]:
    """Return a new context. A session or a worker has one; `destroy` ends its sockets."""
    return zmq.Context()


def abandon_context(context: zmq.Context[Any]) -> None:
    """Keep `context` until the process ends, because another thread may still use its sockets.

    The garbage collector would wait until they are closed.
    """
    _ABANDONED.append(context)


def create_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
    """Return a new socket.

    Raises:
        TransportError: The process has no file descriptors for it.
    """
    try:
        _check_descriptors()
        # pyzmq begins a thread with sockets of its own at the first of these: not in mid-step.
        zmq.Frame(b"\0", copy=False, copy_threshold=0)
        created: zmq.Socket[bytes] = context.socket(kind)
    except (zmq.ZMQError, OSError) as error:
        raise TransportError(
            f"no more connections from here: {error.strerror}; close sessions, or let the process "
            "have more file descriptors (`ulimit -n`)"
        ) from error
    return created


def _check_descriptors() -> None:
    """Check that the process has file descriptors left for a socket.

    If ZeroMQ's own threads find none, ZeroMQ ends the process.

    Raises:
        OSError: It has not.
    """
    found: list[int] = []
    try:
        while len(found) < _DESCRIPTORS_NEEDED:
            found.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for each in found:
            os.close(each)


def set_socket_options(sock: zmq.Socket[bytes], *, sealed: bool) -> None:
    """Limit the queues and the frames of a socket; frames of a `sealed` one are encrypted."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    sock.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    sock.setsockopt(zmq.MAXMSGSIZE, _FRAME_CAP + (_ENCRYPTION_BYTES if sealed else 0))
    sock.setsockopt(zmq.IPV6, 1)


def enable_heartbeats(sock: zmq.Socket[bytes], silence_ms: int) -> None:
    """Have ZeroMQ exchange heartbeats, and end the connection after `silence_ms` without any.

    Both ends send them: while a chunk takes seconds on a slow link, the other end's heartbeats show
    that it is there. Only the protocol notices a link that is dead in one direction.
    """
    sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence_ms)

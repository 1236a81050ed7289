"""What ZeroMQ tells of a socket's connections. `zmq.utils.monitor` reads it, too, but it loads
asyncio, with what that needs: a tenth of all that a worker loads."""

from __future__ import annotations

import struct

import zmq

_EVENT = struct.Struct("=Hi")


def read_monitor_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """The next event that a socket's monitor tells, and its number: a descriptor, or an error."""
    event, value = _EVENT.unpack(monitor.recv_multipart()[0])
    return event, value

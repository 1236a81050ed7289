"""Events of a ZeroMQ socket's connections.

`zmq.utils.monitor` reads them, too, but loads asyncio: a tenth of all that a worker loads.
"""

from __future__ import annotations

import struct

import zmq

_EVENT = struct.Struct("=Hi")


def read_monitor_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """Return the next event of a socket monitor and its value, a descriptor or an error number."""
    event, value = _EVENT.unpack(monitor.recv_multipart()[0])
    return event, value

"""TCP, `tcp://host:port`: carried by ZeroMQ, to this machine or to others."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zmq

from graphflow.base.addresses import HIGHEST_PORT, TCP, TCP_FORM, Address, parse_tcp
from graphflow.errors import InsecureAddress, TransportError
from graphflow.runtime.security.authenticator import ZapAuthenticator
from graphflow.runtime.transport import register_transport
from graphflow.runtime.transport.interface import Transport
from graphflow.runtime.transport.zmq_sockets import ZmqChannel, ZmqListener

_HOST = re.compile(r"[A-Za-z0-9._*-]+|[0-9a-fA-F:.]+")  # a name, *, or a number


def check_address(address: str, *, insecure: bool, listening: bool) -> Address:
    """Return the parts of `address` if it may be used; see `Transport.check_address`."""
    parts = parse_tcp(address)
    if parts is not None and not _HOST.fullmatch(parts.host):
        parts = None
    is_open = parts is not None and (parts.port == 0 or parts.host == "*")
    if parts is None or parts.port > HIGHEST_PORT or (is_open and not listening):
        if parts is not None and parts.port > HIGHEST_PORT:
            raise TransportError(
                f"{address!r}: port {parts.port} is above {HIGHEST_PORT}, the highest there is"
            )
        example = "tcp://127.0.0.1:7001"
        raise TransportError(f"{address!r} is not of the form {TCP_FORM}, such as {example}")
    if not parts.loopback and not insecure:
        keyed = "give it a key (graphflow keys new; see docs/deployment/security.md)"
        if not listening:
            keyed = 'name its key (key = "box1" in a cluster file, --worker-key box1 for status; '
            keyed += "graphflow keys new makes keys; see docs/deployment/security.md)"
        raise InsecureAddress(
            f"{address} can be reached from other machines; {keyed}, or use 127.0.0.1, or, on a "
            "network that you trust, --insecure (insecure = true in a cluster file): then nothing "
            "is authenticated or encrypted"
        )
    return parts


class TcpListener(ZmqListener):
    """A worker's listener at a TCP address; see `Transport.listen`."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        *,
        insecure: bool,
        guard: ZapAuthenticator | None = None,
        most: int | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        parts = check_address(address, insecure=insecure or guard is not None, listening=True)
        super().__init__(
            context, address, str(_resolve_host(parts)), guard=guard, most=most, wake=wake
        )
        self.address = str(replace(parts, port=int(self.endpoint.rpartition(":")[2])))


class TcpChannel(ZmqChannel):
    """A connection to a TCP address; see `Transport.connect`."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        *,
        insecure: bool,
        watch: bool = False,
        guard: ZapAuthenticator | None = None,
        key: str = "",
    ) -> None:
        parts = check_address(address, insecure=insecure or bool(key), listening=False)
        super().__init__(context, address, str(parts), watch=watch, guard=guard, key=key)


class TcpTransport(Transport):
    """TCP between processes of any hosts."""

    scheme = TCP

    def parse(self, address: str) -> Address | None:
        """Return the parts of a `tcp://host:port`."""
        return parse_tcp(address)

    def check_address(self, address: str, *, insecure: bool, listening: bool) -> Address:
        """See `Transport.check_address`."""
        return check_address(address, insecure=insecure, listening=listening)

    def listen(self, context: zmq.Context[Any], address: str, **options: Any) -> TcpListener:
        """See `Transport.listen`."""
        return TcpListener(context, address, **options)

    def connect(self, context: zmq.Context[Any], address: str, **options: Any) -> TcpChannel:
        """See `Transport.connect`."""
        return TcpChannel(context, address, **options)

    def check_host(self, address: Address) -> None:
        """See `Transport.check_host`."""
        try:
            socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise TransportError(_describe_unknown_host(address, error)) from error


def _resolve_host(parts: Address) -> Address:
    """Return the address with its host as ZeroMQ can bind it: a number or *."""
    if parts.host == "*":
        return parts
    try:
        found = socket.getaddrinfo(parts.host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransportError(_describe_unknown_host(parts, error)) from error
    return replace(parts, host=str(found[0][4][0]))


def _describe_unknown_host(address: Address, error: OSError) -> str:
    return f"host {address.host!r} is unknown: {error}; correct its name, or give its number"


register_transport(TcpTransport())

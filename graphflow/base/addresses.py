"""Addresses of workers, `scheme://rest`: one parser for each scheme.

A cluster file names addresses long before a socket is opened, so this module knows no transport.
TCP's parser is here. Any other transport registers its own, see `runtime.transport`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

from graphflow.base.lazy_dataclass import dataclass

TCP = "tcp"
TCP_FORM = "tcp://host:port"
HIGHEST_PORT = 65535

_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)")
_OWN_NAMES = frozenset({"localhost", "127.0.0.1", "::1", "ip6-localhost"})


@dataclass(frozen=True)
class Address:
    """The parts of an address.

    Attributes:
        host: The machine: a name or a number. A scheme that reaches only processes of this machine
            says "localhost".
        port: 0 where the system chooses one, or the scheme has none.
        scheme: The part before `://`.
    """

    host: str
    port: int = 0
    scheme: str = TCP

    @property
    def loopback(self) -> bool:
        """True if only processes of this machine can reach the address."""
        if self.host == "localhost":
            return True
        return is_ip_address(self.host) and ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port or '*'}"


def is_ip_address(host: str) -> bool:
    """Return True if a host is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


Parser = Callable[[str], Address | None]
"""Return the parts of an address of one scheme, or None if it is malformed."""


def parse_tcp(address: str) -> Address | None:
    """Return the parts of a `tcp://host:port`, or None; a port `*` is 0."""
    match = _TCP.fullmatch(address)
    if match is None:
        return None
    return Address(match[1].strip("[]"), int(match[2].replace("*", "0")))


_parsers: dict[str, Parser] = {TCP: parse_tcp}


def register_scheme(scheme: str, parse: Parser) -> None:
    """Parse addresses that begin with `scheme://` by `parse` from now on."""
    _parsers[scheme] = parse


def scheme_of(address: str) -> str:
    """Return the scheme of `address`, or "" if it has none."""
    scheme, separator, _ = address.partition("://")
    return scheme if separator else ""


def parse_address(address: str) -> Address | None:
    """Return the parts of `address`, or None if it is malformed or its scheme is unknown."""
    parse = _parsers.get(scheme_of(address))
    return None if parse is None else parse(address)


def is_loopback(address: str) -> bool:
    """Return True if `address` is one that only processes of this machine can reach."""
    parts = parse_address(address)
    return parts is not None and parts.loopback


def normalize_address(address: str) -> str:
    """Return `address` so that equal texts mean one place, with one name for this machine."""
    parts = parse_address(address.lower()) if scheme_of(address.lower()) == TCP else None
    if parts is None:
        return address
    host = "127.0.0.1" if parts.host in _OWN_NAMES else parts.host
    return f"{host}:{parts.port}"

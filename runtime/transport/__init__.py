"""Transports by scheme, the part of an address before `://`: one file each.

The interface is in `interface.py`. A transport is found by registration, so a module of a user's
adds one when it is imported; TCP's is imported when its first address is used.
"""

from __future__ import annotations

from importlib import import_module

from graphflow.base.addresses import TCP_FORM, register_scheme, scheme_of
from graphflow.errors import TransportError
from graphflow.runtime.transport.interface import Transport

_BUILT_IN = {"tcp": "graphflow.runtime.transport.tcp"}  # modules that register it: they load ZeroMQ

_transports: dict[str, Transport] = {}


def register_transport(transport: Transport) -> None:
    """Use `transport` for all addresses of its scheme, here and in cluster files."""
    _transports[transport.scheme] = transport
    register_scheme(transport.scheme, transport.parse)


def transport_of(address: str) -> Transport:
    """Return the transport that serves `address`.

    Raises:
        TransportError: No transport has that scheme.
    """
    scheme = scheme_of(address)
    if scheme not in _transports and scheme in _BUILT_IN:
        import_module(_BUILT_IN[scheme])
    if scheme not in _transports:
        known = ", ".join(f"{name}://" for name in dict.fromkeys((*_BUILT_IN, *_transports)))
        raise TransportError(f"address {address!r} has no known scheme ({known}); write {TCP_FORM}")
    return _transports[scheme]

"""Transports by scheme: one file each, found by the part of an address before `://`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from graphflow.errors import TransportError

_SCHEMES = {"tcp": "graphflow.runtime.transport.tcp"}


def transport_of(address: str) -> ModuleType:
    """The module that serves an address; it has `Listener`, `Channel` and `check`.

    Raises:
        TransportError: there is no transport of that scheme.
    """
    scheme = address.partition("://")[0] if "://" in address else ""
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise TransportError(
            f"address {address!r} has no known scheme ({known}); write tcp://host:port"
        )
    return import_module(_SCHEMES[scheme])

"""Keys that are made when they are first needed."""

from __future__ import annotations

import os
import re
import socket

from graphflow.errors import KeyFileError
from graphflow.runtime.security.keys import KeyPair, Keyring


def find_or_create_pair(ring: Keyring, name: str | None, role: str) -> tuple[KeyPair, bool]:
    """Return this user's pair, and whether it was made now because it was absent.

    Args:
        name: as of `Keyring.own_pair`. If it is None, and there is no pair of the role, one is made
            with the name of the role and of this host.

    Raises:
        KeyFileError: as of `Keyring.own_pair` and `Keyring.create_pair`.
    """
    if name is None and not any(key.role == role for key in ring.pairs()):
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
        name = f"{role}-{host}"[:64]
    is_made = False
    if name is not None and os.sep not in name and not _is_there(ring, name):
        try:
            ring.create_pair(name, role)
            is_made = True
        except KeyFileError:
            if not _is_there(ring, name):  # else another process has just made it
                raise
    return ring.own_pair(name, role), is_made


def _is_there(ring: Keyring, name: str) -> bool:
    return os.path.lexists(ring.folder / f"{name}.secret")

"""Keys that live as long as a process: of workers that a launcher starts, and of their session."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from graphflow.runtime.security.keys import Keyring

NEW_KEY = "new"
"""The name of a worker's key that asks for a new one."""


@contextmanager
def one_time_keyring(role: str, trusted: Sequence[str] = ()) -> Iterator[tuple[Keyring, str]]:
    """Make a keyring with one new pair in a temporary folder, which is removed at the end.

    Args:
        role: of the pair.
        trusted: lines of public keys to trust.

    Yields:
        The keyring, and the name of the pair in it.

    Raises:
        KeyFileError: a line holds no public key, or the folder cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="graphflow-keys-") as folder:
        ring = Keyring(folder)
        name = f"{role}-{os.getpid()}"
        ring.create_pair(name, role)
        for line in trusted:
            ring.add(line, "--trust")
        yield ring, name

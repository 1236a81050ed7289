"""The two workers on which random models run: local processes, or workers at addresses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import graphflow as gf

DEADLINE = 60.0
"""Seconds that a step may take before its model counts as failed."""


class Workers(Protocol):
    """Opens sessions on the first worker, or on both."""

    def session(self, count: int, **options: Any) -> gf.Session:
        """Return a session on `count` workers, 1 or 2, of one thread each."""
        ...


class LocalWorkers:
    """Worker processes of this machine that each session starts."""

    def session(self, count: int, **options: Any) -> gf.Session:
        """Return a session on `count` workers, 1 or 2, of one thread each."""
        cluster = gf.Cluster.local(workers=count, threads=1)
        return gf.Session(cluster, deadline=DEADLINE, **options)


class ListedWorkers:
    """Two workers that listen at addresses.

    Args:
        addresses: of the two, such as `tcp://127.0.0.1:7001`.
        folder: where the cluster files are written.
    """

    def __init__(self, addresses: Sequence[str], folder: Path) -> None:
        self._files = []
        for count in (1, 2):
            workers = "".join(
                f'[[workers]]\naddress = "{address}"\n' for address in addresses[:count]
            )
            path = folder / f"cluster-{count}.toml"
            path.write_text(f"insecure = true\n[defaults]\nthreads = 1\n{workers}")
            self._files.append(path)

    def session(self, count: int, **options: Any) -> gf.Session:
        """Return a session on `count` workers, 1 or 2, of one thread each."""
        return gf.Session(self._files[count - 1], deadline=DEADLINE, **options)

"""Progress: what takes long is told on a terminal, and nowhere else."""

from __future__ import annotations

import sys
import threading
from typing import Any

SILENT = 2.0
"""Seconds that work may take before it is told."""
LARGE = 2_000
"""Nodes from which it may take that long: less is not even timed."""


class telling:
    """A line on the terminal while the block runs, once it has run for `SILENT` seconds; nothing if
    standard error is no terminal, or the graph is small.

    Args:
        what: is done, such as "placing".
        nodes: of the graph.
    """

    def __init__(self, what: str, nodes: int) -> None:
        self._text = f"{what} {nodes:,} nodes"
        self._timer: threading.Timer | None = None
        self._status: Any = None
        self._lock = threading.Lock()
        if nodes >= LARGE and sys.stderr is not None and sys.stderr.isatty():
            self._timer = threading.Timer(SILENT, self._show)
            self._timer.daemon = True

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.start()

    def __exit__(self, *raised: object) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        with self._lock:
            self._timer = None
            if self._status is not None:
                self._status.stop()

    def _show(self) -> None:
        from rich.console import Console

        with self._lock:
            if self._timer is not None:
                self._status = Console(stderr=True).status(self._text)
                self._status.start()

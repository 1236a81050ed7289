"""An operation under way, as whoever asked for it sees it."""

from __future__ import annotations

import threading

from graphflow.errors import GraphflowError
from graphflow.runtime.protocol.coordinator_events import Replies


class Pending:
    """An operation under way, and its outcome once there is one."""

    __slots__ = ("_event", "outcome")

    def __init__(self) -> None:
        self.outcome: Replies | GraphflowError | None = None
        self._event: threading.Event | None = None

    def settle(self, outcome: Replies | GraphflowError) -> None:
        """Tells whoever waits."""
        self.outcome = outcome
        if self._event is not None:
            self._event.set()

    def wait(self, seconds: float) -> None:
        """Waits while another thread drives the sockets."""
        self._event = event = self._event or threading.Event()
        if self.outcome is None:
            event.wait(seconds)

"""The caller's handle on an operation that workers have not answered yet."""

from __future__ import annotations

import threading

from graphflow.errors import GraphflowError
from graphflow.runtime.protocol.coordinator_events import Replies


class PendingOperation:
    """One request to workers, from its submission to its outcome.

    The I/O loop makes one for each operation, or takes the caller's. The caller waits for the
    outcome with `SessionIOLoop.finish`. `protocol.operations.Operation` is the machine's record of
    the same operation: which workers have replied, and when its deadline passes.

    Attributes:
        request: the number that orders and replies of the operation carry.
        outcome: the replies, or the error that ended the operation; None while it is pending.
    """

    __slots__ = ("_event", "outcome", "request")

    def __init__(self, request: int) -> None:
        self.request = request
        self.outcome: Replies | GraphflowError | None = None
        self._event: threading.Event | None = None

    def set_outcome(self, outcome: Replies | GraphflowError) -> None:
        """End the operation, and wake the thread that waits for it."""
        self.outcome = outcome
        if self._event is not None:
            self._event.set()

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for the outcome while another thread drives the sockets."""
        # Most operations end on the thread that asked, so the event is only made here.
        self._event = event = self._event or threading.Event()
        if self.outcome is None:
            event.wait(seconds)

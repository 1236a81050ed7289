"""The I/O loop with a fast path for steady-state steps (`protocol.fast_path`).

Orders and answers then go over the fast channels, past the general event queue.
"""

from __future__ import annotations

import time
from typing import Any

from graphflow.runtime.client.io_loop import DRIVER_WAIT_SECONDS, SLACK, SessionIOLoop
from graphflow.runtime.client.pending_operation import PendingOperation
from graphflow.runtime.polling.wakeup import SPIN_SECONDS
from graphflow.runtime.protocol.coordinator_events import Replies
from graphflow.runtime.protocol.fast_path import FastPathCoordinator, SteadyStateStep


class FastPathLoop(SessionIOLoop):
    """The I/O loop of one session, with the fast path."""

    _Machine = FastPathCoordinator
    _machine: FastPathCoordinator

    def run_step(
        self, step: SteadyStateStep, deadline: float, operation: PendingOperation
    ) -> Replies | None:
        """Run a step to its end; return None, with nothing begun, if the fast path does not apply.

        Args:
            operation: gets the outcome, also if an interrupt ends the call.

        Raises:
            GraphflowError, KeyboardInterrupt: as `ask`.
        """
        if not self._hold_signals(self._run, step, operation):
            return None
        outcome = operation.outcome
        if isinstance(outcome, Replies):
            return outcome
        return self.finish(operation, deadline + SLACK)

    def _run(self, step: SteadyStateStep, operation: PendingOperation) -> bool:
        """Run a step as far as the fast path leads; return True if it has begun."""
        if not self._driver.acquire(DRIVER_WAIT_SECONDS):
            return False
        try:
            if not self._send_orders(step, operation):
                return False
            self._receive_answers(operation)
        except BaseException as error:
            self._fail_session(error)
        finally:
            self._driver.release()
        return True

    def _send_orders(self, step: SteadyStateStep, operation: PendingOperation) -> bool:
        """Send a step's orders, if nothing else has to be done first.

        Returns True if they were sent.
        """
        now = time.monotonic()
        if (
            self._events
            or self._deferred
            or self._full
            or self._stopping
            or now >= self._next_event_at
        ):
            return False
        self._pending[step.request] = operation
        numbered_frames = self._machine.begin_step(step, now)
        if numbered_frames is None:
            del self._pending[step.request]
            return False
        for worker, (frame, number, acknowledged) in zip(
            step.workers, numbered_frames, strict=True
        ):
            connection = self._connections[worker]
            channel, frames = connection.fast_channel, [frame]
            if channel is None or not channel.send_in_order(frames, number, acknowledged):
                connection.unsent.append(frames)
                self._flush(worker)
        return True

    def _receive_answers(self, operation: PendingOperation) -> None:
        """Receive until all workers have answered, or until another event must be handled."""
        self._next_event_at = due = min(self._machine.wake_at(0.0), self._inflow_check_at)
        while operation.outcome is None:
            if self._recently_sent or self._unread or self._events or self._held_signals.received:
                return
            ready = self._waiter.wait(due - time.monotonic(), SPIN_SECONDS)
            self._receive(ready)
            if not ready or self._driver.wanted:
                return

    def _handle_fast_frames(self, worker: int, frames: list[Any]) -> None:
        actions = self._machine.accept_answer(worker, frames[0], time.monotonic())
        if actions is None:
            super()._handle_fast_frames(worker, frames)
        elif actions:
            self._execute(actions)

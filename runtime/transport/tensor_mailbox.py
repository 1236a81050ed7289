"""Mail: tensors on their way to who waits for them, and how a wait ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from time import monotonic, monotonic_ns
from typing import Any, NamedTuple

from graphflow.errors import GraphflowError, StepTimeout
from graphflow.runtime.transport.shared_memory_arrays import PATIENCE, is_whole
from graphflow.runtime.wire.messages import Key, step_of

_WAIT_SLICE = 0.002
"""Seconds between two looks of a thread at whether anybody receives what it waits for."""


TransferObserver = Callable[[str, int, int, int], None]
"""Hears of a tensor that went to, or came from, another worker without a message: "sent" or
"received", the worker, the edge, and its bytes."""


class Awaited(NamedTuple):
    """What is waited for, as errors tell it, and the worker that it comes from; None: of several,
    or of this one."""

    what: str
    worker: int | None = None


class Wait(NamedTuple):
    """Since when something is waited for, in a step."""

    step: int
    awaited: Awaited
    since: float


class TensorMailbox:
    """Tensors that came and were not taken yet, by step and edge; waits end by arrival, cancel or
    deadline.

    Args:
        worker: the one whose mail this is.
    """

    def __init__(self, worker: int = 0) -> None:
        self._worker = worker
        # Taken by itself: a Condition takes it in Python, where an interrupt would leave it taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._arrays: dict[tuple[int, Key], tuple[Any, int]] = {}  # and when they came, in ns
        self._cancelled: tuple[int, GraphflowError] | None = None
        self._finished = -1
        self.deadline = 0.0
        self.attend: Callable[[Callable[[], bool], float], bool] | None = None
        """Receives, on the thread that calls it, until something has come or some seconds have
        passed; False: at once, for another thread does."""
        self.wake: Callable[[], None] = lambda: None
        """Has the thread that receives look at whether what it waits for has come otherwise."""
        self.on_transfer: TransferObserver | None = None
        """Hears of tensors that need no message; without it, all need one."""
        self._receiving: set[int] = set()  # threads
        self._waiting = 0  # threads, for whom nobody receives but others
        self.arrivals: list[tuple[int, int]] | None = None
        self.waits: dict[int, Wait] = {}
        """What each thread waits for."""
        self._blamed: tuple[int, Awaited] = (-1, Awaited("nothing"))  # of the last step's deadline

    def put(self, step: int, edge: Key, array: Any) -> None:
        if step <= self._finished:
            return  # late for a step that is over
        self._arrays[step, edge] = (array, monotonic_ns())
        if step <= self._finished:  # just now
            self._arrays.pop((step, edge), None)
        self._wake_waiters()

    def take(self, step: int, edge: Key, awaited: Awaited) -> Any:
        """The tensor of an edge.

        Raises:
            StepTimeout: it did not come before the deadline.
            GraphflowError: what the step was cancelled with.
        """
        key = (step, edge)
        if key not in self._arrays:
            self._wait_for_tensor(key, awaited)
        array, arrived = self._arrays.pop(key)
        if not is_whole(array, 0.0):  # its message came before
            self.wait_until(step, awaited, lambda seconds: is_whole(array, min(seconds, PATIENCE)))
            arrived = monotonic_ns()
        # Noted here, for it may come before its step begins.
        if self.arrivals is not None and isinstance(edge, int):
            self.arrivals.append((edge, arrived))
        return array

    def _wait_for_tensor(self, key: tuple[int, Key], awaited: Awaited) -> None:
        def is_over() -> bool:
            return key in self._arrays or self.cancel_reason(key[0]) is not None

        def look(seconds: float) -> bool:
            if is_over() or seconds <= 0:
                return key in self._arrays
            if self._receive_here(is_over, seconds):
                if self._waiting:  # another device's thread may go on receiving
                    self._notify()
                return key in self._arrays
            with self._lock:
                self._waiting += 1
                try:
                    if not is_over():  # and whoever drives may be about to stop
                        self._changed.wait(min(seconds, _WAIT_SLICE))
                finally:
                    self._waiting -= 1
            return key in self._arrays

        self.wait_until(key[0], awaited, look)

    def wait_until(self, step: int, awaited: Awaited, look: Callable[[float], bool]) -> None:
        """Return when something is there; meanwhile it is told that it is waited for.

        Args:
            look: waits for it, about so many seconds at most; whether it is there.

        Raises:
            StepTimeout: it did not come before the deadline.
            GraphflowError: what the step was cancelled with.
        """
        thread = get_ident()
        self.waits[thread] = Wait(step, awaited, monotonic())
        try:
            while not look(self.deadline - monotonic()):
                self.check_cancelled(step, awaited)
        finally:
            del self.waits[thread]

    def check_cancelled(self, step: int, awaited: Awaited) -> None:
        """Return if the step goes on.

        Raises:
            StepTimeout: its deadline has passed; something is still waited for.
            GraphflowError: what it was cancelled with.
        """
        reason = self.cancel_reason(step)
        if reason is not None:
            raise reason
        if monotonic() > self.deadline:
            what, worker = self._find_blocker(step, awaited)
            raise StepTimeout(
                f"step {step_of(step)}: {what} did not come before the deadline; is that worker "
                "slow or stuck? give Session a longer deadline",
                worker=worker,
            )

    def _find_blocker(self, step: int, awaited: Awaited) -> Awaited:
        """What a step waits for beyond this worker: what a thread waits for of another thread here,
        that one may await of another worker, or has given up to await just now."""
        others = [
            awaited,
            *(each.awaited for each in list(self.waits.values()) if each.step == step),
        ]
        if self._blamed[0] == step:
            others.append(self._blamed[1])
        for each in others:
            if each.worker is not None and each.worker != self._worker:
                self._blamed = (step, each)
                return each
        return awaited

    def _wake_waiters(self) -> None:
        if self._waiting:
            self._notify()
        if self._receiving - {get_ident()}:  # this is another device's thread, and no socket's
            self.wake()

    def _notify(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _receive_here(self, over: Callable[[], bool], seconds: float) -> bool:
        """Whether this thread was the one that receives, until something was over."""
        if self.attend is None:
            return False
        self._receiving.add(get_ident())
        try:
            return self.attend(over, seconds)
        finally:
            self._receiving.discard(get_ident())

    def cancel_reason(self, step: int) -> GraphflowError | None:
        """What a step was cancelled with, if it was."""
        if self._cancelled is not None and self._cancelled[0] >= step:
            return self._cancelled[1]
        return None

    def check_loop(self, step: int, loop: str, done: int, of: str) -> None:
        """Go on, unless the step is cancelled or its deadline has passed. Each iteration of a loop
        asks, so the message is made of its parts only when there is one.

        Raises:
            StepTimeout: the deadline has passed.
            GraphflowError: what the step was cancelled with.
        """
        if self._cancelled is not None and self._cancelled[0] >= step:
            raise self._cancelled[1]
        if monotonic() > self.deadline:
            raise StepTimeout(
                f"step {step_of(step)}: {loop} was in iteration {done}{of} when the step's "
                "deadline passed; does the loop end? bound it (max_iterations), or give Session a "
                "longer deadline"
            )

    def cancel(self, step: int, reason: GraphflowError) -> None:
        """Every wait of this and earlier steps ends with the error, now or when it begins."""
        with self._lock:
            if self._cancelled is None or step > self._cancelled[0]:
                self._cancelled = (step, reason)
        self._wake_waiters()

    def finish(self, step: int) -> None:
        """Drop what is left of a step that is over."""
        if step > self._finished:
            self._finished = step
        for key in list(self._arrays) if self._arrays else ():
            if key[0] <= step:
                self._arrays.pop(key, None)

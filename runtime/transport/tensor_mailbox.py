"""Tensors that arrived and wait for the thread that computes with them, and how a wait ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from time import monotonic, monotonic_ns
from typing import Any, NamedTuple

from graphflow.errors import GraphflowError, StepTimeout
from graphflow.runtime.transport.shared_memory_arrays import PATIENCE, is_whole
from graphflow.runtime.wire.step_values import Key, step_of

_WAIT_SLICE = 0.002
"""Seconds between two looks of a waiting thread at whether any thread receives."""


TransferObserver = Callable[[str, int, Key, int], None]
"""Called for each tensor that went to or came from another worker without a message.

The arguments are "sent" or "received", the worker, the edge, and the bytes.
"""


class Awaited(NamedTuple):
    """The message that a thread waits for, in the words of errors.

    `worker` is the worker that it comes from. None: this worker, or several.
    """

    what: str
    worker: int | None = None


class Wait(NamedTuple):
    """A thread's wait: the step, what for, and since when (monotonic seconds)."""

    step: int
    awaited: Awaited
    since: float


class TensorMailbox:
    """Tensors that have arrived and were not taken yet, by step and edge.

    A wait ends by the tensor's arrival, by a cancellation or by the step's deadline.

    Args:
        worker: The number of the worker that takes the tensors.

    Attributes:
        deadline: Of the step, in monotonic seconds.
        waits: What each thread waits for, by the thread's number; for status reports and errors.
    """

    def __init__(self, worker: int = 0) -> None:
        self._worker = worker
        # Acquired by itself: a Condition does so in Python, where an interrupt would leave it
        # locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._arrays: dict[tuple[int, Key], tuple[Any, int]] = {}  # and when they came, in ns
        self._cancelled: tuple[int, GraphflowError] | None = None
        self._finished = -1
        self.deadline = 0.0
        self.attend: Callable[[Callable[[], bool], float], bool] | None = None
        """Receives messages on the calling thread until a function returns True or seconds pass.

        Returns False at once if another thread receives.
        """
        self.wake: Callable[[], None] = lambda: None
        """Has the receiving thread look whether what it waits for has come otherwise."""
        self.on_transfer: TransferObserver | None = None
        """Hears of tensors that need no message. None: all tensors need one."""
        self._receiving: set[int] = set()  # threads
        self._waiting = 0  # threads for which another thread receives
        self.arrivals: list[tuple[int, int, int]] | None = None  # edge, ns, bytes
        self.waits: dict[int, Wait] = {}
        self._blamed: tuple[int, Awaited] = (-1, Awaited("nothing"))  # of the last step's deadline

    def put(self, step: int, edge: Key, array: Any) -> None:
        """Add a tensor that has arrived. One for a step that is over is dropped."""
        if step <= self._finished:
            return  # the step is over
        self._arrays[step, edge] = (array, monotonic_ns())
        if step <= self._finished:  # it ended just now
            self._arrays.pop((step, edge), None)
        self._wake_waiters()

    def take(self, step: int, edge: Key, awaited: Awaited) -> Any:
        """Return the tensor of an edge, after waiting for it.

        Raises:
            StepTimeout: The tensor did not come before the deadline.
            GraphflowError: The reason for which the step was cancelled.
        """
        key = (step, edge)
        if key not in self._arrays:
            self._wait_for_tensor(key, awaited)
        array, arrived = self._arrays.pop(key)
        if not is_whole(array, 0.0):  # its message came before its last bytes
            self.wait_until(step, awaited, lambda seconds: is_whole(array, min(seconds, PATIENCE)))
            arrived = monotonic_ns()
        # Noted here, because a tensor may arrive before its step begins.
        if self.arrivals is not None and isinstance(edge, int):
            self.arrivals.append((edge, arrived, array.nbytes))
        return array

    def _wait_for_tensor(self, key: tuple[int, Key], awaited: Awaited) -> None:
        """Wait until the tensor of `key` is there; raises as `take`."""

        self.wait_until(key[0], awaited, lambda seconds: self.look((key,), seconds))

    def has_tensor(self, step: int, edge: Key) -> bool:
        """Return True if the tensor of an edge is there."""
        return (step, edge) in self._arrays

    def look(self, keys: Sequence[tuple[int, Key]], seconds: float) -> bool:
        """Return True if a tensor of any of some keys of one step is there, within some seconds."""

        def is_there() -> bool:
            return any(key in self._arrays for key in keys)

        def is_over() -> bool:
            return is_there() or self.cancel_reason(keys[0][0]) is not None

        if is_over() or seconds <= 0:
            return is_there()
        if self._receive_here(is_over, seconds):
            if self._waiting:  # another device's thread may have to receive now
                self._notify()
            return is_there()
        with self._lock:
            self._waiting += 1
            try:
                if not is_over():  # and the receiving thread may be about to stop
                    self._changed.wait(min(seconds, _WAIT_SLICE))
            finally:
                self._waiting -= 1
        return is_there()

    def wait_until(self, step: int, awaited: Awaited, look: Callable[[float], bool]) -> None:
        """Block until `look` returns True. The wait is listed in `waits` meanwhile.

        Args:
            look: Waits at most about so many seconds; returns True if it found what it waits for.

        Raises:
            StepTimeout: It was not found before the deadline.
            GraphflowError: The reason for which the step was cancelled.
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
            StepTimeout: The deadline has passed.
            GraphflowError: The reason for which the step was cancelled.
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
        """Return what a step waits for on another worker.

        A thread may wait for another thread of this worker, which waits for another worker or has
        just given up doing so. The error names that worker.
        """
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
        """Wake threads that wait, because something has changed."""
        if self._waiting:
            self._notify()
        if self._receiving - {get_ident()}:  # this thread is no receiving one
            self.wake()

    def _notify(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _receive_here(self, over: Callable[[], bool], seconds: float) -> bool:
        """Receive on this thread until `over` returns True or some seconds have passed.

        Return False at once if no thread of a step receives, or another one does.
        """
        if self.attend is None:
            return False
        self._receiving.add(get_ident())
        try:
            return self.attend(over, seconds)
        finally:
            self._receiving.discard(get_ident())

    def cancel_reason(self, step: int) -> GraphflowError | None:
        """Return the error that a step was cancelled with, or None."""
        if self._cancelled is not None and self._cancelled[0] >= step:
            return self._cancelled[1]
        return None

    def check_loop(self, step: int, loop: str, done: int, of: str) -> None:
        """Return if the step goes on; called in each iteration of a loop.

        The arguments are parts of the error's text. It is put together only if there is an error.

        Raises:
            StepTimeout: The deadline has passed.
            GraphflowError: The reason for which the step was cancelled.
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
        """End all waits of `step` and of earlier steps with `reason`, now or when they begin."""
        with self._lock:
            if self._cancelled is None or step > self._cancelled[0]:
                self._cancelled = (step, reason)
        self._wake_waiters()

    def finish(self, step: int) -> None:
        """Drop the remaining tensors of `step` and of earlier steps, which are over."""
        if step > self._finished:
            self._finished = step
        for key in list(self._arrays) if self._arrays else ():
            if key[0] <= step:
                self._arrays.pop(key, None)

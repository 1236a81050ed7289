"""Mail: tensors on their way to who waits for them, and how a wait ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from time import monotonic, monotonic_ns
from typing import Any

from graphflow.errors import GraphflowError, StepTimeout
from graphflow.runtime.messages import Key

_SLICE = 0.002
"""Seconds between two looks of a thread at whether anybody receives what it waits for."""


Carried = Callable[[str, int, int, int], None]
"""Hears of a tensor that went to, or came from, another worker without a message: "sent" or
"received", the worker, the edge, and its bytes."""


class Mail:
    """Tensors that came and were not taken yet, by step and edge; waits end by arrival, cancel or
    deadline."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrays: dict[tuple[int, Key], tuple[Any, int]] = {}  # and when they came, in ns
        self._cancelled: tuple[int, GraphflowError] | None = None
        self._finished = -1
        self.deadline = 0.0
        self.attend: Callable[[Callable[[], bool], float], bool] | None = None
        """Receives, on the thread that calls it, until something has come or some seconds have
        passed; False: at once, for another thread does."""
        self.wake: Callable[[], None] = lambda: None
        """Has the thread that receives look at whether what it waits for has come otherwise."""
        self.carried: Carried | None = None
        """Hears of tensors that need no message; without it, all need one."""
        self._receiving: set[int] = set()  # threads
        self._waiting = 0  # threads, for whom nobody receives but others
        self.arrivals: list[tuple[int, int]] | None = None
        self.waits: dict[tuple[int, Key], tuple[str, float]] = {}
        """What is being waited for, and since when."""

    def put(self, step: int, edge: Key, array: Any) -> None:
        if step <= self._finished:
            return  # late for a step that is over
        self._arrays[step, edge] = (array, monotonic_ns())
        if step <= self._finished:  # just now
            self._arrays.pop((step, edge), None)
        self._tell()

    def take(self, step: int, edge: Key, what: str) -> Any:
        """The tensor of an edge; `what` describes it in errors.

        Raises:
            StepTimeout: it did not come before the deadline.
            GraphflowError: what the step was cancelled with.
        """
        key = (step, edge)
        if key not in self._arrays:
            self._await(key, what)
        array, arrived = self._arrays.pop(key)
        # Noted here, for it may come before its step begins.
        if self.arrivals is not None and isinstance(edge, int):
            self.arrivals.append((edge, arrived))
        return array

    def _await(self, key: tuple[int, Key], what: str) -> None:
        def over() -> bool:
            return key in self._arrays or (
                self._cancelled is not None and self._cancelled[0] >= key[0]
            )

        self.waits[key] = (what, monotonic())
        try:
            while not over():
                left = self.deadline - monotonic()
                if left <= 0:
                    raise StepTimeout(
                        f"step {key[0]}: {what} did not come before the deadline; "
                        "is that worker slow or stuck? give Session a longer deadline"
                    )
                if self._receives(over, left):
                    if self._waiting:  # another device's thread may go on receiving
                        self._notify()
                    continue
                with self._changed:
                    self._waiting += 1
                    try:
                        if not over():  # and whoever drives may be about to stop
                            self._changed.wait(min(left, _SLICE))
                    finally:
                        self._waiting -= 1
        finally:
            del self.waits[key]
        if key not in self._arrays:
            assert self._cancelled is not None
            raise self._cancelled[1]

    def _tell(self) -> None:
        if self._waiting:
            self._notify()
        if self._receiving - {get_ident()}:  # this is another device's thread, and no socket's
            self.wake()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _receives(self, over: Callable[[], bool], seconds: float) -> bool:
        """Whether this thread was the one that receives, until something was over."""
        if self.attend is None:
            return False
        self._receiving.add(get_ident())
        try:
            return self.attend(over, seconds)
        finally:
            self._receiving.discard(get_ident())

    def given_up(self, step: int) -> GraphflowError | None:
        """What a step was cancelled with, if it was."""
        if self._cancelled is not None and self._cancelled[0] >= step:
            return self._cancelled[1]
        return None

    def check(self, step: int, loop: str, done: int, of: str) -> None:
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
                f"step {step}: {loop} was in iteration {done}{of} when the step's deadline passed; "
                "does the loop end? bound it (max_iterations), or give Session a longer deadline"
            )

    def cancel(self, step: int, reason: GraphflowError) -> None:
        """Every wait of this and earlier steps ends with the error, now or when it begins."""
        with self._changed:
            if self._cancelled is None or step > self._cancelled[0]:
                self._cancelled = (step, reason)
        self._tell()

    def finish(self, step: int) -> None:
        """Drop what is left of a step that is over."""
        if step > self._finished:
            self._finished = step
        for key in list(self._arrays) if self._arrays else ():
            if key[0] <= step:
                self._arrays.pop(key, None)

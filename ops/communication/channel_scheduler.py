"""Runs functions beside each other in one process, one at a time, and hands tensors between them.

The reference interpreter and programs of one device run the parties of a `concurrent` node so. A
party runs until it has to wait for a tensor, or for room in a channel. Then the next party runs
that need not wait. This order is fixed, so it is the planned order of every `merge`. A test may
draw the order from a random generator instead (`random_order`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import numpy as np

from graphflow.errors import GraphError, OpError

MIN_AHEAD = 1
"""Tensors that every channel holds beside the one that its receiver reads. A party that sends more
may have to wait. Here it always does, so that a graph that runs here waits nowhere in a circle."""

_scheduler: ContextVar[ChannelScheduler | None] = ContextVar("scheduler", default=None)
_generator: ContextVar[np.random.Generator | None] = ContextVar("generator", default=None)


@contextmanager
def random_order(seed: int) -> Iterator[None]:
    """Draw from a seed which party runs next, and what each `merge` takes, in this context."""
    token = _generator.set(np.random.default_rng(seed))
    try:
        yield
    finally:
        _generator.reset(token)


def current_scheduler(op: str) -> ChannelScheduler:
    """Return the scheduler of the party that calls this.

    Raises:
        GraphError: the caller is no party.
    """
    found = _scheduler.get()
    if found is None:
        raise GraphError(f"{op} is outside of a concurrent node: it has no other end")
    return found


class _Stopped(BaseException):
    """Ends a party because another one failed."""


class ChannelScheduler:
    """The channels of one run of a `concurrent` node, and whose turn it is.

    Args:
        count: number of parties.
    """

    def __init__(self, count: int) -> None:
        self._wakeups = [threading.Semaphore(0) for _ in range(count)]
        self._waits: dict[int, tuple[Callable[[], bool], str]] = {}
        self._running = list(range(count))
        self._current = 0
        self._queues: dict[int, deque[Any]] = {}
        self._last: dict[tuple[int, ...], int] = {}
        self._error: BaseException | None = None
        self._draw = _generator.get()

    def run(self, parties: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the parties; return what each returns.

        Raises:
            OpError: all parties that still run wait for each other.
            BaseException: the error of the first party that failed.
        """
        results: list[Any] = [None] * len(parties)

        def run_party(i: int) -> None:
            _scheduler.set(self)
            self._wakeups[i].acquire()
            try:
                if self._error is None:
                    results[i] = parties[i]()
            except _Stopped:
                pass
            except BaseException as error:
                self._error = self._error or error
            self._running.remove(i)
            self._pass_on()

        threads = [
            threading.Thread(target=copy_context().run, args=(run_party, i), daemon=True)
            for i in range(len(parties))
        ]
        for thread in threads:
            thread.start()
        self._wakeups[0].release()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: the parties end at their next send or receive
            self._error = self._error or error
            for thread in threads:
                thread.join()
            raise
        if self._error is not None:
            raise self._error
        return results

    def send(self, channel: int, array: Any) -> None:
        """Append a tensor to a channel, once it has room."""
        queue = self._queues.setdefault(channel, deque())
        self._wait(lambda: len(queue) < MIN_AHEAD, f"room in channel {channel}")
        queue.append(array)

    def receive(self, channels: Sequence[int], wanted: int = -1) -> tuple[int, Any]:
        """Take the next tensor of one of some channels.

        Args:
            wanted: index of the channel; -1 for any.

        Returns:
            The index of the channel, and the tensor.
        """
        queues = [self._queues.setdefault(channel, deque()) for channel in channels]
        able = range(len(queues)) if wanted < 0 else (wanted,)
        self._wait(
            lambda: any(queues[i] for i in able),
            f"a tensor of {' or '.join(f'channel {channels[i]}' for i in able)}",
        )
        ready = [i for i in able if queues[i]]
        key = tuple(channels)
        if self._draw is not None:
            chosen = int(self._draw.choice(ready))
        else:
            last = self._last.get(key, -1)
            chosen = min(ready, key=lambda i: (i <= last, i))
        if wanted < 0:
            self._last[key] = chosen
        return chosen, queues[chosen].popleft()

    def _wait(self, is_ready: Callable[[], bool], what: str) -> None:
        """Let other parties run until this one need not wait."""
        me = self._current
        if self._error is None and self._draw is None and is_ready():
            return
        self._waits[me] = (is_ready, what)
        self._pass_on()
        self._wakeups[me].acquire()
        del self._waits[me]
        if self._error is not None:
            raise _Stopped

    def _pass_on(self) -> None:
        """Let the next party run that need not wait."""
        if not self._running:
            return
        turns = sorted(self._running, key=lambda i: (i <= self._current, i))
        ready = [i for i in turns if i not in self._waits or self._waits[i][0]()]
        if not ready and self._error is None:
            waits = "; ".join(f"party {i} waits for {self._waits[i][1]}" for i in sorted(turns))
            self._error = OpError(
                f"the parties wait in a circle: {waits}; let each tensor that is received be "
                "sent, and send at most one tensor ahead"
            )
        if self._error is not None:
            ready = turns  # they stop
        self._current = ready[0] if self._draw is None else int(self._draw.choice(ready))
        self._wakeups[self._current].release()

"""Pauses of the garbage collector while large graphs are built.

A graph has many long-lived nodes and tensors and no garbage cycles. Repeated collections took a
third of the time from building a large graph to its first step.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _PauseState:
    """The number of open pauses, and whether the collector was on before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks = 0
        self.was_on = False


_collector = _PauseState()


class gc_paused:
    """Context manager that disables cycle collection in all threads.

    Pauses may nest: the last one that ends restores the collector. Reference counting goes on.
    """

    def __enter__(self) -> None:
        with _collector.lock:
            if not _collector.blocks:
                _collector.was_on = gc.isenabled()
                gc.disable()
            _collector.blocks += 1

    def __exit__(self, *raised: object) -> None:
        with _collector.lock:
            _collector.blocks -= 1
            if not _collector.blocks and _collector.was_on:
                gc.enable()


def without_collection(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function inside `gc_paused`."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with gc_paused():
            return function(*args, **kwargs)

    return wrapper

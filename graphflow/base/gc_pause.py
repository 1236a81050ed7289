"""The garbage collector rests while graphs grow.

Nodes, tensors and their tables are many, live long and form no garbage: looking through them again
and again took a third of the time of a large graph's way to its first step.
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
    """How many blocks keep the collector off, and whether it was on before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks = 0
        self.was_on = False


_collector = _PauseState()


class gc_paused:
    """No cycle collection in the block, in any thread; blocks nest, and the last one that ends
    leaves the collector as the first one found it. Reference counting goes on."""

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
    """A function that runs `uncollected`."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with gc_paused():
            return function(*args, **kwargs)

    return wrapper

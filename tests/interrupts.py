"""Ctrl-C for tests: it comes inside the function under test, and never after it."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest


def interrupt_after(act: Callable[[], object], seconds: float) -> float:
    """Send Ctrl-C some seconds after `act` began, which must end it; return the seconds it took.

    The signal always arrives inside this function: between two lines of a test it would end the
    whole run.
    """
    main = threading.main_thread().ident or 0
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT))
    ended, began = False, time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            act()
            ended = True
            timer.join()
    finally:
        timer.cancel()
        timer.join()
    assert not ended, f"it ended by itself, before {seconds:g} s were over"
    return time.monotonic() - began


def interrupt_at(count: int, is_meant: Callable[[CodeType], bool]) -> Any:
    """Return a tracer that raises Ctrl-C at the `count`th line of the code that `is_meant`
    selects."""
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not is_meant(frame.f_code):
            return None
        if event == "line" and next(lines) == count:
            signal.raise_signal(signal.SIGINT)
        return trace

    return trace

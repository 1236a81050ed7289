"""Interrupts: what signal handlers of this program raise, Ctrl-C among it.

A handler runs on the main thread between any two lines, and may raise. `HeldBack` lets no handler
run in moments in which nothing may be raised; `is_interrupt` tells what a handler raised from what
this package or an op did.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # faster than `signal`
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

_FAULTS = {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGFPE", "SIGILL", "SIGBUS", "SIGABRT", "SIGTRAP"}
_NUMBERS = tuple(
    number.value
    for number in signal.Signals
    if not (number.name in _FAULTS or number.name.startswith("SIGRT"))
)
"""The signals whose handlers are held back: neither those of faults, nor real-time signals, to look
at all of which would make a step longer."""


class HeldBack:
    """A signal's handler that notes it, for a moment in which nothing may be raised.

    Args:
        told: is called when one comes.

    Attributes:
        came: the numbers of the signals.
    """

    def __init__(self, told: Callable[[], None] | None = None) -> None:
        self.came: list[int] = []
        self._told = told

    def __call__(self, number: int, frame: object) -> None:
        self.came.append(number)
        if self._told is not None:
            self._told()

    def hold(self) -> list[tuple[int, Any]]:
        """Stand in for all handlers that are Python functions: the handlers, for `restore`."""
        get, found = _signal.getsignal, list[tuple[int, Any]]()
        try:
            for number in _NUMBERS:
                handler = get(number)
                if callable(handler) and not isinstance(handler, HeldBack):
                    found.append((number, handler))
                    _signal.signal(number, self)
        except BaseException:  # raised by a handler that has not been replaced yet
            self.restore(found)
            raise
        return found

    def restore(self, handlers: list[tuple[int, Any]]) -> None:
        """Give signals their handlers back; then those run whose signals came."""
        try:
            while handlers:
                number, handler = handlers[-1]
                if _signal.getsignal(number) is self:
                    _signal.signal(number, handler)
                handlers.pop()
        finally:
            if handlers:  # a handler that is back has raised already
                self.restore(handlers)
        self.release()

    def release(self) -> None:
        """Raise the signals that came again: their handlers are what they were before."""
        try:
            while self.came:
                signal.raise_signal(self.came.pop(0))
        finally:
            if self.came:
                self.release()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold signals' handlers back until the block is done, so that a commit is never half done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = HeldBack()
    before = held.hold()
    try:
        yield
    finally:
        held.restore(before)


def is_interrupt(error: BaseException) -> bool:
    """Return True if a signal's handler raised the error, as Ctrl-C's does."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if not isinstance(error, Exception):
        return True  # nothing else raises what ends programs here
    codes = {code for n in _NUMBERS if (code := _code_of(_signal.getsignal(n))) is not None}
    trace = error.__traceback__ if codes else None
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def interrupt_behind(error: BaseException, outer: BaseException | None) -> BaseException | None:
    """Return what a signal's handler raised if it became `error`, as a TimeoutError does where
    errors of the disk are told; `outer` was being handled before."""
    behind = error.__cause__ or error.__context__
    while behind is not None and behind is not outer:
        if is_interrupt(behind):
            return behind
        behind = behind.__cause__ or behind.__context__
    return None


def _code_of(handler: Any) -> CodeType | None:
    """The code that a handler runs first, if it is Python's."""
    while isinstance(handler, partial):
        handler = handler.func
    if not isinstance(handler, FunctionType | MethodType):  # an object that can be called
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None

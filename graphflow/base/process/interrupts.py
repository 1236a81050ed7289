"""Interrupts: exceptions that signal handlers raise, such as KeyboardInterrupt of Ctrl-C.

Python runs a handler on the main thread between any two bytecodes, and the handler may raise there.

- `defer_signals` holds handlers back during a block that must not be cut in half.
- `passing_interrupts` carries an exception of a handler out of a call, past every `except` inside.
- `is_interrupt` tells an exception of a handler from one of this package or of an op.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # faster than `signal`
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any, Self, TypeVar, cast

from graphflow.base.source_location import is_own

F = TypeVar("F", bound=Callable[..., Any])

_FAULTS = {"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGFPE", "SIGILL", "SIGBUS", "SIGABRT", "SIGTRAP"}
_NUMBERS = tuple(
    number.value
    for number in signal.Signals
    if not (number.name in _FAULTS or number.name.startswith("SIGRT"))
)
"""Signals whose handlers are deferred.

Faults are left out. So are real-time signals: looking at all of them would slow down each step.
"""
_LIBRARIES = {
    "cupy", "graphflow", "highspy", "llvmlite", "ml_dtypes", "msgpack", "networkx",
    "numpy", "onnx", "opt_einsum", "rich", "safetensors", "scipy", "threadpoolctl", "typer",
    "xxhash", "zmq",
}  # fmt: skip
"""Packages whose functions do not call the user's code while this package calls them."""


class DeferredSignals:
    """Signal handler that records a signal and raises nothing.

    Args:
        on_signal: called when a signal comes.

    Attributes:
        received: numbers of the signals that came.
    """

    def __init__(self, on_signal: Callable[[], None] | None = None) -> None:
        self.received: list[int] = []
        self._on_signal = on_signal

    def __call__(self, number: int, frame: object) -> None:
        self.received.append(number)
        if self._on_signal is not None:
            self._on_signal()

    def hold(self) -> list[tuple[int, Any]]:
        """Replace every handler that is a Python function, and return the handlers for
        `restore`."""
        get, found = _signal.getsignal, list[tuple[int, Any]]()
        try:
            for number in _NUMBERS:
                handler = get(number)
                if callable(handler) and not isinstance(handler, DeferredSignals):
                    found.append((number, handler))
                    _signal.signal(number, self)
        except BaseException:  # from a handler that has not been replaced yet
            self.restore(found)
            raise
        return found

    def restore(self, handlers: list[tuple[int, Any]]) -> None:
        """Put handlers back, then raise the received signals again for them."""
        try:
            while handlers:
                number, handler = handlers[-1]
                if _signal.getsignal(number) is self:
                    _signal.signal(number, handler)
                handlers.pop()
        finally:
            if handlers:  # a restored handler has raised
                self.restore(handlers)
        self.release()

    def release(self) -> None:
        """Raise the received signals again, for the handlers that are installed now."""
        try:
            while self.received:
                signal.raise_signal(self.received.pop(0))
        finally:
            if self.received:
                self.release()


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer signal handlers to the end of the block, so that it is never half done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = DeferredSignals()
    before = held.hold()
    try:
        yield
    finally:
        held.restore(before)


class Interrupt(BaseException):
    """A handler's exception on its way out of a block of `passing_interrupts`.

    It derives from BaseException, so `except Exception` inside the block lets it pass, as it does
    KeyboardInterrupt.

    Attributes:
        error: the handler's exception.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class passing_interrupts:
    """Context manager that lets exceptions of signal handlers leave the block unchanged.

    Neither `except` clauses inside the block nor errors of its clean-up replace them. A function of
    the user's that the block calls sees the handler's own exception.
    """

    def __enter__(self) -> Self:
        self._passed: list[_ForwardingHandler] = []
        if threading.current_thread() is threading.main_thread():
            get = _signal.getsignal
            try:
                for number in _NUMBERS:
                    handler = get(number)
                    if handler.__class__ is not int:  # neither SIG_DFL nor SIG_IGN
                        self._pass(number, handler, sys._getframe(1))
            except BaseException:
                self._restore()
                raise
        return self

    def _pass(self, number: int, handler: Any, block: FrameType) -> None:
        if isinstance(handler, _ForwardingHandler) and not _is_on_stack(block, handler.block):
            handler = handler.handler  # left there by a signal at the end of that block
        if _may_raise(handler):
            self._passed.append(_ForwardingHandler(number, handler, block))
            _signal.signal(number, self._passed[-1])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        raised = next((each.raised for each in self._passed if each.raised is not None), None)
        self._restore()
        if raised is not None:
            _raise_bare(raised)

    def _restore(self) -> None:
        try:
            while self._passed:
                passed = self._passed[-1]
                if _signal.getsignal(passed.number) is passed:
                    _signal.signal(passed.number, passed.handler)
                self._passed.pop()
        finally:
            if self._passed:  # a restored handler has raised
                self._restore()


def passes_interrupts(public: F) -> F:
    """Run a function inside `passing_interrupts`."""

    @wraps(public)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with passing_interrupts():
            return public(*args, **kwargs)

    return cast(F, wrapper)


class _ForwardingHandler:
    """Stands in for a user's handler while a block runs; `block` is the frame of the block."""

    def __init__(self, number: int, handler: Callable[..., Any], block: FrameType) -> None:
        self.number, self.handler, self.block = number, handler, block
        self.raised: Interrupt | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except BaseException as error:
            if _is_in_users_code(frame, self.block):
                raise
            self.raised = Interrupt(error)
            raise self.raised from None


def _may_raise(handler: Any) -> bool:
    """Return True if a handler may raise something other than KeyboardInterrupt.

    Handlers of this package never do.
    """
    if handler is _signal.default_int_handler or not callable(handler):
        return False
    return not str(getattr(handler, "__module__", "")).startswith("graphflow.")


def _is_in_users_code(frame: FrameType | None, block: FrameType) -> bool:
    """Return True if the block has called a function of the user's that is on the stack of `frame`.

    Also True if the block has ended or is about to begin.
    """
    while frame is not block:
        if frame is None or frame.f_code in _EDGES:
            return True
        if not is_own(frame.f_code.co_filename, frame.f_globals):
            module = str(frame.f_globals.get("__name__", "graphflow")).partition(".")[0]
            if module not in sys.stdlib_module_names and module not in _LIBRARIES:
                return True
        frame = frame.f_back
    return False


_EDGES = {
    each.__code__
    for each in (
        passing_interrupts.__enter__,
        passing_interrupts.__exit__,
        passing_interrupts._restore,
    )
}


def _is_on_stack(frame: FrameType | None, sought: FrameType) -> bool:
    """Return True if `sought` is `frame` or one of its callers."""
    while frame is not None and frame is not sought:
        frame = frame.f_back
    return frame is not None


def _raise_bare(raised: Interrupt) -> None:
    """Raise a handler's exception with the traceback and context that it has without this
    module."""
    error, end = raised.error, raised.__traceback__
    context = error.__context__
    while end is not None and end.tb_next is not None:
        end = end.tb_next
    if end is not None and error.__traceback__ is not None:
        end.tb_next = error.__traceback__.tb_next
    try:
        raise error.with_traceback(raised.__traceback__)
    finally:
        error.__context__ = context


def is_interrupt(error: BaseException) -> bool:
    """Return True if a signal handler raised the error, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if not isinstance(error, Exception):
        return True  # only handlers raise KeyboardInterrupt or SystemExit here
    return _signal_of(error) is not None


def resend_signal(error: BaseException, seconds: float) -> bool:
    """Raise a handler's signal again after some seconds, for an error that nobody would see.

    Return False if no handler raised the error.
    """
    number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else _signal_of(error)
    if number is None:
        return False
    main = threading.main_thread().ident or 0
    threading.Timer(seconds, signal.pthread_kill, (main, number)).start()
    return True


def _signal_of(error: BaseException) -> int | None:
    """Return the number of the signal whose handler is in an error's traceback."""
    codes = {
        code: number
        for number in _NUMBERS
        if (code := _code_of(_signal.getsignal(number))) is not None
    }
    trace = error.__traceback__ if codes else None
    while trace is not None:
        if (number := codes.get(trace.tb_frame.f_code)) is not None:
            return number
        trace = trace.tb_next
    return None


def _code_of(handler: Any) -> CodeType | None:
    """Return the code that a handler runs first, if it is written in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    if not isinstance(handler, FunctionType | MethodType):  # an object that can be called
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None

"""At SIGTERM a session finishes its step, writes a checkpoint and ends the process.

Python runs the handler on the main thread between two bytecodes. The main thread may be inside a
step, or hold a lock (of a future, the log, or the user's) that a step on another thread needs. So
the handler waits for nothing:

- A thread that is inside a call of the session checks at the end of the call whether SIGTERM came.
- A thread of its own closes the session when no call runs. It then sends the main thread SIGTERM
  once more, which ends the process wherever the main thread is.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakMethod

from graphflow.base.process.interrupts import DeferredSignals

GRACE_SECONDS = 10.0
"""Seconds in which further SIGTERMs are ignored while the process ends.

Schedulers send the signal to the process and to its group, and a second one must not cut the end
short.
"""

_handler_lock = threading.RLock()
"""Held while the main thread is signalled and while handlers are restored.

Without the lock, the signal could reach a default handler and kill the process.
"""


class SigtermHandler:
    """Handles SIGTERM while a session is open that was opened on the main thread.

    A handler of the user's own is left alone. Several sessions close one after the other, the last
    one first. A session that is still being opened has nothing to write: it stops waiting for
    workers, and its opening ends with SystemExit.

    Args:
        lock: held while the session works.
        leave: bound method that writes a checkpoint, closes the session and raises SystemExit.
            Only a weak reference is kept, so a forgotten session is freed with its workers.

    Attributes:
        asked: True once SIGTERM came.
    """

    def __init__(self, lock: Any, leave: Callable[[], None]) -> None:
        self.asked = False
        self._opening = True
        self._lock = lock
        self._leave = WeakMethod(leave)
        self._process = os.getpid()
        self._outcome: BaseException | None = None  # with which leaving ended
        self._before: Any = None
        self._installed = self._ended = False
        if threading.current_thread() is not threading.main_thread():
            return
        before = _skip_closed_sessions(signal.getsignal(signal.SIGTERM))
        if _is_free(before) or _handler_of(before) is not None:
            signal.signal(signal.SIGTERM, self._handle)
            self._before, self._installed = before, True

    def _handle(self, number: int, frame: object) -> None:
        if os.getpid() != self._process:  # a fork of the user's: it ends by the signal as usual
            _end_at_once()
            return
        every = self._all_handlers()
        if all(each._was_over_before for each in every):
            before = _skip_closed_sessions(self._before)
            if callable(before):
                before(number, frame)
            else:
                _end_at_once()
            return
        if self._opening:
            held = signal.getsignal(signal.SIGINT)
            if isinstance(held, DeferredSignals):
                held(number, frame)  # the deferred signal is raised again in a moment
                return
            self._leave_session()
        if all(each._outcome is not None for each in every):
            self._end_process()
        if self.asked:
            return  # a thread is closing the sessions already
        for each in every:
            each.asked = True
        _thread.start_new_thread(self._start_leaving, ())

    def finish_opening(self) -> None:
        """Note that the session is open, so that there is a state to save.

        Raises:
            SystemExit: SIGTERM came while it was being opened.
        """
        self._opening = False
        if self._outcome is not None:
            raise self._outcome

    def raise_if_draining(self) -> None:
        """At the end of a call: leave if SIGTERM came during it.

        Raises:
            SystemExit: with status 0; on another thread than the main one it ends that thread.
            CheckpointError: the last checkpoint could not be written.
        """
        if not self.asked:
            return
        if threading.current_thread() is threading.main_thread():
            self._end_process()
        outcome = self._leave_session()
        _thread.start_new_thread(self._start_leaving, ())
        raise outcome

    def _leave_session(self) -> BaseException:
        """Close the session unless that was done, and return the exception to end with."""
        if self._opening:
            self._outcome = self._outcome or SystemExit(0)
        if self._outcome is None:
            with self._lock:
                if self._outcome is None:
                    leave = self._leave()
                    try:
                        if leave is not None:
                            leave()
                        self._outcome = SystemExit(0)
                    except BaseException as error:
                        self._outcome = error
        return self._outcome

    def _start_leaving(self) -> None:
        """Start the thread that closes the sessions.

        Called on a raw thread: `Thread.start` waits, which the handler must not. A raw thread that
        asks for its Thread object would leave a dummy one behind.
        """
        threading.Thread(target=self._leave_on_thread, name="graphflow-drain", daemon=True).start()

    def _leave_on_thread(self) -> None:
        """Close all sessions, then signal the main thread to end the process."""
        for each in self._all_handlers():
            each._leave_session()
        with _handler_lock:
            found = signal.getsignal(signal.SIGTERM)
            # The main thread may hold handlers back while it waits; ours is called after that.
            if isinstance(found, DeferredSignals) or _handler_of(found) is not None:
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGTERM)

    def _end_process(self) -> NoReturn:
        """Close all sessions that are not closed yet, and raise SystemExit on the main thread."""
        every = self._all_handlers()
        ending = _EndingHandler()
        if _is_free(every[-1]._before):
            every[-1]._before = ending  # leaving a session restores this handler
        outcomes = [each._leave_session() for each in every]
        for each in every:
            each.end()
        ending.until = time.monotonic() + GRACE_SECONDS
        raise next((each for each in outcomes if not isinstance(each, SystemExit)), outcomes[0])

    def _all_handlers(self) -> list[SigtermHandler]:
        """Return the handlers of all open sessions, the last one opened first."""
        found = []
        each: SigtermHandler | None = _handler_of(signal.getsignal(signal.SIGTERM)) or self
        while each is not None:
            found.append(each)
            each = _handler_of(each._before)
        return found if self in found else [self, *found]

    @property
    def _is_over(self) -> bool:
        """True if the session was closed or freed."""
        return self._ended or self._leave() is None

    @property
    def _was_over_before(self) -> bool:
        """True if the session was closed or freed before any SIGTERM came."""
        return self._is_over and self._outcome is None

    def end(self) -> None:
        """Restore the previous handler, skipping sessions that are over.

        If SIGTERM came and the session has not left yet, the handler stays, and leaving ends it.
        """
        if self.asked and self._outcome is None:
            return
        self._ended = True
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            with _handler_lock:
                there = before = signal.getsignal(signal.SIGTERM)
                while (drain := _handler_of(before)) is not None and drain._is_over:
                    before = drain._before
                if before != there:
                    signal.signal(signal.SIGTERM, before)


class _EndingHandler:
    """Ignores further SIGTERMs for `GRACE_SECONDS` while the process ends."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.until = time.monotonic() + GRACE_SECONDS

    def __call__(self, number: int, frame: object) -> None:
        if os.getpid() != self._process or time.monotonic() > self.until:
            _end_at_once()


def _ignore_at_exit() -> None:
    """Ignore SIGTERM during Python's shutdown.

    Python removes handlers before modules, and the rest of the shutdown takes most of its time.
    """
    ending = signal.getsignal(signal.SIGTERM)
    if isinstance(ending, _EndingHandler) and time.monotonic() < ending.until:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


atexit.register(_ignore_at_exit)


def _skip_closed_sessions(handler: Any) -> Any:
    """Return the handler below those of sessions that are over."""
    while (drain := _handler_of(handler)) is not None and drain._was_over_before:
        handler = drain._before
    return handler


def _is_free(handler: Any) -> bool:
    """Return True if no program handles the signal: the default, or an ending process."""
    return handler == signal.SIG_DFL or isinstance(handler, _EndingHandler)


def _end_at_once() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


def _handler_of(handler: Any) -> SigtermHandler | None:
    """Return the SigtermHandler behind a handler; None if it is another's."""
    found = getattr(handler, "__self__", None)
    return found if isinstance(found, SigtermHandler) else None

"""Draining: at SIGTERM a session finishes its step, writes a checkpoint and ends the process.

The handler is Python's, so it runs on the main thread, between two bytecodes: perhaps in the midst
of a step, or while the thread holds a lock of a future, of the log or of the user's own that a step
on another thread waits for. So it waits for nothing: whoever is at something asks at its end, and a
thread of its own leaves the session when nobody is at anything. The main thread, wherever it is
then, is told by the same signal once more, and ends the process.
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

from graphflow.base.interrupts import DeferredSignals

GRACE_SECONDS = 10.0
"""Seconds for a process that has left its sessions to end: the same signal, which schedulers send
to a process and to its group, ends nothing halfway meanwhile."""

_handler_lock = threading.RLock()
"""Held while the main thread is told, and while handlers are put back: else the telling ends it."""


class SigtermHandler:
    """What happens at SIGTERM, while a session is open that was opened on the main thread.

    A handler of the user's own is left alone. Several sessions leave one after the other, the last
    one first. One that is still being opened has nothing to write: it waits for no worker any more,
    and its opening ends by SystemExit.

    Args:
        lock: held while the session works.
        leave: a method that writes a checkpoint, closes the session and raises SystemExit. It is
            not kept: a session that is forgotten goes, with its workers, and the signal no longer
            concerns it.

    Attributes:
        asked: whether SIGTERM came.
    """

    def __init__(self, lock: Any, leave: Callable[[], None]) -> None:
        self.asked = False
        self._opening = True
        self._lock = lock
        self._leave = WeakMethod(leave)
        self._process = os.getpid()
        self._outcome: BaseException | None = None  # of leaving
        self._before: Any = None
        self._installed = self._ended = False
        if threading.current_thread() is not threading.main_thread():
            return
        before = _skip_closed_sessions(signal.getsignal(signal.SIGTERM))
        if _is_free(before) or _handler_of(before) is not None:
            signal.signal(signal.SIGTERM, self._handle)
            self._before, self._installed = before, True

    def _handle(self, number: int, frame: object) -> None:
        if os.getpid() != self._process:  # a fork of the user's, which ends as it would have
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
                held(number, frame)  # it comes again in a moment
                return
            self._leave_session()
        if all(each._outcome is not None for each in every):
            self._end_process()
        if self.asked:
            return  # it is being done
        for each in every:
            each.asked = True
        _thread.start_new_thread(self._start_leaving, ())

    def finish_opening(self) -> None:
        """The session is open: from now on there is something to leave.

        Raises:
            SystemExit: SIGTERM came meanwhile.
        """
        self._opening = False
        if self._outcome is not None:
            raise self._outcome

    def raise_if_draining(self) -> None:
        """At the end of what the session did: go, if SIGTERM came meanwhile.

        Raises:
            SystemExit: with status 0; on another thread it ends that one.
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
        """Leaves the session, unless that was done; what that came to."""
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
        """Starts a thread for it, on one that may wait for that; Python would never forget one
        that was not started so, if it is asked which it is."""
        threading.Thread(target=self._leave_on_thread, name="graphflow-drain", daemon=True).start()

    def _leave_on_thread(self) -> None:
        for each in self._all_handlers():
            each._leave_session()
        with _handler_lock:
            if _handler_of(signal.getsignal(signal.SIGTERM)) is not None:
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGTERM)

    def _end_process(self) -> NoReturn:
        """Leaves all sessions, for the main thread; nothing waits where that was done already."""
        every = self._all_handlers()
        ending = _EndingHandler()
        if _is_free(every[-1]._before):
            every[-1]._before = ending  # leaving a session here puts it back
        outcomes = [each._leave_session() for each in every]
        for each in every:
            each.end()
        ending.until = time.monotonic() + GRACE_SECONDS
        raise next((each for each in outcomes if not isinstance(each, SystemExit)), outcomes[0])

    def _all_handlers(self) -> list[SigtermHandler]:
        """What SIGTERM concerns: the session that was opened last, and those before it."""
        found = []
        each: SigtermHandler | None = _handler_of(signal.getsignal(signal.SIGTERM)) or self
        while each is not None:
            found.append(each)
            each = _handler_of(each._before)
        return found if self in found else [self, *found]

    @property
    def _is_over(self) -> bool:
        """Whether the session was closed, or forgotten."""
        return self._ended or self._leave() is None

    @property
    def _was_over_before(self) -> bool:
        """Whether that was so before any signal came, which is none of its business then."""
        return self._is_over and self._outcome is None

    def end(self) -> None:
        """Put back what was there, before sessions that are over, too; not while SIGTERM is yet to
        be heeded, which then does so."""
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
    """Hears SIGTERM once more, while the process ends because of it."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.until = time.monotonic() + GRACE_SECONDS

    def __call__(self, number: int, frame: object) -> None:
        if os.getpid() != self._process or time.monotonic() > self.until:
            _end_at_once()


def _ignore_at_exit() -> None:
    """Python puts handlers away before modules, which takes most of the time that it ends in."""
    ending = signal.getsignal(signal.SIGTERM)
    if isinstance(ending, _EndingHandler) and time.monotonic() < ending.until:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


atexit.register(_ignore_at_exit)


def _skip_closed_sessions(handler: Any) -> Any:
    """What hears the signal, without sessions that it is no business of any more."""
    while (drain := _handler_of(handler)) is not None and drain._was_over_before:
        handler = drain._before
    return handler


def _is_free(handler: Any) -> bool:
    """Whether nobody does anything about the signal."""
    return handler == signal.SIG_DFL or isinstance(handler, _EndingHandler)


def _end_at_once() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


def _handler_of(handler: Any) -> SigtermHandler | None:
    """Whose handler of the signal this is, if it is one of ours."""
    found = getattr(handler, "__self__", None)
    return found if isinstance(found, SigtermHandler) else None

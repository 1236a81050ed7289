"""Progress of slow work, shown on a terminal and nowhere else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

SILENT = 1.0
"""Seconds that work may take before it is shown."""
LARGE = 500
"""Nodes from which work may take that long; for smaller graphs not even a timer starts."""


class show_progress:
    """Context manager that shows a line on the terminal after `SILENT` seconds.

    It shows nothing if standard error is no terminal, or if the graph is small. Inside the block of
    another one, it is a stage of that one's line.

    Args:
        what: the work, such as "placing".
        nodes: number of nodes of the graph; None if the work does not depend on a graph.
        where: the end of the text, such as "on 8 devices".
    """

    def __init__(self, what: str, nodes: int | None = None, where: str = "") -> None:
        text = what if nodes is None else f"{what} {nodes:,} nodes"
        self._text = f"{text} {where}" if where else text
        self._stage: tuple[str, int, int] = ("", 0, 0)
        self._timer: threading.Timer | None = None
        self._status: Any = None
        self._lock = threading.Lock()
        self._outer = _active.get()
        self._outer_stage = self._stage
        if self._outer is None and (nodes is None or nodes >= LARGE) and _is_terminal():
            self._timer = threading.Timer(SILENT, self._show)
            self._timer.daemon = True

    def __enter__(self) -> None:
        if self._outer is not None:
            self._outer_stage = self._outer._stage
            self._outer.set_stage(self._text)
        if self._timer is not None:
            try:
                _active.set(self)
                self._timer.start()
            except BaseException:  # an interrupt: the block does not begin
                self.__exit__()
                raise

    def __exit__(self, *raised: object) -> None:
        if self._outer is not None:
            self._outer.set_stage(*self._outer_stage)
        if self._timer is None:
            return
        _active.set(None)
        self._timer.cancel()
        with self._lock:
            self._timer = None
            if self._status is not None:
                self._status.stop()

    def set_stage(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Name what the work is doing now, and how far that is."""
        self._stage = (stage, done, total)

    def __str__(self) -> str:
        stage, done, total = self._stage
        if not stage:
            return self._text
        count = f", {done:,} of {total:,}" if total else f", {done:,}" if done else ""
        return f"{self._text}: {stage}{count}"

    def __rich__(self) -> Any:
        """Return the line as it is now; the terminal asks for it several times a second."""
        from rich.text import Text

        return Text(str(self))

    def _show(self) -> None:
        from rich.console import Console

        with self._lock:
            if self._timer is not None:
                self._status = Console(stderr=True).status(self)
                self._status.start()


_active: ContextVar[show_progress | None] = ContextVar("active", default=None)


def show_stage(stage: str, done: int = 0, total: int = 0) -> None:
    """Name the stage of the work whose progress this thread shows, if it shows any.

    Args:
        stage: such as "trial steps".
        done, total: how many are done, and of how many; 0 if that is unknown.
    """
    shown = _active.get()
    if shown is not None:
        shown.set_stage(stage, done, total)


class show_wait:
    """Context manager that reports once a second what the block still waits for, after `SILENT`
    seconds.

    The report goes to the terminal, if there is one, and to `hears`.

    Args:
        describe: says what is waited for, given the seconds so far; called on another thread.
        hears: called with the seconds so far.
    """

    def __init__(self, describe: Callable[[float], str], hears: Callable[[float], None]) -> None:
        self._describe = describe
        self._hears = hears
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> None:
        try:
            self._thread.start()
        except BaseException:  # an interrupt: the block does not begin
            self._over.set()
            raise

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        started = time.monotonic()
        if self._over.wait(SILENT):
            return
        status: Any = None
        if _is_terminal():
            from rich.console import Console
            from rich.text import Text

            status = Console(stderr=True).status("")
            status.start()
        try:
            while True:
                seconds = time.monotonic() - started
                self._hears(seconds)
                if status is not None:
                    status.update(Text(self._describe(seconds)))
                if self._over.wait(1.0):
                    return
        finally:
            if status is not None:
                status.stop()


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()

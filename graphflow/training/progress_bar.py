"""The bar of a training: epoch, steps per second, time left and loss, on a terminal; lines
elsewhere.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from graphflow.training.training_history import show_epoch

INTERVAL = 0.1
"""Seconds between two drawings."""


class ProgressBar:
    """A bar on standard error if that is a terminal; else a line for each epoch.

    Args:
        total: number of steps; None: unknown.
        done: steps that were done before.
        shown: False: nothing is written.
    """

    def __init__(self, total: int | None, done: int, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None
        self._task: Any = None
        self._next = 0.0
        self._first = done
        self._last = done, 0, math.nan
        self._began = time.monotonic()
        if shown and sys.stderr is not None and sys.stderr.isatty():
            self._open(total, done)

    def _open(self, total: int | None, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("epoch {task.fields[epoch]}"), BarColumn(),
            TextColumn("{task.completed:,}/{task.total:,}" if total else "{task.completed:,}"),
            TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]}"),
        )  # fmt: skip
        self._bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
        self._task = self._bar.add_task("", total=total, completed=done, epoch=1, loss="", rate="")
        self._bar.start()

    @property
    def is_drawn(self) -> bool:
        """True on a terminal."""
        return self._bar is not None

    def show_step(self, step: int, epoch: int, loss: float) -> None:
        """Draw a step, if the last drawing is long enough ago."""
        self._last = step, epoch, loss
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + INTERVAL
        self._draw(now)

    def _draw(self, now: float) -> None:
        step, epoch, loss = self._last
        rate = (step - self._first) / max(now - self._began, 1e-9)
        self._bar.update(
            self._task, completed=step, epoch=epoch + 1, loss=f"{loss:.4g}",
            rate=f"{rate:,.0f} steps/s" if rate >= 10 else f"{rate:.2g} steps/s",
        )  # fmt: skip
        self._bar.refresh()

    def show_epoch(self, row: dict[str, float]) -> None:
        """Write the line of an epoch."""
        if self._bar is not None:
            self._bar.console.print(show_epoch(row), markup=False, highlight=False)
            self._draw(time.monotonic())
        elif self._shown and sys.stderr is not None:
            print(show_epoch(row), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            if self._last[0] > self._first:
                self._draw(time.monotonic())
            self._bar.stop()
            self._bar = None

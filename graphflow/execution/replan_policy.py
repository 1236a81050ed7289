"""The policy of replan="auto": when to look for a better placement, and what replanning achieved.

The session traces short windows of steps at ever longer distances. It plans again only if a window
drifted from the prediction, and changes the placement only for a gain of a tenth. So placements
settle, and the overhead tends to zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.base.formatting import show_bytes, show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError

GAIN = 0.1
"""Least share of a step that an automatic change of the placement must save."""
DRIFT = 0.1
"""Least relative difference between traced and predicted time that counts as drift."""
SEEN = 3
"""Untraced steps before a window that must have drifted."""
WINDOW = 6
"""Steps traced in a row; the first one warms up."""
FIRST = 10
"""Steps of a set of fetches before its first window. Each further window begins at twice the
number."""


@dataclass(frozen=True)
class Replanned:
    """The result of planning again.

    Args:
        moved: names of the variables that moved to another device.
        before: predicted seconds of a step with the old placement, by what is known now.
        after: predicted seconds of a step with the present placement. With several sets of
            fetches, both are means over the steps that ran.
        no_gain: says that several devices need not be faster than one, if so: of the fetches that
            take most time; or that the placement predicted to be faster was slower when tried.
        measured_before: measured seconds of a step with the old placement, as the mean over the
            sets of fetches that were timed; None if too few steps ran outside traces. How long
            steps take with a new placement shows later: see `Plan.report`.
    """

    moved: tuple[str, ...]
    before: float
    after: float
    no_gain: str = ""
    measured_before: float | None = None
    ranges: int = 0
    range_bytes: int = 0
    load_before: float = 1.0
    load_after: float = 1.0

    @property
    def gain(self) -> float:
        """Share of a step that is saved."""
        return 1.0 - self.after / self.before if self.before > 0 else 0.0

    def __str__(self) -> str:
        remark = f"; {self.no_gain}" if self.no_gain else ""
        if self.ranges:
            remark += f"; {self.describe_ranges()}"
        measured = ""
        if self.measured_before is not None:
            measured = f" ({show_seconds(self.measured_before)} measured)"
        if self.after >= self.before:
            seconds = show_seconds(self.before)
            return f"the placement stays: {seconds} a step are predicted{measured}{remark}"
        names = ", ".join(self.moved[:5]) + (", …" if len(self.moved) > 5 else "")
        moves = "no variable moved"
        if self.moved:
            moves = f"{len(self.moved)} variables moved ({names})"
        return (
            f"placed anew: {show_seconds(self.after)} a step are predicted, "
            f"{show_seconds(self.before)} before{measured}; {moves}{remark}"
        )

    def describe_ranges(self) -> str:
        """Say how many ranges of tables' rows moved, and to what effect."""
        return (
            f"{self.ranges} ranges of rows ({show_bytes(self.range_bytes)}) moved: the busiest "
            f"owner of a table was asked for {self.load_before:.2f} times the mean, "
            f"{self.load_after:.2f} times now"
        )


def check_replan(replan: str | None) -> bool:
    """Return True if the session is to look for better placements by itself.

    Raises:
        ArgumentError: neither None nor "auto".
    """
    if replan is not None and not (isinstance(replan, str) and replan == "auto"):
        raise ArgumentError(
            f"replan must be None (plan again only in s.replan()) or 'auto', not {replan!r}"
        )
    return replan == "auto"


def window_position(runs: int) -> int | None:
    """Return the position in a window, from 0, of the step after `runs` steps; None outside
    windows."""
    start = FIRST
    while start <= runs:
        if runs < start + WINDOW:
            return runs - start
        start *= 2
    return None


def shows_drift(seconds: Sequence[float], predicted: float) -> bool:
    """Return True if enough steps differ from the prediction, all in one direction.

    Args:
        seconds: of untraced steps.
        predicted: seconds of a step.
    """
    if predicted <= 0:
        return False
    slow = sum(taken / predicted > 1 + DRIFT for taken in seconds)
    fast = sum(taken / predicted < 1 - DRIFT for taken in seconds)
    return max(slow, fast) >= SEEN

"""Replanning: what going over to another placement came to, and when a session looks for one.

The automatic mode traces a few steps now and then, ever more rarely, and asks for a new plan only
if they took otherwise than predicted; the new one must be better by a tenth. So it settles, and
what it costs beside the steps goes to zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.base.formatting import show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.runtime.tracing.events import TraceStep

GAIN = 0.1
"""Share of a step that the automatic mode must gain."""
DRIFT = 0.1
"""Share by which a traced step must differ from what was predicted to count as drift."""
SEEN = 3
"""Traced steps that must have drifted."""
WINDOW = 6
"""Steps traced in a row; the first warms up."""
FIRST = 10
"""Steps of some fetches before their first window; the next begin at twice the number each."""


@dataclass(frozen=True)
class Replanned:
    """What planning again came to.

    Args:
        moved: names of the variables that live elsewhere now.
        before, after: predicted seconds of a step, by what is known now: as it was placed, and as
            it is now; the mean over the steps that ran where there are several sets of fetches.
    """

    moved: tuple[str, ...]
    before: float
    after: float

    @property
    def gain(self) -> float:
        """Share of a step that is saved."""
        return 1.0 - self.after / self.before if self.before > 0 else 0.0

    def __str__(self) -> str:
        if self.after >= self.before:
            return f"the placement stays: {show_seconds(self.before)} a step are predicted"
        names = ", ".join(self.moved[:5]) + (", …" if len(self.moved) > 5 else "")
        told = f"{len(self.moved)} variables moved ({names})" if self.moved else "no variable moved"
        return (
            f"placed anew: {show_seconds(self.after)} a step are predicted, "
            f"{show_seconds(self.before)} before; {told}"
        )


def check_replan(replan: str | None) -> bool:
    """Whether a session looks for better placements by itself.

    Raises:
        ArgumentError: neither None nor "auto".
    """
    if replan is not None and not (isinstance(replan, str) and replan == "auto"):
        raise ArgumentError(
            f"replan is None (only when s.replan() is called) or 'auto', not {replan!r}"
        )
    return replan == "auto"


def window_position(runs: int) -> int | None:
    """The place in a window, from 0, of the step after so many of the same fetches; or None."""
    start = FIRST
    while start <= runs:
        if runs < start + WINDOW:
            return runs - start
        start *= 2
    return None


def shows_drift(steps: Sequence[TraceStep], predicted: float, mark: float) -> bool:
    """Whether enough steps took otherwise than predicted, all in one direction.

    Args:
        predicted: seconds of a step.
        mark: seconds that tracing adds for each span.
    """
    if predicted <= 0:
        return False
    ratios = [
        ((step.end - step.start) * 1e-9 - mark * _max_spans(step)) / predicted for step in steps
    ]
    slow = sum(ratio > 1 + DRIFT for ratio in ratios)
    fast = sum(ratio < 1 - DRIFT for ratio in ratios)
    return max(slow, fast) >= SEEN


def _max_spans(step: TraceStep) -> int:
    """Spans of the device that has most: devices mark theirs beside each other."""
    counts: dict[str, int] = {}
    for event in step.events:
        if event.kind in ("compute", "send"):
            counts[event.track] = counts.get(event.track, 0) + 1
    return max(counts.values(), default=0)

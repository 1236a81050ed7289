"""The number of local steps between two exchanges: given, or chosen by measurement.

A round takes `exchange + H · step` seconds. Few steps waste time on exchanges. With many steps,
workers go on for long without what the others have found.
"""

from __future__ import annotations

import math

import numpy as np

from graphflow.base.formatting import show_seconds
from graphflow.errors import LinearModelError

RATIO = 4.0
"""The steps of a round take so many times as long as its exchange."""
_NEAR = 1.25
"""A number of steps that differs by less than this factor is as good."""
_BETTER = 1.1
"""A number of steps has to shrink the gap by so much more in a second to be preferred."""


class LocalSteps:
    """Chooses H, the steps of a round.

    "auto" measures a short round and one that visits all coordinates of the smallest part. From
    these it takes H = `RATIO` · exchange / step, at most one such pass. Then it tries twice and
    half as many, and stays with what shrinks the gap most in a second.

    Args:
        given: H, or "auto".
        most: coordinates of the smallest part.

    Attributes:
        steps: H of the next round.
        exchange, step: seconds of an exchange and of a step; None before they are known.
    """

    def __init__(self, given: int | str, most: int) -> None:
        self._most = most
        self._is_free = isinstance(given, str)
        self.steps = max(1, most // 8) if isinstance(given, str) else int(given)
        self.exchange: float | None = None
        self.step: float | None = None
        self._seconds: dict[int, float] = {}
        self._best, self._rate = self.steps, 0.0
        self._untried = [2.0, 0.5]

    @property
    def first(self) -> list[int]:
        """The numbers of steps of the first rounds."""
        return sorted({self.steps, self._most}) if self._is_free else [self.steps]

    def note_round(self, steps: int, seconds: float) -> None:
        """Learn from the seconds of a round; this may change `steps`."""
        self._seconds[steps] = min(seconds, self._seconds.get(steps, math.inf))
        if not self._is_free or self.exchange is not None:
            return
        if len(self._seconds) == 1 and steps != self._most:
            self.steps = self._most
            return
        few, many = min(self._seconds), max(self._seconds)
        more = self._seconds[many] - self._seconds[few]
        self.step = max(more, 1e-9) / max(many - few, 1)
        self.exchange = max(self._seconds[few] - few * self.step, 0.0)
        self._best = self._limit(RATIO * self.exchange / self.step)
        self.steps = self._best = self._nearest(self._best)

    def note_gap(self, before: float | None, after: float | None, seconds: float) -> None:
        """Learn how the gap fell in some seconds of rounds; this may change `steps`."""
        if not self._is_free or self.exchange is None or not before or not after or seconds <= 0:
            return
        rate = math.log(before / after) / seconds
        if self.steps == self._best:
            self._rate = rate
        elif rate > _BETTER * self._rate:
            self._untried = [self.steps / self._best]
            self._best, self._rate = self.steps, rate
        self.steps = self._best
        if self._untried and rate > 0.0:
            tried = self._limit(self._best * self._untried.pop(0))
            if max(tried, self._best) >= _NEAR * min(tried, self._best):
                self.steps = tried

    def _limit(self, steps: float) -> int:
        return max(1, min(self._most, round(steps)))

    def _nearest(self, steps: int) -> int:
        """Return a number of steps that has run already, if it is about the same."""
        near = [n for n in self._seconds if max(n, steps) < _NEAR * min(n, steps)]
        return min(near, key=lambda n: abs(n - steps), default=steps)

    def __str__(self) -> str:
        text = f"{self.steps:,} local steps a round"
        if self.exchange is None or self.step is None:
            return text
        return (
            f"{text}, where an exchange takes {show_seconds(self.exchange)} and a step "
            f"{show_seconds(self.step)}"
        )


def check_local_steps(given: object) -> int | str:
    """Return a valid number of local steps, or "auto".

    Raises:
        LinearModelError: it is neither.
    """
    if given == "auto":
        return "auto"
    if isinstance(given, int | np.integer) and not isinstance(given, bool) and given >= 1:
        return int(given)
    raise LinearModelError(f'local_steps must be "auto" or an int of at least 1, not {given!r}')


__all__ = ["LocalSteps", "check_local_steps"]

"""The number of local steps between two exchanges: given, or chosen by measurement.

A round takes `exchange + H · step` seconds. Few steps waste time on exchanges. With many steps,
workers go on for long without what the others have found: what a round gains grows about as
h / (h + `HALF`), where h is H over the coordinates of a part.
"""

from __future__ import annotations

import math

import numpy as np

from graphflow.base.formatting import show_seconds
from graphflow.errors import LinearModelError

HALF = 0.25
"""The share of a part at which a round gains half of what it can gain at most."""
_SHARES = (0.25, 0.125, 0.5)
"""Shares of a part that the first rounds visit; the first round, with all cold, is not measured."""
_BETTER = 1.2
"""A number of steps has to shrink the gap by so much more in a second to be preferred."""
_FAR = 8.0
"""Another H is tried if the gap has to fall by so many times what it just did, as logarithms."""
_CHANGES = 6
"""The most changes before the seconds of a round count as known."""


def best_share(exchange: float, whole: float) -> float:
    """Return the share of a part that a round should visit: at most 1.

    It maximises h / (h + `HALF`) / (exchange + h · whole).

    Args:
        exchange: seconds of an exchange.
        whole: seconds of a pass over the part.
    """
    return min(1.0, math.sqrt(HALF * exchange / whole))


class LocalSteps:
    """Chooses H, the steps of a round.

    "auto" measures a round that visits an eighth of the smallest part, and one that visits half.
    From these it takes the best H, and learns from the rounds with it until H stays. Then it tries
    twice and half as many, and keeps those that shrink the gap most in a second. All H are the part
    divided by a power of two, because a new H has to be compiled.

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
        self._probes = [self._on_grid(share) for share in _SHARES]
        self.steps = self._probes.pop(0) if isinstance(given, str) else int(given)
        self.exchange: float | None = None
        self.step: float | None = None
        self._seconds: dict[int, float] = {}
        self._changes = 0
        self._best, self._rate = self.steps, 0.0
        self._untried = [2.0, 0.5]

    @property
    def first(self) -> list[int]:
        """The numbers of steps that are likely to come."""
        if not self._is_free:
            return [self.steps]
        return sorted({self._on_grid(0.5**power) for power in range(5)})

    def note_round(self, steps: int, seconds: float) -> None:
        """Learn from the seconds of a round; this may change `steps`."""
        if self._is_free and len(self._probes) == len(_SHARES) - 1:
            self.steps = self._probes.pop(0)
            return
        is_new = steps not in self._seconds
        self._seconds[steps] = min(seconds, self._seconds.get(steps, math.inf))
        if not self._is_free or not is_new or self._changes >= _CHANGES:
            return
        if self._probes:
            self.steps = self._probes.pop(0)
            return
        few, many = min(self._seconds), max(self._seconds)
        if few == many:
            return
        slope = (self._seconds[many] - self._seconds[few]) / (many - few)
        most = min(t / n for n, t in self._seconds.items())  # a step takes no longer than that
        self.step = min(max(slope, 1e-3 * most), most)
        self.exchange = max(self._seconds[few] - few * self.step, 0.0)
        share = best_share(self.exchange, self.step * self._most)
        self._changes += 1
        self._best = self.steps = self._on_grid(max(share, 0.25 * few / self._most))

    def note_gap(self, before: float, after: float, wanted: float, seconds: float) -> None:
        """Learn how the gap fell in some seconds of rounds; this may change `steps`.

        Args:
            before, after: the relative gaps.
            wanted: the gap at which the fit ends; another H is tried only if that is far off.
            seconds: of the rounds between both.
        """
        is_known = self.exchange is not None and self.steps in self._seconds
        if not self._is_free or not is_known or min(before, after, seconds) <= 0.0:
            return
        rate = math.log(before / after) / seconds
        is_far = math.log(after / max(wanted, 1e-16)) > _FAR * rate * seconds
        if self.steps == self._best:
            self._rate = rate
        elif rate > _BETTER * self._rate:
            self._untried = [self.steps / self._best]
            self._best, self._rate = self.steps, rate
        self.steps = self._best
        if self._untried and rate > 0.0 and is_far:
            self._changes = _CHANGES
            self.steps = self._on_grid(self._best * self._untried.pop(0) / self._most)

    def _on_grid(self, share: float) -> int:
        """Return the number of steps of the grid that is the nearest to a share of the part."""
        power = max(0, round(-math.log2(max(share, 1e-12))))
        return max(1, self._most >> power)

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


__all__ = ["LocalSteps", "best_share", "check_local_steps"]

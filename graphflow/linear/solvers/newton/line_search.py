"""The search for the length of a step along which an objective falls."""

from __future__ import annotations

from collections.abc import Callable

_ROUNDING = 1e-15
"""Share of an objective that rounding may add near the optimum, where the dual still improves."""


def search_line(
    objective: Callable[[float], float], before: float, falls: float = 0.0, halvings: int = 40
) -> float:
    """Return the first length of 1, 1/2, 1/4, … at which an objective is low enough; 0 if none is.

    Args:
        objective: of a length.
        before: the objective of length 0.
        falls: how fast it falls at length 0; it has to fall by a ten-thousandth of that.
        halvings: lengths that are tried.
    """
    slack, length = _ROUNDING * abs(before), 1.0
    for _ in range(halvings):
        if objective(length) <= before - 1e-4 * length * falls + slack:
            return length
        length *= 0.5
    return 0.0


__all__ = ["search_line"]

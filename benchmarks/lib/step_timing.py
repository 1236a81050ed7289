"""Times of steps that are measured by turns, with the scatter of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from statistics import median, quantiles

BLOCK_SECONDS = 0.02
"""Least length of a block: shorter ones measure the scheduler's ticks."""
BLOCK_STEPS = 3
"""Least steps of a block."""
SETTLE_SECONDS = 0.01
"""Seconds of steps before a block that do not count: workers that slept wake up, and caches get
back what the function before has replaced. One step is enough where it is as long."""
MIN_ROUNDS = 3
MAX_SECONDS = 1.5
"""Seconds after which no round starts that is beyond `MIN_ROUNDS`."""


@dataclass(frozen=True)
class StepTime:
    """What a step takes.

    Attributes:
        seconds: the median over blocks of the median step of a block.
        noise: interquartile range of all steps over their median; 0.1 is a scatter of 10 %.
    """

    seconds: float
    noise: float

    @classmethod
    def from_blocks(cls, blocks: list[list[float]]) -> StepTime:
        """Summarize blocks of seconds of steps; there must be at least two steps."""
        steps = [seconds for block in blocks for seconds in block]
        low, middle, high = quantiles(steps, n=4)
        return cls(median(median(block) for block in blocks), (high - low) / middle)


def time_by_turns(
    steps: Mapping[str, Callable[[], object]], rounds: int, limit: float = MAX_SECONDS
) -> dict[str, StepTime]:
    """Time steps block by block, in turns, so that a slow moment of the machine meets all.

    Args:
        steps: functions by name, already warm.
        rounds: blocks of each.
        limit: seconds after which rounds beyond `MIN_ROUNDS` are left out.
    """
    until = time.perf_counter() + limit
    lengths = {name: _block_length(step) for name, step in steps.items()}
    blocks: dict[str, list[list[float]]] = {name: [] for name in steps}
    for number in range(max(rounds, MIN_ROUNDS)):
        if number >= MIN_ROUNDS and time.perf_counter() > until:
            break
        for name, step in steps.items():
            if lengths[name] > BLOCK_STEPS:  # a slow step barely minds
                _settle(step)
            blocks[name].append([_seconds(step) for _ in range(lengths[name])])
    return {name: StepTime.from_blocks(taken) for name, taken in blocks.items()}


def _block_length(step: Callable[[], object]) -> int:
    """Return the number of steps of a block."""
    least = _seconds(step)
    if least < BLOCK_SECONDS:
        least = min(least, _seconds(step))
    return max(BLOCK_STEPS, ceil(BLOCK_SECONDS / max(least, 1e-6)))


def _settle(step: Callable[[], object]) -> None:
    until = time.perf_counter() + SETTLE_SECONDS
    step()
    while time.perf_counter() < until:
        step()


def _seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start

"""Race twins: check that both libraries compute the same, time their steps by turns, summarize."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from math import isclose
from typing import Any

import numpy as np

from benchmarks.lib.step_timing import StepTime, time_by_turns
from benchmarks.twins import GraphflowStep, Twin
from benchmarks.twins.description import UNIT_DESCENT

CHECKED_STEPS = 3
OTHER_WEIGHTS = 1_000_000  # added to a seed
LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 2e-3
"""Of the largest element of a gradient."""
ROUNDING = 2e-5
"""Of the largest element of all gradients, and of the weights from which gradients are computed."""
MANY_ROWS = 128
"""Rows of products from which a second thread is to give a speedup."""
SHORT = 1e-3
"""Seconds of a step below which a second thread has little to do."""
GOAL, SPEEDUP_GOAL = 0.95, 1.6


class DisagreementError(Exception):
    """The libraries do not compute the same numbers."""


@dataclass(frozen=True)
class Race:
    """Measured steps of a twin.

    Attributes:
        times: by contender, such as "graphflow 2": its library and its threads.
        first: seconds of the first step of graphflow, with one thread: placement and compilation.
    """

    twin: Twin
    times: Mapping[str, StepTime]
    first: float

    def ratio(self, threads: int, peer: str = "torch") -> float:
        """Return graphflow's time over a peer's with so many threads."""
        return self._seconds(f"graphflow {threads}") / self._seconds(f"{peer} {threads}")

    def speedup(self, threads: int) -> float:
        """Return graphflow's time on one thread over that on several."""
        return self._seconds("graphflow 1") / self._seconds(f"graphflow {threads}")

    @property
    def noise(self) -> float:
        """The largest scatter of a contender: interquartile range over median."""
        return max(each.noise for each in self.times.values())

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        twin = self.twin
        return {
            "seed": twin.seed, "index": twin.index, "family": twin.family, "model": str(twin),
            "rows": twin.product_rows, "first_step_seconds": self.first,
            "times": {name: asdict(each) for name, each in self.times.items()},
        }  # fmt: skip

    def _seconds(self, name: str) -> float:
        return self.times[name].seconds


# Equality ---------------------------------------------------------------------------------------


def check_twins(twin: Twin, threads: Sequence[int]) -> None:
    """Compare gradients, running moments and the first losses of both libraries, without dropout.

    A number within rounding of the kink of a ReLU may have either gradient. So a twin that differs
    has a second try with other weights and feeds.

    Raises:
        DisagreementError: they differ, or the numbers of threads of graphflow do.
    """
    try:
        check_once(twin, threads)
    except DisagreementError:
        check_once(replace(twin, seed=twin.seed + OTHER_WEIGHTS), threads)


def check_once(twin: Twin, threads: Sequence[int]) -> None:
    """Compare as `check_twins` does, with the weights and feeds of the twin's own seed."""
    from benchmarks.twins.torch_step import TorchStep

    twin = twin.without_dropout()
    torch = TorchStep(replace(twin, optimizer=UNIT_DESCENT))
    before = torch.state()
    with closing(GraphflowStep(replace(twin, optimizer=UNIT_DESCENT), before, threads[0])) as ours:
        losses = [ours(), torch.step(threads[0])]
        compare_losses(losses)
        compare_weights(before, ours.state(), torch.state())
    torch = TorchStep(twin)
    expected = [torch.step(threads[0]) for _ in range(CHECKED_STEPS)]
    bits = []
    for count in threads:
        with closing(GraphflowStep(twin, before, count)) as step:
            found = [step() for _ in range(CHECKED_STEPS)]
        bits.append(found)
        for pair in zip(found, expected, strict=True):
            compare_losses(pair)
    if any(found != bits[0] for found in bits):
        raise DisagreementError(
            f"losses depend on threads: {dict(zip(threads, bits, strict=True))}"
        )


def compare_losses(pair: Iterable[float]) -> None:
    """Compare graphflow's loss with torch's.

    Raises:
        DisagreementError: they differ.
    """
    ours, theirs = pair
    if not isclose(ours, theirs, rel_tol=LOSS_TOLERANCE, abs_tol=LOSS_TOLERANCE / 10):
        raise DisagreementError(f"the losses are {ours:.7g} and {theirs:.7g} (torch)")


def compare_weights(
    before: Mapping[str, Any], ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> None:
    """Compare how far weights and running moments have moved from those before.

    Raises:
        DisagreementError: an element has moved elsewhere.
    """
    moves = {k: (before[k] - ours[k], before[k] - theirs[k]) for k in theirs if before[k].ndim}
    largest = max(float(np.abs(move).max()) for _, move in moves.values())
    for name, (one, other) in moves.items():
        off, size = float(np.abs(one - other).max()), float(np.abs(other).max())
        held = float(np.abs(before[name]).max())
        allowed = GRADIENT_TOLERANCE * size + ROUNDING * largest + ROUNDING / 10 * held
        if not off <= allowed:
            raise DisagreementError(
                f"the gradient of {name} {other.shape} is {off:.3g} off, its largest element is "
                f"{size:.3g}, and the largest of all gradients {largest:.3g}"
            )


# Times ------------------------------------------------------------------------------------------


def race(
    twin: Twin, threads: Sequence[int], rounds: int, limit: float, compiles: bool = False
) -> Race:
    """Time a twin's steps by turns, after steps that warm up.

    Args:
        limit: seconds after which no round starts beyond the least number.
        compiles: let `torch.compile` take part.
    """
    from benchmarks.twins.torch_step import TorchStep

    eager = TorchStep(twin)
    state = eager.state()
    steps: dict[str, Callable[[], float]] = {}
    firsts = []
    ours = []
    for count in threads:
        start = time.perf_counter()
        step = GraphflowStep(twin, state, count)
        step()
        firsts.append(time.perf_counter() - start)
        ours.append(step)
        steps[f"graphflow {count}"] = step
        steps[f"torch {count}"] = lambda count=count: eager.step(count)
        if compiles:
            fast = TorchStep(twin, compiles=True)
            steps[f"torch.compile {count}"] = lambda fast=fast, count=count: fast.step(count)
    for step_of in steps.values():
        for _ in range(CHECKED_STEPS):
            step_of()
    times = time_by_turns(steps, rounds, limit)
    for step in ours:
        step.close()
    return Race(twin, times, firsts[0])


# Summaries --------------------------------------------------------------------------------------


def summary_lines(races: Sequence[Race], threads: Sequence[int]) -> list[str]:
    """Return lines with geometric mean, 90th percentile and worst, for all and for each family."""
    if not races:
        return ["no model was measured"]
    lines = []
    peers = sorted({name.rsplit(" ", 1)[0] for name in races[0].times} - {"graphflow"})
    for peer in peers:
        for count in threads:
            title = f"graphflow / {peer}, {count} thread{'s' * (count > 1)} (goal {GOAL})"
            lines += distribution(title, races, lambda r, n=count, p=peer: r.ratio(n, p))
    for count in threads:
        if count > 1 and 1 in threads:
            title = f"{count} threads / 1 thread, graphflow (never above 1)"
            lines += distribution(title, races, lambda r, n=count: 1 / r.speedup(n))
            lines += speedup_lines(races, count)
    return lines


def distribution(title: str, races: Sequence[Race], value: Callable[[Race], float]) -> list[str]:
    """Return a title, a line for all races, and one for each family."""
    lines = [f"{title:<52}{'models':>6} {'mean':>6} {'90 %':>6} {'worst':>6}"]
    families = sorted({each.twin.family for each in races})
    for family in ("all", *families):
        held = [each for each in races if family in ("all", each.twin.family)]
        values = [value(each) for each in held]
        worst = held[int(np.argmax(values))].twin
        mean = float(np.exp(np.mean(np.log(values))))
        lines.append(
            f"  {family:<50}{len(held):>6} {mean:6.2f} {np.quantile(values, 0.9):6.2f} "
            f"{max(values):6.2f}  #{worst.index}"
        )
    return lines


def speedup_lines(races: Sequence[Race], threads: int) -> list[str]:
    """Return a line about the steps to which more threads are to give a speedup."""
    large = [
        each
        for each in races
        if each.twin.product_rows >= MANY_ROWS and each.times["graphflow 1"].seconds >= SHORT
    ]
    reached = sum(each.speedup(threads) >= SPEEDUP_GOAL for each in large)
    slower = [each.twin.index for each in races if each.speedup(threads) < 1]
    told = " ".join(f"#{index}" for index in slower) or "none"
    return [
        f"  products of {MANY_ROWS} rows and more, steps of {SHORT * 1e3:.0f} ms and more: "
        f"{reached} of {len(large)} are {SPEEDUP_GOAL} times as fast with {threads} threads",
        f"  slower with {threads} threads than with one: {told}",
    ]

"""Regret: the time of a step as it was placed, over that of the best alternative that was run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import hypot
from statistics import median
from typing import Any

from benchmarks.lib.step_timing import StepTime

MEDIAN_GOAL = 1.00
WORST_GOAL = 1.10
MAX_NOISE = 0.3
"""Median noise of rows beyond which goals that are reached say nothing."""


@dataclass(frozen=True)
class Regret:
    """A placement on two workers beside its alternatives.

    Attributes:
        refined: planned again after traced steps.
        placed: seconds of a step as placed.
        used: workers that compute.
        best: name of the fastest alternative.
        seconds: of all alternatives, by name.
        noise: relative half widths of placed and best together.
    """

    model: int
    description: str
    refined: bool
    placed: float
    used: int
    best: str
    seconds: Mapping[str, float]
    noise: float

    @classmethod
    def of(
        cls,
        model: int,
        description: str,
        refined: bool,
        used: int,
        placed: StepTime,
        others: Mapping[str, StepTime],
    ) -> Regret:
        """Compare a placement with alternatives, at least one."""
        best = min(others, key=lambda name: others[name].seconds)
        return cls(
            model,
            description,
            refined,
            placed.seconds,
            used,
            best,
            {name: each.seconds for name, each in others.items()},
            hypot(placed.noise, others[best].noise) / 2,
        )

    @property
    def ratio(self) -> float:
        """Placed over best; below 1 if no alternative is as fast."""
        return self.placed / self.seconds[self.best]

    @property
    def beyond_noise(self) -> float:
        """The regret that noise does not explain, at least 1."""
        return max(1.0, self.ratio / (1 + self.noise))

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        return {**asdict(self), "ratio": self.ratio, "beyond_noise": self.beyond_noise}


def regret_lines(rows: Sequence[Regret], worst: int = 5) -> Iterator[str]:
    """Yield the summary of regrets before and after traces, and the worst rows beyond 1."""
    for refined in (False, True):
        kind = [row for row in rows if row.refined is refined]
        if not kind:
            continue
        beyond = [row.beyond_noise for row in kind]
        middle, most = median(beyond), max(beyond)
        missed = [
            name
            for name, is_missed in (
                ("median", round(middle, 2) > MEDIAN_GOAL),
                ("worst", round(most, 2) > WORST_GOAL),
            )
            if is_missed
        ]
        noise = median(row.noise for row in kind)
        verdict = "too noisy to judge" if noise > MAX_NOISE else "reached"
        if missed:
            verdict = f"MISSED ({', '.join(missed)})"
        yield (
            f"regret {'after' if refined else 'before'} traces: {len(kind)} rows, median "
            f"{median(row.ratio for row in kind):.2f}, beyond noise {middle:.2f} (goal "
            f"{MEDIAN_GOAL:.2f}), worst beyond noise {most:.2f} ({WORST_GOAL:.2f}), noise "
            f"{noise:.0%}: {verdict}"
        )
        for row in sorted(kind, key=lambda row: -row.beyond_noise)[:worst]:
            if row.beyond_noise > 1.0:
                yield f"  {show_regret(row)}"


def show_regret(row: Regret) -> str:
    """Return one line of a row."""
    others = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in row.seconds.items())
    return (
        f"{row.ratio:5.2f} ± {row.noise:.2f}  placed on {row.used}: {row.placed * 1e3:.2f} ms; "
        f"{others} ms; #{row.model} {row.description}"
    )

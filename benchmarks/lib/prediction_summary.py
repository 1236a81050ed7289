"""Predicted and measured steps side by side: errors beyond noise, and summaries against goals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prediction:
    """A predicted step beside its measurement.

    Attributes:
        model, family, description: the model's number, its kind, and its line.
        workers: of the session; `used` of them compute.
        refined: predicted after traced steps, not by calibration alone.
        predicted, measured: seconds of a step.
        noise: interquartile range of the measured steps over their median.
        floor: that of a fixed loop of numpy in the same minutes.
    """

    model: int
    family: str
    description: str
    workers: int
    used: int
    refined: bool
    predicted: float
    measured: float
    noise: float
    floor: float

    @property
    def ratio(self) -> float:
        """Predicted over measured time."""
        return self.predicted / self.measured

    @property
    def error(self) -> float:
        """Relative error beyond half of the noise; 0.1 is 10 % off."""
        return max(0.0, abs(self.ratio - 1.0) - self.noise / 2)

    @property
    def factor(self) -> float:
        """Factor, at least 1, between the prediction and the closest time that the noise allows."""
        above = self.ratio / (1 + self.noise / 2)
        below = (1 - self.noise / 2) / self.ratio
        return max(1.0, above, below)

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        derived = {"ratio": self.ratio, "error": self.error, "factor": self.factor}
        return {**asdict(self), **derived}


@dataclass(frozen=True)
class Goals:
    """The largest errors allowed: of the median row, of 95 % of the rows, and of any row."""

    median: float
    most: float
    factor: float


MAX_NOISE = 0.3
"""Median noise of rows beyond which goals that are reached say nothing."""
GOALS = {False: Goals(0.10, 0.25, 1.5), True: Goals(0.05, 0.15, 1.25)}
"""By whether traces refined the prediction."""


@dataclass(frozen=True)
class Summary:
    """Errors of some rows, beyond their noise.

    Attributes:
        rows: how many rows.
        median, most: error of the median row, and of the 95th percentile.
        factor: the worst factor.
        noise: median noise.
    """

    rows: int
    median: float
    most: float
    factor: float
    noise: float

    @classmethod
    def of(cls, rows: Sequence[Prediction]) -> Summary:
        """Summarize rows, of which there must be at least one."""
        errors = [row.error for row in rows]
        return cls(
            len(rows),
            median(errors),
            float(np.percentile(errors, 95)),
            max(row.factor for row in rows),
            median(row.noise for row in rows),
        )

    def misses(self, goals: Goals) -> list[str]:
        """Return the names of the goals that are missed."""
        return [
            name
            for name in ("median", "most", "factor")
            if getattr(self, name) > getattr(goals, name)
        ]


def summary_lines(rows: Sequence[Prediction], worst: int = 5) -> Iterable[str]:
    """Yield the summary of a run: errors against goals, and the rows that are furthest off."""
    for refined, goals in GOALS.items():
        kind = [row for row in rows if row.refined is refined]
        when = "after traces" if refined else "before traces"
        for workers in (1, 2, None):
            chosen = [row for row in kind if workers in (None, row.workers)]
            if chosen:
                name = {1: "one worker", 2: "two workers", None: "all"}[workers]
                yield f"{when}, {name:<11}: {show_summary(Summary.of(chosen), goals)}"
    yield "predicted / measured by family, medians before and after traces:"
    for family in dict.fromkeys(row.family for row in rows):
        yield f"  {show_family(family, [row for row in rows if row.family == family])}"
    for refined in GOALS:
        kind = [row for row in rows if row.refined is refined]
        if kind:
            yield f"furthest off {'after' if refined else 'before'} traces (predicted / measured):"
        for row in sorted(kind, key=lambda row: -row.factor)[:worst]:
            yield f"  {show_prediction(row)}"


def show_summary(found: Summary, goals: Goals) -> str:
    """Return one line of a summary and its goals."""
    missed = found.misses(goals)
    verdict = f"MISSED ({', '.join(missed)})" if missed else "reached"
    if not missed and found.noise > MAX_NOISE:
        verdict = "too noisy to judge"
    return (
        f"{found.rows:3} rows, beyond noise: median {found.median:4.0%} (goal {goals.median:.0%}), "
        f"95 % below {found.most:4.0%} ({goals.most:.0%}), worst {found.factor:.2f}× "
        f"({goals.factor}×), noise {found.noise:.0%}: {verdict}"
    )


def show_family(family: str, rows: Sequence[Prediction]) -> str:
    """Return one line of a family: the direction in which its predictions are off."""
    models = len({row.model for row in rows})
    ratios = [[row.ratio for row in rows if row.refined is refined] for refined in GOALS]
    medians = "  ".join(f"{median(each):5.2f}" if each else "    –" for each in ratios)
    return f"{medians}  {family}, {models} model{'s' * (models > 1)}"


def show_prediction(row: Prediction) -> str:
    """Return one line of a row."""
    return (
        f"{row.ratio:5.2f} ± {row.noise / 2:.2f}  {row.predicted * 1e3:8.3f} / "
        f"{row.measured * 1e3:8.3f} ms, {row.workers} worker{'s' * (row.workers > 1)} "
        f"({row.used} used), #{row.model} {row.description}"
    )

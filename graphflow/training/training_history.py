"""The course of a training: the loss of each step, and the metrics of each epoch."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import user_location


@dataclass
class TrainingHistory:
    """The course of a training.

    Attributes:
        losses: of each step.
        first_step: the number of the first of these steps; above 0 where a checkpoint went on.
        epochs: a dict for each epoch: "epoch", "step", "seconds", "loss" (the mean of its steps),
            and the metrics by name.
        stopped: why the training ended before its last epoch; "" if it did not.
        session: the session that holds the weights.
    """

    losses: list[float] = field(default_factory=list)
    first_step: int = 0
    epochs: list[dict[str, float]] = field(default_factory=list)
    stopped: str = ""
    session: Any = None

    def values(self, name: str) -> list[float]:
        """Return a column of `epochs`.

        Raises:
            ArgumentError: there is no such column.
        """
        names = list(self.epochs[-1]) if self.epochs else []
        if name not in names:
            raise ArgumentError(
                f"values at {user_location()}: no epoch has {name!r}; they have {', '.join(names)}"
            )
        return [row[name] for row in self.epochs if name in row]

    def plot(
        self, path: str | os.PathLike[str] | None = None, metrics: Sequence[str] | None = None
    ) -> str:
        """Return an SVG picture of losses and metrics over steps.

        Args:
            path: a file to write it to, too.
            metrics: names of columns of `epochs`; default: all metrics.
        """
        from graphflow.placement.view.line_chart import LineChart, draw_lines

        curves = [("loss", _thin(self.losses, self.first_step))] if self.losses else []
        given = [name for name in self._metrics() if metrics is None or name in metrics]
        for name in [*given, *(n for n in metrics or () if n not in given)]:
            values = zip(self.values("step"), self.values(name), strict=False)
            curves.append((name, [(x, y) for x, y in values if math.isfinite(y)]))
        text = draw_lines(LineChart("Training", "steps", curves))
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _metrics(self) -> list[str]:
        fixed = ("epoch", "step", "seconds", "loss")
        row = self.epochs[-1] if self.epochs else {}
        return [n for n, value in row.items() if n not in fixed and np.ndim(value) == 0]

    def __str__(self) -> str:
        lines = [show_epoch(row) for row in self.epochs]
        return "\n".join([*lines, self.stopped] if self.stopped else lines)


def show_epoch(row: dict[str, float]) -> str:
    """Return a line for an epoch."""
    parts = [f"epoch {row['epoch'] + 1:.0f}", f"step {row['step']:,.0f}"]
    for name, value in row.items():
        if name not in ("epoch", "step", "seconds") and np.ndim(value) == 0:
            parts.append(f"{name} {value:.4g}")
    return "  ".join([*parts, f"{row['seconds']:.3g} s"])


def _thin(losses: Sequence[float], first: int) -> list[tuple[float, float]]:
    """Return at most 200 points: means of as many losses each."""
    each = max(1, math.ceil(len(losses) / 200))
    points = []
    for start in range(0, len(losses), each):
        part = losses[start : start + each]
        mean = float(np.mean(part))
        if math.isfinite(mean):
            points.append((first + start + len(part) / 2, mean))
    return points

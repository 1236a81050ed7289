"""Callbacks of a training: stop early, and write what happens to files.

A callback is any object with some of the methods `begin`, `step`, `epoch` and `end`. Each takes the
`gf.training.TrainingRun`.
"""

from __future__ import annotations

import csv
import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from graphflow.base.argument_checks import checks_arguments
from graphflow.errors import ArgumentError
from graphflow.ir.op import user_location


@checks_arguments(ArgumentError)
class EarlyStopping:
    """Stop when a metric has not become better for some epochs.

    Args:
        metric: its name in `history.epochs`; "loss" is the mean loss of the epoch.
        patience: epochs without a better value, from 0.
        mode: whether the least or the greatest value is the best.
        least_change: by how much a value must be better to count.
        restore: "best": the variables of the best epoch are put back at the end of the training,
            also where it ends for another reason; None: they stay as they are.
    """

    def __init__(
        self, metric: str = "loss", patience: int = 3, mode: Literal["min", "max"] = "min",
        least_change: float = 0.0, restore: Literal["best"] | None = "best",
    ) -> None:  # fmt: skip
        if patience < 0:
            raise ArgumentError(
                f"EarlyStopping at {user_location()}: patience must be from 0, not {patience}"
            )
        self._metric, self._patience = metric, patience
        self._sign = 1.0 if mode == "min" else -1.0
        self._change, self._restore = least_change, restore
        self._best = math.inf
        self._waited = 0
        self._kept: dict[Any, Any] = {}

    def begin(self, run: Any) -> None:
        """Forget an earlier training."""
        self._best, self._waited, self._kept = math.inf, 0, {}

    def epoch(self, run: Any) -> None:
        """Compare the epoch with the best one."""
        row = run.history.epochs[-1]
        if self._metric not in row:
            raise ArgumentError(
                f"EarlyStopping: there is no {self._metric!r}; an epoch has {', '.join(row)}"
            )
        value = self._sign * float(row[self._metric])
        if value < self._best - self._change:
            self._best, self._waited = value, 0
            if self._restore:
                self._kept = {v: np.array(run.session.get(v)) for v in run.variables}
            return
        self._waited += 1
        if self._waited > self._patience:
            run.stop(
                f"{self._metric} was best {self._waited} epochs ago: {self._sign * self._best:.4g}"
            )

    def end(self, run: Any) -> None:
        """Put the best variables back."""
        for variable, value in self._kept.items():
            run.session.set(variable, value)


class CsvLog:
    """Write a row for each epoch to a CSV file.

    Args:
        path: the file; an earlier one is replaced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._names: list[str] = []

    def begin(self, run: Any) -> None:
        """Begin a new file."""
        self._names = []
        self._path.write_text("", encoding="utf-8")

    def epoch(self, run: Any) -> None:
        """Write a row, and the header before the first one."""
        row = run.history.epochs[-1]
        with open(self._path, "a", newline="", encoding="utf-8") as stream:
            if not self._names:
                self._names = list(row)
                csv.writer(stream).writerow(self._names)
            csv.writer(stream).writerow([row.get(name, "") for name in self._names])


class JsonLog:
    """Write a JSON object on a line for each epoch.

    Args:
        path: the file; an earlier one is replaced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def begin(self, run: Any) -> None:
        """Begin a new file."""
        self._path.write_text("", encoding="utf-8")

    def epoch(self, run: Any) -> None:
        """Write a line."""
        row = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in run.history.epochs[-1].items()
        }
        with open(self._path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


class TensorBoard:
    """Write the loss of steps and the metrics of epochs for TensorBoard.

    It needs tensorboardX: `pip install 'graphflow[tensorboard]'`.

    Args:
        folder: where TensorBoard looks for runs.
        every: steps between two losses that are written, from 1.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 10) -> None:
        at = f"TensorBoard at {user_location()}"
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ArgumentError(
                f"{at} needs tensorboardX: pip install 'graphflow[tensorboard]'"
            ) from None
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ArgumentError(f"{at}: every must be an int from 1, not {every!r}")
        self._open: Any = partial(SummaryWriter, os.fspath(folder))
        self._writer: Any = None
        self._every = every

    def begin(self, run: Any) -> None:
        """Begin a file."""
        self._writer = self._open()

    def step(self, run: Any) -> None:
        """Write the loss of some steps."""
        if run.step % self._every == 0:
            self._writer.add_scalar("loss", run.loss, run.step)

    def epoch(self, run: Any) -> None:
        """Write the metrics of the epoch."""
        for name, value in run.history.epochs[-1].items():
            if name not in ("epoch", "step") and np.ndim(value) == 0:
                self._writer.add_scalar(f"epoch/{name}", value, run.step)

    def end(self, run: Any) -> None:
        """Write what is left."""
        self._writer.close()

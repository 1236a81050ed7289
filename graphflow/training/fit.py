"""The training loop: steps over the batches of a dataset, metrics after each epoch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names, did_you_mean
from graphflow.base.formatting import show_count
from graphflow.data.dataset import Dataset
from graphflow.data.worker_reading import WorkerReading, bind
from graphflow.errors import ArgumentError, GraphflowError
from graphflow.frontend.builders import assign, variable
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Tensor, user_location
from graphflow.ir.spec import kind
from graphflow.metrics.metric import Metric, evaluate
from graphflow.sessions.session import Session
from graphflow.strategy import strategy_of
from graphflow.training.data_files import check_same_files
from graphflow.training.progress_bar import ProgressBar
from graphflow.training.training_history import TrainingHistory

HOOKS = ("begin", "step", "epoch", "end")


class TrainingRun:
    """A training as callbacks see it.

    Attributes:
        session: the open session.
        step: number of steps done.
        epoch: number of the present epoch, from 0.
        loss: of the last step.
        history: the course so far.
        variables: those that the step changes, and that the metrics read.
    """

    def __init__(self, session: Session, variables: Sequence[Tensor]) -> None:
        self.session = session
        self.variables = list(variables)
        self.step = 0
        self.epoch = 0
        self.loss = float("nan")
        self.history = TrainingHistory(session=session)

    def stop(self, reason: str) -> None:
        """End the training after this step or epoch.

        Args:
            reason: what `history.stopped` says.
        """
        self.history.stopped = reason


@checks_argument_names(ArgumentError)
def fit(
    train: Any,
    data: Dataset,
    *,
    loss: Tensor,
    epochs: int | None = None,
    steps: int | None = None,
    metrics: Mapping[str, Metric] | None = None,
    validate: Dataset | None = None,
    callbacks: Sequence[Any] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    every: int | str = "10min",
    cluster: Any = None,
    session: Session | None = None,
    progress: bool = True,
) -> TrainingHistory:
    """Train over the batches of a dataset, and return the course of the training.

        history = gf.fit(train, data, loss=loss, epochs=5, metrics={"accuracy": accuracy},
                         validate=test, checkpoint="ckpt")
        history.plot("training.svg")
        history.session.run(predicted, feeds)

    It runs `session.run([train, loss], batch)` for each batch, whose columns feed the placeholders
    of those names. A training that was killed goes on at the batch of its last checkpoint. With
    `data.on_workers()`, each worker reads its rows itself.

    Args:
        train: the result of `minimize`, or a list of it and further updates, such as those of
            `gf.nn.training()`.
        data: batches, as `gf.data` makes them.
        loss: a scalar that is shown, and kept for each step.
        epochs: number of epochs; default: those of the dataset.
        steps: at most so many steps, for a quick try.
        metrics: of `gf.metrics`, by name, computed over `validate` after each epoch.
        validate: batches of other examples, for the metrics.
        callbacks: objects with some of the methods `begin`, `step`, `epoch`, `end`.
        checkpoint, every: as of `gf.Session`.
        cluster: where to train; default: this process.
        session: an open session to use, instead of `checkpoint`, `every` and `cluster`.
        progress: show a bar on a terminal, or a line for each epoch elsewhere.

    Returns:
        The course. Its `session` holds the trained variables and stays open.

    Raises:
        ArgumentError: an argument does not fit, or a file of the data has changed since the
            checkpoint was written; each error says what to do.
    """
    fetches = _check(train, data, loss, metrics, validate, callbacks)
    data = data.epochs(epochs) if epochs is not None else data
    if session is not None and (checkpoint is not None or cluster is not None):
        raise ArgumentError(
            f"fit at {user_location()}: checkpoint and cluster belong to a session that fit opens; "
            "give them to gf.Session(…) instead"
        )
    if session is not None and not isinstance(session, Session):
        raise ArgumentError(
            f"fit at {user_location()}: session must be a gf.Session, not {session!r}"
        )
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ArgumentError(f"fit at {user_location()}: steps must be an int from 1, not {steps!r}")
    loop = _Loop(fetches, data, loss, metrics or {}, validate, callbacks)
    if session is not None:
        return loop.run(session, steps, progress)
    how: dict[str, Any] = {} if checkpoint is None else {"checkpoint": checkpoint, "every": every}
    opened = Session(cluster, **how) if cluster is not None else Session(**how)
    try:
        return loop.run(opened, steps, progress)
    except BaseException:
        opened.close()
        raise


_trainings: WeakKeyDictionary[Session, int] = WeakKeyDictionary()
"""How many trainings each session has had."""


def _next_training(session: Session) -> str:
    """Return the end of the names of variables that belong to this training.

    A program that is started again has the same trainings in the same order.
    """
    number = _trainings.get(session, 0)
    _trainings[session] = number + 1
    return f"_{number}" if number else ""


def _bind_metrics(
    validate: Dataset, metrics: Mapping[str, Metric]
) -> tuple[WorkerReading, dict[str, Metric]]:
    """Return metrics whose parts read the rows of a dataset where they run, and their feeds."""
    parts = [part for metric in metrics.values() for part in metric.parts]
    reading = bind(validate, parts)
    return reading, {
        name: replace(metric, parts=reading.substitute(metric.parts))
        for name, metric in metrics.items()
    }


class _Loop:
    """The loop of `fit`."""

    def __init__(
        self, fetches: list[Tensor], data: Dataset, loss: Tensor, metrics: Mapping[str, Metric],
        validate: Dataset | None, callbacks: Sequence[Any],
    ) -> None:  # fmt: skip
        self._fetches = [*fetches, loss]
        self._data = data
        self._source: Dataset | WorkerReading = data
        if data.by_workers:
            self._source = bind(data, self._fetches)
            self._fetches = self._source.fetches
        self._metrics = metrics
        self._validate: Any = validate
        if validate is not None and validate.by_workers and metrics:
            self._validate, self._metrics = _bind_metrics(validate, metrics)
        self._callbacks = callbacks

    def run(self, session: Session, steps: int | None, progress: bool) -> TrainingHistory:
        """Train from where the session is, and return the course."""
        number = _next_training(session)
        taken = variable(init.zeros((), "int64"), name=f"fit/steps{number}", trainable=False)
        self._fetches = [*self._fetches[:-1], assign(taken, taken + 1), self._fetches[-1]]
        run = TrainingRun(session, self._variables())
        done = int(session.get(taken))
        check_same_files(session, self._data, number, done)
        count = self._data.count
        total = None if count is None else count * self._data.batches_per_epoch
        if steps is not None:
            total = done + steps if total is None else min(total, done + steps)
        run.step, run.history.first_step = done, done
        if total is not None and done >= total:
            for each in run.variables:  # none runs: a checkpoint of another model would stay unseen
                session.get(each)
        bar = ProgressBar(total, done, progress)
        self._call("begin", run)
        try:
            self._train(run, bar, total)
        except KeyboardInterrupt:
            run.history.stopped = "interrupted"
            raise
        except GraphflowError as error:
            epoch, batch = self._data.position(run.step)
            error.add_note(f"in a training by fit, at batch {batch} of epoch {epoch}")
            raise
        finally:
            bar.close()
            self._call("end", run)
        return run.history

    def _train(self, run: TrainingRun, bar: ProgressBar, total: int | None) -> None:
        per_epoch = max(self._data.batches_per_epoch, 1)
        begun, first = time.monotonic(), len(run.history.losses)
        batches: Iterator[Any] = self._source.start(run.step)
        run.epoch = run.step // per_epoch
        steps = [c.step for c in self._callbacks if hasattr(c, "step")]
        session_run, fetches, losses = run.session.run, self._fetches, run.history.losses
        while total is None or run.step < total:
            batch = next(batches, None)
            if batch is None:
                return
            run.loss = loss = float(session_run(fetches, batch)[-1])
            losses.append(loss)
            run.step = step = run.step + 1
            if bar.is_drawn:
                bar.show_step(step, run.epoch, loss)
            for hook in steps:
                hook(run)
            if step % per_epoch == 0:
                self._end_epoch(run, bar, time.monotonic() - begun, losses[first:])
                begun, first = time.monotonic(), len(losses)
                run.epoch = step // per_epoch
            if run.history.stopped:
                return
        if run.step % per_epoch:
            self._end_epoch(run, bar, time.monotonic() - begun, losses[first:])

    def _end_epoch(
        self, run: TrainingRun, bar: ProgressBar, seconds: float, losses: Sequence[float]
    ) -> None:
        row: dict[str, Any] = {
            "epoch": run.epoch, "step": run.step, "seconds": seconds,
            "loss": float(np.mean(losses)) if losses else float("nan"),
        }  # fmt: skip
        if self._validate is not None and self._metrics:
            row |= evaluate(run.session, self._metrics, self._validate.start())
        run.history.epochs.append(row)
        bar.show_epoch(row)
        self._call("epoch", run)

    def _call(self, hook: str, run: TrainingRun) -> None:
        for callback in self._callbacks:
            if hasattr(callback, hook):
                getattr(callback, hook)(run)

    def _variables(self) -> list[Tensor]:
        """Return the variables that predictions read or steps assign, without optimisers' state."""
        parts = [part for metric in self._metrics.values() for part in metric.parts]
        graph = Graph([*parts, *self._fetches])
        read = {node for part in parts for node in Graph([part]).variables}
        return [
            node.outputs[0] for node in graph.variables if node.attrs["trainable"] or node in read
        ]


def _check(
    train: Any, data: Any, loss: Any, metrics: Any, validate: Any, callbacks: Any
) -> list[Tensor]:
    """Check the arguments of `fit`, and return the fetches of a step; raises as it."""
    at = f"fit at {user_location()}"
    fetches = list(train) if isinstance(train, list | tuple) else [train]
    if not fetches or not all(isinstance(t, Tensor) for t in fetches):
        raise ArgumentError(
            f"{at}: train must be the result of minimize, or a list of it and further updates, not "
            f"{train!r}"
        )
    if not any(t.node.op in (REGISTRY["group"], REGISTRY["assign"]) for t in fetches):
        raise ArgumentError(
            f"{at}: {fetches[0]!r} trains nothing; give gf.optim.Adam(1e-3).minimize(loss)"
        )
    if not isinstance(loss, Tensor) or loss.ndim or kind(loss.dtype) != "float":
        raise ArgumentError(f"{at}: loss must be a float scalar of the graph, not {loss!r}")
    for name, given in (("data", data), ("validate", validate)):
        if not isinstance(given, Dataset) and not (name == "validate" and given is None):
            raise ArgumentError(
                f"{at}: {name} must be a dataset, such as gf.data.arrays(x=…, y=…).batch(64), not "
                f"{type(given).__name__}"
            )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ArgumentError(f"{at}: metrics must be a dict from name to metric, not {metrics!r}")
    if metrics and validate is None:
        raise ArgumentError(
            f"{at}: metrics are computed over validate=, after each epoch; give a dataset"
        )
    _check_columns(at, data, fetches, loss)
    _check_last_batch(at, data, strategy_of(Graph(fetches)))
    for callback in callbacks:
        if not any(hasattr(callback, hook) for hook in HOOKS):
            raise ArgumentError(
                f"{at}: {callback!r} is no callback; it has none of the methods {', '.join(HOOKS)}"
            )
    return fetches


def _check_last_batch(at: str, data: Dataset, strategy: Any) -> None:
    """Check that each replica gets a row of an epoch's last batch, which may be smaller.

    Otherwise the training would end with an error after an epoch, perhaps after hours.
    """
    least = getattr(strategy, "replicas", 1) * getattr(strategy, "accumulate", 1)
    rows = data.batch_rows((0, data.batches_per_epoch - 1))
    if isinstance(least, int) and rows < least:
        raise ArgumentError(
            f"{at}: the last batch of an epoch has {show_count(rows, 'row')}, of {data.rows} in "
            f"batches of {data.size}, and the strategy divides it into {least} parts; take "
            f"data.batch({data.size}, drop_last=True), another size, or fewer replicas"
        )


def _check_columns(at: str, data: Dataset, fetches: Sequence[Tensor], loss: Tensor) -> None:
    """Check that the columns of a batch are placeholders of the step, and the reverse."""
    if not data.batches_per_epoch:
        raise ArgumentError(f"{at}: the dataset has no rows")
    names = [node.name for node in Graph([*fetches, loss]).placeholders]
    columns = list(data.read((0, 0)))
    for column in columns:
        if column not in names:
            hint = did_you_mean(column, names)
            raise ArgumentError(
                f"{at}: no placeholder is called {column!r}, a column of the data; "
                f"{hint + '; ' if hint else ''}name one so, or leave columns out by "
                f"data.columns({', '.join(repr(n) for n in names)})"
            )
    for name in names:
        if name not in columns:
            raise ArgumentError(
                f"{at}: the placeholder {name!r} has no column; the data has {', '.join(columns)}"
            )

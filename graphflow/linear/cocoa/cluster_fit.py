"""Fits on several workers: the session, the table in parts, and the loop of rounds."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from graphflow.base.progress import show_progress
from graphflow.errors import LinearModelError, LinkLost, WorkerLost
from graphflow.linear.cocoa.local_steps import LocalSteps
from graphflow.linear.cocoa.rounds import Rounds, choose_axis
from graphflow.linear.cocoa.table_parts import FileTable, TablePart, cut_table, read_parts
from graphflow.linear.fit_history import CertifiedModel, FitHistory, FitMonitor
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem
from graphflow.linear.tables.sparse_table import SvmlightTable
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.plans.building.plan_fetches import plan
from graphflow.sessions.session import Session

_FIRST_PASSES, _MOST_PASSES = 3.0, 8
"""Passes before the first certificate of a model that moved, and between two, at most."""
_MOST_RESTARTS = 3
"""Times that a fit starts anew after the loss of a worker."""


class ClusterFit:
    """Solves problems that share a table, on the workers of a cluster.

    The table goes to the workers once, in parts. It is a context manager, which ends the workers
    that it started. If it loses one of these, it starts all of them anew, up to three times.

    Args:
        cluster: a `gf.Cluster`, the path of a cluster file, or a `gf.Session`, which stays open.

    Attributes:
        session: the session; another one after the loss of a worker.
    """

    def __init__(self, cluster: Cluster | Session | str | os.PathLike[str]) -> None:
        self._cluster = cluster
        self.session = cluster if isinstance(cluster, Session) else Session(cluster, trial=False)
        self._restarts = 0
        self._file: SvmlightTable | None = None
        self._read: FileTable | None = None
        self._parts: dict[str, tuple[Any, list[TablePart]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """End the workers, unless the session is the user's."""
        if not isinstance(self._cluster, Session):
            self.session.close()

    @property
    def devices(self) -> list[str]:
        """The names of the devices that get a part each: all CPUs."""
        cluster = self.session.cluster
        return [name for name in cluster.devices if cluster.device(name).kind == "cpu"]

    def solve(
        self, problem: LinearProblem, tol: float, max_passes: float, history: FitHistory, *,
        local_steps: int | str = "auto", seed: int = 0, w: Floats | None = None,
    ) -> CertifiedModel:  # fmt: skip
        """Solve a problem; Ctrl-C ends the work with the best model so far in `history.best`.

        Args:
            problem: its table is the same object in each call.
            tol: the relative gap that is enough.
            max_passes: passes over the data, at most.
            history: where certificates are noted.
            local_steps: the steps of a round, or "auto".
            seed: of the orders of coordinates.
            w: coefficients to begin with, if coordinates are columns.

        Raises:
            LinearModelError: CoCoA does not solve the problem, or there are more workers than rows.
            WorkerLost: a worker of the user's session was lost, or workers were lost four times.
        """
        axis = choose_axis(problem)
        history.solver = "cocoa"
        monitor = FitMonitor(problem, tol, max_passes, history)
        own = w if axis == "columns" else None
        while True:
            rounds = Rounds(problem, self._cut(problem.x, axis), axis, seed=seed, own=own)
            choice = LocalSteps(local_steps, min(part.count for part in rounds.parts))
            where = f"{problem.rows:,} x {problem.columns:,} by {len(rounds.parts)} workers"
            with show_progress("fitting", where=where):
                try:
                    RoundLoop(self.session, rounds, choice, monitor).run()
                    break
                except (WorkerLost, LinkLost) as error:
                    self._restart(error)
                finally:
                    history.local_steps = choice.steps
            own = rounds.own
        history.plan = plan(rounds.round, self.session.cluster, {rounds.steps: (choice.steps, 0)})
        assert monitor.best is not None
        return monitor.best

    def read(self, table: SvmlightTable) -> FileTable:
        """Let each worker read its part of a file."""
        while True:
            try:
                self._read = read_parts(self.session, table, self.devices)
            except (WorkerLost, LinkLost) as error:
                self._restart(error)
            else:
                self._file = table
                return self._read

    def _restart(self, error: WorkerLost | LinkLost) -> None:
        """Start all workers anew after the loss of one; they read their parts of a file again.

        Raises:
            WorkerLost, LinkLost: the error itself: the session is the user's, or this was the
                fourth time.
        """
        if isinstance(self._cluster, Session):
            error.add_note(
                "The fit cannot go on, since the session of cluster= has lost a worker: give "
                "cluster= a gf.Cluster, with which a fit starts lost workers anew."
            )
            raise error
        if self._restarts == _MOST_RESTARTS:
            error.add_note(
                f"The fit has started its workers anew {_MOST_RESTARTS} times, and lost one again: "
                "see to what ends them (memory, for example), and fit again."
            )
            raise error
        self._restarts += 1
        self.session.close()
        self.session = Session(self._cluster, trial=False)
        if self._file is not None and self._read is not None:
            before = self._read.shape
            if self.read(self._file).shape != before:
                raise LinearModelError(f"{self._file.path} was changed during the fit; fit again")

    def _cut(self, x: Any, axis: str) -> Sequence[TablePart]:
        """Return the parts of a table, which are made once."""
        if isinstance(x, FileTable):
            if axis != "rows":
                raise LinearModelError(
                    "workers read rows of a file, and this problem is solved by columns; use "
                    "fit_intercept=False and an l2 penalty, or give the table itself for X"
                )
            assert self._read is not None
            return self._read.parts
        known = self._parts.get(axis)
        if known is None or known[0] is not x:
            known = self._parts[axis] = x, cut_table(x, axis, self.devices)
        return known[1]


class RoundLoop:
    """Runs rounds until the monitor has what it wants.

    Args:
        session: the session that has the parts.
        rounds: the graphs.
        choice: gives each round its number of steps.
        monitor: is given certified models.

    Attributes:
        limit: seconds after which it ends in any case.
    """

    def __init__(
        self, session: Session, rounds: Rounds, choice: LocalSteps, monitor: FitMonitor
    ) -> None:
        self._session, self._rounds, self._choice, self._monitor = session, rounds, choice, monitor
        self._feeds: dict[int, dict[Any, Any]] = {}
        self._known_bytes: dict[int, int] = {}
        self._bytes = max((each.bytes for each in monitor.history.certificates), default=0)
        self.limit = math.inf

    def run(self) -> None:
        """Run rounds, and certify models now and then."""
        monitor, choice = self._monitor, self._choice
        self._session.run(self._rounds.start)
        self._warm_up(choice.first)
        if self._accept_model():
            return
        wanted = _FIRST_PASSES
        while True:
            before, start, since = monitor.history.gaps[-1], time.perf_counter(), 0.0
            while since < wanted and not monitor.passes + since >= monitor.most_passes:
                since += self._run_round()
            seconds = time.perf_counter() - start
            monitor.passes += since
            is_late = monitor.seconds > self.limit
            if self._accept_model() or monitor.is_exhausted or is_late:
                return
            choice.note_gap(before, monitor.history.gaps[-1], monitor.tol, seconds)
            wanted = monitor.passes_left(_MOST_PASSES)

    def _warm_up(self, sizes: Sequence[int]) -> None:
        """Compile rounds of some numbers of steps, which is no part of what they take."""
        new = [size for size in sizes if size not in self._feeds]
        if new:
            rounds = self._rounds
            self._session.warmup(rounds.round, {rounds.steps: [(size, 0) for size in new]})
            for size in new:
                self._feeds[size] = {rounds.steps: np.zeros((size, 0), np.float32)}

    def _run_round(self) -> float:
        """Run a round; return its passes over the data."""
        steps = self._choice.steps
        self._warm_up([steps])
        start = time.perf_counter()
        self._session.run(self._rounds.round, self._feeds[steps])
        self._choice.note_round(steps, time.perf_counter() - start)
        self._bytes += self._bytes_of(self._rounds.round)
        return steps * len(self._rounds.parts) / self._rounds.coordinates

    def _accept_model(self) -> bool:
        """Certify the model; return True if it is good enough."""
        rounds, monitor = self._rounds, self._monitor
        found, w, b = rounds.read(self._session.run(rounds.certificate))
        self._bytes += self._bytes_of(rounds.certificate)
        found = replace(found, passes=monitor.passes, seconds=monitor.seconds, bytes=self._bytes)
        return monitor.take(found, w, b)

    def _bytes_of(self, fetches: Any) -> int:
        """Return the bytes that workers send each other for some fetches, as their plan says."""
        key = id(fetches)
        if key not in self._known_bytes:
            moved = self._session.plan(fetches).moved
            self._known_bytes[key] = sum(
                each.bytes for each in moved if "/client" not in (each.source, each.target)
            )
        return self._known_bytes[key]


__all__ = ["ClusterFit", "RoundLoop"]

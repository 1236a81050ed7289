"""Coordinate methods where an accelerator holds a part of the coordinates: those with the largest
gaps (DuHL).

    host:          gaps of all coordinates for the model as the round began, and its certificate
    accelerator:   passes over the coordinates that it holds, at the same time
                       └── others, drawn by their gaps, replace those that moved least ──┘

A round loads as few coordinates as make up `_COVERED` of the gap, so loads end once the coordinates
that matter are there. Gaps of those outside are a round old when they are used.

Source: Dünner, Parnell and Jaggi, NeurIPS 2017 (DuHL).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.progress import show_progress
from graphflow.errors import LinearModelError
from graphflow.linear.fit_history import CertifiedModel, FitMonitor
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.coordinate_descent.coordinate_sides import (
    ColumnSide,
    CoordinateSide,
    RowSide,
)
from graphflow.placement.clusters.devices import Device

_COVERED = 0.95
"""Share of the gap that a round loads, as far as it is not on the accelerator and there is room."""


@dataclass(frozen=True)
class Duhl:
    """The solver "duhl": an accelerator with less memory than the table holds the rows, or columns,
    that matter.

        gf.linear.LinearSVC(loss="hinge", fit_intercept=False, solver=gf.linear.Duhl(0.2))

    Losses with an l2 penalty and no free intercept work by rows, squared losses otherwise by
    columns. It pays where few of them decide: hinge losses and l1 penalties.

    Args:
        capacity: the memory of the accelerator: a share of the table up to 1, bytes, or a device of
            a cluster, whose memory it is.
        choice: "gap"; for comparisons, "cyclic" or "random" coordinates fill the accelerator anew
            in each round.
        passes: over the coordinates on the accelerator, in each round.

    Raises:
        LinearModelError: an argument is none of these.
    """

    capacity: float | Device = 0.2
    choice: Literal["gap", "cyclic", "random"] = "gap"
    passes: int = 10

    def __post_init__(self) -> None:
        amount = self._amount
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount > 0:
            raise LinearModelError(
                f"capacity must be a share up to 1, bytes or a device, not {self.capacity!r}"
            )
        if self.choice not in ("gap", "cyclic", "random"):
            raise LinearModelError(f"choice is 'gap', 'cyclic' or 'random', not {self.choice!r}")
        if isinstance(self.passes, bool) or not self.passes >= 1:
            raise LinearModelError(f"passes must be a number from 1, not {self.passes!r}")

    @property
    def _amount(self) -> Any:
        return self.capacity.memory if isinstance(self.capacity, Device) else self.capacity

    def limit_bytes(self, table: int) -> int:
        """Return the memory of the accelerator, given the bytes of the table."""
        return int(self._amount * table if self._amount <= 1 else self._amount)


def works_by_rows(problem: LinearProblem) -> bool:
    """Return True if the coordinates are rows, False if they are columns.

    Raises:
        LinearModelError: DuHL does not solve the problem.
    """
    has_l1 = problem.l1 > 0.0 or problem.is_positive
    if problem.l2 > 0.0 and not has_l1 and not problem.has_intercept:
        return True
    if problem.loss.name == "squared" and not problem.bias:
        return False
    raise LinearModelError(
        "solver='duhl' works by rows, for an l2 penalty without an intercept, or by columns, for "
        f"the squared loss; this is the {problem.loss.name} loss with "
        f"{'an l1 penalty' if has_l1 else 'an intercept' if problem.has_intercept else 'none'}; "
        "use solver='auto'"
    )


def solve_on_accelerator(
    problem: LinearProblem, monitor: FitMonitor, options: Duhl, seed: int = 0
) -> CertifiedModel:
    """Solve a problem; the loads up to each certificate are noted in `FitHistory.loads`.

    Args:
        problem: the problem.
        monitor: is given certified models, one each round.
        options: of the accelerator.
        seed: of the orders of coordinates.

    Raises:
        LinearModelError: DuHL does not solve the problem, or the accelerator holds not even one
            coordinate.
    """
    by_rows = works_by_rows(problem)
    problem = replace(problem, x=_order_entries(problem.x, by_rows))
    side = RowSide(problem) if by_rows else ColumnSide(problem)
    device = _Accelerator(side, options, np.random.default_rng(seed))
    monitor.history.solver = "duhl"
    where = f"{problem.rows:,} x {problem.columns:,} by duhl"
    with show_progress("fitting", where=where), ThreadPoolExecutor(1, "accelerator") as thread:
        _run_rounds(side, device, options, monitor, thread)
    assert monitor.best is not None
    return monitor.best


def _run_rounds(
    side: CoordinateSide, device: _Accelerator, options: Duhl, monitor: FitMonitor,
    thread: ThreadPoolExecutor,
) -> None:  # fmt: skip
    loads = monitor.history.loads
    gaps, is_enough = side.check_gap(monitor)
    loads.append(0)
    while not (is_enough or monitor.is_exhausted):
        device.hold(device.choose(gaps))
        work = thread.submit(device.run, side.own[device.held], side.shared.copy())
        if monitor.passes:
            gaps, is_enough = side.check_gap(monitor)
            loads.append(device.loads)
        own, side.shared, gaps[device.held] = work.result()
        side.own[device.held] = own
        monitor.passes += options.passes * len(device.held) / side.count
    side.check_gap(monitor)
    loads.append(device.loads)


def _order_entries(x: Any, by_rows: bool) -> Any:
    """Return a matrix in the order in which a side reads it."""
    if not isinstance(x, np.ndarray):
        return x.tocsr() if by_rows else x.tocsc()
    return np.ascontiguousarray(x) if by_rows else np.asfortranarray(x)


class _Accelerator:
    """A device that holds some coordinates, and works on them alone.

    Attributes:
        held: the numbers of the coordinates that it holds, sorted.
        loads: coordinates that went to it so far.
    """

    def __init__(self, side: CoordinateSide, options: Duhl, random: np.random.Generator) -> None:
        self._side, self._options, self._random = side, options, random
        self._sizes = side.sizes()
        total, largest = int(self._sizes.sum()), int(self._sizes.max(initial=0))
        self._room = options.limit_bytes(total)
        if self._room < largest:
            raise LinearModelError(
                f"capacity={options.capacity!r} is {self._room:,} bytes, and the largest "
                f"{side.name} takes {largest:,} of the {total:,} bytes of the table; raise it"
            )
        self.held = np.zeros(0, np.int64)
        self.loads = 0
        self._moves = np.zeros(side.count)
        self._part: Any = None
        self._at = 0

    def choose(self, gaps: Floats) -> Any:
        """Return the coordinates to hold in the next round."""
        count = self._side.count
        if self._options.choice == "random":
            return self._fill(self._random.permutation(count))
        if self._options.choice == "cyclic":
            found = self._fill((self._at + np.arange(count)) % count)
            self._at = (self._at + len(found)) % count
            return found
        outside = np.setdiff1d(np.arange(count), self.held, assume_unique=True)
        # Drawn by gaps: the largest ones alone would be the same two sets in turns.
        keys = self._random.exponential(size=len(outside)) / np.maximum(gaps[outside], 1e-300)
        outside = outside[np.argsort(keys)]
        sums = np.cumsum(gaps[outside])
        goal = float(gaps[outside].sum()) - (1.0 - _COVERED) * float(gaps.sum())
        wanted = int(np.searchsorted(sums, goal)) + 1 if goal > 0.0 else 0
        kept = self.held[np.argsort(-self._moves[self.held], kind="stable")]
        return self._fill(np.concatenate([outside[:wanted], kept]))

    def _fill(self, order: Any) -> Any:
        """Return the first coordinates of an order that fit, sorted."""
        fitting = int((np.cumsum(self._sizes[order]) <= self._room).sum())
        return np.sort(order[: max(fitting, 1)])

    def hold(self, chosen: Any) -> None:
        """Load coordinates that are not there yet, and drop others."""
        self.loads += len(np.setdiff1d(chosen, self.held, assume_unique=True))
        self.held = chosen
        self._part = self._side.pick(chosen)

    def run(self, own: Floats, shared: Floats) -> tuple[Floats, Floats, Floats]:
        """Pass over the coordinates; return their variables, the shared vector, and their gaps."""
        before, squares = own.copy(), self._part.squares
        for _ in range(self._options.passes):
            order = self._random.permutation(len(own))
            self._part.visit(order, own, shared)
        self._moves[self.held] = np.abs(own - before) * np.sqrt(squares)
        return own, shared, self._part.gaps(own, shared)


__all__ = ["Duhl", "solve_on_accelerator", "works_by_rows"]

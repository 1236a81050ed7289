"""Linear and mixed-integer programs through HiGHS, made by rows, solved by one thread.

    model = Model()
    x = model.columns(3, upper=1.0, integer=True)
    model.row({x: 1.0, x + 1: 1.0}, lower=1.0)
    found = model.solve(nodes=1_000)

Without a clock the answer depends on the model alone: work is limited in nodes of the search tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import PlacementError
from graphflow.placement.problems.problem import Floats

INF = float("inf")


@dataclass(frozen=True, eq=False)
class Solution:
    """The result of a solver's run.

    Args:
        values: (columns,) of the best point; None if there is none, or none was found.
        objective: of that point; inf without one.
        bound: no point has a lower objective; inf if none exists.
        duals: (rows,) of a linear program's optimum.
        pivots: steps of the simplex method that it took.
    """

    values: Floats | None
    objective: float
    bound: float
    duals: Floats | None = None
    pivots: int = 0


@dataclass
class MixedIntegerProgram:
    """A program to minimise: columns (variables), then rows (constraints) over them."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float]] = field(default_factory=list)
    start: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def columns(
        self,
        count: int,
        *,
        cost: float = 0.0,
        lower: float = 0.0,
        upper: float = INF,
        integer: bool = False,
    ) -> int:
        """Add columns; the number of the first one."""
        first = len(self.cost)
        self.cost += [cost] * count
        self.lower += [lower] * count
        self.upper += [upper] * count
        self.integer += [integer] * count
        return first

    def row(self, terms: Mapping[int, float], lower: float = -INF, upper: float = INF) -> int:
        """Add lower <= Σ terms <= upper; the number of the row."""
        self.rows.append((lower, upper))
        self.index += terms.keys()
        self.value += terms.values()
        self.start.append(len(self.index))
        return len(self.rows) - 1

    def solve(
        self,
        *,
        nodes: int = 10_000,
        cutoff: float = INF,
        begin: Floats | None = None,
        seconds: float = INF,
        gap: float = 1e-6,
    ) -> Solution:
        """The optimum, or what is known of it after so many nodes of the search tree.

        Args:
            cutoff: points above this are of no interest.
            begin: (columns,) a point to start from.
            seconds: a clock to stop by; the answer is not reproducible where it strikes.
            gap: share of the objective within which a point counts as optimal.
        """
        return Live(self).solve(nodes=nodes, cutoff=cutoff, begin=begin, seconds=seconds, gap=gap)


class Live:
    """A model inside HiGHS, to be solved again and again with other bounds, costs and columns."""

    def __init__(self, model: MixedIntegerProgram) -> None:
        self._library = _highs()
        self.mixed = any(model.integer)
        solver = _silent(self._library)
        for name, value in (
            ("threads", 1), ("parallel", "off"), ("random_seed", 0), ("mip_heuristic_effort", 0.0),
            ("mip_heuristic_run_feasibility_jump", False), ("mip_detect_symmetry", False),
        ):  # fmt: skip
            solver.setOptionValue(name, value)
        solver.passModel(_lp(self._library, model))
        self._solver = solver

    def bounds(self, column: int, lower: float, upper: float) -> None:
        """Change what a column may be."""
        self._solver.changeColBounds(column, lower, upper)

    def costs(self, first: int, values: Floats) -> None:
        """Change the objective of columns from `first` on."""
        at = np.arange(first, first + len(values), dtype=np.int32)
        self._solver.changeColsCost(len(values), at, np.asarray(values, dtype=np.float64))

    def add(self, cost: float, rows: Floats, values: Floats) -> None:
        """Add a column >= 0."""
        self._solver.addCol(
            cost, 0.0, INF, len(rows), np.asarray(rows, np.int32), np.asarray(values, np.float64)
        )

    def row_upper(self, row: int, upper: float) -> None:
        """Change the upper bound of a row without a lower one."""
        self._solver.changeRowBounds(row, -INF, upper)

    def solve(
        self,
        *,
        nodes: int = 10_000,
        cutoff: float = INF,
        begin: Floats | None = None,
        seconds: float = INF,
        gap: float = 1e-6,
    ) -> Solution:
        """See `Model.solve`."""
        solver = self._solver
        solver.setOptionValue("time_limit", float(solver.getRunTime() + seconds))
        if self.mixed:
            solver.setOptionValue("mip_max_nodes", nodes)
            solver.setOptionValue("mip_rel_gap", gap)
            solver.setOptionValue("objective_bound", cutoff)
            if begin is not None:
                known = self._library.HighsSolution()
                known.col_value = list(map(float, begin))
                solver.setSolution(known)
        solver.run()
        status, states = solver.getModelStatus(), self._library.HighsModelStatus
        info = solver.getInfo()
        pivots = max(0, int(info.simplex_iteration_count))
        if status in (states.kInfeasible, states.kObjectiveBound):
            return Solution(None, INF, cutoff, pivots=pivots)
        valid = info.primal_solution_status == self._library.SolutionStatus.kSolutionStatusFeasible
        found = solver.getSolution()
        values = np.array(found.col_value) if valid else None
        objective = float(info.objective_function_value) if valid else INF
        if self.mixed:
            bound = min(objective, float(info.mip_dual_bound))
            return Solution(values, objective, bound, pivots=pivots)
        bound = objective if status == states.kOptimal else -INF
        return Solution(values, objective, bound, np.array(found.row_dual), pivots)


def _highs() -> Any:
    try:
        import highspy
    except ImportError:
        raise PlacementError(
            "this needs HiGHS, which is not installed: pip install highspy"
        ) from None
    return highspy


def _silent(library: Any) -> Any:
    """A solver that prints nothing: a new one sets up its callbacks, which from 1.16 on prints a
    name and a licence before anyone could tell it not to."""

    class Silent(library.Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    return Silent()


def _lp(library: Any, model: MixedIntegerProgram) -> Any:
    lp = library.HighsLp()
    lp.num_col_, lp.num_row_ = len(model.cost), len(model.rows)
    lp.col_cost_ = np.array(model.cost, dtype=np.float64)
    lp.col_lower_ = np.array(model.lower, dtype=np.float64)
    lp.col_upper_ = np.array(model.upper, dtype=np.float64)
    lp.row_lower_ = np.array([low for low, _ in model.rows], dtype=np.float64)
    lp.row_upper_ = np.array([high for _, high in model.rows], dtype=np.float64)
    lp.a_matrix_.format_ = library.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(model.start, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(model.index, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(model.value, dtype=np.float64)
    if any(model.integer):
        kinds = library.HighsVarType
        lp.integrality_ = [kinds.kInteger if i else kinds.kContinuous for i in model.integer]
    return lp

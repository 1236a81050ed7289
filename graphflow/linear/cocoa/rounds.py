"""The graphs of CoCoA: a round of local steps, and a certificate.

    order ─→ coordinate_pass ─→ change of shared ─┐
                 ↑     └→ own                     ├─ all-reduce ─→ shared
    (each worker has its part, own and shared)  ──┘

With K workers, a round adds γ times the changes of all of them. A worker takes each change of its
own for σ' times as large, which stands for what the others do meanwhile: γ = 1 goes with σ' = K
(CoCoA+), γ = 1/K with σ' = 1 (CoCoA).

Source: Jaggi et al., NeurIPS 2014 (CoCoA); Ma et al., ICML 2015 (CoCoA+); Smith et al., JMLR 18,
2018 (by columns).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.errors import LinearModelError
from graphflow.frontend.builders import assign, placeholder
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor, device
from graphflow.linear.cocoa.coordinate_ops import coordinate_order, coordinate_pass
from graphflow.linear.cocoa.sum_ops import part_product, part_squares, part_sums
from graphflow.linear.cocoa.table_parts import TablePart
from graphflow.linear.losses import LOGISTIC, Floats
from graphflow.linear.problem import Certificate, LinearProblem
from graphflow.parallel import all_reduce


def choose_axis(problem: LinearProblem) -> str:
    """Return the coordinates by which CoCoA solves a problem, "rows" or "columns".

    Raises:
        LinearModelError: it does not solve the problem; names a solver of one machine.
    """
    if problem.l2 and not (problem.l1 or problem.is_positive or problem.has_intercept):
        return "rows"
    if problem.loss.name == "squared" and problem.has_dual and not problem.bias:
        return "columns"
    reason = "there is no penalty"
    if problem.has_dual:
        reason = "the intercept has no penalty" if problem.has_intercept else "of the l1 penalty"
    raise LinearModelError(
        f"cluster= with loss {problem.loss.name!r}: CoCoA does not solve this problem, because "
        f"{reason}; use fit_intercept=False and an l2 penalty, or leave out cluster="
    )


class Rounds:
    """The state of a fit on the devices of its parts, and the fetches that change it.

    Args:
        problem: the problem; its table is in the parts.
        parts: the parts.
        axis: "rows" or "columns", along which it is in parts.
        gamma: the factor of the sum of all changes, 1 or 1/K.
        sigma: σ', by which local steps overrate their changes; default: γ · K.
        seed: of the orders of coordinates; each part has one of its own.
        own: (coordinates,) dual variables, or coefficients, to begin with.

    Attributes:
        own: those of the last certificate that was read, or those to begin with.
        start: the fetch to run first, which computes squared norms.
        round: the fetch of a round.
        steps: the placeholder (H, 0) that gives a round its number of steps.
        vectors: the variables of each part beside its matrix, by name.
        certificate: the fetches that `read` takes; running them computes `shared` anew from `own`.
    """

    def __init__(
        self, problem: LinearProblem, parts: Sequence[TablePart], axis: str, *, gamma: float = 1.0,
        sigma: float | None = None, seed: int = 0, own: Floats | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.parts, self.axis = problem, parts, axis
        self._gamma, self._seed, self.own = gamma, seed, own
        self._sigma = gamma * len(parts) if sigma is None else sigma
        self.steps = placeholder("float32", ("local_steps", 0), name="local_steps")
        self._is_rows = axis == "rows"
        self._width = problem.columns if self._is_rows else problem.rows
        self.vectors = [self._keep_vectors(part) for part in parts]
        self.start = self._build_start()
        self.round = self._build_round()
        self.certificate = self._build_certificate()

    @property
    def coordinates(self) -> int:
        """The number of coordinates of all parts."""
        return sum(part.count for part in self.parts)

    # State ------------------------------------------------------------------------------------

    def _keep_vectors(self, part: TablePart) -> dict[str, Tensor]:
        """Return the variables of a part beside its matrix."""
        problem = self.problem
        own, means = np.zeros(part.count), np.zeros(part.count)
        targets, weights = problem.y, problem.c
        if self._is_rows:
            targets, weights = part.pick(targets), part.pick(weights)
            squares = np.zeros(part.count)  # `start` computes them
            if problem.loss.code == LOGISTIC:
                own = targets * np.minimum(1e-3 * weights, 1e-8)
        else:
            squares = part.weighted_squares(weights)
            if problem.has_intercept:
                means = part.weighted_means(weights)
                squares = np.maximum(squares - weights.sum() * means**2, 0.0)
        if self.own is not None:
            own = part.pick(self.own)
        known = {
            "own": own, "target": targets, "weight": weights, "square": squares, "mean": means,
            "shared": np.zeros(self._width + self._is_rows), "position": np.zeros((), np.int64),
        }  # fmt: skip
        return {name: part.keep(value, name) for name, value in known.items()}

    def _sum(self, values: Sequence[Tensor]) -> list[Tensor]:
        return list(all_reduce(values))

    # Graphs -----------------------------------------------------------------------------------

    def _build_start(self) -> Tensor:
        updates = []
        for part, has in zip(self.parts, self.vectors, strict=True):
            with device(part.device):
                squares = has["square"]
                if self._is_rows:
                    squares = part_squares(*part.matrix) + self.problem.bias**2
                updates.append(assign(has["square"], squares))
        with device(self.parts[0].device):
            made: Tensor = REGISTRY["group"](*updates, name="cocoa/start")
        return made

    def _build_round(self) -> Tensor:
        problem = self.problem
        attrs: dict[str, Any] = {
            "axis": self.axis, "loss": problem.loss.code, "parameter": problem.loss.parameter,
            "l1": problem.l1, "l2": problem.l2, "sigma": self._sigma, "bias": problem.bias,
            "is_positive": problem.is_positive,
        }  # fmt: skip
        changes, updates = [], []
        for part, has in zip(self.parts, self.vectors, strict=True):
            with device(part.device):
                order, position = coordinate_order(
                    has["position"], self.steps, count=part.count, seed=self._seed + part.number
                )
                own, shared = coordinate_pass(
                    has["own"], has["shared"], order,
                    has["target" if self._is_rows else "mean"], has["weight"], has["square"],
                    *part.matrix, **attrs,
                )  # fmt: skip
                changes.append((shared - has["shared"]) * (self._gamma / self._sigma))
                if self._gamma != 1.0:
                    own = has["own"] + (own - has["own"]) * self._gamma
                updates += [assign(has["own"], own), assign(has["position"], position)]
        for part, has, change in zip(self.parts, self.vectors, self._sum(changes), strict=True):
            with device(part.device):
                updates.append(assign(has["shared"], has["shared"] + change))
        made: Tensor = REGISTRY["group"](*updates, name="cocoa/round")
        return made

    def _build_certificate(self) -> list[Tensor]:
        """Compute `shared` from `own`, and what each part adds to the certificate."""
        problem = self.problem
        attrs: dict[str, Any] = {"axis": self.axis, "bias": problem.bias}
        products = []
        for part, has in zip(self.parts, self.vectors, strict=True):
            with device(part.device):
                products.append(part_product(has["own"], *part.matrix, width=self._width, **attrs))
        more: dict[str, Any] = {
            "loss": problem.loss.code, "parameter": problem.loss.parameter, "l1": problem.l1,
            "is_positive": problem.is_positive,
        }  # fmt: skip
        sums, owns, updates = [], [], []
        for part, has, found in zip(self.parts, self.vectors, self._sum(products), strict=True):
            with device(part.device):
                shared, intercept = self._finish(has, found)
                updates.append(assign(has["shared"], shared))
                sums.append(
                    part_sums(
                        has["own"], shared, has["target"], has["weight"], *part.matrix,
                        **attrs, **more,
                    )
                )  # fmt: skip
                owns.append(has["own"])
                if part.number == 0:
                    model = shared if self._is_rows else intercept
        with device(self.parts[0].device):
            done: Tensor = REGISTRY["group"](*updates, name="cocoa/certificate")
        return [done, model, *sums, *owns]

    def _finish(self, has: dict[str, Tensor], found: Tensor) -> tuple[Tensor, Tensor]:
        """Return `shared` made of the sum of all parts, and the intercept."""
        if self._is_rows:
            return found * (1.0 / self.problem.l2), found[:0]
        residual = has["target"] - found
        if not self.problem.has_intercept:
            return residual, has["target"][:1] * 0.0
        total = FUNCTIONS["sum"](has["weight"])
        intercept = FUNCTIONS["sum"](has["weight"] * residual) / total
        return residual - intercept, FUNCTIONS["reshape"](intercept, (1,))

    # Results ----------------------------------------------------------------------------------

    def read(self, values: Sequence[Any]) -> tuple[Certificate, Floats, float]:
        """Return the certificate, the coefficients and the intercept, from values of `certificate`.

        The sums of the parts are added in the order of the parts. `own` is kept, too, so that a
        loss of workers does not take it.
        """
        _, model, *others = values
        sums = np.stack(others[: len(self.parts)])
        self.own = found = np.empty(self.coordinates)
        for part, own in zip(self.parts, others[len(self.parts) :], strict=True):
            found[part.chosen] = own
        if self._is_rows:
            w = np.array(model if self.problem.bias else model[:-1])
            return self._certify_rows(w, *sums.sum(axis=0)), w, 0.0
        return self._certify_columns(sums), found, float(model[0])

    def _certify_rows(self, w: Floats, losses: float, conjugates: float) -> Certificate:
        half = 0.5 * self.problem.l2 * float(w @ w)
        primal, dual = float(losses) + half, -float(conjugates) - half
        return Certificate(primal, dual, max(primal - dual, 0.0))

    def _certify_columns(self, sums: Floats) -> Certificate:
        problem = self.problem
        size, square, _, beyond = (float(each) for each in sums[:, :4].sum(axis=0))
        most = float(sums[:, 2].max())
        losses, curved, along = (float(each) for each in sums[0, 4:])
        primal = losses + problem.l1 * size + 0.5 * problem.l2 * square

        def dual(factor: float) -> float:
            """Return the dual of so many times β, without the part of l2."""
            return factor * along - 0.5 * factor * factor * curved

        limit = problem.l1 / most if most else np.inf
        if problem.l2:
            found = dual(1.0) - beyond / (2.0 * problem.l2)
            if problem.l1 and limit < 1.0:
                found = max(found, dual(limit))
        else:
            best = along / curved if curved else 1.0
            found = dual(min(max(best, 0.0 if problem.is_positive else -limit), limit))
        return Certificate(primal, found, max(primal - found, 0.0))


__all__ = ["Rounds", "choose_axis"]

"""Muon: steps of matrices along the orthogonal matrix that is nearest to their momentum."""

from __future__ import annotations

from typing import Any

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, VariableError
from graphflow.ir.op import FUNCTIONS, Tensor, user_location
from graphflow.optim.optimizer_base import SPEC_ONLY, Optimizer
from graphflow.optim.optimizer_checks import check_numbers, refuse_sparse
from graphflow.optim.update_targets import Rate, Target, descend, norm, shrink

_QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients of x, x³ and x⁵ in a step of the iteration: the steepest at 0 that stays near 1."""


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Muon(Optimizer):
    """v ← momentum·v + (1−momentum)·g; w ← (1 − lr·weight_decay)·w − lr·s·orthogonal(v).

    `orthogonal` brings all singular values near 1 by Newton–Schulz steps, in the variable's dtype,
    and s = √max(1, rows/columns). It takes matrices only. Give biases, norms and embeddings to
    another rule: `gf.optim.Groups({"*/weight": gf.optim.Muon(0.02)}, gf.optim.AdamW(3e-4))`.

    Args:
        nesterov: along momentum·v + (1−momentum)·g instead of v.
        steps: number of Newton–Schulz steps, from 1.

    Raises:
        VariableError: a variable is no matrix.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
    """

    lr: Rate = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    steps: int = 5

    def __post_init__(self) -> None:
        check_numbers(self, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        refuse_sparse(self)
        what = f"Muon at {user_location()}"
        if not isinstance(self.nesterov, bool):
            raise ArgumentError(f"{what}: nesterov must be True or False, not {self.nesterov!r}")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ArgumentError(f"{what}: steps must be an int from 1, not {self.steps!r}")

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        if value.ndim != 2:
            raise VariableError(
                f"Muon at {user_location()}: {target.variable!r} is no matrix; give it to another "
                'rule, such as gf.optim.Groups({"*/weight": gf.optim.Muon()}, gf.optim.AdamW())'
            )
        rest = 1 - self.momentum
        velocity = target.read("momentum") * self.momentum + gradient * rest
        target.write("momentum", velocity)
        along = gradient * rest + velocity * self.momentum if self.nesterov else velocity
        rows, columns = (int(n) for n in value.shape)
        scale = max(1.0, rows / columns) ** 0.5
        direction = _orthogonal(along, self.steps) * scale
        return descend(shrink(value, self.lr, self.weight_decay), self.lr, direction)


def _orthogonal(x: Tensor, steps: int) -> Tensor:
    """Return a matrix of the same singular vectors, whose singular values are near 1."""
    first, third, fifth = _QUINTIC
    wide = int(x.shape[0]) > int(x.shape[1])
    turned = FUNCTIONS["matrix_transpose"](x) if wide else x
    turned = turned / FUNCTIONS["maximum"](norm(turned), 1e-7)
    for _ in range(steps):
        gram = turned @ FUNCTIONS["matrix_transpose"](turned)
        turned = turned * first + (gram * third + (gram @ gram) * fifth) @ turned
    back: Tensor = FUNCTIONS["matrix_transpose"](turned) if wide else turned
    return back


SPEC_ONLY.add(Muon)

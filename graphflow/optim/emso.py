"""EMSO: steps that solve a minibatch problem near the last weights, by an inner optimiser.

The inner optimiser's step is built once. Each further inner step is a copy of its nodes, forward
and backward pass included, that reads the values which the step before would assign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.base.argument_checks import as_count, checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import assign
from graphflow.ir.graph import Graph, substitute_tensors
from graphflow.ir.op import FUNCTIONS, Tensor, origin_scope
from graphflow.ops.tables.row_values import lookup_of
from graphflow.optim.optimizer_checks import check_numbers
from graphflow.optim.update_targets import ProximalTerm
from graphflow.optim.wrapping_optimizer import WrappingOptimizer
from graphflow.strategy import Strategy


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Emso(WrappingOptimizer):
    """Efficient minibatch training: w ← argmin φ(w) + γ/2·‖w − w₀‖², where φ is the loss of the
    batch and w₀ the weights before the step, approximately, by steps of an inner optimiser.

    A step costs `inner_steps` forward and backward passes over its batch. So large batches need
    fewer examples than with SGD. The inner steps share the batch, its random numbers and rates;
    their slots go on from step to step. With `gf.parallel.Data`, each inner step exchanges its
    gradients; with `gf.parallel.LocalSGD(replicas, period=1)`, replicas solve the problem of their
    own part of the batch, and exchange once, as in the paper.

    Args:
        inner: the optimiser of the inner steps, `gf.optim.SGD(0.1)` for example.
        inner_steps: number of inner steps, from 1.
        gamma: γ, from 0, or a scalar tensor; 0: nothing keeps the weights near w₀.

    With one inner step, it is the inner optimiser. The `transform` of `minimize` changes the
    gradients of each inner step. `minimize` takes no `scaling`: one scale would have to fit all
    inner steps.

    Raises:
        ArgumentError: inner is no optimiser, or an Emso itself; inner_steps is no int from 1;
            gamma is no number from 0; `sparse` is set here and not for the inner optimiser;
            `minimize` is given `scaling`.

    Source: Li, Zhang, Chen & Smola, "Efficient mini-batch training for stochastic optimization",
        KDD 2014.
    """

    inner_steps: int
    gamma: float | Tensor
    _refuses_scaling = "inner steps have gradients of their own"

    def __post_init__(self) -> None:
        check_numbers(self, gamma=self.gamma)
        self._check_inner()
        if as_count(self.inner_steps) is None:
            self._refuse("inner_steps must be an int from 1", self.inner_steps)
        self._refuse_own_sparse()

    def _exchange(
        self,
        strategy: Strategy | None,
        grads: Sequence[Tensor],
        variables: Sequence[Tensor],
        scale: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        found, kept = self.inner._exchange(strategy, grads, variables, scale)
        if kept and self.inner_steps > 1:
            self._refuse(
                "inner_steps must be 1 where an exchange of gradients keeps what it did not send",
                self.inner_steps,
            )
        return found, kept

    def _build_updates(
        self, grads: Sequence[Tensor], variables: Sequence[Tensor], term: ProximalTerm | None = None
    ) -> list[Tensor]:
        """Return the assignments of the values after the last inner step."""
        gamma = self.gamma
        keeps_near = self.inner_steps > 1 and (isinstance(gamma, Tensor) or gamma > 0)
        term = ProximalTerm(gamma) if keeps_near else None
        updates = self.inner._build_updates(grads, variables, term)
        states = [update.node.inputs[0] for update in updates]
        first = [update.node.inputs[1] for update in updates]
        kept = {start: start for start in term.starts} if term is not None else {}
        kept |= _flags_after_first(first)
        values = first
        for _ in range(self.inner_steps - 1):
            values = substitute_tensors(first, kept | dict(zip(states, values, strict=True)))
        last = []
        for state, value in zip(states, values, strict=True):
            with origin_scope(state.node, "train/"):
                last.append(assign(state, value))
        return last


def _flags_after_first(values: Sequence[Tensor]) -> Mapping[Tensor, Tensor]:
    """Return, for lookups in hash tables, which ids read initial values after the first inner
    step: those without a row, which stand for the table's last one."""
    found = {}
    for node in Graph(values).nodes:
        lookup = lookup_of(node.outputs[0])
        if lookup is not None:
            last = lookup.owners.shape[0] - 1
            found[lookup.fresh] = FUNCTIONS["equal"](node.inputs[0], last)
    return found

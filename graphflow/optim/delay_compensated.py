"""DelayCompensated: an optimiser for gradients that come late, from older weights."""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import Tensor, make_node
from graphflow.ops.communication.pushed_gradient import pushed_gradient
from graphflow.optim.optimizer_checks import check_numbers
from graphflow.optim.wrapping_optimizer import WrappingOptimizer
from graphflow.strategy import Strategy


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class DelayCompensated(WrappingOptimizer):
    """An optimiser whose gradients are corrected for the updates that happened since a worker got
    its weights: g + lam·g⊙g⊙(w − w_k), where w_k are the weights that worker k computed g from.

    With `gf.parallel.ParameterServer`, the server keeps w_k of each worker, so it needs the memory
    of its weights once more for each worker. Where gradients are never late, and so with every
    other strategy and without one, this is the inner optimiser, bit for bit. The `transform` of
    `minimize` changes the corrected gradients. `minimize` takes no `scaling`: squares of scaled
    gradients have no fixed unit.

    Args:
        inner: the optimiser, `gf.optim.SGD(0.1)` for example.
        lam: λ, from 0; 0: the inner optimiser. The paper takes .04 for a ResNet.

    Raises:
        ArgumentError: inner is no optimiser, or a DelayCompensated itself; lam is no number from 0;
            `sparse` is set here and not for the inner optimiser; `minimize` is given `scaling`.

    Source: Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML
        2017 (DC-ASGD-c).
    """

    lam: float
    _refuses_scaling = "gradients are squared"

    def __post_init__(self) -> None:
        check_numbers(self, lam=self.lam)
        self._check_inner()
        self._refuse_own_sparse()

    def _exchange(
        self,
        strategy: Strategy | None,
        grads: Sequence[Tensor],
        variables: Sequence[Tensor],
        scale: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        found, kept = self.inner._exchange(strategy, grads, variables, scale)
        return [self._compensate(gradient) for gradient in found], kept

    def _compensate(self, gradient: Tensor) -> Tensor:
        """Return a gradient that is marked to be pushed with the compensation noted in its mark;
        any other one as it is."""
        mark = gradient.node
        if mark.op is not pushed_gradient or not self.lam:
            return gradient
        attrs = {**mark.attrs, "compensation": self.lam}
        return make_node(mark.op, mark.inputs, attrs, mark.name).outputs[0]

    def _trains_complex(self) -> bool:
        return not self.lam and super()._trains_complex()

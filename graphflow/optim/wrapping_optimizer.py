"""The base of optimisers whose updates are those of another optimiser."""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Tensor
from graphflow.optim.optimizer_base import Optimizer
from graphflow.optim.update_targets import ProximalTerm


@dataclass(frozen=True)
class WrappingOptimizer(Optimizer):
    """Base of optimisers that change how often, or with which gradients, another one updates.

    Args:
        inner: the optimiser that updates.
    """

    inner: Optimizer

    def _check_inner(self) -> None:
        """Refuse an inner optimiser that is none, or one that wraps in the same way."""
        if not isinstance(self.inner, Optimizer) or isinstance(self.inner, type(self)):
            self._refuse("inner must be another optimiser, such as gf.optim.SGD(0.1)", self.inner)

    def _refuse_own_sparse(self) -> None:
        if self.sparse:
            self._refuse("sparse is for the inner optimiser, inner=…(sparse=True)", self.sparse)

    def _build_updates(
        self, grads: Sequence[Tensor], variables: Sequence[Tensor], term: ProximalTerm | None = None
    ) -> list[Tensor]:
        return self.inner._build_updates(grads, variables, term)

    def _trains_complex(self) -> bool:
        return self.inner._trains_complex()

"""The mode in which layers are built: for training inside `with gf.nn.training():`, else for use.

A graph has no hidden side effects. So the running statistics that layers update in a training step
are a list of assignments, which the block returns for the step to run.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType

from graphflow.ir.op import Tensor

_updates: ContextVar[list[Tensor] | None] = ContextVar("updates", default=None)


class training:
    """A block in which layers train: Dropout drops elements, BatchNorm uses the batch's moments.

    The block returns a list that collects the assignments of running statistics. They happen in
    steps that fetch them:

        with gf.nn.training() as updates:
            loss = gf.mean(gf.nn.cross_entropy(model(x), labels))
        step = gf.optim.Adam(1e-3).minimize(loss)
        session.run([step, *updates], {x: images, labels: classes})

    Outside of such a block, `model(x)` is the model in use. Call a layer that keeps statistics once
    in a block, since a variable has one new value in a step.
    """

    def __init__(self) -> None:
        self._tokens: list[Token[list[Tensor] | None]] = []

    def __enter__(self) -> list[Tensor]:
        updates: list[Tensor] = []
        self._tokens.append(_updates.set(updates))
        return updates

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _updates.reset(self._tokens.pop())


def current_updates() -> list[Tensor] | None:
    """Return the list of updates of the innermost block, or None outside of training."""
    return _updates.get()

"""The mode in which layers are built: for training inside `with gf.nn.training():`, else for use.

A graph has no hidden side effects: what layers would remember of a training step (running
statistics) is a list of assignments that the block hands out, to be run with the step.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType

from graphflow.ir.op import Tensor

_updates: ContextVar[list[Tensor] | None] = ContextVar("updates", default=None)


class training:
    """Layers called in the block train: Dropout drops, BatchNorm goes by the batch's moments.

    The block gives a list that fills with the assignments of running statistics; they happen in
    the steps that fetch them:

        with gf.nn.training() as updates:
            loss = gf.mean(gf.nn.cross_entropy(model(x), labels))
        step = gf.optim.Adam(1e-3).minimize(loss)
        session.run([step, *updates], {x: images, labels: classes})

    Outside of such a block, `model(x)` is the model in use. A layer that keeps statistics is called
    once in a block: a variable has one new value in a step.
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
    """Where updates of the innermost block go; None: not training."""
    return _updates.get()

"""The update of a server whose workers' gradients are corrected for the updates that they missed:
g + λ·g⊙g⊙(w − w_k), where w_k is what worker k computed g from (`gf.optim.DelayCompensated`)."""

from __future__ import annotations

from graphflow.ir.op import FUNCTIONS, Node, Tensor
from graphflow.optim.update_targets import in_dtype_of
from graphflow.parallel.servers.loops.server_update import ServerUpdate, State, Values
from graphflow.parallel.servers.step_cut import PushedTensor


class CompensatedUpdate(ServerUpdate):
    """A server's update that keeps, for each worker, the weights that it was sent last.

    The state has one tensor for each compensated gradient, of shape (workers, …). A window begins
    with equal weights everywhere, so no variable holds it.
    """

    def open(self, values: Values, workers: int) -> State:
        found = []
        for push in self._compensated:
            value = values[_variable(push)]
            shape = (workers, *value.shape)
            found.append(FUNCTIONS["broadcast_to"](FUNCTIONS["expand_dims"](value, 0), shape))
        return found

    @property
    def _compensated(self) -> list[PushedTensor]:
        """The gradients that are corrected."""
        return [push for push in self.pushes if push.compensation]

    def prepare(
        self, push: PushedTensor, value: Tensor, which: Tensor, values: Values, state: State
    ) -> Tensor:
        if not push.compensation:
            return value
        sent = state[self._compensated.index(push)]
        missed = values[_variable(push)] - FUNCTIONS["take"](sent, which, 0)
        due = value * value * in_dtype_of(missed, value) * push.compensation
        corrected: Tensor = value + due
        return corrected

    def note_answer(self, mask: Tensor, values: Values, state: State) -> State:
        found = []
        for push, sent in zip(self._compensated, state, strict=True):
            value = values[_variable(push)]
            rows = FUNCTIONS["reshape"](mask, (mask.shape[0], *(1,) * value.ndim))
            found.append(FUNCTIONS["where"](rows, value, sent))
        return found


def _variable(push: PushedTensor) -> Node:
    assert push.variable is not None
    return push.variable


__all__ = ["CompensatedUpdate"]

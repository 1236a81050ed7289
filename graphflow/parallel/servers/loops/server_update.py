"""The update of a server: from what workers pushed to the next values of its variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.ir.op import Node, Tensor
from graphflow.parallel.servers.party_copy import PartyCopy
from graphflow.parallel.servers.step_cut import PushedTensor, StepCut

Values = Mapping[Node, Tensor]
"""The values of a server's variables."""
State = list[Tensor]
"""What the server's loop carries for the update beside the values of variables."""


class ServerUpdate:
    """The update of one server, written into its loop.

    Args:
        cut: the step.
        variables: the variables that the server updates.
        fetches: further tensors of the step that an update computes.
        copy: writes nodes on the server's device.

    Attributes:
        pushes: what the update reads of turns.
        outside: what it reads of the graph around the loops: placeholders, and variables that the
            step does not assign.
    """

    def __init__(
        self, cut: StepCut, variables: Sequence[Node], fetches: Sequence[Tensor], copy: PartyCopy
    ) -> None:
        self._cut = cut
        self._variables = variables
        self._fetches = fetches
        self._copy = copy
        wanted = [cut.served[v] for v in variables if v in cut.served]
        self._row_inputs = [t for table in cut.tables for t in table.outside]
        self._nodes, crossing = cut.update_of([*wanted, *fetches, *self._row_inputs])
        self._measured = {v: cut.push_measured(v) for v in variables if v in cut.measured}
        self.pushes: Sequence[PushedTensor] = (*crossing, *self._measured.values())
        leaves = [n for n in self._nodes if n.op.name in ("placeholder", "variable")]
        self.outside = [node for node in leaves if node not in variables]

    def first_state(self) -> Sequence[Node]:
        """Return the variables whose values the loop carries for the update, beside its own."""
        return ()

    def open(self, values: Values, workers: int) -> State:
        """Return what the loop carries for the update beside the variables of `first_state`.

        Args:
            values: the variables as all workers are sent them when the window begins.
            workers: the number of workers.
        """
        return []

    def prepare(
        self, push: PushedTensor, value: Tensor, which: Tensor, values: Values, state: State
    ) -> Tensor:
        """Return what a push adds to the sum of an update.

        Args:
            push: the pushed tensor, in the step.
            value: its value.
            which: the number of the worker, int32.
            values: the variables as they are when the push comes.
            state: the state.
        """
        return value

    def apply(
        self, values: Values, means: Mapping[PushedTensor, Tensor], outside: Mapping[Node, Tensor]
    ) -> tuple[dict[Node, Tensor], list[Tensor], dict[Tensor, Tensor]]:
        """Return the variables after an update, the values of the fetches, and what updates of
        tables read beside rows.

        Args:
            values: the variables before it.
            means: the mean of each pushed tensor.
            outside: the values of what the update reads of the graph around the loops.
        """
        mapped = {node.outputs[0]: value for node, value in {**values, **outside}.items()}
        mapped |= {push.seen: means[push] for push in self.pushes}
        self._copy.write(self._nodes, mapped)
        after = dict(values)
        for variable in self._variables:
            if variable in self._cut.served:
                after[variable] = mapped[self._cut.served[variable]]
        for variable, push in self._measured.items():
            mean = means[push]
            after[variable] = values[variable] + mean if push.is_difference else mean
        return after, [mapped[t] for t in self._fetches], {t: mapped[t] for t in self._row_inputs}

    def read_rows(self, values: Values, outside: Mapping[Node, Tensor]) -> dict[Tensor, Tensor]:
        """Return what updates of tables read beside rows; the arguments are those of `apply`."""
        nodes, _ = self._cut.update_of(self._row_inputs)
        mapped = {node.outputs[0]: value for node, value in {**values, **outside}.items()}
        self._copy.write(nodes, mapped)
        return {t: mapped[t] for t in self._row_inputs}

    def note_answer(self, mask: Tensor, values: Values, state: State) -> State:
        """Return the state after some workers were answered.

        Args:
            mask: bool, (workers,): the workers that were answered.
            values: the variables as they were sent.
            state: the state.
        """
        return state


__all__ = ["ServerUpdate", "State", "Values"]

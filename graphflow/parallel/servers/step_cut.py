"""A training step, cut into the turn of a worker and the update of a server.

The turn leads from the micro-batch to the gradients, which `minimize` marked (`pushed_gradient`).
The update leads from the marks to the assignments. Tensors that cross the cut are pushed:

    gradients         the server takes their mean
    other floats      for example a loss that an update reads: their mean, too
    differences       state that the turn computes, for example the moments of a batch norm: the
                      server adds the mean of what each turn would have changed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import is_inexact, symbols
from graphflow.ops.communication.pushed_gradient import pushed_gradient
from graphflow.parallel.served_tables.table_selection import (
    ServedTable,
    TableKeys,
    select_tables,
)
from graphflow.passes import MergeBodies


@dataclass(frozen=True, eq=False)
class PushedTensor:
    """A tensor that crosses the cut.

    Attributes:
        value: what a worker computes.
        seen: the tensor by which the update knows it; for a difference, the state's new value.
        variable: the variable whose gradient or difference it is; None for other floats.
        is_difference: the variable's value at the worker is subtracted before it is pushed.
        is_gradient: it is a gradient of the variable.
        compensation: λ, by which a server corrects a late gradient.
    """

    value: Tensor
    seen: Tensor
    variable: Node | None
    is_difference: bool = False
    is_gradient: bool = False
    compensation: float = 0.0


@dataclass(frozen=True, eq=False)
class StepCut:
    """A training step that was cut.

    Attributes:
        graph: the step, with merged bodies. Output i stands for output i of the user's graph.
        batch: the symbols of the batch.
        gradients: the marked gradients.
        served: for each assigned variable the new value, as far as servers compute it.
        measured: for each assigned variable the new value, as far as turns compute it.
        tables: the tables of which servers keep rows. Their variables count for nothing else.
    """

    graph: Graph
    batch: frozenset[str]
    gradients: tuple[PushedTensor, ...]
    served: dict[Node, Tensor]
    measured: dict[Node, Tensor]
    tables: tuple[ServedTable, ...] = ()
    _after: set[Node] = field(repr=False, default_factory=set)
    _direct: set[Node] = field(repr=False, default_factory=set)

    @property
    def row_states(self) -> set[Node]:
        """The variables of tables and of their slots."""
        return {state for table in self.tables for state in table.states}

    @property
    def assigned(self) -> set[Node]:
        """The variables that the step assigns."""
        return {*self.served, *self.measured}

    def is_of_turn(self, tensor: Tensor) -> bool:
        """Return True if a turn computes a tensor, and no update."""
        return tensor.node in self._direct and tensor.node not in self._after

    def update_of(self, outputs: Iterable[Tensor]) -> tuple[list[Node], list[PushedTensor]]:
        """Return the nodes of an update that computes some tensors, in order, and what it reads of
        turns.

        Raises:
            ShardingError: it reads a tensor of a turn of which there is no mean.
        """
        nodes: set[Node] = set()
        crossing: dict[Tensor, PushedTensor] = {}
        marked = {push.seen: push for push in self.gradients}
        stack = [*outputs]
        while stack:
            tensor = stack.pop()
            if tensor in marked:
                crossing[tensor] = marked[tensor]
            elif self.is_of_turn(tensor):
                self._require_mean(tensor)
                crossing[tensor] = PushedTensor(tensor, tensor, None)
            elif tensor.node not in nodes:
                nodes.add(tensor.node)
                stack += tensor.node.inputs
        order = sorted(crossing.values(), key=lambda push: (push.seen.node.serial, push.seen.index))
        return sorted(nodes, key=lambda node: node.serial), order

    def push_measured(self, variable: Node) -> PushedTensor:
        """Return what a turn pushes of a variable that it computes: the difference that it made, or
        the new value if that does not depend on the old one."""
        value = self.measured[variable]
        reads = variable in self.turn_of([value])
        return PushedTensor(value, value, variable, is_difference=reads)

    def turn_of(self, outputs: Iterable[Tensor]) -> list[Node]:
        """Return the nodes of a turn that computes some tensors, in order."""
        tensors = [*outputs]
        states = self.row_states
        return [n for n in Graph(tensors).nodes if n not in states] if tensors else []

    def _require_mean(self, tensor: Tensor) -> None:
        sizes = {name for size in tensor.shape for name in symbols(size)}
        if is_inexact(tensor.dtype) and not sizes & self.batch:
            return
        node = tensor.node
        raise ShardingError(
            f"an update of a server reads {node.name!r} ({tensor.spec}, made at {node.location}), "
            "which depends on the micro-batch of one worker and is no gradient; only floats whose "
            "shape does not depend on the batch have a mean. Compute it from gradients alone, or "
            "train by gf.parallel.Data"
        )


def cut_step(
    graph: Graph,
    batch: Sequence[Tensor],
    symbols_of_batch: Iterable[str],
    table_keys: TableKeys = (),
) -> StepCut:
    """Cut a training step.

    Args:
        graph: the user's graph, with gradients and updates.
        batch: the placeholders that hold the batch.
        symbols_of_batch: the symbols of its size.
        table_keys: what names the tables of which servers keep rows.

    Raises:
        ShardingError: no gradient is marked; integers follow from the batch; or a table is none.
    """
    merged = MergeBodies()(graph) if graph.holders else graph
    marks = merged.of_op(pushed_gradient.name)
    tables = select_tables(merged, table_keys)
    if not marks and not tables:
        raise ShardingError(
            "no gradient is pushed; give the strategy to minimize of a gf.optim optimiser"
        )
    gradients = tuple(
        PushedTensor(
            node.inputs[0],
            node.outputs[0],
            node.inputs[1].node,
            is_gradient=True,
            compensation=node.attrs.get("compensation", 0.0),
        )
        for node in marks
    )
    of_tables = {state for table in tables for state in table.states}
    pushed = [push.value for push in gradients]
    pushed += [each.gradient for table in tables for each in table.update.lookups]
    after, direct = _spread(merged, {t.node for t in batch}, pushed)
    _require_one_exchange(gradients, after)
    served: dict[Node, Tensor] = {}
    measured: dict[Node, Tensor] = {}
    for node in merged.of_op("assign"):
        variable, value = node.inputs[0].node, node.inputs[1]
        if variable in of_tables:
            continue
        of_turn = value.node in direct and value.node not in after
        (measured if of_turn else served)[variable] = value
    of_batch = frozenset(symbols_of_batch)
    cut = StepCut(merged, of_batch, gradients, served, measured, tables, after, direct)
    for variable in measured:
        if not is_inexact(variable.specs[0].dtype):
            raise ShardingError(
                f"{graph.names.get(variable, variable.name)!r} (made at {variable.location}) is "
                f"{variable.specs[0].dtype}, and its new value depends on the batch: workers have "
                "several, which have no mean. Make it a float, or assign it in a step of its own"
            )
    return cut


def _require_one_exchange(gradients: Sequence[PushedTensor], after: set[Node]) -> None:
    """Require that no gradient is computed from another one that was pushed before.

    Raises:
        ShardingError: see above.
    """
    for push in gradients:
        if push.value.node in after and push.variable is not None:
            raise ShardingError(
                f"a gradient of {push.variable.name!r} (made at {push.variable.location}) follows "
                "from gradients that the same turn has pushed, as in inner steps of gf.optim.Emso; "
                "a turn pushes once. Take one inner step, or train by gf.parallel.Data"
            )


def _spread(
    graph: Graph, batch: set[Node], pushed: Sequence[Tensor]
) -> tuple[set[Node], set[Node]]:
    """Return the nodes that depend on marked gradients, and those that depend on the micro-batch
    otherwise; `pushed` are all gradients."""
    before = {*Graph(pushed).nodes}
    after: set[Node] = set()
    direct: set[Node] = set()
    for node in graph.nodes:
        if node.op is pushed_gradient:
            after.add(node)
            continue
        sources = [t.node for t in node.inputs]
        if node in batch or (node in before and stream_of(node) is not None):
            direct.add(node)
        if not after.isdisjoint(sources):
            after.add(node)
        if not direct.isdisjoint(sources):
            direct.add(node)
    return after, direct


def stream_of(node: Node) -> tuple[int, int] | None:
    """Return the random stream of a node, or the first one in its bodies; None if it draws no
    numbers."""
    inner = (each for body in bodies(node) for each in body.graph.walk())
    return next((n.attrs["stream"] for n in (node, *inner) if "stream" in n.attrs), None)


__all__ = ["PushedTensor", "StepCut", "cut_step", "stream_of"]

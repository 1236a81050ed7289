"""The base of block methods: strategies that train some columns of a linear model in each turn.

minimize ─filter_gradients→ the method's variables
graph ─find_linear_model, write_window→ a window of turns ─Data or Shard→ ShardedGraph
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self, cast

from graphflow.base.argument_kinds import is_number
from graphflow.errors import ShardingError
from graphflow.frontend.builders import assign
from graphflow.ir.graph import Graph, substitute_tensors
from graphflow.ir.op import FUNCTIONS, Location, Node, Tensor, origin_scope, user_location
from graphflow.ir.spec import show_shape
from graphflow.parallel.blocks.active_rows import BlockEmitter
from graphflow.parallel.blocks.block_window import LETTERS, PHASES
from graphflow.parallel.blocks.curvature import measure_total
from graphflow.parallel.blocks.linear_model import LinearModel, find_linear_model
from graphflow.parallel.data import Data
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields
from graphflow.parallel.pipelining.microbatch_order import order_by_turns
from graphflow.parallel.report import StrategyReport, report_of
from graphflow.parallel.shard_strategy import Shard
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.parallel.sharding.partitioner import (
    annotate_graph,
    assemble_graph,
    emit_shards,
    lay_out_mesh,
    propagate_layouts,
)
from graphflow.placement.clusters.cluster import Cluster
from graphflow.strategy import COUNTER, strategy_of

DRIFT = 1e-5
"""The relative difference of the features' squares from those whose curvature was measured, from
which on a run refuses its feeds."""


class BlockState(NamedTuple):
    """The variables of a method for one variable of weights.

    Attributes:
        gradient: the gradient that `minimize` built for the weights.
        variables: the method's variables, by name.
    """

    gradient: Tensor
    variables: Mapping[str, Tensor]


class BlockStrategy:
    """A strategy that trains some columns of a linear model in each turn.

    A subclass is a frozen dataclass with the fields below. It makes variables (`make_state`), and
    writes windows of turns (`write_window`).

    Attributes:
        penalty: the penalty of the weights, or None.
        curvature: a bound on the loss's second derivative by each prediction, or None.
        beside: the strategy that divides the examples, or None.
        line: the user's line.
    """

    penalty: Any
    curvature: float | None
    beside: Any
    line: Location
    _states: dict[Node, BlockState]
    _stream: tuple[int, int]
    """The stream of the method's random numbers."""

    # What subclasses define -----------------------------------------------------------------------

    @property
    def turns(self) -> int:
        """The number of turns in a run."""
        raise NotImplementedError

    @property
    def delay(self) -> int:
        """The number of turns after which a step is applied."""
        raise NotImplementedError

    def make_state(self, weights: Tensor) -> dict[str, Tensor]:
        """Make the method's variables for some weights, with `turns` and `total` among them.

        Raises:
            ShardingError: the method cannot train them.
        """
        raise NotImplementedError

    def write_window(
        self, model: LinearModel, state: Mapping[str, Tensor], is_first: bool
    ) -> dict[Tensor, Tensor]:
        """Return the values of the weights and of the state after a window of turns.

        Args:
            model: the linear model.
            state: the method's variables.
            is_first: whether the window measures the curvature.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Return a sentence for plans and reports."""
        raise NotImplementedError

    # Checks of arguments --------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"{type(self).__name__} at {self.line}"

    def _check_common(self) -> None:
        """Check the penalty, the curvature, and the strategy beside.

        Raises:
            ShardingError: one has no meaning.
        """
        penalty, bound = self.penalty, self.curvature
        if penalty is not None and not callable(getattr(penalty, "prox", None)):
            raise ShardingError(
                f"{self._where}: penalty must have a method prox(weights, step), such as "
                f"gf.linear.L1(0.1), not {penalty!r}"
            )
        if bound is not None and not (is_number(bound) and 0 < bound < float("inf")):
            raise ShardingError(
                f"{self._where}: curvature must be a positive number, a bound on the second "
                f"derivative of the loss by each prediction, not {bound!r}"
            )
        if self.beside is not None:
            self._check_beside(self.beside, self._where)

    def _check_count(self, name: str, least: int = 1) -> None:
        """Check that a field is a count, and store it as an int.

        Raises:
            ShardingError: it is no int of at least `least`.
        """
        given = getattr(self, name)
        count = as_count(given, least)
        if count is None:
            raise ShardingError(
                f"{self._where}: {name} must be an int of at least {least}, not {given!r}"
            )
        set_frozen_fields(self, **{name: count})

    def _check_number(self, name: str) -> None:
        """Check that a field is a finite number from 0, and store it as a float.

        Raises:
            ShardingError: it is not.
        """
        given = getattr(self, name)
        if not is_number(given) or not 0 <= given < float("inf"):
            raise ShardingError(f"{self._where}: {name} must be a number from 0, not {given!r}")
        set_frozen_fields(self, **{name: float(given)})

    def _check_beside(self, beside: Any, where: str) -> None:
        """Check that another strategy may divide the examples.

        Raises:
            ShardingError: it is neither a Data nor a Shard, or makes micro-batches.
        """
        if not isinstance(beside, Data | Shard):
            raise ShardingError(
                f"{where}: a {type(self).__name__} goes with a Data or a Shard that divides the "
                f"examples, not with {beside!r}; write {type(self).__name__}(…) * "
                "gf.parallel.Data(2)"
            )
        if beside.accumulate > 1:
            raise ShardingError(
                f"{where}: accumulate={beside.accumulate} splits a batch into micro-batches, and "
                "each turn reads all examples; leave out accumulate="
            )
        for name in ("compress", "tables"):
            given = getattr(beside, name, None)
            if given:
                raise ShardingError(
                    f"{where}: {name}={given!r} changes how gradients are exchanged, and a "
                    f"{type(self).__name__} has its own exchange; leave out {name}="
                )

    # The interface of strategies ------------------------------------------------------------------

    def __mul__(self, other: Any) -> Self:
        """Return the product with the Data or Shard that divides the examples."""
        if self.beside is not None:
            raise ShardingError(
                f"at {user_location()}: {type(self).__name__} has a strategy beside it already, "
                f"{self.beside!r}; multiply it by one Data or Shard"
            )
        self._check_beside(other, f"{type(self).__name__} at {user_location()}")
        product: Self = replace(cast(Any, self), beside=other)
        set_frozen_fields(product, line=user_location(), _stream=self._stream)
        return product

    __rmul__ = __mul__

    def filter_gradients(
        self,
        gradients: Sequence[Tensor],
        variables: Sequence[Tensor],
        scale: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients as they are, and updates of the method's variables, which it makes.

        Raises:
            ShardingError: there are several variables, they are no weights of a linear model, or
                the loss is scaled.
        """
        if scale is not None:
            raise ShardingError(f"{self._where}: scaling= is for 16-bit losses; leave it out")
        if len(variables) != 1:
            names = ", ".join(repr(each.name) for each in variables)
            raise ShardingError(
                f"{self._where}: it trains one variable of weights, and this step trains "
                f"{len(variables)}: {names}; give minimize(…, variables=[weights]), and centre "
                "the features and targets in place of a bias"
            )
        (weights,), (gradient,) = variables, gradients
        is_wide = weights.dtype.name in ("float32", "float64")
        if weights.ndim not in (1, 2) or not is_wide or not all(weights.shape):
            raise ShardingError(
                f"{self._where}: {weights.name!r} (made at {weights.node.location}) must be "
                "float32 or float64 weights of shape (columns,) or (columns, outputs), not "
                f"{weights.dtype} {show_shape(weights.shape)}"
            )
        with origin_scope(weights.node, "train/"):
            made = self.make_state(weights)
            self._states[weights.node] = BlockState(gradient, made)
            return [gradient], [assign(each, each) for each in made.values()]

    def counter_of(self, graph: Graph) -> Node | None:
        """Return the variable that counts the turns of a graph's weights; None if it has none."""
        found = next((v for v in graph.variables if v in self._states), None)
        return None if found is None else self._states[found].variables["turns"].node

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, ShardedVariable] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> ShardedGraph:
        """Return the graph of a window for the devices of a cluster.

        A graph that does not train is divided as the strategy beside divides it.

        Args:
            graph: the graph, with gradients and updates.
            cluster: the cluster.
            known: the shards of variables that exist already.
            fed: the sizes of symbols, if a step is about to be fed, and the number of turns so far.
                Without that number it is a later window.

        Raises:
            ShardingError: see the strategy.
        """
        beside = Shard({"rows": 1}) if self.beside is None else self.beside
        sizes = {symbol: size for symbol, size in (fed or {}).items() if symbol != COUNTER}
        if strategy_of(graph) is None:
            return cast(ShardedGraph, beside.divide(graph, cluster, known, sizes))
        is_first = (fed or {}).get(COUNTER, self.turns) == 0
        window, model, state = self._window(graph, is_first)
        mesh = lay_out_mesh(beside, window, cluster)
        layouts = beside.layouts(window, mesh, strict=True)
        replication = replace(beside.replication, bucket=0)
        annotated = annotate_graph(window, mesh, layouts, known or {}, replication, sizes)
        preferred = propagate_layouts(annotated)
        for tensor, axis in ((model.features, 1), (model.weights, 0)):
            split = preferred[tensor].dims[axis] if tensor in preferred else None
            if split:
                raise ShardingError(
                    f"{tensor.name!r} (made at {tensor.node.location}) is cut along its columns "
                    f"by {', '.join(split.axes)!r}, and blocks of columns are moved by all places "
                    "together; cut the examples"
                )
        emitted = emit_shards(annotated, preferred, None, make_emitter=BlockEmitter)
        division = _order_phases(assemble_graph(annotated, emitted))
        count = self.turns + self.delay
        return replace(
            division,
            source=graph,
            counter=state["turns"].node,
            counter_step=self.turns,
            counted=lambda turns: (turns == 0) == is_first,
            labels=tuple(f"{LETTERS[phase]}{turn}" for turn in range(count) for phase in PHASES),
            notes=(self.describe(),),
        )

    def _window(
        self, graph: Graph, is_first: bool
    ) -> tuple[Graph, LinearModel, Mapping[str, Tensor]]:
        """Return a graph of a window in place of one of a step, its model and its variables.

        Raises:
            ShardingError: see `find_linear_model`.
        """
        steps = [
            (node, member.node.inputs[0])
            for node in graph.of_op("group")
            if node.attrs.get("strategy") is self
            for member in node.inputs
            if member.node.op.name == "assign" and member.node.inputs[0].node in self._states
        ]
        if len(steps) > 1:
            names = " and ".join(f"{node.name!r} (made at {node.location})" for node, _ in steps)
            raise ShardingError(
                f"{names} are trained by one {type(self).__name__} at once; run one after the other"
            )
        step, weights = steps[0]
        gradient, state = self._states[weights.node]
        model = find_linear_model(step, weights, gradient, self.curvature)
        after = self.write_window(model, state, is_first)
        if not is_first and Graph([model.features]).placeholders:
            after[state["total"]] = self._check_features(model, after[state["total"]])
        replaced = {}
        for member in step.inputs:
            variable = member.node.inputs[0]
            if member.node.op.name == "assign" and variable in after:
                with origin_scope(member.node, ""):
                    replaced[member] = assign(variable, after[variable])
        window = Graph(substitute_tensors(graph.outputs, replaced))
        return window, model, state

    def _check_features(self, model: LinearModel, total: Tensor) -> Tensor:
        """Return the sum of the features' squares; a run with other features fails."""
        node = model.features.node
        with origin_scope(node, "check/"):
            now = measure_total(model)
        last = (self.turns + self.delay) * len(PHASES) - 1
        with origin_scope(node, "check/", turn=last):  # no earlier turn waits for the sum
            close = FUNCTIONS["abs"](now - total) <= total * DRIFT
            checked: Tensor = FUNCTIONS["check"](
                total,
                close,
                message=f"{type(self).__name__} at {self.line}: the features differ from those of "
                "the first run, whose curvature was measured; feed the same ones in each run, or "
                "begin a new strategy",
            )
        return checked

    def report(self, fetches: Any, cluster: Cluster | None = None) -> StrategyReport:
        """Return what the strategy makes of some fetches: each exchange of a run with its bytes and
        the line that caused it. Of active rows, all count. Print it."""
        return report_of(self, fetches, cluster)


def _order_phases(division: ShardedGraph) -> ShardedGraph:
    """Return the graph with its nodes in the order of turns and phases.

    A node that waits for another device comes where its result is read first.
    """
    own = {
        part.node: tensor.node.turn
        for tensor, value in division.values.items()
        if tensor.node.turn >= 0
        for part in value.shards
        if part.node.op.joint is None
    }
    graph, turns = division.graph, dict(own)
    first_read: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        readers = (own.get(reader, first_read.get(reader, -1)) for reader in graph.consumers[node])
        first_read[node] = min((turn for turn in readers if turn >= 0), default=-1)
        waits = node.op.joint is not None or any(t.node.device != node.device for t in node.inputs)
        if node not in own and waits and first_read[node] >= 0:
            turns[node] = first_read[node]
    return order_by_turns(division, turns)


__all__ = ["BlockState", "BlockStrategy"]

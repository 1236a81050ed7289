"""Pipelines that do not flush: each micro-batch is a batch of its own, and its gradient updates the
weights at once.

A training step is written once for each micro-batch. Its passes read the version of the weights
that the schedule gives them; updates read the newest one. PipeDream's stash costs nothing here: a
version is a tensor, and lives as long as a node reads it. One `run` is a window of micro-batches;
the pipeline drains between two runs.

Source: Harlap et al., PipeDream, SOSP 2019; Narayanan et al., PipeDream-2BW, ICML 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import reduce
from operator import add

from graphflow.errors import ScheduleError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, make_node, origin_scope
from graphflow.ir.spec import (
    Dim,
    Size,
    Span,
    is_inexact,
    show_shape,
    sole_symbol,
    symbols,
)
from graphflow.parallel.mesh.axis_split import AxisSplit, ShardExtent
from graphflow.parallel.mesh.device_mesh import MICRO, Mesh
from graphflow.parallel.mesh.layouts import whole
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.pipelining.flushing_pipeline import (
    assign_phases,
    assign_stages,
    recompute_forward,
)
from graphflow.parallel.pipelining.schedule import Phase, Schedule, Task, execution_order
from graphflow.parallel.pipelining.stage_report import StagedPipeline
from graphflow.parallel.pipelining.stages import UNSTAGED_OPS
from graphflow.parallel.sharding.emission.sharded_graph import (
    FeedSlice,
    ShardedGraph,
    ShardedVariable,
)
from graphflow.parallel.sharding.propagation.batch_axis import equal_sizes
from graphflow.parallel.sharding.symbol_substitution import SymbolSubstitution

_BATCH = AxisSplit((MICRO,))


def unroll_pipeline(
    graph: Graph,
    stages: Mapping[Node, int],
    schedule: Schedule,
    devices: Sequence[DeviceName],
    batch: Sequence[Tensor],
    known: Mapping[Node, ShardedVariable] | None = None,
) -> ShardedGraph:
    """Return a training graph as a pipeline that does not flush.

    A fetched scalar is the mean over the micro-batches (or over the updates, for what updates
    compute). A fetch with the batch as its first axis has all micro-batches in order. Fetched
    variables have the values from before the window, fetched updates the values after it.

    Args:
        graph: the graph as the user built it for one micro-batch, with gradients and updates.
        stages: the stage of each node of its forward pass, see `stages_of`.
        schedule: the schedule.
        devices: the devices of the schedule.
        batch: the placeholders whose first axis is the batch: a symbol that all of them share.
        known: the shards of variables that exist already.

    Raises:
        ScheduleError: the batch has no symbol, or a fetch is neither scalar nor led by the batch.
    """
    return _PipelineUnroller(graph, stages, schedule, devices, batch, known or {}).run()


class _PipelineUnroller:
    """Writes one graph once for each micro-batch.

    Attributes:
        history: for each variable, its versions so far.
        copies: for each micro-batch, what stands for the tensors of its passes.
        made: for each update, what stands for its tensors.
    """

    def __init__(
        self,
        graph: Graph,
        stages: Mapping[Node, int],
        schedule: Schedule,
        devices: Sequence[DeviceName],
        batch: Sequence[Tensor],
        known: Mapping[Node, ShardedVariable],
    ) -> None:
        self.graph = graph
        self.schedule = schedule
        self.devices = devices
        self.batch = [t for t in batch if t.node in graph.names]
        self.known = known
        self.stages = stages
        self.where = assign_stages(graph, stages)
        count = schedule.microbatches
        self.mesh = Mesh({MICRO: count}, [DeviceName()] * count, frozenset({MICRO}))
        self.partitioner = SizePartitioner(self.mesh)
        self.symbols = self._symbols()
        self.used = schedule.versions
        self.ranks = {task: turn for turn, (_, task) in enumerate(execution_order(schedule))}
        self.tasks: dict[Node, Task] = {}
        self.shares: dict[Node, FeedSlice] = {}
        self.variables = {v: self._variable(v) for v in graph.variables}
        self.history = {v: [pieces.nodes[0].outputs[0]] for v, pieces in self.variables.items()}
        self.updated = {node.inputs[0].node for node in graph.of_op("assign")}
        phases = assign_phases(graph, stages, schedule)
        later = self._find_running_state(phases)
        self.phases = {n: phase for n, phase in phases.items() if n not in later}
        self.phases |= dict.fromkeys(self._find_backward_inputs(later), "F")
        self.copies: list[dict[Tensor, Tensor]] = []
        self.made: list[dict[Tensor, Tensor]] = []

    def run(self) -> ShardedGraph:
        """Write all passes and updates, and return the graph."""
        group, count = self.schedule.group, self.schedule.microbatches
        for start in range(0, count, group):
            members = range(start, min(start + group, count))
            for i in members:
                self._emit_passes(i)
            self._emit_update(members)
        cut = Graph([self._fetch(t) for t in self.graph.outputs])
        if self.schedule.recompute:
            cut = recompute_forward(cut, self.tasks, self.ranks)
        pipeline = StagedPipeline.from_devices(self.schedule, self.stages, self.devices)
        return ShardedGraph(
            self.graph, cut.verify(), self.mesh, self.partitioner, self.shares,
            self.variables, (), (), {}, pipeline,
        )  # fmt: skip

    def _symbols(self) -> list[str]:
        """Return the symbols of the batch: one, or several that ops require to be equal.

        Raises:
            ScheduleError: the batch has a fixed size, or shares its symbol with another size.
        """
        same = equal_sizes(self.graph)
        firsts: list[Size] = [t.shape[0] if t.ndim else 0 for t in self.batch]
        plain = all(sole_symbol(d) for d in firsts)
        first = same.get(firsts[0], firsts[0]) if plain and firsts else None
        if not isinstance(first, Dim) or any(same.get(d, d) != first for d in firsts):
            shapes = ", ".join(f"{t.name!r} {show_shape(t.shape)}" for t in self.batch)
            raise ScheduleError(
                f"schedule {self.schedule.name!r} does not flush: each of its "
                f"{self.schedule.microbatches} micro-batches goes through the network as a batch "
                f"of its own, of another size than {shapes}; leave the batch open, one symbol that "
                "its placeholders share: gf.placeholder('float32', ('B', 784))"
            )
        every = dict.fromkeys([*firsts, *(d for d in same if same[d] == first)])
        for size in every:
            self.partitioner.can_split(size, _BATCH)
        return [name for size in every if (name := sole_symbol(size))]

    def _variable(self, node: Node) -> ShardedVariable:
        """Return the variable that stands for one of the user's, for all micro-batches."""
        if node in self.known:
            return self.known[node].check(node, self.mesh)
        with origin_scope(node, "", self._device(node, 0)):
            name = f"{self.graph.names[node]}{self.mesh.tag((0,))}"
            twin = make_node(REGISTRY["variable"], (), {**node.attrs, "named": False}, name)
        all_of_it = tuple(Span(0, int(size)) for size in node.specs[0].shape)
        count = self.schedule.microbatches
        return ShardedVariable(
            (twin,) * count, (all_of_it,) * count, whole(len(all_of_it)), self.mesh.sizes
        )

    # Passes -------------------------------------------------------------------------------------

    def _emit_passes(self, i: int) -> None:
        """Write the forward and backward passes of a micro-batch."""
        mapped: dict[Tensor, Tensor] = {}
        sizes = {name: self._piece(name, i).size for name in self.symbols}
        renaming = SymbolSubstitution(sizes, turn=i)
        for node in self.graph.nodes:
            if node.op.name == "placeholder":
                mapped[node.outputs[0]] = self._placeholder(node, i)
            elif node.op.name == "constant":
                mapped[node.outputs[0]] = node.outputs[0]
            elif node in self.phases or (not node.inputs and node.op.name != "variable"):
                inputs = tuple(self._read(t, mapped, i) for t in node.inputs)
                task = Task(self.phases.get(node, "F"), self.where[node], i)
                with origin_scope(node, f"{MICRO}={i}/", self._device(node, i)):
                    made = renaming.node(node, inputs)
                if node in self.phases:
                    made = made.with_inputs(inputs, turn=self.ranks[task])
                    self.tasks[made] = task
                mapped.update(zip(node.outputs, made.outputs, strict=True))
        self.copies.append(mapped)

    def _read(self, tensor: Tensor, mapped: Mapping[Tensor, Tensor], i: int) -> Tensor:
        """Return what a micro-batch reads for a tensor.

        A weight has the version of the stage where it lives. Other stages that share it read the
        same version: they would wait for that stage's next update otherwise.
        """
        node = tensor.node
        if node not in self.history:
            return mapped[tensor]
        return self.history[node][self.used[self.where[node], i] if node in self.updated else 0]

    def _placeholder(self, node: Node, i: int) -> Tensor:
        """Return the placeholder of a micro-batch; the user's own if it does not hold the batch."""
        (tensor,) = node.outputs
        names = [sole_symbol(size) for size in tensor.shape]
        if not any(name in self.symbols for name in names):
            return tensor
        pieces = tuple(
            self._piece(name, i) if name in self.symbols else ShardExtent(0, size, size)
            for name, size in zip(names, tensor.shape, strict=True)
        )
        with origin_scope(node, f"{MICRO}={i}/", self._device(node, i)):
            own: Tensor = REGISTRY["placeholder"](
                shape=tuple(p.size for p in pieces), dtype=tensor.dtype.name, name=node.name
            )
        self.shares[own.node] = FeedSlice(node, pieces)
        return own

    def _piece(self, symbol: str, i: int) -> ShardExtent:
        """Return the extent of the batch that a micro-batch has."""
        return self.partitioner.piece(Dim.symbol(symbol), _BATCH, (i,))

    def _device(self, node: Node, i: int) -> DeviceName:
        """Return the device of a node's stage for a micro-batch."""
        return self.devices[self.schedule.homes[self.where[node], i]]

    # Updates ------------------------------------------------------------------------------------

    def _emit_update(self, members: range) -> None:
        """Write the update that the gradients of some micro-batches make together."""
        mapped: dict[Tensor, Tensor] = {}
        pieces = {name: [self._piece(name, i).size for i in members] for name in self.symbols}
        renaming = SymbolSubstitution({name: reduce(add, sizes) for name, sizes in pieces.items()})
        for node in self.graph.nodes:
            if node.op.name == "variable":
                mapped[node.outputs[0]] = self.history[node][-1]
            elif node.op.name == "assign":
                mapped[node.outputs[0]] = self._update_input(node.inputs[1], mapped, members, node)
            elif self._is_update(node):
                inputs = tuple(self._update_input(t, mapped, members, node) for t in node.inputs)
                with origin_scope(node, f"update={members[-1]}/", self._device(node, 0)):
                    made = renaming.node(node, inputs)
                mapped.update(zip(node.outputs, made.outputs, strict=True))
        for node in self.graph.of_op("assign"):
            self.history[node.inputs[0].node].append(mapped[node.outputs[0]])
        self.made.append(mapped)

    def _find_running_state(self, phases: Mapping[Node, Phase]) -> set[Node]:
        """Return the nodes outside the network that compute new values of variables from old ones
        (a mean of weights over steps), and their readers.

        They go on from the newest version.
        """
        besides = [n for n, phase in phases.items() if phase == "F" and n not in self.stages]
        needed: set[Node] = set()
        for node in reversed(besides):
            if any(r not in phases or r in needed for r in self.graph.consumers[node]):
                needed.add(node)
        found: set[Node] = set()
        for node in besides:
            sources = {t.node for t in node.inputs}
            if sources & found or (node in needed and sources & self.updated):
                found.add(node)
        return found

    def _find_backward_inputs(self, later: Set[Node]) -> set[Node]:
        """Return the nodes outside the forward pass that backward passes read, such as a converted
        loss scale."""
        found: set[Node] = set()
        for node in reversed(self.graph.nodes):
            is_read = any(r in self.phases or r in found for r in self.graph.consumers[node])
            if is_read and node.inputs and node not in self.phases and node not in later:
                found.add(node)
        return found

    def _is_update(self, node: Node) -> bool:
        """Return True if a node belongs to an update: it reads something, or creates a tensor such
        as zeros."""
        made = node.inputs or (node.op.pure and node.op.name not in UNSTAGED_OPS)
        return bool(made) and node not in self.phases and node.op.name != "group"

    def _update_input(
        self, tensor: Tensor, mapped: dict[Tensor, Tensor], members: range, reader: Node
    ) -> Tensor:
        """Return what an update reads for a tensor that micro-batches computed.

        It is the mean; for rows of a table, all rows, scaled by their share in the mean; for ints
        (a batch size), the last one. A tensor that is the same for all micro-batches (a fed rate)
        stays as it is.
        """
        if tensor not in mapped:
            parts = list(dict.fromkeys(self.copies[i][tensor] for i in members))
            with origin_scope(tensor.node, "mean/", self._device(reader, 0)):
                mapped[tensor] = parts[-1] if len(parts) == 1 else self._average(tensor, parts)
        return mapped[tensor]

    def _average(self, tensor: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return the mean of parts; rows are concatenated."""
        rows = [d for d, size in enumerate(tensor.shape) if set(self.symbols) & set(symbols(size))]
        counted = is_inexact(tensor.dtype)
        if not rows and not counted:
            return parts[-1]
        total: Tensor = FUNCTIONS["concat"](parts, axis=rows[0]) if rows else reduce(add, parts)
        return total * (1.0 / len(parts)) if counted else total

    # Fetches ------------------------------------------------------------------------------------

    def _fetch(self, tensor: Tensor) -> Tensor:
        """Return what stands for a fetch.

        Raises:
            ScheduleError: the fetch has a value for each micro-batch, and is neither a float scalar
                nor led by the batch.
        """
        node = tensor.node
        if node.op.name == "group":
            members = [self._fetch_update(t) for t in node.inputs]
            with origin_scope(node, "", DeviceName()):
                group: Tensor = REGISTRY["group"](*members, name=node.name)
            return group
        if node.op.name == "assign":
            return self._fetch_update(tensor)
        if node.op.name == "variable":
            return self.history[node][0]
        copies = self.copies if tensor in self.copies[0] else self.made
        parts = [copy[tensor] for copy in copies]
        with origin_scope(node, "fetched/", self._device(node, 0)):
            if tensor.ndim and sole_symbol(tensor.shape[0]) in self.symbols:
                joined: Tensor = FUNCTIONS["concat"](parts)
                return joined
            if tensor.ndim == 0 and is_inexact(tensor.dtype):
                mean: Tensor = reduce(add, parts) * (1.0 / len(parts))
                return mean
        raise ScheduleError(
            f"fetch {node.name!r} (made at {node.location}) of shape {tensor.shape} has a value "
            "for each micro-batch of a pipeline without flush; fetch floats without axes, of which "
            "it gives the mean (x.astype('float32') of a count), or tensors with the batch as "
            "first axis"
        )

    def _fetch_update(self, tensor: Tensor) -> Tensor:
        """Return the last update of a variable, as an assignment."""
        node = tensor.node
        if node.op.name == "group":
            return self._fetch(tensor)
        variable = node.inputs[0].node
        own = self.variables[variable].nodes[0].outputs[0]
        with origin_scope(node, "", self._device(variable, 0)):
            assigned: Tensor = REGISTRY["assign"](own, self.history[variable][-1])
        return assigned

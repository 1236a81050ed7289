"""Emission: write each node of the whole graph once more, one node for each place of a mesh.

Every node goes through the same steps, each of which has a file of its own:

    node ─reduce_inputs→ inputs whose sums are complete                        partial_sums.py
         ─select_rule, choose_splits→ SplitChoice                             rule_selection.py
         ─convert_inputs→ LocalInputs, with collectives and halos           input_conversion.py
         ─emit_local→ one node for each place                                    local_nodes.py
         ─add_output→ partial sums wait in buckets                              partial_sums.py

A choice depends on the layouts that the inputs really have by then, so a node is finished before
the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from graphflow.ir.graph import Graph
from graphflow.ir.op import (
    Node,
    Tensor,
    make_node,
)
from graphflow.ops.control_flow.control import is_control
from graphflow.parallel.compression.emission import COMPRESSED, emit_compressed
from graphflow.parallel.mesh.axis_split import WHOLE
from graphflow.parallel.mesh.layouts import Layout, ShardedTensor, whole
from graphflow.parallel.resharding.communication_log import user_name
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.resharding.shared_reductions import ValueNumbering
from graphflow.parallel.sharding.emission.cross_shard_ops import emit_exchange
from graphflow.parallel.sharding.emission.input_conversion import InputConverter
from graphflow.parallel.sharding.emission.local_nodes import emit_local
from graphflow.parallel.sharding.emission.partial_sums import PartialSums
from graphflow.parallel.sharding.emission.reshapes import reshape_layout
from graphflow.parallel.sharding.emission.whole_nodes import copy_unsplit
from graphflow.parallel.sharding.propagation.propagation import propagate
from graphflow.parallel.sharding.rules.node_rule import rules_of
from graphflow.parallel.sharding.rules.rule_selection import RuleSelector, SplitChoice
from graphflow.parallel.tables.hash_exchange import HashExchange
from graphflow.parallel.tables.table_choice import OwnedTables

EFFECT_OPS = ("print", "host_call", "concurrent")
"""Ops that may not run twice: each run has another effect or, of `concurrent`, another order. They
run once, at the first place."""
Shards = Sequence[tuple[Tensor, ...]]
"""For each place, what stands there for the outputs of a node."""


class Emitter:
    """Writes the nodes of a graph for all places of a mesh.

    Args:
        resharder: converts between layouts and builds the collectives.
        preferred: the layouts that annotations and propagation ask for.
        readers: the nodes that read each tensor; None stands for a fetch.
        bucket: bytes of sums in one exchange; 0: each sum has an exchange of its own.
        unsynchronised: mesh axes along which batch norm takes the moments of its own shard.
        sequence_axis: the mesh axis along which preferred layouts decide where inputs travel, and
            not the number of bytes.
        emit_body: writes a node that holds bodies (call, cond, scan, while_loop).
        tables: the tables that their rows' owners look up and update.

    Attributes:
        tables: writes the lookups and updates of tables.
        values: the sharded tensor that stands for each tensor so far.
    """

    def __init__(
        self,
        resharder: Resharder,
        preferred: Mapping[Tensor, Layout],
        readers: Mapping[Tensor, Sequence[Node | None]],
        emit_body: Callable[[Emitter, Node], None],
        bucket: int = 0,
        unsynchronised: frozenset[str] = frozenset(),
        sequence_axis: str | None = None,
        tables: OwnedTables | None = None,
    ) -> None:
        self.resharder = resharder
        self.mesh = resharder.mesh
        self.partitioner = resharder.partitioner
        self.preferred = dict(preferred)
        self.readers = {t: list(nodes) for t, nodes in readers.items()}
        self.values: dict[Tensor, ShardedTensor] = {}
        self._emit_body = emit_body
        self._bucket = bucket
        self._unsynchronised = unsynchronised
        self._sequence_axis = sequence_axis
        self._selector = RuleSelector(
            self.mesh, self.partitioner, self.values, self.preferred, self.readers, sequence_axis
        )
        self._inputs = InputConverter(resharder, self.values)
        self._sums = PartialSums(resharder, self.values, self.preferred, self.readers, bucket)
        self._value_numbers = ValueNumbering()
        self.tables = HashExchange(
            resharder, tables or OwnedTables(), self.values, self.preferred, self.reduce_inputs
        )

    def emit_node(self, node: Node) -> None:
        """Write any node."""
        if node.op.elementwise and node.op.pure:  # first, because most nodes are
            self.emit_compute(node)
        elif node.op.name == "constant":
            (tensor,) = node.outputs
            shards = (tensor,) * len(self.mesh.places)
            self.values[tensor] = ShardedTensor(tensor.spec, whole(tensor.ndim), shards)
        elif node.op.name == COMPRESSED:
            self.values.update(emit_compressed(self.resharder, node, self.values, self._bucket))
        elif node.op.name in EFFECT_OPS:
            self._emit_once(node)
        elif is_control(node.op):
            self.reduce_inputs(node)
            self._emit_body(self, node)
        else:
            self.emit_compute(node)

    def emit_compute(self, node: Node) -> None:
        """Write a node that computes: the steps that the module's docstring shows."""
        if self.tables.emit_lookup(node):
            return
        self.reduce_inputs(node)
        if self._copies_unsplit(node) or self._reshapes_split_axes(node):
            return
        rule = self._selector.select_rule(node)
        choice = self._selector.choose_splits(node, rule)
        if self._needs_expansion(choice):
            self._emit_expansion(node, choice)
            return
        inputs = self._inputs.convert_inputs(node, choice)
        exchange = rule.sharding.exchange
        if exchange is not None and exchange.letter in choice.splits:
            split = choice.splits[exchange.letter]
            outputs = emit_exchange(self.resharder, node, rule, split, inputs.shards)
        else:
            outputs = emit_local(self.resharder, node, choice, inputs)
        self._store_outputs(node, choice, outputs)

    def reduce_inputs(self, node: Node, tensors: Sequence[Tensor] | None = None) -> None:
        """Complete the sums that a node reads (default: its inputs), as far as they wait in
        buckets."""
        self._sums.reduce_inputs(node, tensors)

    # Nodes that need no rule ----------------------------------------------------------------------

    def _copies_unsplit(self, node: Node) -> bool:
        """Copy a node to each place if nothing of it is split. Return whether it was."""
        values = copy_unsplit(self.resharder, node, self.values, self.preferred)
        if values is not None:
            self.values.update(zip(node.outputs, values, strict=True))
        return values is not None

    def _reshapes_split_axes(self, node: Node) -> bool:
        """Write a reshape that merges or divides several split axes. Return whether it was one."""
        if node.op.name != "reshape":
            return False
        value = self.values[node.inputs[0]]
        layout = reshape_layout(node, rules_of(node, self.readers), value.layout, self.partitioner)
        if layout is not None:
            result = ShardedTensor(node.specs[0], layout, value.shards)
            self.values[node.outputs[0]] = self.resharder.reshape_shards(result, node)
        return layout is not None

    def _emit_once(self, node: Node) -> None:
        """Write a node with an outside effect at the first place, which sends its outputs to all
        others."""
        values = []
        for tensor in node.inputs:
            self._sums.flush(tensor)
            name = user_name(tensor.node)
            values.append(
                self.resharder.convert(self.values[tensor], whole(tensor.ndim), node, name)
            )
        with self.resharder.on_device(self.mesh.places[0], node):
            made = make_node(node.op, tuple(v.shards[0] for v in values), node.attrs, node.name)
        for tensor, part in zip(node.outputs, made.outputs, strict=True):
            shards = (part,) * len(self.mesh.places)
            self.values[tensor] = ShardedTensor(tensor.spec, whole(tensor.ndim), shards)

    # Outputs --------------------------------------------------------------------------------------

    def _store_outputs(self, node: Node, choice: SplitChoice, outputs: Shards) -> None:
        """Record what stands for a node's outputs; let partial sums wait."""
        if choice.output_layouts is None:
            count = len(node.outputs)
            choice.output_layouts = [_output_layout(node, choice, o) for o in range(count)]
        for o, (tensor, layout) in enumerate(zip(node.outputs, choice.output_layouts, strict=True)):
            shards = tuple([made[o] for made in outputs])
            self.values[tensor] = ShardedTensor(tensor.spec, layout, shards)
            self._sums.add_output(tensor, node)

    # Expansion ------------------------------------------------------------------------------------

    def _needs_expansion(self, choice: SplitChoice) -> bool:
        """Return True if an axis is split along which the op needs all elements, unless each shard
        may use its own elements only."""
        axes = {a for c, split in choice.splits.items() if c.isupper() for a in split.axes}
        alone = choice.rule.sharding.apart is not None and axes <= self._unsynchronised
        return bool(axes) and not alone

    def _emit_expansion(self, node: Node, choice: SplitChoice) -> None:
        """Write a node as the simpler ops of its `expand` function.

        The mesh axes that split the axis for which the node is expanded split no other axis of its
        inputs.
        """
        expand = choice.rule.sharding.expand
        assert expand is not None
        before, moved = {t: self.values[t] for t in node.inputs}, dict[Tensor, Layout]()
        taken = {a for c, split in choice.splits.items() if c.isupper() for a in split.axes}
        for tensor, letters in zip(node.inputs, choice.rule.inputs, strict=True):
            have = self.values[tensor].layout
            dims = tuple(
                split if letter.isupper() or taken.isdisjoint(split.axes) else WHOLE
                for letter, split in zip(letters, have.dims, strict=True)
            )
            if dims != have.dims:
                moved[tensor] = replace(have, dims=dims)
                self.values[tensor] = self._inputs.convert_input(tensor, moved[tensor], node)
        with self.resharder.cross_device(node):
            made = expand(*node.inputs, **node.attrs)
        results = made if isinstance(made, tuple) else (made,)
        graph = Graph(results)
        for own, result in zip(node.outputs, results, strict=True):
            if own in self.preferred:
                self.preferred.setdefault(result, self.preferred[own])
        self.emit_graph(graph, moved)
        self.values.update(before)
        for own, result in zip(node.outputs, results, strict=True):
            self.values[own] = self.values[result]

    def emit_graph(self, graph: Graph, moved: Mapping[Tensor, Layout] | None = None) -> None:
        """Write those nodes of another graph (a body, an expansion) that nothing stands for yet.

        Args:
            moved: layouts of tensors that are not in their preferred layout.
        """
        fresh = [n for n in graph.nodes if n.outputs[0] not in self.values]
        known = {t: self.values[t].layout for n in fresh for t in n.inputs if t in self.values}
        for inner in fresh:
            for tensor in inner.inputs:
                self.readers.setdefault(tensor, []).append(inner)
        given = {**known, **self.preferred, **(moved or {})}
        for tensor, layout in propagate(fresh, given, self.partitioner).items():
            self.preferred.setdefault(tensor, layout)
        for inner in fresh:
            if not self._reuses_reduction(inner):
                self.emit_node(inner)

    def _reuses_reduction(self, node: Node) -> bool:
        """Take over the outputs of an equal reduction that was emitted before, if there is one.

        An output as large as the inputs is computed again: keeping it from a forward pass to its
        backward pass would cost memory.
        """
        first = self._value_numbers.first_equal(node)
        if first is node or any(t not in self.values for t in first.outputs):
            return False
        if sum(map(self._size, node.outputs)) >= sum(map(self._size, node.inputs)):
            return False
        for own, equal in zip(node.outputs, first.outputs, strict=True):
            self._sums.flush(equal)
            self.values[own] = self.values[equal]
        return True

    def _size(self, tensor: Tensor) -> int:
        return self.partitioner.guess(tensor.size)

    # Bodies ---------------------------------------------------------------------------------------

    def body_emitter(self, resharder: Resharder, preferred: Mapping[Tensor, Layout]) -> Emitter:
        """Return an emitter for a body. Nothing waits in buckets there."""
        return Emitter(
            resharder, preferred, {}, self._emit_body,
            unsynchronised=self._unsynchronised, sequence_axis=self._sequence_axis,
        )  # fmt: skip


def _output_layout(node: Node, choice: SplitChoice, o: int) -> Layout:
    """Return the layout of a node's output number `o`: letters that only inputs have leave partial
    results."""
    rule, splits = choice.rule, choice.splits
    letters = rule.outputs[o]
    dims = tuple(
        rule.split(splits.get(letter, WHOLE), len(node.inputs) + o, axis)
        for axis, letter in enumerate(letters)
    )
    partial = [(m, kind) for m, (_, kind) in choice.kept_partials.items()]
    for letter, split in splits.items():
        if letter not in letters and not rule.meets(letter):
            kind = rule.sharding.kind
            if letter.isupper():
                kind = rule.sharding.apart or kind
            partial += [(axis, kind) for axis in split.axes]
    return Layout(dims, tuple(sorted(partial)))


__all__ = ["EFFECT_OPS", "Emitter"]

"""Add the updates of mirrors to a placed graph.

    assign(v, scatter_rows(v, ids, g)) on one worker
    assign(v', scatter_rows(v', ids, g)) on another one, which receives ids and g

A mirror is a variable of its own in another process. Its update is computed there again if what
that takes has no more bytes than the new value: elementwise nodes, changes of some rows, and
lookups in other mirrors. Otherwise the new value travels. Both updates are parts of one step, so
that they commit together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor
from graphflow.ir.spec import evaluate

_SLACK = 256
"""Bytes, such as those of scalars, by which the operands of an update may exceed its result."""
_MAX_FLOPS = 4
"""Operations for each element of its operands that a change of rows may take to be repeated."""


@dataclass(frozen=True)
class MirroredGraph:
    """A placed graph with the updates of its variables' mirrors.

    Attributes:
        graph, devices, order: the graph, the device of each node, and their order.
        mirrors: each variable's mirror.
        reads: for each variable, the others whose mirrors its mirror's update reads.
        sent: bytes of a step that travel for mirrors alone, by the mirrors' devices.
    """

    graph: Graph
    devices: Mapping[Node, str]
    order: Sequence[Node]
    mirrors: Mapping[Node, Node]
    reads: Mapping[Node, frozenset[Node]]
    sent: Mapping[str, int]


def add_mirrors(
    graph: Graph,
    devices: Mapping[Node, str],
    order: Sequence[Node],
    mirrors: Mapping[Node, Node],
    places: Mapping[Node, str],
    bindings: Mapping[str, int],
) -> MirroredGraph:
    """Return a graph with mirrors of some of its variables.

    Args:
        mirrors: each variable's mirror, which is a variable.
        places: the device of each variable's mirror.
        bindings: sizes of symbols, by which the bytes of tensors are compared.
    """
    builders = {
        place: _PlaceBuilder(graph, devices, place, mirrors, places, bindings)
        for place in dict.fromkeys(places[variable] for variable in mirrors)
    }
    assigns = {node.inputs[0].node: node for node in graph.of_op("assign")}
    reads: dict[Node, frozenset[Node]] = {}
    members = []
    for variable, mirror in mirrors.items():
        builders[places[variable]].add(mirror, variable)
    for variable, mirror in mirrors.items():
        updated = mirror.outputs[0]
        if variable in assigns:
            builder = builders[places[variable]]
            updated, reads[variable] = builder.add_update(assigns[variable], variable)
        members.append(updated)
    outputs = graph.outputs
    if members:
        group: Tensor = REGISTRY["group"](*members, name="mirrors")
        outputs = (*outputs, group)
    added = {node: each.place for each in builders.values() for node in each.added}
    names = {
        node: f"{graph.names[original]}@{place.place}"
        for place in builders.values()
        for node, original in place.added.items()
    }
    return MirroredGraph(
        Graph(outputs, {**graph.names, **names}),
        {**devices, **added},
        [*order, *added],
        mirrors,
        reads,
        {place: each.sent for place, each in builders.items()},
    )


@dataclass
class _PlaceBuilder:
    """The mirrors of one device, and their updates.

    Attributes:
        place: the device.
        added: mirrors and nodes of updates, in order, each with the node that it repeats.
        sent: bytes of the tensors that travel here for updates of mirrors alone.
    """

    graph: Graph
    devices: Mapping[Node, str]
    place: str
    mirrors: Mapping[Node, Node]
    places: Mapping[Node, str]
    bindings: Mapping[str, int]
    added: dict[Node, Node] = field(default_factory=dict)
    sent: int = 0
    _operands: dict[Tensor, frozenset[Tensor]] = field(default_factory=dict)
    _copies: dict[Tensor, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._device = DeviceName.parse(self.place)
        self._numbers = {node: number for number, node in enumerate(self.graph.nodes)}
        self._here = {
            t
            for node in self.graph.nodes
            if self.devices.get(node) == self.place
            for t in (*node.inputs, *node.outputs)
        }

    def add(self, node: Node, original: Node) -> None:
        """Add a node that repeats one of the graph."""
        self.added[node] = original

    def add_update(self, assign: Node, variable: Node) -> tuple[Tensor, frozenset[Node]]:
        """Add the update of a variable's mirror.

        Return its output, and the other variables whose mirrors it reads.
        """
        value = _new_value(assign.inputs[1])
        repeated = self._repeated_nodes(value)
        read = {_new_value(t).node for node in repeated for t in node.inputs} & self._own
        for node in repeated:
            if node.outputs[0] not in self._copies:
                inputs = tuple(self._receive(t) for t in node.inputs)
                copy = node.copy_to_run(inputs, node.name, self._device)
                self.add(copy, node)
                self._copies[node.outputs[0]] = copy.outputs[0]
        inputs = self.mirrors[variable].outputs[0], self._receive(value)
        update = assign.copy_to_run(inputs, assign.name, self._device)
        self.add(update, assign)
        return update.outputs[0], frozenset(read - {variable})

    @property
    def _own(self) -> set[Node]:
        """The variables that have their mirrors here."""
        return {node for node in self.mirrors if self.places[node] == self.place}

    def _receive(self, tensor: Tensor) -> Tensor:
        """Return the tensor that stands here for one of the graph."""
        tensor = _new_value(tensor)
        if tensor.node in self.mirrors and self.places[tensor.node] == self.place:
            return self.mirrors[tensor.node].outputs[0]
        if tensor not in self._copies:
            self._copies[tensor] = tensor
            self.sent += 0 if self._is_free(tensor) else self._nbytes(tensor)
        return self._copies[tensor]

    def _repeated_nodes(self, value: Tensor) -> list[Node]:
        """Return the nodes to compute here again for a value, in order."""
        region: set[Node] = set()
        waiting = [value.node]
        while waiting:
            node = waiting.pop()
            if node not in region and self._is_repeatable(node):
                region.add(node)
                waiting += [_new_value(t).node for t in node.inputs]
        ordered = sorted(region, key=self._numbers.__getitem__)
        for node in ordered:
            self._find_operands(node)
        wanted, found = {value}, []
        for node in reversed(ordered):
            result = node.outputs[0]
            if result in wanted and result not in self._operands[result]:
                found.append(node)
                wanted.update(map(_new_value, node.inputs))
        return found[::-1]

    def _find_operands(self, node: Node) -> None:
        """Find which tensors must be here to have a node's result: the result, or what leads to
        it."""
        result = node.outputs[0]
        if result in self._operands:
            return
        leading: set[Tensor] = set()
        for tensor in map(_new_value, node.inputs):
            leading |= self._operands.get(tensor, set() if self._is_free(tensor) else {tensor})
        fits = sum(map(self._nbytes, leading)) <= self._nbytes(result) + _SLACK
        self._operands[result] = frozenset(leading if fits else {result})

    def _is_free(self, tensor: Tensor) -> bool:
        """Return True if a tensor is here without being sent for a mirror."""
        node = tensor.node
        if node in self.mirrors and self.places[node] == self.place:
            return True
        return node.op.name == "constant" or tensor in self._here

    def _is_repeatable(self, node: Node) -> bool:
        op = node.op
        if len(node.outputs) != 1 or not op.pure or op.random or self._is_free(node.outputs[0]):
            return False
        if self._device.kind not in op.device_kinds:
            return False
        if op.name == "take":  # rows of a mirror that is here
            return not node.attrs["axis"] and self._is_free(node.inputs[0])
        return op.elementwise or (op.in_place and self._is_light(node))

    def _is_light(self, node: Node) -> bool:
        """Return True if a node takes few operations for what it reads."""
        if node.op.cost is None:
            return False
        specs = [t.spec.bind(self.bindings) for t in node.inputs]
        read = sum(int(spec.size) for spec in specs)
        return bool(node.op.cost(*specs, **node.attrs).flops <= _MAX_FLOPS * read)

    def _nbytes(self, tensor: Tensor) -> int:
        return evaluate(tensor.spec.nbytes, self.bindings)


def _new_value(tensor: Tensor) -> Tensor:
    """Return the new value in place of an assignment's output."""
    while tensor.node.op.name == "assign":
        tensor = tensor.node.inputs[1]
    return tensor

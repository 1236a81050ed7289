"""Replicas with variables of their own: a training step, written once for each replica and turn.

One run is a window of some turns. In each turn every replica takes its micro-batch through the
whole step, updates included, with nothing exchanged. Between turns a strategy may replace the
current values of variables, for example by their means over replicas.

    StepTemplate ─emit_turn, with exchanges between turns→ ─finish_window→ ShardedGraph
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import prod
from operator import add

from graphflow.errors import ShardingError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import REGISTRY, Node, Tensor, origin_scope
from graphflow.ir.spec import Dim, Size, show_shape, sole_symbol
from graphflow.parallel.local_training.step_template import (
    StepTemplate,
    TemplateVariable,
    whole_variable,
)
from graphflow.parallel.local_training.turn_copy import TurnCopy
from graphflow.parallel.mesh.axis_split import AxisSplit, ShardExtent
from graphflow.parallel.mesh.device_mesh import MICRO, Mesh
from graphflow.parallel.mesh.layouts import CommunicationRecord, SentTensor, whole
from graphflow.parallel.mesh.size_partitioner import SizePartitioner, piece_symbol
from graphflow.parallel.resharding.shard_builder import CROSS_DEVICE_SCOPE, ShardBuilder
from graphflow.parallel.sharding.emission.sharded_graph import FeedSlice, ShardedVariable
from graphflow.parallel.sharding.propagation.batch_axis import equal_sizes

REPLICA = "replica"
"""The mesh axis of replicas, which have variables of their own."""
TURN = "turn"
"""The mesh axis of turns, which a replica takes one after the other."""
SENDS_BEFORE, COMPUTES, SENDS_AFTER, APPLIES = PHASES = range(4)
"""What a device does around a turn, in this order: it sends values from before the turn, computes
the turn, sends values from after it, and applies the results of an exchange."""
LETTERS = {SENDS_BEFORE: "E", COMPUTES: "T", SENDS_AFTER: "E", APPLIES: "A"}
"""The letters of phases in drawings: exchange, turn, apply."""


class ReplicaUnroller:
    """Writes a training step once for each replica and turn.

    Args:
        template: the step of one replica.
        replicas: the number of replicas.
        turns: the number of turns of each replica in a run.
        owners: the devices of all replicas, those of a replica next to each other.
        batch: the placeholders whose first axis is the batch: a symbol that all of them share.
        known: the shards of variables that exist already.

    Attributes:
        mesh: the replicas, and the mesh within each.
        places: how many devices a replica has.
        builder: builds nodes on devices, and records what is sent.
        variables: the copies of the user's variables, and of those that a strategy adds.
        current: for each variable, the value that each copy has by now.
        window: the turns of all replicas, and the mesh within each.
        symbols: the symbols of the batch.
        shares: what the placeholders are fed.
        copies: for each turn and replica, what stands for the tensors of the template.
        records: the collectives within replicas.
        rank: the place of the nodes that are written next in the order of execution.
    """

    def __init__(
        self,
        template: StepTemplate,
        replicas: int,
        turns: int,
        owners: Sequence[DeviceName],
        batch: Sequence[Tensor],
        known: Mapping[Node, ShardedVariable],
    ) -> None:
        self.template = template
        self.replicas = replicas
        self.turns = turns
        self.owners = owners
        self.places = len(template.devices)
        self.mesh = Mesh({REPLICA: replicas, **template.mesh}, owners)
        outer = {TURN: turns, REPLICA: replicas} if turns > 1 else {REPLICA: replicas}
        self._axes = tuple(outer)
        self.window = Mesh(
            {**outer, **template.sizes},
            [*owners] * (turns * prod(template.sizes.values()) // self.places),
            frozenset({TURN, MICRO}) & {*outer, *template.sizes},
        )
        self.partitioner = SizePartitioner(self.window, None, equal_sizes(template.source))
        self.builder = ShardBuilder(self.mesh, self.partitioner)
        self.symbols = self._batch_symbols(batch)
        self._known = known
        self.variables: dict[Node, ShardedVariable] = {}
        self.current: dict[Node, list[Tensor]] = {}
        self._place_of: dict[Node, tuple[Node, int]] = {}  # of the template's variables
        for node, pieces in template.variables.items():
            self.add_variable(node)
            self._place_of |= {own: (node, j) for j, own in enumerate(pieces.nodes)}
        self.shares: dict[Node, FeedSlice] = {}
        self.copies: dict[tuple[int, int], dict[Tensor, Tensor]] = {}
        self.records: list[CommunicationRecord] = []
        self.rank = 0

    # Variables ------------------------------------------------------------------------------------

    def add_variable(self, node: Node) -> None:
        """Take the copies of a variable of the user's that exist already, or make one for each
        device."""
        self._add_copies(node, self.template.variables[node], derived=False)

    def add_derived(self, node: Node) -> None:
        """Take the copies of a variable that the strategy adds, or make one for each device. They
        are always equal."""
        if node not in self.variables:
            self._add_copies(node, whole_variable(node, self.places), derived=True)

    def add_replica_state(self, node: Node) -> None:
        """Take the copies of a variable that the strategy adds at the first device of each replica,
        or make them. Each copy has a value of its own."""
        if node in self.variables:
            return
        if node in self._known:
            pieces = self._known[node].check(node, self.mesh)
        else:
            nodes = []
            for place in range(0, len(self.owners), self.places):
                name = f"{node.name}{self.mesh.tag(self.mesh.places[place])}"
                nodes.append(node.copy_for((), name, self.owners[place], node, node.attrs))
            own = whole_variable(node)
            pieces = ShardedVariable(
                tuple(nodes), own.spans * self.replicas, own.layout, self.mesh.sizes,
                independent=True, derived=True,
            )  # fmt: skip
        self.variables[node] = pieces
        self.current[node] = [copy.outputs[0] for copy in pieces.nodes]

    def _add_copies(self, node: Node, own: TemplateVariable, *, derived: bool) -> None:
        """Take the copies of a variable that exist already, or make one for each device."""
        if node in self._known:
            pieces = self._known[node]
            replace(pieces, independent=True).check(node, self.mesh)
        else:
            nodes = []
            for at, place in enumerate(self.mesh.places):
                initial = own.nodes[at % self.places]
                name = f"{self.name_of(node)}{self.mesh.tag(place)}"
                attrs = {**initial.attrs, "named": False}
                nodes.append(initial.copy_for((), name, self.owners[at], node, attrs))
            pieces = ShardedVariable(
                tuple(nodes), own.spans * self.replicas, own.layout, self.mesh.sizes,
                independent=not derived, derived=derived,
            )  # fmt: skip
        self.variables[node] = pieces
        self.current[node] = [copy.outputs[0] for copy in pieces.nodes]

    def name_of(self, node: Node) -> str:
        """Return the name of a variable in the user's graph, or its own."""
        return self.template.source.names.get(node, node.name)

    def add_counter(self, node: Node) -> Tensor:
        """Take the counter of turns, which is on the first device, or make it. Return its value."""
        if node in self._known:
            pieces = self._known[node].check(node, self.mesh)
        else:
            name = f"{node.name}{self.mesh.tag(self.mesh.places[0])}"
            own = node.copy_for((), name, self.owners[0], node, node.attrs)
            pieces = ShardedVariable((own,), ((),), whole(0), self.mesh.sizes, derived=True)
        self.variables[node] = pieces
        self.current[node] = [pieces.nodes[0].outputs[0]]
        return self.current[node][0]

    # Sizes and feeds ------------------------------------------------------------------------------

    def _batch_symbols(self, batch: Sequence[Tensor]) -> list[str]:
        """Return the symbols of the batch: one, or several that ops require to be equal.

        Raises:
            ShardingError: the batch has a fixed size, or its placeholders have different symbols.
        """
        same = equal_sizes(self.template.source)
        firsts: list[Size] = [t.shape[0] if t.ndim else 0 for t in batch]
        first = same.get(firsts[0], firsts[0]) if firsts else None
        if not isinstance(first, Dim) or any(
            not sole_symbol(d) or same.get(d, d) != first for d in firsts
        ):
            shapes = ", ".join(f"{t.name!r} {show_shape(t.shape)}" for t in batch)
            count = self.turns * self.replicas
            raise ShardingError(
                f"each of {count} micro-batches ({self.replicas} replicas × {self.turns} turns) "
                f"goes through the step as a batch of its own, of another size than {shapes}; "
                "leave the batch open, one symbol that its placeholders share: "
                "gf.placeholder('float32', ('B', 784))"
            )
        names = dict.fromkeys([*firsts, *(d for d in same if same[d] == first)])
        inside = self.template.symbols
        for symbol, axes in inside.items():
            if Dim.symbol(symbol) not in names:
                self.partitioner.can_split(Dim.symbol(symbol), AxisSplit(axes))
        for size in names:
            within = inside.get(sole_symbol(same.get(size, size)) or "", ())
            self.partitioner.can_split(size, AxisSplit((*self._axes, *within)))
        return [name for size in names if (name := sole_symbol(size))]

    def _micro_batch(self, symbol: str, at: tuple[int, ...]) -> ShardExtent:
        """Return the extent of the batch that a replica has in a turn."""
        place = (*at, *(0 for _ in self.template.sizes))
        return self.partitioner.piece(Dim.symbol(symbol), AxisSplit(self._axes), place)

    def _sizes(self, at: tuple[int, ...]) -> dict[str, Size]:
        """Return the sizes that stand for symbols of the template in a replica's turn."""
        found = {symbol: self._micro_batch(symbol, at).size for symbol in self.symbols}
        for symbol, axes in self.template.symbols.items():
            if symbol in self.symbols:
                for leaf in itertools.product(*(range(self.template.sizes[a]) for a in axes)):
                    whole_name = (*self._axes, *axes), (*at, *leaf)
                    inner = piece_symbol(symbol, axes, leaf)
                    found[inner] = Dim.symbol(piece_symbol(symbol, *whole_name))
        return found

    def _placeholder(self, node: Node, copy: TurnCopy, at: tuple[int, ...]) -> Tensor:
        """Return the placeholder of a replica's turn; the template's, if it holds no batch."""
        (tensor,) = node.outputs
        share = self.template.shares.get(node)
        user = node if share is None else share.placeholder
        whole_shape = user.specs[0].shape
        names = [sole_symbol(size) for size in whole_shape]
        if not any(name in self.symbols for name in names):
            if share is not None:
                self.shares[node] = share
            return tensor
        extents = [ShardExtent(0, s, s) for s in whole_shape] if share is None else [*share.pieces]
        pieces = []
        for name, size, own in zip(names, whole_shape, extents, strict=True):
            begin: Size = 0
            if name in self.symbols:
                begin = self._micro_batch(name or "", at).start
            pieces.append(ShardExtent(begin + copy.size(own.start), copy.size(own.size), size))
        with origin_scope(node, copy.prefix, copy.device_of(node)):
            made: Tensor = REGISTRY["placeholder"](
                shape=tuple(p.size for p in pieces), dtype=tensor.dtype.name, name=node.name
            )
        self.shares[made.node] = FeedSlice(user, tuple(pieces))
        return made

    def on_device(self, place: int, cause: Node) -> origin_scope:
        """Return a scope whose nodes are on a device, and count as made where `cause` was made."""
        prefix = f"{self.mesh.tag(self.mesh.places[place])[1:]}/"
        return origin_scope(cause, prefix, self.owners[place], self.rank)

    def cross_device(self, cause: Node) -> origin_scope:
        """Return a scope whose nodes lie on several devices: each where its own input is."""
        return origin_scope(cause, CROSS_DEVICE_SCOPE, DeviceName(), self.rank)

    def enter(self, turn: int, phase: int) -> None:
        """Write what follows for a phase of a turn."""
        self.rank = turn * len(PHASES) + phase

    # Turns ----------------------------------------------------------------------------------------

    def emit_turn(self, turn: int) -> None:
        """Write a turn of every replica. Its updates become the current values."""
        self.enter(turn, COMPUTES)
        for replica in range(self.replicas):
            self._emit_step(turn, replica)

    def _emit_step(self, turn: int, replica: int) -> None:
        """Write a turn of a replica."""
        at = (turn, replica) if self.turns > 1 else (replica,)
        first = replica * self.places
        own = self.owners[first : first + self.places]
        extents = {s: self._micro_batch(s, at) for s in self.symbols}
        copy = TurnCopy(
            self._sizes(at),
            "".join(f"{a}={i}," for a, i in zip(self._axes, at, strict=True))[:-1] + "/",
            own[0] if self.places == 1 else dict(zip(self.template.devices, own, strict=True)),
            turn,
            {s: self._turn_extent(s, turn, e) for s, e in extents.items()},
            self.rank,
        )
        mapped: dict[Tensor, Tensor] = {}
        updated: dict[tuple[Node, int], Tensor] = {}
        for node in self.template.graph.nodes:
            match node.op.name:
                case "constant":
                    mapped[node.outputs[0]] = node.outputs[0]
                case "placeholder":
                    mapped[node.outputs[0]] = self._placeholder(node, copy, at)
                case "variable":
                    variable, j = self._place_of[node]
                    mapped[node.outputs[0]] = self.current[variable][first + j]
                case "assign":
                    value = mapped[node.outputs[0]] = mapped[node.inputs[1]]
                    variable, j = self._place_of[node.inputs[0].node]
                    updated[variable, first + j] = value
                case "group":
                    pass
                case _:
                    made = copy.rebuild(node, tuple(mapped[t] for t in node.inputs))
                    mapped.update(zip(node.outputs, made.outputs, strict=True))
        for (variable, place), value in updated.items():
            self.current[variable][place] = value
        self.copies[turn, replica] = mapped
        self.records += [self._copy_record(record, mapped, at) for record in self.template.records]

    def _turn_extent(self, symbol: str, turn: int, own: ShardExtent) -> ShardExtent:
        """Return the extent of a replica's micro-batch within the batch of its turn."""
        first = self._micro_batch(symbol, (turn, 0) if self.turns > 1 else (0,)).start
        sizes = [
            self._micro_batch(symbol, (turn, r) if self.turns > 1 else (r,)).size
            for r in range(self.replicas)
        ]
        return ShardExtent(own.start - first, own.size, reduce(add, sizes))

    def _copy_record(
        self, record: CommunicationRecord, mapped: Mapping[Tensor, Tensor], at: tuple[int, ...]
    ) -> CommunicationRecord:
        """Return the record of a collective within a replica, for one of its turns."""
        sent: dict[SentTensor, float] = {
            (mapped[tensor], None if to is None else (at, to)): size
            for (tensor, to), size in record.sent.items()
            if tensor in mapped
        }
        return replace(record, bytes=round(sum(sent.values())), sent=sent)

    # Values of all devices ------------------------------------------------------------------------

    def difference(
        self, node: Node, first: Sequence[Tensor], second: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return, at each device, the first value of a variable minus the second."""
        found = []
        for place, (a, b) in enumerate(zip(first, second, strict=True)):
            with self.on_device(place, node):
                found.append(a - b)
        return found

    def add(self, node: Node, first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
        """Return, at each device, the sum of two values of a variable."""
        found = []
        for place, (a, b) in enumerate(zip(first, second, strict=True)):
            with self.on_device(place, node):
                found.append(a + b)
        return found


__all__ = ["REPLICA", "TURN", "ReplicaUnroller"]

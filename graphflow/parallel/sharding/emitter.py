"""Emission: a whole graph written once more, a node for each place of a mesh.

For each node the emitter has chosen along which letters of its op's equation the axes of the mesh
go (see `choosing`). It brings the inputs into the layouts that this asks for, and builds the op,
with attributes of the local sizes, at each place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphflow.errors import GraphflowError
from graphflow.ir.graph import Graph
from graphflow.ir.op import (
    FUNCTIONS,
    Node,
    Tensor,
    current_prefix,
    make_node,
    prefix_of,
    prefix_scope,
)
from graphflow.ir.spec import Shape
from graphflow.ops.control_flow.control import is_control
from graphflow.ops.sharding import rules
from graphflow.parallel.mesh.device_mesh import WHOLE, Piece, Place, Split
from graphflow.parallel.mesh.layouts import Layout, Value, whole
from graphflow.parallel.resharding.communication_log import called
from graphflow.parallel.resharding.gradient_buckets import Buckets
from graphflow.parallel.resharding.resharder import Moves
from graphflow.parallel.resharding.shared_reductions import Repeats
from graphflow.parallel.sharding.control_flow import emit_control
from graphflow.parallel.sharding.cross_shard_ops import met
from graphflow.parallel.sharding.propagation import propagate
from graphflow.parallel.sharding.reshapes import folded
from graphflow.parallel.sharding.rule_selection import Choice, Choosing
from graphflow.parallel.sharding.rules import Rule, rule_of, rules_of
from graphflow.parallel.sharding.whole_nodes import copied_whole, have_specs

_PARTS = ("slice",)
"""Ops that give a part of what they get, as it is."""
_ONCE = ("print", "host_call")
"""Ops with an effect outside, which happens once."""


class Emitter:
    """Writes nodes for all places of a mesh.

    Args:
        moves: moves values of the mesh.
        wishes: layouts that tensors would best have, as annotations and propagation say.
        readers: the nodes that read each tensor; None stands for a fetch.
        bucket: bytes of sums that are exchanged at once; 0: each by itself.
        apart: axes of the mesh along which batch norms are not synchronised.
        followed: the axis along which wishes decide where inputs have to travel, and not bytes.

    Attributes:
        values: what stands for each tensor so far.
    """

    def __init__(
        self,
        moves: Moves,
        wishes: Mapping[Tensor, Layout],
        readers: Mapping[Tensor, Sequence[Node | None]],
        bucket: int = 0,
        apart: frozenset[str] = frozenset(),
        followed: str | None = None,
    ) -> None:
        self.moves = moves
        self.mesh = moves.mesh
        self.cuts = moves.cuts
        self.wishes = dict(wishes)
        self.readers = {t: list(nodes) for t, nodes in readers.items()}
        self.values: dict[Tensor, Value] = {}
        self.apart = apart
        self._followed = followed
        self._choosing = Choosing(
            self.mesh, self.cuts, self.values, self.wishes, self.readers, followed
        )
        self._buckets = Buckets(moves, self.values, bucket)
        self._repeats = Repeats()
        self._widened: dict[tuple[Tensor, Layout], Value] = {}

    def value(self, tensor: Tensor) -> Value:
        return self.values[tensor]

    # Generic nodes --------------------------------------------------------------------------------

    def emit(self, node: Node) -> None:
        """Write a node that computes."""
        self.settle(node)
        values = copied_whole(self.moves, node, self.values, self.wishes)
        if values is not None:
            for tensor, value in zip(node.outputs, values, strict=True):
                self.values[tensor] = value
            return
        if self._fold(node):
            return
        rule = self._choosing.rule(node)
        choice = self._choosing.choice(node, rule)
        splits = choice.splits
        if any(letter.isupper() for letter in splits) and not self._goes_apart(rule, splits):
            self._expand(node, rule, splits)
            return
        inputs, ranges = self._inputs(node, choice)
        meeting = rule.sharding.meeting
        if meeting is not None and meeting.letter in splits:
            outputs = met(self.moves, node, rule, splits[meeting.letter], inputs)
        else:
            outputs = self._at_places(node, choice, inputs, ranges)
        self._keep(node, choice, outputs)

    def _fold(self, node: Node) -> bool:
        """Write a reshape of axes of which several are cut, if it is one."""
        if node.op.name != "reshape":
            return False
        value = self.values[node.inputs[0]]
        target = folded(node, rules_of(node, self.readers), value.layout, self.cuts)
        if target is not None:
            made = Value(node.specs[0], target, value.parts)
            self.values[node.outputs[0]] = self.moves.in_shape(made, node)
        return target is not None

    def _inputs(
        self, node: Node, choice: Choice
    ) -> tuple[list[tuple[Tensor, ...]], list[dict[str, tuple[Any, Any]]]]:
        """Each input's parts, in the layout asked for; and what of windows each place has."""
        ranges: list[dict[str, tuple[Any, Any]]] = [{} for _ in self.mesh.places]
        if choice.targets is None:
            choice.targets = [self._target(choice, i) for i in range(len(node.inputs))]
        if choice.rule.sharding.windows:
            return self._with_windows(node, choice, ranges), ranges
        parts: list[tuple[Tensor, ...]] = []
        for tensor, target in zip(node.inputs, choice.targets, strict=True):
            value = self.values[tensor]
            if value.layout != target or self._widened:
                value = self._brought(tensor, target, node)
            parts.append(value.parts)
        return parts, ranges

    def _target(self, choice: Choice, i: int) -> Layout:
        """How an input is to lie."""
        dims = tuple(
            choice.rule.split(choice.splits.get(letter, WHOLE), i, axis)
            for axis, letter in enumerate(choice.rule.inputs[i])
        )
        partial = tuple((m, kind) for m, (members, kind) in choice.kept.items() if i in members)
        return Layout(dims, partial)

    def _with_windows(
        self, node: Node, choice: Choice, ranges: list[dict[str, tuple[Any, Any]]]
    ) -> list[tuple[Tensor, ...]]:
        """The parts of inputs of which some go along in windows, which `ranges` then holds."""
        rule, splits = choice.rule, choice.splits
        assert choice.targets is not None
        parts: list[tuple[Tensor, ...]] = []
        for i, (tensor, target) in enumerate(zip(node.inputs, choice.targets, strict=True)):
            dims = list(target.dims)
            value = self.values[tensor]
            windows = self._windows(node, rule, i, splits)
            _leave_windows(dims, windows, value.layout, splits)
            value = self._brought(tensor, Layout(tuple(dims), target.partial), node)
            for d, letter in windows:
                split = splits.get(letter, WHOLE)
                value = self._window(node, rule, split, letter, d, i, value, ranges)
            parts.append(value.parts)
        return parts

    def _brought(self, tensor: Tensor, target: Layout, node: Node) -> Value:
        """A tensor in another layout. Of one that was made wider (real numbers that became
        complex), what it was made of travels."""
        value = self.values[tensor]
        source = tensor.node.inputs[0] if tensor.node.op.name == "astype" else tensor
        before = self.values.get(source, value)
        pairs = zip(value.layout.dims, target.dims, strict=True)
        leaving = {a for have, want in pairs for a in have.axes if a not in want.axes}
        moved = self._widened.get((tensor, target))
        narrower = source.dtype.itemsize < tensor.dtype.itemsize and before.layout == value.layout
        if moved is None and narrower and leaving - self.mesh.local and not value.layout.partial:
            there = self.moves.to(before, target, node, called(source.node))
            moved = self._widened[tensor, target] = self.moves.each(
                there, tensor.spec, node, lambda part: FUNCTIONS["astype"](part, tensor.dtype)
            )
        return moved or self.moves.to(value, target, node, called(tensor.node))

    def _windows(
        self, node: Node, rule: Rule, i: int, splits: Mapping[str, Split]
    ) -> list[tuple[int, str]]:
        """Axes of an input, and their letters, along which windows go and places have a part."""
        tensor, sharding = node.inputs[i], rule.sharding
        if i not in sharding.windowed:
            return []
        have, in_parts = self.values[tensor].layout.dims, node.op.name in _PARTS
        return [
            (d, letter)
            for d, letter in enumerate(rule.inputs[i])
            if rule.windows(letter)
            if letter in splits
            or (in_parts and self._sees_a_part(rule, letter, tensor.shape[d], have[d]))
        ]

    def _sees_a_part(self, rule: Rule, letter: str, size: Any, split: Split) -> bool:
        """Whether results that stay whole see a part only of an axis that is cut: that travels, and
        not the whole axis."""
        assert rule.sharding.needs is not None
        if not split or split.outer != 1:
            return False
        start, stop = rule.sharding.needs(letter, 0, rule.sizes.get(letter, 1))
        smaller: bool = stop - start < size
        return smaller

    def _window(
        self,
        node: Node,
        rule: Rule,
        split: Split,
        letter: str,
        d: int,
        number: int,
        value: Value,
        ranges: list[dict[str, tuple[Any, Any]]],
    ) -> Value:
        """The input with, at each place, what the windows of its outputs see along an axis."""
        assert rule.sharding.needs is not None
        wanted = []
        for place, own in zip(self.mesh.places, ranges, strict=True):
            piece = self.cuts.piece(rule.sizes.get(letter, 1), split, place)
            own[letter] = rule.sharding.needs(letter, piece.start, piece.stop)
            each = own[letter]
            wanted.append(each[number] if isinstance(each, list) else each)
        parts = self.moves.windows(value, d, wanted, node, called(node.inputs[number].node))
        return Value(value.spec, value.layout.with_dim(d, WHOLE), parts)

    def _at_places(
        self,
        node: Node,
        choice: Choice,
        inputs: Sequence[tuple[Tensor, ...]],
        ranges: Sequence[dict[str, tuple[Any, Any]]],
    ) -> list[tuple[Tensor, ...]]:
        """The op at each place; once where places share device and inputs."""
        rule, splits = choice.rule, choice.splits
        found: list[tuple[Tensor, ...]] = []
        known: dict[Any, tuple[Tensor, ...]] = {}
        wanted = rule.sizes if self.mesh.local or rule.sharding.build is not None else {}
        for number, place in enumerate(self.mesh.places):
            own = tuple([parts[number] for parts in inputs])
            pieces = {
                letter: self.cuts.piece(size, splits.get(letter, WHOLE), place)
                for letter, size in wanted.items()
            }
            home = self.moves.home(node, place)
            key = (home, own, tuple(pieces.items())) if self.mesh.local else number
            if key not in known:
                pattern = choice.patterns.get(number)
                if pattern is not None and have_specs(own, pattern.inputs):
                    copy = self._copy(pattern, own, node, place)
                    known[key] = copy.outputs
                else:
                    with self.moves.at(place, node):
                        known[key] = self._built(
                            node, rule, own, pieces, splits, place, ranges[number]
                        )
                    if rule.sharding.build is None:  # else it is made of other nodes
                        choice.patterns[number] = known[key][0].node
            found.append(known[key])
        return found

    def _copy(self, pattern: Node, inputs: tuple[Tensor, ...], node: Node, place: Place) -> Node:
        """What stands for a node at a place, where something like it stands already."""
        at, device = self.moves.sites(node)[self.mesh.number(place)]
        return pattern.copy_for(inputs, at + node.name, device, node)

    def _built(
        self,
        node: Node,
        rule: Rule,
        inputs: tuple[Tensor, ...],
        pieces: Mapping[str, Piece],
        splits: Mapping[str, Split],
        place: Place,
        ranges: Mapping[str, tuple[Any, Any]],
    ) -> tuple[Tensor, ...]:
        attrs = dict(node.attrs)
        try:
            if rule.sharding.build is not None and (ranges or any(s for s in splits.values())):
                every = {**rule.single, **pieces}
                cut = rules.Cut(
                    {letter: p.start for letter, p in every.items()},
                    {letter: p.size for letter, p in every.items()},
                    {letter: p.total for letter, p in every.items()},
                    self._local_shapes(node, rule, splits, place),
                    ranges,
                )
                with prefix_scope(current_prefix() + prefix_of(node)):
                    made = rule.sharding.build(node.op, cut, *inputs, **attrs)
                return made if isinstance(made, tuple) else (made,)
            if rule.sharding.sizes is not None:
                attrs[rule.sharding.sizes] = self._local_shapes(node, rule, splits, place)[0]
            return make_node(node.op, inputs, attrs, node.name).outputs
        except GraphflowError as error:
            raise type(error)(
                f"shard {self.mesh.tag(place)[1:]} of {node.name!r} at {node.location}: {error}"
            ) from error

    def _local_shapes(
        self, node: Node, rule: Rule, splits: Mapping[str, Split], place: Place
    ) -> tuple[Shape, ...]:
        """The shapes of a node's outputs at a place."""
        first = len(node.inputs)
        return tuple(
            tuple(
                self.cuts.piece(
                    size, rule.split(splits.get(letter, WHOLE), first + o, axis), place
                ).size
                for axis, (size, letter) in enumerate(zip(spec.shape, names, strict=True))
            )
            for o, (names, spec) in enumerate(zip(rule.outputs, node.specs, strict=True))
        )

    def _keep(
        self,
        node: Node,
        choice: Choice,
        outputs: Sequence[tuple[Tensor, ...]],
    ) -> None:
        """Note what stands for the outputs."""
        if choice.results is None:
            first, count = len(node.inputs), len(node.outputs)
            choice.results = [self._result(choice, first, o) for o in range(count)]
        for o, (tensor, layout) in enumerate(zip(node.outputs, choice.results, strict=True)):
            parts = tuple([made[o] for made in outputs])
            self.values[tensor] = Value(tensor.spec, layout, parts)
            self._collect(tensor, node)

    def _result(self, choice: Choice, first: int, o: int) -> Layout:
        """How an output lies; the outputs' numbers among all tensors begin with `first`."""
        rule, splits = choice.rule, choice.splits
        names = rule.outputs[o]
        dims = tuple(
            rule.split(splits.get(letter, WHOLE), first + o, axis)
            for axis, letter in enumerate(names)
        )
        partial = [(m, kind) for m, (_, kind) in choice.kept.items()]
        for letter, split in splits.items():
            if letter not in names and not rule.meets(letter):
                kind = rule.sharding.kind
                if letter.isupper():
                    kind = rule.sharding.apart or kind
                partial += [(axis, kind) for axis in split.axes]
        return Layout(dims, tuple(sorted(partial)))

    def _goes_apart(self, rule: Rule, splits: Mapping[str, Split]) -> bool:
        """Whether each shard looks at its own piece only."""
        axes = {a for letter, s in splits.items() if letter.isupper() for a in s.axes}
        return rule.sharding.apart is not None and axes <= self.apart

    # Sums that are exchanged together -------------------------------------------------------------

    def _collect(self, tensor: Tensor, node: Node) -> None:
        """Let a partial sum wait for others, if whoever reads it needs the sum."""
        readers = self.readers.get(tensor, [])
        if readers and all(reader is None for reader in readers):
            self._buckets.ride(tensor, node)
        if any(reader is None for reader in readers) or not readers:
            return
        found = self.values[tensor].layout.partial
        sums = all(kind == "sum" for _, kind in found)
        alone = readers[0] if len(set(readers)) == 1 else None
        if sums and alone is not None and self._hands_on(alone, tensor):
            return
        wish = self.wishes.get(tensor)
        partial = {axis for axis, _ in found}
        cut = wish is not None and partial & wish.axes()
        self._buckets.add(tensor, node, wish if cut else None)

    def _hands_on(self, reader: Node, tensor: Tensor, depth: int = 8) -> bool:
        """Whether a reader may hand a partial sum on: it renames numbers, or adds others such."""
        if reader.op.name in ("assign", "group") or is_control(reader.op):
            return False
        sharding = rule_of(reader).sharding
        if not sharding.linear or (not sharding.view and len(sharding.linear[0]) < 2):
            return False
        others = [t for t in reader.inputs if t is not tensor]
        return sharding.view or all(self._may_be_partial(t, depth - 1) for t in others)

    def _may_be_partial(self, tensor: Tensor, depth: int) -> bool:
        """Whether a tensor is a partial sum, or may become one."""
        if tensor in self.values:
            return bool(self.values[tensor].layout.partial)
        node = tensor.node
        if not depth or not node.inputs or is_control(node.op):
            return False
        rule = rule_of(node)
        summed = {c for names in rule.inputs for c in names if c != "."}
        if summed - set("".join(rule.outputs)):
            return True
        return self._hands_on(node, node.inputs[0], depth) and self._may_be_partial(
            node.inputs[0], depth - 1
        )

    def settle(self, node: Node) -> None:
        """Exchange the sums that a node reads; those over turns that a device took, for a reader on
        another one, are made where the turns were: it is sent one tensor, and not each turn's."""
        for tensor in node.inputs:
            layout = self.values[tensor].layout
            if layout.partial:  # only such wait
                self._buckets.empty(tensor)
                layout = self.values[tensor].layout
            if not layout.partial:
                continue
            rest = tuple(p for p in layout.partial if p[0] not in self.mesh.local)
            if rest != layout.partial and self._elsewhere(tensor, node):
                there = Layout(layout.dims, rest)
                value = self.moves.to(self.values[tensor], there, tensor.node, tensor.name)
                self.values[tensor] = value

    def _elsewhere(self, tensor: Tensor, reader: Node) -> bool:
        return any(
            self.moves.home(tensor.node, place) != self.moves.home(reader, place)
            for place in self.mesh.places
        )

    # Expansion ------------------------------------------------------------------------------------

    def _expand(self, node: Node, rule: Rule, splits: Mapping[str, Split]) -> None:
        """Write a node by way of the simpler ones of which its op is made. What cuts the axis for
        which they are cuts nothing else of its inputs."""
        assert rule.sharding.expand is not None
        before, moved = {t: self.values[t] for t in node.inputs}, dict[Tensor, Layout]()
        apart = {a for letter, split in splits.items() if letter.isupper() for a in split.axes}
        for tensor, names in zip(node.inputs, rule.inputs, strict=True):
            have = self.values[tensor].layout
            dims = tuple(
                split if letter.isupper() or apart.isdisjoint(split.axes) else WHOLE
                for letter, split in zip(names, have.dims, strict=True)
            )
            if dims != have.dims:
                moved[tensor] = replace(have, dims=dims)
                self.values[tensor] = self._brought(tensor, moved[tensor], node)
        with self.moves.between(node):
            made = rule.sharding.expand(*node.inputs, **node.attrs)
        made = made if isinstance(made, tuple) else (made,)
        graph = Graph(made)
        for own, after in zip(node.outputs, made, strict=True):
            if own in self.wishes:
                self.wishes.setdefault(after, self.wishes[own])
        self.within(graph, moved)
        self.values.update(before)
        for own, after in zip(node.outputs, made, strict=True):
            self.values[own] = self.values[after]

    def within(self, graph: Graph, moved: Mapping[Tensor, Layout] | None = None) -> None:
        """Write the nodes of another graph that nothing stands for yet.

        Args:
            moved: layouts of tensors that lie in another way than was wished for.
        """
        fresh = [n for n in graph.nodes if n.outputs[0] not in self.values]
        known = {t: self.values[t].layout for n in fresh for t in n.inputs if t in self.values}
        for inner in fresh:
            for tensor in inner.inputs:
                self.readers.setdefault(tensor, []).append(inner)
        given = {**known, **self.wishes, **(moved or {})}
        for tensor, wish in propagate(fresh, given, self.cuts).items():
            self.wishes.setdefault(tensor, wish)
        for inner in fresh:
            if not self._repeats_a_sum(inner):
                self.node(inner)

    def _repeats_a_sum(self, node: Node) -> bool:
        """Take over what another node has summed (or otherwise reduced). What is as large as what
        it is made of is made again, rather than kept from a forward pass to its backward pass."""
        first = self._repeats.first(node)
        if first is node or any(t not in self.values for t in first.outputs):
            return False
        if sum(map(self._size, node.outputs)) >= sum(map(self._size, node.inputs)):
            return False
        for mine, theirs in zip(node.outputs, first.outputs, strict=True):
            self._buckets.empty(theirs)
            self.values[mine] = self.values[theirs]
        return True

    def _size(self, tensor: Tensor) -> int:
        return self.cuts.guess(tensor.size)

    def inside(self, moves: Moves, wishes: Mapping[Tensor, Layout]) -> Emitter:
        """An emitter for a body, in which nothing travels."""
        return Emitter(moves, wishes, {}, 0, self.apart, self._followed)

    def node(self, node: Node) -> None:
        """Write any node."""
        if node.op.elementwise and node.op.pure:  # most are
            self.emit(node)
        elif node.op.name == "constant":
            (tensor,) = node.outputs
            parts = (tensor,) * len(self.mesh.places)
            self.values[tensor] = Value(tensor.spec, whole(tensor.ndim), parts)
        elif node.op.name in _ONCE:
            self._once(node)
        elif is_control(node.op):
            self.settle(node)
            emit_control(self, node)
        else:
            self.emit(node)

    def _once(self, node: Node) -> None:
        """Write a node with an effect outside: at the first place, which tells the others."""
        values = []
        for tensor in node.inputs:
            self._buckets.empty(tensor)
            whole_value = self.moves.to(
                self.values[tensor], whole(tensor.ndim), node, called(tensor.node)
            )
            values.append(whole_value)
        with self.moves.at(self.mesh.places[0], node):
            made = make_node(node.op, tuple(v.parts[0] for v in values), node.attrs, node.name)
        for tensor, part in zip(node.outputs, made.outputs, strict=True):
            parts = (part,) * len(self.mesh.places)
            self.values[tensor] = Value(tensor.spec, whole(tensor.ndim), parts)


def _leave_windows(
    dims: list[Split],
    windows: Sequence[tuple[int, str]],
    have: Layout,
    splits: Mapping[str, Split],
) -> None:
    """Axes with windows stay as they are, and halos are brought; where that cannot be, the whole
    axis is. In place."""
    for d, _ in windows:
        # Neighbours along an axis of the mesh that is to cut another window have other rows of that
        # one by then.
        taken = {a for e, letter in windows if e != d for a in splits.get(letter, WHOLE).axes}
        split = have.dims[d]
        stays = bool(split) and split.outer == 1 and not taken & set(split.axes)
        dims[d] = split if stays else WHOLE
        used = {a for e, s in enumerate(dims) if e != d for a in s.axes}
        if used & set(dims[d].axes):
            dims[d] = WHOLE

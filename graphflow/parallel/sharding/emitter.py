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
from graphflow.parallel.mesh.device_mesh import WHOLE, AxisSplit, Place, ShardExtent
from graphflow.parallel.mesh.layouts import Layout, ShardedTensor, whole
from graphflow.parallel.resharding.communication_log import user_name
from graphflow.parallel.resharding.gradient_buckets import GradientBuckets
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.resharding.shared_reductions import ValueNumbering
from graphflow.parallel.sharding.control_flow import emit_control
from graphflow.parallel.sharding.cross_shard_ops import emit_meeting
from graphflow.parallel.sharding.propagation import propagate
from graphflow.parallel.sharding.reshapes import reshape_layout
from graphflow.parallel.sharding.rule_selection import RuleSelector, SplitChoice
from graphflow.parallel.sharding.rules import ShardingRule, rule_of, rules_of
from graphflow.parallel.sharding.whole_nodes import copy_unsplit, have_specs

_SLICING_OPS = ("slice",)
"""Ops that give a part of what they get, as it is."""
_EFFECT_OPS = ("print", "host_call")
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
        resharder: Resharder,
        preferred: Mapping[Tensor, Layout],
        readers: Mapping[Tensor, Sequence[Node | None]],
        bucket: int = 0,
        apart: frozenset[str] = frozenset(),
        followed: str | None = None,
    ) -> None:
        self.resharder = resharder
        self.mesh = resharder.mesh
        self.partitioner = resharder.partitioner
        self.preferred = dict(preferred)
        self.readers = {t: list(nodes) for t, nodes in readers.items()}
        self.values: dict[Tensor, ShardedTensor] = {}
        self.apart = apart
        self._sequence_axis = followed
        self._selector = RuleSelector(
            self.mesh, self.partitioner, self.values, self.preferred, self.readers, followed
        )
        self._buckets = GradientBuckets(resharder, self.values, bucket)
        self._value_numbers = ValueNumbering()
        self._widened: dict[tuple[Tensor, Layout], ShardedTensor] = {}

    def sharded_value(self, tensor: Tensor) -> ShardedTensor:
        return self.values[tensor]

    # Generic nodes --------------------------------------------------------------------------------

    def emit_compute(self, node: Node) -> None:
        """Write a node that computes."""
        self.reduce_inputs(node)
        values = copy_unsplit(self.resharder, node, self.values, self.preferred)
        if values is not None:
            for tensor, value in zip(node.outputs, values, strict=True):
                self.values[tensor] = value
            return
        if self._emit_reshape(node):
            return
        rule = self._selector.select_rule(node)
        choice = self._selector.choose_splits(node, rule)
        splits = choice.splits
        if any(letter.isupper() for letter in splits) and not self._stays_unsynchronised(
            rule, splits
        ):
            self._expand(node, rule, splits)
            return
        inputs, ranges = self._input_shards(node, choice)
        meeting = rule.sharding.meeting
        if meeting is not None and meeting.letter in splits:
            outputs = emit_meeting(self.resharder, node, rule, splits[meeting.letter], inputs)
        else:
            outputs = self._emit_at_places(node, choice, inputs, ranges)
        self._store_outputs(node, choice, outputs)

    def _emit_reshape(self, node: Node) -> bool:
        """Write a reshape of axes of which several are cut, if it is one."""
        if node.op.name != "reshape":
            return False
        value = self.values[node.inputs[0]]
        target = reshape_layout(node, rules_of(node, self.readers), value.layout, self.partitioner)
        if target is not None:
            made = ShardedTensor(node.specs[0], target, value.shards)
            self.values[node.outputs[0]] = self.resharder.reshape_shards(made, node)
        return target is not None

    def _input_shards(
        self, node: Node, choice: SplitChoice
    ) -> tuple[list[tuple[Tensor, ...]], list[dict[str, tuple[Any, Any]]]]:
        """Each input's parts, in the layout asked for; and what of windows each place has."""
        ranges: list[dict[str, tuple[Any, Any]]] = [{} for _ in self.mesh.places]
        if choice.input_layouts is None:
            choice.input_layouts = [self._input_layout(choice, i) for i in range(len(node.inputs))]
        if choice.rule.sharding.windows:
            return self._with_windows(node, choice, ranges), ranges
        parts: list[tuple[Tensor, ...]] = []
        for tensor, target in zip(node.inputs, choice.input_layouts, strict=True):
            value = self.values[tensor]
            if value.layout != target or self._widened:
                value = self._convert_input(tensor, target, node)
            parts.append(value.shards)
        return parts, ranges

    def _input_layout(self, choice: SplitChoice, i: int) -> Layout:
        """How an input is to lie."""
        dims = tuple(
            choice.rule.split(choice.splits.get(letter, WHOLE), i, axis)
            for axis, letter in enumerate(choice.rule.inputs[i])
        )
        partial = tuple(
            (m, kind) for m, (members, kind) in choice.kept_partials.items() if i in members
        )
        return Layout(dims, partial)

    def _with_windows(
        self, node: Node, choice: SplitChoice, ranges: list[dict[str, tuple[Any, Any]]]
    ) -> list[tuple[Tensor, ...]]:
        """The parts of inputs of which some go along in windows, which `ranges` then holds."""
        rule, splits = choice.rule, choice.splits
        assert choice.input_layouts is not None
        parts: list[tuple[Tensor, ...]] = []
        for i, (tensor, target) in enumerate(zip(node.inputs, choice.input_layouts, strict=True)):
            dims = list(target.dims)
            value = self.values[tensor]
            windows = self._window_axes(node, rule, i, splits)
            _keep_window_splits(dims, windows, value.layout, splits)
            value = self._convert_input(tensor, Layout(tuple(dims), target.partial), node)
            for d, letter in windows:
                split = splits.get(letter, WHOLE)
                value = self._fetch_window(node, rule, split, letter, d, i, value, ranges)
            parts.append(value.shards)
        return parts

    def _convert_input(self, tensor: Tensor, target: Layout, node: Node) -> ShardedTensor:
        """A tensor in another layout. Of one that was made wider (real numbers that became
        complex), what it was made of travels."""
        value = self.values[tensor]
        source = tensor.node.inputs[0] if tensor.node.op.name == "astype" else tensor
        before = self.values.get(source, value)
        pairs = zip(value.layout.dims, target.dims, strict=True)
        leaving = {a for have, want in pairs for a in have.axes if a not in want.axes}
        moved = self._widened.get((tensor, target))
        narrower = source.dtype.itemsize < tensor.dtype.itemsize and before.layout == value.layout
        if (
            moved is None
            and narrower
            and leaving - self.mesh.sequential
            and not value.layout.partial
        ):
            there = self.resharder.convert(before, target, node, user_name(source.node))
            moved = self._widened[tensor, target] = self.resharder.map_shards(
                there, tensor.spec, node, lambda part: FUNCTIONS["astype"](part, tensor.dtype)
            )
        return moved or self.resharder.convert(value, target, node, user_name(tensor.node))

    def _window_axes(
        self, node: Node, rule: ShardingRule, i: int, splits: Mapping[str, AxisSplit]
    ) -> list[tuple[int, str]]:
        """Axes of an input, and their letters, along which windows go and places have a part."""
        tensor, sharding = node.inputs[i], rule.sharding
        if i not in sharding.windowed:
            return []
        have, in_parts = self.values[tensor].layout.dims, node.op.name in _SLICING_OPS
        return [
            (d, letter)
            for d, letter in enumerate(rule.inputs[i])
            if rule.has_window(letter)
            if letter in splits
            or (in_parts and self._needs_part(rule, letter, tensor.shape[d], have[d]))
        ]

    def _needs_part(self, rule: ShardingRule, letter: str, size: Any, split: AxisSplit) -> bool:
        """Whether results that stay whole see a part only of an axis that is cut: that travels, and
        not the whole axis."""
        assert rule.sharding.needs is not None
        if not split or split.outer != 1:
            return False
        start, stop = rule.sharding.needs(letter, 0, rule.sizes.get(letter, 1))
        smaller: bool = stop - start < size
        return smaller

    def _fetch_window(
        self,
        node: Node,
        rule: ShardingRule,
        split: AxisSplit,
        letter: str,
        d: int,
        number: int,
        value: ShardedTensor,
        ranges: list[dict[str, tuple[Any, Any]]],
    ) -> ShardedTensor:
        """The input with, at each place, what the windows of its outputs see along an axis."""
        assert rule.sharding.needs is not None
        wanted = []
        for place, own in zip(self.mesh.places, ranges, strict=True):
            piece = self.partitioner.piece(rule.sizes.get(letter, 1), split, place)
            own[letter] = rule.sharding.needs(letter, piece.start, piece.stop)
            each = own[letter]
            wanted.append(each[number] if isinstance(each, list) else each)
        parts = self.resharder.fetch_windows(
            value, d, wanted, node, user_name(node.inputs[number].node)
        )
        return ShardedTensor(value.spec, value.layout.with_dim(d, WHOLE), parts)

    def _emit_at_places(
        self,
        node: Node,
        choice: SplitChoice,
        inputs: Sequence[tuple[Tensor, ...]],
        ranges: Sequence[dict[str, tuple[Any, Any]]],
    ) -> list[tuple[Tensor, ...]]:
        """The op at each place; once where places share device and inputs."""
        rule, splits = choice.rule, choice.splits
        found: list[tuple[Tensor, ...]] = []
        known: dict[Any, tuple[Tensor, ...]] = {}
        wanted = rule.sizes if self.mesh.sequential or rule.sharding.build is not None else {}
        for number, place in enumerate(self.mesh.places):
            own = tuple([parts[number] for parts in inputs])
            pieces = {
                letter: self.partitioner.piece(size, splits.get(letter, WHOLE), place)
                for letter, size in wanted.items()
            }
            home = self.resharder.device_index(node, place)
            key = (home, own, tuple(pieces.items())) if self.mesh.sequential else number
            if key not in known:
                pattern = choice.templates.get(number)
                if pattern is not None and have_specs(own, pattern.inputs):
                    copy = self._copy_template(pattern, own, node, place)
                    known[key] = copy.outputs
                else:
                    with self.resharder.on_device(place, node):
                        known[key] = self._build_local(
                            node, rule, own, pieces, splits, place, ranges[number]
                        )
                    if rule.sharding.build is None:  # else it is made of other nodes
                        choice.templates[number] = known[key][0].node
            found.append(known[key])
        return found

    def _copy_template(
        self, pattern: Node, inputs: tuple[Tensor, ...], node: Node, place: Place
    ) -> Node:
        """What stands for a node at a place, where something like it stands already."""
        at, device = self.resharder.sites(node)[self.mesh.index_of(place)]
        return pattern.copy_for(inputs, at + node.name, device, node)

    def _build_local(
        self,
        node: Node,
        rule: ShardingRule,
        inputs: tuple[Tensor, ...],
        pieces: Mapping[str, ShardExtent],
        splits: Mapping[str, AxisSplit],
        place: Place,
        ranges: Mapping[str, tuple[Any, Any]],
    ) -> tuple[Tensor, ...]:
        attrs = dict(node.attrs)
        try:
            if rule.sharding.build is not None and (ranges or any(s for s in splits.values())):
                every = {**rule.unsplit_extents, **pieces}
                cut = rules.ShardView(
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
        self, node: Node, rule: ShardingRule, splits: Mapping[str, AxisSplit], place: Place
    ) -> tuple[Shape, ...]:
        """The shapes of a node's outputs at a place."""
        first = len(node.inputs)
        return tuple(
            tuple(
                self.partitioner.piece(
                    size, rule.split(splits.get(letter, WHOLE), first + o, axis), place
                ).size
                for axis, (size, letter) in enumerate(zip(spec.shape, names, strict=True))
            )
            for o, (names, spec) in enumerate(zip(rule.outputs, node.specs, strict=True))
        )

    def _store_outputs(
        self,
        node: Node,
        choice: SplitChoice,
        outputs: Sequence[tuple[Tensor, ...]],
    ) -> None:
        """Note what stands for the outputs."""
        if choice.output_layouts is None:
            first, count = len(node.inputs), len(node.outputs)
            choice.output_layouts = [self._output_layout(choice, first, o) for o in range(count)]
        for o, (tensor, layout) in enumerate(zip(node.outputs, choice.output_layouts, strict=True)):
            parts = tuple([made[o] for made in outputs])
            self.values[tensor] = ShardedTensor(tensor.spec, layout, parts)
            self._bucket_partial(tensor, node)

    def _output_layout(self, choice: SplitChoice, first: int, o: int) -> Layout:
        """How an output lies; the outputs' numbers among all tensors begin with `first`."""
        rule, splits = choice.rule, choice.splits
        names = rule.outputs[o]
        dims = tuple(
            rule.split(splits.get(letter, WHOLE), first + o, axis)
            for axis, letter in enumerate(names)
        )
        partial = [(m, kind) for m, (_, kind) in choice.kept_partials.items()]
        for letter, split in splits.items():
            if letter not in names and not rule.meets(letter):
                kind = rule.sharding.kind
                if letter.isupper():
                    kind = rule.sharding.apart or kind
                partial += [(axis, kind) for axis in split.axes]
        return Layout(dims, tuple(sorted(partial)))

    def _stays_unsynchronised(self, rule: ShardingRule, splits: Mapping[str, AxisSplit]) -> bool:
        """Whether each shard looks at its own piece only."""
        axes = {a for letter, s in splits.items() if letter.isupper() for a in s.axes}
        return rule.sharding.apart is not None and axes <= self.apart

    # Sums that are exchanged together -------------------------------------------------------------

    def _bucket_partial(self, tensor: Tensor, node: Node) -> None:
        """Let a partial sum wait for others, if whoever reads it needs the sum."""
        readers = self.readers.get(tensor, [])
        if readers and all(reader is None for reader in readers):
            self._buckets.add_fetched(tensor, node)
        if any(reader is None for reader in readers) or not readers:
            return
        found = self.values[tensor].layout.partial
        sums = all(kind == "sum" for _, kind in found)
        alone = readers[0] if len(set(readers)) == 1 else None
        if sums and alone is not None and self._passes_partials(alone, tensor):
            return
        wish = self.preferred.get(tensor)
        partial = {axis for axis, _ in found}
        cut = wish is not None and partial & wish.axes()
        self._buckets.add(tensor, node, wish if cut else None)

    def _passes_partials(self, reader: Node, tensor: Tensor, depth: int = 8) -> bool:
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
        return self._passes_partials(node, node.inputs[0], depth) and self._may_be_partial(
            node.inputs[0], depth - 1
        )

    def reduce_inputs(self, node: Node) -> None:
        """Exchange the sums that a node reads; those over turns that a device took, for a reader on
        another one, are made where the turns were: it is sent one tensor, and not each turn's."""
        for tensor in node.inputs:
            layout = self.values[tensor].layout
            if layout.partial:  # only such wait
                self._buckets.flush_tensor(tensor)
                layout = self.values[tensor].layout
            if not layout.partial:
                continue
            rest = tuple(p for p in layout.partial if p[0] not in self.mesh.sequential)
            if rest != layout.partial and self._is_elsewhere(tensor, node):
                there = Layout(layout.dims, rest)
                value = self.resharder.convert(self.values[tensor], there, tensor.node, tensor.name)
                self.values[tensor] = value

    def _is_elsewhere(self, tensor: Tensor, reader: Node) -> bool:
        return any(
            self.resharder.device_index(tensor.node, place)
            != self.resharder.device_index(reader, place)
            for place in self.mesh.places
        )

    # Expansion ------------------------------------------------------------------------------------

    def _expand(self, node: Node, rule: ShardingRule, splits: Mapping[str, AxisSplit]) -> None:
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
                self.values[tensor] = self._convert_input(tensor, moved[tensor], node)
        with self.resharder.cross_device(node):
            made = rule.sharding.expand(*node.inputs, **node.attrs)
        made = made if isinstance(made, tuple) else (made,)
        graph = Graph(made)
        for own, after in zip(node.outputs, made, strict=True):
            if own in self.preferred:
                self.preferred.setdefault(after, self.preferred[own])
        self.emit_graph(graph, moved)
        self.values.update(before)
        for own, after in zip(node.outputs, made, strict=True):
            self.values[own] = self.values[after]

    def emit_graph(self, graph: Graph, moved: Mapping[Tensor, Layout] | None = None) -> None:
        """Write the nodes of another graph that nothing stands for yet.

        Args:
            moved: layouts of tensors that lie in another way than was wished for.
        """
        fresh = [n for n in graph.nodes if n.outputs[0] not in self.values]
        known = {t: self.values[t].layout for n in fresh for t in n.inputs if t in self.values}
        for inner in fresh:
            for tensor in inner.inputs:
                self.readers.setdefault(tensor, []).append(inner)
        given = {**known, **self.preferred, **(moved or {})}
        for tensor, wish in propagate(fresh, given, self.partitioner).items():
            self.preferred.setdefault(tensor, wish)
        for inner in fresh:
            if not self._reuses_reduction(inner):
                self.emit_node(inner)

    def _reuses_reduction(self, node: Node) -> bool:
        """Take over what another node has summed (or otherwise reduced). What is as large as what
        it is made of is made again, rather than kept from a forward pass to its backward pass."""
        first = self._value_numbers.first_equal(node)
        if first is node or any(t not in self.values for t in first.outputs):
            return False
        if sum(map(self._size, node.outputs)) >= sum(map(self._size, node.inputs)):
            return False
        for mine, theirs in zip(node.outputs, first.outputs, strict=True):
            self._buckets.flush_tensor(theirs)
            self.values[mine] = self.values[theirs]
        return True

    def _size(self, tensor: Tensor) -> int:
        return self.partitioner.guess(tensor.size)

    def body_emitter(self, resharder: Resharder, preferred: Mapping[Tensor, Layout]) -> Emitter:
        """An emitter for a body, in which nothing travels."""
        return Emitter(resharder, preferred, {}, 0, self.apart, self._sequence_axis)

    def emit_node(self, node: Node) -> None:
        """Write any node."""
        if node.op.elementwise and node.op.pure:  # most are
            self.emit_compute(node)
        elif node.op.name == "constant":
            (tensor,) = node.outputs
            parts = (tensor,) * len(self.mesh.places)
            self.values[tensor] = ShardedTensor(tensor.spec, whole(tensor.ndim), parts)
        elif node.op.name in _EFFECT_OPS:
            self._emit_once(node)
        elif is_control(node.op):
            self.reduce_inputs(node)
            emit_control(self, node)
        else:
            self.emit_compute(node)

    def _emit_once(self, node: Node) -> None:
        """Write a node with an effect outside: at the first place, which tells the others."""
        values = []
        for tensor in node.inputs:
            self._buckets.flush_tensor(tensor)
            whole_value = self.resharder.convert(
                self.values[tensor], whole(tensor.ndim), node, user_name(tensor.node)
            )
            values.append(whole_value)
        with self.resharder.on_device(self.mesh.places[0], node):
            made = make_node(node.op, tuple(v.shards[0] for v in values), node.attrs, node.name)
        for tensor, part in zip(node.outputs, made.outputs, strict=True):
            parts = (part,) * len(self.mesh.places)
            self.values[tensor] = ShardedTensor(tensor.spec, whole(tensor.ndim), parts)


def _keep_window_splits(
    dims: list[AxisSplit],
    windows: Sequence[tuple[int, str]],
    have: Layout,
    splits: Mapping[str, AxisSplit],
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

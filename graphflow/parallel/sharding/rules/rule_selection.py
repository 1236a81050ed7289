"""Choose how a node is split, so that the fewest bytes travel: which mesh axes go along which
letters."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import field

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec, product
from graphflow.parallel.mesh.axis_split import AxisSplit
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import Layout, ShardedTensor
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.sharding.rules.node_rule import ShardingRule, rules_of

KEEP_PARTIAL = "+"
"""A choice: partial sums are passed on."""
FLOPS_PER_BYTE = 40.0
"""Floating point operations that cost as much as one byte of communication."""


@dataclass(eq=False)
class SplitChoice:
    """The choice of splits for like nodes.

    Attributes:
        rule: their rule. It is kept so that its id stays unique, which is part of the cache key.
        splits: the split of each letter.
        kept_partials: by mesh axis, the inputs whose partial sums are passed on, and how they are
            combined.
        input_layouts: the layouts of their inputs, once the first node was written.
        output_layouts: the layouts of their outputs, likewise.
        templates: what stands for the first of them at each place; later nodes copy it.
    """

    rule: ShardingRule
    splits: Mapping[str, AxisSplit]
    kept_partials: Mapping[str, tuple[tuple[int, ...], str]]
    input_layouts: Sequence[Layout] | None = None
    output_layouts: Sequence[Layout] | None = None
    templates: dict[int, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class RuleSelector:
    """Chooses by the layouts of inputs and the preferred layouts of outputs.

    Args:
        mesh: the mesh.
        partitioner: the extents of shards.
        values: what stands for each tensor so far.
        preferred: preferred layouts of tensors.
        readers: the nodes that read each tensor; None stands for a fetch.
        sequence_axis: the mesh axis along which preferred layouts decide, and not the number of
            bytes.
    """

    mesh: Mesh
    partitioner: SizePartitioner
    values: Mapping[Tensor, ShardedTensor]
    preferred: Mapping[Tensor, Layout]
    readers: Mapping[Tensor, Sequence[Node | None]]
    sequence_axis: str | None = None
    _known: dict[Hashable, SplitChoice] = field(default_factory=dict)

    def select_rule(self, node: Node) -> ShardingRule:
        """Return the rule of a node's op that fits most splits of its inputs, then most preferred
        splits of its outputs."""
        first, *others = rules_of(node, self.readers)
        have = [self.values[t].layout for t in node.inputs]
        want = [self.preferred.get(t) for t in node.outputs]

        def fits(rule: ShardingRule, number: int, d: int, split: AxisSplit) -> bool:
            own = rule.letter_split(split, number, d) if split else None
            letter = (*rule.inputs, *rule.outputs)[number][d]
            if own is None or (rule.is_ordered(letter) and own.outer != 1):
                return False
            return self.partitioner.can_split(rule.sizes.get(letter, 0), own)

        def count_fitting(rule: ShardingRule, first: int, layouts: Sequence[Layout | None]) -> int:
            return sum(
                fits(rule, first + i, d, split)
                for i, layout in enumerate(layouts)
                for d, split in enumerate(layout.dims if layout else ())
            )

        def score(rule: ShardingRule) -> tuple[int, int, bool]:
            anywhere = bool(rule.sharding.windows)  # windows are fetched from any layout
            return count_fitting(rule, 0, have), count_fitting(rule, len(have), want), anywhere

        return max([first, *others], key=score) if others else first

    def choose_splits(self, node: Node, rule: ShardingRule) -> SplitChoice:
        """Return how a node is split. Like nodes with inputs in like layouts share one choice."""
        if (
            self.sequence_axis is not None
        ):  # then weights differ from other inputs, which the key does not say
            return SplitChoice(rule, *self._choose(node, rule))
        key = (id(rule), *self._cache_key(node))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = SplitChoice(rule, *self._choose(node, rule))
        return known

    def _cache_key(self, node: Node) -> Iterator[Hashable]:
        """Yield everything that the choice for a node depends on besides its rule."""
        for tensor in node.inputs:
            layout = self.values[tensor].layout
            yield layout
            if layout.partial:
                yield self.preferred.get(tensor)
                yield len(set(self.readers.get(tensor, ()))) > 1
        for tensor in node.outputs:
            yield self.preferred.get(tensor)
        yield len(self.partitioner.symbols)  # nominal sizes depend on it

    def _choose(
        self, node: Node, rule: ShardingRule
    ) -> tuple[dict[str, AxisSplit], dict[str, tuple[tuple[int, ...], str]]]:
        """Choose, mesh axis by mesh axis, the letter that costs least."""
        axes: dict[str, list[str]] = {}
        kept: dict[str, tuple[tuple[int, ...], str]] = {}
        flops = self._flops(node)
        for m in self._mesh_axis_order(node):
            best: tuple[tuple[bool, bool, float], str | None] | None = None
            for choice in self._candidate_letters(node, rule, m, axes):
                cost = self._cost(node, rule, m, choice, flops)
                if best is None or cost < best[0]:
                    best = (cost, choice)
            assert best is not None
            if best[1] == KEEP_PARTIAL:
                kept[m] = (self._partials_to_keep(node, rule, m), "sum")
            elif best[1] is not None:
                axes.setdefault(best[1], []).append(m)
        return {c: self._split(node, rule, c, tuple(a)) for c, a in axes.items()}, kept

    def _mesh_axis_order(self, node: Node) -> list[str]:
        """Return the mesh axes; those that split one axis of a tensor together come in the order
        that it has."""
        order = list(self.mesh.names)
        layouts = [self.preferred[t] for t in node.outputs if t in self.preferred]
        for layout in (*layouts, *(self.values[t].layout for t in node.inputs)):
            for split in layout.dims:
                places = sorted(map(order.index, split.axes))
                for place, axis in zip(places, split.axes, strict=True):
                    order[place] = axis
        return order

    def _candidate_letters(
        self, node: Node, rule: ShardingRule, m: str, axes: Mapping[str, list[str]]
    ) -> list[str | None]:
        """Return what a mesh axis may go along: letters that it splits in inputs, or would split in
        preferred layouts; KEEP_PARTIAL; and None for no letter."""
        found: list[str | None] = []
        if self._partials_to_keep(node, rule, m):
            found.append(KEEP_PARTIAL)
        inputs = [*zip(rule.inputs, node.inputs, strict=True)]
        layouts = [(n, self.values[t].layout) for n, t in inputs]
        wished = [(n, t) for n, t in inputs if m in dict(self.values[t].layout.partial)]
        wished += zip(rule.outputs, node.outputs, strict=True)
        layouts += [(n, self.preferred[t]) for n, t in wished if t in self.preferred]
        for names, layout in layouts:
            for letter, split in zip(names, layout.dims, strict=True):
                fresh = letter != "." and m in split.axes and letter not in found
                if fresh and self._can_split(node, rule, letter, (*axes.get(letter, ()), m)):
                    found.append(letter)
        return [*found, None]

    def _can_split(
        self, node: Node, rule: ShardingRule, letter: str, axes: tuple[str, ...]
    ) -> bool:
        """Return True if a letter can be split along some mesh axes."""
        size = rule.sizes.get(letter)
        if size is None:
            return False
        if not self.partitioner.can_split(size, self._split(node, rule, letter, axes)):
            return False
        if letter.isupper():
            return rule.sharding.expand is not None
        if rule.is_ordered(letter):
            return isinstance(size, int) and (len(axes) == 1 or rule.has_window(letter))
        return True

    def _partials_to_keep(self, node: Node, rule: ShardingRule, m: str) -> tuple[int, ...]:
        """Return the inputs whose partial sums along a mesh axis may be passed on; () if none.

        The op has to be linear in them, and summing later may not send more bytes than summing now.
        """
        partial = tuple(
            i for i, t in enumerate(node.inputs) if (m, "sum") in self.values[t].layout.partial
        )
        if not partial or any(
            a == m and k != "sum" for t in node.inputs for a, k in self.values[t].layout.partial
        ):
            return ()
        if partial not in rule.sharding.linear or len(node.outputs) > 1:
            return ()
        if any(len(set(self.readers.get(node.inputs[i], ()))) > 1 for i in partial):
            return ()
        if rule.sharding.view:
            return partial
        before = sum(self._bytes(node.inputs[i].spec) for i in partial)
        return partial if self._bytes(node.specs[0]) < before else ()

    def _bytes(self, spec: TensorSpec) -> int:
        """Return the bytes of a tensor, nominal if its size is symbolic."""
        return self.partitioner.guess(product(spec.shape)) * spec.dtype.itemsize

    def _flops(self, node: Node) -> float:
        """Return the floating point operations of a node, nominal if its sizes are symbolic."""
        if node.op.cost is None:
            return float(self.partitioner.guess(node.specs[0].size))
        return float(
            self.partitioner.guess(node.op.cost(*[t.spec for t in node.inputs], **node.attrs).flops)
        )

    def _cost(
        self, node: Node, rule: ShardingRule, m: str, choice: str | None, flops: float
    ) -> tuple[bool, bool, float]:
        """Return the cost of a choice along a mesh axis, to be compared in this order.

        First, whether inputs have to travel (more than halos). Then, along the sequence axis,
        whether the choice misses a preferred layout. Last, the bytes that travel and the work that
        is done twice.

        A tensor that is split already is used as it is if possible. A user who splits the weights
        of two layers wants the sum of the second one to travel, and not the weights, however small
        they are.
        """
        travels = False
        total = 0.0
        for tensor, names in zip(node.inputs, rule.inputs, strict=True):
            moves, cost = self._input_cost(tensor, names, rule, m, choice)
            numbers = m == self.sequence_axis and tensor.dtype.kind in "iu"  # indices are small
            travels |= moves and not numbers
            total += cost
        for tensor, names in zip(node.outputs, rule.outputs, strict=True):
            total += self._output_cost(tensor, names, m, choice)
        if choice is None or choice == KEEP_PARTIAL:
            total += (self.mesh.sizes[m] - 1) * flops / FLOPS_PER_BYTE
        elif choice.isupper():
            total += 16.0
        total *= 1e-3 if m in self.mesh.sequential else 1.0
        if not travels and self._scatters(node, rule, m, choice):
            return True, False, total
        return travels, self._misses_preferred(node, rule, m, choice), total

    def _scatters(self, node: Node, rule: ShardingRule, m: str, choice: str | None) -> bool:
        """Return True if an unsharded operand yields partial sums that a reduce-scatter turns into
        one shard per device (for example the gradient of a large embedding table).

        That communicates too, and needs the memory of the whole sum at each place.
        """
        if m != self.sequence_axis or choice is None or choice == KEEP_PARTIAL:
            return False
        if any(
            _is_weight(t) and _split_dim(self.values[t].layout, m) is not None for t in node.inputs
        ):
            return False
        return any(
            choice not in names and target is not None and _split_dim(target, m) is not None
            for names, target in zip(
                rule.outputs, map(self.preferred.get, node.outputs), strict=True
            )
        )

    def _misses_preferred(self, node: Node, rule: ShardingRule, m: str, choice: str | None) -> bool:
        """Return True if a choice along the sequence axis is not the preferred layout of an
        output."""
        if m != self.sequence_axis:
            return False
        for tensor, names in zip(node.outputs, rule.outputs, strict=True):
            target = self.preferred.get(tensor)
            at = _split_dim(target, m) if target else None
            if at is not None and names[at] != choice:
                return True
        return False

    def _input_cost(
        self, tensor: Tensor, names: str, rule: ShardingRule, m: str, choice: str | None
    ) -> tuple[bool, float]:
        """Return, for an input, whether more than halos has to travel, and how many bytes do."""
        layout, n = self.values[tensor].layout, self.mesh.sizes[m]
        size = self._bytes(tensor.spec) * (n - 1)
        at = _split_dim(layout, m)
        wanted = choice is not None and choice in names
        if at is not None:
            if not wanted or names[at] != choice:
                return True, size / n if wanted else size
            return False, size / n / 100 if rule.has_window(choice or "") else 0.0
        if choice != KEEP_PARTIAL and any(a == m for a, _ in layout.partial):
            return True, size if wanted else 2 * size
        return False, 0.0

    def _output_cost(self, tensor: Tensor, names: str, m: str, choice: str | None) -> float:
        """Return the bytes of an output that travel to readers which prefer another layout."""
        if choice is None:
            return 0.0
        n, target = self.mesh.sizes[m], self.preferred.get(tensor)
        size = self._bytes(tensor.spec) * (n - 1)
        at = _split_dim(target, m) if target else None
        if choice == KEEP_PARTIAL or choice not in names:
            return size if at is not None else 2 * size
        if at is None:
            return size
        return size / n if names[at] != choice else 0.0

    def _split(
        self, node: Node, rule: ShardingRule, letter: str, axes: tuple[str, ...]
    ) -> AxisSplit:
        """Return how a letter is split: in the extents of inputs that are split along the same mesh
        axes."""
        every = [
            (i, n, self.values[t].layout)
            for i, (n, t) in enumerate(zip(rule.inputs, node.inputs, strict=True))
        ]
        every += [
            (len(node.inputs) + o, n, self.preferred[t])
            for o, (n, t) in enumerate(zip(rule.outputs, node.outputs, strict=True))
            if t in self.preferred
        ]
        sharding = rule.sharding
        placed = sharding.build is not None and not sharding.ignores_start
        stretches = placed or rule.is_ordered(letter)
        for number, names, layout in every:
            for d, split in enumerate(layout.dims):
                if names[d] != letter or split.axes[: len(axes)] != axes:
                    continue
                own = rule.letter_split(split, number, d)
                own = own and own.keep_first(len(axes))
                if own is None or own == AxisSplit(axes) or (stretches and own.outer != 1):
                    continue
                if self.partitioner.can_split(rule.sizes[letter], own):
                    return own
        return AxisSplit(axes)


def _is_weight(tensor: Tensor) -> bool:
    """Return True if a tensor is a variable, possibly reshaped, permuted or converted."""
    node = tensor.node
    while node.op.name in ("astype", "reshape", "permute_dims"):
        node = node.inputs[0].node
    return node.op.name == "variable"


def _split_dim(layout: Layout, m: str) -> int | None:
    """Return the axis that a mesh axis splits, or None."""
    return next((d for d, split in enumerate(layout.dims) if m in split.axes), None)

"""Propagation: from the layouts of a few tensors to preferred layouts of all, through the equations
of ops.

Axes that share a letter of an op's equation are split alike. This goes forwards and backwards until
nothing changes. Propagation decides nothing that costs: the emitter chooses by its layouts (Xu et
al., "GSPMD", arXiv:2105.04663).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphflow.ir.op import Node, Tensor
from graphflow.parallel.mesh.axis_split import WHOLE, AxisSplit
from graphflow.parallel.mesh.layouts import Layout, whole
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.sharding.rules.node_rule import ShardingRule, rule_of, rules_of

MAX_ROUNDS = 20
"""The most times that a graph is gone through, forwards and backwards."""


def propagate(
    nodes: Sequence[Node],
    given: Mapping[Tensor, Layout],
    partitioner: SizePartitioner,
    gathered: str | None = None,
) -> dict[Tensor, Layout]:
    """Return layouts for the tensors of some nodes, which are in build order.

    Args:
        nodes: the nodes.
        given: layouts that stay as they are.
        partitioner: the extents of shards.
        gathered: a mesh axis. If a node needs an axis whole that it splits, the axis is gathered,
            and no other axis is split instead.
    """
    readers: dict[Tensor, list[Node | None]] = {}
    for node in nodes:
        for tensor in node.inputs:
            readers.setdefault(tensor, []).append(node)
    spread = _Propagation(nodes, readers, given, partitioner, gathered)
    spread.run()
    spread.switch_axes()
    return spread.layouts


def split_by_heads(
    nodes: Sequence[Node], given: Mapping[Tensor, Layout], partitioner: SizePartitioner
) -> dict[Tensor, Layout]:
    """Return annotations in which packed projections to queries, keys and values are split by
    heads.

    A plain split of such a weight would give one device all queries and another one all values.
    """
    starts = [n for n in nodes if n.op.name in ("attention", "attention_packed")]
    cut = {
        split
        for tensor, layout in given.items()
        if tensor.node.op.name == "variable"
        for split in layout.dims
        if split and split == AxisSplit(split.axes)
    }
    found = dict(given)
    for split in cut if starts else ():
        layouts = propagate(nodes, _head_layouts(starts, split, partitioner), partitioner)
        for tensor, layout in given.items():
            for d, own in enumerate(layout.dims):
                better = layouts[tensor].dims[d] if tensor in layouts else WHOLE
                if own == split and better.axes == split.axes and better.outer != 1:
                    found[tensor] = found[tensor].with_dim(d, better)
    return found


def _head_layouts(
    nodes: Sequence[Node], split: AxisSplit, partitioner: SizePartitioner
) -> dict[Tensor, Layout]:
    """Return the layouts by heads of what attention nodes read, packed or separate."""
    found = {}
    for node in nodes:
        rule = rule_of(node)
        packed = node.op.name == "attention_packed"
        letter = rule.inputs[0][-1 if packed else -3]
        for i, (tensor, names) in enumerate(zip(node.inputs, rule.inputs, strict=True)):
            if letter not in names or i > (0 if packed else 2):
                continue
            d = names.index(letter)
            own = rule.split(split, i, d)
            if partitioner.can_split(tensor.shape[d], own):
                found[tensor] = whole(tensor.ndim).with_dim(d, own)
    return found


def is_slot(node: Node) -> bool:
    """Return True if a variable is an optimiser's slot of another variable.

    A slot has the shape of the variable's first axes; dtypes may differ, since 16-bit weights have
    32-bit slots.
    """
    owner = node.origin
    if owner is None or owner.op.name != "variable":
        return False
    (slot,), (variable,) = node.specs, owner.specs
    return variable.shape[: slot.rank] == slot.shape


_AxisRef = tuple[Tensor, int, ShardingRule | None, int]
"""An axis of a tensor; the rule that relates it to others, and the tensor's number in that rule."""


class _Propagation:
    """Layouts as they become known.

    A node is open if a layout of its tensors splits something and the node was not visited since
    that layout changed. For most nodes of a step nothing is ever split, and no rule is looked up.

    Args:
        nodes: the nodes, in build order.
        readers: the nodes that read each tensor.
        given: layouts that stay as they are.
        partitioner: the extents of shards.
        gathered: see `propagate`.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        readers: Mapping[Tensor, Sequence[Node | None]],
        given: Mapping[Tensor, Layout],
        partitioner: SizePartitioner,
        gathered: str | None = None,
    ) -> None:
        self.gathered = frozenset[str]() if gathered is None else {gathered}
        self.layouts = dict(given)
        self.fixed = set(given)
        self.partitioner = partitioner
        self._nodes, self._readers = nodes, readers
        self._own = set(nodes)
        self._joins: dict[Node, list[list[_AxisRef]]] = {}
        self._slots: dict[Tensor, list[Node]] = {}
        for node in nodes:
            if node.op.name == "variable" and is_slot(node):
                assert node.origin is not None
                self._slots.setdefault(node.origin.outputs[0], []).append(node)
        self._open: set[Node] = set()
        for tensor, layout in self.layouts.items():
            if any(layout.dims):
                self._reopen_neighbours(tensor)

    def _reopen_neighbours(self, tensor: Tensor) -> None:
        """Open the maker, the readers and the slots of a tensor."""
        if tensor.node in self._own:
            self._open.add(tensor.node)
        self._open.update(self._readers.get(tensor, ()))  # type: ignore[arg-type]
        self._open.update(self._slots.get(tensor, ()))

    def _rules(self, node: Node) -> Sequence[ShardingRule]:
        """Return the rules that relate a node's axes."""
        if node.op.name == "assign" or not (node.inputs or node.op.sharding is not None):
            return ()
        return rules_of(node, self._readers)

    def run(self) -> None:
        """Visit all nodes forwards and backwards until nothing changes."""
        for _ in range(MAX_ROUNDS):
            if not self._open:
                break
            for node in self._nodes:
                self.visit(node)
            for node in reversed(self._nodes):
                self.visit(node)

    def switch_axes(self) -> None:
        """Split another axis of the outputs where a node needs a split axis whole.

        An all-to-all then sends 1/n of the bytes that an all-gather would.
        """
        turned = False
        for node in self._nodes:
            cut = any(any(self.layouts[t].dims) for t in node.inputs if t in self.layouts)
            own = self._rules(node) if cut else ()
            if own and self._switches_axis(node, own[0]):
                turned = True
            if turned:
                self.visit(node)
        if turned:
            self.run()

    def _switches_axis(self, node: Node, rule: ShardingRule) -> bool:
        """Split an output along a mesh axis that splits what the node needs whole. Return True if
        it did."""
        used = {a for t in node.outputs if t in self.layouts for a in self.layouts[t].axes()}
        used |= (
            self.partitioner.mesh.sequential | self.gathered
        )  # gathering along sequential axes costs nothing
        found = False
        for tensor, names in zip(node.inputs, rule.inputs, strict=True):
            layout = self.layouts.get(tensor) or whole(tensor.ndim)
            for letter, split in zip(names, layout.dims, strict=True):
                if letter != "." or not split or used & set(split.axes):
                    continue
                used.update(split.axes)
                free = self._longest_free_axis(rule, names, layout, split)
                for o, (output, letters) in enumerate(zip(node.outputs, rule.outputs, strict=True)):
                    if free is not None and free in letters:
                        at, number = letters.index(free), len(node.inputs) + o
                        self._set_split(output, at, rule.split(AxisSplit(split.axes), number, at))
                        found = True
        return found

    def _longest_free_axis(
        self, rule: ShardingRule, names: str, layout: Layout, split: AxisSplit
    ) -> str | None:
        """Return the letter of the longest axis of an input that can be split and that the node
        goes along row by row."""
        sizes = {
            letter: size
            for letter, own in zip(names, layout.dims, strict=True)
            if letter.islower() and not own and not rule.is_ordered(letter)
            if isinstance(size := rule.sizes.get(letter), int)
            if letter in "".join(rule.outputs)
            and self.partitioner.can_split(size, AxisSplit(split.axes))
        }
        return max(sizes, key=sizes.__getitem__) if sizes else None

    def visit(self, node: Node) -> None:
        """Split those axes of a node's inputs and outputs alike that share a letter."""
        if node in self._open:
            self._open.remove(node)
            joins = self._joins.get(node)
            if joins is None:
                joins = self._joins[node] = _axis_groups(node, self._rules(node))
            for places in joins:
                self._unify(places)

    def _unify(self, places: Sequence[_AxisRef]) -> None:
        """Split all of some axes as the one of the largest tensor that is split already."""
        best: tuple[int, AxisSplit] | None = None
        for tensor, axis, rule, number in places:
            layout = self.layouts.get(tensor)
            if layout is None or not layout.dims[axis]:
                continue
            own: AxisSplit | None = layout.dims[axis]
            if rule is not None:
                own = rule.letter_split(layout.dims[axis], number, axis)
            size = self.partitioner.guess(tensor.size) * len(layout.dims[axis].axes)
            if own is not None and (best is None or size > best[0]):
                best = (size, own)
        if best is None:
            return
        for tensor, axis, rule, number in places:
            split = best[1] if rule is None else rule.split(best[1], number, axis)
            self._set_split(tensor, axis, split)

    def _set_split(self, tensor: Tensor, axis: int, split: AxisSplit) -> None:
        """Split an axis, if its layout is not given and the mesh axes are free."""
        if tensor in self.fixed or (split.outer != 1 and tensor.node.op.name == "placeholder"):
            return
        layout = self.layouts.get(tensor) or whole(tensor.ndim)
        rows = [s for d, s in enumerate(layout.dims) if d != axis and s.outer != 1]
        if tensor.node.op.name == "variable" and (split.over or (split.outer != 1 and rows)):
            return  # only one axis of a variable may be in rows
        have = layout.dims[axis]
        if tensor.node.op.name != "variable":
            split = have.combine_with(split, tensor.shape[axis]) or split
        if have == split or (have and len(have.axes) >= len(split.axes)):
            return
        others = {a for d, s in enumerate(layout.dims) if d != axis for a in s.axes}
        free = tuple(a for a in split.axes if a not in others)
        if have and free[: len(have.axes)] != have.axes:
            return
        if free != split.axes:
            split = split.keep_first(0) if split.over else replace(split, axes=free)
        wanted = split if free else WHOLE
        if not wanted or wanted == have:
            return
        symbols = len(self.partitioner.symbols)
        can = self.partitioner.can_split(tensor.shape[axis], wanted)
        if len(self.partitioner.symbols) > symbols:
            self._open.update(self._nodes)  # nominal sizes may have changed
        if can:
            self.layouts[tensor] = layout.with_dim(axis, wanted)
            self._reopen_neighbours(tensor)


def _axis_groups(node: Node, rules: Sequence[ShardingRule]) -> list[list[_AxisRef]]:
    """Return groups of axes of a node's inputs and outputs that are split together."""
    if node.op.name == "assign":
        variable, value = node.inputs
        tensors = (variable, value, node.outputs[0])
        joins: list[list[_AxisRef]] = [
            [(t, d, None, 0) for t in tensors] for d in range(variable.ndim)
        ]
    elif node.op.name == "variable" and is_slot(node):
        assert node.origin is not None
        (slot,), (owner,) = node.outputs, node.origin.outputs
        # a slot has the layout of its variable
        joins = [[(t, d, None, 0) for t in (owner, slot)] for d in range(slot.ndim)]
    else:
        joins = []
    for rule in rules:
        places: dict[str, list[_AxisRef]] = {}
        for number, (tensor, names) in enumerate(
            zip((*node.inputs, *node.outputs), (*rule.inputs, *rule.outputs), strict=True)
        ):
            for axis, letter in enumerate(names):
                if letter in rule.sizes:
                    places.setdefault(letter, []).append((tensor, axis, rule, number))
        joins += [
            each
            for letter, each in places.items()
            if not (letter.isupper() and rule.sharding.expand is None)
        ]
    return joins

"""Choosing how a node is cut, so that the fewest bytes travel: along which letters of its op's
equation the axes of a mesh go.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import field

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec, product
from graphflow.parallel.mesh.device_mesh import Cuts, Mesh, Split
from graphflow.parallel.mesh.layouts import Layout, Value
from graphflow.parallel.sharding.rules import Rule, rules_of

KEEP = "+"
"""A choice: partial sums are handed on."""
FLOPS_A_BYTE = 40.0
"""Floating point operations that are as dear as a byte which travels."""


@dataclass(eq=False)
class Choice:
    """How nodes that are alike are cut.

    Attributes:
        rule: of them; kept, so that no other one has its id.
        splits: how letters are cut.
        kept: by axis of the mesh, which inputs' partial sums are handed on, and how they are
            combined.
        targets: how their inputs are to lie, once the first of them was written.
        results: how their outputs lie then.
        patterns: what stands for the first of them at each place, of which others are copies.
    """

    rule: Rule
    splits: Mapping[str, Split]
    kept: Mapping[str, tuple[tuple[int, ...], str]]
    targets: Sequence[Layout] | None = None
    results: Sequence[Layout] | None = None
    patterns: dict[int, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Choosing:
    """Chooses by how inputs lie, and by how outputs would best lie.

    Args:
        values: what stands for each tensor so far.
        wishes: layouts that tensors would best have.
        readers: the nodes that read each tensor; None stands for a fetch.
        followed: the axis along which wishes decide where inputs have to travel, and not bytes.
    """

    mesh: Mesh
    cuts: Cuts
    values: Mapping[Tensor, Value]
    wishes: Mapping[Tensor, Layout]
    readers: Mapping[Tensor, Sequence[Node | None]]
    followed: str | None = None
    _known: dict[Hashable, Choice] = field(default_factory=dict)

    def rule(self, node: Node) -> Rule:
        """The rule of a node's op that has most of what is cut of its inputs, and then of what
        would best be of its outputs."""
        first, *others = rules_of(node, self.readers)
        have = [self.values[t].layout for t in node.inputs]
        want = [self.wishes.get(t) for t in node.outputs]

        def fits(rule: Rule, number: int, d: int, split: Split) -> bool:
            own = rule.letters_split(split, number, d) if split else None
            letter = (*rule.inputs, *rule.outputs)[number][d]
            if own is None or (rule.in_order(letter) and own.outer != 1):
                return False
            return self.cuts.can(rule.sizes.get(letter, 0), own)

        def count(rule: Rule, first: int, layouts: Sequence[Layout | None]) -> int:
            return sum(
                fits(rule, first + i, d, split)
                for i, layout in enumerate(layouts)
                for d, split in enumerate(layout.dims if layout else ())
            )

        def known(rule: Rule) -> tuple[int, int, bool]:
            anywhere = bool(rule.sharding.windows)  # finds what it sees, however inputs lie
            return count(rule, 0, have), count(rule, len(have), want), anywhere

        return max([first, *others], key=known) if others else first

    def choice(self, node: Node, rule: Rule) -> Choice:
        """How a node is cut. Nodes that are alike, and whose inputs lie alike, are cut alike."""
        if self.followed is not None:  # then it matters which inputs are weights
            return Choice(rule, *self._chosen(node, rule))
        key = (id(rule), *self._circumstances(node))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Choice(rule, *self._chosen(node, rule))
        return known

    def _circumstances(self, node: Node) -> Iterator[Hashable]:
        """All that the choice for a node depends on beside its rule."""
        for tensor in node.inputs:
            layout = self.values[tensor].layout
            yield layout
            if layout.partial:
                yield self.wishes.get(tensor)
                yield len(set(self.readers.get(tensor, ()))) > 1
        for tensor in node.outputs:
            yield self.wishes.get(tensor)
        yield len(self.cuts.symbols)  # what sizes are guessed to be depends on how they are cut

    def _chosen(
        self, node: Node, rule: Rule
    ) -> tuple[dict[str, Split], dict[str, tuple[tuple[int, ...], str]]]:
        axes: dict[str, list[str]] = {}
        kept: dict[str, tuple[tuple[int, ...], str]] = {}
        flops = self._flops(node)
        for m in self._order(node):
            best: tuple[tuple[bool, bool, float], str | None] | None = None
            for choice in self._choices(node, rule, m, axes):
                cost = self._cost(node, rule, m, choice, flops)
                if best is None or cost < best[0]:
                    best = (cost, choice)
            assert best is not None
            if best[1] == KEEP:
                kept[m] = (self._linear(node, rule, m), "sum")
            elif best[1] is not None:
                axes.setdefault(best[1], []).append(m)
        return {c: self._split(node, rule, c, tuple(a)) for c, a in axes.items()}, kept

    def _order(self, node: Node) -> list[str]:
        """The axes of the mesh; those along which one axis of a tensor is cut, as that has them."""
        order = list(self.mesh.names)
        layouts = [self.wishes[t] for t in node.outputs if t in self.wishes]
        for layout in (*layouts, *(self.values[t].layout for t in node.inputs)):
            for split in layout.dims:
                places = sorted(map(order.index, split.axes))
                for place, axis in zip(places, split.axes, strict=True):
                    order[place] = axis
        return order

    def _choices(
        self, node: Node, rule: Rule, m: str, axes: Mapping[str, list[str]]
    ) -> list[str | None]:
        """Letters that inputs, wishes for what is made of partial ones, or wishes for outputs have
        cut along an axis of the mesh; to hand on partial sums; None for neither."""
        found: list[str | None] = []
        if self._linear(node, rule, m):
            found.append(KEEP)
        inputs = [*zip(rule.inputs, node.inputs, strict=True)]
        layouts = [(n, self.values[t].layout) for n, t in inputs]
        wished = [(n, t) for n, t in inputs if m in dict(self.values[t].layout.partial)]
        wished += zip(rule.outputs, node.outputs, strict=True)
        layouts += [(n, self.wishes[t]) for n, t in wished if t in self.wishes]
        for names, layout in layouts:
            for letter, split in zip(names, layout.dims, strict=True):
                fresh = letter != "." and m in split.axes and letter not in found
                if fresh and self._can(node, rule, letter, (*axes.get(letter, ()), m)):
                    found.append(letter)
        return [*found, None]

    def _can(self, node: Node, rule: Rule, letter: str, axes: tuple[str, ...]) -> bool:
        size = rule.sizes.get(letter)
        if size is None:
            return False
        if not self.cuts.can(size, self._split(node, rule, letter, axes)):
            return False
        if letter.isupper():
            return rule.sharding.expand is not None
        if rule.in_order(letter):
            return isinstance(size, int) and (len(axes) == 1 or rule.windows(letter))
        return True

    def _linear(self, node: Node, rule: Rule, m: str) -> tuple[int, ...]:
        """The inputs that are partial along an axis of the mesh, if these may be handed on: the op
        is linear in them, and no more bytes are summed later than would be now."""
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
        return self.cuts.guess(product(spec.shape)) * spec.dtype.itemsize

    def _flops(self, node: Node) -> float:
        if node.op.cost is None:
            return float(self.cuts.guess(node.specs[0].size))
        return float(
            self.cuts.guess(node.op.cost(*[t.spec for t in node.inputs], **node.attrs).flops)
        )

    def _cost(
        self, node: Node, rule: Rule, m: str, choice: str | None, flops: float
    ) -> tuple[bool, bool, float]:
        """Whether more than halos of inputs has to travel for a choice along an axis of the mesh;
        whether that is not what is wished for, if wishes are followed; and bytes that travel, with
        those of the outputs and what is computed twice.

        What is cut already is computed with as it is, if that is possible: who cuts the weights of
        two layers wants the sum of the second to travel, and not the weights, small as they may be.
        """
        travels = False
        total = 0.0
        for tensor, names in zip(node.inputs, rule.inputs, strict=True):
            moves, cost = self._brought(tensor, names, rule, m, choice)
            numbers = m == self.followed and tensor.dtype.kind in "iu"  # they choose, and are few
            travels |= moves and not numbers
            total += cost
        for tensor, names in zip(node.outputs, rule.outputs, strict=True):
            total += self._sent(tensor, names, m, choice)
        if choice is None or choice == KEEP:
            total += (self.mesh.sizes[m] - 1) * flops / FLOPS_A_BYTE
        elif choice.isupper():
            total += 16.0
        total *= 1e-3 if m in self.mesh.local else 1.0
        if not travels and self._scatters(node, rule, m, choice):
            return True, False, total
        return travels, self._astray(node, rule, m, choice), total

    def _scatters(self, node: Node, rule: Rule, m: str, choice: str | None) -> bool:
        """Whether what no weight asks for makes partial sums, of whose sum each place has a piece
        then: of a large table's gradient, say. That travels, too, and takes the memory of all."""
        if m != self.followed or choice is None or choice == KEEP:
            return False
        if any(
            _is_weight(t) and _cut_at(self.values[t].layout, m) is not None for t in node.inputs
        ):
            return False
        return any(
            choice not in names and wish is not None and _cut_at(wish, m) is not None
            for names, wish in zip(rule.outputs, map(self.wishes.get, node.outputs), strict=True)
        )

    def _astray(self, node: Node, rule: Rule, m: str, choice: str | None) -> bool:
        """Whether a choice is not what an output is wished for."""
        if m != self.followed:
            return False
        for tensor, names in zip(node.outputs, rule.outputs, strict=True):
            wish = self.wishes.get(tensor)
            at = _cut_at(wish, m) if wish else None
            if at is not None and names[at] != choice:
                return True
        return False

    def _brought(
        self, tensor: Tensor, names: str, rule: Rule, m: str, choice: str | None
    ) -> tuple[bool, float]:
        """Of an input: whether more than its halos has to travel, and bytes that do."""
        layout, n = self.values[tensor].layout, self.mesh.sizes[m]
        size = self._bytes(tensor.spec) * (n - 1)
        at = _cut_at(layout, m)
        wanted = choice is not None and choice in names
        if at is not None:
            if not wanted or names[at] != choice:
                return True, size / n if wanted else size
            return False, size / n / 100 if rule.windows(choice or "") else 0.0
        if choice != KEEP and any(a == m for a, _ in layout.partial):
            return True, size if wanted else 2 * size
        return False, 0.0

    def _sent(self, tensor: Tensor, names: str, m: str, choice: str | None) -> float:
        """Bytes of an output that travel to those who wish it otherwise."""
        if choice is None:
            return 0.0
        n, wish = self.mesh.sizes[m], self.wishes.get(tensor)
        size = self._bytes(tensor.spec) * (n - 1)
        at = _cut_at(wish, m) if wish else None
        if choice == KEEP or choice not in names:
            return size if at is not None else 2 * size
        if at is None:
            return size
        return size / n if names[at] != choice else 0.0

    def _split(self, node: Node, rule: Rule, letter: str, axes: tuple[str, ...]) -> Split:
        """How a letter is cut: in the pieces of inputs that are cut along the same axes."""
        every = [
            (i, n, self.values[t].layout)
            for i, (n, t) in enumerate(zip(rule.inputs, node.inputs, strict=True))
        ]
        every += [
            (len(node.inputs) + o, n, self.wishes[t])
            for o, (n, t) in enumerate(zip(rule.outputs, node.outputs, strict=True))
            if t in self.wishes
        ]
        sharding = rule.sharding
        placed = sharding.build is not None and not sharding.placeless
        stretches = placed or rule.in_order(letter)
        for number, names, layout in every:
            for d, split in enumerate(layout.dims):
                if names[d] != letter or split.axes[: len(axes)] != axes:
                    continue
                own = rule.letters_split(split, number, d)
                own = own and own.first(len(axes))
                if own is None or own == Split(axes) or (stretches and own.outer != 1):
                    continue
                if self.cuts.can(rule.sizes[letter], own):
                    return own
        return Split(axes)


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a variable, in whatever shape or precision."""
    node = tensor.node
    while node.op.name in ("astype", "reshape", "permute_dims"):
        node = node.inputs[0].node
    return node.op.name == "variable"


def _cut_at(layout: Layout, m: str) -> int | None:
    """The axis that is cut along an axis of the mesh."""
    return next((d for d, split in enumerate(layout.dims) if m in split.axes), None)

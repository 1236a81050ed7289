"""Bring a node's inputs into the layouts that its rule asks for: conversions and halos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graphflow.ir.op import (
    FUNCTIONS,
    Node,
    Tensor,
)
from graphflow.parallel.mesh.axis_split import WHOLE, AxisSplit
from graphflow.parallel.mesh.layouts import Layout, ShardedTensor
from graphflow.parallel.resharding.communication_log import user_name
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.sharding.rules.node_rule import ShardingRule
from graphflow.parallel.sharding.rules.rule_selection import SplitChoice

_SLICING_OPS = ("slice",)
"""Ops whose output is a part of their input, unchanged."""
Ranges = dict[str, tuple[Any, Any]]
"""For each letter with windows, the range of the first input that a place has."""


class LocalInputs(NamedTuple):
    """The inputs of a node in the layouts that its rule asks for.

    Attributes:
        shards: for each input, its shards by place.
        ranges: for each place, what it has along letters with windows.
    """

    shards: list[tuple[Tensor, ...]]
    ranges: list[Ranges]


class InputConverter:
    """Converts the inputs of nodes, and remembers what was converted.

    Args:
        resharder: converts layouts and fetches halos.
        values: the sharded tensor of each tensor so far.
    """

    def __init__(self, resharder: Resharder, values: Mapping[Tensor, ShardedTensor]) -> None:
        self._resharder = resharder
        self._values = values
        self._widened: dict[tuple[Tensor, Layout], ShardedTensor] = {}

    def convert_inputs(self, node: Node, choice: SplitChoice) -> LocalInputs:
        """Convert a node's inputs to the layouts of its choice; fetch halos along letters with
        windows."""
        ranges: list[Ranges] = [{} for _ in self._resharder.mesh.places]
        if choice.input_layouts is None:
            choice.input_layouts = [self._input_layout(choice, i) for i in range(len(node.inputs))]
        if choice.rule.sharding.windows:
            return LocalInputs(self._convert_windowed(node, choice, ranges), ranges)
        parts: list[tuple[Tensor, ...]] = []
        for tensor, target in zip(node.inputs, choice.input_layouts, strict=True):
            value = self._values[tensor]
            if value.layout != target or self._widened:
                value = self.convert_input(tensor, target, node)
            parts.append(value.shards)
        return LocalInputs(parts, ranges)

    def convert_input(self, tensor: Tensor, target: Layout, node: Node) -> ShardedTensor:
        """Return a tensor in another layout.

        If the tensor is the conversion of a narrower dtype (real to complex), the narrower tensor
        travels and each place converts it again.
        """
        value = self._values[tensor]
        source = tensor.node.inputs[0] if tensor.node.op.name == "astype" else tensor
        before = self._values.get(source, value)
        pairs = zip(value.layout.dims, target.dims, strict=True)
        leaving = {a for have, want in pairs for a in have.axes if a not in want.axes}
        moved = self._widened.get((tensor, target))
        narrower = source.dtype.itemsize < tensor.dtype.itemsize and before.layout == value.layout
        if (
            moved is None
            and narrower
            and leaving - self._resharder.mesh.sequential
            and not value.layout.partial
        ):
            there = self._resharder.convert(before, target, node, user_name(source.node))
            moved = self._widened[tensor, target] = self._resharder.map_shards(
                there, tensor.spec, node, lambda part: FUNCTIONS["astype"](part, tensor.dtype)
            )
        return moved or self._resharder.convert(value, target, node, user_name(tensor.node))

    def _input_layout(self, choice: SplitChoice, i: int) -> Layout:
        """Return the layout that a choice asks for of input number `i`."""
        dims = tuple(
            choice.rule.split(choice.splits.get(letter, WHOLE), i, axis)
            for axis, letter in enumerate(choice.rule.inputs[i])
        )
        partial = tuple(
            (m, kind) for m, (members, kind) in choice.kept_partials.items() if i in members
        )
        return Layout(dims, partial)

    def _convert_windowed(
        self, node: Node, choice: SplitChoice, ranges: list[Ranges]
    ) -> list[tuple[Tensor, ...]]:
        """Convert inputs of which some are read in windows. Fill in `ranges`."""
        rule, splits = choice.rule, choice.splits
        assert choice.input_layouts is not None
        parts: list[tuple[Tensor, ...]] = []
        for i, (tensor, target) in enumerate(zip(node.inputs, choice.input_layouts, strict=True)):
            dims = list(target.dims)
            value = self._values[tensor]
            windows = self._window_axes(node, rule, i, splits)
            _keep_window_splits(dims, windows, value.layout, splits)
            value = self.convert_input(tensor, Layout(tuple(dims), target.partial), node)
            for d, letter in windows:
                split = splits.get(letter, WHOLE)
                value = self._fetch_window(node, rule, split, letter, d, i, value, ranges)
            parts.append(value.shards)
        return parts

    def _window_axes(
        self, node: Node, rule: ShardingRule, i: int, splits: Mapping[str, AxisSplit]
    ) -> list[tuple[int, str]]:
        """Return (axis, letter) of an input's axes that windows go along and that places have a
        part of."""
        tensor, sharding = node.inputs[i], rule.sharding
        if i not in sharding.windowed:
            return []
        have, in_parts = self._values[tensor].layout.dims, node.op.name in _SLICING_OPS
        return [
            (d, letter)
            for d, letter in enumerate(rule.inputs[i])
            if rule.has_window(letter)
            if letter in splits
            or (in_parts and self._needs_part(rule, letter, tensor.shape[d], have[d]))
        ]

    def _needs_part(self, rule: ShardingRule, letter: str, size: Any, split: AxisSplit) -> bool:
        """Return True if a whole result reads only a part of a split axis. Then that part travels,
        and not the whole axis."""
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
        ranges: list[Ranges],
    ) -> ShardedTensor:
        """Return the input with, at each place, the range along axis `d` that its outputs read."""
        assert rule.sharding.needs is not None
        wanted = []
        for place, own in zip(self._resharder.mesh.places, ranges, strict=True):
            piece = self._resharder.partitioner.piece(rule.sizes.get(letter, 1), split, place)
            own[letter] = rule.sharding.needs(letter, piece.start, piece.stop)
            each = own[letter]
            wanted.append(each[number] if isinstance(each, list) else each)
        parts = self._resharder.fetch_windows(
            value, d, wanted, node, user_name(node.inputs[number].node)
        )
        return ShardedTensor(value.spec, value.layout.with_dim(d, WHOLE), parts)


def _keep_window_splits(
    dims: list[AxisSplit],
    windows: Sequence[tuple[int, str]],
    have: Layout,
    splits: Mapping[str, AxisSplit],
) -> None:
    """Leave axes with windows in the layout that they have, so that only halos travel. In place.

    An axis is made whole if neighbours along its mesh axis would differ in another window too, or
    if its mesh axis is already used.
    """
    for d, _ in windows:
        # A mesh axis that splits another window is taken: its neighbours differ in that window.
        taken = {a for e, letter in windows if e != d for a in splits.get(letter, WHOLE).axes}
        split = have.dims[d]
        stays = bool(split) and split.outer == 1 and not taken & set(split.axes)
        dims[d] = split if stays else WHOLE
        used = {a for e, s in enumerate(dims) if e != d for a in s.axes}
        if used & set(dims[d].axes):
            dims[d] = WHOLE


__all__ = ["InputConverter", "LocalInputs", "Ranges"]

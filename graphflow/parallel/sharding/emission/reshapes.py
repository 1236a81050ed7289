"""Reshapes that merge several split axes into one, or divide one into several, without
communication.

    (B, S, d), B and S split → (B·S, d): a shard has some rows of S, and its piece of each
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.ir.op import Node
from graphflow.parallel.mesh.axis_split import WHOLE
from graphflow.parallel.mesh.layouts import Layout
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.sharding.rules.node_rule import ShardingRule


def reshape_layout(
    node: Node, rules: Sequence[ShardingRule], have: Layout, partitioner: SizePartitioner
) -> Layout | None:
    """Return the layout of a reshape's result if no element moves; None if one rule alone describes
    it, or if elements would have to move.

    Args:
        node: a node; only reshapes have a result.
        rules: its rules, one for each of the merged axes.
        have: the layout of its input.
        partitioner: the extents of shards.
    """
    if node.op.name != "reshape" or len(rules) == 1 or len(have.axes()) < 2 or have.partial:
        return None
    shape = node.specs[0].shape
    found = [WHOLE] * len(shape)
    for rule in rules:
        (names,), (letters,) = rule.inputs, rule.outputs
        for d, (letter, split) in enumerate(zip(names, have.dims, strict=True)):
            own = rule.letter_split(split, 0, d) if split and letter in letters else None
            if own is None or letter == ".":
                continue
            e = letters.index(letter)
            own = rule.split(own, 1, e)
            own = found[e].combine_with(own, shape[e]) or own
            if len(own.axes) > len(found[e].axes) and partitioner.can_split(shape[e], own):
                found[e] = own
    if not any(split.over for split in (*have.dims, *found)):
        return None
    used = [axis for split in found for axis in split.axes]
    return Layout(tuple(found)) if sorted(used) == sorted(have.axes()) else None


__all__ = ["reshape_layout"]

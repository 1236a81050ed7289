"""Optimisations of a graph before it is placed: one pass a file, Graph -> Graph, valid in, valid
out.

Passes look at no pins beyond keeping them, so that whatever may change bits is the same for every
placement.
Dead code needs no pass: a Graph is the closure of its outputs.
"""

from __future__ import annotations

from graphflow.base.gc_pause import without_collection
from graphflow.ir.graph import Graph
from graphflow.passes.accumulate import AccumulateProducts
from graphflow.passes.base import Pass
from graphflow.passes.bodies import InlineCalls, MergeBodies, map_bodies
from graphflow.passes.constants import FoldConstants
from graphflow.passes.duplicates import MergeDuplicates
from graphflow.passes.gram import UseSyrk
from graphflow.passes.heads import FoldHeads
from graphflow.passes.pads import JoinPads
from graphflow.passes.transposes import FoldTransposes

DEFAULT: tuple[Pass, ...] = (
    MergeBodies(), FoldConstants(), FoldHeads(), FoldTransposes(), JoinPads(), MergeDuplicates(),
    InlineCalls(), UseSyrk(), AccumulateProducts(),
)  # fmt: skip


@without_collection
def optimize(graph: Graph, passes: tuple[Pass, ...] = DEFAULT) -> Graph:
    """Run passes in order, checking the graph after each; then the same in bodies."""
    for each in passes:
        graph = each(graph).verify()
    return map_bodies(graph, lambda inner: optimize(inner, passes)).verify()


__all__ = [
    "DEFAULT", "AccumulateProducts", "FoldConstants", "FoldHeads", "FoldTransposes",
    "UseSyrk", "InlineCalls", "JoinPads", "MergeBodies", "MergeDuplicates", "Pass",
    "optimize",
]  # fmt: skip

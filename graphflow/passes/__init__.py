"""Optimisation passes over a graph before it is placed: Graph -> Graph, valid in, valid out.

How to add a pass: write one file in this folder that ends in `register_pass(Class())`. Its class
names the phase in which it runs (`base.py` lists the phases in order).

Passes keep device pins but never branch on them before `Phase.CALLS`, so results do not depend on
placement. Dead code needs no pass: a Graph is the closure of its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.base.process.gc_pause import without_collection
from graphflow.ir.graph import Graph
from graphflow.passes.accumulate import AccumulateProducts
from graphflow.passes.base import Pass, Phase, default_passes, register_pass
from graphflow.passes.bodies import InlineCalls, MergeBodies, map_bodies
from graphflow.passes.constants import FoldConstants
from graphflow.passes.duplicates import MergeDuplicates
from graphflow.passes.gram import UseSyrk
from graphflow.passes.pads import JoinPads
from graphflow.passes.transposes import FoldTransposes


@without_collection
def optimize(graph: Graph, passes: Sequence[Pass] | None = None) -> Graph:
    """Run passes in order, checking the graph after each; then the same in bodies.

    Args:
        passes: default: all that this folder holds, in the order of their phases.
    """
    chosen = default_passes() if passes is None else passes
    for each in chosen:
        graph = each(graph).verify()
    return map_bodies(graph, lambda inner: optimize(inner, chosen)).verify()


__all__ = [
    "AccumulateProducts", "FoldConstants", "FoldTransposes",
    "InlineCalls", "JoinPads", "MergeBodies", "MergeDuplicates", "Pass", "Phase", "UseSyrk",
    "default_passes", "optimize", "register_pass",
]  # fmt: skip

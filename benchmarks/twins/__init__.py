"""Training steps drawn from a seed, each of which graphflow and torch build from one description.

    (seed, index) ─draw→ Twin ─GraphflowStep, TorchStep→ steps with the same weights and feeds

`draw(seed, index)` gives a `Twin`; its string describes it.
"""

from benchmarks.twins.description import OPTIMIZERS, Part, Twin
from benchmarks.twins.families import FAMILIES, draw
from benchmarks.twins.graphflow_step import GraphflowStep

__all__ = ["FAMILIES", "OPTIMIZERS", "GraphflowStep", "Part", "Twin", "draw"]

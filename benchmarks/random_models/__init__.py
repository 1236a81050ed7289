"""Models drawn from a seed, for measuring predictions and placements on models nobody tuned for.

`draw(seed, index)` gives a `RandomModel`; its string describes it, and `build()` makes its step.
"""

from benchmarks.random_models.models import FAMILIES, INFERENCE, OPTIMIZERS, RandomModel, Step, draw

__all__ = ["FAMILIES", "INFERENCE", "OPTIMIZERS", "RandomModel", "Step", "draw"]

"""Linear models: the penalties that their weights may have."""

from graphflow.linear.penalties import L1, L1L2, L2, Bounds, GroupL1, Penalty

__all__ = ["L1", "L1L2", "L2", "Bounds", "GroupL1", "Penalty"]

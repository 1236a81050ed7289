"""Parallelism: what several devices do with one model."""

from graphflow.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]

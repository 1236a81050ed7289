"""Parallelism: what several devices do with one model."""

from graphflow.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from graphflow.parallel.report import Report
from graphflow.parallel.strategies import Shard

__all__ = [
    "Report",
    "Shard",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
]

"""Parallelism: what several devices do with one model."""

from graphflow.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from graphflow.parallel.data import Data
from graphflow.parallel.found import Search
from graphflow.parallel.gpt import GPT
from graphflow.parallel.pipelines import Pipeline
from graphflow.parallel.report import Report
from graphflow.parallel.schedule import Schedule, Task, draw, run
from graphflow.parallel.schedules import (
    chimera,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    zb_h1,
    zb_h2,
    zb_v,
)
from graphflow.parallel.search import auto
from graphflow.parallel.strategies import Shard
from graphflow.parallel.versions import staleness
from graphflow.parallel.whatif import what_if

__all__ = [
    "GPT",
    "Data",
    "Pipeline",
    "Report",
    "Schedule",
    "Search",
    "Shard",
    "Task",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "auto",
    "broadcast",
    "chimera",
    "draw",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "pipedream",
    "reduce_scatter",
    "run",
    "staleness",
    "what_if",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

"""Parallelism: what several devices do with one model."""

from graphflow.parallel.async_model import AsyncModel
from graphflow.parallel.block_proximal import BlockProgress, BlockProximal
from graphflow.parallel.block_scheduled import BlockScheduled
from graphflow.parallel.compression.check import FilterCheck, check_filter
from graphflow.parallel.compression.filter import Filter
from graphflow.parallel.compression.filters.chain import Chain
from graphflow.parallel.compression.filters.fixed_point import FixedPoint
from graphflow.parallel.compression.filters.key_cache import KeyCache
from graphflow.parallel.compression.filters.kkt import Kkt
from graphflow.parallel.compression.filters.lossless import Lossless
from graphflow.parallel.compression.filters.power_sgd import PowerSGD
from graphflow.parallel.compression.filters.random_skip import RandomSkip
from graphflow.parallel.compression.filters.significant import Significant
from graphflow.parallel.compression.filters.top_k import TopK
from graphflow.parallel.data import Data
from graphflow.parallel.estimation.gpt import GPT
from graphflow.parallel.estimation.whatif import what_if
from graphflow.parallel.local_training.gossip import Gossip
from graphflow.parallel.local_training.local_sgd import LocalSGD
from graphflow.parallel.parameter_server import ParameterServer
from graphflow.parallel.pipeline_strategy import Pipeline
from graphflow.parallel.pipelining.schedule import Schedule, Task
from graphflow.parallel.pipelining.staleness import staleness
from graphflow.parallel.pipelining.standard_schedules import (
    chimera,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    zb_h1,
    zb_h2,
    zb_v,
)
from graphflow.parallel.pipelining.timeline import draw, run
from graphflow.parallel.report import StrategyReport as Report
from graphflow.parallel.resharding.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from graphflow.parallel.search import auto
from graphflow.parallel.searching.search_result import Search
from graphflow.parallel.shard_strategy import Shard
from graphflow.placement.simulation.jitter import Jitter

__all__ = [
    "GPT",
    "AsyncModel",
    "BlockProgress",
    "BlockProximal",
    "BlockScheduled",
    "Chain",
    "Data",
    "Filter",
    "FilterCheck",
    "FixedPoint",
    "Gossip",
    "Jitter",
    "KeyCache",
    "Kkt",
    "LocalSGD",
    "Lossless",
    "ParameterServer",
    "Pipeline",
    "PowerSGD",
    "RandomSkip",
    "Report",
    "Schedule",
    "Search",
    "Shard",
    "Significant",
    "Task",
    "TopK",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "auto",
    "broadcast",
    "check_filter",
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

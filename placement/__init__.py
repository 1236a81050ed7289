"""Where every node runs, decided from costs: clusters, problems, the simulator and the placers.

    timeline = simulate(problem, place(problem, placer="greedy"))

Everything here is arrays and plain data; no socket is opened and no heavy library is loaded.
"""

from __future__ import annotations

from graphflow.placement.cluster import Cluster
from graphflow.placement.comparison import Comparison, compare
from graphflow.placement.devices import Device, Link, Worker
from graphflow.placement.difference import Difference
from graphflow.placement.placers import Placer, get_placer, place, placer_names, register_placer
from graphflow.placement.ports import Port
from graphflow.placement.problem import Assignment, Problem
from graphflow.placement.products import PRODUCTS, WIRES, Product, Wire
from graphflow.placement.report import Report
from graphflow.placement.simulate import Timeline, simulate
from graphflow.placement.stage_pipedream import Level, PipePlan, pipedream_plan
from graphflow.placement.stages import Split, split_stages
from graphflow.placement.sweep import Sweep, sweep

__all__ = [
    "PRODUCTS",
    "WIRES",
    "Assignment",
    "Cluster",
    "Comparison",
    "Device",
    "Difference",
    "Level",
    "Link",
    "PipePlan",
    "Placer",
    "Port",
    "Problem",
    "Product",
    "Report",
    "Split",
    "Sweep",
    "Timeline",
    "Wire",
    "Worker",
    "compare",
    "get_placer",
    "pipedream_plan",
    "place",
    "placer_names",
    "register_placer",
    "simulate",
    "split_stages",
    "sweep",
]

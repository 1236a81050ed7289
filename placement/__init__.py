"""Placement: decides from costs where every node runs: clusters, problems, the simulator and the
placers.

    timeline = simulate(problem, place(problem, placer="greedy"))

Everything here is arrays and plain data; no socket is opened and no heavy library is loaded.
"""

from __future__ import annotations

from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import Device, Link, Worker
from graphflow.placement.clusters.hardware_catalog import PRODUCTS, WIRES, Product, Wire
from graphflow.placement.clusters.shared_ports import Port
from graphflow.placement.placers import Placer, get_placer, place, placer_names, register_placer
from graphflow.placement.plans.reports.comparison import Comparison, compare
from graphflow.placement.plans.reports.plan_diff import Difference
from graphflow.placement.plans.reports.report import Report
from graphflow.placement.plans.reports.sweep import Sweep, sweep
from graphflow.placement.problems.problem import Assignment, Problem
from graphflow.placement.simulation.simulator import Timeline, simulate
from graphflow.placement.stages.pipedream import Level, PipePlan, pipedream_plan
from graphflow.placement.stages.splitting import Split, split_stages

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

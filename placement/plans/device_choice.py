"""The choice between a CPU and GPUs in words: which devices compute, why, and what their numbers
promise."""

from __future__ import annotations

from graphflow.base.formatting import show_seconds
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.plans.plan_data import PlanData

BITS = (
    "the same bits in each run and on each device of a kind; sums and products of a GPU may differ "
    "from a CPU's in their last bits"
)
"""The promise about numbers where a CPU or a GPU may compute them."""


def describe_choice(plan: PlanData) -> str:
    """Say which devices compute, and what the step would take on each alone.

    The text is "" if the cluster has devices of one kind only.

    "/worker:0/gpu:0, 310 µs predicted (alone: /worker:0/cpu:0 2.8 ms, /worker:0/gpu:0 310 µs)"
    """
    devices = plan.cluster.devices
    if len({plan.cluster.device(name).kind for name in devices}) < 2:
        return ""
    busy = {node.device for node in plan.nodes if node.finish > node.start} - {CLIENT}
    used = [name for name in devices if name in busy] or [devices[0]]
    alone = ", ".join(f"{name} {_show_alone(plan, name)}" for name in devices)
    return f"{' and '.join(used)}, {show_seconds(plan.makespan)} predicted (alone: {alone})"


def _show_alone(plan: PlanData, device: str) -> str:
    seconds = plan.baselines.get(f"one device: {device}")
    return "does not fit in memory" if seconds is None else show_seconds(seconds)

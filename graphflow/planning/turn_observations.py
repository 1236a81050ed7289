"""Learn the seconds of turns and updates from traced windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.ir.graph import bind_attrs
from graphflow.ops.control_flow.concurrent import parties_of
from graphflow.placement.calibration.cluster_rates import device_classes, rates
from graphflow.placement.calibration.trace_corrections import RECENT, TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.party_nodes import party_devices
from graphflow.placement.cost_model.window_costs import party_works, turn_bucket
from graphflow.runtime.tracing.events import TraceStep
from graphflow.runtime.tracing.turn_events import turn_name


def observe_turns(
    learned: TraceCorrections,
    cluster: Cluster,
    profiles: Mapping[int, Mapping[str, Any]] | None,
    compiled: CompiledFetches,
    bindings: Mapping[str, int],
    steps: Sequence[TraceStep],
) -> None:
    """Learn the seconds of the parties of each window that the steps ran.

    A worker's turns are observed one by one, `RECENT` of a step at most, evenly over the window. Of
    a server, the mean over the pushes of a step counts in the place of each.

    Args:
        bindings: the sizes of symbols in these steps.
    """
    took = _turn_seconds(steps)
    speeds = rates(cluster, profiles, True)
    classes = device_classes(cluster)
    for node in compiled.graph.of_op("concurrent"):
        rules, home = node.attrs.get("rules"), compiled.devices.get(node)
        if rules is None or home is None:
            continue
        devices = party_devices(node, cluster, home)
        works = party_works(node, bindings, [speeds[name] for name in devices])
        parties = parties_of(bind_attrs(node.attrs, bindings))
        for i, (body, device, work) in enumerate(zip(parties, devices, works, strict=True)):
            if work.turn <= 0:
                continue
            bucket = turn_bucket(body, classes[device], True, work.turn)
            speed = cluster.device(device).speed
            for each in took.get((compiled.graph.names[node], i), ()):
                picked = np.linspace(0, len(each) - 1, min(RECENT, len(each))).astype(int)
                seconds = [each[k] for k in picked]
                if i in rules.servers:
                    seconds = [sum(each) / sum(rules.turns)] * len(picked)
                for one in seconds:
                    learned.observe(bucket, one * speed, work.turn)


def _turn_seconds(steps: Sequence[TraceStep]) -> dict[tuple[str, int], list[list[float]]]:
    """Return the seconds of turns by window and party, a list for each step."""
    found: dict[tuple[str, int], list[list[float]]] = {}
    for step in steps:
        here: dict[tuple[str, int], list[float]] = {}
        for event in step.events:
            turn = turn_name(event.name)
            if turn is not None and event.kind == "compute":
                seconds = (event.end - event.start) * 1e-9
                here.setdefault((turn.window, turn.party), []).append(seconds)
        for key, each in here.items():
            found.setdefault(key, []).append(each)
    return found

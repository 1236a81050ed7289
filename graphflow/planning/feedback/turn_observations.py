"""Learn the seconds of turns, updates and messages from traced windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.ir.graph import bind_attrs
from graphflow.ops.control_flow.concurrent import parties_of
from graphflow.placement.calibration.cluster_rates import device_classes, rates
from graphflow.placement.calibration.trace_corrections import RECENT, TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.party_nodes import party_devices
from graphflow.placement.cost_model.window_costs import party_works, turn_bucket, window_link
from graphflow.runtime.tracing.events import TraceEvent, TraceStep
from graphflow.runtime.tracing.turn_events import is_exchange, turn_name

MERGE_NANOSECONDS = 2_000
"""Time between the two waits of a merge, at most: for any tensor, and for the chosen one."""


def observe_turns(
    learned: TraceCorrections,
    cluster: Cluster,
    profiles: Mapping[int, Mapping[str, Any]] | None,
    compiled: CompiledFetches,
    bindings: Mapping[str, int],
    steps: Sequence[TraceStep],
) -> None:
    """Learn the seconds of the parties of each window that the steps ran.

    Of a worker's turns in a step, `RECENT` are observed, evenly over the window, if need be one of
    them several times. So the latest window counts alone: a worker that is slow now may have been
    quick before. Of a server, the mean over the pushes of a step counts in the place of each.

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
            bucket = turn_bucket(body, i, classes[device], True, work.turn)
            speed = cluster.device(device).speed
            for each in took.get((compiled.graph.names[node], i), ()):
                picked = np.linspace(0, len(each) - 1, RECENT).astype(int)
                seconds = [each[k] for k in picked]
                if i in rules.servers:
                    seconds = [sum(each) / sum(rules.turns)] * len(picked)
                for one in seconds:
                    learned.observe(bucket, one * speed, work.turn)


def observe_messages(
    learned: TraceCorrections, links: Mapping[tuple[str, str], str], steps: Sequence[TraceStep]
) -> None:
    """Learn the seconds of messages in windows, from the begin of a send to the end of the wait.

    A message teaches nothing if its receiver did not wait for it.

    Args:
        links: kind of link by source and target.
    """
    for step in steps:
        sends: dict[int, list[TraceEvent]] = {}
        waits: dict[int, list[TraceEvent]] = {}
        for event in step.events:
            if event.edge is None or event.kind not in ("send", "wait"):
                continue
            of = sends if event.kind == "send" else waits
            mine = of.setdefault(event.edge, [])
            if event.kind == "wait" and mine and event.start - mine[-1].end < MERGE_NANOSECONDS:
                mine[-1] = replace(mine[-1], end=event.end)  # a merge waits, then receives
            else:
                mine.append(event)
        for edge, sent in sends.items():
            kind = links.get((sent[0].source, sent[0].target))
            if kind is None or not is_exchange(sent[0].name):
                continue
            pairs = list(zip(sent, waits.get(edge, ()), strict=False))
            picked = np.linspace(0, len(pairs) - 1, min(RECENT, len(pairs))).astype(int)
            for send, wait in [pairs[k] for k in picked]:
                if wait.start < send.start:
                    seconds = (wait.end - send.start) * 1e-9
                    learned.observe_link(window_link(kind), send.bytes, seconds)


def _turn_seconds(steps: Sequence[TraceStep]) -> dict[tuple[str, int], list[list[float]]]:
    """Return the seconds of turns by window and party, a list for each step."""
    found: dict[tuple[str, int], list[list[float]]] = {}
    for step in steps:
        here: dict[tuple[str, int], dict[int, float]] = {}
        for event in step.events:
            turn = turn_name(event.name)
            if turn is not None and event.kind == "compute":
                mine = here.setdefault((turn.window, turn.party), {})
                seconds = (event.end - event.start) * 1e-9
                mine[turn.number] = mine.get(turn.number, 0.0) + seconds
        for key, parts in here.items():
            found.setdefault(key, []).append(list(parts.values()))
    return found

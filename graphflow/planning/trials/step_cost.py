"""Measure what a step costs beyond its nodes: the client's link, and the overhead of a step.

    probe step ─seconds_beyond_nodes→ link of the client, `StepCost` ─→ plan_graph(steps=…)

The steps' own nodes are traced, and their time is left out. An overhead is measured around a node
that replaces what the processor's caches hold, because a real step does so, too: the code that
sends and receives messages then runs about twice as long as in a loop of empty steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.frontend.builders import placeholder
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, Node, Tensor
from graphflow.placement.calibration import calibrate
from graphflow.placement.calibration.calibrate import (
    LinkSpeed,
    StepCost,
    fit_link,
    save_links,
    save_step_cost,
    step_cost_of,
)
from graphflow.placement.calibration.cluster_rates import link_matrices
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.plans.building.step_totals import session_kind
from graphflow.runtime.client.cluster_survey import ClusterSurvey
from graphflow.runtime.partitioning.partition import UNPLACED_OPS

ECHO_SIZES = (1 << 8, 1 << 17, 1 << 20)
"""Bytes that the client sends and gets back to measure its link."""
_CACHE_FILL = 1 << 19
"""Elements that a probe step writes and reads: 2 MiB, more than most second-level caches hold."""

Timer = Callable[[CompiledFetches, Node, tuple[int, ...]], float]
"""(fetches, their placeholder, shape of its feed) -> seconds of a step beyond its nodes."""


def probe_fetches(
    devices: Sequence[str], shape: tuple[int, ...] = (), fills_cache: bool = True
) -> tuple[CompiledFetches, Node]:
    """Return placed fetches that do next to nothing on each device, and their placeholder.

    Args:
        shape: of the placeholder, which each device returns, increased by 1.
        fills_cache: each device also writes and reads what replaces the content of its caches.
    """
    x = placeholder("float32", shape)
    results: list[Tensor] = []
    where: dict[Node, str] = {}
    for device in devices:
        result = FUNCTIONS["add"](x, 1.0)
        if fills_cache:
            many = FUNCTIONS["cumsum"](FUNCTIONS["broadcast_to"](x, (_CACHE_FILL,)))
            result = FUNCTIONS["add"](result, FUNCTIONS["sum"](many))
        results.append(result)
        where |= {node: device for node in Graph([result]).nodes if node is not x.node}
    graph = Graph(results)
    compiled = CompiledFetches(graph.outputs, graph, graph)
    compiled.devices = {n: d for n, d in where.items() if n.op.name not in UNPLACED_OPS}
    return compiled, x.node


def client_link(timed: Timer, device: str) -> LinkSpeed:
    """Return latency and bandwidth between the client and a device, from echoed messages."""
    seconds = []
    for size in ECHO_SIZES:
        shape = (size // 4,)
        seconds.append(timed(*probe_fetches([device], shape, False), shape) / 2)
    return fit_link(ECHO_SIZES, seconds)


def feed_fetches(device: str, nbytes: int) -> tuple[CompiledFetches, Node]:
    """Return fetches that read one of the bytes fed to a device, and their placeholder."""
    x = placeholder("uint8", (nbytes,))
    graph = Graph([x[:1] + 1])
    compiled = CompiledFetches(graph.outputs, graph, graph)
    compiled.devices = {node: device for node in graph.nodes if node.op.name not in UNPLACED_OPS}
    return compiled, x.node


def step_cost(cluster: Cluster, timed: Timer, there_and_back: float) -> StepCost:
    """Return the cost of a step beyond its nodes and transfers, on one and on two devices.

    Args:
        there_and_back: seconds from the client to a device and back, which plans count as
            transfers.
    """
    of = units_of(cluster)
    one, *two = (
        max(timed(*probe_fetches(of[:n]), ()) - there_and_back, 1e-6)
        for n in (1, 2)
        if n <= len(of)
    )
    return one, max(one, *two) if two else one


def measure_client(
    cluster: Cluster, survey: ClusterSurvey, timed: Timer, keep: bool
) -> ClusterSurvey:
    """Return a survey with the cost of a step, and with the client's link to local workers.

    On this machine, both are kept with its profile, and measured once. The cost on two devices is
    known once a session with two has measured it.

    Args:
        keep: keep what is measured for later sessions.
    """
    kind = session_kind(cluster)
    here = cluster.kind in ("here", "local")
    kinds = {device.kind for worker in cluster.workers for device in worker.devices}
    if cluster.kind == "local" and "client" not in calibrate.profile(kinds)["links"]:
        link = client_link(timed, cluster.devices[0])
        if keep:
            save_links({"client": link})
        else:
            ends = [(CLIENT, f"/worker:{worker.index}") for worker in cluster.workers]
            links = {pair: link for a, b in ends for pair in ((a, b), (b, a))}
            survey = replace(survey, links={**(survey.links or {}), **links})
    cost = step_cost_of(calibrate.profile(kinds), kind) if here else None
    if cost is None:
        latency, _ = link_matrices(cluster, survey.profiles, survey.links)
        cost = step_cost(cluster, timed, float(latency[-1, 0] + latency[0, -1]))
        if keep and here and len(units_of(cluster)) > 1:
            save_step_cost(kind, cost)
    return replace(survey, steps=cost)


def units_of(cluster: Cluster) -> tuple[str, ...]:
    """Return the first device of each worker; all devices of this process."""
    if cluster.kind == "here":
        return cluster.devices
    first: dict[int | None, str] = {}
    for name in cluster.devices:
        first.setdefault(DeviceName.parse(name).worker, name)
    return tuple(first.values())

"""Plans as networkx graphs: `Plan.to_networkx`. What it writes, `from_networkx` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import networkx

from graphflow.placement.clusters.devices import CLIENT

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData


def digraph_of(plan: PlanData) -> networkx.DiGraph:
    """See `Plan.to_networkx`."""
    graph = networkx.DiGraph(makespan=plan.makespan, placer=plan.placer, **_machine(plan))
    needs = _demands(plan)
    for node in plan.nodes:
        attributes = {k: v for k, v in vars(node).items() if k not in ("name", "inputs", "holds")}
        if node.device == CLIENT:
            attributes["candidates"] = {CLIENT: 0.0}
        graph.add_node(node.name, **attributes, **needs.get(node.name, {}))
    took = {(plan.maker(t.tensor), t.target): t.finish - t.start for t in plan.transfers}
    for node in plan.nodes:
        for name in node.inputs:
            source = plan.by_name[name]
            crossing = took.get((name, node.device), 0.0)
            graph.add_edge(name, node.name, bytes=source.bytes, transfer=crossing)
    return graph


def _machine(plan: PlanData) -> dict[str, Any]:
    """Return the plan's devices, latencies, bandwidths and capacities as graph attributes."""
    if plan.model is None:
        return {"devices": [*plan.cluster.devices, CLIENT], "client": CLIENT}
    problem = plan.model.problem
    return {
        "devices": list(plan.model.devices), "client": CLIENT,
        "contention": problem.contention, "latency": problem.latency.tolist(),
        "bandwidth": problem.bandwidth.tolist(), "capacity": problem.capacity.tolist(),
        "shared": problem.shared.tolist(), "routes": problem.routes.tolist(),
    }  # fmt: skip


def _demands(plan: PlanData) -> dict[str, dict[str, Any]]:
    """Return each node's memory and colocation group as attributes."""
    if plan.model is None:
        return {}
    problem = plan.model.problem
    needs: dict[str, dict[str, Any]] = {}
    columns = {"memory": problem.memory.tolist(), "group": problem.groups.tolist()}
    if problem.output_memory is not None:
        columns["output_memory"] = problem.output_memory.tolist()
    for i, name in enumerate(plan.model.names):
        if name not in needs:  # a fetch has the name of what is fetched, and comes after it
            needs[name] = {key: column[i] for key, column in columns.items()}
            if needs[name]["group"] < 0:
                del needs[name]["group"]
    return needs

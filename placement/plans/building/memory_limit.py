"""The error for a graph that fits in no memory: what is missing where, by names and lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphflow.base.formatting import show_memory
from graphflow.errors import MemoryLimitError
from graphflow.placement.cost_model.problem_builder import GraphProblem
from graphflow.placement.problems.infeasibility import shortages


def memory_limit(
    made: GraphProblem, nodes: Iterable[int], needed: Sequence[float]
) -> MemoryLimitError:
    """Return a placer's error that nothing fits, in the user's terms.

    Args:
        nodes: Of the problem, the largest first.
        needed: Bytes for each device, of the placement that came closest.
    """
    problem = made.problem
    transient = problem.output_memory
    assert transient is not None
    room = ", ".join(
        f"{name} has {show_memory(capacity)}"
        + (f" and would need {show_memory(need)}" if need else "")
        + (f" ({show_memory(need - capacity)} missing)" if need > capacity else "")
        for name, capacity, need in zip(made.devices[:-1], problem.capacity, needed, strict=False)
    )
    biggest = "; ".join(
        f"{made.nodes[i].op.name} {made.name(i)!r} {show_memory(problem.memory[i] + transient[i])} "
        f"(made at {made.nodes[i].location})"
        for i in nodes
        if i < len(made.nodes)
    )
    error = MemoryLimitError(
        f"no placement fits in memory: {room}; variables and constants keep "
        f"{show_memory(float(problem.memory.sum()))} between steps. The biggest: {biggest}. "
        f"{_impossible(made)}Use smaller batches, more or larger devices (memory= in the cluster "
        "file), or loosen pins"
    )
    error.nodes = tuple(nodes)
    error.needed = tuple(int(need) for need in needed)
    return error


def _impossible(made: GraphProblem) -> str:
    """Describe by names and lines what no placement can hold."""
    told = []
    for each in shortages(made.problem)[:3]:
        if each.device is None:
            continue
        own = [made.nodes[i] for i in each.nodes if i < len(made.nodes)]
        names = ", ".join(
            f"{node.op.name} {made.graph.names[node]!r} (made at {node.location})"
            for node in own[:4]
        )
        told.append(
            f"{names}{', …' if len(own) > 4 else ''} alone needs {show_memory(each.need)}, and the "
            f"roomiest device that it may use, {made.devices[each.device]}, has "
            f"{show_memory(each.room)} ({show_memory(each.missing)} missing). "
        )
    return "".join(told)

"""From fetches to a plan: `gf.plan`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.process.interrupts import passes_interrupts
from graphflow.errors import PlanError
from graphflow.frontend.pytree import bind, depends_on_placeholder, flatten
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import show_shape
from graphflow.passes import optimize
from graphflow.placement.calibration import calibrate
from graphflow.placement.calibration.automatic_cluster import measured_cluster
from graphflow.placement.calibration.calibrate import StepCost
from graphflow.placement.calibration.cluster_rates import is_described
from graphflow.placement.calibration.corrections_file import read_corrections
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.placers import Placer
from graphflow.placement.plans.building.plan_builder import plan_graph
from graphflow.placement.plans.building.step_totals import session_kind
from graphflow.placement.plans.plan import Plan
from graphflow.placement.simulation.jitter import Jitter
from graphflow.strategy import divide_graph


@checks_arguments(PlanError)
@passes_interrupts
def plan(
    fetches: Any,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    shapes: Mapping[Tensor, Sequence[int]] | None = None,
    placer: str | Placer = "greedy",
    jitter: Jitter | None = None,
) -> Plan:
    """Decide where the nodes of some fetches would run, without running anything.

    Args:
        fetches: a tensor, or a nest of them, as `Session.run` takes it.
        cluster: default: this process. A path is read as a cluster file.
        shapes: for placeholders with sizes that are not known.
        placer: name of the algorithm, or one with settings of its own.
        jitter: makes turns of workers longer at random, in windows of parameter servers. The plan
            is then of the median window.

    Raises:
        FetchError, PlanError: fetches that are no tensors; shapes that are missing, unknown, wrong.
        DeviceError, MemoryLimitError: a pin fits no device; the graph fits in no memory.
    """
    if cluster is None:
        cluster = measured_cluster()
    elif isinstance(cluster, str | os.PathLike):
        cluster = Cluster.load(cluster)
    elif not isinstance(cluster, Cluster):
        raise PlanError(f"a plan is for a gf.Cluster or the path of a file, not {cluster!r}")
    source = Graph(flatten(fetches)[0]).verify()
    sizes = sizes_of(source, shapes or {})
    bindings = bind(source, sizes, error=PlanError)
    graph, division = divide_graph(source, cluster, bindings)
    if division is not None:
        bindings = division.bindings(bindings)
    learned, steps = known_of(cluster)
    return plan_graph(
        optimize(graph), cluster, sizes, bindings, placer, learned=learned, steps=steps,
        tasks=() if division is None else division.tasks,
        notes=() if division is None else division.notes, jitter=jitter,
    )  # fmt: skip


def known_of(cluster: Cluster) -> tuple[TraceCorrections | None, StepCost | None]:
    """Return what earlier sessions learned and measured, if the cluster is this machine."""
    if cluster.kind not in ("here", "local") or is_described(cluster):
        return None, None
    profile = calibrate.profile({d.kind for worker in cluster.workers for d in worker.devices})
    cost = calibrate.step_cost_of(profile, session_kind(cluster))
    return read_corrections(profile), cost


def sizes_of(graph: Graph, shapes: Mapping[Tensor, Sequence[int]]) -> dict[Node, tuple[int, ...]]:
    """Shapes of all placeholders: given, or known anyway.

    Raises:
        PlanError: one is missing, wrong, or of nothing in the graph.
    """
    if not isinstance(shapes, Mapping):
        raise PlanError(f"shapes are a dict from placeholders to tuples of sizes, not {shapes!r}")
    sizes: dict[Node, tuple[int, ...]] = {}
    for tensor, shape in shapes.items():
        if not isinstance(tensor, Tensor):
            raise PlanError(f"{tensor!r} in shapes is no placeholder; use the tensor itself as key")
        try:
            sizes[tensor.node] = tuple(int(size) for size in shape)
        except (TypeError, ValueError):
            raise PlanError(
                f"the shape of {tensor.name!r} is a tuple of ints such as (128, 64), not {shape!r}"
            ) from None
        if tensor.node.op.name == "placeholder" and not depends_on_placeholder(graph, tensor.node):
            raise PlanError(
                f"placeholder {tensor.name!r} (made at {tensor.node.location}) has a shape, but "
                "nothing fetched depends on it; leave it out"
            )
    for node in graph.placeholders:
        spec = node.specs[0]
        if node not in sizes:
            if not spec.is_concrete:
                raise PlanError(
                    f"placeholder {graph.names[node]!r} (made at {node.location}) takes "
                    f"{show_shape(spec.shape)}: give its sizes, shapes={{{node.name}: (…)}}"
                )
            sizes[node] = tuple(int(s) for s in spec.shape)
    return sizes

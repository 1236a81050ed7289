"""The search for the best strategy, by simulation with what the cluster was measured to take.

    found = gf.parallel.auto(loss, gf.Cluster.local(2), shapes={x: (64, 784)})
    train = gf.optim.Adam(1e-3).minimize(loss, strategy=found)

    candidates ─closed forms→ in order of predicted time ─partitioned, profiled, simulated→ results

The search covers meshes, stages, schedules, micro-batches and recomputation. It ends when no other
candidate can win and showing more of them would take longer than a moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow import optim
from graphflow.base.argument_checks import checks_arguments
from graphflow.base.formatting import show_bytes
from graphflow.base.progress import show_wait
from graphflow.errors import ArgumentError, MemoryLimitError
from graphflow.ir.op import Tensor, user_location
from graphflow.parallel.searching.measurement import measure_best
from graphflow.parallel.searching.search_arguments import check_arguments
from graphflow.parallel.searching.search_result import Search
from graphflow.parallel.searching.strategy_search import StrategySearch
from graphflow.placement.calibration.automatic_cluster import measured_cluster
from graphflow.placement.clusters.cluster import Cluster


@checks_arguments(ArgumentError)
def auto(
    loss: Tensor,
    cluster: Cluster | None = None,
    *,
    shapes: Mapping[Tensor, Sequence[int]] | None = None,
    optimizer: optim.Optimizer | None = None,
    memory: int | None = None,
    trial: bool = True,
    measure: int = 0,
    quiet: bool = False,
    exact: bool = True,
) -> Search:
    """Search for the strategy with the fastest training step, and print what was tried.

    The search covers data, tensor and pipeline parallelism and their combinations, over all or some
    of the cluster's fastest devices; splits into stages by the planner; several schedules and
    numbers of micro-batches. If a candidate does not fit in memory, its leaner variants are tried:
    sharded optimiser state, then a split sequence, then recomputation. Among candidates within 3 %
    of the fastest, the one with the fewest devices wins, and then the one that sends least.

    Args:
        loss: the loss to be trained.
        cluster: default: this process.
        shapes: of placeholders with sizes that are not known.
        optimizer: default: Adam.
        memory: bytes of each device that may be used; default: what the devices have.
        trial: whether steps may be profiled for a moment in this process, if the cluster is this
            machine's processors. The simulator then knows what nodes take. The overheads of steps
            and links are measured on its workers, once.
        measure: how many of the best candidates run for a few steps with synthetic feeds on the
            cluster's workers. Their measured times then decide.
        quiet: print nothing.
        exact: whether training must compute what one device would, but for the order of sums.
            Otherwise the search tries filters and `LocalSGD`, too, over all devices and over as
            many as the best exact strategy takes. Each line says what such a strategy sends and
            changes. Times are those of a step, so of the same number of examples: steps that learn
            less from them are not known to the search.

    Raises:
        MemoryLimitError: nothing fits; the message lists what was tried.
        PlanError: a shape is missing.
        ArgumentError: another argument is invalid.
        VariableError, DifferentiationError: there is nothing to train, or no gradient.
        SessionError: `measure` is given and the cluster is hypothetical.
    """
    check_arguments(loss, cluster, optimizer, memory, trial, measure, exact)
    there = measured_cluster() if cluster is None else cluster
    found = StrategySearch(loss, there, shapes or {}, optimizer or optim.Adam(), memory, trial)
    with show_wait(found.progress, lambda seconds: None):
        tried = found.run()
        if not exact:
            tried += found.try_inexact(tried)
        if measure:
            tried = measure_best(
                tried, measure, found.training_fetches, there, found.synthetic_feeds
            )
    ranked = Search(tuple(sorted(tried, key=lambda t: (*t.key, len(t.name)))), found.fastest[0])
    if ranked.best.why_not:
        limit = "" if memory is None else f" in {show_bytes(memory)} of each device"
        raise MemoryLimitError(
            f"auto at {user_location()}: no strategy fits{limit}; use smaller batches, or more or "
            f"larger devices\n{ranked}"
        )
    if not quiet:
        print(ranked)
    return ranked

"""Measure the best strategies of a search on the cluster itself, for a few steps each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from graphflow.execution.cluster_connection import is_trial
from graphflow.ir.op import Tensor
from graphflow.parallel.searching.search_result import CandidateResult
from graphflow.placement.calibration.measure import lower_quartile
from graphflow.placement.clusters.cluster import Cluster
from graphflow.sessions.session import Session

ROUNDS = 5
"""Rounds in which the strategies take turns, after one round that warms up."""
STEPS_PER_ROUND = 2
"""Steps of each strategy in a round."""


def _open_trial_session(cluster: Cluster) -> Session:
    """Open a session that workers do not count as a user's."""
    before = is_trial.set(True)
    try:
        return Session(cluster, trial=False)
    finally:
        is_trial.reset(before)


def measure_best(
    tried: Sequence[CandidateResult],
    count: int,
    trained: Callable[[Any], list[Tensor]],
    cluster: Cluster,
    feeds: Mapping[Tensor, Any],
) -> list[CandidateResult]:
    """Return the results, the best ones with measured seconds.

    Candidates take turns, so that other load on the machine is the same for all. The lower quartile
    counts. Exchanges that most steps do not make are not among those measured, so their predicted
    share is added.

    Args:
        tried: the results.
        count: how many candidates are measured.
        trained: returns the fetches of a step with a strategy.
        cluster: the cluster.
        feeds: the arrays that are fed.

    Raises:
        SessionError: the cluster is hypothetical, or not reachable.
    """
    possible = sorted((t for t in tried if t.simulated and not t.why_not), key=lambda t: t.seconds)
    chosen = possible[:count]
    times: dict[str, list[float]] = {each.name: [] for each in chosen}
    with ExitStack() as stack:
        steps = {}
        for each in chosen:
            session = stack.enter_context(_open_trial_session(cluster))
            steps[each.name] = partial(session.run, trained(each.strategy), dict(feeds))
        for turn in range(ROUNDS + 1):
            for name, step in steps.items():
                for _ in range(STEPS_PER_ROUND):
                    started = perf_counter()
                    step()
                    if turn:
                        times[name].append(perf_counter() - started)
    return [
        replace(each, measured=lower_quartile(times[each.name]) + each.seldom)
        if each.name in times
        else each
        for each in tried
    ]

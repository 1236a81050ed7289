"""Move ranges of tables' rows to other owners, by the ids of the last steps.

    ids of steps ─count_rows→ rows asked of each range ─move_rows→ assignments, run as one step

Only rows of these ranges travel, between workers. The step counts for nothing: random numbers of
later steps are those that they would have been.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphflow.base.process.interrupts import defer_signals
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.execution.replan_policy import Replanned
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor
from graphflow.passes import optimize
from graphflow.planning.deployment import Deployment
from graphflow.runtime.telemetry.logs import Log
from graphflow.strategy import RowMoves

_log = Log("graphflow.session")


def find_row_moves(deployment: Deployment) -> RowMoves | None:
    """Return the moves that let owners of tables be asked for about as many rows; None if none is
    worth it."""
    counts: dict[Node, Any] = {}
    for compiled in deployment.compiled.values():
        if compiled.division is not None and compiled.id_feeds:
            for table, found in compiled.division.count_rows(compiled.id_feeds).items():
                counts[table] = counts.get(table, 0) + found
    for table in counts:
        find = getattr(deployment.strategies.find(table), "move_rows", None)
        if find is not None:  # a session's tables have one strategy
            moves: RowMoves | None = find(counts, deployment.state.shards, deployment.state.homes)
            return moves
    return None


def balance_tables(deployment: Deployment, replanned: Replanned) -> Replanned:
    """Move ranges of rows between owners, and return what replanning achieved with that.

    Raises:
        MemoryLimitError: a device has no memory for the rows that it receives; nothing has moved.
        WorkerLost: a worker was lost meanwhile.
    """
    moves = find_row_moves(deployment)
    if moves is None:
        return replanned
    with defer_signals():  # workers and the client must agree on who owns which rows
        _run_moves(deployment, moves)
        deployment.state.move_shards(moves.shards)
        stale = _drop_stale(deployment, moves)
    done = replace(
        replanned,
        ranges=moves.ranges,
        range_bytes=moves.nbytes,
        load_before=moves.before,
        load_after=moves.after,
    )
    _log.tell("tables.balanced", text=done.describe_ranges())
    for old in stale:
        _place_again(deployment, old)
    return done


def _run_moves(deployment: Deployment, moves: RowMoves) -> None:
    """Run the assignments of moves as a step that is not counted."""
    group: Tensor = REGISTRY["group"](*moves.updates, name="moved_ranges")
    source = Graph([group])
    compiled = CompiledFetches((group,), source, optimize(source))
    bindings = compiled.bindings({})
    steps = deployment.steps
    kept = steps.trace, steps.last, steps.committed
    compiled.plan = deployment.planner.plan(compiled)
    deployment.place_and_partition(compiled, bindings)
    try:
        deployment.send_programs(compiled)
        steps.trace = None
        steps.run(compiled, {}, bindings)
    finally:
        steps.trace, steps.last, steps.committed = kept
        deployment.compiled.pop(compiled.key, None)
    deployment.hosts.forget([compiled.program], {})


def _drop_stale(deployment: Deployment, moves: RowMoves) -> list[CompiledFetches]:
    """Drop the programs that know the owners of before, and return their fetches."""
    stale = [
        compiled
        for compiled in deployment.compiled.values()
        if compiled.division is not None
        and not moves.shards.keys().isdisjoint(compiled.division.variables)
    ]
    check = deployment.check
    if check is not None and any(compiled.key in check.plans for compiled in stale):
        deployment.begin_check(None)
    for compiled in stale:
        del deployment.compiled[compiled.key]
    deployment.hosts.forget([c.program for c in stale if c.program], {})
    return stale


def _place_again(deployment: Deployment, old: CompiledFetches) -> None:
    """Partition fetches by the present owners."""
    new = deployment.compile(old.fetches, old.sizes)
    deployment.prepare(new, old.sizes, new.bindings(old.sizes))
    new.runs, new.id_feeds = old.runs, old.id_feeds
    if deployment.steps.last is old:
        deployment.steps.last = new


__all__ = ["balance_tables", "find_row_moves"]

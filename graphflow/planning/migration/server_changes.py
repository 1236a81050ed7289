"""Servers that join or leave a session between two windows.

    ServerChange ─change_servers→ ServerMoves ─ServerCopies→ copies ─decision→ the session's state

Until the decision, the servers of before have all that they had, and the session is as it was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from graphflow.base.formatting import show_bytes, show_count, show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.interrupts import defer_signals
from graphflow.base.progress import show_progress
from graphflow.errors import ClusterError, GraphflowError, SessionError, WorkerLost
from graphflow.execution.compiled_fetches import CompiledFetches, worker_of
from graphflow.frontend.pytree import fed_sizes
from graphflow.passes import optimize
from graphflow.planning.deployment import Deployment
from graphflow.planning.migration.server_copies import ServerCopies
from graphflow.runtime.telemetry.logs import Log
from graphflow.strategy import ServedStrategy, ServerChange, ServerMoves, Strategy, divide_with

_log = Log("graphflow.session")


@dataclass(frozen=True)
class ServersChanged:
    """The result of letting a server join or leave.

    Args:
        servers: the number of servers now.
        variables: the number of variables that moved whole to other servers, with optimisers'
            slots.
        ranges: the number of ranges of tables' rows that moved to other servers.
        nbytes: the bytes that travelled, with those of slots, from server to server.
        total: the bytes of all variables and rows on servers.
        seconds: how long it took.
    """

    servers: int
    variables: int
    ranges: int
    nbytes: int
    total: int
    seconds: float

    def __str__(self) -> str:
        share = f" ({self.nbytes / self.total:.1%} of all)" if self.total else ""
        return (
            f"{show_count(self.servers, 'server')} now: {show_count(self.variables, 'variable')} "
            f"and {self.ranges} ranges of rows moved, {show_bytes(self.nbytes)}{share}, in "
            f"{show_seconds(self.seconds)}"
        )


class ServerChanges:
    """Lets servers of a session join and leave.

    Args:
        deployment: the session's programs and variables.

    Raises:
        SessionError: the session has run no step of a strategy with servers, or has lost workers
            for good.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._strategy = _find_strategy(deployment)
        # After a loss in the move, the session may have to compile them again.
        self._fetches = [
            (each.fetches, each.sizes) for each in _sets_of(deployment, self._strategy)
        ]

    def add(self, at: str | None, key: str | None) -> ServersChanged:
        """Let a server join.

        Args:
            at: a device of the session, or the address of a worker that is to join; None for a new
                process of this machine.
            key: the public key of that worker, or the key's name.

        Raises:
            SessionError, ClusterError, ShardingError: it cannot join; nothing has changed.
            WorkerLost: another worker was lost meanwhile, and nothing else has changed.
        """
        deployment = self._deployment
        before = deployment.cluster
        if before.kind == "here" or (at is not None and "://" not in at):
            device = before.match(at)[0] if at is not None else before.devices[-1]
            return self._change(ServerChange(joining=device))[0]
        number = self._join(at, key)
        device = deployment.cluster.workers[number].devices[0].name
        try:
            return self._change(ServerChange(joining=device))[0]
        except BaseException as error:
            with defer_signals():
                is_lost = number in deployment.hosts.lost_workers()
                deployment.change_cluster(before)
                with suppress(GraphflowError):
                    deployment.hosts.dismiss(number)
            if is_lost and isinstance(error, WorkerLost) and error.worker == number:
                deployment.steps.lost = None
                raise ClusterError(
                    f"worker {number}, on which a server was to join, was lost while rows moved "
                    f"to it ({error}); the session goes on as before"
                ) from error
            raise

    def remove(self, server: int) -> ServersChanged:
        """Let a server hand its variables and rows over to the others. Its worker leaves the
        session if nothing else is there.

        Args:
            server: its number; negative ones count from the last.

        Raises:
            ShardingError: it cannot leave; nothing has changed.
            WorkerLost: a worker was lost meanwhile, and nothing else has changed.
        """
        done, moves = self._change(ServerChange(leaving=server))
        assert moves.left is not None
        deployment, worker = self._deployment, worker_of(moves.left)
        used = {*moves.devices, *deployment.state.homes.values()}
        if deployment.hosts.can_be_lost and worker not in map(worker_of, used):
            with defer_signals():
                cluster = deployment.cluster
                deployment.change_cluster(replace(cluster, left=(*cluster.left, worker)))
                self._drop_programs(worker)
                with suppress(GraphflowError):
                    deployment.hosts.dismiss(worker)
        return done

    def hand_over(self, worker: int) -> None:
        """Let the server on a worker hand over, if nothing else of the session is there.

        Raises:
            GraphflowError: it could not; nothing has changed.
        """
        servers, others = self._strategy.devices_of_parties(self._deployment.cluster)
        own = [n for n, device in enumerate(servers) if worker_of(device) == worker]
        if len(own) == 1 and worker not in map(worker_of, others):
            self.remove(own[0])

    def _join(self, at: str | None, key: str | None) -> int:
        """Let a worker join the session, and return its number.

        Raises:
            ClusterError, SessionError: it cannot join.
        """
        deployment = self._deployment
        cluster = deployment.cluster
        if cluster.kind == "local" and at is not None:
            raise ClusterError(
                f"the session starts its workers itself, so none can join at {at!r}; leave the "
                "address out, or name a device of the session"
            )
        if cluster.kind == "remote" and at is None:
            raise ClusterError(
                "a worker on which the server is to run is missing; start one, and give its "
                "address: s.add_server('tcp://host:port')"
            )
        like = cluster.workers[0]
        with show_progress("waiting for", 1, "worker to join"):
            number = deployment.hosts.join(at, key, [d.name.split("/")[-1] for d in like.devices])
        deployment.change_cluster(cluster.join(number, like, at, key))
        return number

    # The move -------------------------------------------------------------------------------------

    def _change(self, change: ServerChange) -> tuple[ServersChanged, ServerMoves]:
        """Copy what moves, and let the session go on with it."""
        begun = time.monotonic()
        deployment, state = self._deployment, self._deployment.state
        sets = self._prepare()
        graphs = [each.source for each in sets]
        moves = self._strategy.change_servers(change, deployment.cluster, graphs, state.shards)
        copies = ServerCopies(deployment, moves)
        state.register(state.new_names(copies.made))
        try:
            copies.check_memory()
            fresh = [self._partition_anew(each, moves) for each in sets]
            copies.run()
        except BaseException:
            with defer_signals():
                leaving = state.drop(copies.made)
                with suppress(GraphflowError):
                    deployment.hosts.forget([], leaving)
            raise
        nbytes = copies.nbytes
        with defer_signals():  # workers and the client must agree on who has which rows
            self._decide(moves, sets, fresh)
        done = ServersChanged(
            moves.servers, len(moves.whole), moves.ranges, nbytes, _served_bytes(moves),
            time.monotonic() - begun,
        )  # fmt: skip
        _log.tell("servers.changed", text=str(done))
        return done, moves

    def _prepare(self) -> list[CompiledFetches]:
        """Return the sets of fetches of the strategy; their workers have all values."""
        deployment, found = self._deployment, []
        for fetches, sizes in self._fetches:
            compiled = deployment.compile(fetches, sizes)
            deployment.prepare(compiled, sizes, compiled.bindings(sizes))
            found.append(compiled)
        return found

    def _partition_anew(self, old: CompiledFetches, moves: ServerMoves) -> CompiledFetches:
        """Partition fetches as they will run, which shows whether they can."""
        fed = fed_sizes(old.source, old.sizes)
        cluster = self._deployment.cluster
        division = divide_with(moves.strategy, old.source, cluster, moves.shards, fed)
        fresh = CompiledFetches(
            old.fetches, old.source, optimize(division.graph), sizes=old.sizes, runs=old.runs,
            division=division, variant=old.variant,
        )  # fmt: skip
        self._deployment.place_and_partition(fresh, fresh.bindings(old.sizes))
        return fresh

    def _decide(
        self,
        moves: ServerMoves,
        sets: Sequence[CompiledFetches],
        fresh: Sequence[CompiledFetches],
    ) -> None:
        """Let the session go on with the new variables. A worker that is lost now is missed by the
        next step."""
        deployment, state, steps = self._deployment, self._deployment.state, self._deployment.steps
        before = {piece for node in moves.shards for piece in state.shards[node].nodes}
        after = {piece for pieces in moves.shards.values() for piece in pieces.nodes}
        state.move_shards(moves.shards)
        deployment.strategies.replace(self._strategy, moves.strategy)
        assert isinstance(moves.strategy, ServedStrategy)
        self._strategy = moves.strategy
        programs = [each.program for each in sets if each.program]
        for old, new in zip(sets, fresh, strict=True):
            del deployment.compiled[old.key]
            deployment.compiled[new.key] = new
            if steps.last is old:
                steps.last = new
        leaving = state.drop(before - after)
        with suppress(WorkerLost):
            deployment.hosts.forget(programs, leaving)
            for new in fresh:
                deployment.send_programs(new)

    def _drop_programs(self, worker: int) -> None:
        """Let the next steps send the programs again that a worker has a part of."""
        deployment = self._deployment
        has_mirrors = deployment.mirrors is not None and deployment.mirrors.is_active
        for key, each in [*deployment.compiled.items()]:
            if not each.program or not (has_mirrors or worker in each.by_worker):
                continue
            with suppress(WorkerLost):
                deployment.hosts.forget([each.program], {})
            if has_mirrors:
                each.program, each.is_warm = "", False
            else:  # another placement was planned while the worker was there
                del deployment.compiled[key]
            each.drop_cached_steps()


def _find_strategy(deployment: Deployment) -> ServedStrategy:
    """Return the strategy whose servers may change.

    Raises:
        SessionError: there is none, or several, or workers were lost for good.
    """
    found = [each for each in deployment.strategies if isinstance(each, ServedStrategy)]
    if len(found) != 1:
        raise SessionError(
            "servers join and leave once a session has run a step with a ParameterServer; this "
            f"one has run {'none' if not found else f'steps of {len(found)} of them'}"
        )
    if deployment.cluster.stand_ins:
        raise SessionError(
            "the session has lost workers for good, and others have their places; close it, and "
            "open it on its present cluster: servers can join and leave there"
        )
    return found[0]


def _sets_of(deployment: Deployment, strategy: Strategy) -> list[CompiledFetches]:
    """Return the sets of fetches that a strategy has partitioned."""
    return [
        each
        for each in deployment.compiled.values()
        if each.division is not None
        and any(deployment.strategies.find(node) is strategy for node in each.division.variables)
    ]


def _served_bytes(moves: ServerMoves) -> int:
    """Return the bytes of all variables and rows on servers."""
    return sum(
        int(node.specs[0].nbytes)
        for node, own in moves.shards.items()
        if own.server is not None or own.ranges is not None
    )


__all__ = ["ServerChanges", "ServersChanged"]

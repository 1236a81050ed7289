"""Hybrids: tables asynchronous at parameter servers, other variables synchronous as with Data."""

from __future__ import annotations

from typing import Any

from graphflow.errors import ShardingError
from graphflow.ir.op import user_location
from graphflow.parallel.data import Data
from graphflow.parallel.servers.consistency import Rules
from graphflow.parallel.servers.step_cut import StepCut


def count_replicas(servers: Any, other: Any) -> int:
    """Return the replicas of the product of a `ParameterServer` and a `Data`.

    Raises:
        ShardingError: the product has no meaning.
    """
    where = f"at {user_location()}"
    if not isinstance(other, Data):
        raise ShardingError(
            f"{where}: a ParameterServer goes with a Data, as in ParameterServer(tables=['*']) * "
            f"Data(2), not with {other!r}"
        )
    if not servers.tables:
        raise ShardingError(
            f"{where}: in ParameterServer * Data, tables are asynchronous and the rest is "
            "synchronous, and the ParameterServer has no tables=; name them, or take one of both"
        )
    if servers.consistency not in ("pool", "async") or servers.aggregate is not None:
        raise ShardingError(
            f"{where}: in ParameterServer * Data, each push updates rows at once; leave out "
            f"consistency={servers.consistency!r} and aggregate={servers.aggregate!r}"
        )
    if servers.workers not in (None, other.replicas):
        raise ShardingError(
            f"{where}: the ParameterServer has {servers.workers} workers, and the Data "
            f"{other.replicas} replicas; leave out workers="
        )
    plain = Data(other.replicas, batch=other.batch)
    options = ("shard_state", "accumulate", "synchronised", "bucket", "devices", "compress")
    for name in options:
        if getattr(other, name) != getattr(plain, name):
            raise ShardingError(
                f"{where}: {name}={getattr(other, name)!r} of the Data has no meaning beside "
                "parameter servers; leave it out, or say devices= and filters= in the "
                "ParameterServer"
            )
    if other.tables:
        raise ShardingError(
            f"{where}: both would keep tables; say tables= in the ParameterServer alone"
        )
    return other.replicas


def check_hybrid(cut: StepCut, rules: Rules, where: str) -> None:
    """Check that updates of tables can be made push by push.

    Raises:
        ShardingError: an update of a table reads gradients of other variables.
    """
    if not rules.rows_at_once:
        return
    _, crossing = cut.update_of([t for table in cut.tables for t in table.outside])
    if crossing:
        node = crossing[0].value.node
        raise ShardingError(
            f"{where}: the update of a table reads {node.name!r} (made at {node.location}), of "
            "which all workers have a part, and each push updates tables at once; take the "
            "ParameterServer without Data"
        )


__all__ = ["check_hybrid", "count_replicas"]

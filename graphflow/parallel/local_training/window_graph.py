"""The graph of a window: the turns of all replicas, with fetches and assignments at its end."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

from graphflow.errors import ShardingError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, origin_scope
from graphflow.ir.spec import is_inexact, show_shape, sole_symbol
from graphflow.parallel.local_training.replica_unroller import (
    LETTERS,
    PHASES,
    REPLICA,
    ReplicaUnroller,
)
from graphflow.parallel.mesh.layouts import SentTensor, whole
from graphflow.parallel.resharding.communication_log import CommunicationLog, user_name
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph
from graphflow.parallel.update_fetches import find_updated_variables

Updates = Mapping[Node, Sequence[Tensor]]
"""The assignments of each variable."""


def finish_window(unroller: ReplicaUnroller, **kept: Any) -> ShardedGraph:
    """Assign the current values, and return the graph of the window.

    Args:
        unroller: has written the turns.
        kept: further fields of the result.

    Raises:
        ShardingError: a fetch has a value for each turn and replica, and is neither a float scalar
            nor led by the batch.
    """
    updates = _assign_values(unroller)
    source, outputs = unroller.template.source, unroller.template.graph.outputs
    fetches = [
        _fetch(unroller, user, own, updates)
        for user, own in zip(source.outputs, outputs, strict=False)
    ]
    every = [*itertools.chain.from_iterable(updates.values())]
    if every:
        with origin_scope(every[0].node, "", DeviceName()):
            fetches.append(REGISTRY["group"](*every, name="updates"))
    labels = tuple(f"{LETTERS[p]}{turn}" for turn in range(unroller.turns) for p in PHASES)
    return ShardedGraph(
        source, Graph(fetches).verify(), unroller.window, unroller.partitioner, unroller.shares,
        unroller.variables, (*unroller.records, *unroller.builder.records),
        tuple(unroller.builder.fetched), labels=labels, **kept,
    )  # fmt: skip


def _assign_values(unroller: ReplicaUnroller) -> dict[Node, list[Tensor]]:
    """Write the assignments of all copies whose values changed."""
    updates: dict[Node, list[Tensor]] = {}
    for node, pieces in unroller.variables.items():
        for own, value in zip(pieces.nodes, unroller.current[node], strict=True):
            if value is not own.outputs[0]:
                with origin_scope(node, "", own.device):
                    assigned: Tensor = REGISTRY["assign"](own.outputs[0], value)
                updates.setdefault(node, []).append(assigned)
    return updates


def _fetch(unroller: ReplicaUnroller, user: Tensor, own: Tensor, updates: Updates) -> Tensor:
    """Return what stands for a fetch.

    Args:
        unroller: has written the turns.
        user: the fetch in the user's graph.
        own: what stands for it in the template.
        updates: the assignments of each variable.

    Raises:
        ShardingError: see `finish_window`.
    """
    node = user.node
    match node.op.name:
        case "group":
            members = [t for v in find_updated_variables(user) for t in updates.get(v, ())]
            with origin_scope(node, "", DeviceName()):
                group: Tensor = REGISTRY["group"](*members, name=node.name)
            return group
        case "variable":
            copies = unroller.variables[node].nodes
            return _mean_of_copies(unroller, node, node, [copy.outputs[0] for copy in copies])
        case "assign":
            variable = node.inputs[0].node
            return _mean_of_copies(unroller, node, variable, unroller.current[variable])
    parts = {at: mapped[own] for at, mapped in unroller.copies.items()}
    if len(set(parts.values())) == 1:
        return parts[0, 0]
    if user.ndim and sole_symbol(user.shape[0]) in unroller.symbols:
        _record_fetch(unroller, node, parts)
        with origin_scope(node, "fetched/", unroller.owners[0]):
            joined: Tensor = FUNCTIONS["concat"]([*parts.values()])
        return joined
    if not user.ndim and is_inexact(user.dtype):
        return _mean_of_turns(unroller, node, parts)
    raise ShardingError(
        f"fetch {node.name!r} (made at {node.location}) of shape {show_shape(user.shape)} has "
        f"a value for each of {unroller.replicas} replicas and {unroller.turns} turns; fetch "
        "floats without axes, of which it gives the mean (x.astype('float32') of a count), or "
        "tensors with the batch as first axis"
    )


def _mean_of_turns(
    unroller: ReplicaUnroller, node: Node, parts: Mapping[tuple[int, int], Tensor]
) -> Tensor:
    """Return the mean of scalars, summed by each replica before they are sent."""
    sums = {}
    for replica in range(unroller.replicas):
        with origin_scope(node, "fetched/", unroller.owners[replica * unroller.places]):
            sums[0, replica] = reduce(add, [parts[turn, replica] for turn in range(unroller.turns)])
    _record_fetch(unroller, node, sums)
    with origin_scope(node, "fetched/", unroller.owners[0]):
        mean: Tensor = reduce(add, sums.values()) * (1.0 / len(parts))
    return mean


def _mean_of_copies(
    unroller: ReplicaUnroller, node: Node, variable: Node, values: Sequence[Tensor]
) -> Tensor:
    """Return the mean of a variable's copies over replicas, at the first device.

    Raises:
        ShardingError: a replica's devices share the variable out.
    """
    if any(unroller.template.variables[variable].layout.dims):
        raise ShardingError(
            f"fetch {node.name!r} (made at {node.location}) lies in shards within each replica "
            "of a step that trains; read it with s.get between steps"
        )
    firsts = {(0, r): values[r * unroller.places] for r in range(unroller.replicas)}
    if not is_inexact(variable.specs[0].dtype):
        return firsts[0, 0]
    _record_fetch(unroller, node, firsts)
    with origin_scope(node, "fetched/", unroller.owners[0]):
        mean: Tensor = reduce(add, firsts.values()) * (1.0 / unroller.replicas)
    return mean


def _record_fetch(
    unroller: ReplicaUnroller, node: Node, parts: Mapping[tuple[int, int], Tensor]
) -> None:
    """Record that other replicas send parts of a fetch to the first one."""
    first = unroller.owners[0]
    sent: dict[SentTensor, float] = {
        (part, first): unroller.builder.nbytes(part.spec, whole(part.ndim))
        for (_, replica), part in parts.items()
        if replica and unroller.owners[replica * unroller.places] != first
    }
    log = CommunicationLog(unroller.builder, node, user_name(node), unroller.builder.fetched)
    log("fetch", (REPLICA,), sent)


__all__ = ["finish_window"]

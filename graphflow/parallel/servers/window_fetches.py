"""The outputs of a window: fetches in the user's order, and what each window records."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ShardingError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor, origin_scope
from graphflow.ir.spec import is_inexact, show_shape, sole_symbol
from graphflow.parallel.served_tables.table_pieces import gather_whole
from graphflow.parallel.servers.traffic import record_traffic
from graphflow.parallel.servers.window import ServedWindow
from graphflow.parallel.servers.window_history import WindowRecords
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph
from graphflow.parallel.update_fetches import find_updated_variables


def finish_window(window: ServedWindow, source: Graph, **kept: Any) -> ShardedGraph:
    """Return the graph of a window that was written.

    Args:
        window: the window.
        source: the user's graph.
        kept: further fields of the result.

    Raises:
        ShardingError: a fetch has a value for each turn, and is neither a float scalar nor led by
            the batch.
    """
    outputs = window.cut.graph.outputs
    fetches = [_fetch(window, user, own) for user, own in zip(source.outputs, outputs, strict=True)]
    every = [*window.updates.values()]
    with origin_scope(window.node, "", DeviceName()):
        fetches.append(REGISTRY["group"](*every, name="updates"))
    first = len(fetches)
    for result in window.results:
        fetches += [result.order, result.staleness, result.numbers]
    for sizes in window.sent.values():
        fetches += sizes
    filtered = {kind: len(sizes) for kind, sizes in window.sent.items() if sizes}
    records = WindowRecords(
        window.rules, tuple(range(first, len(fetches))), window.order.node, window.servers, filtered
    )
    sent, fetched = record_traffic(window)
    return ShardedGraph(
        source, Graph(fetches).verify(), window.mesh, window.sizes, window.shares,
        window.variables, sent, fetched, facts=records, **kept,
    )  # fmt: skip


def _fetch(window: ServedWindow, user: Tensor, own: Tensor) -> Tensor:
    """Return what stands for a fetch.

    Args:
        window: the window.
        user: the fetch in the user's graph.
        own: the same in the step that was cut.
    """
    node = user.node
    match node.op.name:
        case "group":
            members = [
                window.updates[v] for v in find_updated_variables(user) if v in window.updates
            ]
            with origin_scope(node, "", DeviceName()):
                group: Tensor = REGISTRY["group"](*members, name=node.name)
            return group
        case "variable" if node in window.tables.pieces:
            with origin_scope(node, "fetched/", window.device(0)):
                return gather_whole(window.tables.pieces[node])
        case "assign" if node.inputs[0].node in window.tables.pieces:
            raise ShardingError(
                f"fetch {node.name!r} (made at {node.location}) is the new value of a table that "
                "no process has whole; fetch the step, and read rows with s.get or gf.take"
            )
        case "variable":
            return window.variables[node].nodes[0].outputs[0]
        case "assign":
            return window.updates[node.inputs[0].node].node.inputs[1]
    if own in window.turn_fetches:
        return _fetch_of_turns(window, user, own)
    if own in window.update_fetches:
        return _fetch_of_updates(window, user, own)
    return window.copy_outside(own)


def _fetch_of_turns(window: ServedWindow, user: Tensor, own: Tensor) -> Tensor:
    """Return the mean over turns of a scalar, or the rows of all micro-batches in the order of the
    feeds."""
    result = window.results[0]
    if window.rules.has_backups and user.ndim:
        raise ShardingError(
            f"fetch {user.node.name!r} (made at {user.node.location}) has rows of each "
            "micro-batch, and with backup workers some are dropped; fetch floats without axes, or "
            "leave out aggregate="
        )
    pushed = result.fetched[window.turn_fetches[own]]
    is_scalar = not user.ndim and is_inexact(user.dtype)
    with origin_scope(user.node, "fetched/", window.device(0)):
        if window.rules.has_backups and is_scalar:
            taken = FUNCTIONS["equal"](result.staleness, np.int32(0))
            share = 1.0 / (window.rules.updates * window.rules.aggregate)
            total: Tensor = FUNCTIONS["sum"](FUNCTIONS["where"](taken, pushed, 0.0)) * share
            return total
        places = FUNCTIONS["argsort"](result.numbers)
        ordered: Tensor = FUNCTIONS["take"](pushed, places, 0)
        if is_scalar:
            mean: Tensor = FUNCTIONS["mean"](ordered)
            return mean
        if user.ndim and sole_symbol(user.shape[0]) in window.sizes.symbols_of_batch:
            shape = (pushed.shape[0] * pushed.shape[1], *pushed.shape[2:])
            rows: Tensor = FUNCTIONS["reshape"](ordered, shape)
            return rows
    raise _fetch_error(window, user, f"for each of {window.rules.turns}")


def _fetch_of_updates(window: ServedWindow, user: Tensor, own: Tensor) -> Tensor:
    """Return the mean over updates of a scalar."""
    server = window.update_fetches[own]
    mine = [t for t, s in window.update_fetches.items() if s == server]
    number = next(i for i, t in enumerate(mine) if t is own)
    if user.ndim or not is_inexact(user.dtype):
        raise _fetch_error(window, user, f"for each of {window.rules.updates} updates")
    with origin_scope(user.node, "fetched/", window.device(server)):
        mean: Tensor = FUNCTIONS["mean"](window.results[server].computed[number])
    return mean


def _fetch_error(window: ServedWindow, user: Tensor, each: str) -> ShardingError:
    node = user.node
    return ShardingError(
        f"fetch {node.name!r} (made at {node.location}) of shape {show_shape(user.shape)} has a "
        f"value {each}; fetch floats without axes, of which it gives the mean "
        "(x.astype('float32') of a count), or tensors of turns with the batch as first axis"
    )


__all__ = ["finish_window"]

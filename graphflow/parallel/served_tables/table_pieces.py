"""The pieces of tables at servers, and what reads them outside of windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.errors import ShardingError
from graphflow.frontend.initial_shards import SharedInitial
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, as_tensor, make_node, origin_scope
from graphflow.ir.spec import Span
from graphflow.ops.tensors.table_rows import piece_sizes
from graphflow.parallel.mesh.axis_split import AxisSplit
from graphflow.parallel.mesh.layouts import whole
from graphflow.parallel.mesh.row_ranges import RowRanges, ring_ranges
from graphflow.parallel.served_tables.table_selection import TableKeys
from graphflow.parallel.sharding.emission.initial_parts import initial_part
from graphflow.parallel.sharding.emission.sharded_graph import ShardedVariable
from graphflow.parallel.sharding.propagation.propagation import is_slot
from graphflow.parallel.sharding.propagation.rule_layouts import match_tensors
from graphflow.parallel.tables.row_updates import readers_of

SERVER = "server"
"""The mesh axis of the servers of tables."""


def make_pieces(
    node: Node, name: str, ranges: RowRanges, devices: Sequence[DeviceName]
) -> ShardedVariable:
    """Return the pieces of a table, or of a slot of it, one at each server.

    Args:
        node: the variable.
        name: its name.
        ranges: the servers of its rows.
        devices: the devices of the servers.
    """
    shared: dict[Node, SharedInitial] = {}
    nodes, every = [], []
    whole_spans = tuple(Span(0, int(size)) for size in node.specs[0].shape)
    for server, device in enumerate(devices):
        rows = Span(0, ranges.sizes[server], ranges=ranges.bounds_of(server))
        spans = (rows, *whole_spans[1:])
        shape = tuple(span.size for span in spans)
        with origin_scope(node, "", device):
            tensor: Tensor = REGISTRY["variable"](
                initial=initial_part(node, shape, spans, shared),
                trainable=node.attrs["trainable"], shape=shape, dtype=node.attrs["dtype"],
                named=False, name=f"{name}@server={server}",
            )  # fmt: skip
        nodes.append(tensor.node)
        every.append(spans)
    layout = whole(len(whole_spans)).with_dim(0, AxisSplit((SERVER,), ranges=ranges))
    return ShardedVariable(tuple(nodes), tuple(every), layout, {SERVER: len(devices)})


def ranges_of(
    node: Node, name: str, known: Mapping[Node, ShardedVariable], servers: int
) -> RowRanges:
    """Return the servers of a table's rows: those that it has, or those of the ring.

    Raises:
        ShardingError: the table was laid out by another strategy; it has fewer rows than servers.
    """
    pieces = known.get(node)
    if pieces is None:
        return ring_ranges(name, int(node.specs[0].shape[0]), servers)
    ranges = pieces.ranges
    if ranges is None or ranges.count != servers or list(pieces.mesh) != [SERVER]:
        raise ShardingError(
            f"variable {node.name!r} (made at {node.location}) lies as a step with another "
            f"strategy left it, and this one keeps its rows on {servers} servers; train it by one "
            "strategy in a session, and go on from a checkpoint in another session"
        )
    return ranges


def choose_read_tables(graph: Graph, keys: TableKeys) -> list[Node]:
    """Return the tables that keys name in a graph that does not train: variables that nodes read by
    ids only."""
    named = {graph.names[node]: node.outputs[0] for node in graph.variables}
    readers = readers_of(graph)
    found: dict[Node, None] = {}
    for key in keys:
        for tensor in match_tensors(graph, key, named).values():
            users = readers.get(tensor, ())
            by_ids = (u is not None and u.op.name == "take" and not u.attrs["axis"] for u in users)
            if users and all(by_ids) and not is_slot(tensor.node) and tensor.ndim:
                found[tensor.node] = None
    return [*found]


def look_up(node: Node, pieces: ShardedVariable, ids: Tensor) -> Tensor:
    """Write a lookup in pieces of a table: servers read rows, and the reader puts them together."""
    ranges = pieces.ranges
    assert ranges is not None
    starts, sizes = ranges.starts, piece_sizes(ids.size, ranges.starts)
    inputs = (ids, as_tensor(ranges.first_positions))
    attrs = {"starts": starts, "sizes": sizes, "width": ranges.width}
    inverse, *others = make_node(REGISTRY["route_rows"], inputs, attrs).outputs
    numbers, keys = others[: len(sizes)], others[len(sizes) :]
    parts = []
    for server, piece in enumerate(pieces.nodes):
        used = {"lookups": ids.size, "rows": ranges.rows, "piece": ranges.sizes[server]}
        sent = make_node(REGISTRY["used_rows"], (keys[server], numbers[server]), used).outputs[0]
        with origin_scope(node, "", piece.device):
            read = REGISTRY["read_rows"](piece.outputs[0], sent), REGISTRY["count_keys"](sent)
            parts.append(make_node(REGISTRY["used_rows"], read, used).outputs[0])
    rows = make_node(REGISTRY["place_rows"], (inverse, *numbers, *parts), {}, node.name).outputs[0]
    shape = (*ids.shape, *node.specs[0].shape[ids.ndim :])
    made: Tensor = FUNCTIONS["reshape"](rows, shape)
    return made


def gather_whole(pieces: ShardedVariable) -> Tensor:
    """Return the whole of a variable that lies in pieces."""
    ranges = pieces.ranges
    assert ranges is not None
    every = FUNCTIONS["concat"]([piece.outputs[0] for piece in pieces.nodes], 0)
    made: Tensor = FUNCTIONS["take"](every, ranges.positions, 0)
    return made


def assign_pieces(pieces: ShardedVariable, value: Tensor) -> list[Tensor]:
    """Return the assignments of a whole value to the pieces of a variable."""
    ranges = pieces.ranges
    assert ranges is not None
    made = []
    for server, piece in enumerate(pieces.nodes):
        with origin_scope(piece, "", piece.device):
            own = FUNCTIONS["take"](value, ranges.rows_of(server), 0)
            made.append(REGISTRY["assign"](piece.outputs[0], own))
    return made


__all__ = [
    "SERVER", "assign_pieces", "choose_read_tables", "gather_whole", "look_up", "make_pieces",
    "ranges_of",
]  # fmt: skip

"""Partitions as a msgpack header and raw buffers, and back, verified.

A graph from the wire names registered ops only. Every node goes through its op's shape rule again.
Inputs come before consumers, so there is no cycle. Counts and bytes are limited before anything is
built. Not every loop is known to end: one that cannot is refused, any other ends by its step's
deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import msgpack
import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import (
    GraphError,
    GraphflowError,
    GraphLimitError,
    ProtocolError,
)
from graphflow.frontend.initial_shards import InitialShard
from graphflow.init import Initializer
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Body, Graph
from graphflow.ir.op import REGISTRY, Location, Node, Tensor
from graphflow.ir.spec import Dim, TensorSpec
from graphflow.ops.communication.send_recv import edges_of
from graphflow.ops.control_flow.turn_rules import TurnRules
from graphflow.ops.host_calls.host_call import HostFunction
from graphflow.placement.clusters.machine.host_facts import host_memory
from graphflow.runtime.partitioning.check_modes import CHECKS
from graphflow.runtime.partitioning.partition import SPECIALISATION_LIMITS, Partition
from graphflow.runtime.wire.attribute_reader import (
    check_index,
    check_shape,
    check_text,
    unpack_attribute,
)
from graphflow.runtime.wire.frame_codec import BUDGET
from graphflow.runtime.wire.graph_limits import GraphLimits
from graphflow.runtime.wire.loop_limit import LoopLimit

MAX_DEPTH = 32  # of nested bodies

_NODE_BYTES = 256  # of a header for each node; its source location takes most
_NODE_PARTS = 12  # lists and maps of a header for each node
_FREE_PARTS = 100_000

Header = dict[str, Any]
LIMITS = GraphLimits()


def encode(partitions: Sequence[Partition]) -> tuple[bytes, list[np.ndarray[Any, Any]]]:
    """Return the partitions of one worker as a header and the arrays it refers to.

    Raises:
        GraphLimitError: There are more nodes than workers take by default, or larger constants than
            may be under way at a time.
        GraphError: An attribute cannot be sent.
    """
    for each in partitions:
        if len(each.graph.nodes) > LIMITS.nodes:
            raise GraphLimitError(
                f"the part of {each.device} has {len(each.graph.nodes)} nodes, and workers take "
                f"{LIMITS.nodes}; put what repeats into gf.function, gf.scan or gf.while_loop"
            )
    buffers: list[np.ndarray[Any, Any]] = []
    header = [_encode_partition(p, buffers) for p in partitions]
    nbytes = sum(buffer.nbytes for buffer in buffers)
    if nbytes > BUDGET:
        raise GraphLimitError(
            f"the constants of a graph take {nbytes / 1e9:.3g} GB, and {BUDGET / 1e9:.3g} GB may "
            "be under way to a worker; feed them, or make them variables and set these"
        )
    return msgpack.packb(header), buffers


def _encode_partition(partition: Partition, buffers: list[np.ndarray[Any, Any]]) -> Header:
    graph = partition.graph
    reference = _tensor_numbering(graph.nodes)
    return {
        "device": partition.device,
        "nodes": _encode_nodes(graph.nodes, graph.names, reference, buffers),
        "outputs": [reference(t) for t in graph.outputs],
        "feeds": list(partition.feeds),
        "fetches": {name: reference(t) for name, t in partition.fetches.items()},
        "checks": partition.checks,
        "forms": partition.max_specialisations,
        "flush_denormals": partition.flush_denormals,
    }


def _tensor_numbering(nodes: Sequence[Node]) -> Callable[[Tensor], list[int]]:
    """Return a function from tensors to pairs of their node's number and their index."""
    number = {node: i for i, node in enumerate(nodes)}
    return lambda tensor: [number[tensor.node], tensor.index]


def _encode_nodes(
    nodes: Sequence[Node],
    names: Mapping[Node, str],
    reference: Callable[[Tensor], list[int]],
    buffers: list[np.ndarray[Any, Any]],
) -> list[Any]:
    return [
        [
            node.op.name,
            [reference(t) for t in node.inputs],
            {name: pack_attribute(value, buffers) for name, value in node.attrs.items()},
            node.name,
            names.get(node, node.name),
            [node.location.file, node.location.line],
        ]
        for node in nodes
    ]


def _encode_body(body: Body, buffers: list[np.ndarray[Any, Any]]) -> Header:
    """Return the header of a body. Parameters that its graph does not need are nodes, too."""
    nodes = tuple(dict.fromkeys((*body.inputs, *body.graph.nodes)))
    reference = _tensor_numbering(nodes)
    return {
        "nodes": _encode_nodes(nodes, body.graph.names, reference, buffers),
        "inputs": [reference(node.outputs[0])[0] for node in body.inputs],
        "outputs": [reference(t) for t in body.graph.outputs],
        "results": body.results,
    }


def pack_attribute(value: Any, buffers: list[np.ndarray[Any, Any]]) -> Any:
    """Return an attribute as plain data; arrays go to `buffers`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, InitialShard):
        value = value()
    if isinstance(value, np.ndarray):
        buffers.append(value)
        return {"array": len(buffers) - 1}
    if isinstance(value, tuple):
        return [pack_attribute(v, buffers) for v in value]
    if isinstance(value, Dim):
        terms = [[[pack_attribute(a, buffers) for a in m], c] for m, c in value.terms.items()]
        return {"dim": terms}
    if isinstance(value, Initializer):
        return {
            "init": [
                value.kind, list(value.shape), value.dtype, value.a, value.b, list(value.stream),
                list(value.whole), [pack_attribute(tuple(s), buffers) for s in value.spans],
            ]
        }  # fmt: skip
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Body):
        return {"body": _encode_body(value, buffers)}
    if isinstance(value, TurnRules):
        return {"turns": [pack_attribute(part, buffers) for part in vars(value).values()]}
    if isinstance(value, HostFunction) and value.import_path is not None:
        return {"host": value.import_path}
    raise GraphError(f"an attribute of type {type(value).__name__} cannot be sent to a worker")


def decode(
    header: bytes, buffers: Sequence[np.ndarray[Any, Any]], limits: GraphLimits = LIMITS
) -> list[Partition]:
    """Return partitions from the wire.

    Raises:
        GraphLimitError: Too many nodes, bytes or iterations, a loop that cannot end, or an op that
            is not registered here.
        ProtocolError: Malformed in any other way.
    """
    budget = host_memory() if limits.nbytes is None else limits.nbytes
    try:
        partitions = [
            _decode_partition(each, _GraphReader(buffers, budget, limits))
            for each in _unpack_header(header, limits.nodes)
        ]
    except ProtocolError:
        raise
    except GraphflowError as error:
        raise ProtocolError(f"a graph from the wire does not verify: {error}") from error
    except Exception as error:  # any error of a shape rule with invalid attributes
        raise ProtocolError(f"malformed graph from the wire: {error!r}") from error
    variables = [node.specs[0].nbytes for p in partitions for node in p.graph.variables]
    _check_bytes("its variables take", sum(variables), budget)
    return partitions


def _unpack_header(header: bytes, nodes: int) -> Any:
    """Return the plain data of a header, with limits on the memory that it takes."""
    if len(header) > nodes * _NODE_BYTES + _FREE_PARTS:
        raise GraphLimitError(
            f"the header of a graph from the wire has {len(header)} bytes; the limit for {nodes} "
            f"nodes is {nodes * _NODE_BYTES + _FREE_PARTS}"
        )
    left = nodes * _NODE_PARTS + _FREE_PARTS

    def count_part(part: list[Any]) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise GraphLimitError(f"the header of a graph for {nodes} nodes has too many parts")
        return part

    def build_map(pairs: list[tuple[Any, Any]]) -> Any:
        made = dict(count_part(pairs))
        if len(made) != len(pairs):
            raise ProtocolError("a map in a graph from the wire holds a key twice")
        return made

    try:
        return msgpack.unpackb(
            header, strict_map_key=True, max_ext_len=0, max_bin_len=0,
            max_array_len=max(nodes, _FREE_PARTS), max_map_len=_FREE_PARTS,
            list_hook=count_part, object_pairs_hook=build_map,
        )  # fmt: skip
    except ValueError as error:
        too_long = "exceeds max_array_len" in str(error)
        kind = GraphLimitError if too_long else ProtocolError
        raise kind(f"malformed graph from the wire: {error!r}") from error


def _check_bytes(what: str, nbytes: Any, budget: int) -> None:
    if isinstance(nbytes, int) and nbytes > budget:
        raise GraphLimitError(
            f"a graph from the wire is refused: {what} {nbytes / 1e9:.3g} GB, the limit is "
            f"{budget / 1e9:.3g} GB; use more workers"
        )


def _decode_partition(header: Header, wire: _GraphReader) -> Partition:
    device = wire.device = DeviceName.parse(header["device"])
    nodes, names = wire.read_nodes(header["nodes"])
    wire.loops.count_iterations(nodes)
    outputs = [_resolve_tensor(nodes, reference) for reference in header["outputs"]]
    fetches = {check_text(name): _resolve_tensor(nodes, r) for name, r in header["fetches"].items()}
    feeds = tuple(map(check_text, header["feeds"]))
    graph = Graph(outputs, names).verify()
    if not {t.node for t in fetches.values()} <= set(graph.nodes):
        raise ProtocolError("a graph from the wire fetches what its outputs do not need")
    if sorted(feeds) != sorted(graph.names[node] for node in graph.placeholders):
        raise ProtocolError("the feeds of a graph from the wire are not its placeholders")
    if header["checks"] not in CHECKS:
        raise ProtocolError(f"a graph from the wire asks for unknown checks {header['checks']!r}")
    forms = header["forms"]
    if type(forms) is not int or forms not in SPECIALISATION_LIMITS:
        raise ProtocolError(
            f"a graph from the wire is to be kept for {forms!r} combinations of sizes; they are "
            f"{SPECIALISATION_LIMITS[0]} to {SPECIALISATION_LIMITS[-1]}"
        )
    flush = header["flush_denormals"]
    if not isinstance(flush, bool):
        raise ProtocolError(f"a graph from the wire has flush_denormals {flush!r}, no bool")
    return Partition(str(device), graph, feeds, fetches, header["checks"], forms, flush)


def _resolve_tensor(nodes: Sequence[Node], reference: Sequence[int]) -> Tensor:
    node, output = reference
    if check_index(node) >= len(nodes):
        raise GraphLimitError(
            f"a graph from the wire refers to node {node} before it, or without it: a cycle?"
        )
    return nodes[check_index(node)].outputs[check_index(output)]


@dataclass
class _GraphReader:
    """Reads nodes from the wire.

    Attributes:
        buffers: The arrays that attributes refer to.
        budget: Bytes that any one tensor may take.
        limits: On nodes and iterations.
        device: On which the nodes run.
        count: Nodes so far, those of bodies included.
        depth: Of the body that is being read.
        loops: Counts the iterations of the loops so far.
    """

    buffers: Sequence[np.ndarray[Any, Any]]
    budget: int
    limits: GraphLimits
    device: DeviceName = field(default_factory=DeviceName)
    count: int = 0
    depth: int = 0

    def __post_init__(self) -> None:
        self.loops = LoopLimit(self.limits.iterations)

    def read_nodes(self, entries: Sequence[Any]) -> tuple[list[Node], dict[Node, str]]:
        """Return the nodes of some entries, and their names."""
        self.count += len(entries)
        if self.count > self.limits.nodes or self.depth > MAX_DEPTH:
            raise GraphLimitError(
                f"a graph from the wire has over {self.limits.nodes} nodes, or bodies {MAX_DEPTH} "
                "deep"
            )
        nodes: list[Node] = []
        names: dict[Node, str] = {}
        for entry in entries:
            node = self._read_node(entry, nodes)
            _check_node(node, self.budget)
            names[node] = check_text(entry[4])
            nodes.append(node)
        return nodes, names

    def _read_node(self, entry: Sequence[Any], nodes: Sequence[Node]) -> Node:
        op_name, references, attrs, name, _, (file, line) = entry
        if "\0" in check_text(file):  # it becomes part of the file name of generated code
            raise ProtocolError("a place in a graph from the wire is no file's name")
        if op_name not in REGISTRY:
            raise GraphLimitError(
                f"the graph names an op that is not registered here: {op_name!r}; if it is your "
                "own, give its module to the session, gf.Session(cluster, ops=[...])"
            )
        op = REGISTRY[op_name]
        inputs = tuple(_resolve_tensor(nodes, reference) for reference in references)
        values = {check_text(key): self._read_attribute(value) for key, value in attrs.items()}
        specs = op.infer(*(t.spec for t in inputs), **values)
        return Node(
            op,
            inputs,
            values,
            (specs,) if isinstance(specs, TensorSpec) else specs,
            name=check_text(name),
            device=self.device,
            location=Location(check_text(file), int(line)),
        )

    def _read_attribute(self, value: Any) -> Any:
        if isinstance(value, Mapping) and tuple(value) == ("body",):
            return self._read_body(value["body"])
        return unpack_attribute(value, self.buffers)

    def _read_body(self, header: Header) -> Body:
        """Return a body: a graph of parameters, which holds no state."""
        self.depth += 1
        nodes, names = self.read_nodes(header["nodes"])
        self.depth -= 1
        graph = Graph([_resolve_tensor(nodes, reference) for reference in header["outputs"]], names)
        inputs = tuple(nodes[check_index(number)] for number in header["inputs"])
        results = check_index(header["results"])
        stateful = [n for n in nodes if n.op.name in ("variable", "assign", "group")]
        if stateful or results > len(graph.outputs):
            raise ProtocolError("a body from the wire holds state, or lacks results")
        if len(set(inputs)) < len(inputs) or not set(graph.placeholders) <= set(inputs):
            raise ProtocolError("a body from the wire does not have its placeholders as parameters")
        if any(node.op.name != "placeholder" for node in inputs):
            raise ProtocolError("a parameter of a body from the wire is no placeholder")
        body = Body(inputs, graph.verify(), results)
        self.loops.add_body(body, nodes)
        return body


def _check_node(node: Node, budget: int) -> None:
    """Check what the executor takes for granted and no shape rule sees."""
    for spec in node.specs:
        check_shape(spec.shape)
        _check_bytes(f"{node.op.name} {node.name!r} takes", spec.nbytes, budget)
    match node.op.name:
        case "variable":
            initial = node.attrs["initial"]
            if not isinstance(initial, np.ndarray | Initializer) or (
                TensorSpec(tuple(initial.shape), np.dtype(initial.dtype)) != node.specs[0]
            ):
                raise ProtocolError(f"{node} from the wire does not begin as {node.specs[0]}")
        case "assign":
            if node.inputs[0].node.op.name != "variable":
                raise ProtocolError(f"{node} from the wire assigns to what is no variable")
        case "send" | "recv" | "send_where" | "recv_any":
            for edge, end in edges_of(node).items():
                DeviceName.parse(end)
                check_index(edge)

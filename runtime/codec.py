"""Codec: partitions as a msgpack header and raw buffers, and back, verified.

A graph from the wire names registered ops only; every node goes through its op's shape rule again,
inputs come before consumers (so there is no cycle), and counts and bytes are limited before
anything is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from graphflow.device import DeviceName
from graphflow.errors import GraphError, GraphflowError, GraphLimitError, ProtocolError
from graphflow.graph import Graph
from graphflow.init import Initializer
from graphflow.op import REGISTRY, Location, Node, Tensor
from graphflow.placement.host import host_memory
from graphflow.runtime.partition import Partition
from graphflow.spec import Dim, TensorSpec, as_dtype

MAX_NODES = 1_000_000
MAX_RANK = 64  # numpy's
MAX_LENGTH = 4096  # entries of a tuple
MAX_TERMS = 256  # of the number of elements of a tensor, a polynomial in the sizes of the feeds

Header = dict[str, Any]


def encode(partitions: Sequence[Partition]) -> tuple[bytes, list[np.ndarray[Any, Any]]]:
    """The partitions of one worker as a header and the arrays it refers to."""
    buffers: list[np.ndarray[Any, Any]] = []
    header = [_encode_partition(p, buffers) for p in partitions]
    return msgpack.packb(header), buffers


def _encode_partition(partition: Partition, buffers: list[np.ndarray[Any, Any]]) -> Header:
    number = {node: i for i, node in enumerate(partition.graph.nodes)}

    def reference(tensor: Tensor) -> list[int]:
        return [number[tensor.node], tensor.index]

    nodes = [
        [
            node.op.name,
            [reference(t) for t in node.inputs],
            {name: _pack(value, buffers) for name, value in node.attrs.items()},
            node.name,
            partition.graph.names[node],
            [node.location.file, node.location.line],
        ]
        for node in partition.graph.nodes
    ]
    return {
        "device": partition.device,
        "nodes": nodes,
        "outputs": [reference(t) for t in partition.graph.outputs],
        "feeds": list(partition.feeds),
        "fetches": {name: reference(t) for name, t in partition.fetches.items()},
    }


def _pack(value: Any, buffers: list[np.ndarray[Any, Any]]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, np.ndarray):
        buffers.append(value)
        return {"array": len(buffers) - 1}
    if isinstance(value, tuple):
        return [_pack(v, buffers) for v in value]
    if isinstance(value, Dim):
        terms = [[[_pack(a, buffers) for a in m], c] for m, c in value.terms.items()]
        return {"dim": terms}
    if isinstance(value, Initializer):
        return {
            "init": [
                value.kind, list(value.shape), value.dtype, value.a, value.b, list(value.stream)
            ]
        }  # fmt: skip
    if isinstance(value, np.generic):
        return value.item()
    raise GraphError(f"an attribute of type {type(value).__name__} cannot be sent to a worker")


def decode(
    header: bytes, buffers: Sequence[np.ndarray[Any, Any]], budget: int | None = None
) -> list[Partition]:
    """Partitions from the wire.

    Args:
        budget: bytes that the variables may take together, or any one tensor whose size is known;
            default: the memory of this host.

    Raises:
        GraphLimitError: too many nodes or bytes, or an op that is not registered here.
        ProtocolError: malformed in any other way.
    """
    budget = host_memory() if budget is None else budget
    try:
        partitions = [_decode_partition(each, buffers, budget) for each in _unpacked(header)]
    except ProtocolError:
        raise
    except GraphflowError as error:
        raise ProtocolError(f"a graph from the wire does not verify: {error}") from error
    except Exception as error:  # whatever a shape rule makes of attributes nobody built
        raise ProtocolError(f"malformed graph from the wire: {error!r}") from error
    variables = [node.specs[0].nbytes for p in partitions for node in p.graph.variables]
    _check_bytes("its variables take", sum(variables), budget)
    return partitions


def _unpacked(header: bytes) -> Any:
    try:
        return msgpack.unpackb(
            header, strict_map_key=True, max_ext_len=0, max_array_len=MAX_NODES, max_bin_len=0
        )
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


def _decode_partition(
    header: Header, buffers: Sequence[np.ndarray[Any, Any]], budget: int
) -> Partition:
    if len(header["nodes"]) > MAX_NODES:
        raise GraphLimitError(
            f"a graph of {len(header['nodes'])} nodes exceeds the limit of {MAX_NODES}"
        )
    device = DeviceName.parse(header["device"])
    nodes: list[Node] = []
    names: dict[Node, str] = {}

    def tensor(reference: Sequence[int]) -> Tensor:
        node, output = reference
        return nodes[_index(node)].outputs[_index(output)]

    for entry in header["nodes"]:
        node = _decode_node(entry, tensor, device, buffers)
        _check_node(node, budget)
        names[node] = _text(entry[4])
        nodes.append(node)
    outputs = [tensor(reference) for reference in header["outputs"]]
    fetches = {_text(name): tensor(r) for name, r in header["fetches"].items()}
    feeds = tuple(map(_text, header["feeds"]))
    graph = Graph(outputs, names).verify()
    if not {t.node for t in fetches.values()} <= set(graph.nodes):
        raise ProtocolError("a graph from the wire fetches what its outputs do not need")
    if sorted(feeds) != sorted(graph.names[node] for node in graph.placeholders):
        raise ProtocolError("the feeds of a graph from the wire are not its placeholders")
    return Partition(str(device), graph, feeds, fetches)


def _decode_node(
    entry: Sequence[Any], tensor: Any, device: DeviceName, buffers: Sequence[np.ndarray[Any, Any]]
) -> Node:
    op_name, references, attrs, name, _, (file, line) = entry
    if op_name not in REGISTRY:
        raise GraphLimitError(f"the graph names an op that is not registered here: {op_name!r}")
    op = REGISTRY[op_name]
    inputs = tuple(tensor(reference) for reference in references)
    values = {_text(key): _unpack(value, buffers) for key, value in attrs.items()}
    specs = op.infer(*(t.spec for t in inputs), **values)
    return Node(
        op,
        inputs,
        values,
        (specs,) if isinstance(specs, TensorSpec) else specs,
        name=_text(name),
        device=device,
        location=Location(_text(file), int(line)),
    )


def _check_node(node: Node, budget: int) -> None:
    """What the executor takes for granted, and no shape rule sees."""
    for spec in node.specs:
        _check_shape(spec.shape)
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
        case "send" | "recv":
            DeviceName.parse(node.attrs["target" if node.op.name == "send" else "source"])
            _index(node.attrs["edge"])


def _check_shape(shape: Sequence[Any]) -> None:
    """Refuse what is no shape, or one whose elements would take long to count."""
    for size in shape:
        if not isinstance(size, Dim):
            _index(size.item() if isinstance(size, np.integer) else size)
    terms = math.prod(len(size.terms) for size in shape if isinstance(size, Dim))
    if len(shape) > MAX_RANK or terms > MAX_TERMS:
        raise GraphLimitError(
            f"a shape from the wire has {len(shape)} axes and {terms} terms; "
            f"the limits are {MAX_RANK} and {MAX_TERMS}"
        )


def _unpack(value: Any, buffers: Sequence[np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, list):
        if len(value) > MAX_LENGTH:
            raise GraphLimitError(f"an attribute from the wire has {len(value)} entries")
        values = tuple(_unpack(v, buffers) for v in value)
        _check_shape([v for v in values if isinstance(v, Dim)])
        return values
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "array":
            array = buffers[_index(content)]
            as_dtype(array.dtype)
            return array
        case "dim":
            return _dim(content)
        case "init":
            return _initializer(*content)
        case "complex":
            return complex(*map(float, content))
    raise ProtocolError(f"an attribute from the wire is of an unknown kind {kind!r}")


def _dim(content: Any) -> Dim:
    terms = {tuple(map(_atom, monomial)): _integer(factor) for monomial, factor in content}
    if len(terms) > MAX_TERMS or any(len(monomial) > MAX_RANK for monomial in terms):
        raise GraphLimitError(f"a size from the wire has {len(terms)} terms")
    return Dim(terms)


def _atom(content: Any) -> Any:
    if isinstance(content, str):
        return content
    function, *operands = content
    if function not in ("floordiv", "min", "max") or len(operands) != 2:
        raise ProtocolError(f"a size from the wire is made with {function!r}")
    return (
        function,
        *(_dim(o["dim"]) if isinstance(o, Mapping) else _integer(o) for o in operands),
    )


def _initializer(
    kind: str, shape: Sequence[int], dtype: str, a: float, b: float, stream: Sequence[int]
) -> Initializer:
    seed, number = map(_index, stream)
    if kind not in ("constant", "uniform", "normal") or not math.isfinite(b - a):
        raise ProtocolError(f"an initializer from the wire is {kind!r} of {a!r} and {b!r}")
    sizes = tuple(map(_index, shape))
    return Initializer(kind, sizes, as_dtype(dtype).name, float(a), float(b), (seed, number))


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ProtocolError(f"a number in a graph from the wire is no integer: {value!r}")
    return value


def _index(value: Any) -> int:
    if _integer(value) < 0:
        raise ProtocolError(f"a number in a graph from the wire is negative: {value}")
    return value  # type: ignore[no-any-return]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"a name in a graph from the wire is no text: {value!r}")
    return value

"""Codec: partitions as a msgpack header and raw buffers, and back, verified.

A graph from the wire names registered ops only; every node goes through its op's shape rule again,
inputs come before consumers (so there is no cycle), and counts and bytes are limited before
anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from graphflow.device import DeviceName
from graphflow.errors import DeviceError, GraphError, GraphLimitError, ProtocolError
from graphflow.graph import Graph
from graphflow.init import Initializer
from graphflow.op import REGISTRY, Location, Node, Tensor
from graphflow.runtime.partition import Partition
from graphflow.spec import Dim, TensorSpec, as_dtype

MAX_NODES = 1_000_000
MAX_RANK = 32

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


def decode(header: bytes, buffers: Sequence[np.ndarray[Any, Any]]) -> list[Partition]:
    """Partitions from the wire.

    Raises:
        GraphLimitError: too many nodes, or an op that is not registered here.
        ProtocolError: malformed in any other way.
    """
    try:
        message = msgpack.unpackb(
            header, strict_map_key=True, max_ext_len=0, max_array_len=MAX_NODES, max_bin_len=0
        )
        return [_decode_partition(each, buffers) for each in message]
    except ProtocolError:
        raise
    except GraphError as error:
        raise ProtocolError(f"a graph from the wire does not verify: {error}") from error
    except DeviceError as error:
        raise ProtocolError(f"a graph from the wire names a wrong device: {error}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"malformed graph from the wire: {error!r}") from error
    except msgpack.UnpackException as error:
        raise ProtocolError(f"malformed graph from the wire: {error!r}") from error


def _decode_partition(header: Header, buffers: Sequence[np.ndarray[Any, Any]]) -> Partition:
    if len(header["nodes"]) > MAX_NODES:
        raise GraphLimitError(
            f"a graph of {len(header['nodes'])} nodes exceeds the limit of {MAX_NODES}"
        )
    device = DeviceName.parse(header["device"])
    nodes: list[Node] = []
    names: dict[Node, str] = {}

    def tensor(reference: Sequence[int]) -> Tensor:
        node, output = reference
        if node < 0 or output < 0:
            raise ProtocolError("a reference in a graph from the wire is negative")
        return nodes[node].outputs[output]

    for entry in header["nodes"]:
        node = _decode_node(entry, tensor, device, buffers)
        names[node] = _text(entry[4])
        nodes.append(node)
    outputs = [tensor(reference) for reference in header["outputs"]]
    fetches = {_text(name): tensor(r) for name, r in header["fetches"].items()}
    graph = Graph(outputs, names).verify()
    return Partition(str(device), graph, tuple(map(_text, header["feeds"])), fetches)


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


def _unpack(value: Any, buffers: Sequence[np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, list):
        return tuple(_unpack(v, buffers) for v in value)
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return buffers[content]
    if kind == "dim":
        return Dim({tuple(_unpack(a, buffers) for a in m): int(c) for m, c in content})
    if kind == "init":
        shape = tuple(int(s) for s in content[1])
        if len(shape) > MAX_RANK or any(s < 0 for s in shape):
            raise ProtocolError(f"an initializer from the wire has the shape {shape}")
        seed, number = content[5]
        return Initializer(
            str(content[0]), shape, as_dtype(content[2]).name, float(content[3]),
            float(content[4]), (int(seed), int(number)),
        )  # fmt: skip
    raise ProtocolError(f"an attribute from the wire is of an unknown kind {kind!r}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"a name in a graph from the wire is no text: {value!r}")
    return value

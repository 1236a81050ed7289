"""Checks of a model before anything is built from it: opsets, names, order, functions."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, defs

from graphflow.errors import OnnxError
from graphflow.onnx.loading.reading.domains import normal_domain

MAX_DEPTH = 16
"""The deepest nesting of subgraphs."""


def check_opsets(model: ModelProto, file: str) -> dict[str, int]:
    """Check and return the opset version of each domain that a model imports.

    Raises:
        OnnxError: a domain of a node is not imported, or imported as two versions, or the version
            is newer than the installed onnx supports.
    """
    opsets: dict[str, int] = {}
    for entry in model.opset_import:
        domain = normal_domain(entry.domain)
        if opsets.get(domain, entry.version) != entry.version:
            raise OnnxError(
                f"{file}: imports opset {domain or 'ai.onnx'!r} as {opsets[domain]} and as "
                f"{entry.version}; it may be one of them only"
            )
        opsets[domain] = entry.version
    if not opsets and model.ir_version < 3:
        opsets[""] = 1  # before IR version 3 there was one opset only
    newest = defs.onnx_opset_version()
    if "" in opsets and not 1 <= opsets[""] <= newest:
        raise OnnxError(
            f"{file}: written for opset {opsets['']}, the installed onnx knows 1 to {newest}; "
            "upgrade onnx, or export the model for an older opset"
        )
    for node in _all_nodes(model.graph, file):
        if normal_domain(node.domain) not in opsets:
            raise OnnxError(
                f"{file}: uses {node.op_type} of domain {node.domain or 'ai.onnx'!r}, but imports "
                f"no opset of it"
            )
    return opsets


def _all_nodes(graph: GraphProto, file: str, depth: int = 0) -> Iterable[NodeProto]:
    if depth > MAX_DEPTH:
        raise OnnxError(f"{file}: subgraphs are nested more than {MAX_DEPTH} deep")
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _all_nodes(attribute.g, file, depth + 1)


def check_names(graph: GraphProto, file: str, outer: frozenset[str] = frozenset()) -> None:
    """Check that each name is made once, and before it is read.

    Raises:
        OnnxError: the message names the node, and says if the graph has a cycle.
    """
    made: set[str] = set()
    for entry in graph.input:
        _add_name(made, entry.name, f"{file}: two inputs are named {entry.name!r}")
    initial = [
        *(t.name for t in graph.initializer),
        *(sparse_name(t) for t in graph.sparse_initializer),
    ]
    initialized: set[str] = set()
    for name in initial:
        _add_name(initialized, name, f"{file}: two initializers are named {name!r}")
    made |= initialized
    later = {name for node in graph.node for name in node.output if name}
    for index, node in enumerate(graph.node):
        label = f"{node.op_type} {node.name!r} (node {index + 1} of {file})"
        for name in node.input:
            if name and name not in made and name not in outer:
                raise OnnxError(
                    f"{label} reads {name!r}, {_missing_name_reason(name, later, graph)}"
                )
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                check_names(attribute.g, file, outer | made)
        for name in node.output:
            if name:
                _add_name(made, name, f"{label} makes {name!r}, which something before it makes")
    names = [entry.name for entry in graph.output]
    if len(set(names)) != len(names):
        raise OnnxError(f"{file}: two outputs have one name: {', '.join(sorted(names))}")
    for entry in graph.output:
        if entry.name not in made and entry.name not in outer:
            raise OnnxError(f"{file}: nothing makes the output {entry.name!r}")


def _add_name(made: set[str], name: str, error: str) -> None:
    if name in made:
        raise OnnxError(f"{error}; every name is made once")
    made.add(name)


def _missing_name_reason(name: str, later: set[str], graph: GraphProto) -> str:
    if name not in later:
        return "which nothing makes"
    if _has_cycle(graph):
        return "which is made from its own output: the graph has a cycle"
    return "which is made after it: nodes have to be in topological order"


def _has_cycle(graph: GraphProto) -> bool:
    maker = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    waits = [{maker[n] for n in node.input if n in maker} for node in graph.node]
    readers: dict[int, list[int]] = {}
    for i, sources in enumerate(waits):
        for source in sources:
            readers.setdefault(source, []).append(i)
    ready = [i for i, sources in enumerate(waits) if not sources]
    done = 0
    while ready:
        i = ready.pop()
        done += 1
        for reader in readers.get(i, ()):
            waits[reader].discard(i)
            if not waits[reader]:
                ready.append(reader)
    return done < len(waits)


def check_functions(model: ModelProto, file: str) -> None:
    """Check that the functions of a model are defined once and do not call each other in a cycle.

    Raises:
        OnnxError: a function is defined twice, or contains itself.
    """
    calls: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for function in model.functions:
        key = (normal_domain(function.domain), function.name)
        if key in calls:
            raise OnnxError(f"{file}: function {function.name!r} is defined twice")
        calls[key] = {(normal_domain(node.domain), node.op_type) for node in function.node}
    left = dict(calls)
    while left:
        leaves = [key for key, called in left.items() if not called & left.keys()]
        if not leaves:
            names = ", ".join(sorted(name for _, name in left))
            raise OnnxError(f"{file}: functions contain themselves: {names}")
        for key in leaves:
            del left[key]


def sparse_name(tensor: SparseTensorProto) -> str:
    """Return the name of a sparse initializer, which is that of its values."""
    return str(tensor.values.name)

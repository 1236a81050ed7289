"""The importer: translate ONNX nodes to graphs, in passes that end where a value is missing.

One pass gives an `ImportedSegment`: a graph, and the reason why the pass ended. A model without
host nodes is one segment. Otherwise the pass ends at a host node, or at a value that decides
shapes. That node or value is computed when the model runs, and the next pass begins there
(`segmented_program.py` drives this).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto

from graphflow.errors import GraphflowError, OnnxError, UnsupportedOnnxError
from graphflow.frontend.builders import make_variable
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Location, Tensor, source_scope
from graphflow.ir.spec import Dim, nbytes
from graphflow.onnx.loading.host import host_nodes as host
from graphflow.onnx.loading.reading.domains import normal_domain
from graphflow.onnx.loading.reading.reader import tensor_to_array
from graphflow.onnx.loading.reading.value_kinds import (
    Array,
    Fixed,
    Known,
    OnHost,
    Value,
    classify,
    make_known,
)
from graphflow.onnx.loading.translation import function_expansion as expansion
from graphflow.onnx.loading.translation.node_call import (
    NeedsShapes,
    NeedsValue,
    NodeCall,
    RunOnHost,
    Signal,
    constant_value,
    has_dim,
)
from graphflow.onnx.loading.translation.operator_registry import handler_of
from graphflow.onnx.loading.translation.segments import (
    ImportedSegment,
    OnnxBody,
    Scope,
    Stop,
    captured_names,
    concrete_value,
)
from graphflow.onnx.loading.translation.shape_folding import fold

_CONTROL = {"If", "Loop", "Scan"}

SMALL = 1024
"""Elements of the largest value that is computed while a model is read."""


class Importer:
    """Translates the nodes of one model, and holds the variables of its weights."""

    def __init__(
        self,
        file: str,
        folder: Path | None = None,
        functions: Mapping[tuple[str, str], OnnxBody] | None = None,
        weights: Mapping[str, bool] | None = None,
        *,
        start_run: Callable[[Importer], host.HostRun],
    ) -> None:
        """Make an importer for the nodes of a file.

        Args:
            weights: the values that become variables; True if training changes them.
            start_run: makes the run in which host nodes are computed while a model is read. (Runs
                import further segments, so their module imports this one.)
        """
        self.file = file
        self._start_run = start_run
        self.folder = folder
        self.functions = dict(functions or {})
        self.weights = dict(weights or {})
        self.variables: dict[str, Tensor] = {}
        self.programs: dict[int, tuple[Any, Any]] = {}  # of subgraphs that run on the host
        self._constants: dict[int, tuple[Known, Tensor]] = {}

    # A pass over nodes ------------------------------------------------------------------------

    def read_segment(
        self, body: OnnxBody, start: int, given: Mapping[str, Value]
    ) -> ImportedSegment:
        """Translate nodes from `start` on, until one needs a value that is missing.

        Raises:
            UnsupportedOnnxError: nodes have no translation; the message lists all of the pass.
            OnnxError: a node is invalid.
        """
        scope = Scope({**body.initializers, **given}, body.opsets, main=body.main)
        inputs = {
            name: value
            for name, value in given.items()
            if isinstance(value, Tensor) and value.node.op.name == "placeholder"
        }
        stop = None
        unsupported: list[str] = []
        missing: set[str] = set()  # outputs of unsupported nodes
        for index in range(start, len(body.nodes)):
            node = body.nodes[index]
            if missing.intersection(node.input):
                missing.update(node.output)
                continue
            try:
                self.read_node(node, scope, index)
            except UnsupportedOnnxError as error:
                unsupported.append(str(error))
                missing.update(node.output)
            except RunOnHost as signal:
                stop = Stop("host", index, str(signal), sized=node.op_type in _CONTROL)
            except NeedsShapes as signal:
                stop = Stop("shapes", index, str(signal), sized=True)
            except NeedsValue as signal:
                stop = _value_stop(signal, index, node, scope, inputs)
            if stop is not None:
                break
        if unsupported:
            raise UnsupportedOnnxError("\n".join(dict.fromkeys(unsupported)))
        return ImportedSegment(start, inputs, scope.values, stop, dict(given))

    def read_node(self, node: NodeProto, scope: Scope, index: int) -> None:
        """Translate one node, and enter the values of its outputs in the scope."""
        label = self.label(node, index)
        values: list[Value | None] = []
        for name in node.input:
            value = scope.find(name) if name else None
            if name and value is None:
                raise OnnxError(f"{label} reads {name!r}, which nothing before it makes")
            values.append(value)
        call = NodeCall(node, values, scope, label, self, index)
        where = Location(self.file, index + 1)
        try:
            with source_scope(_node_name(node, index), where):
                outputs = self._translate(call, index)
        except (Signal, OnnxError):
            raise
        except GraphflowError as error:
            if any(_is_symbolic(value) for value in values):
                raise NeedsShapes(f"{label}: {error}") from error
            raise OnnxError(f"{label}: {error}") from error
        except Exception as error:  # invalid attributes cause errors of many types
            raise OnnxError(f"{label}: {type(error).__name__}: {error}") from error
        if len(outputs) < len([name for name in node.output if name]):
            raise OnnxError(f"{label} has {len(node.output)} outputs, {len(outputs)} are known")
        for name, output in zip(node.output, outputs, strict=False):
            if name and output is not None:
                scope.values[name] = self._as_weight(name, output, scope)

    def _as_weight(self, name: str, value: Value, scope: Scope) -> Value:
        """Mark the value of a Constant node as a weight if the user has named it."""
        if name in self.weights and scope.main and isinstance(value, Known):
            return replace(value, parameter=name)
        return value

    def label(self, node: NodeProto, index: int) -> str:
        """Return the name of a node for messages."""
        name = f" {node.name!r}" if node.name else ""
        domain = f"{node.domain}." if normal_domain(node.domain) else ""
        made = ", ".join(node.output)
        return f"{domain}{node.op_type}{name} (node {index + 1} of {self.file}, makes {made})"

    # One node ---------------------------------------------------------------------------------

    def _translate(self, call: NodeCall, index: int) -> list[Value | None]:
        values = [value for value in call.values if value is not None]
        plain = all(isinstance(value, Tensor | Known) for value in values)
        if plain and all(isinstance(value, Known) for value in values):
            folded = fold(call)
            if folded is not None:
                return [folded]
        if host.runs_only_on_host(call):
            return self._run_on_host_now(call, host.host_reason(call))
        key = (normal_domain(call.proto.domain), call.op_type)
        if key in self.functions:
            return expansion.inline_function(self, self.functions[key], call)
        handler = handler_of(*key, call.version)
        body = None
        if handler is None:
            body = expansion.schema_body(call, plain)
        try:
            if not plain and body is None:
                raise RunOnHost(f"{call.op_type} reads a value that is not a tensor")
            if handler is not None:
                outputs = handler(call)
            elif body is not None:
                return expansion.inline_function(self, body, call)
            elif host.can_run_on_host(*key):
                raise RunOnHost(f"{call.op_type} is computed on the host")
            else:
                raise call.unsupported_error(
                    f"there is no translation under opset {call.version}; see docs/models/onnx.md"
                )
        except RunOnHost as signal:
            return self._run_on_host_now(call, str(signal))
        listed = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        return [self._fold_small(output, values) for output in listed]

    def _run_on_host_now(self, call: NodeCall, why: str) -> list[Value | None]:
        """Run a host node now if all its inputs are known; else signal RunOnHost."""
        captured = [call.scope.find(name) for name in captured_names(call.proto)]
        everything = [*call.values, *captured]
        if not all(v is None or isinstance(v, Known | Fixed) for v in everything):
            raise RunOnHost(why)
        if any(isinstance(v, Known) and v.symbolic for v in everything) or host.draws(call):
            raise RunOnHost(why)
        names = captured_names(call.proto)
        outer = {
            n: concrete_value(v) for n, v in zip(names, captured, strict=True) if v is not None
        }
        arguments = [None if v is None else concrete_value(v) for v in call.values]
        node = host.HostNode(call.proto, call.scope.opsets, call.label)
        return [classify(v) for v in host.execute(self._start_run(self), node, arguments, outer)]

    def _fold_small(self, output: Any, inputs: Sequence[Value]) -> Value | None:
        """Convert a translation's result to a value, and compute it if it is small and constant."""
        if output is None or isinstance(output, Known | Fixed | OnHost):
            return output
        if not isinstance(output, Tensor):
            return make_known(output)
        fixed = all(isinstance(v, Known) and v.parameter is None for v in inputs)
        if fixed and output.spec.is_concrete and nbytes(output.spec) <= SMALL * 8:
            array = constant_value(output)
            if array is not None:
                return Known(array, array.dtype)
        return output

    def as_tensor(self, value: Known) -> Tensor:
        """Return the tensor of a known value: a variable for a weight, else a constant."""
        if value.parameter is not None:
            return self.weight_variable(value)
        if value.symbolic:
            return value.tensor()
        entry = self._constants.get(id(value))
        if entry is None:
            constant: Tensor = REGISTRY["constant"](value=_freeze(value.array))
            entry = self._constants[id(value)] = (value, constant)
        return entry[1]

    def weight_variable(self, value: Known) -> Tensor:
        """Return the variable of a weight, made on first use."""
        name = value.parameter or ""
        if name not in self.variables:
            self.variables[name] = make_variable(_freeze(value.array), name, self.weights[name])
        return self.variables[name]

    def expand_schema(self, call: NodeCall) -> list[Value | None]:
        """Translate a node by the function body in ONNX's schema, and return its outputs."""
        body = expansion.schema_body(call, plain=True)
        if body is None:
            raise call.unsupported_error("ONNX's schema has no function body for this use")
        return expansion.inline_function(self, body, call)

    # Subgraphs --------------------------------------------------------------------------------

    def subgraph(self, graph: GraphProto, opsets: Mapping[str, int]) -> OnnxBody:
        """Return a subgraph of If, Loop or Scan as a body."""
        return OnnxBody(
            list(graph.node),
            tuple(i.name for i in graph.input),
            tuple(o.name for o in graph.output),
            opsets,
            {
                init.name: Known(array, array.dtype)
                for init in graph.initializer
                for array in [tensor_to_array(init, self.file, self.folder)]
            },
        )

    def inline(
        self, body: OnnxBody, inputs: Sequence[Value | None], outer: Scope | None, index: int
    ) -> list[Value | None]:
        """Translate a body's nodes into the current graph, and return its outputs."""
        values: dict[str, Value] = dict(body.initializers)
        values.update(
            (name, value)
            for name, value in zip(body.inputs, inputs, strict=False)
            if value is not None
        )
        scope = Scope(values, body.opsets, outer)
        for node in body.nodes:
            absent = _drop_absent_inputs(node, scope, body)
            self.read_node(absent, scope, index)
        return [scope.find(name) if name else None for name in body.outputs]


def _value_stop(
    signal: NeedsValue,
    index: int,
    node: NodeProto,
    scope: Scope,
    inputs: Mapping[str, Tensor],
) -> Stop:
    """Return the stop for a value that is missing: at its name if it has one.

    A value inside a function has none. The pass then stops at an input of the node that looks like
    sizes, and else at the node, which runs on the host.
    """
    nodes = Graph(signal.tensor).nodes
    whole = {name: tensor for name, tensor in inputs.items() if tensor.dtype.kind in "iub"}
    fed = tuple(name for name, tensor in whole.items() if tensor.node in nodes)
    sized = any(map(has_dim, nodes))
    named = [name for name, value in scope.values.items() if value is signal.tensor]
    named += [name for name in node.input if _looks_like_sizes(scope.values.get(name))]
    if not named:
        return Stop("host", index, str(signal), "", fed, sized)
    kind = "input" if named[0] in inputs else "value"
    return Stop(kind, index, str(signal), named[0], fed, sized)


def _looks_like_sizes(value: Value | None) -> bool:
    return isinstance(value, Tensor) and value.dtype.kind in "iu" and value.ndim < 2


def _drop_absent_inputs(node: NodeProto, scope: Scope, body: OnnxBody) -> NodeProto:
    """Empty the input names of a function's node that are parameters without an argument."""
    absent = [n for n in node.input if n in body.inputs and scope.find(n) is None]
    if not absent:
        return node
    copy = NodeProto()
    copy.CopyFrom(node)
    for i, name in enumerate(copy.input):
        if name in absent:
            copy.input[i] = ""
    return copy


def _node_name(node: NodeProto, index: int) -> str:
    return node.name or f"{node.op_type}_{index + 1}"


def _freeze(array: Array) -> Array:
    """Return a read-only array: the array itself if it is read-only, else a copy."""
    if not array.flags.writeable and array.flags.c_contiguous and array.flags.aligned:
        return array
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy


def _is_symbolic(value: Value | None) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(size, Dim) for size in value.shape)
    return isinstance(value, Known) and value.symbolic


__all__ = ["SMALL", "Importer"]

"""Host nodes: ONNX nodes that run on the host, between two graphs.

The output of such a node is no tensor (a sequence, an optional, strings), has a shape that depends
on data, or a dtype that tensors do not have. Control flow whose body holds such nodes runs on the
host, too. host_values.py implements the common ones in numpy. The reference implementation of onnx
runs the rest (strings, images, dtypes of 4 and 8 bits).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from onnx import NodeProto, ValueInfoProto, helper
from onnx.reference import ReferenceEvaluator

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import GraphflowError, OpError
from graphflow.onnx.loading.reading.domains import ML, normal_domain
from graphflow.onnx.loading.reading.value_kinds import classify
from graphflow.onnx.loading.translation.function_expansion import schema_body, with_attributes
from graphflow.onnx.loading.translation.node_call import ImportContext, NodeCall, attribute_value
from graphflow.onnx.loading.translation.operator_registry import handler_of
from graphflow.onnx.loading.translation.segments import OnnxBody, Scope

SHAPE = "the shape of its output depends on data"
SEQUENCE = "sequences and optionals are not tensors"
STRINGS = "strings are not tensors"
RANDOM = "the numbers it draws are those of numpy"

# Operators that always run on the host, and why.
HOST_ONLY: dict[tuple[str, str], str] = {
    **{("", name): SHAPE for name in ("NonZero", "Unique", "Compress", "NonMaxSuppression")},
    ("", "ImageDecoder"): SHAPE,
    ("", "SequenceMap"): SEQUENCE,
    **{
        ("", name): SEQUENCE
        for name in (
            "ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement",
            "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
            "SequenceLength", "SplitToSequence",
        )
    },
    **{
        ("", name): STRINGS
        for name in (
            "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer",
        )
    },
}  # fmt: skip

# Operators that onnx's reference implementation runs.
REFERENCE_OPERATORS = {
    ("", "ImageDecoder"), ("", "RegexFullMatch"), ("", "StringConcat"),
    ("", "StringNormalizer"), ("", "StringSplit"), ("", "TfIdfVectorizer"),
    (ML, "DictVectorizer"),
}  # fmt: skip


@dataclass(frozen=True)
class HostNode:
    """A node that runs on the host, with its opsets and its name for messages."""

    proto: NodeProto
    opsets: Mapping[str, int]
    label: str
    why: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """The domain and the operator."""
        return (normal_domain(self.proto.domain), self.proto.op_type)

    @property
    def version(self) -> int:
        """The opset version of the node's domain."""
        return self.opsets.get(self.key[0], 1)

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute as a Python value."""
        for attribute in self.proto.attribute:
            if attribute.name == name:
                return attribute_value(attribute)
        return default


class BodyProgram(Protocol):
    """A body that runs as a program of its own."""

    body: OnnxBody

    def run(self, run: Any, values: Mapping[str, Any]) -> list[Any]: ...


class HostRun(Protocol):
    """The part of a model's run that host nodes use."""

    @property
    def importer(self) -> ImportContext: ...

    def check(self, what: str | None = None) -> None: ...

    def program_for(self, owner: Any, body: OnnxBody) -> BodyProgram: ...


HostRoutine = Callable[[HostRun, HostNode, Sequence[Any], Mapping[str, Any]], Sequence[Any]]
_ROUTINES: dict[tuple[str, str], HostRoutine] = {}


def host_routine(*names: str, domain: str = "") -> Callable[[HostRoutine], HostRoutine]:
    """Register (run, node, inputs, captured values) -> outputs, all of them plain values."""

    def enter(function: HostRoutine) -> HostRoutine:
        _ROUTINES.update(dict.fromkeys([(domain, name) for name in names], function))
        return function

    return enter


def _key(call: NodeCall) -> tuple[str, str]:
    return (normal_domain(call.proto.domain), call.op_type)


def runs_only_on_host(call: NodeCall) -> bool:
    """Return True if a node can never be part of a graph."""
    return _key(call) in HOST_ONLY


def can_run_on_host(domain: str, name: str) -> bool:
    """Return True if an operator can run on the host."""
    key = (normal_domain(domain), name)
    return key in HOST_ONLY or key in REFERENCE_OPERATORS or key in _ROUTINES


def host_reason(call: NodeCall) -> str:
    """Return the reason why a node always runs on the host."""
    return f"{call.op_type}: {HOST_ONLY[_key(call)]}"


def draws(call: NodeCall) -> bool:
    """Return True if a node draws random numbers."""
    return call.op_type.startswith("Random") or call.op_type in ("Bernoulli", "Multinomial")


def execute(
    run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]
) -> Sequence[Any]:
    """Run one node on plain values.

    Raises:
        OpError: the node fails; the message names it.
    """
    run.check(node.label)
    try:
        function = run.importer.functions.get(node.key)
        if function is not None:
            return _run_body(run, node, inputs, function)
        found = _ROUTINES.get(node.key)
        if found is not None:
            return found(run, node, inputs, outer)
        body = _schema_body(run, node, inputs)
        if body is not None:
            return _run_body(run, node, inputs, body)
        return run_reference(run, node, inputs)
    except GraphflowError:
        raise
    except Exception as error:  # numpy and onnx raise errors of many types
        message = f"{type(error).__name__}: {error}"
        raise OpError(f"{node.label} failed: {message}") from error


def _run_body(run: HostRun, node: HostNode, inputs: Sequence[Any], body: Any) -> Sequence[Any]:
    """Run a function, whose body is a program."""
    bound = replace(body, nodes=with_attributes(body, node.proto))
    values = {name: v for name, v in zip(body.inputs, inputs, strict=False) if v is not None}
    return run.program_for(node.proto, bound).run(run, values)


def _schema_body(run: HostRun, node: HostNode, inputs: Sequence[Any]) -> Any:
    """Return the schema's function body of an operator that has no translation, else None."""
    if handler_of(*node.key, node.version) is not None or node.key in REFERENCE_OPERATORS:
        return None
    values = [None if value is None else classify(value) for value in inputs]
    scope = Scope({}, node.opsets)
    call = NodeCall(node.proto, values, scope, node.label, run.importer)
    return schema_body(call, plain=False)


def run_reference(run: HostRun, node: HostNode, inputs: Sequence[Any]) -> Sequence[Any]:
    """Run a node by onnx's reference implementation, whose evaluator is cached."""
    _, evaluator = run.importer.programs.setdefault(id(node.proto), (node.proto, _evaluator(node)))
    feeds = {n: v for n, v in zip(node.proto.input, inputs, strict=False) if n}
    results: Sequence[Any] = evaluator.run(None, feeds)
    named = dict(zip([n for n in node.proto.output if n], results, strict=True))
    return [named.get(n) for n in node.proto.output]


def _evaluator(node: HostNode) -> ReferenceEvaluator:
    infos = [ValueInfoProto(name=n) for n in dict.fromkeys(node.proto.input) if n]
    outputs = [ValueInfoProto(name=n) for n in node.proto.output if n]
    graph = helper.make_graph([node.proto], "node", infos, outputs)
    imports = [helper.make_opsetid(d, v) for d, v in node.opsets.items()]
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=imports))

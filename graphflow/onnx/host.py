"""Nodes that run on the host, between two graphs.

They are those whose output is no tensor (sequences, optionals, strings), or has a shape that
depends on data, or a dtype that no tensor has; and control flow whose body holds such nodes. The
common ones are written here in numpy; for the rest (strings, images, dtypes of 4 and 8 bits) it is
onnx's own reference implementation that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import NodeProto, ValueInfoProto, helper
from onnx.reference import ReferenceEvaluator

from graphflow.errors import GraphflowError, OnnxError, OpError
from graphflow.onnx.call import Call, attribute_value
from graphflow.onnx.registry import ML, handler_of, normal_domain
from graphflow.onnx.values import Array
from graphflow.ops.suppression import suppression_op

if TYPE_CHECKING:
    from graphflow.onnx.program import Run

SHAPE = "the shape of its output depends on data"
SEQUENCE = "sequences and optionals are no tensors"
STRINGS = "strings are no tensors"
RANDOM = "the numbers it draws are those of numpy"

# Why an operator always runs on the host.
REASONS: dict[tuple[str, str], str] = {
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

# Of these, onnx's reference implementation is what runs.
REFERENCE = {
    ("", "ImageDecoder"), ("", "RegexFullMatch"), ("", "StringConcat"),
    ("", "StringNormalizer"), ("", "StringSplit"), ("", "TfIdfVectorizer"),
    (ML, "DictVectorizer"), (ML, "SVMClassifier"), (ML, "SVMRegressor"),
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """A node that runs on the host, the opsets it is meant in, and how to name it."""

    proto: NodeProto
    opsets: Mapping[str, int]
    label: str
    why: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return (normal_domain(self.proto.domain), self.proto.op_type)

    @property
    def version(self) -> int:
        return self.opsets.get(self.key[0], 1)

    def attr(self, name: str, default: Any = None) -> Any:
        for attribute in self.proto.attribute:
            if attribute.name == name:
                return attribute_value(attribute)
        return default


Routine = Callable[["Run", Node, Sequence[Any], Mapping[str, Any]], Sequence[Any]]
_ROUTINES: dict[tuple[str, str], Routine] = {}


def routine(*names: str, domain: str = "") -> Callable[[Routine], Routine]:
    """Register (run, node, inputs, captured values) -> outputs, all of them plain values."""

    def enter(function: Routine) -> Routine:
        _ROUTINES.update(dict.fromkeys([(domain, name) for name in names], function))
        return function

    return enter


def _key(call: Call) -> tuple[str, str]:
    return (normal_domain(call.proto.domain), call.op_type)


def only(call: Call) -> bool:
    """Whether a node can never be part of a graph."""
    return _key(call) in REASONS


def can(call: Call) -> bool:
    """Whether a node can run on the host."""
    return _key(call) in REASONS or _key(call) in REFERENCE or _key(call) in _ROUTINES


def knows(domain: str, name: str) -> bool:
    """Whether an operator can run on the host."""
    key = (normal_domain(domain), name)
    return key in REASONS or key in REFERENCE or key in _ROUTINES


def reason(call: Call) -> str:
    """Why a node runs on the host."""
    return f"{call.op_type}: {REASONS[_key(call)]}"


def draws(call: Call) -> bool:
    """Whether a node gives another value each time."""
    return call.op_type.startswith("Random") or call.op_type in ("Bernoulli", "Multinomial")


def execute(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Sequence[Any]:
    """Run one node on plain values.

    Raises:
        OpError: it fails; names the node.
    """
    run.check(node.label)
    try:
        function = run.importer.functions.get(node.key)
        if function is not None:
            return _in_body(run, node, inputs, function)
        found = _ROUTINES.get(node.key)
        if found is not None:
            return found(run, node, inputs, outer)
        body = _schema_body(run, node, inputs)
        if body is not None:
            return _in_body(run, node, inputs, body)
        return _by_reference(run, node, inputs)
    except GraphflowError:
        raise
    except Exception as error:  # numpy's and onnx's complaints about values
        told = f"{type(error).__name__}: {error}"
        raise OpError(f"{node.label} failed: {told}") from error


def _in_body(run: Run, node: Node, inputs: Sequence[Any], body: Any) -> Sequence[Any]:
    """A function: its body is a program of its own."""
    from dataclasses import replace

    from graphflow.onnx.expansion import with_attributes

    bound = replace(body, nodes=with_attributes(body, node.proto))
    values = {name: v for name, v in zip(body.inputs, inputs, strict=False) if v is not None}
    return run.program(node.proto, bound).run(run, values)


def _schema_body(run: Run, node: Node, inputs: Sequence[Any]) -> Any:
    """The function body of an operator that has no translation."""
    from graphflow.onnx.expansion import schema_body
    from graphflow.onnx.importer import Scope
    from graphflow.onnx.values import classified

    if handler_of(*node.key, node.version) is not None or node.key in REFERENCE:
        return None
    values = [None if value is None else classified(value) for value in inputs]
    scope = Scope({}, node.opsets)
    call = Call(node.proto, values, scope, node.label, run.importer)
    return schema_body(call, plain=False)


def _by_reference(run: Run, node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """onnx's reference implementation of a node."""
    _, evaluator = run.importer.programs.setdefault(id(node.proto), (node.proto, _evaluator(node)))
    feeds = {n: v for n, v in zip(node.proto.input, inputs, strict=False) if n}
    results: Sequence[Any] = evaluator.run(None, feeds)
    named = dict(zip([n for n in node.proto.output if n], results, strict=True))
    return [named.get(n) for n in node.proto.output]


def _evaluator(node: Node) -> ReferenceEvaluator:
    infos = [ValueInfoProto(name=n) for n in dict.fromkeys(node.proto.input) if n]
    outputs = [ValueInfoProto(name=n) for n in node.proto.output if n]
    graph = helper.make_graph([node.proto], "node", infos, outputs)
    imports = [helper.make_opsetid(d, v) for d, v in node.opsets.items()]
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=imports))


# Shapes that depend on data -------------------------------------------------------------------


@routine("NonZero")
def _nonzero(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    (x,) = inputs
    return [np.array(np.nonzero(np.atleast_1d(x)), np.int64).reshape(max(x.ndim, 1), -1)]


@routine("Compress")
def _compress(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    x, condition = inputs
    return [np.compress(condition, x, axis=node.attr("axis"))]


@routine("Unique")
def _unique(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    (x,) = inputs
    axis = node.attr("axis")
    values, first, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not node.attr("sorted", 1):
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        values = np.take(values, order, axis=axis or 0)
        first, counts, inverse = first[order], counts[order], rank[inverse]
    return [values, *(a.astype(np.int64) for a in (first, inverse, counts))]


@routine("NonMaxSuppression")
def _suppression(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    """As many rows as there are boxes left, where our own op has a stated number of them."""
    boxes, scores = np.asarray(inputs[0]), np.asarray(inputs[1])
    limits = [*inputs[2:], *(None,) * (5 - len(inputs))]
    most, overlap, least = (None if v is None else np.asarray(v).item() for v in limits)
    rows, count = suppression_op.run(
        np,
        [boxes, scores],
        {
            "max_output": min(int(most or 0), boxes.shape[1]),
            "iou_threshold": overlap or 0.0,
            "score_threshold": -np.inf if least is None else least,
            "centers": bool(node.attr("center_point_box", 0)),
        },
    )
    return [rows[: int(count)]]


# Sequences and optionals ----------------------------------------------------------------------


@routine("SequenceConstruct")
def _construct(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    return [list(inputs)]


@routine("SequenceEmpty")
def _empty(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    return [[]]


@routine("SequenceLength")
def _length(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    return [np.array(len(inputs[0]), np.int64)]


def _place(position: Any, count: int, node: Node) -> int:
    """A position counted from the front.

    Raises:
        OnnxError: it is outside of the sequence.
    """
    at = int(np.asarray(position).item())
    if not -count <= at < count:
        raise OnnxError(f"{node.label}: position {at} is outside a sequence of length {count}")
    return at % count


@routine("SequenceAt")
def _at(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    return [inputs[0][_place(inputs[1], len(inputs[0]), node)]]


@routine("SequenceErase")
def _erase(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    items = list(inputs[0])
    position = inputs[1] if len(inputs) > 1 and inputs[1] is not None else -1
    del items[_place(position, len(items), node)]
    return [items]


@routine("SequenceInsert")
def _insert(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    items = list(inputs[0])
    at = len(items)
    if len(inputs) > 2 and inputs[2] is not None:
        position = int(np.asarray(inputs[2]).item())
        at = at if position == at else _place(position, len(items), node)
    return [[*items[:at], inputs[1], *items[at:]]]


@routine("SplitToSequence")
def _split(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    x, axis = inputs[0], node.attr("axis", 0)
    sizes = inputs[1] if len(inputs) > 1 else None
    if sizes is None:
        parts = np.split(x, x.shape[axis], axis)
        keep = node.attr("keepdims", 1)
        return [[part if keep else np.squeeze(part, axis) for part in parts]]
    if np.ndim(sizes) == 0:
        bounds = list(range(int(sizes), x.shape[axis], int(sizes)))
    else:
        bounds = [int(b) for b in np.cumsum(sizes)[:-1]]
        if int(np.sum(sizes)) != x.shape[axis]:
            raise OnnxError(
                f"{node.label}: parts of sizes {list(sizes)} do not make up {x.shape[axis]}"
            )
    return [list(np.split(x, bounds, axis))]


@routine("ConcatFromSequence")
def _concat(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    axis = node.attr("axis", 0)
    join = np.stack if node.attr("new_axis", 0) else np.concatenate
    return [join(inputs[0], axis=axis)]


@routine("SequenceMap")
def _map(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    """The body applied to the elements of the first sequence, and of others beside it."""
    body = _subgraph(run, node, "body")
    made: list[list[Any]] = [[] for _ in body.body.outputs]
    for i in range(len(inputs[0])):
        run.check(f"{node.label}, element {i + 1}")
        now = [x[i] if isinstance(x, list) else x for x in inputs]
        given = dict(zip(body.body.inputs, now, strict=True))
        for items, item in zip(made, body.run(run, {**outer, **given}), strict=True):
            items.append(item)
    return made


@routine("Identity")
def _identity(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    return list(inputs)


@routine("Optional")
def _optional(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    return [inputs[0] if inputs else None]


@routine("OptionalHasElement")
def _has_element(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    return [np.array(bool(inputs) and inputs[0] is not None)]


@routine("OptionalGetElement")
def _get_element(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    if inputs[0] is None:
        raise OnnxError(f"{node.label}: the optional holds nothing")
    return [inputs[0]]


# Control flow ---------------------------------------------------------------------------------


def _subgraph(run: Run, node: Node, name: str) -> Any:
    graph = node.attr(name)
    if graph is None:
        raise OnnxError(f"{node.label}: attribute {name!r} is missing")
    for attribute in node.proto.attribute:
        if attribute.name == name:
            graph = attribute.g
    return run.program(graph, run.importer.subgraph(graph, node.opsets))


@routine("If")
def _if(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    branch = "then_branch" if bool(np.asarray(inputs[0]).item()) else "else_branch"
    return _subgraph(run, node, branch).run(run, outer)


@routine("Loop")
def _loop(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    body = _subgraph(run, node, "body")
    most = None if inputs[0] is None else int(np.asarray(inputs[0]).item())
    go = True if len(inputs) < 2 or inputs[1] is None else bool(np.asarray(inputs[1]).item())
    state = list(inputs[2:])
    names = body.body.inputs
    scanned: list[list[Any]] = [[] for _ in range(len(body.body.outputs) - 1 - len(state))]
    step = 0
    while go and (most is None or step < most):
        run.check(f"{node.label}, iteration {step + 1}")
        values = [np.array(step, np.int64), np.array(go), *state]
        given = dict(zip(names, values, strict=False))
        results = body.run(run, {**outer, **given})
        go = bool(np.asarray(results[0]).item())
        state = results[1 : 1 + len(state)]
        for rows, row in zip(scanned, results[1 + len(state) :], strict=True):
            rows.append(row)
        step += 1
    return [*state, *(_stacked(rows) for rows in scanned)]


def _stacked(rows: list[Array]) -> Array:
    return np.stack(rows) if rows else np.zeros(0, np.float32)


@routine("Scan")
def _scan(run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    """Since opset 9: scanned inputs last; each axis and direction its own."""
    body = _subgraph(run, node, "body")
    if node.version < 9:
        return _scan_8(run, node, inputs, outer, body)
    count = node.attr("num_scan_inputs")
    state, scanned = list(inputs[: len(inputs) - count]), list(inputs[len(inputs) - count :])
    axes = node.attr("scan_input_axes") or [0] * count
    backward = node.attr("scan_input_directions") or [0] * count
    rows = [
        np.moveaxis(x, axis, 0)[:: -1 if back else 1]
        for x, axis, back in zip(scanned, axes, backward, strict=True)
    ]
    results = _scanned(run, node, body, state, rows, outer)
    outputs = len(body.body.outputs) - len(state)
    axes = node.attr("scan_output_axes") or [0] * outputs
    backward = node.attr("scan_output_directions") or [0] * outputs
    last = [
        np.moveaxis(x[:: -1 if back else 1], 0, axis)
        for x, axis, back in zip(results[len(state) :], axes, backward, strict=True)
    ]
    return [*results[: len(state)], *last]


def _scan_8(
    run: Run, node: Node, inputs: Sequence[Any], outer: Mapping[str, Any], body: Any
) -> Any:
    """Opset 8: a batch axis first, lengths of sequences as input 0."""
    count = node.attr("num_scan_inputs")
    values = list(inputs[1:])
    batches = []
    for b in range(values[0].shape[0]):
        one = [x[b] for x in values]
        rows = one[len(one) - count :]
        if inputs[0] is not None:
            rows = [x[: int(inputs[0][b])] for x in rows]
        batches.append(_scanned(run, node, body, one[: len(one) - count], rows, outer))
    return [np.stack(parts) for parts in zip(*batches, strict=True)]


def _scanned(
    run: Run, node: Node, body: Any, state: list[Any], rows: list[Any], outer: Mapping[str, Any]
) -> list[Any]:
    collected: list[list[Any]] = [[] for _ in range(len(body.body.outputs) - len(state))]
    kept = len(state)
    for step in range(len(rows[0])):
        run.check(f"{node.label}, step {step + 1}")
        now = [np.array(x[step], order="C") for x in rows]
        given = dict(zip(body.body.inputs, [*state, *now], strict=True))
        results = body.run(run, {**outer, **given})
        state = results[:kept]
        for made, row in zip(collected, results[kept:], strict=True):
            made.append(row)
    return [*state, *(_stacked(made) for made in collected)]

"""Tracing: turn a Python function of tensors into a body and its captures.

The function is called once, on placeholders. Nodes that it builds have higher serial numbers than
all earlier ones. Older tensors that it reads, variables and placeholders are captures: they become
further parameters, so a body depends on its arguments only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.base.argument_checks import signature_of
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, GraphError, VariableError
from graphflow.frontend.pytree import Rebuild, flatten_values
from graphflow.ir.graph import Body, Graph
from graphflow.ir.op import REGISTRY, Node, Tensor, next_serial
from graphflow.ir.spec import TensorSpec


@dataclass(frozen=True)
class TracedFunction:
    """The graph of a function, before its captures become parameters.

    Attributes:
        inputs: the parameters.
        outputs: the tensors that the function returned, flat.
        rebuild: puts values for the outputs into the nest that it returned.
        captures: tensors that it reads from outside, in build order.
        since: the serial number at which tracing began.
    """

    inputs: tuple[Node, ...]
    outputs: tuple[Tensor, ...]
    rebuild: Rebuild
    captures: tuple[Tensor, ...]
    since: int

    def body(self, captures: Sequence[Tensor]) -> Body:
        """Return the body with the further parameters `captures`, a superset of this function's."""
        inner, _ = _find_region(self.outputs, self.inputs, self.since)
        stand_ins = [make_parameter(t.spec, t.node.name) for t in captures]
        mapped: dict[Tensor, Tensor] = {
            t: p.outputs[0] for t, p in zip(captures, stand_ins, strict=True)
        }
        for node in inner:
            inputs = tuple(mapped.get(t, t) for t in node.inputs)
            same = all(a is b for a, b in zip(inputs, node.inputs, strict=True))
            mapped.update(
                zip(node.outputs, (node if same else node.with_inputs(inputs)).outputs, strict=True)
            )
        outputs = [mapped.get(t, t) for t in self.outputs]
        return Body((*self.inputs, *stand_ins), Graph(outputs), len(outputs))


def trace(
    function: Callable[..., Any], specs: Sequence[TensorSpec], arguments: Rebuild
) -> TracedFunction:
    """Call a function on placeholders of some specs, and return its graph.

    Args:
        arguments: puts the placeholders' tensors into the tuple of the function's arguments.

    Raises:
        ArgumentError: it takes another number of arguments, or returns no nest of tensors.
        VariableError: the function assigns variables.
    """
    since = next_serial()
    inputs = tuple(make_parameter(spec, f"argument_{i}") for i, spec in enumerate(specs))
    name = getattr(function, "__name__", "the function")
    given = arguments([node.outputs[0] for node in inputs])
    check_arity(function, given, name)
    returned = function(*given)
    outputs, rebuild = flatten_values(returned, f"what {name} returns")
    inner, captures = _find_region(outputs, inputs, since)
    for node in inner:
        if node.op.name in ("assign", "group"):
            raise VariableError(
                f"{node.op.name} {node.name!r} (made at {node.location}) is inside {name}, which "
                "becomes a body: a body changes no state; return the new value, and assign it "
                "outside"
            )
    return TracedFunction(inputs, tuple(outputs), rebuild, captures, since)


def check_arity(function: Callable[..., Any], given: Sequence[Any], name: str) -> None:
    """Raise ArgumentError if a function does not take the arguments that it will get."""
    try:
        signature = signature_of(function)
    except (TypeError, ValueError):  # a function written in C has no signature
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        count = f"{len(given)} argument{'s' * (len(given) != 1)}"
        raise ArgumentError(
            f"{name}{signature} is called with {count}: {error}; let it take {count}"
        ) from None


def graph_body(graph: Graph) -> tuple[Body, tuple[Tensor, ...]]:
    """Turn a graph into a body whose parameters are its placeholders; return its captures, too."""
    if graph.of_op("assign") or graph.of_op("group"):
        raise GraphError("the graph assigns variables, which a body cannot; call what it computes")
    _, captures = _find_region(graph.outputs, graph.placeholders, 0)
    traced = TracedFunction(graph.placeholders, graph.outputs, tuple, captures, 0)
    return traced.body(captures), captures


def make_parameter(spec: TensorSpec, name: str) -> Node:
    """Make a placeholder that is a parameter of a body."""
    tensor: Tensor = REGISTRY["placeholder"](
        shape=spec.shape, dtype=spec.dtype.name, name=name.rpartition("/")[2]
    )
    return tensor.node


def _find_region(
    outputs: Sequence[Tensor], inputs: Sequence[Node], since: int
) -> tuple[list[Node], tuple[Tensor, ...]]:
    """Find the nodes between parameters and outputs, in order, and the captured tensors.

    Constants are never captured: each body holds its own. Variables and placeholders always are,
    even if the function made them.
    """
    known = set(inputs)
    inner: set[Node] = set()
    captured: dict[Tensor, None] = {}
    stack = list(outputs)
    while stack:
        tensor = stack.pop()
        node = tensor.node
        if node in known or node in inner:
            continue
        older = node.serial < since and node.op.name != "constant"
        if older or node.op.name in ("placeholder", "variable"):
            captured[tensor] = None
            continue
        inner.add(node)
        stack.extend(node.inputs)
    ordered = sorted(captured, key=lambda t: (t.node.serial, t.index))
    return sorted(inner, key=lambda node: node.serial), tuple(ordered)

"""Tracing: a Python function of tensors -> a body, and what it captures.

The function is called once, on placeholders. What it builds is recognised by its serial number;
older tensors that it reads, and state wherever it was made, become further parameters, so that a
body depends on nothing but its arguments.
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
    """A function as a graph of its arguments, before it is known what further it captures.

    Attributes:
        inputs: the parameters.
        outputs: what the function returned, flat.
        rebuild: puts values for the outputs into the nest that it returned.
        captures: older tensors that it reads, in order of their making.
    """

    inputs: tuple[Node, ...]
    outputs: tuple[Tensor, ...]
    rebuild: Rebuild
    captures: tuple[Tensor, ...]
    since: int

    def body(self, captures: Sequence[Tensor]) -> Body:
        """The body whose further parameters are `captures`, at least those of this function."""
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
    """Call a function on placeholders of some specs.

    Args:
        arguments: puts the placeholders' tensors into the tuple of its arguments.

    Raises:
        GraphError: it returns what is no nest of tensors, or trains inside.
        VariableError: it assigns.
    """
    since = next_serial()
    inputs = tuple(make_parameter(spec, f"argument_{i}") for i, spec in enumerate(specs))
    name = getattr(function, "__name__", "the function")
    given = arguments([node.outputs[0] for node in inputs])
    _check_arity(function, given, name)
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


def _check_arity(function: Callable[..., Any], given: Sequence[Any], name: str) -> None:
    """Refuse a function that does not take as many arguments as it is going to get."""
    try:
        signature = signature_of(function)
    except (TypeError, ValueError):  # of what is written in C, nothing is known
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        count = f"{len(given)} argument{'s' * (len(given) != 1)}"
        raise ArgumentError(
            f"{name}{signature} is called with {count}: {error}; let it take {count}"
        ) from None


def graph_body(graph: Graph) -> tuple[Body, tuple[Tensor, ...]]:
    """A graph as a body: its placeholders are the parameters; and the variables it captures."""
    if graph.of_op("assign") or graph.of_op("group"):
        raise GraphError("the graph assigns variables, which a body cannot; call what it computes")
    _, captures = _find_region(graph.outputs, graph.placeholders, 0)
    traced = TracedFunction(graph.placeholders, graph.outputs, tuple, captures, 0)
    return traced.body(captures), captures


def make_parameter(spec: TensorSpec, name: str) -> Node:
    """A placeholder of a body."""
    tensor: Tensor = REGISTRY["placeholder"](
        shape=spec.shape, dtype=spec.dtype.name, name=name.rpartition("/")[2]
    )
    return tensor.node


def _find_region(
    outputs: Sequence[Tensor], inputs: Sequence[Node], since: int
) -> tuple[list[Node], tuple[Tensor, ...]]:
    """The nodes between parameters and outputs, in order, and the tensors that come from outside.

    Constants belong to whoever reads them; state and feeds come from outside even if the function
    made them.
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

"""Graph, the immutable closure of some outputs, and Body, a graph with parameters.

Nodes refer to their inputs, so a graph is found from its outputs. The search is iterative, because
graphs are deeper than Python's recursion limit. Nodes are in build order, which is topological and
deterministic. Every pass is a `rewrite`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names, checks_arguments
from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.notebook_html import html_table
from graphflow.errors import GraphError, VariableError
from graphflow.ir.op import Node, Tensor, user_location
from graphflow.ir.spec import Dim, Equation, evaluate


@checks_argument_names(GraphError)
class Graph:
    """The nodes that some outputs depend on.

    Attributes:
        outputs: the requested tensors.
        nodes: every node that they depend on, inputs before consumers, in build order.
        names: a unique name for each node.

    Raises:
        GraphError: an output is not a tensor.
    """

    def __init__(
        self, outputs: Iterable[Tensor] | Tensor, names: Mapping[Node, str] | None = None
    ) -> None:
        given = (outputs,) if isinstance(outputs, Tensor) else outputs
        if not isinstance(given, Iterable) or isinstance(given, str | np.ndarray):
            raise GraphError(
                f"Graph at {user_location()}: give a tensor or a list of them, not {given!r}"
            )
        self.outputs = tuple(given)
        for output in self.outputs:
            if not isinstance(output, Tensor):
                raise GraphError(
                    f"Graph at {user_location()}: an output is a tensor, not {output!r}"
                )
        if not isinstance(names, Mapping | None):
            raise GraphError(
                f"Graph at {user_location()}: names are a dict from nodes to names, not {names!r}"
            )
        self.nodes = _closure(self.outputs)
        self._names = _unique_names(self.nodes, names) if names else None
        self._verified = False

    def __deepcopy__(self, memo: Any) -> Graph:
        return self  # immutable

    @property
    def names(self) -> dict[Node, str]:
        """A unique name for each node, computed on first use: many graphs never need it."""
        if self._names is None:
            self._names = _unique_names(self.nodes, {})
        return self._names

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """The nodes by unique name."""
        return {name: node for node, name in self.names.items()}

    @cached_property
    def consumers(self) -> dict[Node, list[Node]]:
        """Nodes that read each node, in order, each once."""
        result: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            if len(node.inputs) == 1:
                result[node.inputs[0].node].append(node)
                continue
            for source in dict.fromkeys([t.node for t in node.inputs]):
                result[source].append(node)
        return result

    @cached_property
    def holders(self) -> tuple[Node, ...]:
        """Nodes that hold bodies."""
        return tuple(node for node in self.nodes if node.attrs and bodies(node))

    @cached_property
    def op_names(self) -> frozenset[str]:
        """The names of the ops of its nodes."""
        return frozenset({node.op.name for node in self.nodes})

    @cached_property
    def placeholders(self) -> tuple[Node, ...]:
        """The placeholders, in build order."""
        return self.of_op("placeholder")

    @cached_property
    def variables(self) -> tuple[Node, ...]:
        """The variables, in build order."""
        return self.of_op("variable")

    @checks_arguments(GraphError)
    def of_op(self, name: str) -> tuple[Node, ...]:
        """Return the nodes of the op called `name`, in build order."""
        return tuple([node for node in self.nodes if node.op.name == name])

    @cached_property
    def equations(self) -> tuple[tuple[Node, Equation], ...]:
        """Equations between symbolic sizes that shape rules assumed, each with its node."""
        return tuple(
            (node, equation)
            for node in self.walk()
            if node.equations
            for equation in node.equations
        )

    def walk(self) -> Iterator[Node]:
        """Iterate over all nodes, and those of bodies at any depth."""
        if not self.holders:
            yield from self.nodes
            return
        stack = [iter(self.nodes)]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
                continue
            yield node
            if node.attrs:
                stack.extend(iter(body.graph.nodes) for body in bodies(node))

    def verify(self) -> Graph:
        """Check the invariants of graphs, once for each graph, in O(nodes).

        Raises:
            GraphError: an input does not precede its consumer, or is no output of its node; a name
                is used twice.
            VariableError: a variable is assigned twice.
        """
        if self._verified:
            return self
        assigned: dict[Node, Node] = {}
        for node in self.nodes:
            serial = node.serial
            for tensor in node.inputs:
                source = tensor.node
                if source.serial >= serial:  # nodes are sorted by serial
                    raise GraphError(f"{node} reads {tensor}, which does not come before it")
                if tensor is not source.outputs[tensor.index]:
                    raise GraphError(f"{node} reads a tensor that its node does not know")
            if node.op.name == "assign":
                variable = node.inputs[0].node
                if variable in assigned:
                    first, second = (self._training_step_of(n) for n in (assigned[variable], node))
                    raise VariableError(
                        f"variable {self.names[variable]!r} (made at {variable.location}) is "
                        f"assigned twice in one step: at {first.location} and {second.location}; "
                        "assign the combined value once, or run the two in separate steps"
                    )
                assigned[variable] = node
        if len(set(self.names.values())) != len(self.nodes):
            raise GraphError("two nodes have one name")
        self._verified = True
        return self

    def _training_step_of(self, assignment: Node) -> Node:
        """Return the training step that contains an assignment, else the assignment.

        An optimiser's assignments count as built at the lines of their variables, which an error
        message should not name.
        """
        return next((n for n in self.consumers[assignment] if n.op.name == "group"), assignment)

    @checks_arguments(GraphError)
    def rewrite(
        self,
        replace: Callable[[Node, tuple[Tensor, ...]], Sequence[Tensor] | None],
        ops: tuple[str, ...] | None = None,
    ) -> Graph:
        """Return the graph with nodes replaced, in order.

        If nothing is replaced, the graph itself comes back. A replacement takes over the name of
        the node that it replaces.

        Args:
            replace: (node, rewritten inputs) -> the tensors that stand for the node's outputs, or
                None to keep the node.
            ops: the names of the ops whose nodes may be replaced; None means any op.
        """
        if ops is not None and self.op_names.isdisjoint(ops):
            return self
        mapped: dict[Tensor, Tensor] = {}  # of replaced tensors only
        replaced, known = mapped.keys(), self.names
        names: dict[Node, str] = {}
        for count, node in enumerate(self.nodes):
            inputs = node.inputs
            if mapped and not replaced.isdisjoint(inputs):
                inputs = tuple([mapped.get(t, t) for t in inputs])
            own = node.outputs
            outputs = replace(node, inputs) if ops is None or node.op.name in ops else None
            if outputs is None:
                outputs = own if inputs is node.inputs else node.with_inputs(inputs).outputs
            if outputs is own:
                if names and node not in names:
                    names[node] = known[node]
                continue
            if not names:  # all nodes before this one were kept
                names = {kept: known[kept] for kept in self.nodes[:count]}
            if len(own) == len(outputs) == 1:
                if own[0] is not outputs[0]:
                    mapped[own[0]] = outputs[0]
            else:
                for before, after in zip(own, outputs, strict=True):
                    if before is not after:
                        mapped[before] = after
            if outputs:  # several nodes may stand for the outputs; the first takes the name
                names.setdefault(outputs[0].node, known[node])
        if not mapped and len(names) in (0, len(self.nodes)):
            return self
        return Graph([mapped.get(t, t) for t in self.outputs], names)

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        counts = show_count(len(self.nodes), "node"), show_count(len(self.outputs), "output")
        return f"<Graph of {', '.join(counts)}>"

    def _repr_html_(self) -> str:
        rows = [(self.names[n], n.op.name, ", ".join(map(str, n.specs)), n.location)
                for n in self.nodes]  # fmt: skip
        return html_table(repr(self)[1:-1], ("node", "op", "result", "made at"), rows)

    def __str__(self) -> str:
        lines = []
        for node in self.nodes:
            arguments = [_format_reference(t, self.names) for t in node.inputs]
            arguments += (f"{k}={_abbreviate(v)}" for k, v in node.attrs.items())
            specs = ", ".join(map(str, node.specs))
            pin = f" @ {node.device}" if node.device else ""
            lines.append(
                f"{self.names[node]}: {specs} = {node.op.name}({', '.join(arguments)}){pin}"
            )
            for name, value in node.attrs.items():
                if isinstance(value, Body):
                    lines += [f"  {name}:", *(f"    {line}" for line in str(value).splitlines())]
        lines.append("return " + ", ".join(_format_reference(t, self.names) for t in self.outputs))
        return "\n".join(lines)


def _closure(outputs: Sequence[Tensor]) -> tuple[Node, ...]:
    """Return the nodes that are reachable from outputs, in build order.

    Inputs are built before consumers, so this order is topological.
    """
    seen: set[Node] = set()
    found: list[Node] = []  # in runs of falling serial numbers, which sort quickly
    stack = [t.node for t in outputs]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            found.append(node)
            for tensor in node.inputs:
                source = tensor.node
                if source not in seen:
                    stack.append(source)
    found.reverse()
    found.sort(key=_SERIAL)
    return tuple(found)


_SERIAL = attrgetter("serial")


def _unique_names(nodes: Sequence[Node], given: Mapping[Node, str]) -> dict[Node, str]:
    """Give each node its own name, with the lowest free number if taken: `matmul`, `matmul_1`."""
    names = {node: given[node] for node in nodes if node in given} if given else {}
    if len(names) == len(nodes):
        return names
    taken = set(names.values())
    counts: dict[str, int] = {}
    names = {}
    for node in nodes:
        name = given.get(node)
        if name is None:
            own = name = node.name
            while name in taken:
                number = counts[own] = counts.get(own, 0) + 1
                name = f"{own}_{number}"
            taken.add(name)
        names[node] = name
    return names


def _format_reference(tensor: Tensor, names: Mapping[Node, str]) -> str:
    name = names[tensor.node]
    return name if len(tensor.node.outputs) == 1 else f"{name}:{tensor.index}"


def _abbreviate(value: Any) -> str:
    if isinstance(value, Body):
        return f"<body of {len(value.graph)} nodes>"
    if isinstance(value, np.ndarray):
        return repr(value.item()) if value.size == 1 else f"<{value.dtype}{value.shape}>"
    return repr(value)


def substitute_tensors(
    outputs: Sequence[Tensor], replaced: Mapping[Tensor, Tensor]
) -> list[Tensor]:
    """Return outputs with some tensors replaced by others; their dependents are built again."""
    mapped = dict(replaced)
    for node in Graph(outputs).nodes if outputs else ():
        inputs = tuple(mapped.get(t, t) for t in node.inputs)
        if all(a is b for a, b in zip(inputs, node.inputs, strict=True)):
            continue
        twin = node.with_inputs(inputs)
        for old, new in zip(node.outputs, twin.outputs, strict=True):
            mapped.setdefault(old, new)
    return [mapped.get(t, t) for t in outputs]


@dataclass(frozen=True, eq=False)
class Body:
    """A graph with parameters, held as an attribute by `call`, `cond`, `scan` and `while_loop`.

    Attributes:
        inputs: placeholders that stand for arguments; the graph need not depend on all of them.
        graph: its first `results` outputs are the results; further ones run for their effect.
        base: the traced body, if this one computes further results for a gradient.
        rule: the user's vjp, (g, y, *inputs) -> cotangents; it is never sent to workers.
        tangent_rule: the user's jvp, (tangents, y, *inputs) -> tangents of the results, which
            `rule` transposes; None stands for a zero tangent.
        bindings: sizes of symbols, once they are known.
    """

    inputs: tuple[Node, ...]
    graph: Graph
    results: int
    base: Body | None = None
    rule: Callable[..., Any] | None = None
    tangent_rule: Callable[..., Any] | None = None
    bindings: Mapping[str, int] = field(default_factory=dict)

    @property
    def root(self) -> Body:
        """The body as it was traced, without further results."""
        return self if self.base is None else self.base

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The results."""
        return self.graph.outputs[: self.results]

    def bind(self, bindings: Mapping[str, int]) -> Body:
        """Return the body with sizes for its symbols."""
        return replace(self, bindings=bindings)

    def with_extra_results(self, further: Sequence[Tensor]) -> Body:
        """Return the body with further results, which are tensors of the same parameters."""
        outputs = (*self.outputs, *further)
        return replace(self, graph=Graph(outputs), results=len(outputs), base=self.root)

    def __str__(self) -> str:
        return f"({', '.join(node.name for node in self.inputs)}) ->\n{self.graph}"


def bodies(node: Node) -> tuple[Body, ...]:
    """Return the bodies among a node's attributes."""
    attrs = node.attrs
    if not attrs:
        return ()
    found: tuple[Body, ...] = ()
    for value in attrs.values():
        if isinstance(value, Body):
            found = (*found, value)
    return found


def bind_attrs(attrs: Mapping[str, Any], bindings: Mapping[str, int]) -> Mapping[str, Any]:
    """Replace symbolic sizes in attributes, also in tuples and bodies, by their values."""
    if not attrs:
        return attrs
    return {name: _bind_value(value, bindings) for name, value in attrs.items()}


def _bind_value(value: Any, bindings: Mapping[str, int]) -> Any:
    if isinstance(value, Dim):
        return evaluate(value, bindings)
    if isinstance(value, tuple):
        return tuple(_bind_value(v, bindings) for v in value)
    if isinstance(value, Body):
        return value.bind(bindings)
    return value

"""Nests of tensors, and the sizes of a graph's symbols.

Sessions and plans use both: fetches are nests, whose values come back in the same nest, and the
shapes of feeds determine the symbols of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from graphflow.errors import ArgumentError, FeedError, FetchError, GraphError, GraphflowError
from graphflow.ir.graph import Graph, bodies
from graphflow.ir.op import Node, Tensor, as_tensor, user_location
from graphflow.ir.spec import (
    LARGEST_SIZE,
    Dim,
    Size,
    evaluate,
    show_distinctly,
    show_shape,
    show_symbol,
    sole_symbol,
    symbols,
)

Rebuild = Callable[[Sequence[Any]], Any]
"""Rebuilds the flattened structure from values in the order of the flat tensors."""
Leaf = Callable[[Any, str], Tensor | None]
"""Converts a leaf that is no tensor: (leaf, path) -> tensor, or None to drop it."""


# Fetches --------------------------------------------------------------------------------------


def flatten(fetches: Any) -> tuple[list[Tensor], Rebuild]:
    """Flatten a nest of lists, tuples, named tuples and dicts into tensors, and a rebuilder.

    Raises:
        FetchError: a leaf is no tensor; the message names its path.
    """
    tensors: list[Tensor] = []
    build = _flatten(fetches, "fetches", tensors, None)
    return tensors, _check_count(build, tensors)


def flatten_values(values: Any, what: str) -> tuple[list[Tensor], Rebuild]:
    """Flatten a nest whose leaves may also be numbers and arrays (constants), and None.

    Args:
        what: the name of the nest in messages.

    Raises:
        ArgumentError: a leaf does not convert to a tensor.
    """
    tensors: list[Tensor] = []

    def leaf(item: Any, path: str) -> Tensor | None:
        try:
            return None if item is None else as_tensor(item)
        except GraphError as error:
            raise ArgumentError(f"{path} is {_describe_leaf(item)}: {error}") from None

    build = _flatten(values, what, tensors, leaf)
    return tensors, _check_count(build, tensors)


def _check_count(build: Rebuild, tensors: Sequence[Tensor]) -> Rebuild:
    def rebuild(values: Sequence[Any]) -> Any:
        if len(values) != len(tensors):
            raise FetchError(f"{len(values)} values for {len(tensors)} tensors")
        return build(values)

    return rebuild


def _flatten(item: Any, path: str, tensors: list[Tensor], leaf: Leaf | None) -> Rebuild:
    if leaf is not None and not isinstance(item, Tensor | Mapping | list | tuple):
        item = leaf(item, path)
        if item is None:
            return lambda values: None
    if isinstance(item, Tensor):
        index = len(tensors)
        tensors.append(item)
        return lambda values: values[index]
    if isinstance(item, Mapping):
        named = {
            key: _flatten(value, f"{path}[{key!r}]", tensors, leaf) for key, value in item.items()
        }
        return lambda values: {key: build(values) for key, build in named.items()}
    if isinstance(item, list | tuple):
        parts = [_flatten(value, f"{path}[{i}]", tensors, leaf) for i, value in enumerate(item)]
        if isinstance(item, list):
            return lambda values: [build(values) for build in parts]
        make: Callable[..., Any] | None = getattr(type(item), "_make", None)  # a named tuple
        return lambda values: (make or tuple)(build(values) for build in parts)
    raise FetchError(f"{path} at {user_location()} is {_describe_leaf(item)}; {_remedy(item)}")


def _describe_leaf(item: Any) -> str:
    text = repr(item)
    return f"{type(item).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _remedy(item: Any) -> str:
    if isinstance(item, str):
        return "fetch the tensor itself, not its name"
    if item is None:
        return "fetch tensors; did a function forget to return one?"
    if callable(item):
        return "fetch what it returns: call it"
    if hasattr(item, "__array__"):
        return "an array needs no fetching; gf.constant(array) would make it a tensor"
    return "fetch a tensor, or a list, tuple or dict of tensors"


# Shapes ---------------------------------------------------------------------------------------


def depends_on_placeholder(graph: Graph, placeholder: Node) -> bool:
    """Return True if a graph reads a placeholder, or needs a size that only this one determines.

    The gradient of `sum(x + b)` to b counts the rows of x without reading them.
    """
    if placeholder in graph.placeholders:
        return True
    fixed = symbols_of(graph.placeholders)
    return not symbols_of([placeholder]).isdisjoint(symbols_of(graph.nodes) - fixed)


def placeholders_behind(graph: Graph) -> set[Node]:
    """Return the placeholders that a graph depends on, also through origins of its nodes.

    A gradient of `sum(2 * x)` does not read x, but is a derivative of nodes that do.
    """
    found = set(graph.nodes)
    stack = list(graph.nodes)
    while stack:
        node = stack.pop()
        before = [t.node for t in node.inputs]
        for each in before if node.origin is None else (*before, node.origin):
            if each not in found:
                found.add(each)
                stack.append(each)
    return {node for node in found if node.op.name == "placeholder"}


def accepts_feed(graph: Graph, placeholder: Node) -> bool:
    """Return True if a feed of the placeholder belongs to the graph, even if its value is unused.

    So one dict of feeds serves a loss and its gradient, which may not read all of them.
    """
    return depends_on_placeholder(graph, placeholder) or placeholder in placeholders_behind(graph)


def symbols_of(nodes: Iterable[Node]) -> set[str]:
    """Return the symbols in the output shapes and attributes of nodes, and of their bodies."""
    found: set[str] = set()
    known: tuple[Any, ...] = ()
    for each in nodes:
        for node in _with_bodies(each):
            if node.specs is not known:  # consecutive nodes often share their specs
                known = node.specs
                for spec in known:
                    found.update(_symbols_in(spec.shape))
            for value in node.attrs.values():
                if isinstance(value, tuple | Dim):
                    found.update(_symbols_in(value))
    return found


def _with_bodies(node: Node) -> Iterable[Node]:
    """Return a node and the nodes of its bodies."""
    inner = bodies(node)
    return (node,) if not inner else (node, *(n for body in inner for n in body.graph.walk()))


def _symbols_in(part: Any) -> Iterator[str]:
    if isinstance(part, Dim):
        yield from symbols(part)
    elif isinstance(part, tuple):
        for item in part:
            if type(item) is not int:
                yield from _symbols_in(item)


def bind(
    graph: Graph,
    shapes: Mapping[Node, tuple[int, ...]],
    error: type[GraphflowError] = FeedError,
) -> dict[str, int]:
    """Compute the sizes of a graph's symbols from the shapes of its placeholders.

    Args:
        shapes: the shapes by placeholder, at least of all placeholders of the graph. A graph may
            also need the size of a placeholder whose values it does not read.
        error: the class of errors to raise.

    Raises:
        error: a placeholder has no shape, the wrong rank or size; two disagree on a shared size;
            sizes that an op equated differ; a size is negative or stays unknown.
    """
    for node in graph.placeholders:
        if node not in shapes:
            raise error(
                f"{_placeholder(graph, node)} is missing: it takes {node.specs[0]}; "
                "give it a value or a shape"
            )
    binding = _SizeSolver(graph, error)
    for node, shape in shapes.items():
        binding.bind_placeholder(node, tuple(shape))
    binding.check_derived(shapes)
    binding.check_equations()
    binding.check_specs()
    return binding.sizes


def fed_sizes(graph: Graph, shapes: Mapping[Node, Sequence[int]]) -> dict[str, int]:
    """Return the sizes of symbols that are axes of placeholders, unchecked (see `bind`)."""
    return {
        symbol: int(size)
        for node, shape in shapes.items()
        if node in graph.placeholders and len(shape) == len(node.specs[0].shape)
        for symbol, size in zip(map(sole_symbol, node.specs[0].shape), shape, strict=True)
        if symbol is not None
    }


class _SizeSolver:
    """Solves for the sizes of symbols, and remembers which placeholder determined each."""

    def __init__(self, graph: Graph, error: type[GraphflowError]) -> None:
        self.graph = graph
        self.error = error
        self.sizes: dict[str, int] = {}
        self._from: dict[str, Node] = {}

    def bind_placeholder(self, node: Node, given: tuple[int, ...]) -> None:
        """Set the symbols that are whole axes of a placeholder."""
        if node.op.name != "placeholder":
            raise self.error(
                f"{node.name!r} (made at {node.location}) is a {node.op.name}, no placeholder: "
                "only placeholders are fed and given shapes"
            )
        wanted = node.specs[0].shape
        if len(given) != len(wanted):
            raise self._mismatch(node, given, f"rank {len(wanted)}, not {len(given)}")
        for axis, (want, have) in enumerate(zip(wanted, given, strict=True)):
            if have < 0:
                raise self._mismatch(node, given, f"axis {axis} is negative")
            if have > LARGEST_SIZE:
                raise self._mismatch(node, given, f"axis {axis} is at most 2**63 - 1")
            if isinstance(want, int):
                if want != have:
                    raise self._mismatch(node, given, f"axis {axis} must be {want}, not {have}")
                continue
            symbol = sole_symbol(want)
            if symbol is None:
                continue
            known = self.sizes.setdefault(symbol, have)
            first = self._from.setdefault(symbol, node)
            if known != have:
                if first is node:
                    problem = f"size {show_symbol(symbol)!r} is {known} and {have} in one shape"
                else:
                    problem = (
                        f"size {show_symbol(symbol)!r} is {have} here, but {known} in "
                        f"{_placeholder(self.graph, first)}; give both the same size"
                    )
                raise self._mismatch(node, given, problem)

    def check_derived(self, shapes: Mapping[Node, tuple[int, ...]]) -> None:
        """Solve axes such as `2*n` of placeholders for one symbol, and check the others."""
        for node, given in shapes.items():
            for axis, (want, have) in enumerate(zip(node.specs[0].shape, given, strict=True)):
                if not isinstance(want, Dim):
                    continue
                self._solve(want, have)
                if all(s in self.sizes for s in symbols(want)):
                    value = self._evaluate(want, node)
                    if value != have:
                        problem = f"axis {axis} must be {want} = {value}, not {have}"
                        raise self._mismatch(node, given, problem)

    def _solve(self, size: Dim, value: int) -> None:
        """Set n if `a*n + b = value` has an integer solution."""
        unknown = [m for m in size.terms if m and not all(s in self.sizes for s in m)]
        if len(unknown) != 1 or len(unknown[0]) != 1 or not isinstance(unknown[0][0], str):
            return
        known = Dim({m: c for m, c in size.terms.items() if m != unknown[0]})
        if not all(s in self.sizes for s in symbols(known)):
            return
        rest, factor = value - evaluate(known, self.sizes), size.terms[unknown[0]]
        if rest % factor == 0:
            self.sizes[unknown[0][0]] = rest // factor

    def check_equations(self) -> None:
        """Check the equations that shape rules assumed while the graph was built."""
        for node, (a, b) in self.graph.equations:
            x, y = self._evaluate(a, node), self._evaluate(b, node)
            if x != y:
                limit = _lower_bound(a, b)
                left, right = show_distinctly(a, b)
                problem = (
                    f"{left} == {right}, but these shapes make them {x} and {y}"
                    if limit is None
                    else f"{b} to be at least {limit}, but these shapes make it {y}"
                )
                raise self.error(
                    f"{node.op.name} {self._name(node)!r} (made at {node.location}) needs "
                    f"{problem}; {self._origin_hint(a, b)}"
                )

    def check_specs(self) -> None:
        """Check that all sizes are known, and that those in shapes are not negative."""
        seen: set[Size] = set()
        for node in self.graph.walk():
            for value in node.attrs.values():
                for symbol in _symbols_in(value) if isinstance(value, tuple | Dim) else ():
                    if symbol not in self.sizes:
                        self._evaluate(Dim.symbol(symbol), node)
            for spec in node.specs:
                for size in spec.shape:
                    if isinstance(size, int) or size in seen:
                        continue
                    seen.add(size)
                    value = self._evaluate(size, node)
                    if value < 0:
                        raise self.error(
                            f"{node.op.name} {self._name(node)!r} (made at {node.location}) "
                            f"would have shape {show_shape(spec.shape)} with {size} = {value}; "
                            f"{self._origin_hint(size)}"
                        )

    def _name(self, node: Node) -> str:
        """Return a node's name in the graph; a node of a body keeps its own name."""
        return self.graph.names.get(node, node.name)

    def _evaluate(self, size: Size, node: Node) -> int:
        where = f"{node.op.name} {self._name(node)!r} (made at {node.location})"
        try:
            return evaluate(size, self.sizes)
        except KeyError as missing:
            raise self.error(
                f"{where} has a size {size} that no given placeholder fixes "
                f"({show_symbol(missing.args[0])!r} is unknown); "
                "give the placeholder from which it comes as well"
            ) from None
        except ZeroDivisionError:
            raise self.error(f"{where}: the size {size} divides by 0 for these shapes") from None

    def _origin_hint(self, *sizes: Size) -> str:
        """Return the remedy: the placeholders that determined the symbols of some sizes."""
        names = dict.fromkeys(s for size in sizes for s in symbols(size) if s in self._from)
        found = [
            f"{shown} = {self.sizes[s]} from {_placeholder(self.graph, self._from[s])}"
            for s, shown in zip(names, show_distinctly(*map(Dim.symbol, names)), strict=True)
        ]
        return "give sizes that fit" + (": " + ", ".join(found) if found else "")

    def _mismatch(self, node: Node, given: tuple[int, ...], problem: str) -> GraphflowError:
        return self.error(
            f"{_placeholder(self.graph, node)} takes shape {show_shape(node.specs[0].shape)}, "
            f"got {show_shape(given)}: {problem}"
        )


def _lower_bound(a: Size, b: Size) -> Size | None:
    """Return k if a is max(b, k), since the equation a == b then means b >= k; else None."""
    if isinstance(a, Dim) and len(a.terms) == 1:
        ((monomial, factor),) = a.terms.items()
        if factor == 1 and len(monomial) == 1 and monomial[0][:2] == ("max", b):
            limit: Size = monomial[0][2]
            return limit
    return None


def _placeholder(graph: Graph, node: Node) -> str:
    return f"placeholder {graph.names.get(node, node.name)!r} (made at {node.location})"

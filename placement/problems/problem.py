"""A placement problem as arrays.

The cost model turns a graph and a cluster into a `Problem`: seconds, bytes and limits, without ops
or sockets. A placer turns that into an `Assignment`, and the simulator turns both into a
`Timeline`. Textbook instances are problems, too.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ProblemError
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.placement.problems import graph_loops
from graphflow.placement.problems.arrays import Floats, Ints, array_of, freeze, is_empty, put
from graphflow.placement.problems.assignment import Assignment
from graphflow.placement.problems.from_networkx import NetworkxReader
from graphflow.placement.problems.problem_checks import check, check_values

Output = tuple[int, float, tuple[int, ...]]
"""A tensor that a node makes: its id, its bytes, the nodes that read it (each once)."""

__all__ = ["Adjacency", "Assignment", "Floats", "Ints", "Output", "Problem", "TensorSlots"]

NATIVE_ABOVE = 200_000
"""Nodes and edges from which machine code puts them in order."""


@dataclass(frozen=True)
class Adjacency:
    """Edges by node in CSR form: those of node v are `edges[start[v]:start[v + 1]]`."""

    start: Ints
    edges: Ints

    def edges_of(self, node: int) -> Ints:
        """Return the indices of the edges of one node."""
        return self.edges[self.start[node] : self.start[node + 1]]


@dataclass(frozen=True, eq=False)
class TensorSlots:
    """The tensors that nodes make and some node reads, as arrays: a slot for each.

    Those of node v are slots `start[v]:start[v + 1]`, in order of their first edge. The readers of
    slot s are `reader[read_start[s]:read_start[s + 1]]`, each once, lowest first.

    Args:
        start: (n + 1,).
        node, tensor, size: (s,) the producer, the id and the bytes of each tensor.
        read_start: (s + 1,).
        reader: (r,).
    """

    start: Ints
    node: Ints
    tensor: Ints
    size: Floats
    read_start: Ints
    reader: Ints


@checks_arguments(ProblemError)
@dataclass(frozen=True, eq=False)
class Problem:
    """A placement problem of n nodes, e edges and d devices; its arrays are read-only copies.

    Args:
        compute: (n, d) seconds; inf where a device cannot run the node (no kernel, or a pin).
        edges: (e, 2) producer, consumer.
        bytes: (e,) size of the tensor on the edge.
        tensor: (e,) ids. Edges of one producer with equal ids carry one tensor, which travels to a
            device once. Default: all differ.
        latency: (d, d) seconds from device to device. Default 0; the diagonal is ignored.
        bandwidth: (d, d) bytes/s. Default 1, so that `bytes` are seconds in textbook instances.
        memory: (n,) bytes that stay on the node's device between steps (variables). Default 0.
        output_memory: (n,) bytes of the node's outputs, from its start until its last reader (local
            consumers and transfers) is done. If given, received tensors occupy their `bytes`, too,
            from the start of the transfer until the last consumer on that device. Default:
            transient memory is not counted.
        capacity: (d,) bytes. Default inf.
        groups: (n,) nodes of equal id >= 0 share a device; -1: free.
        contention: A link (source, target) moves the bytes of one tensor at a time.
        prefer: (n,) a node near which this one goes when nothing else decides, or -1.
        shared: (s,) bytes/s of links that several pairs of devices share: network cards, switches.
            Under contention, concurrent transfers divide them fairly.
        routes: (r, 3) source, target, shared link: what a transfer from device to device passes
            through besides the pair's own link.
        client: Index of the device that stands for the client (feeds come from it, fetches go to
            it), or None. Only nodes pinned to it by `compute` may have a finite entry there.

    Raises:
        ProblemError: Shapes disagree, a value is NaN or negative, an index is out of range, the
            edges form a cycle, or a node or a group has no device.
    """

    compute: Floats
    edges: Ints
    bytes: Floats
    tensor: Ints = None  # type: ignore[assignment]
    latency: Floats = None  # type: ignore[assignment]
    bandwidth: Floats = None  # type: ignore[assignment]
    memory: Floats = None  # type: ignore[assignment]
    output_memory: Floats | None = None
    capacity: Floats = None  # type: ignore[assignment]
    groups: Ints = None  # type: ignore[assignment]
    contention: bool = False
    prefer: Ints = None  # type: ignore[assignment]
    client: int | None = None
    shared: Floats = None  # type: ignore[assignment]
    routes: Ints = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        own_tensors = self.tensor is not None
        compute = array_of("compute", self.compute, np.float64, 2)
        n, d = compute.shape
        if d == 0:
            raise ProblemError("compute has shape (n, 0): a problem needs at least one device")
        put(self, "compute", compute)
        put(self, "edges", _rows("edges", self.edges, "producer, consumer"))
        routes = () if self.routes is None else self.routes
        put(self, "routes", _rows("routes", routes, "source, target, shared link"))
        shared = () if self.shared is None else self.shared
        put(self, "shared", array_of("shared", shared, np.float64, 1))
        e = len(self.edges)
        arrays: list[tuple[str, type, tuple[int, ...], Any]] = [
            ("bytes", np.float64, (e,), None),
            ("tensor", np.int64, (e,), np.arange(e)),
            ("latency", np.float64, (d, d), 0.0),
            ("bandwidth", np.float64, (d, d), 1.0),
            ("memory", np.float64, (n,), 0.0),
            ("capacity", np.float64, (d,), np.inf),
            ("groups", np.int64, (n,), -1),
            ("prefer", np.int64, (n,), -1),
        ]
        if self.output_memory is not None:
            arrays.append(("output_memory", np.float64, (n,), None))
        for name, dtype, shape, default in arrays:
            value = getattr(self, name)
            if value is None and default is not None:
                value = np.broadcast_to(default, shape)
            array = array_of(name, value, dtype, len(shape))
            if array.shape != shape:
                raise ProblemError(
                    f"{name} has shape {array.shape}; {n} nodes, {e} edges and {d} devices "
                    f"need {shape}"
                )
            put(self, name, array)
        object.__setattr__(self, "contention", bool(self.contention))
        check(self, own_tensors)
        _ = self.topological

    @classmethod
    def from_networkx(cls, graph: Any) -> Problem:
        """Return the problem in the attributes of a networkx.DiGraph (or MultiDiGraph).

        Node i is the i-th of `graph.nodes`.

        Nodes: `compute` (seconds by device name, a number for each device, or one for all; devices
        that a dict leaves out cannot be used; `candidates` of `plan.to_networkx()` count, too),
        `memory`, `output_memory` (bytes), `group` (any name; None: free), `prefer` (a node). Edges:
        `bytes` (default 0), `tensor` (any name: edges of one node with one name carry one tensor;
        default: all differ). The graph: `devices` (names, or how many; default: those in nodes),
        `latency`, `bandwidth` ((d, d), or a number for all), `capacity` (by device, (d,) or one for
        all), `contention`, `client` (a device), `shared`, `routes`; as in `Problem`. Other
        attributes are ignored, unless they are nearly one of these.

        Raises:
            ProblemError: An attribute is missing or wrong; names the node or the edge.
        """
        reader = NetworkxReader(graph)
        try:
            return cls(**reader.arguments())
        except ProblemError as error:
            raise reader.with_names(error) from None

    def with_compute(self, compute: ArrayLike) -> Problem:
        """Return the problem with other seconds, finite and infinite at the same places.

        What follows from the edges alone is not computed again.

        Raises:
            ProblemError: Another shape, a value that is NaN or negative, or a node that may be
                elsewhere.
        """
        array = array_of("compute", compute, np.float64, 2)
        if not np.array_equal(np.isfinite(array), np.isfinite(self.compute)):
            raise ProblemError("the other compute lets nodes be on other devices; build a problem")
        made = object.__new__(type(self))
        for what in ("slots", "outputs", "input_counts", "successors", "predecessors"):
            getattr(self, what)  # computed once for both
        kept = {k: v for k, v in vars(self).items() if k not in ("compute", "compute_rows")}
        vars(made).update(kept, compute=array)
        check_values(made)
        return made

    def __repr__(self) -> str:
        nodes, edges = show_count(self.nodes, "node"), show_count(len(self.edges), "edge")
        return f"<Problem of {nodes} and {edges} on {show_count(self.devices, 'device')}>"

    # Sizes and adjacency ----------------------------------------------------------------------

    @property
    def nodes(self) -> int:
        """Number of nodes, n."""
        return int(self.compute.shape[0])

    @property
    def devices(self) -> int:
        """Number of devices, d, the client included."""
        return int(self.compute.shape[1])

    @cached_property
    def successors(self) -> Adjacency:
        """Outgoing edges of each node."""
        return _adjacency(self.edges[:, 0], self.nodes)

    @cached_property
    def predecessors(self) -> Adjacency:
        """Incoming edges of each node."""
        return _adjacency(self.edges[:, 1], self.nodes)

    @cached_property
    def topological(self) -> Ints:
        """The nodes, producers first, the lowest index first among equals."""
        if np.all(self.edges[:, 0] < self.edges[:, 1]):
            return freeze(np.arange(self.nodes, dtype=np.int64))
        n, out = self.nodes, self.successors
        inputs = np.bincount(self.edges[:, 1], minlength=n)
        room = [out.start, self.edges[out.edges, 1], inputs, np.zeros(n, np.int64)]
        order: Any = np.zeros(n, np.int64)
        if n + len(self.edges) > NATIVE_ABOVE:
            count = native(graph_loops, "topological")(n, *room, order)
        else:
            start, node, missing, heap = (array.tolist() for array in room)
            order = [0] * n
            count = graph_loops.topological(n, start, node, missing, heap, order)
            inputs = np.array(missing)
        if count < n:
            cycle = _cycle(self.edges, inputs)
            error = ProblemError(
                f"edges form a cycle: {' -> '.join(map(str, cycle))}; a problem must be acyclic"
            )
            error.nodes = tuple(cycle[:-1])
            raise error
        return freeze(np.array(order, dtype=np.int64))

    @cached_property
    def slots(self) -> TensorSlots:
        """The tensors of each node that some node reads."""
        source, target, n = self.edges[:, 0], self.edges[:, 1], max(self.nodes, 1)
        numbers, number = np.unique(self.tensor, return_inverse=True)
        key = source * max(len(numbers), 1) + number
        _, first, slot = np.unique(key, return_index=True, return_inverse=True)
        made = np.lexsort((first, source[first]))
        place = np.empty_like(made)
        place[made] = np.arange(len(made))
        edge = first[made]
        pairs = np.unique(place[slot] * n + target)
        return TensorSlots(
            _starts(source[edge], self.nodes),
            freeze(source[edge]),
            freeze(self.tensor[edge]),
            freeze(self.bytes[edge]),
            _starts(pairs // n, len(made)),
            freeze(pairs % n),
        )

    @cached_property
    def outputs(self) -> tuple[tuple[Output, ...], ...]:
        """The tensors of each node that some node reads, in order of their first edge."""
        slots = self.slots
        start, reads, readers = (
            array.tolist() for array in (slots.start, slots.read_start, slots.reader)
        )
        ends = pairwise(reads)
        rows: list[Output] = [
            (tensor, size, tuple(readers[first:last]))
            for tensor, size, (first, last) in zip(
                slots.tensor.tolist(), slots.size.tolist(), ends, strict=True
            )
        ]
        return tuple([tuple(rows[first:last]) for first, last in pairwise(start)])

    @cached_property
    def input_counts(self) -> tuple[int, ...]:
        """How many distinct tensors each node reads."""
        return tuple(np.bincount(self.slots.reader, minlength=self.nodes).tolist())

    @cached_property
    def compute_rows(self) -> list[list[float]]:
        """`compute` as lists, for loops in plain Python."""
        return list(self.compute.tolist())

    @cached_property
    def allowed_rows(self) -> list[list[bool]]:
        """`allowed` as lists."""
        return list(self.allowed.tolist())

    @cached_property
    def latency_rows(self) -> list[list[float]]:
        """`latency` as lists."""
        return list(self.latency.tolist())

    @cached_property
    def bandwidth_rows(self) -> list[list[float]]:
        """`bandwidth` as lists."""
        return list(self.bandwidth.tolist())

    @cached_property
    def ways(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Under contention, the shared links between (source, target); {} without."""
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for source, target, link in self.routes.tolist() if self.contention else ():
            found[source, target] = (*found.get((source, target), ()), link)
        return found

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """(n, d) whether a node may be on a device, given its whole colocation group."""
        allowed = np.isfinite(self.compute)
        members = np.flatnonzero(self.groups >= 0)
        if len(members):
            _, unit = np.unique(self.groups[members], return_inverse=True)
            common = np.ones((int(unit.max()) + 1, self.devices), dtype=bool)
            np.logical_and.at(common, unit, allowed[members])
            allowed[members] = common[unit]
        allowed.setflags(write=False)
        return allowed


def _rows(name: str, value: Any, columns: str) -> Ints:
    """Return rows of indices, (k, columns); no rows may have any width."""
    width = columns.count(",") + 1
    array = array_of(name, np.zeros((0, width), int) if is_empty(value) else value, np.int64, 2)
    if array.shape[1] != width:
        raise ProblemError(
            f"{name} has shape {array.shape}; expected ({name[0]}, {width}): {columns}"
        )
    return array


def _adjacency(ends: Ints, nodes: int) -> Adjacency:
    """Return the edges by one of their ends."""
    return Adjacency(_starts(ends, nodes), freeze(np.argsort(ends, kind="stable")))


def _starts(owner: Ints, count: int) -> Ints:
    """Return (count + 1,) where the rows of each owner begin, if rows are sorted by owner."""
    start = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(owner, minlength=count), out=start[1:])
    return freeze(start)


def _cycle(edges: Ints, missing: Ints) -> list[int]:
    """Return a cycle among the nodes that never became ready: walk back until a node repeats."""
    stuck = edges[(missing[edges[:, 0]] > 0) & (missing[edges[:, 1]] > 0)]
    inputs = dict(stuck[::-1, ::-1].tolist())  # the first input of each
    node, seen, path = min(inputs), {}, []  # type: int, dict[int, int], list[int]
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = inputs[node]
    cycle = path[seen[node] :][::-1]
    return [*cycle, cycle[0]]

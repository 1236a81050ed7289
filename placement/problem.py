"""A placement problem as arrays, and an answer to it.

The cost model turns a graph and a cluster into a `Problem` (seconds, bytes, limits: nothing of ops
or sockets), a placer turns that into an `Assignment`, the simulator turns both into a `Timeline`.
Textbook instances go straight in.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphflow.errors import ProblemError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Output = tuple[int, float, tuple[int, ...]]
"""A tensor that a node makes: its id, its bytes, the nodes that read it (each once)."""

_NO_ROUTES = np.zeros((0, 3), dtype=np.int64)


@dataclass(frozen=True)
class Adjacency:
    """Edges by node in CSR form: those of node v are `edges[start[v]:start[v + 1]]`."""

    start: Ints
    edges: Ints

    def of(self, node: int) -> Ints:
        """Indices of the edges of one node."""
        return self.edges[self.start[node] : self.start[node + 1]]


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be placed, for n nodes, e edges and d devices. Arrays are copied and made
    read-only.

    Args:
        compute: (n, d) seconds; inf where a device cannot run the node (no kernel, or a pin).
        edges: (e, 2) producer, consumer.
        bytes: (e,) size of the tensor on the edge.
        tensor: (e,) ids; edges of one producer with equal ids carry one tensor, which travels to a
        device once.
            Default: all differ.
        latency: (d, d) seconds from device to device. Default 0; the diagonal is ignored.
        bandwidth: (d, d) bytes/s. Default 1, so that `bytes` are seconds in textbook instances.
        memory: (n,) bytes that stay on the node's device between steps (variables). Default 0.
        output_memory: (n,) bytes of the node's outputs, from its start until its last reader (local
        consumers and
            transfers) is done. Where given, received tensors occupy their `bytes` too, from the
            start of the transfer until the last consumer on that device. Default: transient memory
            is not counted.
        capacity: (d,) bytes. Default inf.
        groups: (n,) nodes of equal id >= 0 share a device; -1: free.
        contention: whether a link (source, target) moves the bytes of one tensor at a time.
        prefer: (n,) a node next to which this one would like to live when nothing else decides, or
        -1.
        shared: (s,) bytes/s of links that several pairs of devices share: network cards, switches.
            Under contention, transfers on their way at one time divide them fairly.
        routes: (r, 3) source, target, shared link: what a transfer from device to device passes
            through besides the pair's own link.
        client: index of the device that stands for the client (feeds come from it, fetches go to
        it), or None.
            Only nodes pinned to it by `compute` may have a finite entry there.

    Raises:
        ProblemError: shapes disagree, a value is NaN or negative, an index is out of range, the
        edges form a
            cycle, or a node or a group has no device.
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
        compute = _array("compute", self.compute, np.float64, 2)
        n, d = compute.shape
        if d == 0:
            raise ProblemError("compute has shape (n, 0): a problem needs at least one device")
        edges = _array(
            "edges",
            np.reshape(self.edges, (-1, 2)) if np.size(self.edges) == 0 else self.edges,
            np.int64,
            2,
        )
        if edges.shape[1] != 2:
            raise ProblemError(
                f"edges has shape {edges.shape}; expected (e, 2): producer, consumer"
            )
        e = len(edges)
        defaults: dict[str, tuple[Any, type, tuple[int, ...]]] = {
            "bytes": (self.bytes, np.float64, (e,)),
            "tensor": (np.arange(e) if self.tensor is None else self.tensor, np.int64, (e,)),
            "latency": (
                np.zeros((d, d)) if self.latency is None else self.latency,
                np.float64,
                (d, d),
            ),
            "bandwidth": (
                np.ones((d, d)) if self.bandwidth is None else self.bandwidth,
                np.float64,
                (d, d),
            ),
            "memory": (np.zeros(n) if self.memory is None else self.memory, np.float64, (n,)),
            "capacity": (
                np.full(d, np.inf) if self.capacity is None else self.capacity,
                np.float64,
                (d,),
            ),
            "groups": (np.full(n, -1) if self.groups is None else self.groups, np.int64, (n,)),
            "prefer": (np.full(n, -1) if self.prefer is None else self.prefer, np.int64, (n,)),
        }
        if self.output_memory is not None:
            defaults["output_memory"] = (self.output_memory, np.float64, (n,))
        _set(self, "compute", compute)
        _set(self, "edges", edges)
        shared = () if self.shared is None else self.shared
        _set(self, "shared", _array("shared", shared, np.float64, 1))
        routes = np.reshape([] if self.routes is None else self.routes, (-1, 3))
        _set(self, "routes", _array("routes", routes if routes.size else _NO_ROUTES, np.int64, 2))
        for name, (value, dtype, shape) in defaults.items():
            array = _array(name, value, dtype, len(shape))
            if array.shape != shape:
                raise ProblemError(
                    f"{name} has shape {array.shape}; {n} nodes, {e} edges and {d} devices "
                    f"need {shape}"
                )
            _set(self, name, array)
        object.__setattr__(self, "contention", bool(self.contention))
        self._check_values()
        self._check_indices()
        self._check_tensors()
        self._check_routes()
        self._check_devices()
        _ = self.topological

    @classmethod
    def from_networkx(cls, graph: Any) -> Problem:
        """A problem from the attributes of a networkx.DiGraph (or MultiDiGraph); node i is the i-th
        of `graph.nodes`.

        Nodes: `compute` (seconds by device name, a number for each device, or one for all; what a
        dict leaves out cannot be used; `candidates` of `plan.to_networkx()` count, too), `memory`,
        `output_memory` (bytes), `group` (any name; None: free), `prefer` (a node).
        Edges: `bytes` (default 0), `tensor` (any name: edges of one node with one name carry one
        tensor; default: all differ).
        The graph: `devices` (names, or how many; default: those that nodes speak of), `latency`,
        `bandwidth` ((d, d), or a number for all), `capacity` (by device, (d,) or one for all),
        `contention`, `client` (a device), `shared`, `routes`; as in `Problem`. Others are ignored.

        Raises:
            ProblemError: an attribute is missing or wrong; names the node or the edge.
        """
        from graphflow.placement.from_networkx import problem_of

        return problem_of(graph)

    def with_compute(self, compute: ArrayLike) -> Problem:
        """The same problem with other seconds, finite and infinite at the same places.

        What follows from the edges alone is not worked out again.

        Raises:
            ProblemError: another shape, a value that is NaN or negative, or a node that may be
                elsewhere.
        """
        array = _array("compute", compute, np.float64, 2)
        if not np.array_equal(np.isfinite(array), np.isfinite(self.compute)):
            raise ProblemError("the other compute lets nodes be on other devices; build a problem")
        made = object.__new__(type(self))
        for what in ("outputs", "input_counts", "successors", "predecessors"):
            getattr(self, what)  # worked out once for both
        kept = {k: v for k, v in vars(self).items() if k not in ("compute", "compute_rows")}
        vars(made).update(kept, compute=array)
        made._check_values()
        return made

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
        """The nodes, producers first, lowest index first among equals."""
        if np.all(self.edges[:, 0] < self.edges[:, 1]):
            return _frozen(np.arange(self.nodes, dtype=np.int64))
        readers: list[list[int]] = [[] for _ in range(self.nodes)]
        missing = [0] * self.nodes
        for source, target in self.edges.tolist():
            readers[source].append(target)
            missing[target] += 1
        ready = [node for node in range(self.nodes) if missing[node] == 0]
        order: list[int] = []
        while ready:
            node = heapq.heappop(ready)
            order.append(node)
            for reader in readers[node]:
                missing[reader] -= 1
                if missing[reader] == 0:
                    heapq.heappush(ready, reader)
        if len(order) < self.nodes:
            cycle = _cycle(readers, missing)
            raise ProblemError(
                f"edges form a cycle: {' -> '.join(map(str, cycle))}; a problem must be acyclic"
            )
        return _frozen(np.array(order, dtype=np.int64))

    @cached_property
    def outputs(self) -> tuple[tuple[Output, ...], ...]:
        """The tensors of each node that some node reads, in order of their first edge."""
        made: list[dict[int, tuple[float, list[int]]]] = [{} for _ in range(self.nodes)]
        rows = zip(self.edges.tolist(), self.tensor.tolist(), self.bytes.tolist(), strict=True)
        for (source, target), tensor, size in rows:
            known = made[source].get(tensor)
            if known is None:
                made[source][tensor] = (size, [target])
            else:
                known[1].append(target)
        return tuple(
            [
                tuple(
                    [
                        (tensor, size, tuple(readers if len(readers) == 1 else sorted({*readers})))
                        for tensor, (size, readers) in of_node.items()
                    ]
                )
                if of_node
                else ()
                for of_node in made
            ]
        )

    @cached_property
    def input_counts(self) -> tuple[int, ...]:
        """How many distinct tensors each node reads."""
        counts = [0] * self.nodes
        for outputs in self.outputs:
            for _, _, readers in outputs:
                for reader in readers:
                    counts[reader] += 1
        return tuple(counts)

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
        """(n, d) whether a node may live on a device, its whole colocation group considered."""
        allowed = np.isfinite(self.compute)
        members = np.flatnonzero(self.groups >= 0)
        if len(members):
            _, unit = np.unique(self.groups[members], return_inverse=True)
            common = np.ones((int(unit.max()) + 1, self.devices), dtype=bool)
            np.logical_and.at(common, unit, allowed[members])
            allowed[members] = common[unit]
        allowed.setflags(write=False)
        return allowed

    # Checks -----------------------------------------------------------------------------------

    def _check_values(self) -> None:
        for name in (
            "compute",
            "bytes",
            "latency",
            "memory",
            "capacity",
            "output_memory",
            "bandwidth",
        ):
            array = getattr(self, name)
            if array is None:
                continue
            off = ~np.eye(self.devices, dtype=bool) if name in ("latency", "bandwidth") else True
            _reject(name, array, np.isnan(array) & off, "is NaN")
            _reject(name, array, (array < 0) & off, "is negative")
            if name == "bandwidth":
                _reject(name, array, (array == 0) & off, "is zero: these devices are not connected")
            elif name not in ("compute", "capacity"):
                _reject(name, array, np.isinf(array) & off, "is infinite")

    def _check_indices(self) -> None:
        n = self.nodes
        _reject(
            "edges",
            self.edges,
            (self.edges < 0) | (self.edges >= n),
            f"is not a node (there are {n})",
        )
        loops = np.flatnonzero(self.edges[:, 0] == self.edges[:, 1])
        if len(loops):
            raise ProblemError(
                f"edge {loops[0]} leads from node {self.edges[loops[0], 0]} to itself"
            )
        _reject(
            "prefer",
            self.prefer,
            (self.prefer < -1) | (self.prefer >= n),
            f"is neither a node (of {n}) nor -1",
        )
        _reject("groups", self.groups, self.groups < -1, "is below -1")
        if self.client is not None and not 0 <= self.client < self.devices:
            raise ProblemError(f"client is {self.client}; there are {self.devices} devices")

    def _check_tensors(self) -> None:
        first: dict[int, tuple[int, int, float]] = {}
        rows = zip(
            self.edges[:, 0].tolist(), self.tensor.tolist(), self.bytes.tolist(), strict=True
        )
        for edge, (source, tensor, size) in enumerate(rows):
            other, producer, bytes_ = first.setdefault(tensor, (edge, source, size))
            if producer != source:
                raise ProblemError(
                    f"edges {other} and {edge} carry tensor {tensor} "
                    f"but come from nodes {producer} and {source}"
                )
            if bytes_ != size:
                raise ProblemError(
                    f"edges {other} and {edge} carry tensor {tensor} "
                    f"with {bytes_:g} and {size:g} bytes"
                )

    def _check_routes(self) -> None:
        _reject("shared", self.shared, ~(self.shared > 0), "is not above 0 bytes/s")
        for column, count, what in (
            (0, self.devices, "device"),
            (1, self.devices, "device"),
            (2, len(self.shared), "shared link"),
        ):
            values = self.routes[:, column]
            bad = np.zeros(self.routes.shape, dtype=bool)
            bad[:, column] = (values < 0) | (values >= count)
            _reject("routes", self.routes, bad, f"is not a {what} (there are {count})")

    def _check_devices(self) -> None:
        homeless = np.flatnonzero(~np.isfinite(self.compute).any(axis=1))
        if len(homeless):
            raise _at(
                f"node {homeless[0]} has no device: compute[{homeless[0]}] is inf everywhere",
                homeless,
            )
        homeless = np.flatnonzero(~self.allowed.any(axis=1))
        if len(homeless):
            group = int(self.groups[homeless[0]])
            members = np.flatnonzero(self.groups == group)
            chain = self._narrowing(members)
            allow = "; ".join(
                f"node {v}: {np.flatnonzero(np.isfinite(self.compute[v])).tolist()}" for v in chain
            )
            raise _at(
                f"group {group} has no device that all its {len(members)} nodes can use ({allow}); "
                "loosen a pin or split the group",
                chain,
            )

    def _narrowing(self, members: Ints) -> list[int]:
        """Nodes of a group that, taken alone, leave no device: each rules out what others allow."""
        left, chain = np.ones(self.devices, dtype=bool), []
        for v in members.tolist():
            if (left & ~np.isfinite(self.compute[v])).any():
                chain.append(v)
                left &= np.isfinite(self.compute[v])
        for v in list(chain):  # those without which it is still impossible
            rest = [u for u in chain if u != v]
            if rest and not np.isfinite(self.compute[rest]).all(axis=0).any():
                chain = rest
        return chain


@dataclass(frozen=True, eq=False)
class Assignment:
    """Where and in which order nodes run.

    Args:
        device: (n,) device index of each node.
        order: (n,) all nodes, producers first; each device runs its nodes in this order.
        reproducible: whether the same placer gives it again; not if it was made against a clock.
    """

    device: Ints
    order: Ints
    reproducible: bool = True

    def __post_init__(self) -> None:
        _set(self, "device", _array("device", self.device, np.int64, 1))
        _set(self, "order", _array("order", self.order, np.int64, 1))
        if not np.array_equal(np.sort(self.order), np.arange(len(self.device))):
            raise ProblemError(
                f"order (length {len(self.order)}) must name each of the {len(self.device)} nodes "
                "exactly once"
            )

    def validate(self, problem: Problem) -> None:
        """Check the assignment against a problem (memory is the simulator's to judge).

        Raises:
            ProblemError: a device is unknown or impossible for its node, the order is not
            topological, or a
                colocation group is torn.
        """
        n, d = problem.nodes, problem.devices
        if len(self.device) != n:
            raise ProblemError(
                f"the assignment places {len(self.device)} nodes; the problem has {n}"
            )
        _reject(
            "device",
            self.device,
            (self.device < 0) | (self.device >= d),
            f"is not a device (there are {d})",
        )
        wrong = np.flatnonzero(~np.isfinite(problem.compute[np.arange(n), self.device]))
        if len(wrong):
            raise _at(
                f"node {wrong[0]} cannot run on device {self.device[wrong[0]]}: "
                "its compute is inf there",
                wrong,
            )
        position = np.empty(n, dtype=np.int64)
        position[self.order] = np.arange(n)
        late = np.flatnonzero(position[problem.edges[:, 0]] >= position[problem.edges[:, 1]])
        if len(late):
            source, target = problem.edges[late[0]].tolist()
            raise ProblemError(
                f"order is not topological: node {target} comes before its input, node {source}"
            )
        members = np.flatnonzero(problem.groups >= 0)
        home: dict[int, int] = {}
        for node, group, device in zip(
            members.tolist(),
            problem.groups[members].tolist(),
            self.device[members].tolist(),
            strict=True,
        ):
            if home.setdefault(group, device) != device:
                raise _at(
                    f"group {group} is torn: devices {home[group]} and {device} (node {node})",
                    [node],
                )


def _array(name: str, value: ArrayLike, dtype: type, ndim: int) -> NDArray[Any]:
    try:
        raw = np.asarray(value)
        if dtype is np.int64 and raw.size and raw.dtype.kind not in "iu":
            raise ProblemError(f"{name} must hold integers, not {raw.dtype}")
        array: NDArray[Any] = np.array(raw, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise ProblemError(f"{name} is not an array of {dtype.__name__}: {error}") from None
    if array.ndim != ndim:
        raise ProblemError(
            f"{name} has {array.ndim} dimensions (shape {array.shape}); expected {ndim}"
        )
    return _frozen(array)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


def _set(holder: object, name: str, array: NDArray[Any]) -> None:
    object.__setattr__(holder, name, array)


def _reject(name: str, array: NDArray[Any], bad: NDArray[np.bool_], what: str) -> None:
    where = np.argwhere(bad)
    if len(where):
        index = ", ".join(map(str, where[0].tolist()))
        more = f" (and {len(where) - 1} more)" if len(where) > 1 else ""
        raise ProblemError(f"{name}[{index}] = {array[tuple(where[0])]:g} {what}{more}")


def _at(message: str, nodes: ArrayLike) -> ProblemError:
    error = ProblemError(message)
    error.nodes = tuple(int(node) for node in np.asarray(nodes))
    return error


def _adjacency(ends: Ints, nodes: int) -> Adjacency:
    start = np.zeros(nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(ends, minlength=nodes), out=start[1:])
    return Adjacency(_frozen(start), _frozen(np.argsort(ends, kind="stable")))


def _cycle(readers: list[list[int]], missing: list[int]) -> list[int]:
    """A cycle among the nodes that never became ready: walk backwards until a node repeats."""
    inputs: dict[int, int] = {}
    for source, targets in enumerate(readers):
        for target in targets:
            if missing[source] > 0 and missing[target] > 0:
                inputs.setdefault(target, source)
    node, seen, path = min(inputs), {}, []  # type: int, dict[int, int], list[int]
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = inputs[node]
    cycle = path[seen[node] :][::-1]
    return [*cycle, cycle[0]]

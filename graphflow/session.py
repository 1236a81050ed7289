"""Session: the façade. Fetches and feeds in, numpy arrays out; in between the whole way of the
data.

A set of fetches is compiled once: optimised, placed, partitioned and given to the workers. Its
    placement then stays;
programs specialise by the sizes that are fed. State belongs to the session: a variable lives where
it was first placed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic_ns
from types import TracebackType
from typing import Any

import numpy as np

from graphflow.compiled import Compiled, worker_of
from graphflow.errors import (
    CheckpointError,
    FeedError,
    GraphflowError,
    SessionError,
    StateLost,
    VariableError,
    WorkerLost,
)
from graphflow.feeding import convert
from graphflow.graph import Graph
from graphflow.op import Node, Tensor
from graphflow.passes import optimize
from graphflow.placement.cluster import Cluster
from graphflow.placement.plan import Plan, devices_of, order_of, plan_graph
from graphflow.runtime.checkpoint import Checkpoint, load, save
from graphflow.runtime.host import DRAWS
from graphflow.runtime.hosts import Hosts, LocalHosts
from graphflow.runtime.partition import FREE, partition
from graphflow.runtime.trace import Trace
from graphflow.structure import bind, flatten

Array = np.ndarray[Any, Any]
DEADLINE = 300.0
"""Seconds that a step may take unless the session says otherwise."""

default_cluster: ContextVar[Cluster | None] = ContextVar("default_cluster", default=None)
"""What `Session()` uses instead of this process; `graphflow run` sets it."""


class Session:
    """Runs graphs on a cluster, and holds their variables.

    Args:
        cluster: None for this process; a `Cluster`; or the path of a cluster file.
        plan: a plan to place by, instead of planning.
        placer: name of the placement algorithm.
        deadline: seconds that a step may take.

    Raises:
        ClusterError, RendezvousTimeout, VersionMismatch: the cluster cannot be used, or does not
            come up.
    """

    def __init__(
        self,
        cluster: Cluster | str | os.PathLike[str] | None = None,
        *,
        plan: Plan | None = None,
        placer: str = "greedy",
        deadline: float = DEADLINE,
    ) -> None:
        if not (isinstance(deadline, int | float) and deadline > 0):
            raise SessionError(f"a deadline is a number of seconds above 0, not {deadline!r}")
        self.cluster = _cluster(cluster, plan)
        self._plan = plan
        self._placer = placer
        self._deadline = float(deadline)
        self._names: dict[Node, str] = {}
        self._variables: dict[str, Tensor] = {}
        self._homes: dict[Node, str] = {}
        self._pending: dict[str, Array] = {}
        self._compiled: dict[tuple[int, ...], Compiled] = {}
        self._steps = 0  # committed
        self._attempts = 0
        self._trace: Trace | None = None
        self._last: Compiled | None = None
        self._lost: WorkerLost | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._runner: ThreadPoolExecutor | None = None
        self._hosts = _hosts(self.cluster)

    # Running ----------------------------------------------------------------------------------

    def run(self, fetches: Any, feeds: Mapping[Tensor, Any] | None = None) -> Any:
        """Run a step: one consistent read of the state, all updates together at its end, or
        nothing.

        Args:
            fetches: a tensor, or a list, tuple or dict of them, nested at will.
            feeds: a value for each placeholder that the fetches depend on.

        Returns:
            Arrays that belong to the caller, in the structure of the fetches; None for a training
            op.

        Raises:
            FetchError, FeedError: before the step starts.
            OpError, StepTimeout, WorkerLost: the step failed, and changed nothing.
        """
        with self._lock:
            self._check_open()
            tensors, rebuild = flatten(fetches)
            given = self._checked_feeds(feeds)
            compiled = self._compile(tensors, given)
            arrays = {node: self._fed(compiled, node, value) for node, value in given.items()}
            return rebuild(self._step(compiled, arrays, compiled.bindings(arrays)))

    def run_async(self, fetches: Any, feeds: Mapping[Tensor, Any] | None = None) -> Future[Any]:
        """As `run`, in the order of the calls, without waiting: a future of the result."""
        self._check_open()
        with self._lock:
            if self._runner is None:
                self._runner = ThreadPoolExecutor(1, "graphflow-session")
            return self._runner.submit(self.run, fetches, dict(feeds or {}))

    def compile(
        self, fetch_sets: Sequence[Any], shapes: Mapping[Tensor, Sequence[int]] | None = None
    ) -> None:
        """Place several sets of fetches together, so that variables live where it suits them all.

        Args:
            fetch_sets: each what a `run` will fetch.
            shapes: sizes of placeholders that have symbolic ones.
        """
        with self._lock:
            self._check_open()
            sets = [flatten(fetches)[0] for fetches in fetch_sets]
            sizes = {t.node: tuple(shape) for t, shape in (shapes or {}).items()}
            everything = [t for tensors in sets for t in tensors]
            if len(self.cluster.devices) > 1 and everything:
                joint = self._prepare(tuple(everything))
                joint.sizes = _shapes(joint.source, sizes)
                plan = self._make_plan(joint)
                for node, device in devices_of(plan, joint.graph).items():
                    if node.op.name == "variable":
                        self._homes.setdefault(node, device)
            for tensors in sets:
                self._placed(tuple(tensors), sizes)

    def _step(
        self, compiled: Compiled, arrays: Mapping[Node, Array], bindings: dict[str, int]
    ) -> list[Any]:
        self._attempts += 1
        start = monotonic_ns()
        fetched: Mapping[str, Array] = {}
        if compiled.partitions:
            try:
                result = self._hosts.step(
                    compiled.program,
                    self._attempts,
                    {**bindings, DRAWS: self._steps},
                    compiled.feeds(arrays),
                    self._trace is not None,
                    self._deadline,
                )
            except WorkerLost as error:
                self._lost = error
                raise
            fetched = result.fetches
            if self._trace is not None:
                edges = compiled.edges(bindings)
                self._trace.add_step(self._attempts, start, monotonic_ns(), result.spans, edges)
                self._trace.peak_memory = result.peak
        self._steps += 1
        self._last = compiled
        return compiled.values(fetched, arrays)

    # Feeds ------------------------------------------------------------------------------------

    def _checked_feeds(self, feeds: Mapping[Tensor, Any] | None) -> dict[Node, Any]:
        if feeds is not None and not isinstance(feeds, Mapping):
            raise FeedError(f"feeds are a dict from placeholders to values, not {feeds!r}")
        given = {}
        for tensor, value in (feeds or {}).items():
            if not isinstance(tensor, Tensor):
                raise FeedError(f"feed {tensor!r} is no placeholder; use the tensor itself as key")
            if tensor.node.op.name != "placeholder":
                raise FeedError(
                    f"feed {tensor.name!r} (made at {tensor.node.location}) is no placeholder "
                    f"but a {tensor.node.op.name}; only placeholders are fed"
                )
            given[tensor.node] = value
        return given

    def _fed(self, compiled: Compiled, node: Node, value: Any) -> Array:
        if node not in compiled.source.placeholders:
            raise FeedError(
                f"feed {node.name!r} (made at {node.location}) is unknown to these fetches: "
                "nothing fetched depends on it; leave it out"
            )
        return convert(node, value)

    # Compiling --------------------------------------------------------------------------------

    def _compile(self, tensors: Sequence[Tensor], given: Mapping[Node, Any]) -> Compiled:
        """The compiled form of fetches; planned for the shapes of the first feeds."""
        compiled = self._compiled.get(tuple(map(id, tensors)))
        if compiled is None:
            compiled = self._prepare(tuple(tensors))
        missing = [n for n in compiled.source.placeholders if n not in given]
        if missing:
            node = missing[0]
            raise FeedError(
                f"placeholder {node.name!r} (made at {node.location}) is not fed, and the fetches "
                f"depend on it; add it to the feeds: {node.specs[0]}"
            )
        if not compiled.program:
            shapes = {n: np.shape(convert(n, v)) for n, v in given.items()}
            compiled = self._placed(compiled.fetches, shapes)
        return compiled

    def _prepare(self, tensors: tuple[Tensor, ...]) -> Compiled:
        """Verify and optimise; nothing is placed or sent."""
        source = Graph(tensors).verify()
        for node in source.variables:
            self._name(node)
        return Compiled(tensors, source, optimize(source))

    def _name(self, node: Node) -> str:
        """The variable's name in this session, unique."""
        if node in self._names:
            return self._names[node]
        name, number = node.name, 0
        while name in self._variables:
            if node.attrs["named"]:
                other = self._variables[name].node
                raise VariableError(
                    f"two variables are named {name!r}: made at {other.location} and "
                    f"{node.location}; give one another name"
                )
            number += 1
            name = f"{node.name}_{number}"
        self._names[node] = name
        self._variables[name] = node.outputs[0]
        return name

    def _placed(self, tensors: tuple[Tensor, ...], sizes: Mapping[Node, Any]) -> Compiled:
        compiled = self._prepare(tensors)
        compiled.sizes = _shapes(compiled.source, sizes)
        graph = compiled.graph
        order: Sequence[Node] | None = None
        if len(self.cluster.devices) == 1 and self._plan is None:
            compiled.devices = self._only_device(graph)
        else:
            compiled.plan = self._plan or self._make_plan(compiled)
            compiled.devices = devices_of(compiled.plan, graph)
            order = order_of(compiled.plan, graph)
        names = {node: self._names[node] for node in graph.variables}
        compiled.partitions = partition(graph, compiled.devices, order, names)
        compiled.program = f"p{len(self._compiled)}"
        self._hosts.add(compiled.program, compiled.by_worker)
        self._settle(compiled)
        self._compiled[tuple(map(id, tensors))] = compiled
        return compiled

    def _settle(self, compiled: Compiled) -> None:
        """Note where new variables live, and give them the values they were set to before."""
        for node in compiled.graph.variables:
            home = self._homes.setdefault(node, compiled.devices[node])
            pending = self._pending.pop(self._names[node], None)
            if pending is not None:
                _check_value(node, self._names[node], pending, CheckpointError)
                self._hosts.write(worker_of(home), self._names[node], pending)

    def _only_device(self, graph: Graph) -> dict[Node, str]:
        (device,) = self.cluster.devices
        for node in graph.nodes:
            if node.device:
                self.cluster.match(node.device, node)
        return {node: device for node in graph.nodes if node.op.name not in FREE}

    def _make_plan(self, compiled: Compiled) -> Plan:
        bindings = bind(compiled.source, compiled.sizes)
        return plan_graph(
            compiled.graph, self.cluster, compiled.sizes, bindings, self._placer, self._homes
        )

    def plan(self, fetches: Any = None) -> Plan:
        """The plan by which fetches that have run are placed; default: those of the last step.

        With what was measured, if they ran inside `trace`.

        Raises:
            SessionError: the fetches have not run yet.
        """
        with self._lock:
            compiled = self._last
            if fetches is not None:
                compiled = self._compiled.get(tuple(map(id, flatten(fetches)[0])))
            if compiled is None:
                raise SessionError("these fetches have no plan yet; run them first, or use gf.plan")
            if compiled.plan is None:
                compiled.plan = self._make_plan(compiled)
            return compiled.plan

    # State ------------------------------------------------------------------------------------

    def get(self, variable: Tensor) -> Array:
        """A copy of a variable's value: its initial one if no step has used it."""
        with self._lock:
            self._check_open()
            node = _variable(variable)
            name = self._name(node)
            if node in self._homes and self._is_loaded(node):
                return self._hosts.read(worker_of(self._homes[node]), name)
            if name in self._pending:
                return self._pending[name].copy()
            initial = node.attrs["initial"]
            return np.array(initial() if callable(initial) else initial)

    def set(self, variable: Tensor, value: Any) -> None:
        """Give a variable a value.

        Raises:
            VariableError: no variable, or a value of another shape or an unsafe dtype.
        """
        with self._lock:
            self._check_open()
            node = _variable(variable)
            array = np.array(convert(node, value, VariableError))
            name = self._name(node)
            if self._is_loaded(node):
                self._hosts.write(worker_of(self._homes[node]), name, array)
            else:
                self._pending[name] = array

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write all variables that the session knows to a checkpoint folder.

        Raises:
            CheckpointError: the folder cannot be written; a checkpoint that is there stays intact.
        """
        with self._lock:
            self._check_open()
            values = {name: self.get(tensor) for name, tensor in self._variables.items()}
            save(Checkpoint({**self._pending, **values}, self._steps), folder)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Take variables and the step number from a checkpoint; those not used yet, when they are.

        Raises:
            CheckpointError: unreadable, damaged, or it does not fit the variables; nothing is
                changed.
        """
        with self._lock:
            self._check_open()
            checkpoint = load(folder)
            missing = sorted(set(self._variables) - set(checkpoint.variables))
            if missing:
                raise CheckpointError(
                    f"checkpoint {folder} has no value for {', '.join(missing)}; it has "
                    f"{', '.join(sorted(checkpoint.variables))}"
                )
            for name, tensor in self._variables.items():
                _check_value(tensor.node, name, checkpoint.variables[name], CheckpointError)
            for name, value in checkpoint.variables.items():
                known = self._variables.get(name)
                if known is not None and self._is_loaded(known.node):
                    self._hosts.write(worker_of(self._homes[known.node]), name, value)
                else:
                    self._pending[name] = value
            self._steps = checkpoint.step

    # Tracing, closing -------------------------------------------------------------------------

    @contextmanager
    def trace(self, path: str | os.PathLike[str] | None = None) -> Iterator[Trace]:
        """Record what each device and link does during the block's steps; Perfetto opens the file.

        The plan of the steps then shows what was measured beside what was predicted.
        """
        trace = Trace()
        with self._lock:
            self._check_open()
            self._trace = trace
        try:
            yield trace
        finally:
            with self._lock:
                self._trace = None
            if path is not None:
                trace.save(path)
            if self._last is not None and self._last.plan is not None and trace.steps:
                self._last.plan = self._last.plan.with_measured(trace.measured())

    def close(self) -> None:
        """End the session; workers that it started end too. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._runner is not None:
            self._runner.shutdown(wait=True, cancel_futures=True)
        self._hosts.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("the session is closed; open another one")
        if self._lost is not None:
            raise StateLost(
                f"the session lost a worker and its variables ({self._lost}); open a new session "
                "and load a checkpoint: s.load(folder)"
            )

    def _is_loaded(self, node: Node) -> bool:
        return any(node in c.devices for c in self._compiled.values())


def _cluster(cluster: Cluster | str | os.PathLike[str] | None, plan: Plan | None) -> Cluster:
    if cluster is None:
        cluster = plan.cluster if plan is not None else default_cluster.get()
    if cluster is None:
        return Cluster.here()
    if isinstance(cluster, str | os.PathLike):
        return Cluster.load(cluster)
    if not isinstance(cluster, Cluster):
        raise SessionError(f"a session takes a gf.Cluster or the path of a file, not {cluster!r}")
    return cluster


def _hosts(cluster: Cluster) -> Hosts:
    if cluster.kind == "hypothetical":
        raise SessionError(
            "this cluster is hypothetical: it has no addresses, so plans can be made for it but no "
            "session; give each worker an address"
        )
    if cluster.kind == "here":
        return LocalHosts(cluster.devices, cluster.threads)
    from graphflow.runtime.coordinator import RemoteHosts  # loads ZeroMQ

    return RemoteHosts(cluster, deadline=cluster.deadline)


def _shapes(source: Graph, sizes: Mapping[Node, Any]) -> dict[Node, tuple[int, ...]]:
    """Shapes of all placeholders: those given, and those that are known anyway."""
    shapes = {}
    for node in source.placeholders:
        if node in sizes:
            shapes[node] = tuple(sizes[node])
        elif node.specs[0].is_concrete:
            shapes[node] = tuple(int(s) for s in node.specs[0].shape)  # type: ignore[arg-type]
    return shapes


def _variable(tensor: Any) -> Node:
    if not isinstance(tensor, Tensor) or tensor.node.op.name != "variable":
        raise VariableError(f"{tensor!r} is not a variable")
    return tensor.node


def _check_value(node: Node, name: str, value: Array, error: type[GraphflowError]) -> None:
    spec = node.specs[0]
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise error(
            f"variable {name!r} (made at {node.location}) is {spec}, the value {value.dtype}"
            f"{value.shape}"
        )

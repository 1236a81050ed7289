"""Session: the façade. Fetches and feeds in, numpy arrays out; in between the whole way of the
data.

A set of fetches is compiled once: optimised, placed, partitioned and given to the workers. Its
placement then stays; programs specialise by the sizes that are fed. State belongs to the session: a
variable lives where it was first placed.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import monotonic_ns, perf_counter
from types import TracebackType
from typing import Any

import numpy as np

from graphflow.ahead import signatures
from graphflow.compiled import Compiled, Route, worker_of
from graphflow.connect import cluster_of, hosts_of, survey_of
from graphflow.errors import (
    ArgumentError,
    CheckpointError,
    DeviceError,
    FeedError,
    FetchError,
    SessionError,
    StateLost,
    VariableError,
    WorkerLost,
)
from graphflow.feeding import as_placeholder, convert, convert_all
from graphflow.graph import Graph
from graphflow.learning import (
    idle,
    is_known,
    learn,
    learn_steps,
    mark_seconds,
    median_seconds,
    remember,
    remembered,
    step_cost,
)
from graphflow.memory_report import MemoryReport, memory_report
from graphflow.modules import admit, module_names
from graphflow.op import Node, Tensor, user_location
from graphflow.passes import optimize
from graphflow.pauses import without_collection
from graphflow.placement.cluster import Cluster
from graphflow.placement.learned import Learned
from graphflow.placement.placers import Placer, get_placer
from graphflow.placement.plan import Plan, devices_of, order_of, plan_graph
from graphflow.placement.planning import Given
from graphflow.progress import telling
from graphflow.replanning import GAIN, WINDOW, Replanned, check_replan, drifted, window_at
from graphflow.runtime.checkpoint import Checkpoint, load, save
from graphflow.runtime.host import DRAWS, KEPT
from graphflow.runtime.partition import FREE, partition
from graphflow.runtime.survey import Survey
from graphflow.runtime.trace import Trace
from graphflow.spec import show_shape
from graphflow.structure import bind, concerns, flatten

Array = np.ndarray[Any, Any]
_log = logging.getLogger("graphflow.session")
DEADLINE = 300.0
"""Seconds that a step may take unless the session says otherwise."""


class Session:
    """Runs graphs on a cluster, and holds their variables.

    Args:
        cluster: None for this process; a `Cluster`; or the path of a cluster file.
        plan: a plan to place the first fetches by; what runs later is planned around it.
        placer: name of the placement algorithm.
        deadline: seconds that a step may take.
        ops: names of modules with ops of your own, or functions for `gf.host_call`. Workers import
            them if they were started with `--allow-ops`; those that the session starts itself
            allow just these.
        replan: "auto" to look for a better placement now and then: a few steps are traced, ever
            more rarely; where they took otherwise than predicted, and a new plan would save a tenth
            of a step, the session goes over to it between two steps, and logs that.
        trial: whether fetches that are about to be placed on several processors of this machine run
            a few steps in this process first, on variables of their own, so that the plan rests on
            what their nodes take. It takes moments, and is left out where it would not, where
            enough is known, and where a graph touches anything outside (`print`, `host_call`).

    Raises:
        SessionError, PlanError, PlacementError, ArgumentError: an argument is wrong.
        ModuleNotAllowed: a worker does not allow one of the modules.
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
        ops: Sequence[str] = (),
        replan: str | None = None,
        trial: bool = True,
    ) -> None:
        if not (isinstance(deadline, int | float) and 0 < deadline < math.inf):
            raise SessionError(f"a deadline is a number of seconds above 0, not {deadline!r}")
        get_placer(placer)
        self._automatic = check_replan(replan)
        self._trial = trial
        names = module_names(ops, "ops")
        admit(names)
        self.cluster = cluster_of(cluster, plan)
        self._plan = plan  # until it has placed something
        self._placer = placer
        self._deadline = float(deadline)
        self._names: dict[Node, str] = {}
        self._variables: dict[str, Tensor] = {}
        self._homes: dict[Node, str] = {}
        self._loaded: set[Node] = set()  # variables that their home holds
        self._pending: dict[str, Array] = {}
        self._compiled: dict[tuple[int, ...], Compiled] = {}
        self._programs = 0
        self._steps = 0  # committed
        self._attempts = 0
        self._trace: Trace | None = None
        self._last: Compiled | None = None
        self._lost: WorkerLost | None = None
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.RLock()  # held while a step runs
        self._queue = threading.Lock()  # held while a step is queued
        self._runner: ThreadPoolExecutor | None = None
        self._hosts = hosts_of(self.cluster, names)
        self._survey: Survey | None = None
        self._learned = Learned()

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
            kind = type(fetches)
            if kind is Tensor:
                compiled = self._compiled.get((id(fetches),))
            elif kind is list or kind is tuple:
                compiled = self._compiled.get(tuple(map(id, fetches)))
            elif kind is dict:
                compiled = self._compiled.get(tuple(map(id, fetches.values())))
            else:
                compiled = None
            if compiled is not None and compiled.route is not None and not self._automatic:
                values = self._routed(compiled, compiled.route, feeds)
                if values is not None:
                    if kind is dict:
                        return dict(zip(fetches, values, strict=True))
                    return values[0] if kind is Tensor else kind(values)
            return self._run(fetches, feeds)

    def _routed(self, compiled: Compiled, route: Route, feeds: Any) -> list[Any] | None:
        """A step by the shorter way; None if it is not for it. As `_step` otherwise."""
        if self._trace is not None:
            return None
        named = route.named(feeds)
        if named is None:
            found = compiled.other_route(self._hosts, feeds)
            if found is None:
                return None
            route, named = found
        self._attempts += 1
        start = perf_counter()
        try:
            fetched = route.ready(self._attempts, self._steps, named, self._deadline)
        except KeyboardInterrupt:
            self._steps += 1
            raise
        if fetched is None:
            compiled.lose_routes()
            return None
        self._steps += 1
        self._last = compiled
        compiled.runs += 1
        compiled.took.append(perf_counter() - start)
        return route.values(fetched, feeds)

    def _run(self, fetches: Any, feeds: Mapping[Tensor, Any] | None) -> Any:
        tensors, rebuild = flatten(fetches)
        compiled = self._compiled.get(_key(tensors)) or _prepared(tensors)
        arrays = compiled.arrays(convert_all(feeds))
        shapes = {node: a.shape for node, a in arrays.items()}
        bindings = compiled.bindings(shapes)
        self._prepare(compiled, shapes, bindings)
        with telling("first step of", 0 if compiled.runs else len(compiled.graph)):
            values = self._step(compiled, arrays, bindings)
        if self._automatic:
            self._watch(compiled)
        elif compiled.route is None or compiled.route.bindings is not bindings:
            compiled.find_route(self._hosts, shapes, bindings)
        return rebuild(values)

    def run_async(self, fetches: Any, feeds: Mapping[Tensor, Any] | None = None) -> Future[Any]:
        """As `run`, in the order of the calls, without waiting: a future of the result.

        Feeds are copied, so that the caller's arrays are free at once.

        Raises:
            FetchError, FeedError: at once, where the mistake shows without the graph; else from the
                future, as all other errors.
        """
        self._check_open()
        flatten(fetches)
        copies = {node.outputs[0]: np.array(a) for node, a in convert_all(feeds).items()}
        with self._queue:
            self._check_open()
            if self._runner is None:
                self._runner = ThreadPoolExecutor(1, "graphflow-session")
            return self._runner.submit(self.run, fetches, copies)

    def compile(
        self, fetch_sets: Sequence[Any], shapes: Mapping[Tensor, Sequence[int]] | None = None
    ) -> None:
        """Place several sets of fetches together, so that variables live where it suits them all.

        Args:
            fetch_sets: each what a `run` will fetch.
            shapes: of the placeholders that have sizes which are not known.

        Raises:
            FetchError, FeedError: not sets of fetches; a shape that is missing or wrong.
        """
        with self._lock:
            self._check_open()
            if isinstance(fetch_sets, Tensor) or not isinstance(fetch_sets, Sequence):
                raise FetchError(f"compile takes a list of sets of fetches, not {fetch_sets!r}")
            sets = [flatten(fetches)[0] for fetches in fetch_sets]
            sizes = {as_placeholder(t): tuple(shape) for t, shape in (shapes or {}).items()}
            self._choose_homes([t for tensors in sets for t in tensors], sizes)
            for tensors in sets:
                if _key(tensors) not in self._compiled:
                    compiled = _prepared(tensors)
                    known = _shapes(compiled.source, sizes)
                    self._place(compiled, known, bind(compiled.source, known))

    def warmup(self, fetches: Any, shapes: Mapping[Tensor, Any] | None = None) -> None:
        """Prepare steps before they run: place the fetches, and compile them on the workers for
        feeds of some shapes. The first `run` with such feeds then does neither; nothing is computed
        now, and no state changes.

            s.warmup([loss, train], {images: [(128, 784), (16, 784)], labels: [(128,), (16,)]})

        Args:
            fetches: as for `run`.
            shapes: for each placeholder that the fetches depend on its shape, or an array of that
                shape, or a list of these: then each place in the lists is a step to prepare (at
                most 16, for more are not kept). Placeholders whose shapes are known may be left
                out.

        Raises:
            FetchError, FeedError: not fetches; a placeholder, a shape or the length of a list that
                is wrong or missing.
            WorkerLost: a worker was lost meanwhile.
        """
        with self._lock:
            self._check_open()
            tensors, _ = flatten(fetches)
            compiled = self._compiled.get(_key(tensors)) or _prepared(tensors)
            steps = signatures(compiled.source, shapes)
            if len(steps) > KEPT:
                raise FeedError(
                    f"warmup at {user_location()}: {len(steps)} combinations of shapes, but of "
                    f"each set of fetches at most {KEPT} are kept; warm up those that come first"
                )
            sizes = [compiled.bindings(each) for each in steps]
            for each, bindings in zip(steps, sizes, strict=True):
                self._prepare(compiled, each, bindings)
                if compiled.partitions:
                    self._hosts.prepare(compiled.program, bindings)
                compiled.find_route(self._hosts, each, bindings)

    def _prepare(
        self, compiled: Compiled, shapes: Mapping[Node, Any], bindings: dict[str, int]
    ) -> None:
        """Place, unless that was done for other sizes: then they must fit there."""
        if compiled.program:
            compiled.check_memory(self.cluster, bindings)
        else:
            self._place(compiled, shapes, bindings)

    def _choose_homes(self, tensors: Sequence[Tensor], sizes: Mapping[Node, Any]) -> None:
        """Place variables as one graph of everything would. Sets may assign a variable each, so
        that this is no graph to run, and it is not verified."""
        if len(self.cluster.devices) == 1 or not tensors or self._plan is not None:
            return
        graph = Graph(tensors)
        joint = Compiled(tuple(tensors), graph, graph)
        joint.sizes = _shapes(graph, sizes)
        for node, device in devices_of(self._make_plan(joint), graph).items():
            if node.op.name == "variable":
                self._homes.setdefault(node, device)

    def _step(
        self, compiled: Compiled, arrays: Mapping[Node, Array], bindings: dict[str, int]
    ) -> list[Any]:
        self._attempts += 1
        start = monotonic_ns()
        fetched: Mapping[str, Array] = {}
        traced = self._trace is not None or self._sampled(compiled)
        if compiled.partitions:
            try:
                result = self._hosts.step(
                    compiled.program,
                    self._attempts,
                    {**bindings, DRAWS: self._steps},
                    compiled.feeds(arrays),
                    traced,
                    self._deadline,
                )
            except WorkerLost as error:
                self._lost = error
                raise
            except KeyboardInterrupt:
                self._steps += 1  # it may have committed: its random numbers are not drawn again
                raise
            self._steps += 1
            fetched = result.fetches
            if traced:
                edges = compiled.edges(bindings)
                compiled.traced.append(bindings)
                for trace in filter(None, (self._trace, compiled.trace)):
                    trace.add_step(
                        self._attempts, start, monotonic_ns(), result.spans, edges, result.peak
                    )
            elif compiled.runs:
                compiled.took.append((monotonic_ns() - start) * 1e-9)
        else:
            self._steps += 1
        self._last = compiled
        compiled.runs += 1
        return compiled.values(fetched, arrays)

    # Compiling --------------------------------------------------------------------------------

    @without_collection
    def _place(
        self, compiled: Compiled, sizes: Mapping[Node, Any], bindings: Mapping[str, int]
    ) -> None:
        """Place, partition and hand out; on an error the session is as it was."""
        compiled.sizes = sizes
        with telling("placing", len(compiled.graph)):
            self._divide(compiled, bindings)
            self._hand_out(compiled)

    def _divide(self, compiled: Compiled, bindings: Mapping[str, int]) -> None:
        """Place, unless it has a plan, and partition; the session does not change."""
        graph = compiled.graph
        _check_pins(compiled.source, self.cluster)
        order: Sequence[Node] | None = None
        if len(self.cluster.devices) == 1 and self._plan is None and compiled.plan is None:
            compiled.devices = self._only_device(graph)
        else:
            if compiled.plan is None and self._plan is None:
                self._try_out(compiled, bindings)
            compiled.plan = compiled.plan or self._plan or self._make_plan(compiled)
            compiled.devices = devices_of(compiled.plan, graph)
            order = order_of(compiled.plan, graph)
        names = self._new_names(graph.variables)
        for node, name in names.items():
            if name in self._pending:
                _check_value(node, name, self._pending[name])
        compiled.partitions = partition(
            graph, compiled.devices, order, {**self._names, **names}, self.cluster.devices
        )
        compiled.check_memory(self.cluster, bindings)

    def _try_out(self, compiled: Compiled, bindings: Mapping[str, int]) -> None:
        """Learn what the nodes of fetches take, before they are planned."""
        if self._trial:
            from graphflow.trial import try_out

            if try_out(self._learned, self.cluster, self._surveyed(), compiled, bindings):
                remember(self._learned, self.cluster)

    def _hand_out(self, compiled: Compiled) -> None:
        """Give the workers their partitions, and new variables their values."""
        graph = compiled.graph
        names = self._new_names(graph.variables)
        program = f"p{self._programs}"
        self._programs += 1
        self._hosts.add(program, compiled.by_worker)
        compiled.program = program
        self._plan = None
        self._compiled[_key(compiled.fetches)] = compiled
        self._register(names)
        for node in graph.variables:
            self._settle(node, compiled.devices[node])

    def _new_names(self, nodes: Sequence[Node]) -> dict[Node, str]:
        """Names, unique in this session, of the variables that it does not know yet."""
        names: dict[Node, str] = {}
        fresh = [node for node in nodes if node not in self._names]
        if not fresh:
            return names
        taken = {name: tensor.node for name, tensor in self._variables.items()}
        numbers: dict[str, int] = {}  # the last one tried for each name: thousands may share it
        for node in fresh:
            name, number = node.name, numbers.get(node.name, 0)
            while name in taken:
                if node.attrs["named"]:
                    raise VariableError(
                        f"two variables are named {name!r}: made at {taken[name].location} and "
                        f"{node.location}; give one another name"
                    )
                number += 1
                name = f"{node.name}_{number}"
            numbers[node.name] = number
            names[node] = name
            taken[name] = node
        return names

    def _register(self, names: Mapping[Node, str]) -> None:
        for node, name in names.items():
            self._names[node] = name
            self._variables[name] = node.outputs[0]

    def _name(self, node: Node) -> str:
        """The variable's name in this session."""
        self._register(self._new_names([node]))
        return self._names[node]

    def _settle(self, node: Node, device: str) -> None:
        """Note where a variable lives, and give it the value that it was set to before."""
        home = self._homes.setdefault(node, device)
        self._loaded.add(node)
        pending = self._pending.pop(self._names[node], None)
        if pending is not None:
            self._hosts.write(worker_of(home), self._names[node], pending)

    def _only_device(self, graph: Graph) -> dict[Node, str]:
        (device,) = self.cluster.devices
        return {node: device for node in graph.nodes if node.op.name not in FREE}

    def _make_plan(
        self,
        compiled: Compiled,
        homes: Mapping[Node, str] | None = None,
        placer: str | Placer | None = None,
    ) -> Plan:
        bindings = bind(compiled.source, compiled.sizes)
        survey = self._surveyed()
        return plan_graph(
            compiled.graph,
            self.cluster,
            compiled.sizes,
            bindings,
            placer or self._placer,
            self._homes if homes is None else homes,
            survey.profiles,
            survey.links,
            self._learned,
            survey.steps,
        )

    def _surveyed(self) -> Survey:
        """What planning takes that has to be measured, or was before."""
        if self._survey is None:
            found = survey_of(self._hosts, self.cluster)
            self._learned = remembered(self.cluster)
            self._survey = replace(found, steps=step_cost(self.cluster, found, self._idle_seconds))
        return self._survey

    def _idle_seconds(self, devices: Sequence[str]) -> float:
        """Median seconds of a step that does next to nothing on some devices."""
        compiled, node = idle(devices)
        compiled.partitions = partition(
            compiled.graph, compiled.devices, None, {}, self.cluster.devices
        )
        compiled.program = f"p{self._programs}"
        self._programs += 1
        self._hosts.add(compiled.program, compiled.by_worker)
        before = self._steps, self._last, self._trace
        self._trace = None
        try:
            return median_seconds(partial(self._fed, compiled, {node.outputs[0]: np.float32(0)}))
        finally:
            self._steps, self._last, self._trace = before

    def _fed(self, compiled: Compiled, feeds: Mapping[Tensor, Any]) -> list[Any]:
        """A step of compiled fetches."""
        arrays = compiled.arrays(convert_all(feeds))
        bindings = compiled.bindings({node: a.shape for node, a in arrays.items()})
        compiled.check_memory(self.cluster, bindings)
        return self._step(compiled, arrays, bindings)

    def plan(self, fetches: Any = None) -> Plan:
        """The plan by which fetches that have run are placed; default: those of the last step.

        With what was measured, if they ran inside `trace`.

        Raises:
            SessionError: the fetches have not run yet.
        """
        with self._lock:
            compiled = self._last
            if fetches is not None:
                compiled = self._compiled.get(_key(flatten(fetches)[0]))
            if compiled is None:
                raise SessionError("these fetches have no plan yet; run them first, or use gf.plan")
            if compiled.plan is None:
                self._try_out(compiled, bind(compiled.source, compiled.sizes))
                compiled.plan = self._make_plan(compiled)
            if compiled.measured is not None:
                return compiled.plan.with_measured(compiled.measured)
            return compiled.plan

    def memory(self, fetches: Any = None) -> MemoryReport:
        """What fetches that have run take of each device's memory: predicted, part by part, and
        what the last traced steps recorded; default: those of the last step. Print it.

        Raises:
            SessionError: the fetches have not run yet.
        """
        with self._lock:
            compiled = self._last
            if fetches is not None:
                compiled = self._compiled.get(_key(flatten(fetches)[0]))
            if compiled is None:
                raise SessionError("these fetches have not run yet; run them first")
            return memory_report(compiled, self.cluster)

    # Planning again ---------------------------------------------------------------------------

    def replan(self) -> Replanned:
        """Plan what has run again, with what traced steps taught, and go over to the new placement
        if it is predicted to be faster.

        Variables move, optimisers' slots with them, between two steps: the steps that follow give
        the same bits as they would have. What other fetches ran and where they are placed counts,
        each by its number of steps.

        Raises:
            MemoryLimitError: the graph fits in no memory; nothing has moved.
            WorkerLost: a worker was lost while variables moved.
        """
        with self._lock:
            self._check_open()
            self._learn()
            return self._replanned(0.0)

    def _replanned(self, least: float) -> Replanned:
        """Plan again; go over if a share of a step of at least `least`, and something, is saved."""
        sets = [c for c in self._compiled.values() if c.partitions]
        if not sets:
            return Replanned((), 0.0, 0.0)
        stay = [_as_placed(c, self._make_plan) for c in sets]
        told = [learn_steps(self._learned, p, c.took) for c, p in zip(sets, stay, strict=True)]
        if any(told):
            remember(self._learned, self.cluster)
            stay = [_as_placed(c, self._make_plan) for c in sets]
        one = len(self.cluster.devices) == 1
        go = stay if one else self._planned_anew(sets, stay)
        steps = [max(1, c.runs) for c in sets]
        before, after = (
            sum(plan.makespan * n for plan, n in zip(plans, steps, strict=True)) / sum(steps)
            for plans in (stay, go)
        )
        if after >= before * min(1 - least, 1 - 1e-6):
            for compiled, plan in zip(sets, stay, strict=True):
                compiled.plan = plan
            return Replanned((), before, before)
        return Replanned(self._go_over(sets, go), before, after)

    def _planned_anew(self, sets: Sequence[Compiled], stay: Sequence[Plan]) -> list[Plan]:
        """Plans as if no variable had a home; what takes most of the time chooses first."""
        shares = [c.runs * plan.makespan for c, plan in zip(sets, stay, strict=True)]
        homes: dict[Node, str] = {}
        plans: dict[int, Plan] = {}
        for at in sorted(range(len(sets)), key=lambda at: -shares[at]):
            graph = sets[at].graph
            plans[at] = self._make_plan(sets[at], homes)
            devices = devices_of(plans[at], graph)
            homes |= {node: devices[node] for node in graph.variables}
        return [plans[at] for at in range(len(sets))]

    def _go_over(self, sets: Sequence[Compiled], plans: Sequence[Plan]) -> tuple[str, ...]:
        """Move variables, and give the workers new programs; the names of what moved.

        All that can fail for the plans' sake comes first. Then the values of what moves are with
        the client, until their new homes have them.
        """
        fresh: dict[int, Compiled] = {}
        for number, (old, plan) in enumerate(zip(sets, plans, strict=True)):
            if [(n.name, n.device) for n in plan.nodes] == _placed_nodes(old):
                old.plan = plan
                continue
            new = Compiled(old.fetches, old.source, old.graph, old.sizes, plan=plan, runs=old.runs)
            self._divide(new, bind(new.source, new.sizes))
            fresh[number] = new
        moved = {
            node: self._homes[node]
            for new in fresh.values()
            for node in new.graph.variables
            if self._homes[node] != new.devices[node]
        }
        values = {
            self._names[node]: self._hosts.read(worker_of(home), self._names[node])
            for node, home in moved.items()
        }
        leaving: dict[int, list[str]] = {}
        for node, home in moved.items():
            leaving.setdefault(worker_of(home), []).append(self._names[node])
        self._pending.update(values)
        for node in moved:
            del self._homes[node]
            self._loaded.discard(node)
        for number in fresh:
            del self._compiled[_key(sets[number].fetches)]
        self._hosts.forget([sets[number].program for number in fresh], leaving)
        for number, new in fresh.items():
            self._hand_out(new)
            if self._last is sets[number]:
                self._last = new
        return tuple(self._names[node] for node in moved)

    def _sampled(self, compiled: Compiled) -> bool:
        """Whether the automatic mode traces the next step of some fetches."""
        return (
            self._automatic
            and len(self.cluster.devices) > 1
            and window_at(compiled.runs) is not None
        )

    def _watch(self, compiled: Compiled) -> None:
        """At the end of a window of traced steps: learn, and plan again if they drifted."""
        if window_at(compiled.runs - 1) != WINDOW - 1 or not self._sampled_ended(compiled):
            return
        steps = compiled.trace.steps[-WINDOW + 1 :]
        assert compiled.plan is not None
        drift = drifted(steps, compiled.plan.makespan, mark_seconds())
        self._learn()
        if drift:
            told = self._replanned(GAIN)
            _log.log(logging.INFO if told.after < told.before else logging.DEBUG, "%s", told)

    def _sampled_ended(self, compiled: Compiled) -> bool:
        return compiled.plan is not None and len(compiled.trace.steps) >= WINDOW

    # State ------------------------------------------------------------------------------------

    def get(self, variable: Tensor) -> Array:
        """A copy of a variable's value: its initial one if no step has used it."""
        with self._lock:
            self._check_open()
            node = _variable(variable, "get")
            name = self._name(node)
            if node in self._loaded:
                return self._hosts.read(worker_of(self._homes[node]), name)
            if name in self._pending:
                _check_value(node, name, self._pending[name])
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
            node = _variable(variable, "set")
            array = np.array(convert(node, value, VariableError))
            name = self._name(node)
            if node in self._loaded:
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
                _check_value(tensor.node, name, checkpoint.variables[name])
            for name, value in checkpoint.variables.items():
                known = self._variables.get(name)
                if known is not None and known.node in self._loaded:
                    self._hosts.write(worker_of(self._homes[known.node]), name, value)
                else:
                    self._pending[name] = value
            self._steps = checkpoint.step

    # Tracing, closing -------------------------------------------------------------------------

    @contextmanager
    def trace(
        self, path: str | os.PathLike[str] | None = None, memory: bool = False
    ) -> Iterator[Trace]:
        """Record what each device and link does during the block's steps; Perfetto opens the file.

        The plan of the steps then shows what was measured beside what was predicted.

        Args:
            memory: count what kernels take besides their buffers, too, by Python's own tracing of
                allocations, which makes steps slower; see `memory`. Workers of other processes
                count if they were started with PYTHONTRACEMALLOC=1.

        Raises:
            ArgumentError: memory is no bool.
        """
        if not isinstance(memory, bool):
            raise ArgumentError(f"trace: memory is True or False, not {memory!r}")
        counting = memory and not tracemalloc.is_tracing()
        trace = Trace()
        with self._lock:
            self._check_open()
            if is_known(self.cluster):
                self._surveyed()  # else what is traced would teach nothing
            self._trace = trace
        if counting:
            tracemalloc.start()
        try:
            yield trace
        finally:
            if counting:
                tracemalloc.stop()
            with self._lock:
                self._trace = None
                self._learn()
            if path is not None:
                trace.save(path)

    def _learn(self) -> None:
        """Sum up what was traced, and let the next plan know."""
        traced = [c for c in self._compiled.values() if c.trace.steps]
        for compiled in traced:
            if compiled.partitions and self._survey is not None:
                learn(self._learned, self.cluster, self._survey, compiled)
            compiled.keep_measured()
        if traced and self._survey is not None:
            remember(self._learned, self.cluster)

    def close(self) -> None:
        """End the session; workers that it started end too. A second call does nothing.

        Waits for the step of `run_async` that runs; those still queued are cancelled.
        """
        if self._closed:
            return
        if self._process != os.getpid():  # forked: the threads and workers are the parent's
            self._closed = True
            return
        with self._queue:
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
        if error is not None and not self._closed and self._process == os.getpid():
            self._hosts.cancel()  # else the step of a `run_async` would hold the error back
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("the session is closed; open another one")
        if self._process != os.getpid():
            raise SessionError(
                f"the session belongs to process {self._process}, of which this one is a fork "
                "without its threads; open a session here"
            )
        if self._lost is not None:
            raise StateLost(
                f"the session lost a worker and its variables ({self._lost}); open a new session "
                "and load a checkpoint: s.load(folder)"
            )


def _as_placed(compiled: Compiled, make_plan: Callable[..., Plan]) -> Plan:
    """The present placement, predicted by what is known now; as it was where that is unknown."""
    plan = compiled.plan
    if plan is None:  # there is one device
        return make_plan(compiled)
    if plan.model is None:
        return plan
    made: Plan = make_plan(compiled, {}, Given(plan.model.assignment))
    return replace(made, placer=plan.placer)


def _placed_nodes(compiled: Compiled) -> list[tuple[str, str]]:
    return [(n.name, n.device) for n in compiled.plan.nodes] if compiled.plan is not None else []


def _shapes(source: Graph, sizes: Mapping[Node, Any]) -> dict[Node, tuple[int, ...]]:
    """Shapes of all placeholders: those given, and those that are known anyway."""
    shapes = {node: tuple(size) for node, size in sizes.items() if concerns(source, node)}
    for node in source.placeholders:
        if node not in shapes and node.specs[0].is_concrete:
            shapes[node] = tuple(int(s) for s in node.specs[0].shape)  # type: ignore[arg-type]
    return shapes


def _check_pins(source: Graph, cluster: Cluster) -> None:
    """Refuse pins that fit no device, also of nodes that need none once they are optimised."""
    pinned = {node.device: node for node in reversed([*source.walk()]) if node.device}
    for device, node in pinned.items():
        try:
            cluster.match(str(device))
        except DeviceError as error:
            raise DeviceError(
                f"{source.names.get(node, node.name)!r} (made at {node.location}) is pinned: "
                f"{error}"
            ) from None


def _key(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Fetches, told apart by identity; what is compiled keeps them alive."""
    return tuple(map(id, tensors))


def _prepared(tensors: Sequence[Tensor]) -> Compiled:
    """Verified and optimised; nothing is placed or sent."""
    source = Graph(tensors).verify()
    with telling("optimising", len(source)):
        return Compiled(tuple(tensors), source, optimize(source))


def _variable(tensor: Any, what: str) -> Node:
    if not isinstance(tensor, Tensor) or tensor.node.op.name != "variable":
        raise VariableError(f"{what} at {user_location()}: {tensor!r} is not a variable")
    return tensor.node


def _check_value(node: Node, name: str, value: Array) -> None:
    """Refuse a checkpoint's value that does not fit the variable."""
    spec = node.specs[0]
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise CheckpointError(
            f"variable {name!r} (made at {node.location}) is {spec}, but in the checkpoint it is "
            f"{value.dtype}{show_shape(value.shape)}; load one of this model, or set the variable"
        )

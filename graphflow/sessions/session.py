"""The session that users hold: fetches and feeds in, numpy arrays out.

Each set of fetches is compiled once: optimised, placed, partitioned and sent to the workers. The
placement then stays; programs specialise by the sizes that are fed. State belongs to the session: a
variable lives on the device where it was first placed.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from graphflow.base.argument_checks import (
    as_seconds,
    check_flag,
    checks_argument_names,
    checks_arguments,
    describe_unexpected,
    did_you_mean,
    format_value,
)
from graphflow.base.environment import check_environment
from graphflow.base.formatting import show_count
from graphflow.base.notebook_html import html_table
from graphflow.base.process.interrupts import defer_signals, passes_interrupts, passing_interrupts
from graphflow.base.process.user_modules import import_allowed, module_names
from graphflow.errors import (
    CheckpointError,
    FetchError,
    SessionError,
    VariableError,
)
from graphflow.execution.checkpoint_matching import Loaded, check_rename
from graphflow.execution.cluster_connection import cluster_of
from graphflow.execution.compiled_fetches import CompiledFetches, key_of
from graphflow.execution.memory_report import MemoryReport, memory_report
from graphflow.execution.replan_policy import Replanned, check_replan
from graphflow.execution.replica_rows import is_loadable
from graphflow.execution.step_prefetch import Decide, check_stream, not_begun
from graphflow.execution.warmup_shapes import as_shape, by_placeholder
from graphflow.frontend.feeds import convert, convert_feeds
from graphflow.frontend.pytree import flatten
from graphflow.ir.name_hints import SESSION_HINTS
from graphflow.ir.op import Node, Tensor, error_location, user_location
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.placers import get_placer
from graphflow.placement.plans.plan import Plan
from graphflow.planning.migration.placement_improvement import PlacementImprovement
from graphflow.planning.migration.server_changes import ServerChanges, ServersChanged
from graphflow.planning.mirrors.mirror_devices import check_replicas
from graphflow.planning.mirrors.mirror_report import MirrorReport, report_mirrors
from graphflow.recovery.checkpoint_policy import CheckpointPolicy
from graphflow.recovery.named_checkpoints import NamedCheckpoints
from graphflow.runtime.checkpoint.folder import signature
from graphflow.runtime.checkpoint.pieced_arrays import LazyArray
from graphflow.runtime.host.worker_state import WorkerState
from graphflow.runtime.telemetry.logs import configure_by_environment
from graphflow.runtime.tracing.trace import Trace, check_writable
from graphflow.sessions.session_opening import open_session

Array = np.ndarray[Any, Any]
T = TypeVar("T")
DEADLINE = 300.0
"""Default time limit of a step, in seconds."""


@checks_argument_names(SessionError, but=("run",))  # a wrapper would slow down small steps
class Session:
    """Runs graphs on a cluster, and holds their variables.

    Args:
        cluster: None for this process; a `Cluster`; or the path of a cluster file.
        devices: devices of this process instead of a cluster, ["cpu:0"] or ["cpu:0", "gpu:1"]. By
            default they are those of `$GRAPHFLOW_DEVICES`, else the CPU and each GPU that CuPy can
            use. A graph goes to a GPU where that is predicted to be faster. See
            docs/deployment/gpu.md.
        plan: a plan for the first fetches; later fetches are planned around it.
        placer: name of the placement algorithm.
        deadline: seconds that a step may take. In this process, loops and waits between devices
            stop at the deadline; an op that is running is waited for.
        ops: names of modules with ops of your own, or functions for `gf.host_call`. Workers
            import them if they were started with `--allow-ops`. Workers that the session starts
            itself allow exactly these.
        replan: "auto" to look for a better placement now and then. A few steps are traced, ever
            more rarely. If they drift from the prediction, and a new plan would save a tenth of
            a step, the session changes the placement between two steps, and logs it.
        trial: profile a few steps in this process, on variables of their own, before fetches
            are placed on several processors of this machine. The plan then rests on measured
            times. It is skipped if it would take more than moments, if enough is known, and if
            a graph has side effects (`print`, `host_call`). The first plan over several devices
            is then checked by its first steps: the session goes to the best single device if
            that is faster.
        check_finite: undo a step whose fetches or updates hold NaN or infinity, and raise
            NonFiniteError, which names the first node that made one of finite values. Each
            result is checked, and updates need memory of their own until they commit.
        flush_denormals: let CPUs count denormal numbers, in float32 those below 1.2e-38, as
            zero, as operands and as results. Steps whose values fade away then do not become
            slower. It needs x86 processors.
        checkpoint: a directory of checkpoints. The session continues from the newest readable
            one. It writes one now and then, in the background, and when it is closed. When it
            loses a worker it recovers by itself, bit for bit as if it had not. At SIGTERM it
            ends with a last checkpoint and exit status 0 (SystemExit). See
            docs/operations/checkpoints.md.
        every: interval of checkpoints: a number of steps, or a time such as "30s" or "2h";
            default: "10min".
        keep: number of checkpoints to keep; default: 3.
        strict, rename: how the checkpoint's names meet the variables, as for `load`.
        rejoin: seconds to wait for a lost worker of another machine; then the session continues
            with the remaining ones. Default: 10.
        replicas: 2 keeps a mirror of each variable in another process, on another host where there
            are several, which changes with the same commit. When a worker is lost, another takes
            its part at once, with the state of the last commit. See docs/operations/checkpoints.md.
        metrics: address at which this process serves metrics to Prometheus, such as
            "127.0.0.1:9100"; default: `$GRAPHFLOW_METRICS`, else nowhere. See
            docs/operations/observability.md.

    Raises:
        SessionError, PlanError, PlacementError, ArgumentError: an argument is wrong.
        CheckpointError: the directory cannot be used.
        ModuleNotAllowed: a worker does not allow one of the modules.
        ClusterError, RendezvousTimeout, VersionMismatch: the cluster cannot be used, does not
            start, or has fewer hosts or workers than replicas.
    """

    @passes_interrupts
    def __init__(
        self,
        cluster: Cluster | str | os.PathLike[str] | None = None,
        *,
        devices: tuple[str, ...] | list[str] | None = None,
        plan: Plan | None = None,
        placer: str = "greedy",
        deadline: float = DEADLINE,
        ops: Sequence[str] = (),
        replan: str | None = None,
        trial: bool = True,
        check_finite: bool = False,
        flush_denormals: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | str | None = None,
        keep: int | None = None,
        rejoin: float | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        metrics: str | None = None,
        replicas: int = 1,
    ) -> None:
        allowed = as_seconds(deadline)
        if not allowed:
            raise SessionError(
                f"Session at {user_location()}: deadline must be a positive number of seconds, "
                f"not {deadline!r}"
            )
        with error_location("Session"):
            check_flag("trial", trial)
            check_flag("check_finite", check_finite)
            check_flag("flush_denormals", flush_denormals)
            replans = check_replan(replan)
            names = module_names(ops, "ops")
            policy = CheckpointPolicy.from_arguments(
                checkpoint, every, keep, rejoin, strict, rename
            )
        get_placer(placer)
        check_environment()
        configure_by_environment()
        import_allowed(names)
        if devices is not None:
            if cluster is not None:
                raise SessionError(
                    f"Session at {user_location()}: give a cluster or devices, not both; "
                    "gf.Cluster.here(devices=…) is a cluster of this process"
                )
            cluster = Cluster.here(devices)
        used, find_gpus = cluster_of(cluster, plan)
        with error_location("Session"):
            copies = check_replicas(replicas, used)
        parts = open_session(
            used,
            find_gpus=find_gpus,
            plan=plan,
            placer=placer,
            deadline=allowed,
            ops=names,
            replans=replans,
            trial=trial,
            check_finite=check_finite,
            flush_denormals=flush_denormals,
            policy=policy,
            metrics=metrics,
            replicas=copies,
        )
        self._life, self._steps, self._state, self._planner = parts[:4]
        self._deployment, self._runner, self._recovery, self._runs_cached = parts[4:]
        self._lock = self._life.lock
        self._compiled = self._deployment.compiled
        self._placement = PlacementImprovement(self._deployment, replans)
        self._checkpoints = NamedCheckpoints(self._recovery, self._state, self._steps)

    # Running ----------------------------------------------------------------------------------

    def run(
        self, fetches: Any, feeds: Any = None, *, steps: int | None = None, **unknown: Any
    ) -> Any:
        """Run a step: read one consistent state, and apply all updates together at the end, or
        none.

            for loss, _ in s.run([loss, train], batches, steps=1000): ...

        Args:
            fetches: a tensor, or a nested list, tuple or dict of tensors.
            feeds: a value for each placeholder that the fetches depend on, by the tensor or its
                name. Feeds for other fetches of the session, and for functions whose
                derivatives are fetched, are accepted and ignored. With `steps`, an iterable of
                such dicts, one for each step; a few are taken ahead.
            steps: run so many steps, each when its result is requested. Numbers, states and
                errors are those of as many calls. Workers get the feeds of the next steps
                early, and compute one while its result is not requested yet.

        Returns:
            Arrays that belong to the caller, in the structure of the fetches; None for a
                training op. With `steps`, an iterator of these.

        Raises:
            FetchError, FeedError: before the step starts.
            OpError, StepTimeout, WorkerLost: the step failed, and changed nothing.
            NonFiniteError: with `check_finite`, the same, for a result that is not finite.
        """
        if unknown:
            raise _unknown_argument(next(iter(unknown)))
        life = self._life
        life.check_not_reentrant()
        if steps is not None:
            life.check_usable()
            check_stream(feeds, steps)
            tensors, rebuild = flatten(fetches)
            return self._runner.run_many(tensors, rebuild, feeds, steps, self._values)
        # The fast path for fetches and feeds like those of an earlier step. It is written out here
        # because each call of a function would be noticeable in a step of microseconds.
        with self._lock:
            life.check_usable()
            kind = type(fetches)
            if kind is Tensor:
                compiled = self._compiled.get((id(fetches),))
            elif kind is list or kind is tuple:
                compiled = self._compiled.get(tuple(map(id, fetches)))
            elif kind is dict:
                compiled = self._compiled.get(tuple(map(id, fetches.values())))
            else:
                compiled = None
            if compiled is not None and compiled.cached_step is not None and self._runs_cached:
                values = self._steps.run_cached(compiled, compiled.cached_step, feeds)
                if values is not None:
                    if life.sigterm is not None:  # the session writes checkpoints
                        life.after_step()
                    if kind is dict:
                        return dict(zip(fetches, values, strict=True))
                    return values[0] if kind is Tensor else kind(values)
        with passing_interrupts():
            tensors, rebuild = flatten(fetches)
            known = partial(self._deployment.placeholders, tensors)
            given = convert_feeds(feeds, known)  # without the lock: it may run the user's code
            with self._lock:
                life.check_usable()
                return rebuild(self._values(tensors, given))

    def _values(
        self, tensors: Sequence[Tensor], given: Mapping[Node, Array], begun: Decide = not_begun
    ) -> list[Any]:
        """Run a step, repeated after losses of workers, and do what is due after it."""
        values = self._recovery.step(tensors, given, begun)
        self._recovery.retry_on_loss(self._placement.advance)
        self._life.after_step()
        return values

    @passes_interrupts
    def run_async(self, fetches: Any, feeds: Mapping[Tensor, Any] | None = None) -> Future[Any]:
        """Run a step later, in the order of the calls, and return a future of the result of `run`.

        Feeds are copied, so the caller may reuse its arrays at once.

        Raises:
            FetchError, FeedError: at once, if the mistake shows without the graph; other errors
                come from the future.
        """
        life = self._life
        life.check_not_reentrant()
        life.check_usable()
        known = partial(self._deployment.placeholders, flatten(fetches)[0])
        copies = {n.outputs[0]: np.array(a) for n, a in convert_feeds(feeds, known).items()}
        with life.executor.lock:
            life.check_usable()
            future = life.executor.submit(self.run, fetches, copies)
        if life.sigterm is not None and life.sigterm.asked:
            with self._lock:
                life.raise_if_draining()
        return future

    @passes_interrupts
    def compile(
        self, fetch_sets: Sequence[Any], shapes: Mapping[Tensor, Sequence[int]] | None = None
    ) -> None:
        """Place several sets of fetches together, so that the homes of variables suit them all.

        Args:
            fetch_sets: each one a later argument of `run`.
            shapes: shapes of the placeholders whose shapes are not static.

        Raises:
            FetchError, FeedError: not sets of fetches, or a shape is missing or wrong.
        """
        with self._life.own_lock(), self._life.operation():
            if isinstance(fetch_sets, Tensor) or not isinstance(fetch_sets, Sequence):
                raise FetchError(
                    f"compile takes a list of sets of fetches, not {format_value(fetch_sets)}"
                )
            sets = [flatten(fetches)[0] for fetches in fetch_sets]
            given = by_placeholder(shapes)
            sizes = {node: as_shape(node, shape) for node, shape in given.items()}
            self._recovery.retry_on_loss(lambda: self._deployment.place_together(sets, sizes))

    @passes_interrupts
    def warmup(self, fetches: Any, shapes: Mapping[Tensor, Any] | None = None) -> None:
        """Prepare steps before they run: place the fetches, and compile them for feeds of some
        shapes.

        Nothing is computed, and no state changes. The first `run` with such feeds then starts at
        once.

            s.warmup([loss, train], {images: [(128, 784), (16, 784)], labels: [(128,), (16,)]})

        Args:
            fetches: as for `run`.
            shapes: for each placeholder that the fetches depend on: a shape, an array of that
                shape, or a list of these. Each position in the lists is a step to prepare; up
                to 1,024 are kept for small programs, 16 for the largest. Placeholders of static
                shape may be left out.

        Raises:
            FetchError, FeedError: not fetches; or a placeholder, a shape or the length of a
                list is wrong or missing.
            WorkerLost: a worker was lost meanwhile.
        """
        with self._life.own_lock(), self._life.operation():
            tensors, _ = flatten(fetches)
            self._recovery.retry_on_loss(lambda: self._deployment.warm_up(tensors, shapes))

    # Plans and memory --------------------------------------------------------------------------

    @passes_interrupts
    def plan(self, fetches: Any = None) -> Plan:
        """Return the plan of fetches that have run; default: those of the last step.

        It includes measurements if they ran inside `trace`.

        Raises:
            SessionError: the fetches have not run yet.
        """
        self._life.check_not_reentrant()
        with self._lock:
            compiled = self._find_compiled(fetches)
            if compiled is None:
                raise SessionError(
                    "these fetches have no plan yet; run them first, or plan them with gf.plan"
                )
            if compiled.plan is None:
                compiled.plan = self._recovery.retry_on_loss(lambda: self._plan_compiled(compiled))
            plan = compiled.plan
            if compiled.mirror_homes:
                assert self._deployment.mirrors is not None
                costs = report_mirrors(self._deployment.mirrors, compiled).describe_costs()
                plan = replace(plan, notes=(*plan.notes, *costs))
            if compiled.verdict is not None:
                plan = replace(plan, verdict=compiled.verdict)
            return plan if compiled.measured is None else plan.with_measured(compiled.measured)

    def _plan_compiled(self, compiled: CompiledFetches) -> Plan:
        self._planner.profile_first_steps(compiled, compiled.bindings(compiled.sizes))
        made = self._planner.plan_as_placed(compiled)
        gpus = self._deployment.gpus
        return made if gpus is None else replace(made, notes=(*made.notes, gpus.note))

    @passes_interrupts
    def memory(self, fetches: Any = None) -> MemoryReport:
        """Report the memory that fetches take on each device; default: those of the last step.

        The fetches must have run. Predictions are listed by kind of use, beside what the last
        traced steps recorded. Print the report for a table.

        Raises:
            SessionError: the fetches have not run yet.
        """
        self._life.check_not_reentrant()
        with self._lock:
            compiled = self._find_compiled(fetches)
            if compiled is None:
                raise SessionError("these fetches have not run yet; run them first")
            return memory_report(compiled, self._deployment.cluster)

    @passes_interrupts
    def history(self, fetches: Any = None) -> tuple[Any, ...]:
        """Return what the last steps of some fetches recorded beside their values, the oldest
        first.

        With `gf.parallel.ParameterServer`, it is a `WindowHistory` for each of the last 64 windows.
        Other steps record nothing.

        Args:
            fetches: default: those of the last step.
        """
        self._life.check_not_reentrant()
        with self._lock:
            compiled = self._find_compiled(fetches)
            return () if compiled is None else compiled.history()

    def _find_compiled(self, fetches: Any) -> CompiledFetches | None:
        """Return the compiled fetches; default: those of the last step. None if they have not
        run.

        Fetches that a strategy divides in several ways are returned as the last step ran them.
        """
        last = self._steps.last
        if fetches is None:
            return last
        tensors = flatten(fetches)[0]
        if last is not None and key_of(last.fetches) == key_of(tensors):
            return last
        return self._deployment.find(tensors)

    # Planning again ---------------------------------------------------------------------------

    @passes_interrupts
    def replan(self) -> Replanned:
        """Plan all fetches that have run again, and adopt the new placement if it is predicted to
        be faster.

        The new plan uses what traced steps taught, and fresh measurements of the workers' speeds
        and of the links. Variables move between two steps, with the slots of optimisers; later
        steps give the same bits as before. All fetches that ran count, each by its number of steps.

        The next steps are compared with those before. If they are slower beyond the noise, the
        session goes back, and does not try that placement again until links or nodes are measured
        to be clearly different. The log and `s.plan(fetches).report()` tell the outcome.

        Ranges of tables' rows (`gf.parallel.Data(tables=)`) move as well, if the ids of the last
        steps ask one owner for clearly more rows than others. See docs/parallelism/tables.md.

        Raises:
            MemoryLimitError: the graph fits in no memory; nothing has moved.
            CheckpointError: ranges of rows are to move, and no checkpoint can be written.
            WorkerLost: a worker was lost while variables moved.
        """
        with self._life.own_lock(), self._life.operation():
            return self._placement.replan(self._recovery.retry_on_loss, self._recovery.begin_anew)

    @checks_arguments(SessionError)
    @passes_interrupts
    def add_server(self, at: str | None = None, *, key: str | None = None) -> ServersChanged:
        """Let one more server join those of a `gf.parallel.ParameterServer`, between two windows.

        About 1/n of the variables and of each table's rows move to it, with optimisers' slots,
        straight from the servers that have them. Later windows give the numbers of windows on so
        many servers. See docs/parallelism/parameter-servers.md.

        Args:
            at: the address of a `graphflow worker` that is to join the session, or a device of the
                session. Default: a process that the session starts, if it starts its workers; in a
                session of one process, that process.
            key: the public key of the worker at the address, or the key's name.

        Raises:
            SessionError: the session has run no step of a ParameterServer, or of several.
            ClusterError, ShardingError, MemoryLimitError: the server cannot join; nothing has
                changed.
            WorkerLost: a worker was lost meanwhile, and the session cannot recover.
        """
        return self._change_servers(lambda changes: changes.add(at, key))

    @checks_arguments(SessionError)
    @passes_interrupts
    def remove_server(self, number: int = -1) -> ServersChanged:
        """Let a server hand its variables and rows over to the others, between two windows. Its
        worker leaves the session if nothing else runs there.

        Args:
            number: the server's number; default: the last one.

        Raises:
            SessionError, ShardingError, MemoryLimitError: it cannot leave; nothing has changed.
            WorkerLost: a worker was lost meanwhile, and the session cannot recover.
        """
        return self._change_servers(lambda changes: changes.remove(number))

    def _change_servers(self, change: Callable[[ServerChanges], ServersChanged]) -> ServersChanged:
        with self._life.own_lock(), self._life.operation():
            changes = ServerChanges(self._deployment)
            self._recovery.begin_anew()  # the steps before had other servers
            changed = self._recovery.retry_on_loss(lambda: change(changes))
            self._recovery.change_cluster(self._deployment.cluster)
            return changed

    # State ------------------------------------------------------------------------------------

    @passes_interrupts
    def get(self, variable: Tensor) -> Array:
        """Return a copy of a variable's value: the initial one if no step has used it.

        Raises:
            VariableError: not a variable; or partitioned, and of more than 1 GiB: read rows,
                `s.run(gf.take(variable, rows, 0))`.
        """
        with self._life.own_lock(), self._life.operation(looks=True):
            node = _variable(variable, "get")
            return self._recovery.retry_on_loss(lambda: self._state.get(node))

    @passes_interrupts
    def set(self, variable: Tensor, value: Any) -> None:
        """Give a variable a value.

        Raises:
            VariableError: not a variable, or a value of another shape or an unsafe dtype.
        """
        with self._life.own_lock(), self._life.operation():
            node = _variable(variable, "set")
            array = np.array(convert(node, value, VariableError))
            self._recovery.set(node, array)

    @passes_interrupts
    def set_all(self, values: Mapping[Tensor, Any]) -> None:
        """Give several variables values: all of them, or none if one value does not fit.

        Args:
            values: by variable. A `LazyArray` of the variable's dtype and shape is read a part at a
                time, where it is needed.

        Raises:
            VariableError: see `set`.
        """
        with self._life.own_lock(), self._life.operation():
            found: dict[Node, Any] = {}
            if not isinstance(values, Mapping):
                raise VariableError(
                    f"set_all at {user_location()}: values must be a dict from variables to "
                    f"arrays, not {format_value(values)}"
                )
            for variable, value in values.items():
                node = _variable(variable, "set_all")
                fits = isinstance(value, LazyArray) and is_loadable(node, signature(value))
                found[node] = value if fits else np.array(convert(node, value, VariableError))
            with defer_signals():  # an interrupt must not leave a mixture of two states
                for node, array in found.items():
                    self._recovery.set(node, array)

    @passes_interrupts
    def read_all(self, variables: Sequence[Tensor], use: Callable[[list[Any]], T]) -> T:
        """Call a function with the values of several variables, and return its result.

        Args:
            variables: variables that the session may not have used yet.
            use: gets arrays. A large variable that a strategy divided is a `PiecedArray`, whose
                parts stay where they are until they are read.

        Raises:
            VariableError: something is not a variable.
        """
        with self._life.own_lock(), self._life.operation(looks=True):
            nodes = [_variable(variable, "read_all") for variable in variables]
            state = self._state
            return self._recovery.retry_on_loss(lambda: use(state.value_parts(nodes)))

    @passes_interrupts
    def save(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Write all variables that the session knows to a checkpoint folder.

        Args:
            folder: default: a new one in the directory of `checkpoint=`.

        Raises:
            CheckpointError: the folder cannot be written; a checkpoint that is there stays
                intact.
            ArgumentError: no folder, and the session has no directory for checkpoints.
        """
        with self._life.own_lock(), self._life.operation():
            if folder is not None:
                self._checkpoints.save(folder)
            else:
                self._recovery.save()

    @passes_interrupts
    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
    ) -> Loaded:
        """Take variables and the step number from a checkpoint; unused variables take theirs at
        first use.

        Args:
            folder: a checkpoint; or a directory of several, of which the newest that is
                complete and fits is loaded; or a safetensors file of another program, which
                leaves `step` as it is.
            strict: raise an error for a variable that the checkpoint lacks. Otherwise it keeps
                its value, and the log names it.
            rename: from names of variables or scopes in the checkpoint to names in this model:
                `{"encoder": "enc"}` loads "encoder/w" into "enc/w".

        Returns:
            What was loaded, what is missing, and what has no variable yet. Variables that no
                fetch has used are checked when one does: see `loaded`.

        Raises:
            CheckpointError: unreadable, damaged, or it does not fit the variables; nothing is
                changed.
            ArgumentError: strict is no bool, or rename no dict of names.
        """
        names = check_rename(strict, rename)
        with self._life.own_lock(), self._life.operation():
            return self._checkpoints.load(folder, strict=strict, rename=names)

    @property
    def loaded(self) -> Loaded | None:
        """What is in use of the checkpoint that was loaded last, by `load` or at the start; None if
        there was none. Print it."""
        return self._state.report_loaded()

    @property
    def step(self) -> int:
        """Number of committed steps, including those before a loaded checkpoint: where a loop
        continues.

            for number in range(s.step, 10_000):
                s.run(train, {images: batches[number]})
        """
        return self._steps.committed

    @property
    def checkpoint_error(self) -> CheckpointError | None:
        """Why the last background checkpoint could not be written; None if it was.

        Training continues, and the next checkpoint is tried when it is due.
        """
        return self._recovery.error

    def mirrors(self) -> MirrorReport:
        """Report where the mirrors of variables are, and what they cost.

        Raises:
            SessionError: the session has none; open it with replicas=2.
        """
        self._life.check_not_reentrant()
        mirrors = self._deployment.mirrors
        if mirrors is None or not mirrors.is_active:
            raise SessionError("the session has no mirrors; open it with replicas=2")
        with self._lock:
            return report_mirrors(mirrors, self._steps.last)

    @property
    def cluster(self) -> Cluster:
        """The cluster on which the session runs, without workers that were lost for good.

        GPUs that it takes by itself belong to it, also if no graph has gained by one yet.
        """
        return self._deployment.all_devices

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """The workers: address, host, pid, devices, memory, and whether they are up.

        Each one is asked at once, and has two seconds to answer. Print them to look at them.

        Raises:
            SessionError: the session is closed.
        """
        self._life.check_not_reentrant()
        self._life.check_open()
        cluster = self.cluster
        devices = {each.index: [d.name for d in each.devices] for each in cluster.workers}
        return self._life.hosts.worker_states(devices)

    # Tracing, closing -------------------------------------------------------------------------

    @contextmanager
    def trace(
        self, path: str | os.PathLike[str] | None = None, memory: bool = False
    ) -> Iterator[Trace]:
        """Record the activity of each device and link during the steps of the block.

        Perfetto opens the file. Plans of these steps then show measured beside predicted times.

        Args:
            path: a file to save the trace to.
            memory: also measure the workspaces of kernels (see `memory`), with Python's tracing
                of allocations, which slows steps down. Workers in other processes measure them
                if they were started with PYTHONTRACEMALLOC=1.

        Raises:
            ArgumentError: memory is no bool, or path no path.
            SessionError: the file cannot be written; raised before the block begins.
        """
        with error_location("trace"):
            check_flag("memory", memory)
        counting = memory and not tracemalloc.is_tracing()
        trace = Trace()
        with passing_interrupts():
            if path is not None:
                check_writable(path)
            self._life.check_not_reentrant()
            with self._lock:
                self._life.check_usable()
                self._planner.survey_if_cheap()
                self._steps.trace = trace
        if counting:
            tracemalloc.start()
        try:
            yield trace
        finally:
            if counting:
                tracemalloc.stop()
            with passing_interrupts():
                with self._lock:
                    self._steps.trace = None
                    self._placement.learn()
                if path is not None:
                    trace.save(path)

    @passes_interrupts
    def close(self) -> None:
        """End the session, and the workers that it started. A second call does nothing.

        A running step of `run_async` is waited for; queued ones are cancelled.

        Raises:
            CheckpointError: the last checkpoint cannot be written; the one before is intact,
                and the session is closed all the same.
        """
        self._life.close()

    def __repr__(self) -> str:
        if not self._life.is_open:
            return "<Session, closed>"
        return f"<Session on {self.cluster!r}, step {self.step}>"

    def _repr_html_(self) -> str:
        if not self._life.is_open:
            return html_table("Session, closed", (), ())
        devices = [
            (d.name, show_count(d.threads, "thread") if d.threads else d.product or "")
            for worker in self.cluster.present_workers for d in worker.devices
        ]  # fmt: skip
        return html_table(f"Session, step {self.step}", ("device", ""), devices)

    if not TYPE_CHECKING:  # type checkers would allow every attribute

        def __getattr__(self, name: str) -> NoReturn:
            text = f"a session has no attribute {name!r}"
            if name in SESSION_HINTS:
                text += f"; use {SESSION_HINTS[name]}"
            elif name[0] != "_" and (hint := did_you_mean(name, dir(type(self)))):
                text += f"; {hint}"
            raise AttributeError(text, name=name, obj=self)

    def __enter__(self) -> Session:
        return self

    @passes_interrupts
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._life.close()
        else:
            self._life.abandon(error)


def _unknown_argument(word: str) -> SessionError:
    """Return the error for an argument that `run` does not take."""
    names = ("fetches", "feeds", "steps")
    text = describe_unexpected(word, names)
    if "(" not in text:
        text += f"; a placeholder is fed by run(fetches, {{{word}: value}})"
    return SessionError(f"Session.run at {user_location()}: {text}")


def _variable(tensor: Any, what: str) -> Node:
    if not isinstance(tensor, Tensor) or tensor.node.op.name != "variable":
        raise VariableError(
            f"{what} at {user_location()}: {tensor!r} is not a variable; give the tensor that "
            "gf.variable(initial) made"
        )
    return tensor.node

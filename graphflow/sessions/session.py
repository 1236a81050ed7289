"""Session: the façade. Fetches and feeds in, numpy arrays out; in between the whole way of the
data, which the files that it puts together go.

A set of fetches is compiled once: optimised, placed, partitioned and given to the workers. Its
placement then stays; programs specialise by the sizes that are fed. State belongs to the session: a
variable lives where it was first placed.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from graphflow.base.argument_checks import (
    as_seconds,
    checks_argument_names,
    describe_unexpected,
    did_you_mean,
    format_value,
)
from graphflow.base.environment import check_environment
from graphflow.base.interrupts import defer_signals, passes_interrupts, passing_interrupts
from graphflow.base.user_modules import import_allowed, module_names
from graphflow.errors import (
    ArgumentError,
    CheckpointError,
    FetchError,
    SessionError,
    VariableError,
)
from graphflow.execution.checkpoint_matching import Loaded, check_rename
from graphflow.execution.cluster_connection import cluster_of, hosts_of
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.execution.memory_report import MemoryReport, memory_report
from graphflow.execution.metrics_server import make_step_executor, serve_metrics
from graphflow.execution.replan_policy import GAIN, Replanned, check_replan
from graphflow.execution.step_prefetch import Decide, check_stream, not_begun
from graphflow.execution.variable_store import VariableStore
from graphflow.execution.warmup_shapes import as_shape, by_placeholder
from graphflow.frontend.feeds import convert, convert_feeds
from graphflow.frontend.pytree import flatten
from graphflow.ir.numpy_interop import SESSION_HINTS
from graphflow.ir.op import Node, Tensor, user_location
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.placers import get_placer
from graphflow.placement.plans.plan import Plan
from graphflow.planning.deployment import Deployment
from graphflow.planning.migration import has_drifted, migrate
from graphflow.planning.planner import Planner
from graphflow.recovery.checkpoint_writer import (
    CheckpointPolicy,
    CheckpointWriter,
    read_checkpoint,
    save_in_shards,
)
from graphflow.recovery.no_recovery import NoRecovery
from graphflow.recovery.recoverer import Recovery
from graphflow.runtime.checkpoint import Checkpoint
from graphflow.runtime.partitioning.check_modes import RESULTS
from graphflow.runtime.telemetry.logs import Log, configure_by_environment
from graphflow.runtime.tracing.trace import Trace, check_writable
from graphflow.sessions.session_lifecycle import SessionLifecycle
from graphflow.sessions.step_runner import StepRunner

Array = np.ndarray[Any, Any]
_log = Log("graphflow.session")
DEADLINE = 300.0
"""Seconds that a step may take unless the session says otherwise."""


@checks_argument_names(SessionError, but=("run",))  # a small step takes microseconds
class Session:
    """Runs graphs on a cluster, and holds their variables.

    Args:
        cluster: None for this process; a `Cluster`; or the path of a cluster file.
        plan: a plan to place the first fetches by; what runs later is planned around it.
        placer: name of the placement algorithm.
        deadline: seconds that a step may take. Where this process computes it, loops and waits
            between devices are given up then; an op that computes is waited for.
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
        check_finite: whether a step whose fetches or updates hold NaN or infinity is undone, and
            raises NonFiniteError, which names the first node that made one of finite values. It
            costs a look at each result, and updates memory of their own until they are committed.
        checkpoint: a directory of checkpoints. The session goes on from the newest that can be
            read; writes one now and then, in the background, and when it is closed; recovers by
            itself when it loses a worker, bit for bit as if it had not; and ends with a last
            checkpoint and exit status 0 (SystemExit) at SIGTERM. See docs/checkpoints.md.
        every: how often: a number of steps, or a time such as "30s" or "2h"; default: "10min".
        keep: how many checkpoints stay.
        strict, rename: how the checkpoint meets the variables, as for `load`.
        rejoin: seconds in which a lost worker of another machine may come back; after that the
            session goes on with those that remain.
        metrics: where this process serves what it counts to Prometheus, such as "127.0.0.1:9100";
            default: `$GRAPHFLOW_METRICS`, else nowhere. See docs/observability.md.

    Raises:
        SessionError, PlanError, PlacementError, ArgumentError: an argument is wrong.
        CheckpointError: the directory cannot be used.
        ModuleNotAllowed: a worker does not allow one of the modules.
        ClusterError, RendezvousTimeout, VersionMismatch: the cluster cannot be used, or does not
            come up.
    """

    @passes_interrupts
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
        check_finite: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | str | None = None,
        keep: int | None = None,
        rejoin: float | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        metrics: str | None = None,
    ) -> None:
        allowed = as_seconds(deadline)
        if not allowed:
            raise SessionError(f"a deadline is a number of seconds above 0, not {deadline!r}")
        if not isinstance(trial, bool):
            raise ArgumentError(f"trial is True or False, not {trial!r}")
        if not isinstance(check_finite, bool):
            raise ArgumentError(f"check_finite is True or False, not {check_finite!r}")
        get_placer(placer)
        check_environment()
        configure_by_environment()
        self._automatic = check_replan(replan)
        names = module_names(ops, "ops")
        import_allowed(names)
        policy = CheckpointPolicy.from_arguments(checkpoint, every, keep, rejoin, strict, rename)
        chosen = cluster_of(cluster, plan)
        self._life = life = SessionLifecycle(saves=policy is not None)
        self._lock = life.lock
        with ExitStack() as failed:  # what is undone where the session does not open
            if life.sigterm is not None:
                failed.callback(life.sigterm.end)
            store = policy.store() if policy is not None else None
            hosts = hosts_of(chosen, names, store)
            failed.callback(hosts.close)
            several = len(chosen.devices) > 1
            server = serve_metrics(metrics, hosts)
            if server is not None:
                failed.callback(server.close)
            sampling, metered = self._automatic and several, server is not None
            self._steps = steps = make_step_executor(hosts, allowed, sampling, metered)
            self._state = state = VariableStore(hosts)
            self._planner = Planner(chosen, hosts, state, steps, placer, trial)
            checks = RESULTS if check_finite else ""
            self._deployment = Deployment(chosen, hosts, state, steps, self._planner, plan, checks)
            self._compiled = self._deployment.compiled
            # What is replayed, and what is traced now and then, goes the long way.
            self._runs_cached = not self._automatic and (policy is None or not hosts.can_be_lost)
            self._runner = runner = StepRunner(
                life,
                self._deployment,
                caches_steps=not self._automatic,
                runs_cached=self._runs_cached,
            )
            self._recovery: Recovery | NoRecovery = NoRecovery(self._deployment, runner.step)
            if policy is not None and store is not None:
                writer = CheckpointWriter(store, policy.every, hosts, state, steps)
                patience = life.patience(policy.rejoin)
                self._recovery = Recovery(
                    writer, self._deployment, runner.step, runner.undo_begun, patience,
                    strict=policy.strict, rename=policy.rename,
                )  # fmt: skip
            life.begin(hosts, server, self._deployment, self._recovery)
            failed.pop_all()

    # Running ----------------------------------------------------------------------------------

    def run(
        self, fetches: Any, feeds: Any = None, *, steps: int | None = None, **unknown: Any
    ) -> Any:
        """Run a step: one consistent read of the state, all updates together at its end, or
        nothing.

            for loss, _ in s.run([loss, train], batches, steps=1000): ...

        Args:
            fetches: a tensor, or a list, tuple or dict of them, nested at will.
            feeds: a value for each placeholder that the fetches depend on, by the tensor or its
                name. Those of placeholders that the session's other fetches, or the functions
                whose derivatives are fetched, depend on are not used. With `steps`,
                an iterable of such feeds, one for each step, of which a few are taken ahead.
            steps: run so many steps, each when its result is asked for. The same numbers, states
                and errors as of so many calls, but workers have the feeds of the next steps
                before they need them, and compute one while its result is not asked for yet.

        Returns:
            Arrays that belong to the caller, in the structure of the fetches; None for a training
            op. With `steps`, an iterator of them.

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
                    if life.sigterm is not None:  # there are checkpoints
                        life.after_step()
                    if kind is dict:
                        return dict(zip(fetches, values, strict=True))
                    return values[0] if kind is Tensor else kind(values)
        with passing_interrupts():
            tensors, rebuild = flatten(fetches)
            known = partial(self._deployment.placeholders, tensors)
            given = convert_feeds(feeds, known)  # out of turn: it may run code of the user's
            with self._lock:
                life.check_usable()
                return rebuild(self._values(tensors, given))

    def _values(
        self, tensors: Sequence[Tensor], given: Mapping[Node, Array], begun: Decide = not_begun
    ) -> list[Any]:
        """A step, as often as it takes, and what follows from it."""
        values = self._recovery.step(tensors, given, begun)
        self._recovery.retry_on_loss(self._replan_on_drift)
        self._life.after_step()
        return values

    @passes_interrupts
    def run_async(self, fetches: Any, feeds: Mapping[Tensor, Any] | None = None) -> Future[Any]:
        """As `run`, in the order of the calls, without waiting: a future of the result.

        Feeds are copied, so that the caller's arrays are free at once.

        Raises:
            FetchError, FeedError: at once, where the mistake shows without the graph; else from the
                future, as all other errors.
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
        """Place several sets of fetches together, so that variables live where it suits them all.

        Args:
            fetch_sets: each what a `run` will fetch.
            shapes: of the placeholders that have sizes which are not known.

        Raises:
            FetchError, FeedError: not sets of fetches; a shape that is missing or wrong.
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
        """Prepare steps before they run: place the fetches, and compile them on the workers for
        feeds of some shapes. The first `run` with such feeds then does neither; nothing is computed
        now, and no state changes.

            s.warmup([loss, train], {images: [(128, 784), (16, 784)], labels: [(128,), (16,)]})

        Args:
            fetches: as for `run`.
            shapes: for each placeholder that the fetches depend on its shape, or an array of that
                shape, or a list of these: then each place in the lists is a step to prepare (as
                many as are kept: up to 1,024 of small programs, 16 of the largest). Placeholders
                whose shapes are known may be left out.

        Raises:
            FetchError, FeedError: not fetches; a placeholder, a shape or the length of a list that
                is wrong or missing.
            WorkerLost: a worker was lost meanwhile.
        """
        with self._life.own_lock(), self._life.operation():
            tensors, _ = flatten(fetches)
            self._recovery.retry_on_loss(lambda: self._deployment.warm_up(tensors, shapes))

    # What is known ----------------------------------------------------------------------------

    @passes_interrupts
    def plan(self, fetches: Any = None) -> Plan:
        """The plan by which fetches that have run are placed; default: those of the last step.

        With what was measured, if they ran inside `trace`.

        Raises:
            SessionError: the fetches have not run yet.
        """
        self._life.check_not_reentrant()
        with self._lock:
            compiled = self._find_compiled(fetches)
            if compiled is None:
                raise SessionError("these fetches have no plan yet; run them first, or use gf.plan")
            if compiled.plan is None:
                compiled.plan = self._recovery.retry_on_loss(lambda: self._plan_compiled(compiled))
            if compiled.measured is not None:
                return compiled.plan.with_measured(compiled.measured)
            return compiled.plan

    def _plan_compiled(self, compiled: CompiledFetches) -> Plan:
        self._planner.profile_first_steps(compiled, compiled.bindings(compiled.sizes))
        return self._planner.plan(compiled)

    @passes_interrupts
    def memory(self, fetches: Any = None) -> MemoryReport:
        """What fetches that have run take of each device's memory: predicted, part by part, and
        what the last traced steps recorded; default: those of the last step. Print it.

        Raises:
            SessionError: the fetches have not run yet.
        """
        self._life.check_not_reentrant()
        with self._lock:
            compiled = self._find_compiled(fetches)
            if compiled is None:
                raise SessionError("these fetches have not run yet; run them first")
            return memory_report(compiled, self.cluster)

    def _find_compiled(self, fetches: Any) -> CompiledFetches | None:
        """What there is of some fetches; default: those of the last step."""
        if fetches is None:
            return self._steps.last
        return self._deployment.find(flatten(fetches)[0])

    # Planning again ---------------------------------------------------------------------------

    @passes_interrupts
    def replan(self) -> Replanned:
        """Plan what has run again, with what traced steps taught and the links as they are now, and
        go over to the new placement if it is predicted to be faster.

        Variables move, optimisers' slots with them, between two steps: the steps that follow give
        the same bits as they would have. What other fetches ran and where they are placed counts,
        each by its number of steps.

        Raises:
            MemoryLimitError: the graph fits in no memory; nothing has moved.
            WorkerLost: a worker was lost while variables moved.
        """
        with self._life.own_lock(), self._life.operation():
            self._learn()
            self._recovery.retry_on_loss(self._planner.remeasure_links)
            return self._recovery.retry_on_loss(lambda: migrate(self._deployment, 0.0))

    def _replan_on_drift(self) -> None:
        """At the end of a window of traced steps: learn, and plan again if they drifted."""
        compiled = self._steps.last if self._automatic else None
        drift = has_drifted(compiled) if compiled is not None else None
        if drift is None:
            return
        self._learn()
        if drift:
            self._planner.remeasure_links()
            told = migrate(self._deployment, GAIN)
            event = "placement.changed" if told.after < told.before else "placement.kept"
            _log.tell(event, text=str(told))

    # State ------------------------------------------------------------------------------------

    @passes_interrupts
    def get(self, variable: Tensor) -> Array:
        """A copy of a variable's value: its initial one if no step has used it."""
        with self._life.own_lock(), self._life.operation(looks=True):
            node = _variable(variable, "get")
            return self._recovery.retry_on_loss(lambda: self._state.get(node))

    @passes_interrupts
    def set(self, variable: Tensor, value: Any) -> None:
        """Give a variable a value.

        Raises:
            VariableError: no variable, or a value of another shape or an unsafe dtype.
        """
        with self._life.own_lock(), self._life.operation():
            node = _variable(variable, "set")
            array = np.array(convert(node, value, VariableError))
            self._recovery.set(node, array)

    @passes_interrupts
    def save(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Write all variables that the session knows to a checkpoint folder.

        Args:
            folder: which; default: one more in the directory of `checkpoint=`.

        Raises:
            CheckpointError: the folder cannot be written; a checkpoint that is there stays intact.
            ArgumentError: no folder, and the session has no directory for checkpoints.
        """
        with self._life.own_lock(), self._life.operation():
            if folder is not None:
                values = self._recovery.retry_on_loss(self._state.values)
                unnamed = self._state.unnamed_groups()
                saved = Checkpoint(values, self._steps.committed, unnamed)
                save_in_shards(saved, self._state, folder)
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
        """Take variables and the step number from a checkpoint; those not used yet, when they are.

        Args:
            folder: of a checkpoint; or of several: then the newest that is whole and fits. Or a
                file of safetensors that another program wrote; `step` stays as it is then.
            strict: whether a variable that the checkpoint lacks is an error. If not, it keeps its
                value, and the log names it.
            rename: names of variables, or of scopes, in the checkpoint and in this model:
                `{"encoder": "enc"}` loads "encoder/w" into "enc/w".

        Returns:
            What was loaded, what is missing, and what no variable has asked for yet. Variables
            that no fetch has used are checked when one does: see `loaded`.

        Raises:
            CheckpointError: unreadable, damaged, or it does not fit the variables; nothing is
                changed.
            ArgumentError: strict is no bool, or rename no dict of names.
        """
        names = check_rename(strict, rename)
        with self._life.own_lock(), self._life.operation():
            state = self._state
            source, checkpoint = read_checkpoint(
                state, folder, self.step, strict=strict, rename=names
            )
            kept = self._recovery.retry_on_loss(lambda: state.values_beyond(checkpoint))

            def take() -> None:
                with defer_signals():  # else some variables are of the checkpoint, others not
                    state.load(checkpoint, str(source), strict=strict)
                    self._steps.committed = checkpoint.step

            def reread() -> Checkpoint:
                """The same once more: after a loss, variables have no values."""
                _, same = read_checkpoint(
                    state, source, checkpoint.step, strict=False, rename=names
                )
                return Checkpoint({**kept, **same.variables}, same.step)

            self._recovery.load(take, reread)
            report = state.report_loaded()
            assert report is not None
            return report

    @property
    def loaded(self) -> Loaded | None:
        """What the session has in use of the checkpoint that it loaded last, by `load` or at its
        start; None if there was none. Print it."""
        return self._state.report_loaded()

    @property
    def step(self) -> int:
        """How many steps have committed, those before a checkpoint that the session went on from
        included: where a loop over data goes on.

            for number in range(s.step, 10_000):
                s.run(train, {images: batches[number]})
        """
        return self._steps.committed

    @property
    def checkpoint_error(self) -> CheckpointError | None:
        """Why the last checkpoint could not be written in the background; None if it could. The
        training goes on, and the next one is tried when it is due."""
        return self._recovery.error

    @property
    def cluster(self) -> Cluster:
        """Where the session runs: what it was given, less the workers that it lost for good."""
        return self._deployment.cluster

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
            ArgumentError: memory is no bool, path no path.
            SessionError: the file cannot be written: said before the block begins.
        """
        if not isinstance(memory, bool):
            raise ArgumentError(f"trace: memory is True or False, not {memory!r}")
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
                    self._learn()
                if path is not None:
                    trace.save(path)

    def _learn(self) -> None:
        """Sum up what was traced, and let the next plan know."""
        self._planner.learn(self._compiled.values())

    @passes_interrupts
    def close(self) -> None:
        """End the session; workers that it started end too. A second call does nothing.

        Waits for the step of `run_async` that runs; those still queued are cancelled.

        Raises:
            CheckpointError: the last checkpoint cannot be written; the one before is intact, and
                the session is closed all the same.
        """
        self._life.close()

    def __repr__(self) -> str:
        if not self._life.is_open:
            return "<Session, closed>"
        return f"<Session on {self.cluster!r}, step {self.step}>"

    if not TYPE_CHECKING:  # it would have every attribute

        def __getattr__(self, name: str) -> NoReturn:
            told = f"a session has no attribute {name!r}"
            if name in SESSION_HINTS:
                told += f"; use {SESSION_HINTS[name]}"
            elif name[0] != "_" and (hint := did_you_mean(name, dir(type(self)))):
                told += f"; {hint}"
            raise AttributeError(told, name=name, obj=self)

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
    """The error for an argument that `run` does not take."""
    names = ("fetches", "feeds", "steps")
    told = describe_unexpected(word, names)
    if "(" not in told:
        told += f"; a placeholder is fed by run(fetches, {{{word}: value}})"
    return SessionError(f"Session.run at {user_location()}: {told}")


def _variable(tensor: Any, what: str) -> Node:
    if not isinstance(tensor, Tensor) or tensor.node.op.name != "variable":
        raise VariableError(
            f"{what} at {user_location()}: {tensor!r} is not a variable; give the tensor that "
            "gf.variable(initial) made"
        )
    return tensor.node

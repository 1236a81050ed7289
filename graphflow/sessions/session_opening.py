"""Open a session: connect to its cluster, and put together the parts that a `Session` calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from graphflow.execution.cluster_connection import hosts_of
from graphflow.execution.metrics_server import make_step_executor, serve_metrics
from graphflow.execution.step_executor import StepExecutor
from graphflow.execution.variable_store import VariableStore
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.plans.plan import Plan
from graphflow.planning.automatic_gpus import AutomaticGpus
from graphflow.planning.deployment import Deployment
from graphflow.planning.mirrors.mirrors import Mirrors
from graphflow.planning.planner import Planner
from graphflow.recovery.checkpoint_policy import CheckpointPolicy
from graphflow.recovery.checkpoint_writer import CheckpointWriter
from graphflow.recovery.mirror_recovery import MirrorRecovery, Takeover
from graphflow.recovery.no_recovery import NoRecovery
from graphflow.recovery.recoverer import Recovery
from graphflow.runtime.checkpoint.store import CheckpointStore
from graphflow.runtime.host.host_interface import LocalHosts
from graphflow.runtime.partitioning.check_modes import RESULTS
from graphflow.sessions.session_lifecycle import SessionLifecycle
from graphflow.sessions.session_report import documents_of
from graphflow.sessions.step_runner import StepRunner


class SessionParts(NamedTuple):
    """The parts of an open session.

    Attributes:
        runs_cached: True if steps may run by a `CachedStep`.
    """

    life: SessionLifecycle
    steps: StepExecutor
    state: VariableStore
    planner: Planner
    deployment: Deployment
    runner: StepRunner
    recovery: Recovery | NoRecovery
    runs_cached: bool


def open_session(
    cluster: Cluster,
    *,
    find_gpus: Callable[[], Cluster] | None,
    plan: Plan | None,
    placer: str,
    deadline: float,
    ops: Sequence[str],
    replans: bool,
    trial: bool,
    check_finite: bool,
    flush_denormals: bool,
    policy: CheckpointPolicy | None,
    metrics: str | None,
    replicas: int,
) -> SessionParts:
    """Start or reach the workers, load the newest checkpoint, and return the session's parts.

    Args:
        find_gpus: returns the cluster with the GPUs that may join it; None if none may.
        deadline: seconds that a step may take.
        ops: names of the modules that workers import.
        replans: True to trace a few steps now and then, and look for better placements.
        policy: how checkpoints are written; None without a directory for them.
        metrics: address at which metrics are served.
        replicas: copies of each variable, in as many processes.

    Raises:
        As `Session`. Whatever was started by then is closed.
    """
    life = SessionLifecycle(saves=policy is not None)
    with ExitStack() as undo:  # runs only if the session does not open
        if life.sigterm is not None:
            undo.callback(life.sigterm.end)
        store = policy.store() if policy is not None else None
        hosts = hosts_of(cluster, ops, store)
        undo.callback(hosts.close)
        server = serve_metrics(metrics, hosts)
        if server is not None:
            undo.callback(server.close)
        sampling = replans and (len(cluster.devices) > 1 or find_gpus is not None)
        steps = make_step_executor(hosts, deadline, sampling, server is not None)
        state = VariableStore(hosts)
        planner = Planner(cluster, hosts, state, steps, placer, trial)
        checks = RESULTS if check_finite else ""
        mirrors = None
        if hosts.can_be_lost:
            mirrors = Mirrors(cluster, hosts, state, is_active=replicas > 1)
        gpus = None
        if find_gpus is not None and isinstance(hosts, LocalHosts):
            gpus = AutomaticGpus(hosts, cluster, find_gpus)
        deployment = Deployment(
            cluster, hosts, state, steps, planner, plan, checks, mirrors, gpus, flush_denormals
        )
        # A cached step neither enters the log of recovery nor is it traced.
        recovers = policy is not None or replicas > 1
        runs_cached = not replans and not (recovers and hosts.can_be_lost)
        runner = StepRunner(life, deployment, caches_steps=not replans, runs_cached=runs_cached)
        takeover = Takeover(deployment, mirrors, runner.undo_begun) if mirrors is not None else None
        recovery: Recovery | NoRecovery = NoRecovery(deployment, runner.step)
        if policy is not None and store is not None:
            recovery = _make_recovery(life, deployment, runner, policy, store, takeover)
        elif takeover is not None:
            recovery = MirrorRecovery(deployment, runner.step, takeover)
        if server is not None:
            server.documents = documents_of(hosts, deployment, steps)
        life.begin(hosts, server, deployment, recovery)
        undo.pop_all()
    return SessionParts(life, steps, state, planner, deployment, runner, recovery, runs_cached)


def _make_recovery(
    life: SessionLifecycle,
    deployment: Deployment,
    runner: StepRunner,
    policy: CheckpointPolicy,
    store: CheckpointStore,
    takeover: Takeover | None,
) -> Recovery:
    """Return the recovery of a session with checkpoints; it loads the newest of them."""
    writer = CheckpointWriter(
        store, policy.every, deployment.hosts, deployment.state, deployment.steps
    )
    return Recovery(
        writer,
        deployment,
        runner.step,
        runner.undo_begun,
        life.patience(policy.rejoin),
        takeover,
        strict=policy.strict,
        rename=policy.rename,
    )

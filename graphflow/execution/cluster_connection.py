"""Connect a session to its cluster: choose the cluster, start or reach its hosts, survey it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar

from graphflow.base.environment import DEVICES, setting
from graphflow.base.formatting import show_count
from graphflow.base.process.interrupts import defer_signals
from graphflow.errors import PlanError, SessionError
from graphflow.placement.calibration.automatic_cluster import without_gpus
from graphflow.placement.calibration.calibrate import LinkSpeed
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.clusters.machine.machine_devices import CPU, has_cupy
from graphflow.placement.plans.plan import Plan
from graphflow.runtime.checkpoint.store import CheckpointStore
from graphflow.runtime.client.cluster_survey import (
    ClusterSurvey,
    FeedSeconds,
    measure_remote_links,
    measure_speeds,
    measure_undescribed,
)
from graphflow.runtime.host.host_interface import Hosts, LocalHosts

default_cluster: ContextVar[Cluster | None] = ContextVar("default_cluster", default=None)
"""The cluster of a plain `Session()`; None for this process. `graphflow run` sets it."""


is_trial: ContextVar[bool] = ContextVar("is_trial", default=False)
"""True while sessions only measure strategies; workers leave those out of their metrics."""


def cluster_of(
    cluster: Cluster | str | os.PathLike[str] | None, plan: Plan | None
) -> tuple[Cluster, Callable[[], Cluster] | None]:
    """Return the cluster with which a session begins, and a function that finds its GPUs.

    The function returns the cluster with the GPUs that may join it. It is None if none may. GPUs
    that were named, or that the plan uses, are in the first cluster.

    Raises:
        ClusterError, SessionError: neither a cluster nor the path of a cluster file.
        PlanError: the plan uses devices that the cluster does not have.
        ArgumentError: `GRAPHFLOW_DEVICES` names a device that is not here.
    """
    if plan is not None and not isinstance(plan, Plan):
        raise SessionError(
            f"plan must be a gf.Plan, not {plan!r}; read a saved one with gf.Plan.load"
        )
    if cluster is None:
        cluster = plan.cluster if plan is not None else default_cluster.get()
    if cluster is None:
        if setting(DEVICES) is None:
            return Cluster.here([CPU]), Cluster.here if has_cupy() else None
        cluster = Cluster.here()
    if isinstance(cluster, str | os.PathLike):
        cluster = Cluster.load(cluster)
    if not isinstance(cluster, Cluster):
        raise SessionError(
            f"cluster must be a gf.Cluster or the path of a cluster file, not {cluster!r}"
        )
    used = set() if plan is None else set(plan.placement.values()) - {CLIENT}
    if not used <= {*cluster.devices}:
        raise PlanError(
            f"the plan places nodes on {', '.join(sorted(used - {*cluster.devices}))}, the cluster "
            f"has {', '.join(cluster.devices)}; plan for this cluster"
        )
    if cluster.is_automatic and used <= {*(begun := without_gpus(cluster)).devices}:
        return begun, lambda: cluster
    return cluster, None


def hosts_of(
    cluster: Cluster, ops: Sequence[str] = (), store: CheckpointStore | None = None
) -> Hosts:
    """Return the hosts of a cluster, connected and ready; start the workers of a local one.

    Args:
        ops: names of the modules of users' ops that the workers import.
        store: the session's checkpoint directory, with its name and epoch.

    Raises:
        SessionError: the cluster is hypothetical, or this process may not open enough files or
            start enough threads.
        ModuleNotAllowed: a worker does not allow one of the modules.
        RendezvousTimeout, VersionMismatch: a worker does not start, or runs another version.
    """
    if cluster.kind == "hypothetical":
        raise SessionError(
            "this cluster is hypothetical: it has no addresses, so plans can be made for it but no "
            "session; give each worker an address"
        )
    if cluster.kind == "here":
        threads = [d.threads for d in cluster.workers[0].devices if d.threads is not None]
        return LocalHosts(cluster.devices, max(threads, default=None))
    with defer_signals():  # a module that Ctrl-C interrupts while it loads may not load again
        from graphflow.runtime.client.remote_hosts import RemoteHosts

    try:
        return RemoteHosts(
            cluster, deadline=cluster.deadline, dead_after=cluster.dead_after, ops=ops,
            store=store, trial=is_trial.get(),
        )  # fmt: skip
    except Exception as error:
        lacking = _describe_shortage(error)
        if lacking is None:
            raise
        need = f"a session with {show_count(len(cluster.workers), 'worker')} needs {lacking}"
        raise SessionError(f"{need}, or use fewer workers") from error


def _describe_shortage(error: Exception) -> str | None:
    """Say which resource limit of the process an error means; None if it means none."""
    number = getattr(error, "errno", None)  # ZeroMQ's errors have it, too
    if number in (errno.EMFILE, errno.ENFILE):
        return (
            "more files and sockets than this process may open: raise the limit (`ulimit -n 65536`)"
        )
    if isinstance(error, BlockingIOError) or "can't start new thread" in str(error):
        return "more processes and threads than this user may have: raise the limit (`ulimit -u`)"
    return None


def survey_of(
    hosts: Hosts, cluster: Cluster, feed_seconds: FeedSeconds, keep: bool = True
) -> ClusterSurvey:
    """Measure what planning for the cluster needs and its description lacks.

    Args:
        feed_seconds: times feeds to a worker.
        keep: keep what is measured of this machine's links for later sessions.
    """
    if cluster.kind == "here":
        return ClusterSurvey()
    from graphflow.runtime.client.remote_hosts import RemoteHosts

    assert isinstance(hosts, RemoteHosts)
    return measure_undescribed(hosts, cluster, feed_seconds, keep)


def speeds_of_workers(hosts: Hosts, cluster: Cluster) -> dict[int, float]:
    """Measure how fast workers are at the moment; empty if there is nothing to compare.

    That is so unless two workers have CPUs whose speeds no cluster file gives.
    """
    measured = [
        worker
        for worker in cluster.workers
        if any(device.kind == "cpu" and not device.is_described for device in worker.devices)
    ]
    if len(measured) < 2:
        return {}
    from graphflow.runtime.client.remote_hosts import RemoteHosts

    assert isinstance(hosts, RemoteHosts)
    return measure_speeds(hosts, cluster)


def links_of(
    hosts: Hosts, cluster: Cluster, feed_seconds: FeedSeconds
) -> Mapping[tuple[str, str], LinkSpeed] | None:
    """Measure the links of a cluster's workers anew; None if they are on this machine, or if the
    cluster file describes them."""
    if cluster.kind in ("here", "local"):
        return None
    from graphflow.runtime.client.remote_hosts import RemoteHosts

    assert isinstance(hosts, RemoteHosts)
    return measure_remote_links(hosts, cluster, feed_seconds, afresh=True) or None

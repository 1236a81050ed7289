"""Connect: which cluster a session runs on, and the hosts behind it."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar

from graphflow.base.formatting import show_count
from graphflow.base.interrupts import defer_signals
from graphflow.errors import PlanError, SessionError
from graphflow.placement.calibration.calibrate import LinkSpeed
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.plans.plan import Plan
from graphflow.runtime.checkpoint.store import CheckpointStore
from graphflow.runtime.client.cluster_survey import (
    ClusterSurvey,
    links_between,
    measure_undescribed,
)
from graphflow.runtime.host.host_interface import Hosts, LocalHosts

default_cluster: ContextVar[Cluster | None] = ContextVar("default_cluster", default=None)
"""What `Session()` uses instead of this process; `graphflow run` sets it."""


is_trial: ContextVar[bool] = ContextVar("is_trial", default=False)
"""Whether sessions that begin only try something out: workers do not count what these do."""


def cluster_of(cluster: Cluster | str | os.PathLike[str] | None, plan: Plan | None) -> Cluster:
    """The cluster that a session's arguments mean.

    Raises:
        ClusterError, SessionError: neither a cluster nor the path of a cluster file.
        PlanError: the plan is for devices that the cluster does not have.
    """
    if plan is not None and not isinstance(plan, Plan):
        raise SessionError(f"plan is a gf.Plan, not {plan!r}; read a saved one with gf.Plan.load")
    if cluster is None:
        cluster = plan.cluster if plan is not None else default_cluster.get()
    if cluster is None:
        return Cluster.here()
    if isinstance(cluster, str | os.PathLike):
        cluster = Cluster.load(cluster)
    if not isinstance(cluster, Cluster):
        raise SessionError(f"a session takes a gf.Cluster or the path of a file, not {cluster!r}")
    if plan is not None:
        foreign = set(plan.placement.values()) - {*cluster.devices, CLIENT}
        if foreign:
            raise PlanError(
                f"the plan places nodes on {', '.join(sorted(foreign))}, the cluster has "
                f"{', '.join(cluster.devices)}; plan for this cluster"
            )
    return cluster


def hosts_of(
    cluster: Cluster, ops: Sequence[str] = (), store: CheckpointStore | None = None
) -> Hosts:
    """The hosts of a cluster, connected and ready; those of a local one are started.

    Args:
        ops: names of the modules of users' ops that the workers import.
        store: where the session's checkpoints are, and its name and epoch.

    Raises:
        SessionError: the cluster is hypothetical; or this process may not open so many files, or
            start so many threads.
        ModuleNotAllowed: a worker does not allow one of the modules.
        RendezvousTimeout, VersionMismatch: a worker does not come up, or runs something else.
    """
    if cluster.kind == "hypothetical":
        raise SessionError(
            "this cluster is hypothetical: it has no addresses, so plans can be made for it but no "
            "session; give each worker an address"
        )
    if cluster.kind == "here":
        threads = [d.threads for d in cluster.workers[0].devices if d.threads is not None]
        return LocalHosts(cluster.devices, max(threads, default=None))
    with defer_signals():  # what Ctrl-C cuts short in loading may not load again
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
        told = f"a session with {show_count(len(cluster.workers), 'worker')} needs {lacking}"
        raise SessionError(f"{told}, or use fewer workers") from error


def _describe_shortage(error: Exception) -> str | None:
    """What a process has too little of to begin a session, if that is what an error says."""
    number = getattr(error, "errno", None)  # also of ZeroMQ's errors
    if number in (errno.EMFILE, errno.ENFILE):
        return "more files and sockets than this process may open: raise that (`ulimit -n 65536`)"
    if isinstance(error, BlockingIOError) or "can't start new thread" in str(error):
        return "more processes and threads than this user may have: raise that (`ulimit -u`)"
    return None


def survey_of(hosts: Hosts, cluster: Cluster) -> ClusterSurvey:
    """What planning for the cluster takes that has to be measured there."""
    if cluster.kind == "here":
        return ClusterSurvey()
    from graphflow.runtime.client.remote_hosts import RemoteHosts

    assert isinstance(hosts, RemoteHosts)
    return measure_undescribed(hosts, cluster)


def links_of(hosts: Hosts, cluster: Cluster) -> Mapping[tuple[str, str], LinkSpeed] | None:
    """The links between a cluster's workers as they are now; None where nothing is to be measured:
    they are described, or of this machine."""
    if cluster.kind in ("here", "local"):
        return None
    from graphflow.runtime.client.remote_hosts import RemoteHosts

    assert isinstance(hosts, RemoteHosts)
    return links_between(hosts, cluster, afresh=True)

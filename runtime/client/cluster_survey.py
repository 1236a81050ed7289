"""Survey of a cluster: measurements of machines and links that the cost model does not know yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, Any

from graphflow.base.argument_checks import format_value
from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.progress import show_progress
from graphflow.errors import ProtocolError
from graphflow.placement.calibration.calibrate import (
    LinkSpeed,
    StepCost,
    measure_links,
    profile,
    save_links,
)
from graphflow.placement.calibration.cluster_rates import is_described
from graphflow.placement.calibration.link_cache import load_or_measure_links
from graphflow.placement.calibration.profile_file import is_profile
from graphflow.placement.calibration.worker_speeds import (
    better_report,
    is_speed_report,
    speeds_of,
)
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import CLIENT

if TYPE_CHECKING:
    from graphflow.runtime.client.remote_hosts import RemoteHosts


SPEED_ROUNDS = 3
"""Probes of workers' speeds at most: a worker is slow if it is slow in all of them."""
ROUND_PAUSE = 0.2
"""Seconds between two of these probes, in which others may end what they do."""


@dataclass(frozen=True)
class ClusterSurvey:
    """Measurements that the cost model needs; None for what it knows by itself.

    Attributes:
        profiles: the speeds of each worker's machine.
        links: the latency and rate of links between workers, and from the client to them.
        steps: the cost of a step that does nothing.
    """

    profiles: Mapping[int, Mapping[str, Any]] | None = None
    links: Mapping[tuple[str, str], LinkSpeed] | None = None
    steps: StepCost | None = None


FeedSeconds = Callable[[int, int, int], float]
"""(worker, nbytes, repeats) -> median seconds from the client to a worker."""


def measure_undescribed(
    hosts: RemoteHosts, cluster: Cluster, feed_seconds: FeedSeconds, keep: bool = True
) -> ClusterSurvey:
    """Measure all that the cluster file does not describe and no earlier run has kept.

    Workers that a session starts are on this machine, whose profile is kept. Their links are
    measured once, and kept with it. Workers elsewhere measure themselves, in about a second each,
    and keep their own profile; the links to them and between them are kept here.

    Args:
        keep: False while a worker is slower than its machine; then links of this machine are
            measured for this session alone.
    """
    if cluster.kind == "local":
        if len(cluster.workers) == 1 or "process" in profile()["links"]:
            return ClusterSurvey()
        if not keep:
            return ClusterSurvey(links=measure_links(hosts.probe_link, len(cluster.workers)))
        keep_process_links(hosts, cluster)
        return ClusterSurvey()
    with show_progress(f"measuring {len(cluster.workers)} workers and the links between them"):
        found = None if is_described(cluster) else hosts.measure()
        _check_reports(cluster, found or {}, is_profile)
        return ClusterSurvey(found, measure_remote_links(hosts, cluster, feed_seconds))


def measure_speeds(hosts: RemoteHosts, cluster: Cluster) -> dict[int, float]:
    """Return the share of its machine's speed that each worker gets now, the fastest being 1.

    It takes a fifth of a second. If a worker is slow, the probe is repeated, because others may
    have used its processor for a moment.
    """
    reports: dict[int, Mapping[str, Any]] = {}
    speeds: dict[int, float] = {}
    for number in range(SPEED_ROUNDS):
        if number:
            time.sleep(ROUND_PAUSE)
        found = {w: r for w, r in hosts.probe_speeds().items() if w < len(cluster.workers)}
        _check_reports(cluster, found, is_speed_report)
        reports = {w: better_report(each, reports.get(w, each)) for w, each in found.items()}
        speeds = speeds_of(reports, cluster)
        if min(speeds.values()) == 1.0:
            break
    return speeds


def _check_reports(
    cluster: Cluster, reports: Mapping[int, Any], is_valid: Callable[[Any], bool]
) -> None:
    """Raise ProtocolError for a worker whose report of its speeds is malformed."""
    for worker, report in reports.items():
        if not is_valid(report):
            raise ProtocolError(
                f"worker {worker} at {cluster.workers[worker].address} reports invalid speeds: "
                f"{format_value(report, 80)}; leave it out, or give its speeds in the "
                "cluster file"
            )


def measure_remote_links(
    hosts: RemoteHosts, cluster: Cluster, feed_seconds: FeedSeconds, *, afresh: bool = False
) -> Mapping[tuple[str, str], LinkSpeed]:
    """Return the links to workers elsewhere and between them that the cluster file leaves out.

    If the file gives all speeds of devices and of links between workers, the client's links keep
    their defaults.

    Args:
        afresh: measure them again, whatever is kept.
    """
    workers = len(cluster.workers)
    ends = [*(worker.devices[0].name for worker in cluster.workers), CLIENT]
    unknown = [
        (a, b)
        for a, b in combinations(range(len(ends)), 2)
        if not {a, b} & {*cluster.left}
        and None in (cluster.link(ends[a], ends[b]), cluster.link(ends[b], ends[a]))
    ]
    if is_described(cluster) and all(b == workers for _, b in unknown):
        return {}

    def probe(source: int, target: int, nbytes: int, repeats: int) -> float:
        if target == workers:
            return feed_seconds(source, nbytes, repeats)
        return hosts.probe_link(source, target, nbytes, repeats)

    addresses = {f"/worker:{worker.index}": str(worker.address) for worker in cluster.workers}
    return load_or_measure_links(probe, {**addresses, CLIENT: CLIENT}, unknown, afresh=afresh)


def keep_process_links(hosts: RemoteHosts, cluster: Cluster) -> LinkSpeed:
    """Measure the links between processes of this machine, and keep their median."""
    found = measure_links(hosts.probe_link, len(cluster.workers)).values()
    link = (median(latency for latency, _ in found), median(rate for _, rate in found))
    save_links({"process": link})
    return link

"""Checks of a cluster's description when it is created, with errors that name the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from graphflow.base.addresses import normalize_address
from graphflow.base.argument_checks import did_you_mean
from graphflow.errors import ClusterError
from graphflow.placement.clusters.devices import CLIENT, Link, Worker, check_number
from graphflow.placement.clusters.shared_ports import Port

KINDS = ("here", "local", "remote", "hypothetical")


class ClusterFields(Protocol):
    """The fields of a `Cluster` that the checks read."""

    @property
    def workers(self) -> tuple[Worker, ...]: ...
    @property
    def links(self) -> tuple[Link, ...]: ...
    @property
    def ports(self) -> tuple[Port, ...]: ...
    @property
    def kind(self) -> str: ...
    @property
    def deadline(self) -> float: ...
    @property
    def dead_after(self) -> float: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    def link(self, source: str, target: str) -> Link | None: ...


def check_cluster(cluster: ClusterFields) -> None:
    """Check that a cluster is possible.

    Raises:
        ClusterError: See `Cluster`.
    """
    if not cluster.workers:
        raise ClusterError("a cluster needs at least one worker")
    if strange := [each for each in cluster.workers if not isinstance(each, Worker)]:
        raise ClusterError(
            f"a cluster is made of Workers; got {strange[0]!r}: Cluster.local(2) makes some of "
            "this machine, Cluster.load(file) knows those whose addresses are in a file"
        )
    if cluster.kind not in KINDS:
        raise ClusterError(f"cluster kind {cluster.kind!r} is none of {', '.join(KINDS)}")
    numbers = [worker.index for worker in cluster.workers]
    if numbers != list(range(len(numbers))):
        raise ClusterError(f"workers must be numbered 0, 1, …; got {numbers}")
    check_number("deadline (seconds)", cluster.deadline, zero=False)
    check_number("dead_after (seconds)", cluster.dead_after, zero=False)
    _check_addresses(cluster)
    _check_links(cluster)
    _check_ports(cluster)
    if cluster.kind == "hypothetical":
        _check_described(cluster)


def suggest_name(word: Any, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: "; did you mean …", or ""."""
    hint = did_you_mean(str(word).lower(), known)
    return f"; {hint}" if hint else ""


def partial_names(cluster: ClusterFields) -> list[str]:
    """Return the names by which pins may name devices: full, of workers, and of parts."""
    names = {*cluster.devices, *(f"/worker:{worker.index}" for worker in cluster.workers)}
    for device in cluster.devices:
        local = device.rpartition("/")[2]
        names |= {local, local.partition(":")[0]}
    return sorted(names)


def _check_addresses(cluster: ClusterFields) -> None:
    """Check that addresses are there where they must be, and differ."""
    addresses = [worker.address for worker in cluster.workers]
    seen: dict[str, int] = {}
    for worker in cluster.workers:
        if cluster.kind == "remote" and worker.address is None:
            raise ClusterError(
                f"worker {worker.index} has no address; the others do: give it 'tcp://host:port'"
            )
        if isinstance(worker.address, str):
            other = seen.setdefault(normalize_address(worker.address), worker.index)
            if other != worker.index:
                raise ClusterError(describe_shared_address(other, worker.index, addresses))


def describe_shared_address(one: int, other: int, addresses: Sequence[str | None]) -> str:
    """Return the error of two workers with the same address."""
    a, b = addresses[one], addresses[other]
    named = f"the address {a}" if a == b else f"a place: {a} and {b} are the same worker"
    return (
        f"workers {one} and {other} share {named}; each needs a `graphflow worker` of its own, at "
        "a port of its own"
    )


def _ends(cluster: ClusterFields) -> list[str]:
    """Return the names that links and ports may use: devices, and workers as a whole."""
    return [*cluster.devices, *(f"/worker:{worker.index}" for worker in cluster.workers)]


def _check_links(cluster: ClusterFields) -> None:
    """Check that the ends of links exist and that each link is described once."""
    ends = dict.fromkeys((CLIENT, *_ends(cluster)))
    seen: set[tuple[str, str]] = set()
    for link in cluster.links:
        for end in (link.source, link.target):
            if end not in ends:
                raise ClusterError(
                    f"link {link.source} -> {link.target}: no {end!r} here{suggest_name(end, ends)}"
                )
        if (link.source, link.target) in seen:
            raise ClusterError(f"link {link.source} -> {link.target} is described twice")
        seen.add((link.source, link.target))


def _check_ports(cluster: ClusterFields) -> None:
    """Check that the ends of ports exist, and their bandwidths."""
    ends = dict.fromkeys(_ends(cluster))
    for port in cluster.ports:
        check_number(f"port {port.name!r}: bandwidth (bytes/s)", port.bandwidth, zero=False)
        for end in (*port.inside, *(port.outside or ()), *port.besides):
            if end not in ends:
                raise ClusterError(f"port {port.name!r}: no {end!r} here{suggest_name(end, ends)}")


def _check_described(cluster: ClusterFields) -> None:
    """Refuse hypothetical hardware without numbers, since it cannot be measured."""
    for device in (device for worker in cluster.workers for device in worker.devices):
        for key in ("flops", "bandwidth", "launch"):
            if not device.is_described and getattr(device, key) is None:
                raise ClusterError(
                    f"device {device.name} is hypothetical: it cannot be measured, "
                    f"so give {key!r}, name a product such as 'h100' "
                    "(or give its worker an address)"
                )
    for source in cluster.devices:
        for target in cluster.devices:
            if source != target and cluster.link(source, target) is None:
                raise ClusterError(
                    f"link {source} -> {target} is hypothetical: it cannot be measured, "
                    "so give its latency and bandwidth (or a default link; between hosts a "
                    "[network], or network=)"
                )

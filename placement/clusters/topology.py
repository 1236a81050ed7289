"""Hosts and the cables between their devices: the links and ports of a cluster.

A cluster file, or a short name such as "2x8xh100", describes hosts. `connect` derives the links of
a `Cluster`, the speed that one pair of devices gets alone, and its ports, which several pairs
share: a network card, the uplink of a PCIe switch, a device's port on the NVLink switch.
`port_routes` writes the ports as arrays for a `Problem`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product as pairs
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ClusterError
from graphflow.placement.clusters.devices import MAX_DEVICES, Link, Worker, check_device_count
from graphflow.placement.clusters.hardware_catalog import Product, product, wire
from graphflow.placement.clusters.shared_ports import Port


@dataclass(frozen=True)
class Cable:
    """A cable between two ends, or several side by side.

    Attributes:
        latency: Seconds.
        bandwidth: Bytes/s in one direction.
        count: Cables side by side. One transfer uses one of them; all share the traffic.
        direct: It does not pass through the host's slots and switches (NVLink).
    """

    latency: float
    bandwidth: float
    count: int = 1
    direct: bool = False

    @staticmethod
    def from_catalog(name: str, count: int = 1) -> Cable:
        """Return a cable of the shipped tables by name, "nvlink4".

        Raises:
            ClusterError: There is none; suggests one.
        """
        known = wire(name)
        return Cable(known.latency, known.bandwidth, count, known.name.startswith("nvlink"))


@dataclass(frozen=True)
class Switch:
    """Devices below one switch, and the uplink that they share towards all others.

    Devices that reach the others of their host directly do not use it for these.
    """

    name: str
    devices: tuple[str, ...]
    uplink: Cable


@dataclass(frozen=True)
class Host:
    """A machine: its workers, and how its devices reach each other and other hosts.

    Args:
        link: Between its devices. None: the usual link of its products.
        nic: Its network card, or several.
        switches: Inside it; devices by their full names.
    """

    name: str
    workers: tuple[Worker, ...]
    link: Cable | None = None
    nic: Cable | None = None
    switches: tuple[Switch, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """Full names, worker by worker."""
        return tuple(device.name for worker in self.workers for device in worker.devices)


_DIGITS = 18  # of a count: int() refuses thousands of digits
_NAMED = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?(\S.*)")


def short_name(text: str) -> tuple[int, int, str]:
    """Return hosts, devices of each, and product of "2x8xh100", "8xh100" or "h100".

    Raises:
        ClusterError: The text has another form, a count of 0 or a huge one, or an unknown product.
    """
    match = _NAMED.fullmatch(str(text).strip())
    if match is None:
        raise ClusterError(f"{text!r} is not of the form '8xh100' or '2x8xh100'")
    first, second, name = match.groups()
    if any(len(count or "") > _DIGITS for count in (first, second)):
        check_device_count(f"{text[:_DIGITS] + '…'!r} is", MAX_DEVICES + 1)
    counts = (int(first or 1), int(second)) if second else (1, int(first or 1))
    if 0 in counts:
        raise ClusterError(f"{text!r} holds no device; counts are at least 1")
    return *counts, product(name).name


def device_names(entries: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return (local name, product) of entries such as "cpu:0", "h100" or "8xh100".

    Products are numbered as GPUs, in turn.

    Raises:
        ClusterError: As `short_name`, or an entry is more devices than a cluster may have.
    """
    made: list[tuple[str, str | None]] = []
    gpus = sum(1 for entry in entries if str(entry).startswith("gpu:"))
    for entry in entries:
        if re.fullmatch(r"(cpu|gpu):\d+", str(entry)):
            made.append((entry, None))
            continue
        hosts, count, name = short_name(entry)
        check_device_count(f"{hosts * count} {name} are", hosts * count)
        for _ in range(hosts * count):
            made.append((f"gpu:{gpus}", name))
            gpus += 1
    return made


# Cables to links and ports --------------------------------------------------------------------

Covered = Callable[[str, str], bool]


def connect(
    hosts: Sequence[Host],
    network: Cable | None = None,
    backbone: float | None = None,
    covered: Covered = lambda source, target: False,
) -> tuple[list[Link], list[Port]]:
    """Return the links and ports of hosts.

    Args:
        network: Between hosts; their cards limit it further.
        backbone: Bytes/s that all traffic between hosts shares.
        covered: Returns True if a link between two devices is described otherwise.
    """
    return list(_links(hosts, network, covered)), list(_ports(hosts, network, backbone))


def _links(hosts: Sequence[Host], network: Cable | None, covered: Covered) -> Iterator[Link]:
    workers = [(host, worker) for host in hosts for worker in host.workers]
    for (here, one), (there, other) in pairs(workers, workers):
        found: dict[tuple[str, str], Cable] = {}
        for a, b in pairs(one.devices, other.devices):
            if a.name == b.name or covered(a.name, b.name):
                continue
            if here is there:
                cable = here.link or _default_cable(_product(a), _product(b))
            else:
                cable = _network_cable(here, there, network, _product(a), _product(b))
            if cable is not None:
                found[a.name, b.name] = cable
        if len(set(found.values())) == 1:  # one link stands for all
            cable = next(iter(found.values()))
            ends = (f"/worker:{one.index}", f"/worker:{other.index}")
            yield Link(*ends, cable.latency, cable.bandwidth)
        else:
            for (source, target), cable in found.items():
                yield Link(source, target, cable.latency, cable.bandwidth)


def _product(device: Any) -> Product | None:
    return None if device.product is None else product(device.product)


def _default_cable(a: Product | None, b: Product | None) -> Cable | None:
    """Return the cable between two devices of a host that has no described link."""
    if a is None or b is None:
        return None
    if a.peer == b.peer:
        return Cable.from_catalog(a.peer)
    return min(
        (Cable.from_catalog(a.bus), Cable.from_catalog(b.bus)), key=lambda cable: cable.bandwidth
    )


def _network_cable(
    here: Host, there: Host, network: Cable | None, a: Product | None, b: Product | None
) -> Cable | None:
    """Return the path between two hosts, as slow as its slowest part."""
    way = [cable for cable in (here.nic, there.nic, network) if cable is not None]
    if not way:
        return None
    latency = max(cable.latency for cable in way)
    way += [Cable.from_catalog(each.bus) for each in (a, b) if each is not None]
    return Cable(latency, min(cable.bandwidth for cable in way))


def _ports(hosts: Sequence[Host], network: Cable | None, backbone: float | None) -> Iterator[Port]:
    alone = len(hosts) == 1
    for host in hosts:
        inside = tuple(f"/worker:{worker.index}" for worker in host.workers)
        nic = host.nic or network
        if nic is not None and not alone:
            yield Port(f"{host.name} nic", inside, None, nic.bandwidth * nic.count)
        for switch in host.switches:
            up = switch.uplink
            direct = inside if _is_direct(host) else ()
            yield Port(switch.name, switch.devices, None, up.bandwidth * up.count, besides=direct)
        yield from _device_ports(host)
    if backbone is not None and not alone:
        for host in hosts:
            inside = tuple(f"/worker:{worker.index}" for worker in host.workers)
            yield Port("backbone", inside, None, backbone, duplex=False)


def _is_direct(host: Host) -> bool:
    """Return True if its devices reach each other around its slots and switches."""
    if host.link is not None:
        return host.link.direct
    known = [_product(device) for worker in host.workers for device in worker.devices]
    return all(each is not None and each.peer != each.bus for each in known)


def _device_ports(host: Host) -> Iterator[Port]:
    """Yield the ports of a host's devices: one to the host's other devices, and one slot."""
    names = host.devices
    inside = tuple(f"/worker:{worker.index}" for worker in host.workers)
    direct = _is_direct(host)
    for worker in host.workers:
        for device in worker.devices:
            known = _product(device)
            link = host.link or (None if known is None else Cable.from_catalog(known.peer))
            others = tuple(name for name in names if name != device.name)
            if direct and link is not None and len(others) > 1:
                yield Port(f"{device.name} link", (device.name,), others, link.bandwidth)
            if known is not None:
                slot = Cable.from_catalog(known.bus).bandwidth
                besides = inside if direct else ()
                yield Port(f"{device.name} slot", (device.name,), None, slot, besides=besides)
            elif not direct and link is not None and len(others) > 1:
                yield Port(f"{device.name} link", (device.name,), others, link.bandwidth)

"""The hardware as plain data: workers with their devices, and the links between them.

Planning starts from a `Cluster`, whose speeds the cost model reads. A session starts its workers or
connects to them. The cluster itself opens no socket and starts no process. Calibration fills in
numbers that are None. Hypothetical hardware cannot be measured, so it must give them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import asdict, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from graphflow.base.argument_checks import checks_argument_names, checks_arguments, to_builtin
from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.interrupts import passes_interrupts
from graphflow.errors import ClusterError, DeviceError
from graphflow.ir.device_name import DeviceName
from graphflow.placement.clusters.cluster_checks import check_cluster, partial_names, suggest_name
from graphflow.placement.clusters.cluster_file import read
from graphflow.placement.clusters.devices import (
    CLIENT,
    Device,
    Link,
    Worker,
    check_count,
    check_device_count,
)
from graphflow.placement.clusters.machine.machine_devices import CPU, default_devices
from graphflow.placement.clusters.renumbering import renumber
from graphflow.placement.clusters.shared_ports import Port
from graphflow.placement.clusters.topology import Cable, Host, connect, device_names, short_name
from graphflow.placement.clusters.worker_devices import (
    as_names,
    hypothetical_devices,
    worker_on_this_host,
)

if TYPE_CHECKING:
    from graphflow.placement.clusters.worker_source import WorkerSource

Kind = Literal["here", "local", "remote", "hypothetical"]


@checks_arguments(ClusterError)
@dataclass(frozen=True)
class Cluster:
    """Workers and the known links between them.

    Args:
        workers: Numbered from 0.
        links: The described links; missing ones are measured.
        ports: What several of the links share; see `Port`.
        kind: "here" (devices of this process), "local" (worker processes that the session starts),
            "remote" (workers that listen at their addresses), "hypothetical" (to plan with; a
            session refuses it).
        insecure: The user accepts addresses beyond loopback without keys; the runtime checks it.
        deadline: Seconds for all workers to come up.
        dead_after: Seconds that a worker may be out of reach before it counts as lost.
        source: The file it was read from.
        key: The name of the key that a session shows the workers. Default: the only one.
        stand_ins: After workers were lost: for each worker by its number in pins, the worker that
            has its place now; see `without`.
        left: Workers that have left a session, or never joined it. They keep their numbers, and
            their devices are none of the cluster's.
        launched: The launcher's workers whose addresses these are, which finds them again after a
            loss; None for workers that somebody else starts.
        is_automatic: The GPUs were found, not named. A session opens them when a graph may gain by
            them, and goes on without those that fail.

    Raises:
        ClusterError: No workers, a duplicate address or device, a number that is NaN, infinite,
            negative or zero where it may not be, a link that names no device, hypothetical hardware
            without numbers.
    """

    workers: tuple[Worker, ...]
    links: tuple[Link, ...] = ()
    kind: Kind = "here"
    insecure: bool = False
    deadline: float = 60.0
    source: str | None = None
    ports: tuple[Port, ...] = ()
    key: str | None = None
    stand_ins: tuple[int, ...] = ()
    dead_after: float = 4.5
    left: tuple[int, ...] = ()
    is_automatic: bool = False
    launched: WorkerSource | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", tuple(self.workers))
        object.__setattr__(self, "links", tuple(self.links))
        object.__setattr__(self, "ports", tuple(self.ports))
        object.__setattr__(self, "deadline", to_builtin(self.deadline))
        object.__setattr__(self, "dead_after", to_builtin(self.dead_after))
        check_cluster(self)

    # Constructors -----------------------------------------------------------------------------

    @classmethod
    @checks_argument_names(ClusterError)
    def here(
        cls, devices: tuple[str, ...] | list[str] | None = None, threads: int | None = None
    ) -> Self:
        """Return a cluster of devices of this process.

        Args:
            devices: Names, ["cpu:0", "gpu:1"]. Default: those of `$GRAPHFLOW_DEVICES`, else the CPU
                and each GPU that CuPy can use.
            threads: Of each CPU device. Default: the cores, shared among them.

        Raises:
            DeviceError: A name is malformed, or a GPU cannot be used by this process.
            ArgumentError: `GRAPHFLOW_DEVICES` names a device that is not here.
        """
        names = default_devices() if devices is None else devices
        optional = devices is None and CPU in names and len(names) > 1
        worker = worker_on_this_host(0, names, threads, processes=1)
        return cls((worker,), kind="here", is_automatic=optional)

    @classmethod
    @checks_argument_names(ClusterError)
    def local(
        cls,
        workers: int = 2,
        devices: tuple[str, ...] | list[str] = ("cpu:0",),
        threads: int | None = None,
        deadline: float = 60.0,
        dead_after: float = 4.5,
    ) -> Self:
        """Return a cluster of worker processes on this host, which a session starts.

        Args:
            threads: Of each CPU device. Default: its share.

        Raises:
            DeviceError: A name is malformed, or this host does not have the GPU.
            ClusterError: Fewer than one worker, more than 1024 devices, or a time that is not
                positive.
        """
        check_count("workers", workers)
        count = max(1, len(devices))
        check_device_count(
            f"local: {workers} workers of {show_count(count, 'device')} are", workers * count
        )
        made = tuple(
            worker_on_this_host(i, devices, threads, processes=workers) for i in range(workers)
        )
        return cls(made, kind="local", deadline=deadline, dead_after=dead_after)

    @classmethod
    @checks_arguments(ClusterError)
    @passes_interrupts
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a cluster from TOML; see `cluster_file` for the keys.

        Without addresses it is hypothetical.

        Raises:
            ClusterError: The file is unreadable, malformed or wrong; names file, line, key and
                remedy.
        """
        if "://" in str(path):
            raise ClusterError(
                f"{path} is an address; workers by address are listed in a file, whose name is "
                'given instead: [[workers]], then address = "tcp://host:port", for each'
            )
        if re.fullmatch(r"(cpu|gpu)(:\d+)?", str(path)) and not Path(path).exists():
            raise ClusterError(f"{path} is a device: give gf.Cluster.here(devices=[{str(path)!r}])")
        data, at_its_line = read(Path(path))
        try:
            return cls.from_dict(data)
        except ClusterError as error:
            raise at_its_line(error) from error

    @classmethod
    @checks_argument_names(ClusterError)
    def hypothetical(
        cls,
        workers: int | str = 1,
        devices: str | tuple[str, ...] | list[str] = ("gpu:0",),
        *,
        flops: float | None = None,
        bandwidth: float | None = None,
        memory: int | None = None,
        launch: float | None = None,
        link_latency: float = 0.0,
        link_bandwidth: float | None = None,
        link: str | None = None,
        network: str | None = None,
    ) -> Self:
        """Return equal hosts of equal devices, to plan for hardware that is not at hand.

        By product, `hypothetical("8xh100")` or `hypothetical("4x8xh100", network="100gbe")`, or by
        numbers, `hypothetical(2, flops=5e13, bandwidth=2e12, memory=80 << 30, link_latency=1e-5,
        link_bandwidth=4e11)`. Each host is one worker.

        Args:
            workers: The number of hosts, or hosts and devices as in "4x8xh100".
            devices: Of each host: "cpu:0", "gpu:0", a product or several of it, "8xh100".
            flops, bandwidth, memory, launch: Of each device, as in `Device`; they replace those of
                a product. The default of launch is 5 µs.
            link_latency, link_bandwidth: Seconds and bytes/s between any two devices, and from and
                to the client.
            link, network: Names of links (`hardware_catalog.WIRES`) inside hosts, and between
                hosts, whose devices share it. Products have their usual link inside a host.

        Raises:
            ClusterError: An unknown product or link (suggests one), more than 1024 devices, or a
                number that is missing or invalid.
            DeviceError: A malformed name of a device.
        """
        if isinstance(workers, str) and not workers.isdigit():
            workers, count, name = short_name(workers)
            devices = (f"{count}x{name}",)
        check_count("workers", workers)
        assert isinstance(workers, int)
        entries = device_names(as_names(devices))
        told = f"{show_count(workers, 'host')} of {show_count(len(entries), 'device')}"
        check_device_count(f"hypothetical: {told} are", workers * len(entries))
        if launch is None and None in (known for _, known in entries):
            launch = 5e-6
        given: dict[str, Any] = {"flops": flops, "bandwidth": bandwidth, "launch": launch}
        all_workers = tuple(
            Worker(i, None, hypothetical_devices(i, entries, memory, given)) for i in range(workers)
        )
        inside = None if link is None else Cable.from_catalog(link)
        if link_bandwidth is None:
            hosts = [Host(f"host {worker.index}", (worker,), inside) for worker in all_workers]
            between = None if network is None else Cable.from_catalog(network)
            links, ports = connect(hosts, between)
            return cls(all_workers, tuple(links), kind="hypothetical", ports=tuple(ports))
        if link is not None or network is not None:
            raise ClusterError("give link_bandwidth for all links, or link and network, not both")
        ends = [device.name for worker in all_workers for device in worker.devices] + [CLIENT]
        plain = [Link(a, b, link_latency, link_bandwidth) for a in ends for b in ends if a != b]
        return cls(all_workers, tuple(plain), kind="hypothetical")

    def __repr__(self) -> str:
        """Return a short text: the devices, without links; of their speeds, those of slow ones."""
        told = [f"{d.name} ({note})" if (note := d.product or d.slowness) else d.name
                for worker in self.present_workers for d in worker.devices]  # fmt: skip
        more = f", … {len(told)} in all" if len(told) > 4 else ""
        workers = show_count(len(self.present_workers), "worker")
        return f"<Cluster of {workers} ({self.kind}): {', '.join(told[:4])}{more}>"

    # Names ------------------------------------------------------------------------------------

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Full names of all devices, worker by worker."""
        return tuple(device.name for worker in self.present_workers for device in worker.devices)

    @property
    def present_workers(self) -> tuple[Worker, ...]:
        """The workers that have not left."""
        return tuple(worker for worker in self.workers if worker.index not in self.left)

    @checks_arguments(DeviceError)
    def device(self, name: str) -> Device:
        """Return the device of a full name.

        Raises:
            DeviceError: There is none.
        """
        for worker in self.workers:
            for device in worker.devices:
                if device.name == name:
                    return device
        raise DeviceError(
            f"no device {name!r}{suggest_name(name, self.devices)} "
            f"(there are {', '.join(self.devices)})"
        )

    @checks_argument_names(DeviceError)
    def match(self, constraint: str) -> tuple[str, ...]:
        """Return the devices that a name allows: "gpu", "cpu:1", "/worker:1", "/worker:1/cpu:0".

        Raises:
            DeviceError: The name is malformed, or fits no device of this cluster.
        """
        hint = suggest_name(constraint, partial_names(self))
        try:
            wanted = DeviceName.parse(constraint)
        except DeviceError as error:
            raise DeviceError(f"{error}{hint}") from None
        if not wanted:
            raise DeviceError(f"{constraint!r} names no part of a device{hint}")
        wanted = self.pinned(wanted)
        found = tuple(name for name in self.devices if wanted.matches(DeviceName.parse(name)))
        if not found:
            there = ", ".join(self.devices)
            raise DeviceError(f"no device fits {constraint!r}{hint} (there are {there})")
        return found

    def link(self, source: str, target: str) -> Link | None:
        """Return the most specific link described between two devices (or "/client").

        Return None if the link is to be measured.
        """
        known = self._links_by_ends
        (a, of_a), (b, of_b) = ((end, end.rpartition("/")[0]) for end in (source, target))
        if (a, b) in known:
            return known[a, b][1]
        mixed = [known[ends] for ends in ((a, of_b), (of_a, b)) if ends in known]
        if mixed:
            return min(mixed, key=lambda found: found[0])[1]
        return known[of_a, of_b][1] if (of_a, of_b) in known else None

    @cached_property
    def _links_by_ends(self) -> dict[tuple[str, str], tuple[int, Link]]:
        return {(link.source, link.target): (i, link) for i, link in enumerate(self.links)}

    def without(self, lost: Collection[int]) -> Self:
        """Return the cluster without some workers; the others are numbered anew, from 0.

        A pin to a removed worker becomes one to a remaining worker, in turn.

        Raises:
            ClusterError: None remains.
        """
        if not lost:
            return self
        stay = [worker for worker in self.workers if worker.index not in lost]
        workers, links, ports = renumber(stay, self.links, self.ports)
        numbered = {worker.index: index for index, worker in enumerate(stay)}
        before = self.stand_ins or tuple(range(len(self.workers)))
        stand_ins = tuple(
            numbered.get(now, pin % max(1, len(stay))) for pin, now in enumerate(before)
        )
        return replace(
            self, workers=workers, links=links, ports=ports, stand_ins=stand_ins, left=()
        )

    def pinned(self, pin: DeviceName) -> DeviceName:
        """Return a pin with the present number of its worker, or that of the lost worker's
        stand-in.
        """
        if pin.worker is None or pin.worker >= len(self.stand_ins):
            return pin
        return DeviceName(self.stand_ins[pin.worker], pin.kind, pin.index)

    def join(self, number: int, like: Worker, address: str | None, key: str | None) -> Self:
        """Return the cluster with one more worker.

        Args:
            number: Its number; lower ones that are missing have left.
            like: A worker with the same devices.
            address: Where it listens; None for one that a session has started.
            key: Its public key, or the key's name.
        """
        workers = list(self.workers)
        left = {*self.left, *range(len(workers), number)} - {number}
        for index in (*range(len(workers), number), number):
            devices = tuple(
                replace(d, name=f"/worker:{index}/{d.name.rpartition('/')[2]}")
                for d in like.devices
            )
            there = address if index == number else f"tcp://worker-{index}.invalid:1"
            there = None if address is None else there
            made = replace(like, index=index, address=there, devices=devices, key=key)
            workers[index : index + 1] = [made]
        return replace(self, workers=tuple(workers), left=tuple(sorted(left)))

    # Plain data -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for plans and for messages."""
        return {
            "kind": self.kind,
            "insecure": self.insecure,
            "deadline": self.deadline,
            "dead_after": self.dead_after,
            "source": self.source,
            "key": self.key,
            "is_automatic": self.is_automatic,
            "workers": [asdict(worker) for worker in self.workers],
            "links": [asdict(link) for link in self.links],
            "ports": [asdict(port) for port in self.ports],
        }

    @classmethod
    @checks_argument_names(ClusterError)
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the cluster that `to_dict` described.

        Raises:
            ClusterError: A key is missing or unknown, or a value is wrong.
        """
        known = {each.name for each in fields(cls)} - {"launched"}
        if not isinstance(data, dict) or not isinstance(data.get("workers"), (list, tuple)):
            raise ClusterError("a cluster description needs a list 'workers'")
        for key in data:
            if key not in known:
                raise ClusterError(
                    f"unknown key {key!r} in a cluster description{suggest_name(key, known)}"
                )
        try:
            workers = tuple(
                Worker(
                    w["index"], w["address"], tuple(Device(**device) for device in w["devices"]),
                    w.get("key"),
                )
                for w in data["workers"]
            )  # fmt: skip
            links = tuple(Link(**link) for link in data.get("links", ()))
            ports = tuple(Port(**port) for port in data.get("ports", ()))
            lists = ("workers", "links", "ports")
            rest = {key: value for key, value in data.items() if key not in lists}
            return cls(workers, links, ports=ports, **rest)
        except (TypeError, KeyError, AttributeError) as error:
            raise ClusterError(f"malformed cluster description: {error}") from None

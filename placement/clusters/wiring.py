"""The part of a cluster file that says how hosts are wired: [[hosts]], nic, switches, [network].

It stands between the tables that `cluster_file` reads and the links that `topology` derives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphflow.errors import ClusterError
from graphflow.placement.clusters.devices import Link, Worker
from graphflow.placement.clusters.shared_ports import Port
from graphflow.placement.clusters.table_reader import TableReader
from graphflow.placement.clusters.topology import Cable, Host, Switch, connect

HOST_KEYS = ("name", "count", "devices", "link", "nic", "switches")
CABLE_KEYS = ("name", "count", "latency", "bandwidth")


class Wiring:
    """Hosts and their workers, from the tables of a file.

    Args:
        make_worker: Makes a worker of a table.
        tables, workers: Of the [[workers]] sections. The workers of hosts with devices are added.
    """

    def __init__(
        self,
        reader: TableReader,
        make_worker: Callable[..., Worker],
        data: dict[str, Any],
        defaults: dict[str, Any],
        tables: list[dict[str, Any]],
        workers: list[Worker],
    ) -> None:
        self._reader, self._make_worker = reader, make_worker
        self.workers = list(workers)
        self._hosts: list[Host] = []
        made = self._read_hosts(data, defaults)
        guests: dict[str, list[Worker]] = {name: [] for name in made}
        for index, (table, worker) in enumerate(zip(tables, workers, strict=True)):
            name = reader.get_typed(table, "host", str, None, "workers", index)
            if name is None:
                self._hosts.append(Host(f"host of worker {worker.index}", (worker,)))
            elif name not in guests:
                reader.fail_unknown("host", name, list(guests), ("workers", index), "host")
            else:
                guests[name].append(worker)
        for index, (name, table) in enumerate(made.items()):
            if guests[name]:
                self._hosts.append(self._host(name, tuple(guests[name]), table, index))
        self._network, self._backbone = self._read_network(data)

    def connect(self, described: list[Link]) -> tuple[list[Link], list[Port]]:
        """Return all links, the described ones first, and the ports."""
        ends = {(link.source, link.target) for link in described}

        def is_covered(source: str, target: str) -> bool:
            sources = (source, source.rpartition("/")[0])
            targets = (target, target.rpartition("/")[0])
            return any((a, b) in ends for a in sources for b in targets)

        links, ports = connect(self._hosts, self._network, self._backbone, is_covered)
        return described + links, ports

    def _read_hosts(
        self, data: dict[str, Any], defaults: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Read the [[hosts]] tables; add a worker for each host with devices.

        Return the tables without devices by name: [[workers]] tables refer to them.
        """
        reader = self._reader
        waiting: dict[str, dict[str, Any]] = {}
        for index, table in enumerate(reader.tables(data, "hosts")):
            reader.check_keys(table, HOST_KEYS, "hosts", index)
            name = reader.get_typed(table, "name", str, f"host {index}", "hosts", index)
            count = table.get("count", 1)
            reader.check_count(count, ("hosts", index), "count")
            if "devices" not in table:
                waiting[name] = table
                continue
            for i in range(count):
                worker = self._make_worker(len(self.workers), table, defaults, 1, ("hosts", index))
                self.workers.append(worker)
                total = sum(len(each.devices) for each in self.workers)
                reader.check_count(total, ("hosts", index), "count")
                title = name if count == 1 else f"{name} {i}"
                self._hosts.append(self._host(title, (worker,), table, index))
        return waiting

    def _host(
        self, name: str, workers: tuple[Worker, ...], table: dict[str, Any], index: int
    ) -> Host:
        """Return a host of a [[hosts]] table."""
        place = ("hosts", index)
        found = Host(name, workers)
        link = None if "link" not in table else self._cable(table["link"], place, "link")
        nic = None if "nic" not in table else self._cable(table["nic"], place, "nic")
        switches = table.get("switches", [])
        if not isinstance(switches, list) or not all(isinstance(s, dict) for s in switches):
            told = "switches must be tables: [{ devices = […], uplink = … }]"
            self._reader.fail(told, *place, "switches")
        made = tuple(self._switch(found, switch, place, i) for i, switch in enumerate(switches))
        return Host(name, workers, link, nic, made)

    def _switch(
        self, host: Host, table: dict[str, Any], place: tuple[str, int], number: int
    ) -> Switch:
        """Return a switch of a host."""
        reader = self._reader
        reader.check_keys(table, ("name", "devices", "uplink"), *place)
        for key in ("devices", "uplink"):
            if key not in table:
                reader.fail(f"a switch needs {key!r}", *place, "switches")
        below: list[str] = []
        local = {name.rpartition("/")[2]: name for name in host.devices}
        for name in table["devices"] if isinstance(table["devices"], list) else [table["devices"]]:
            full = name if name in host.devices else local.get(name)
            if full is None:
                reader.fail_unknown("device of this host", name, list(local), place, "switches")
            below.append(full)
        title = str(table.get("name", f"switch {number}"))
        uplink = self._cable(table["uplink"], place, "uplink")
        return Switch(f"{host.name} {title}", tuple(below), uplink)

    def _read_network(self, data: dict[str, Any]) -> tuple[Cable | None, float | None]:
        """Return the cable between hosts and the bandwidth of the backbone."""
        if "network" not in data:
            return None, None
        value, place = data["network"], ("network", 0)
        if isinstance(value, str):
            return self._cable(value, (None, 0), "network"), None
        if not isinstance(value, dict):
            self._reader.fail(f"'network' must be a name or a table, not {value!r}", None, 0, None)
        self._reader.check_keys(value, (*CABLE_KEYS, "backbone"), *place)
        backbone = value.get("backbone")
        if backbone is not None:
            self._check_positive(backbone, "backbone (bytes/s)", place, "backbone")
        rest = {key: each for key, each in value.items() if key != "backbone"}
        if not rest:
            return None, backbone
        return self._cable(rest, place, "name"), backbone

    def _cable(self, value: Any, place: tuple[str | None, int], key: str) -> Cable:
        """Return the cable of a name, or of a table with a name or numbers."""
        reader = self._reader
        table = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, dict):
            reader.fail(
                f"{key!r} is a name such as 'pcie4', or a table; not {value!r}", *place, key
            )
        reader.check_keys(table, CABLE_KEYS, *place)
        count = table.get("count", 1)
        reader.check_count(count, place, key)
        known = None
        if "name" in table:
            try:
                known = Cable.from_catalog(str(table["name"]), count)
            except ClusterError as error:
                reader.fail(str(error), *place, key, str(table["name"]))
        for part in ("latency", "bandwidth"):
            if part in table:
                self._check_positive(table[part], part, place, part, zero=part == "latency")
            elif known is None:
                reader.fail(f"{key!r} needs a name, or {part!r}", *place, key)
        latency = table.get("latency", known.latency if known else 0.0)
        bandwidth = table.get("bandwidth", known.bandwidth if known else 0.0)
        return Cable(latency, bandwidth, count, known is not None and known.direct)

    def _check_positive(
        self, value: Any, what: str, place: tuple[str | None, int], key: str, zero: bool = False
    ) -> None:
        """Fail unless `value` is a finite number above (or at) zero."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (0 <= value < float("inf")) or (value == 0 and not zero):
            told = f"{what} must be a finite number {'>=' if zero else '>'} 0, not {value!r}"
            self._reader.fail(told, *place, key)

"""Cluster files: TOML -> the plain data of a `Cluster`, with errors that name file, line and key.

key = "alice"                         # this machine's key; default: the only one (security.md)
insecure = false                      # true: addresses beyond loopback without keys
deadline = 60.0                       # seconds for the workers to come up
dead_after = 4.5                      # seconds out of reach after which one is given up

[defaults]                            # for every device that does not say
devices = ["cpu:0"]                   # of every worker that does not say
memory = "8GiB"                       # bytes, or a string with a unit
threads = 4
flops = 1.0e12                        # flop/s; these three are measured where missing
bandwidth = 4.0e10                    # bytes/s
launch = 5.0e-6                       # seconds

[defaults.link]                       # between devices that no [[links]] covers
latency = 1.0e-4                      # seconds
bandwidth = 1.0e9                     # bytes/s

[[workers]]
address = "tcp://127.0.0.1:7001"      # no addresses at all: a hypothetical cluster, for planning
key = "box1"                          # the worker's: a trusted key's name, or its digits
devices = ["cpu:0", { name = "gpu:0", memory = "16GiB", flops = 1.0e13 }]
host = "a"                            # a [[hosts]] table; default: a host of its own

[[hosts]]                             # machines; with devices, each is a worker too
name = "a"
count = 2                             # so many of them (then they are "a 0" and "a 1")
devices = ["8xh100"]                  # products, or { name = "h100", count = 8, memory = "80GB" }
link = "nvlink4"                      # between its devices; default: what products usually have
nic = { name = "100gbe", count = 2 }  # a name, or latency and bandwidth; count: side by side
switches = [{ devices = ["gpu:0", "gpu:1"], uplink = "pcie4" }]    # shared way up

[network]                             # between hosts; or network = "100gbe" at the top
name = "100gbe"                       # or latency and bandwidth
backbone = 4.0e10                     # bytes/s that all hosts share; default: enough

[[links]]
source = "/worker:0"                  # a worker, a device or "/client"
target = "/worker:1"
latency = 1.0e-4
bandwidth = 1.25e9
symmetric = true                      # the way back, too (default)

How `graphflow up` starts workers is in `launch_settings`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphflow.base.addresses import normalize_address
from graphflow.errors import ClusterError, DeviceError
from graphflow.placement.clusters.cluster_checks import describe_shared_address
from graphflow.placement.clusters.devices import CLIENT, Device, Link, Worker, local_kind
from graphflow.placement.clusters.hardware_catalog import product
from graphflow.placement.clusters.launch_settings import LaunchSettings, read_launch_settings
from graphflow.placement.clusters.machine.host_facts import device_memory
from graphflow.placement.clusters.table_reader import UNLIKELY, TableReader
from graphflow.placement.clusters.topology import short_name
from graphflow.placement.clusters.wiring import Wiring

DEVICE_KEYS = ("memory", "threads", "flops", "bandwidth", "launch")
LINK_KEYS = ("source", "target", "latency", "bandwidth", "symmetric")
_DOTS = 1000
UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    unit: 1024 ** (power + 1) for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"))
}


def read(path: Path) -> tuple[dict[str, Any], Callable[[ClusterError], ClusterError]]:
    """Read a cluster file.

    Returns:
        Plain data for `Cluster.from_dict`, and a function that adds the file's name and line to an
        error of the cluster as a whole.

    Raises:
        ClusterError: The file is unreadable or not TOML, or has an unknown key or a wrong value.
    """
    reader, data = _parse(path)
    return reader.cluster(data), reader.at_its_line


def load_launch_settings(path: Path) -> LaunchSettings:
    """Read how `graphflow up` starts the workers of a cluster file.

    Raises:
        ClusterError: as of `read`.
    """
    return read_launch_settings(*_parse(path))


def _parse(path: Path) -> tuple[ClusterFileReader, dict[str, Any]]:
    """Return a cluster file's tables, and what checks them.

    Raises:
        ClusterError: The file is unreadable or not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # files of Windows begin with a byte order mark
    except (OSError, ValueError) as error:  # a path with a zero byte, bytes that are no text
        hint = ""
        if isinstance(error, FileNotFoundError) and path.suffix != ".toml":
            hint = f"; hardware that is not at hand is gf.Cluster.hypothetical({str(path)!r})"
        raise ClusterError(f"cannot read cluster file {path}: {error}{hint}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") > _DOTS:  # dotted keys: parsing takes time that grows with the square
            raise ClusterError(f"{path}, line {number}: more than {_DOTS} dots in a line")
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; deep nesting
        raise ClusterError(f"{path} is not TOML: {error}") from None
    return ClusterFileReader(path, text), data


def _count_host_workers(addresses: list[Any]) -> list[int]:
    """Count, for each worker, the workers on its host, by their addresses."""
    hosts = [str(i if a is None else a).rpartition(":")[0] for i, a in enumerate(addresses)]
    return [hosts.count(host) if host else 1 for host in hosts]


class ClusterFileReader(TableReader):
    """Reads the tables of a cluster file into plain data."""

    def cluster(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the plain data of a whole file."""
        known = (
            "key", "insecure", "deadline", "dead_after", "defaults", "workers", "hosts", "network",
            "links", "launch",
        )  # fmt: skip
        self.check_keys(data, known, None, 0)
        read_launch_settings(self, data)
        insecure = self.get_typed(data, "insecure", bool, False, None, 0)
        own_key = self.get_typed(data, "key", str, None, None, 0)
        deadline = self.get_typed(data, "deadline", (int, float), 60.0, None, 0)
        dead_after = self.get_typed(data, "dead_after", (int, float), 4.5, None, 0)
        defaults = self.get_typed(data, "defaults", dict, {}, None, 0)
        self.check_keys(defaults, ("devices", "link", *DEVICE_KEYS), "defaults", 0)
        tables = self.tables(data, "workers")
        sharing = _count_host_workers([table.get("address") for table in tables])
        workers = [
            self.worker(i, table, defaults, sharing[i], ("workers", i))
            for i, table in enumerate(tables)
        ]
        count = sum(len(worker.devices) for worker in workers)
        if count:
            self.check_count(count, ("workers", 0), "devices")
        wiring = Wiring(self, self.worker, data, defaults, tables, workers)
        workers = wiring.workers
        if not workers:
            self.fail("no workers; add a [[workers]] table for each", None, 0, None)
        links, ports = wiring.connect(self.described_links(data))
        links += self.default_links(defaults, links, workers)
        addressed = [worker.address is not None for worker in workers]
        if any(addressed) and not all(addressed):
            index = addressed.index(False)
            self.fail(
                f"worker {index} has no address though others have; give it address = \"tcp://host:port\"",
                "workers", index, None,
            )  # fmt: skip
        addresses = [worker.address for worker in workers]
        seen: dict[str, int] = {}
        for index, address in enumerate(addresses):
            if isinstance(address, str):
                other = seen.setdefault(normalize_address(address), index)
                if other != index:
                    told = describe_shared_address(other, index, addresses)
                    self.fail(told, "workers", index, "address")
        result = {
            "kind": "remote" if all(addressed) else "hypothetical",
            "insecure": insecure,
            "deadline": deadline,
            "dead_after": dead_after,
            "source": str(self.path),
            "key": own_key,
            "workers": [asdict(worker) for worker in workers],
            "links": [asdict(link) for link in links],
            "ports": [asdict(port) for port in ports],
        }
        return result

    def at_its_line(self, error: ClusterError) -> ClusterError:
        """Return an error of the whole cluster (missing numbers, deadline) with file and line."""
        key = str(error).partition(" ")[0]
        return self.error(str(error), None, 0, key if key in ("deadline", "dead_after") else None)

    def worker(
        self,
        number: int,
        table: dict[str, Any],
        defaults: dict[str, Any],
        sharing: int,
        place: tuple[str, int],
    ) -> Worker:
        """Return worker `number` of a table; `place` is the table's section and index there.

        Its host has `sharing` workers.
        """
        section, index = place
        if section == "workers":
            self.check_keys(table, ("address", "key", "devices", "host", "ssh"), "workers", index)
        address = self.get_typed(table, "address", str, None, section, index)
        key = self.get_typed(table, "key", str, None, section, index)
        entries = table.get("devices", defaults.get("devices", ["cpu:0"]))
        if isinstance(entries, str):
            entries = [entries]
        if not isinstance(entries, list):
            self.fail(f"devices must be a list, not {entries!r}", section, index, "devices")
        entries = self.expand_devices(entries, place)
        devices = [
            self.device(number, entry, defaults, sharing * len(entries), place) for entry in entries
        ]
        try:
            return Worker(number, address, tuple(devices), key)
        except ClusterError as error:
            named = next((k for k in ("address", "key") if f": {k}" in str(error)), "devices")
            self.fail(str(error), section, index, named)

    def expand_devices(self, entries: list[Any], place: tuple[str, int]) -> list[dict[str, Any]]:
        """Return a table with one local name for each device of `entries`.

        Products become GPUs, which are numbered in turn.
        """
        made: list[dict[str, Any]] = []
        names = [entry.get("name") if isinstance(entry, dict) else entry for entry in entries]
        gpus = sum(1 for name in names if isinstance(name, str) and name.startswith("gpu:"))
        for entry, name in zip(entries, names, strict=True):
            table = {"name": entry} if isinstance(entry, str) else entry
            if not isinstance(table, dict):
                self.fail(f"a device is a name or a table, not {entry!r}", *place, "devices")
            self.check_keys(table, ("name", "count", *DEVICE_KEYS), *place)
            if "name" not in table:
                self.fail('a device table needs a name, such as "cpu:0"', *place, "devices")
            count = table.get("count", 1)
            self.check_count(count, place, "count")
            rest = {key: value for key, value in table.items() if key != "count"}
            if isinstance(name, str) and re.fullmatch(r"(cpu|gpu):\d+", name):
                if count > 1:
                    self.fail(f"{name} is one device; leave out count", *place, "count")
                made.append(rest)
                continue
            hosts, each, product = self.product(name, place)
            self.check_count(count * hosts * each + len(made), place, "count")
            for _ in range(count * hosts * each):
                made.append(rest | {"name": f"gpu:{gpus}", "product": product})
                gpus += 1
        return made

    def product(self, name: Any, place: tuple[str, int]) -> tuple[int, int, str]:
        """Return hosts, devices of each, and product of a short name; fail if it is none."""
        try:
            return short_name(name)
        except ClusterError as error:
            told = str(error).partition("; ")[2] or str(error)
            self.fail(
                f"{name!r} is not a device of a worker; write 'cpu:0', 'gpu:0' or a product such "
                f"as 'h100' ({told})",
                *place,
                "devices",
                str(name),
            )

    def device(
        self,
        number: int,
        table: dict[str, Any],
        defaults: dict[str, Any],
        count: int,
        place: tuple[str, int],
    ) -> Device:
        """Return one device of worker `number`, whose host has `count` devices."""
        settings = {key: defaults[key] for key in DEVICE_KEYS if key in defaults}
        known = table.get("product")
        if known is not None:  # the product's own values precede defaults
            settings = {"memory": product(known).memory, "product": known}
        settings |= {key: table[key] for key in DEVICE_KEYS if key in table}
        try:
            kind = local_kind(table["name"])
        except DeviceError as error:
            self.fail(str(error), *place, "devices", table["name"])
        if kind == "gpu":
            settings.pop("threads", None)
            if "memory" not in settings:
                told = f'give the memory of {table["name"]} (bytes, or "16GiB")'
                self.fail(told, *place, "devices")
        memory = settings.pop("memory", None)
        try:
            size = device_memory(count) if memory is None else self.bytes(memory)
            return Device(f"/worker:{number}/{table['name']}", kind, size, **settings)
        except ClusterError as error:
            bad = next((key for key in DEVICE_KEYS if f": {key}" in str(error)), None)
            self.fail(str(error), *(place if bad in table else ("defaults", 0)), bad)

    def described_links(self, data: dict[str, Any]) -> list[Link]:
        """Return the links of the [[links]] tables, and their reverse directions."""
        found: list[Link] = []
        for index, table in enumerate(self.tables(data, "links")):
            self.check_keys(table, LINK_KEYS, "links", index)
            for key in LINK_KEYS[:4]:
                if key not in table:
                    self.fail(f"a link needs {key!r}", "links", index, None)
            symmetric = self.get_typed(table, "symmetric", bool, True, "links", index)
            values = {key: table[key] for key in LINK_KEYS[:4]}
            found.append(self.link(values, "links", index))
            if symmetric:
                back = values | {"source": values["target"], "target": values["source"]}
                found.append(self.link(back, "links", index))
        return found

    def default_links(
        self, defaults: dict[str, Any], found: list[Link], workers: list[Worker]
    ) -> list[Link]:
        """Return the default link between all ends without a described one."""
        default = self.get_typed(defaults, "link", dict, None, "defaults", 0)
        if default is None:
            return []
        self.check_keys(default, ("latency", "bandwidth"), "defaults.link", 0)
        for key in ("latency", "bandwidth"):
            if key not in default:
                self.fail(f"[defaults.link] needs {key!r}", "defaults.link", 0, None)
        self.link({"source": CLIENT, "target": CLIENT} | default, "defaults.link", 0)
        ends = [device.name for worker in workers for device in worker.devices] + [CLIENT]
        cluster_of = {end: end.rpartition("/")[0] if end != CLIENT else CLIENT for end in ends}
        covered = {(link.source, link.target) for link in found}
        return [
            Link(a, b, **default)
            for a in ends
            for b in ends
            if a != b
            and not covered & {(x, y) for x in (a, cluster_of[a]) for y in (b, cluster_of[b])}
        ]

    def link(self, values: dict[str, Any], section: str, index: int) -> Link:
        """Return the link with these values; fail at the line of a wrong one."""
        try:
            return Link(**values)
        except ClusterError as error:
            bad = next((key for key in ("latency", "bandwidth") if f": {key}" in str(error)), None)
            if bad is None and "link end" in str(error):
                bad = next(
                    (key for key in ("source", "target") if repr(values[key]) in str(error)), None
                )
            self.fail(str(error), section, index, bad)

    def bytes(self, value: Any) -> Any:
        """Return a size in bytes; a text has a unit. `Device` checks other values."""
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2] not in UNITS:
            raise ClusterError(
                f"device: memory {value!r} is no size; write bytes, "
                'or a string like "8GiB" or "16GB"'
            )
        size = int(float(match[1]) * UNITS[match[2]])
        if 0 < size < UNLIKELY["memory"][0]:
            raise ClusterError(f'device: memory {value!r} is {size} bytes; write "{match[1]}GB"')
        return size


__all__ = ["load_launch_settings", "read"]

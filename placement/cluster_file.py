"""Cluster files: TOML -> the plain data of a `Cluster`, with errors that name file, line and key.

insecure = false                      # true: addresses beyond loopback without keys
deadline = 60.0                       # seconds for the workers to come up

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
devices = ["cpu:0", { name = "gpu:0", memory = "16GiB", flops = 1.0e13 }]

[[links]]
source = "/worker:0"                  # a worker, a device or "/client"
target = "/worker:1"
latency = 1.0e-4
bandwidth = 1.25e9
symmetric = true                      # the way back, too (default)
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from graphflow.errors import ClusterError, DeviceError
from graphflow.placement.cluster import (
    CLIENT,
    Cluster,
    Device,
    Link,
    Worker,
    local_kind,
)
from graphflow.placement.host import device_memory

DEVICE_KEYS = ("memory", "threads", "flops", "bandwidth", "launch")
LINK_KEYS = ("source", "target", "latency", "bandwidth", "symmetric")
UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    unit: 1024 ** (power + 1) for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"))
}


def read(path: Path) -> dict[str, Any]:
    """The plain data of a cluster file, for `Cluster.from_dict`.

    Raises:
        ClusterError: unreadable, not TOML, an unknown key, a value that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read cluster file {path}: {error}") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{path} is not TOML: {error}") from None
    return _Reader(path, text).cluster(data)


class _Reader:
    """Keeps the text at hand, so that an error can say the line."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.lines = path, text.splitlines()

    def cluster(self, data: dict[str, Any]) -> dict[str, Any]:
        self.keys(data, ("insecure", "deadline", "defaults", "workers", "links"), None, 0)
        insecure = self.typed(data, "insecure", bool, False, None, 0)
        deadline = self.typed(data, "deadline", (int, float), 60.0, None, 0)
        defaults = self.typed(data, "defaults", dict, {}, None, 0)
        self.keys(defaults, ("devices", "link", *DEVICE_KEYS), "defaults", 0)
        tables = self.tables(data, "workers")
        if not tables:
            self.fail("no workers; add a [[workers]] table for each", None, 0, None)
        hosts = [
            str(table.get("address", index)).rpartition(":")[0]
            for index, table in enumerate(tables)
        ]
        workers = [
            self.worker(index, table, defaults, hosts.count(hosts[index]) if hosts[index] else 1)
            for index, table in enumerate(tables)
        ]
        links = self.links(data, defaults, workers)
        addressed = [worker.address is not None for worker in workers]
        if any(addressed) and not all(addressed):
            index = addressed.index(False)
            self.fail(
                f"worker {index} has no address though others have; give it address = \"tcp://host:port\"",
                "workers", index, None,
            )  # fmt: skip
        addresses = [worker.address for worker in workers]
        for index, address in enumerate(addresses):
            if address is not None and address in addresses[:index]:
                other = addresses.index(address)
                self.fail(
                    f"workers {other} and {index} share {address}", "workers", index, "address"
                )
        result = {
            "kind": "remote" if all(addressed) else "hypothetical",
            "insecure": insecure,
            "deadline": deadline,
            "source": str(self.path),
            "workers": [asdict(worker) for worker in workers],
            "links": [asdict(link) for link in links],
        }
        self.check_whole(result)
        return result

    def check_whole(self, result: dict[str, Any]) -> None:
        """What only the whole cluster shows (missing numbers, deadline), with the file's name."""
        try:
            Cluster.from_dict(result)
        except ClusterError as error:
            key = str(error).partition(" ")[0]
            self.fail(str(error), None, 0, key if key == "deadline" else None)

    def worker(
        self, index: int, table: dict[str, Any], defaults: dict[str, Any], sharing: int
    ) -> Worker:
        """A worker, whose host `sharing` workers share."""
        self.keys(table, ("address", "devices"), "workers", index)
        address = self.typed(table, "address", str, None, "workers", index)
        entries = table.get("devices", defaults.get("devices", ["cpu:0"]))
        if not isinstance(entries, list):
            self.fail(f"devices must be a list, not {entries!r}", "workers", index, "devices")
        devices = [self.device(index, entry, defaults, sharing * len(entries)) for entry in entries]
        try:
            return Worker(index, address, tuple(devices))
        except ClusterError as error:
            key = "address" if "address" in str(error) else "devices"
            self.fail(str(error), "workers", index, key)

    def device(self, index: int, entry: Any, defaults: dict[str, Any], count: int) -> Device:
        table = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(table, dict):
            self.fail(f"a device is a name or a table, not {entry!r}", "workers", index, "devices")
        self.keys(table, ("name", *DEVICE_KEYS), "workers", index)
        if "name" not in table:
            self.fail('a device table needs a name, such as "cpu:0"', "workers", index, "devices")
        settings = {key: defaults[key] for key in DEVICE_KEYS if key in defaults}
        settings |= {key: table[key] for key in DEVICE_KEYS if key in table}
        try:
            kind = local_kind(table["name"])
        except DeviceError as error:
            self.fail(str(error), "workers", index, "devices")
        if kind == "gpu":
            settings.pop("threads", None)
            if "memory" not in settings:
                self.fail(
                    f'give the memory of {table["name"]} (bytes, or "16GiB")',
                    "workers",
                    index,
                    "devices",
                )
        memory = settings.pop("memory", None)
        try:
            size = device_memory(count) if memory is None else self.bytes(memory)
            return Device(f"/worker:{index}/{table['name']}", kind, size, **settings)
        except ClusterError as error:
            bad = next((key for key in DEVICE_KEYS if f": {key}" in str(error)), None)
            section = "workers" if bad in table else "defaults"
            self.fail(str(error), section, index if section == "workers" else 0, bad)

    def links(
        self, data: dict[str, Any], defaults: dict[str, Any], workers: list[Worker]
    ) -> list[Link]:
        found: list[Link] = []
        for index, table in enumerate(self.tables(data, "links")):
            self.keys(table, LINK_KEYS, "links", index)
            for key in LINK_KEYS[:4]:
                if key not in table:
                    self.fail(f"a link needs {key!r}", "links", index, None)
            symmetric = self.typed(table, "symmetric", bool, True, "links", index)
            values = {key: table[key] for key in LINK_KEYS[:4]}
            found.append(self.link(values, "links", index))
            if symmetric:
                back = values | {"source": values["target"], "target": values["source"]}
                found.append(self.link(back, "links", index))
        default = self.typed(defaults, "link", dict, None, "defaults", 0)
        if default is not None:
            found += self.default_links(default, found, workers)
        return found

    def default_links(
        self, default: dict[str, Any], found: list[Link], workers: list[Worker]
    ) -> list[Link]:
        """The default between every two ends that no described link covers."""
        self.keys(default, ("latency", "bandwidth"), "defaults.link", 0)
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
        """A size in bytes; a string carries its unit. Other values are for `Device` to judge."""
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2] not in UNITS:
            raise ClusterError(
                f"device: memory {value!r} is no size; write bytes, "
                'or a string like "8GiB" or "16GB"'
            )
        return int(float(match[1]) * UNITS[match[2]])

    # Values and lines -------------------------------------------------------------------------

    def keys(
        self, table: dict[str, Any], known: tuple[str, ...], section: str | None, index: int
    ) -> None:
        for key in table:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
                self.fail(f"unknown key {key!r}; {hint}", section, index, key)

    def typed(
        self,
        table: dict[str, Any],
        key: str,
        wanted: Any,
        default: Any,
        section: str | None,
        index: int,
    ) -> Any:
        value = table.get(key, default)
        if value is default:
            return value
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            name = (
                "a number"
                if isinstance(wanted, tuple)
                else {bool: "true or false", str: "a string", dict: "a table"}[wanted]
            )
            self.fail(f"{key!r} must be {name}, not {value!r}", section, index, key)
        return value

    def tables(self, data: dict[str, Any], key: str) -> list[dict[str, Any]]:
        value = data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
            self.fail(f"{key!r} must be tables: write [[{key}]]", None, 0, key)
        return value

    def fail(self, message: str, section: str | None, index: int, key: str | None) -> NoReturn:
        line = self.line(section, index, key)
        where = f"{self.path}, line {line}" if line else str(self.path)
        raise ClusterError(f"{where}: {message}")

    def line(self, section: str | None, index: int, key: str | None) -> int | None:
        """The line (from 1) of a key within the index-th table of a section; of the table if the
        key is not found.
        """
        header = -1
        current, seen = None, {}  # type: str | None, dict[str, int]
        for number, text in enumerate(self.lines, start=1):
            match = re.match(r"\s*\[\[?\s*([\w.\-]+)\s*\]\]?", text)
            if match:
                current = match[1]
                seen[current] = seen.get(current, -1) + 1
                if current == section and seen[current] == index:
                    header = number
            inside = current == section and (section is None or seen[section] == index)
            if key and (inside or match) and re.search(rf"(?<![\w.]){re.escape(key)}\s*=", text):
                return number
            if key and match and section is None and match[1].split(".")[0] == key:
                return number
        return header if header > 0 else None


__all__ = ["read"]

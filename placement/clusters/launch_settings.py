"""Settings by which `graphflow up` starts the workers of a cluster file: its [launch] table.

[launch]                              # for workers on other hosts, which ssh reaches
python = "/opt/venv/bin/python"       # there; default: python3
ssh = ["-p", "2222"]                  # options of ssh
options = ["--allow-data", "/data"]   # further options of `graphflow worker`, of all workers
env = { OMP_NUM_THREADS = "1" }       # variables of all workers

[[workers]]
address = "tcp://10.0.0.7:7001"
ssh = "alice@node7"                   # what ssh calls the host; default: the host of the address
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.clusters.table_reader import TableReader

LAUNCH_KEYS = ("python", "ssh", "options", "env")
_OF_THE_FILE = (
    "--listen", "--devices", "--threads", "--insecure", "--key", "--make-key", "--trust",
    "--announce", "--until-stdin-ends",
)  # fmt: skip


@dataclass(frozen=True)
class LaunchSettings:
    """The way to start the workers of a cluster file.

    Attributes:
        python: the interpreter on other hosts.
        ssh: options of ssh.
        options: further options of `graphflow worker`.
        env: variables to set for the workers.
        hosts: for each worker, the host as ssh knows it; None if the file does not say.
    """

    python: str
    ssh: tuple[str, ...]
    options: tuple[str, ...]
    env: Mapping[str, str]
    hosts: tuple[str | None, ...]


def read_launch_settings(reader: TableReader, data: dict[str, Any]) -> LaunchSettings:
    """Return the settings in a cluster file's tables.

    Raises:
        ClusterError: an unknown key or a wrong value; names file, line and remedy.
    """
    table = reader.get_typed(data, "launch", dict, {}, None, 0)
    reader.check_keys(table, LAUNCH_KEYS, "launch", 0)
    python = reader.get_typed(table, "python", str, "python3", "launch", 0)
    env = reader.get_typed(table, "env", dict, {}, "launch", 0)
    for name, value in env.items():
        if not isinstance(value, str):
            reader.fail(f"{name} must be a string, not {value!r}", "launch", 0, "env", name)
    options = _strings(reader, table, "options")
    for option in options:
        if option.partition("=")[0] in _OF_THE_FILE:
            told = f"{option} is what `graphflow up` gives itself, from the [[workers]] tables"
            reader.fail(told, "launch", 0, "options", option)
    hosts = []
    for index, worker in enumerate(reader.tables(data, "workers")):
        host = reader.get_typed(worker, "ssh", str, None, "workers", index)
        if host is not None and (not host or host.startswith("-")):
            reader.fail(f"{host!r} is no host", "workers", index, "ssh")
        hosts.append(host)
    return LaunchSettings(python, _strings(reader, table, "ssh"), options, env, tuple(hosts))


def _strings(reader: TableReader, table: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of strings; fail if the value is none."""
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        reader.fail(f"{key} must be a list of strings, not {value!r}", "launch", 0, key)
    return tuple(value)

"""Workers on other hosts by the OpenSSH client. They end with it."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence

from graphflow.base.addresses import is_loopback
from graphflow.errors import ArgumentError, LaunchError
from graphflow.runtime.launch.engines.piped_launcher import EVERYWHERE, PipedLauncher, WorkerPlace
from graphflow.runtime.launch.worker_launcher import worker_command

_CONNECT_SECONDS = 8
_ALIVE_SECONDS = 5  # between two signs of life; three missing ones end the connection


class Ssh(PipedLauncher):
    """Starts workers on hosts that `ssh HOST` reaches without a password.

    Hosts are what ssh takes: names, aliases of ~/.ssh/config, user@name. With more workers than
    hosts, hosts take turns. graphflow must be installed there.

    Args:
        hosts: at least one.
        python: the interpreter there, such as "/opt/venv/bin/python".
        options: of ssh, such as ["-p", "2222"].

    Raises:
        ArgumentError: no host, or one that ssh would take for an option.
    """

    def __init__(
        self, hosts: Sequence[str], *, python: str = "python3", options: Sequence[str] = ()
    ) -> None:
        super().__init__()
        if isinstance(hosts, str) or not hosts:
            raise ArgumentError(f"Ssh takes a list of hosts, such as ['node1'], not {hosts!r}")
        for host in hosts:
            if not isinstance(host, str) or not host or host.startswith("-"):
                raise ArgumentError(f"Ssh: {host!r} is no host")
        self._hosts, self._python, self._ssh_options = list(hosts), python, list(options)

    def check(self, count: int) -> None:
        check_ssh()

    def place(self, index: int, options: Sequence[str], env: Mapping[str, str]) -> WorkerPlace:
        host = self._hosts[index % len(self._hosts)]
        name = host.rpartition("@")[2]
        listen = "127.0.0.1" if is_loopback(f"tcp://{name}:1") else EVERYWHERE
        remote = worker_command(f"tcp://{listen}:*", options, self._python)
        return WorkerPlace(
            ssh_command(host, remote, env, self._ssh_options), f"{host}, by ssh", name
        )


def ssh_command(
    host: str, remote: Sequence[str], env: Mapping[str, str], options: Sequence[str]
) -> list[str]:
    """Return the command of this host that runs a command on another one.

    Args:
        env: variables to set there.
        options: of ssh.
    """
    setting = ["env", *(f"{key}={value}" for key, value in env.items())] if env else []
    return [
        "ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}",
        "-o", f"ServerAliveInterval={_ALIVE_SECONDS}", *options, "--", host,
        shlex.join([*setting, *remote]),
    ]  # fmt: skip


def check_ssh() -> None:
    """Check that this host has an ssh client.

    Raises:
        LaunchError: it has none.
    """
    if shutil.which("ssh") is None:
        raise LaunchError("Ssh needs the OpenSSH client, and there is no `ssh` in PATH")

"""Three hosts in network namespaces: a bridge as the switch, a cable to each, own addresses.

A namespace lives as long as the process that holds it, so nothing is left behind, however a test
ends. As root they are made directly; without, in a user namespace, where that is allowed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

_SECONDS = 10.0
"""For any one command about networks."""


class NoNamespaces(Exception):
    """This machine makes none; says why."""


class _Namespace:
    """A network namespace, held by a process that waits for its input to end."""

    def __init__(self, outer: _Namespace | None, is_root: bool) -> None:
        command = ["unshare", "--net"] if is_root or outer else ["unshare", "--net", "-r"]
        before = _inode(os.getpid())
        self._holder = subprocess.Popen(
            [*(outer.enter if outer is not None and not is_root else ()), *command, "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.pid = self._holder.pid
        user = [] if is_root else ["--user", "--preserve-credentials"]
        self.enter = ["nsenter", "--target", str(self.pid), *user, "--net"]
        until = time.monotonic() + _SECONDS
        taken = {before} if outer is None else {before, _inode(outer.pid)}
        while _inode(self.pid) in taken and self._holder.poll() is None:
            if time.monotonic() > until:
                break
            time.sleep(0.005)
        if self._holder.poll() is not None or _inode(self.pid) in taken:
            self._holder.kill()
            _, told = self._holder.communicate()
            raise NoNamespaces(f"no network namespace can be made here: {told.decode().strip()}")

    def run(self, *command: str) -> str:
        """Run a command in it."""
        done = subprocess.run(
            [*self.enter, *command], capture_output=True, text=True, check=False, timeout=_SECONDS
        )
        if done.returncode:
            raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def end(self) -> None:
        self._holder.kill()
        self._holder.communicate()


class Host:
    """One host: commands that start with `enter` run there."""

    def __init__(self, number: int, namespace: _Namespace, switch: _Namespace) -> None:
        self.address = f"10.231.0.{number + 1}"
        self.enter: Sequence[str] = namespace.enter
        self._namespace = namespace
        self._switch = switch
        self._port = f"port{number}"

    def run(self, *command: str) -> str:
        """Run a command there."""
        return self._namespace.run(*command)

    def unplug(self) -> None:
        """Pull its cable out of the switch."""
        self._switch.run("ip", "link", "set", self._port, "down")

    def plug(self) -> None:
        """Put it back."""
        self._switch.run("ip", "link", "set", self._port, "up")

    def lose(self, other: Host) -> None:
        """Send what is for another host to where nobody is, so that nothing comes there."""
        nobody = "02:00:00:00:00:99"
        self.run(
            "ip", "neigh", "replace", other.address, "lladdr", nobody, "dev", "eth0",
            "nud", "permanent",
        )  # fmt: skip

    def find(self, other: Host) -> None:
        """Send it to the other host again."""
        self.run("ip", "neigh", "del", other.address, "dev", "eth0")

    def throttle(self, rate: str) -> None:
        """Let no more leave it or come to it than `rate`, such as "100mbit"."""
        for namespace, end in ((self._namespace, "eth0"), (self._switch, self._port)):
            tbf = ["tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
            namespace.run("tc", "qdisc", "replace", "dev", end, "root", *tbf)


class Hosts:
    """Hosts at one switch.

    Raises:
        NoNamespaces: they are not to be had here.
    """

    def __init__(self, count: int = 3) -> None:
        missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if not shutil.which(tool)]
        if missing:
            raise NoNamespaces(f"{', '.join(missing)} is not installed")
        if not Path("/proc/self/ns/net").exists():
            raise NoNamespaces("this system has no network namespaces")
        is_root = os.geteuid() == 0
        self._namespaces: list[_Namespace] = []
        self.hosts: list[Host] = []
        try:
            switch = self._add_namespace(None, is_root)
            switch.run("ip", "link", "add", "bridge0", "type", "bridge")
            switch.run("ip", "link", "set", "bridge0", "up")
            for number in range(count):
                self.hosts.append(self._add_host(number, switch, is_root))
        except (NoNamespaces, subprocess.TimeoutExpired, OSError) as error:
            self.end()
            raise NoNamespaces(str(error)) from None

    def _add_namespace(self, outer: _Namespace | None, is_root: bool) -> _Namespace:
        namespace = _Namespace(outer, is_root)
        self._namespaces.append(namespace)
        return namespace

    def _add_host(self, number: int, switch: _Namespace, is_root: bool) -> Host:
        namespace = self._add_namespace(switch, is_root)
        host, port = Host(number, namespace, switch), f"port{number}"
        switch.run("ip", "link", "add", port, "type", "veth", "peer", "name", f"cable{number}")
        switch.run("ip", "link", "set", f"cable{number}", "netns", str(namespace.pid))
        switch.run("ip", "link", "set", port, "master", "bridge0", "up")
        host.run("ip", "link", "set", f"cable{number}", "name", "eth0")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "link", "set", "lo", "up")
        return host

    def end(self) -> None:
        """Let go of everything."""
        for namespace in reversed(self._namespaces):
            namespace.end()


def _inode(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""

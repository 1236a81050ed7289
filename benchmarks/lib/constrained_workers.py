"""Two workers by address of which one is slow, or between which the network is.

A slow worker is held to a share of a core by `processor_share.py`. A slow link is a pair of network
namespaces with a traffic limit on the cable: the client and the first worker live in one, the
second worker in the other. Each worker calibrates itself in a folder of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from tests.faults.network.network import Host, Hosts, NoNamespaces

ROOT = Path(__file__).resolve().parents[2]
SHARE_SCRIPT = Path(__file__).with_name("processor_share.py")


class CannotConstrain(Exception):
    """This machine offers no such limit; the message says why."""


@dataclass(frozen=True)
class WorkerPair:
    """Two running workers.

    Attributes:
        addresses: where they listen.
        enter: the start of a command that runs beside the first worker.
        enter_second: the same beside the second worker.
        environment: for such commands.
    """

    addresses: tuple[str, str]
    enter: Sequence[str]
    enter_second: Sequence[str]
    environment: dict[str, str]


@contextmanager
def constrained_pair(share: float | None, mbit: float | None, folder: Path) -> Iterator[WorkerPair]:
    """Run two workers until the block ends.

    Args:
        share: of a core that the second worker gets; None for a whole one.
        mbit: rate of the link between the two, in Mbit/s; None for loopback.
        folder: for the workers' calibrations.

    Raises:
        CannotConstrain: this machine makes no network namespaces.
    """
    with ExitStack() as stack:
        hosts = _linked_hosts(stack, mbit) if mbit else [None, None]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths}
        if mbit:
            environment["GRAPHFLOW_SHARED_MEMORY"] = "off"  # it would bypass the link
        addresses = []
        for number, host in enumerate(hosts):
            own = {**environment, "GRAPHFLOW_CACHE": str(folder / f"worker-{number}")}
            process, address = _start_worker(host, own)
            stack.callback(_end, process)
            addresses.append(address)
            if number == 1 and share is not None:
                command = [sys.executable, str(SHARE_SCRIPT), str(process.pid), str(share)]
                stack.callback(_end, subprocess.Popen(command))
        first, second = (() if host is None else host.enter for host in hosts)
        yield WorkerPair((addresses[0], addresses[1]), first, second, environment)


def _linked_hosts(stack: ExitStack, mbit: float) -> list[Host]:
    """Return two hosts whose link is throttled."""
    try:
        network = Hosts(2)
        stack.callback(network.end)
        network.hosts[1].throttle(f"{mbit:g}mbit")
    except NoNamespaces as error:
        raise CannotConstrain(f"a link of {mbit:g} Mbit/s cannot be made here: {error}") from None
    return network.hosts


def _start_worker(
    host: Host | None, environment: dict[str, str]
) -> tuple[subprocess.Popen[str], str]:
    """Start a worker, and return it and its address once it listens."""
    listen = f"tcp://{host.address}:7001" if host is not None else "tcp://127.0.0.1:*"
    options = ["--threads", "1", "--log-level", "warning"]
    options += ["--insecure"] if host is not None else []
    command = [sys.executable, "-m", "graphflow", "worker", "--listen", listen, *options]
    enter = host.enter if host is not None else ()
    process = subprocess.Popen(
        [*enter, *command], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        found = [word for word in line.split() if word.startswith("tcp://")]
        if found:
            Thread(target=process.stdout.read, daemon=True).start()  # its pipe never fills up
            return process, found[0]
    raise CannotConstrain(f"the worker at {listen} ended with status {process.wait()}")


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """End a process; it has a second to do so itself."""
    process.terminate()
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

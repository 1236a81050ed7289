"""The workers of a cluster file, each at its address: on this host, or by ssh on others."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphflow.base.addresses import Address, is_ip_address, parse_address
from graphflow.errors import ClusterError
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import Worker
from graphflow.placement.clusters.launch_settings import LaunchSettings
from graphflow.runtime.launch.engines.piped_launcher import EVERYWHERE, PipedLauncher, WorkerPlace
from graphflow.runtime.launch.engines.ssh import check_ssh, ssh_command
from graphflow.runtime.launch.worker_launcher import worker_command
from graphflow.runtime.security.keys import PublicKey

_DIGITS = 64  # of a public key


class AddressedWorkers(PipedLauncher):
    """Starts the workers of a cluster, and starts lost ones again at the same address.

    Args:
        cluster: with an address for each worker.
        client: the session's public key, which workers with keys are to trust; None for none.

    Raises:
        ClusterError: a worker has no address, or is beyond loopback without a key.
    """

    def __init__(
        self, cluster: Cluster, settings: LaunchSettings, client: PublicKey | None
    ) -> None:
        super().__init__()
        self._settings, self._client, self._insecure = settings, client, cluster.insecure
        self._found = [_address_of(cluster, worker) for worker in cluster.workers]
        self._specs = cluster.workers
        self.hosts = [
            host or (None if is_this_host(address) else address.host)
            for host, address in zip(settings.hosts, self._found, strict=True)
        ]
        """For each worker, the host as ssh knows it; None for this host."""

    def check(self, count: int) -> None:
        if any(self.hosts):
            check_ssh()

    def place(self, index: int, options: Sequence[str], env: Mapping[str, str]) -> WorkerPlace:
        spec, address, host = self._specs[index], self._found[index], self.hosts[index]
        given = [*self._options_of(spec), *self._settings.options, *options]
        if host is None:
            return WorkerPlace(worker_command(str(address), given), "this host", address.host)
        if not is_ip_address(address.host) and address.host != "localhost":
            address = replace(address, host=EVERYWHERE)  # its name may mean loopback there
        remote = worker_command(str(address), given, self._settings.python)
        command = ssh_command(host, remote, env, self._settings.ssh)
        return WorkerPlace(command, f"{host}, by ssh", self._found[index].host)

    def _options_of(self, spec: Worker) -> list[str]:
        """Return a worker's own options of `graphflow worker`."""
        names = [device.name.rpartition("/")[2] for device in spec.devices]
        given = ["--devices", ",".join(names)]
        threads = {d.threads for d in spec.devices if d.kind == "cpu"}
        if len(threads) > 1:
            raise ClusterError(
                f"worker {spec.index} at {spec.address}: its CPU devices must have the same "
                "threads to be started by `graphflow up`"
            )
        if threads and (number := threads.pop()) is not None:
            given += ["--threads", str(number)]
        if self._insecure and not spec.loopback:
            given.append("--insecure")
        if spec.key is not None and len(spec.key) != _DIGITS:
            given += ["--key", spec.key, "--make-key"]
        if spec.key is not None and self._client is not None:
            given += ["--trust", str(self._client)]
        return given


def _address_of(cluster: Cluster, worker: Worker) -> Address:
    """Return the address of a worker that can be started.

    Raises:
        ClusterError: it has none, or is beyond loopback without a key.
    """
    address = None if worker.address is None else parse_address(worker.address)
    where = f"{cluster.source}: worker {worker.index}"
    if address is None:
        raise ClusterError(
            f'{where} has no address: give it one, address = "tcp://host:port", to start it'
        )
    if not (address.loopback or worker.key or cluster.insecure):
        raise ClusterError(
            f"{where} at {address} is beyond loopback and has no key: write "
            f'key = "{address.host}" in its table, and `graphflow up` makes it'
        )
    return address


def is_this_host(address: Address) -> bool:
    """Return True if an address is of this host; asks no name server."""
    if address.loopback or address.scheme != "tcp":
        return True
    if not is_ip_address(address.host):
        return address.host in {name := socket.gethostname(), name.partition(".")[0]}
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address.host, 0))
        except OSError:
            return False
    return True

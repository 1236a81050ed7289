"""Start workers by a launcher, wait for their addresses, and find replacements for lost ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from graphflow.base.progress import show_wait
from graphflow.errors import LaunchError
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import check_count
from graphflow.placement.clusters.worker_devices import worker_on_this_host
from graphflow.placement.clusters.worker_source import WorkerContact
from graphflow.runtime.launch.worker_launcher import ENDED, LaunchedWorker, WorkerLauncher
from graphflow.runtime.security.keys import COORDINATOR, Keyring
from graphflow.runtime.security.one_time_keys import NEW_KEY, one_time_keyring
from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.worker.announcement import Announcement

_POLL = 0.05  # seconds between two looks at the launcher
_REPLACE_SECONDS = 30.0  # for the replacement of a lost worker

_log = Log("graphflow.launch")


def wait_for_workers(launcher: WorkerLauncher, deadline: float) -> Iterator[LaunchedWorker]:
    """Yield each worker of a launcher as soon as it has announced itself.

    Args:
        deadline: seconds for all of them.

    Raises:
        LaunchError: one ended before, or none came in time; says who waits for what.
    """
    until, seen = time.monotonic() + deadline, set[int]()
    while True:
        workers = launcher.workers()
        for worker in workers:
            if worker.announcement is None and worker.state == ENDED:
                raise LaunchError(
                    f"{worker} before it listened; it wrote:\n{worker.log or '(nothing)'}"
                )
            if worker.announcement is not None and worker.index not in seen:
                seen.add(worker.index)
                yield worker
        if len(seen) == len(workers):
            return
        if time.monotonic() > until:
            raise LaunchError(
                f"not all workers were there after {deadline:g} s: {describe_missing(launcher)}; "
                "give a longer deadline, or start fewer"
            )
        time.sleep(_POLL)


def describe_missing(launcher: WorkerLauncher) -> str:
    """Return which workers have not announced themselves, and what they wait for."""
    missing = [each for each in launcher.workers() if each.announcement is None]
    return "; ".join(map(str, missing)) or "nobody"


class LaunchedWorkers:
    """The workers of a launcher, by number. The launcher starts them; this class waits for them.

    Attributes:
        keys_folder: the folder of the session's own one-time key.
    """

    def __init__(self, launcher: WorkerLauncher, count: int, ring: Keyring, seconds: float) -> None:
        """Prepare for workers that `launcher` starts.

        Args:
            ring: the keyring of the session.
            seconds: for a replacement of a lost worker to listen.
        """
        self.keys_folder = str(ring.folder)
        self._launcher = launcher
        self._replace_seconds = seconds
        self._known: list[Announcement | None] = [None] * count

    def wait_for_all(self, deadline: float) -> None:
        """Wait until all workers have announced themselves.

        Raises:
            LaunchError: one ended before, or none came in time; says who waits for what.
        """
        with show_wait(lambda seconds: describe_missing(self._launcher), lambda seconds: None):
            for worker in wait_for_workers(self._launcher, deadline):
                self._known[worker.index] = worker.announcement

    def contacts(self) -> list[WorkerContact]:
        """Return the address and the public key of each worker."""
        return [("", None) if each is None else (each.address, each.key) for each in self._known]

    def relocate(self, lost: Collection[str], patience: Callable[[], float]) -> list[WorkerContact]:
        """Restart lost workers by the launcher, and return the contact of each worker.

        Raises:
            LaunchError: the launcher refuses.
        """
        before = list(self._known)
        waited = set()
        for worker in self._launcher.workers():
            known = before[worker.index]
            if worker.state == ENDED or (known is not None and known.address in lost):
                _log.tell("worker.restarted", worker=worker.index, where=worker.where)
                self._launcher.restart(worker.index)
                waited.add(worker.index)
        started = time.monotonic()
        while waited and time.monotonic() < started + (patience() and self._replace_seconds):
            for worker in self._launcher.workers():
                if worker.announcement not in (None, before[worker.index]):
                    self._known[worker.index] = worker.announcement
                    waited.discard(worker.index)
            time.sleep(_POLL)
        return self.contacts()


def with_contacts(cluster: Cluster, contacts: Sequence[WorkerContact]) -> Cluster:
    """Return a cluster whose workers listen at these addresses."""
    workers = tuple(
        replace(worker, address=address, key=key)
        for worker, (address, key) in zip(cluster.workers, contacts, strict=True)
    )
    return replace(cluster, workers=workers, kind="remote")


@contextmanager
def start(
    launcher: WorkerLauncher,
    workers: int = 2,
    *,
    devices: Sequence[str] = ("cpu:0",),
    threads: int | None = None,
    deadline: float = 60.0,
    dead_after: float = 4.5,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    restart: float = _REPLACE_SECONDS,
) -> Iterator[Cluster]:
    """Start workers by a launcher, and end them with the block.

        with gf.launch.start(gf.launch.Slurm(), workers=4) as cluster:
            with gf.Session(cluster, checkpoint="steps", every=100) as s:
                …

    If a session with checkpoints loses one of them, the launcher starts another one, maybe
    elsewhere, and the session goes on with it. Workers beyond this host and the session prove who
    they are by keys that are made for this block.

    Args:
        workers: their number.
        devices: of each worker.
        threads: of each CPU device; default: the cores of this host, shared among the devices.
        deadline: seconds for all workers to listen.
        dead_after: seconds out of reach after which a session gives a worker up.
        env: variables to set for the workers.
        options: further options of `graphflow worker`, such as ["--allow-data", "/data"].
        restart: seconds for the replacement of a lost worker to listen.

    Raises:
        LaunchError: the launcher's engine is missing or refuses, a worker ended before it listened,
            or not all listened in time. None is left running.
    """
    check_count("workers", workers)
    with ExitStack() as stack:
        ring, name = stack.enter_context(one_time_keyring(COORDINATOR))
        public = ring.own_pair(name, COORDINATOR).public
        given = ["--devices", ",".join(devices), *options]
        if threads is not None:
            given += ["--threads", str(threads)]
        given += ["--key", NEW_KEY, "--trust", str(public)]
        source = LaunchedWorkers(launcher, workers, ring, restart)
        stack.callback(launcher.stop)
        launcher.start(workers, given, dict(env or {}))
        source.wait_for_all(deadline)
        made = tuple(worker_on_this_host(i, tuple(devices), threads, 1) for i in range(workers))
        contacts = source.contacts()
        plain = Cluster(
            made, kind="local", deadline=deadline, dead_after=dead_after, launched=source,
            key=name if any(key for _, key in contacts) else None,
        )  # fmt: skip
        yield with_contacts(plain, contacts)

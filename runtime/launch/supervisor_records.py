"""Files by which `graphflow down` and `graphflow status` find what `graphflow up` has started.

    STATE/NAME-DIGITS.json      what is up: workers, supervisor, log
    STATE/NAME-DIGITS.lock      locked by the supervisor as long as it lives
    STATE/NAME-DIGITS.log       what a supervisor in the background writes

STATE is `graphflow/clusters` in `$XDG_STATE_HOME` or `~/.local/state`. The kernel frees the lock of
a supervisor that was killed, so a process id that was given again misleads nobody.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from graphflow.base.atomic_write import write_atomically
from graphflow.base.environment import folder_setting, home_folder
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import LaunchError

_POLL = 0.05  # seconds
_LOOK_SECONDS = 0.5  # for somebody who only looks whether the lock is free


@dataclass(frozen=True)
class WorkerRecord:
    """One worker of a cluster that is up.

    Attributes:
        where: the host, and how it was started.
        pid: its process id on that host; None while it does not listen.
    """

    index: int
    address: str
    where: str
    pid: int | None
    restarts: int = 0

    def __str__(self) -> str:
        process = "" if self.pid is None else f", process {self.pid}"
        return f"worker {self.index} at {self.address} ({self.where}{process})"


@dataclass(frozen=True)
class ClusterRecord:
    """A cluster that is up.

    Attributes:
        file: the cluster file.
        pid: of the supervisor, on this host.
        started: seconds since the epoch.
        log: the supervisor's log; None if it runs in the foreground.
        is_ready: all workers have listened.
    """

    file: str
    pid: int
    started: float
    log: str | None
    is_ready: bool
    workers: tuple[WorkerRecord, ...]

    def __str__(self) -> str:
        log = "" if self.log is None else f", with the log {self.log}"
        return f"{self.file} is up, supervised by process {self.pid}{log}"


class RecordFile:
    """The record of one cluster file."""

    def __init__(self, cluster_file: str | os.PathLike[str]) -> None:
        path = Path(cluster_file).resolve()
        digits = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
        self._path = state_folder() / f"{path.stem}-{digits}.json"
        self.log = self._path.with_suffix(".log")
        self._lock = self._path.with_suffix(".lock")

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Be the supervisor of the cluster within the block; the record is removed at its end.

        Raises:
            LaunchError: the cluster is up already, or the folder cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LaunchError(f"{self._lock} cannot be written: {error.strerror}") from error
        try:
            until = time.monotonic() + _LOOK_SECONDS
            while not (is_ours := _try_lock(handle)) and time.monotonic() < until:
                time.sleep(_POLL)
            if not is_ours:
                raise LaunchError(
                    f"{self.read() or 'this cluster is up'}; `graphflow down` stops it"
                )
            try:
                yield
            finally:
                with suppress(OSError):
                    self._path.unlink()
        finally:
            os.close(handle)

    def write(self, record: ClusterRecord) -> None:
        """Replace the record; readers see the old one or the new one.

        Raises:
            LaunchError: the folder cannot be written.
        """
        try:
            write_atomically(self._path, json.dumps(asdict(record)))
        except OSError as error:
            raise LaunchError(f"{self._path} cannot be written: {error.strerror}") from error

    def read(self) -> ClusterRecord | None:
        """Return the record of a cluster that is up; None if it is not."""
        return None if self._is_free() else _read(self._path)

    def stop(self, record: ClusterRecord, seconds: float) -> bool:
        """End the supervisor, which ends its workers; return True if it did so by itself.

        Args:
            seconds: before it is killed. Its workers then end because their stdin does.
        """
        for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, seconds)):
            with suppress(ProcessLookupError):
                os.kill(record.pid, number)
            until = time.monotonic() + patience
            while time.monotonic() < until:
                if self._is_free():
                    return number == signal.SIGTERM
                time.sleep(_POLL)
        return False

    def _is_free(self) -> bool:
        """Return True if no supervisor lives."""
        try:
            handle = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            return _try_lock(handle)
        finally:
            os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def state_folder() -> Path:
    """Return the folder of records."""
    base = folder_setting("XDG_STATE_HOME") or home_folder() / ".local" / "state"
    return base / "graphflow" / "clusters"


def clusters_up() -> Sequence[ClusterRecord]:
    """Return the clusters that are up, by the names of their files."""
    found = [_read(path) for path in sorted(state_folder().glob("*.json"))]
    return [each for each in found if each is not None and RecordFile(each.file).read() is not None]


def _read(path: Path) -> ClusterRecord | None:
    try:
        told = json.loads(path.read_text())
        workers = tuple(WorkerRecord(**worker) for worker in told.pop("workers"))
        return ClusterRecord(workers=workers, **told)
    except (OSError, ValueError, TypeError, KeyError):
        return None

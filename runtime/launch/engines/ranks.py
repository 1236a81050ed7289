"""Workers as the ranks of a program that mpirun or srun started several times.

    mpirun -n 5 python train.py         rank 0 is the client, ranks 1 to 4 become workers

Ranks find each other by files in a folder that all of them see. mpirun or srun starts and ends the
processes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from graphflow.base.atomic_write import write_atomically
from graphflow.base.environment import setting
from graphflow.errors import ArgumentError, LaunchError
from graphflow.runtime.launch.engines.piped_launcher import EVERYWHERE, reachable
from graphflow.runtime.launch.piped_worker import PipedWorker
from graphflow.runtime.launch.worker_launcher import (
    ENDED,
    RUNNING,
    WAITING,
    LaunchedWorker,
    worker_command,
)
from graphflow.runtime.worker.announcement import Announcement

_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("PMI_JOBID",)),
    ("SLURM_PROCID", "SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    ("PMI_RANK", "PMI_SIZE", ("PMI_JOBID", "HYDI_CONTROL_FD")),
)
"""Where mpirun and srun tell a process its rank, the number of ranks, and the job."""
_POLL = 0.05  # seconds
_STALE = 60.0  # seconds by which a file of this job may be older than this process
_START = "start.json"


class _Rank(NamedTuple):
    """This process's rank, the number of ranks, and a name of the job ("" if unknown)."""

    rank: int
    size: int
    job: str


def find_rank() -> _Rank:
    """Return this process's rank, as the environment tells it.

    Raises:
        LaunchError: the environment tells none.
    """
    for rank, size, jobs in _VARIABLES:
        mine, all_ranks = setting(rank), setting(size)
        if mine is not None and all_ranks is not None and mine.isdigit() and all_ranks.isdigit():
            job = "-".join(filter(None, map(setting, jobs)))
            return _Rank(int(mine), int(all_ranks), job)
    names = ", ".join(rank for rank, _, _ in _VARIABLES)
    raise LaunchError(
        f"Ranks: the environment has none of {names}; start the program by `mpirun -n 5 python "
        "train.py` or `srun -n 5 python train.py`"
    )


class Ranks:
    """Makes workers of all ranks of this program but the first, which goes on as the client.

    On the other ranks, `gf.launch.start` serves, and ends the process when rank 0 leaves the block.

    Args:
        folder: a folder that all ranks see, which the first rank makes and removes. Default:
            `.graphflow-ranks-JOB` in the current one.
        deadline: seconds for the other ranks to wait for rank 0.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, deadline: float = 60.0
    ) -> None:
        self._rank = find_rank()
        if folder is None and not self._rank.job:
            raise ArgumentError("Ranks: the environment does not name the job; give a folder=")
        name = "".join(c if c.isalnum() else "-" for c in self._rank.job)
        self._folder = Path(folder or f".graphflow-ranks-{name}").absolute()
        self._deadline = deadline

    def start(self, count: int, options: Sequence[str], env: Mapping[str, str]) -> None:
        rank, size, _ = self._rank
        if rank:
            self._serve()
        if count != size - 1:
            raise LaunchError(
                f"Ranks: {size} ranks are a client and {size - 1} workers, and workers={count}; "
                f"start {count + 1} ranks, or give workers={size - 1}"
            )
        self._remove()
        try:
            self._folder.mkdir(mode=0o700)
            told = json.dumps({"options": list(options), "env": dict(env)})
            write_atomically(self._folder / _START, told)
        except OSError as error:
            raise LaunchError(f"Ranks: {self._folder} cannot be made: {error.strerror}") from error

    def _serve(self) -> None:
        """Be a worker until rank 0 removes the folder, and end the process.

        Raises:
            SystemExit: always.
            LaunchError: rank 0 does not come.
        """
        rank, began = self._rank.rank, time.monotonic()
        until, oldest = began + self._deadline, time.time() - _STALE
        start = self._folder / _START
        while not (start.exists() and start.stat().st_mtime > oldest):
            if time.monotonic() > until:
                raise LaunchError(
                    f"Ranks: rank {rank} saw no {start} from rank 0 within {self._deadline:g} s; "
                    "do all ranks see that folder?"
                )
            time.sleep(_POLL)
        told = json.loads(start.read_text())
        command = worker_command(f"tcp://{EVERYWHERE}:*", told["options"])
        worker, wrote = PipedWorker(command, told["env"]), False
        again = self._folder / f"{rank}.again"
        while start.exists():
            if worker.announcement is not None and not wrote:
                self._announce(rank, reachable(worker.announcement, socket.gethostname()))
                wrote = True
            if again.exists():
                worker.end(until=0.0)
                again.unlink()
                worker, wrote = PipedWorker(command, told["env"]), False
            time.sleep(_POLL)
        worker.end()
        sys.exit(0)

    def _announce(self, rank: int, announcement: Announcement) -> None:
        draft = self._folder / f".{rank}"
        draft.write_text(announcement.line())
        draft.replace(self._folder / f"{rank}.json")

    def workers(self) -> list[LaunchedWorker]:
        return [self._describe(index) for index in range(self._rank.size - 1)]

    def _describe(self, index: int) -> LaunchedWorker:
        file, where = self._folder / f"{index + 1}.json", f"rank {index + 1}"
        try:
            told = Announcement.parse(file.read_text(), str(file))
        except FileNotFoundError:
            return LaunchedWorker(index, None, WAITING, where)
        except (OSError, ArgumentError) as error:
            return LaunchedWorker(index, None, ENDED, f"{where}: {error}")
        return LaunchedWorker(index, told, RUNNING, f"{where} on {told.host}")

    def restart(self, index: int) -> None:
        with suppress(OSError):
            (self._folder / f"{index + 1}.json").unlink()
            (self._folder / f"{index + 1}.again").touch()

    def stop(self) -> None:
        if self._rank.rank == 0:
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

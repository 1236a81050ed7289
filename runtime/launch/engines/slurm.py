"""Workers as steps of a Slurm job, by `srun`. Slurm places and ends them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from graphflow.base.environment import setting
from graphflow.errors import LaunchError
from graphflow.runtime.launch.engines.piped_launcher import EVERYWHERE, PipedLauncher, WorkerPlace
from graphflow.runtime.launch.worker_launcher import worker_command

_SCONTROL_SECONDS = 20.0


class Slurm(PipedLauncher):
    """Starts workers inside a Slurm allocation (`sbatch`, `salloc`): one job step a worker.

    Workers go to the nodes of the job in turn; Slurm ends them with the job.

    Args:
        options: of srun, such as ["--cpus-per-task=8", "--gpus=1"].
        python: the interpreter on the nodes.
    """

    def __init__(self, *, options: Sequence[str] = (), python: str = "python3") -> None:
        super().__init__()
        self._srun_options, self._python = list(options), python
        self._nodes: list[str] = []

    def check(self, count: int) -> None:
        job = setting("SLURM_JOB_ID")
        if job is None:
            raise LaunchError(
                "Slurm: this process is in no job (SLURM_JOB_ID is not set); start the program by "
                "`sbatch` or `salloc`"
            )
        for tool in ("srun", "scontrol"):
            if shutil.which(tool) is None:
                raise LaunchError(f"Slurm: there is no `{tool}` in PATH, though job {job} runs")
        tasks = setting("SLURM_NTASKS")
        if tasks is not None and tasks.isdigit() and int(tasks) < count:
            raise LaunchError(
                f"Slurm: job {job} has {tasks} tasks, and {count} workers are wanted; submit it "
                f"with --ntasks={count}, or start fewer workers"
            )
        self._nodes = _expand_nodes(setting("SLURM_JOB_NODELIST") or "", job)

    def place(self, index: int, options: Sequence[str], env: Mapping[str, str]) -> WorkerPlace:
        node = self._nodes[index % len(self._nodes)]
        command = [
            "srun", "--ntasks=1", "--nodes=1", f"--nodelist={node}", "--exact", "--unbuffered",
            "--input=0", "--kill-on-bad-exit=1", *self._srun_options,
            *worker_command(f"tcp://{EVERYWHERE}:*", options, self._python),
        ]  # fmt: skip
        return WorkerPlace(command, f"{node}, by srun", node)


def _expand_nodes(nodes: str, job: str) -> list[str]:
    """Return the names of nodes in Slurm's short form, "node[1-3]".

    Raises:
        LaunchError: scontrol cannot tell them.
    """
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or error
        raise LaunchError(f"scontrol does not tell the nodes of job {job}: {why}") from error
    found = done.stdout.split()
    if not found:
        raise LaunchError(f"scontrol tells no node of job {job} ({nodes!r})")
    return found

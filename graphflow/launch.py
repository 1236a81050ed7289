"""Start workers with what a cluster has: ssh, Slurm, MPI, Ray, Dask.

    with gf.launch.start(gf.launch.Ssh(["node1", "node2"]), workers=2) as cluster:
        with gf.Session(cluster, checkpoint="steps", every=100) as s:
            s.run(train, feeds)

A launcher starts processes and restarts them when a session asks. The session keeps deadlines,
epochs and checkpoints. An own launcher is a class with the four methods of `WorkerLauncher`.
"""

from graphflow.runtime.launch.engines.dask import Dask
from graphflow.runtime.launch.engines.local_processes import Processes
from graphflow.runtime.launch.engines.ranks import Ranks
from graphflow.runtime.launch.engines.ray import Ray
from graphflow.runtime.launch.engines.slurm import Slurm
from graphflow.runtime.launch.engines.ssh import Ssh
from graphflow.runtime.launch.launched_workers import start
from graphflow.runtime.launch.worker_launcher import LaunchedWorker, WorkerLauncher

__all__ = [
    "Dask", "LaunchedWorker", "Processes", "Ranks", "Ray", "Slurm", "Ssh", "WorkerLauncher",
    "start",
]  # fmt: skip

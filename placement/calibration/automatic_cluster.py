"""Clusters of this process whose GPUs were found, not named: what becomes of GPUs that fail."""

from __future__ import annotations

import warnings
from dataclasses import replace

from graphflow.base.process.interrupts import is_interrupt
from graphflow.placement.calibration import calibrate
from graphflow.placement.clusters.cluster import Cluster


def without_gpus(cluster: Cluster) -> Cluster:
    """Return an automatic cluster with the CPUs of this process alone."""
    (worker,) = cluster.workers
    cpus = tuple(device for device in worker.devices if device.kind == "cpu")
    return replace(cluster, workers=(replace(worker, devices=cpus),), is_automatic=False)


def measured_cluster() -> Cluster:
    """Return `Cluster.here()` with GPUs whose speeds are known; measure them if need be.

    If they cannot be measured, a RuntimeWarning gives the reason, and the cluster has none.
    """
    cluster = Cluster.here()
    if not cluster.is_automatic:
        return cluster
    try:
        calibrate.profile({"cpu", "gpu"})
    except Exception as error:  # raised by CuPy, its compiler, or libraries that it loads
        if is_interrupt(error):
            raise
        warnings.warn(
            f"GPUs are left out: they cannot be measured ({type(error).__name__}: {error})",
            RuntimeWarning,
            stacklevel=3,
        )
        return without_gpus(cluster)
    return cluster

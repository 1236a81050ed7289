"""Checks of the arguments of `gf.parallel.auto`."""

from __future__ import annotations

from typing import Any

from graphflow import optim
from graphflow.errors import ArgumentError
from graphflow.ir.op import Tensor, user_location
from graphflow.parallel.mesh.count_arguments import as_count
from graphflow.placement.clusters.cluster import Cluster


def check_arguments(
    loss: Any, cluster: Any, optimizer: Any, memory: Any, trial: Any, measure: Any, exact: Any
) -> None:
    """Check the arguments of `auto`.

    Raises:
        ArgumentError: one of them is invalid.
    """
    where = f"auto at {user_location()}"
    if not isinstance(loss, Tensor):
        raise ArgumentError(f"{where}: the loss must be a tensor, not {loss!r}")
    if cluster is not None and not isinstance(cluster, Cluster):
        raise ArgumentError(f"{where}: the cluster must be a gf.Cluster, not {cluster!r}")
    if optimizer is not None and not isinstance(optimizer, optim.Optimizer):
        raise ArgumentError(
            f"{where}: optimizer must be one of gf.optim's, such as gf.optim.Adam(), not "
            f"{optimizer!r}"
        )
    if memory is not None and as_count(memory) is None:
        raise ArgumentError(
            f"{where}: memory must be a number of bytes for each device, such as 8 << 30, "
            f"not {memory!r}"
        )
    for name, flag in (("trial", trial), ("exact", exact)):
        if not isinstance(flag, bool):
            raise ArgumentError(f"{where}: {name} must be True or False, not {flag!r}")
    if as_count(measure, least=0) is None:
        raise ArgumentError(
            f"{where}: measure must be a number of strategies, 0 or more, not {measure!r}"
        )

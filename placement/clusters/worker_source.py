"""The interface by which a cluster's addresses are found again after workers were lost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from graphflow.placement.clusters.cluster import Cluster


class WorkerSource(Protocol):
    """Workers that were started by a launcher, and can be started again elsewhere.

    Attributes:
        keys_folder: the folder of the keys with which a session talks to them.
    """

    keys_folder: str

    def relocate(
        self, cluster: Cluster, lost: Collection[str], patience: Callable[[], float]
    ) -> Cluster:
        """Start workers in place of lost ones, and return the cluster with their addresses.

        Args:
            cluster: as it was first; its addresses may be old.
            lost: addresses of lost workers.
            patience: returns for how many seconds to wait; called again while workers are missing.
        """

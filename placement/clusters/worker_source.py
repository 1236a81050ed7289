"""The interface by which a cluster's addresses are found again after workers were lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

WorkerContact = tuple[str, str | None]
"""The address of a worker, and its public key; None for a worker without a key."""


class WorkerSource(Protocol):
    """Workers that were started by a launcher, and can be started again elsewhere.

    Attributes:
        keys_folder: the folder of the keys with which a session talks to them.
    """

    keys_folder: str

    def relocate(
        self, lost: Collection[str], patience: Callable[[], float]
    ) -> Sequence[WorkerContact]:
        """Start workers in place of lost ones, and return the contact of each worker.

        Args:
            lost: addresses of lost workers.
            patience: returns for how many seconds to wait; called again while workers are missing.
        """

"""Facts about a window of turns that plans price and draw.

The bodies of a `concurrent` node say what its parties compute, and not how often a server answers
which worker. A strategy that builds such a node adds these facts as its attribute `rules`.
"""

from __future__ import annotations

from typing import Literal

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import GraphError

Consistency = Literal["pool", "bsp", "ssp", "async"]
CONSISTENCIES: tuple[Consistency, ...] = ("pool", "bsp", "ssp", "async")


@dataclass(frozen=True)
class TurnRules:
    """Turns of workers beside servers, in a `concurrent` node.

    A worker pulls from each server before a turn, and pushes to each server after it.

    Attributes:
        servers: indices of the parties that keep weights.
        workers: indices of the parties that take turns.
        turns: turns of each worker; of a pool, only the sum counts, since each worker that is free
            takes the next turn.
        consistency: "async": a worker waits for its own update; "ssp": also for those of workers
            that are more than `staleness` turns behind; "bsp": for the update of a round; "pool":
            workers take turns from one queue.
        staleness: turns by which a worker may be ahead of the slowest; None: any number.
        aggregate: results of turns that make one update. Workers beyond it are backups in "bsp".
    """

    servers: tuple[int, ...]
    workers: tuple[int, ...]
    turns: tuple[int, ...]
    consistency: Consistency = "async"
    staleness: int | None = None
    aggregate: int = 1

    @property
    def turn_shape(self) -> tuple[int, ...]:
        """The shape of a number for each turn: (turns,) of a pool, else (workers, turns)."""
        if self.consistency == "pool":
            return (sum(self.turns),)
        return len(self.workers), max(self.turns)

    def check(self, parties: int) -> None:
        """Check the rules against the number of parties of their node.

        Raises:
            GraphError: an index is no party's, or a number is not possible.
        """
        indices = [*self.servers, *self.workers]
        if not self.servers or not self.workers or len(set(indices)) < len(indices):
            raise GraphError(f"a window needs servers, and other parties as workers; got {self}")
        if min(indices) < 0 or max(indices) >= parties:
            raise GraphError(f"the node has {parties} parties; {self} names others")
        if len(self.turns) != len(self.workers) or min(self.turns) < 0:
            raise GraphError(f"each worker has a number of turns, not negative; got {self}")
        if self.consistency not in CONSISTENCIES:
            raise GraphError(
                f"the consistency is one of {', '.join(CONSISTENCIES)}, not {self.consistency!r}"
            )
        if self.aggregate < 1 or (self.staleness is not None and self.staleness < 0):
            raise GraphError(
                f"aggregate must be positive, and staleness not negative; got {self.aggregate!r} "
                f"and {self.staleness!r}"
            )

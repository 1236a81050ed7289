"""Schedules of collectives, as pure data: which rank sends which shares to which rank.

An all-reduce has two halves. In the first, ranks send partial results and fold those that come. The
second half mirrors the first: a rank that sent a partial result gets the final result of the same
shares back.

    halving, 4 ranks: each exchanges halves with its neighbour, then quarters with the one after it
        rank 0   send 2:4 to 1, fold 0:2 of 1, send 1:2 to 2, fold 0:1 of 2 | give 0:1 to 2, …
    ring, 3 ranks: shares go around, and grow by what each rank adds
        rank 0   send 2:3 to 1, fold 1:2 of 2, send 1:2 to 1, fold 0:1 of 2 | …

Sources: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations
in MPICH, IJHPCA 19(1), 2005; P. Patarasuk, X. Yuan, Bandwidth Optimal All-reduce Algorithms for
Clusters of Workstations, JPDC 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.communication.reduction_order import members_of, split_at

Action = Literal["send", "fold", "give", "keep"]
"""Send a partial result, fold a received one, give a final result, keep a received one."""


@dataclass(frozen=True)
class Round:
    """One action of a rank with another rank, on shares `start` to `stop`.

    Attributes:
        before: for a fold, whether the received operand is the left one.
    """

    action: Action
    peer: int
    start: int
    stop: int
    before: bool = False

    @property
    def mirrored(self) -> Round:
        """The action that returns the same shares in the second half."""
        action: Action = "keep" if self.action == "send" else "give"
        return Round(action, self.peer, self.start, self.stop)


Rounds = list[list[Round]]
"""The actions of each rank, in order."""


def all_reduce(algorithm: str, count: int, hosts: Sequence[int] | None) -> Rounds:
    """Return the rounds of an all-reduce over `count` ranks and as many shares.

    Args:
        algorithm: "ring", "tree", "halving" or "two_level".
        hosts: host of each rank, for "two_level".
    """
    rounds: Rounds = [[] for _ in range(count)]
    ranks = list(range(count))
    match algorithm:
        case "ring":
            _add_ring(rounds, count)
        case "tree":
            _add_tree(rounds, ranks, count)
        case "halving":
            _add_halving(rounds, ranks, count)
        case "two_level":
            assert hosts is not None
            members = members_of(hosts)
            for each in members:
                _add_tree(rounds, each, count)
            _add_halving(rounds, [each[0] for each in members], count)
    return [own + [each.mirrored for each in reversed(own)] for own in rounds]


def _add_ring(rounds: Rounds, count: int) -> None:
    for step in range(count - 1):
        for rank in range(count):
            out, come = (rank - 1 - step) % count, (rank - 2 - step) % count
            rounds[rank].append(Round("send", (rank + 1) % count, out, out + 1))
            fold = Round("fold", (rank - 1) % count, come, come + 1, before=True)
            rounds[rank].append(fold)


def _add_tree(rounds: Rounds, ranks: Sequence[int], shares: int) -> None:
    """Fold all shares on the first rank, pairwise."""
    if len(ranks) == 1:
        return
    half = split_at(len(ranks))
    _add_tree(rounds, ranks[:half], shares)
    _add_tree(rounds, ranks[half:], shares)
    _add_transfer(rounds, ranks[half], ranks[0], 0, shares)


def _add_halving(rounds: Rounds, ranks: Sequence[int], shares: int) -> dict[int, tuple[int, int]]:
    """Fold each share on one of the ranks; return the range of shares of each rank."""
    if len(ranks) == 1:
        return {ranks[0]: (0, shares)}
    half = split_at(len(ranks))
    low = _add_halving(rounds, ranks[:half], shares)
    high = _add_halving(rounds, ranks[half:], shares)
    if len(low) > len(high):  # no power of two: the remainder passes on all its shares
        for upper, (start, stop) in high.items():
            for lower, (first, last) in low.items():
                _add_transfer(rounds, upper, lower, max(start, first), min(stop, last))
        return low
    owned: dict[int, tuple[int, int]] = {}
    for lower, upper in zip(low, high, strict=True):
        start, stop = low[lower]
        middle = (start + stop + 1) // 2
        owned[lower], owned[upper] = (start, middle), (middle, stop)
        # Both send before either folds, so that the transfers overlap.
        back = [Round("fold", upper, start, middle), Round("fold", lower, middle, stop, True)]
        if middle < stop:
            rounds[lower].append(Round("send", upper, middle, stop))
        if start < middle:
            rounds[upper].append(Round("send", lower, start, middle))
            rounds[lower].append(back[0])
        if middle < stop:
            rounds[upper].append(back[1])
    return owned


def _add_transfer(rounds: Rounds, source: int, target: int, start: int, stop: int) -> None:
    """Send a partial result from a higher rank to a lower one, which folds it."""
    if start < stop:
        rounds[source].append(Round("send", target, start, stop))
        rounds[target].append(Round("fold", source, start, stop))


def broadcast(count: int) -> Rounds:
    """Return the rounds of a broadcast from rank 0: the second half of a tree."""
    rounds: Rounds = [[] for _ in range(count)]
    _add_tree(rounds, range(count), 1)
    return [[each.mirrored for each in reversed(own)] for own in rounds]

"""Gossip: replicas that mix their parameters with those of their neighbours, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.op import Location, Node, Tensor, next_stream, user_location
from graphflow.parallel.compression.filter import Filter, require_rule_for_changes
from graphflow.parallel.compression.gossip_differences import GossipFilter
from graphflow.parallel.local_training.mixing_matrices import mixing_matrix, peer_matrices
from graphflow.parallel.local_training.parameter_exchange import (
    Exchanged,
    ExchangedBucket,
    begin_exchange,
    finish_exchange,
    require_equal,
)
from graphflow.parallel.local_training.replica_strategy import ReplicaStrategy
from graphflow.parallel.local_training.replica_unroller import (
    APPLIES,
    REPLICA,
    SENDS_BEFORE,
    ReplicaUnroller,
)
from graphflow.parallel.local_training.replicated_state import ReplicatedState
from graphflow.parallel.mesh.count_arguments import set_frozen_fields
from graphflow.parallel.mesh.layouts import SentTensor, whole
from graphflow.parallel.resharding.communication_log import CommunicationLog
from graphflow.parallel.resharding.gradient_buckets import BUCKET_BYTES

Matrix = np.ndarray[Any, Any]


@checks_arguments(ShardingError)
@dataclass(frozen=True, eq=False)
class Gossip(ReplicaStrategy):
    """Replicas that mix their parameters with those of their neighbours in every turn.

    x_i ← Σ_j W_ij x_j + (the step of replica i at x_i). No replica waits for all others, and no
    link carries more than the parameters of a few neighbours. Parameters travel while the gradients
    of the turn are computed. Feeds, fetches and `Session.get` are as with `LocalSGD`.

    Args:
        replicas: their number.
        topology: "ring", "torus" (a grid as near to a square as the number allows), "hypercube" (of
            a power of 2 of replicas), "exponential" (replicas 1, 2, 4, … places further); or the
            matrix W of weights, doubly stochastic. By name, a replica and its neighbours have equal
            weights.
        one_peer: mix with one neighbour a turn, half and half, in rotation.
        window: the number of turns in a run.
        batch, bucket, devices, inner: as in `LocalSGD`.
        compress: a filter, such as `FixedPoint(8)`, through which neighbours send what changed.
            Each replica keeps two more copies of its parameters.
        consensus: with `compress`, the share of the way towards its neighbours that a replica goes
            in a turn, above 0 and up to 1. The less a filter sends, the smaller it must be: 1 for
            `FixedPoint(8)`, about 4 times the share of `TopK`.

    Raises:
        ShardingError: a count is invalid; there is no such topology for this number of replicas; a
            row or column of W does not sum to 1 within 1e-9; when a graph is partitioned: as with
            `LocalSGD`.
            Also a filter without `consensus`, with `one_peer`, or without `encode`.
        CheckError: in a step: integers that depend on the batch differ.

    Source: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS
        2017.
    """

    replicas: int
    topology: Any = "ring"
    one_peer: bool = False
    window: int = 1
    batch: Sequence[Tensor | str] | None = None
    bucket: int = BUCKET_BYTES
    devices: Sequence[str] | Sequence[Sequence[str]] | None = None
    inner: Any = None
    compress: Filter | None = None
    consensus: float | None = None
    line: Location = field(default_factory=user_location, init=False, repr=False)
    _counters: dict[Node, Node] = field(default_factory=dict, init=False, repr=False)
    _filter: GossipFilter | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.check_counts("replicas", "window")
        if not isinstance(self.one_peer, bool):
            raise ShardingError(
                f"Gossip at {self.line}: one_peer must be True or False, not {self.one_peer!r}"
            )
        first = self.matrices[0]
        if self.compress is not None or self.consensus is not None:
            where = f"Gossip at {self.line}"
            rule, rate = self._check_filter(where)
            made = GossipFilter(rule, rate, first, next_stream(), where)
            set_frozen_fields(self, _filter=made)

    def _check_filter(self, where: str) -> tuple[Filter, float]:
        """Check `compress` and `consensus`, and return them."""
        rule, rate = self.compress, self.consensus
        if not isinstance(rule, Filter) or type(rule).encode is Filter.encode:
            raise ShardingError(
                f"{where}: compress must be a filter with encode and decode, such as "
                f"gf.parallel.FixedPoint(8), not {rule!r}"
            )
        require_rule_for_changes(rule, where)
        if self.one_peer:
            raise ShardingError(
                f"{where}: compress={rule!r} needs neighbours that stay the same, since each "
                "remembers what it heard; leave out one_peer=True"
            )
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1:
            raise ShardingError(
                f"{where}: compress={rule!r} needs consensus=, a number above 0 and up to 1, not "
                f"{rate!r}: 1 for FixedPoint(8), about 4 times the share of TopK"
            )
        return rule, float(rate)

    @property
    def matrices(self) -> list[Matrix]:
        """The mixing matrices of turns, (replicas, replicas) each, in rotation."""
        where = f"Gossip at {self.line}"
        if self.one_peer:
            return peer_matrices(self.topology, self.replicas, where)
        return [mixing_matrix(self.topology, self.replicas, where)]

    @property
    def cycle(self) -> int:
        """The number of turns after which the plans of windows repeat."""
        return len(self.matrices)

    def is_in_step(self, done: int) -> bool:
        """Return True if all replicas have the same parameters after a number of turns."""
        return done == 0 or self.replicas == 1

    def plan_window(self, done: int) -> tuple[int, ...]:
        """Return the number of the mixing matrix of each turn of a window."""
        return tuple((done + turn) % self.cycle for turn in range(self.window))

    def describe_window(self, unroller: ReplicaUnroller) -> Sequence[str]:
        """Return a sentence for plans and reports: how often, and how fast replicas agree."""
        matrices = self.matrices
        values = np.linalg.svd(matrices[0], compute_uv=False)
        factor = float(values[1]) if self.replicas > 1 else 0.0
        if self.one_peer:
            return [f"Gossip: each replica mixes with one of {len(matrices)} neighbours a turn"]
        return [
            "Gossip: each replica mixes with its neighbours in every turn, which brings replicas "
            f"closer to their mean by a factor of {factor:.3g}"
        ]

    def emit_window(
        self, unroller: ReplicaUnroller, state: ReplicatedState, plan: Sequence[int]
    ) -> None:
        """Write the turns of a window, each with the mixing of what was there before it."""
        mixed = (*state.parameters, *state.averaged)
        matrices = self.matrices
        for turn, number in enumerate(plan):
            before = [Exchanged(v, [*unroller.current[v]]) for v in mixed]
            chosen = [] if self._filter is None else self._filter.select(before)
            filtered = {value.variable for value in chosen}
            plain = [value for value in before if value.variable not in filtered]
            unroller.enter(turn, SENDS_BEFORE)
            begun = begin_exchange(unroller, plain, self.bucket)  # sent before the turn computes
            messages = (
                self._filter.send(unroller, chosen, turn) if self._filter and chosen else None
            )
            unroller.emit_turn(turn)
            unroller.enter(turn, APPLIES)
            neighbours = _Neighbours(matrices[number])
            means = finish_exchange(unroller, plain, begun, neighbours)
            found = dict(zip([value.variable for value in plain], means, strict=True))
            if self._filter is not None and messages is not None:
                found |= self._filter.mix(unroller, chosen, messages)
            for node, old in before:
                mean = found[node]
                step = unroller.difference(node, unroller.current[node], old)
                unroller.current[node] = unroller.add(node, mean, step)
        for node in state.equal:
            unroller.current[node] = require_equal(unroller, node)


class _Neighbours:
    """Mixes values over replicas by a matrix."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix

    def combine(
        self, unroller: ReplicaUnroller, bucket: ExchangedBucket, places: Sequence[int]
    ) -> list[Tensor]:
        """Return at each of some devices, one of each replica, the weighted sum of their parts."""
        parts = [bucket.parts[place] for place in places]
        sent: dict[SentTensor, float] = {}
        found = []
        for i, place in enumerate(places):
            weights = {j: float(w) for j, w in enumerate(self._matrix[i]) if w}
            here = unroller.owners[place]
            for j in weights:
                if unroller.owners[places[j]] != here:
                    sent[parts[j], here] = float(unroller.builder.nbytes(parts[j].spec, whole(1)))
            with unroller.on_device(place, bucket.cause):
                found.append(reduce(add, [parts[j] * weight for j, weight in weights.items()]))
        log = CommunicationLog(unroller.builder, bucket.cause, bucket.description)
        log("neighbours", (REPLICA,), sent)
        return found


__all__ = ["Gossip"]

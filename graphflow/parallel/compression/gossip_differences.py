"""Gossip through a filter: replicas send what changed since their neighbours last heard of them.

Replica i keeps an estimate x̂_i, which all its neighbours have as well, and the mix of the estimates
of its neighbours, s_i = Σ_j W_ij x̂_j. In a turn it sends q_i = filter(x_i − x̂_i), and then

    x̂_i ← x̂_i + q_i    s_i ← s_i + Σ_j W_ij q_j    x_i ← x_i + γ (s_i − x̂_i)

The mean over replicas stays what it was, and x_i − x̂_i holds what was not sent. So a filter needs
no residual of its own here.

Source: Koloskova, Stich & Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with
    Compressed Communication", ICML 2019 (CHOCO-SGD, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphflow import init
from graphflow.base.formatting import show_count
from graphflow.errors import ShardingError
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, RandomStreams, Tensor
from graphflow.ir.spec import TensorSpec, kind, product
from graphflow.optim.update_targets import in_dtype_of, wide_dtype
from graphflow.parallel.compression.exchange import draw_from, given_state, seed_of, unpack_row
from graphflow.parallel.compression.filter import (
    Array,
    Filter,
    Parts,
    expected_bytes,
    used_rows_of,
)
from graphflow.parallel.compression.replica_differences import copy_within_replicas
from graphflow.parallel.compression.traffic import traffic_of
from graphflow.parallel.local_training.parameter_exchange import Exchanged
from graphflow.parallel.local_training.replica_unroller import REPLICA, ReplicaUnroller
from graphflow.parallel.mesh.layouts import CommunicationRecord, SentTensor
from graphflow.parallel.resharding.communication_log import user_name


class _Estimates(NamedTuple):
    """The variables of a parameter's exchange: x̂, s, and the state of the filter."""

    own: Node
    mixed: Node
    state: tuple[Node, ...]

    @property
    def every(self) -> tuple[Node, ...]:
        """All of them."""
        return (self.own, self.mixed, *self.state)


class GossipMessages(NamedTuple):
    """The messages of all replicas in a turn.

    Attributes:
        parts: the parts that each replica sends for each value.
        rows: the same, as one row for each dtype, and rows of which a part is in use.
    """

    parts: Sequence[Sequence[Parts]]
    rows: Sequence[dict[str, Tensor]]


class GossipFilter:
    """A filter for what neighbours send each other, and the variables that it needs.

    Args:
        rule: the filter. It has `encode` and `decode`.
        rate: γ, the share of the way towards the neighbours that a replica goes in a turn.
        matrix: the weights W.
        stream: the stream of its random numbers.
        where: the user's line, for errors.
    """

    def __init__(
        self, rule: Filter, rate: float, matrix: Array, stream: tuple[int, int], where: str
    ) -> None:
        self.rule = rule
        self._rate = rate
        self._matrix = matrix
        self._stream = stream
        self._where = where
        self._variables: dict[Node, _Estimates | None] = {}

    def select(self, values: Sequence[Exchanged]) -> list[Exchanged]:
        """Return the values that the filter compresses.

        Raises:
            ShardingError: there are none.
        """
        for node, _ in values:
            if node not in self._variables:
                self._variables[node] = self._make_variables(node) if self._saves(node) else None
        found = [value for value in values if self._variables[value.variable] is not None]
        if not found and len(self._matrix) > 1:
            raise ShardingError(
                f"{self._where}: {self.rule!r} saves nothing for the "
                f"{show_count(len(values), 'value')} that neighbours send; send less of each, or "
                "leave out compress="
            )
        return found

    def _saves(self, node: Node) -> bool:
        """Return True if the filter sends less of a value than the value."""
        spec = node.specs[0]
        if kind(spec.dtype) != "float" or not self.rule.applies(spec):
            return False
        return traffic_of(self.rule, spec, 2).saves

    def _make_variables(self, node: Node) -> _Estimates:
        """Make the variables of a value's exchange."""
        wide = _wide_spec(node)
        zeros = init.zeros(tuple(map(int, wide.shape)), wide.dtype)
        firsts: dict[str, Array | init.Initializer] = {"estimate": zeros, "mixed": zeros}
        firsts |= {f"filter_state_{n}": a for n, a in enumerate(self.rule.initial(wide))}
        made = []
        for name, first in firsts.items():
            tensor: Tensor = REGISTRY["variable"](
                initial=first, trainable=False, shape=tuple(map(int, first.shape)),
                dtype=str(first.dtype), named=False, name=f"exchange/{node.name}/{name}",
            )  # fmt: skip
            made.append(tensor.node)
        return _Estimates(made[0], made[1], tuple(made[2:]))

    def send(
        self, unroller: ReplicaUnroller, values: Sequence[Exchanged], turn: int
    ) -> GossipMessages:
        """Return what replicas send of some values in a turn.

        Args:
            unroller: has the current values.
            values: values that `select` returned.
            turn: the number of the turn in its window.
        """
        for node, _ in values:
            for variable in self._estimates_of(node).every:
                unroller.add_replica_state(variable)
        cause = values[-1].variable
        every = range(len(self._matrix))
        parts = [self._encode(unroller, values, replica, turn) for replica in every]
        rows = [_pack(unroller, own, replica, cause) for replica, own in enumerate(parts)]
        self._record(unroller, values, rows)
        return GossipMessages(parts, rows)

    def mix(
        self, unroller: ReplicaUnroller, values: Sequence[Exchanged], messages: GossipMessages
    ) -> dict[Node, list[Tensor]]:
        """Return what each value becomes at each device, without the step of the turn.

        Args:
            unroller: has the current values of estimates.
            values, messages: what was sent.
        """
        every = range(len(self._matrix))
        mixed = [self._mix(unroller, values, messages, replica) for replica in every]
        return {
            value.variable: copy_within_replicas(unroller, value, [own[i] for own in mixed])
            for i, value in enumerate(values)
        }

    def _estimates_of(self, node: Node) -> _Estimates:
        found = self._variables[node]
        assert found is not None
        return found

    def _encode(
        self, unroller: ReplicaUnroller, values: Sequence[Exchanged], replica: int, turn: int
    ) -> list[Parts]:
        """Return the message of a replica for each value. The filter's state moves on."""
        place, found = replica * unroller.places, []
        for i, value in enumerate(values):
            own = self._estimates_of(value.variable)
            streams = RandomStreams(seed_of((*self._stream, turn), i, replica))
            with unroller.on_device(place, value.variable), draw_from(streams):
                estimate = unroller.current[own.own][replica]
                change = in_dtype_of(value.parts[place], estimate) - estimate
                state = tuple(unroller.current[node][replica] for node in own.state)
                given = given_state(self.rule, change, state, value.parts[place])
                parts, after = self.rule.encode(change, given)
            for node, new in zip(own.state, after, strict=True):
                unroller.current[node][replica] = new
            found.append(tuple(parts))
        return found

    def _mix(
        self,
        unroller: ReplicaUnroller,
        values: Sequence[Exchanged],
        messages: GossipMessages,
        replica: int,
    ) -> list[Tensor]:
        """Return what the values of a replica become; its estimates move on."""
        sent, rows = messages
        place = replica * unroller.places
        cause = values[-1].variable
        weights = {j: float(w) for j, w in enumerate(self._matrix[replica]) if w}
        with unroller.on_device(place, cause):
            received = {j: _unpack(rows[j], sent[j]) for j in weights if j != replica}
        found = []
        for i, value in enumerate(values):
            own, spec = self._estimates_of(value.variable), _wide_spec(value.variable)
            with unroller.on_device(place, value.variable):
                changes = {
                    j: self.rule.decode(received[j][i] if j in received else sent[j][i], spec)
                    for j in {**weights, replica: 0.0}
                }
                estimate = unroller.current[own.own][replica] + changes[replica]
                mixed = unroller.current[own.mixed][replica]
                for j, weight in weights.items():
                    mixed = mixed + changes[j] * weight
                before = value.parts[place]
                moved = in_dtype_of(before, mixed) + (mixed - estimate) * self._rate
                found.append(in_dtype_of(moved, before))
            unroller.current[own.own][replica] = estimate
            unroller.current[own.mixed][replica] = mixed
        return found

    def _record(
        self,
        unroller: ReplicaUnroller,
        values: Sequence[Exchanged],
        rows: Sequence[dict[str, Tensor]],
    ) -> None:
        """Record what neighbours send each other, and what they would send without the filter."""
        sent: dict[SentTensor, float] = {}
        plain = 0
        whole = sum(int(product(v.specs[0].shape)) * v.specs[0].dtype.itemsize for v, _ in values)
        firsts = unroller.owners[:: unroller.places]
        for replica, weights in enumerate(self._matrix):
            for j, weight in enumerate(weights):
                if weight and firsts[j] != firsts[replica]:
                    plain += whole
                    for row in rows[j].values():
                        sent[row, firsts[replica]] = float(expected_bytes(row))
        cause = values[-1].variable
        name = f"{show_count(len(values), 'difference')} by {self.rule!r}"
        if sent:
            unroller.builder.records.append(
                CommunicationRecord(
                    "neighbours", REPLICA, name, round(sum(sent.values())), user_name(cause),
                    cause.location, sent, plain,
                )
            )  # fmt: skip


def _wide_spec(node: Node) -> TensorSpec:
    """Return the spec of a parameter's estimates: at least float32."""
    spec = node.specs[0]
    return spec.with_dtype(wide_dtype(spec.dtype))


def _pack(
    unroller: ReplicaUnroller, parts: Sequence[Parts], replica: int, cause: Node
) -> dict[str, Tensor]:
    """Return one row for each dtype, with all parts of a replica's messages; and, by themselves,
    the parts of which only the rows in use travel."""
    flat = [part for each in parts for part in each]
    rows = {}
    with unroller.on_device(replica * unroller.places, cause):
        for name, own in _rows_of(flat).items():
            if used_rows_of(flat[own[0]]):
                rows[name] = flat[own[0]]
                continue
            vectors = [FUNCTIONS["reshape"](flat[i], (-1,)) for i in own]
            rows[name] = vectors[0] if len(own) == 1 else FUNCTIONS["concat"](vectors)
    return rows


def _rows_of(flat: Sequence[Tensor]) -> dict[str, list[int]]:
    """Return the numbers of the parts that make each row."""
    rows: dict[str, list[int]] = {}
    for i, part in enumerate(flat):
        name = part.dtype.name
        rows.setdefault(f"{name} of part {i}" if used_rows_of(part) else name, []).append(i)
    return rows


def _unpack(rows: dict[str, Tensor], like: Sequence[Parts]) -> list[Parts]:
    """Return the parts of a replica's messages from its rows."""
    flat = [part for each in like for part in each]
    found: dict[int, Tensor] = {}
    for name, own in _rows_of(flat).items():
        found |= zip(own, unpack_row(rows[name], 0, [flat[i] for i in own]), strict=True)
    parts = iter(found[i] for i in range(len(flat)))
    return [tuple(next(parts) for _ in each) for each in like]


__all__ = ["GossipFilter", "GossipMessages"]

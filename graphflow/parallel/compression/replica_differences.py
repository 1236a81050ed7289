"""Means over replicas through a filter: what `LocalSGD(compress=…)` exchanges.

Each replica has variables of its own. The first device of each exchanges a difference through the
filter, and hands the mean to the other devices of its replica. The residuals are variables of these
first devices, so their mean plus the mean of what was sent is the mean of the differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphflow.base.formatting import show_count
from graphflow.errors import ShardingError
from graphflow.ir.op import REGISTRY, Node, Tensor
from graphflow.ir.spec import kind, product
from graphflow.parallel.compression.exchange import Sites, exchange_sums
from graphflow.parallel.compression.filter import Filter, expected_bytes
from graphflow.parallel.compression.traffic import first_state, traffic_of
from graphflow.parallel.local_training.parameter_exchange import Exchanged
from graphflow.parallel.local_training.replica_unroller import REPLICA, ReplicaUnroller
from graphflow.parallel.mesh.layouts import SentTensor, ShardedTensor, whole
from graphflow.parallel.resharding.collectives import broadcast
from graphflow.parallel.resharding.communication_log import CommunicationLog


class DifferenceFilter:
    """A filter for differences that replicas exchange, and the variables that hold its state.

    Args:
        rule: the filter.
        replicas: the number of replicas.
        stream: the stream of its random numbers.
        where: the user's line, for errors.
    """

    def __init__(self, rule: Filter, replicas: int, stream: tuple[int, int], where: str) -> None:
        self.rule = rule
        self._replicas = replicas
        self._stream = stream
        self._where = where
        self._states: dict[Node, tuple[Node, ...] | None] = {}

    def states_of(self, parameters: Sequence[Node]) -> dict[Node, tuple[Node, ...]]:
        """Return the state variables of those parameters whose differences the filter compresses.

        Raises:
            ShardingError: the filter saves nothing for any of them.
        """
        for node in parameters:
            if node not in self._states:
                self._states[node] = self._make_state(node) if self._saves(node) else None
        found = {v: own for v in parameters if (own := self._states[v]) is not None}
        if not found and self._replicas > 1:
            raise ShardingError(
                f"{self._where}: {self.rule!r} saves nothing for the "
                f"{show_count(len(parameters), 'parameter')} that {self._replicas} replicas "
                "exchange; send less of each, or leave out compress="
            )
        return found

    def _saves(self, node: Node) -> bool:
        """Return True if the filter sends less of a parameter than an all-reduce."""
        spec = node.specs[0]
        if self._replicas == 1 or kind(spec.dtype) != "float" or not self.rule.applies(spec):
            return False
        return traffic_of(self.rule, spec, self._replicas).saves

    def _make_state(self, node: Node) -> tuple[Node, ...]:
        """Make the variables that hold the state of a parameter's exchange."""
        made = []
        for number, first in enumerate(first_state(self.rule, node.specs[0])):
            residual = self.rule.feedback and number == 0
            name = "residual" if residual else f"filter_state_{number}"
            shape = tuple(map(int, first.shape))
            tensor: Tensor = REGISTRY["variable"](
                initial=first, trainable=False, shape=shape, dtype=str(first.dtype), named=False,
                name=f"exchange/{node.name}/{name}",
            )  # fmt: skip
            made.append(tensor.node)
        return tuple(made)

    def exchange(
        self,
        unroller: ReplicaUnroller,
        values: Sequence[Exchanged],
        at: tuple[int, ...],
        limit: int,
    ) -> dict[Node, list[Tensor]]:
        """Return the mean over replicas of each value that is compressed, at each device.

        The state of the exchange becomes the current value of its variables.

        Args:
            unroller: has the current values.
            values: the differences of parameters.
            at: numbers that no other exchange of a window has, for random numbers.
            limit: bytes that are exchanged at once; 0: each value by itself.
        """
        states = self.states_of([value.variable for value in values])
        buckets: list[list[Exchanged]] = []
        held = limit
        for value in values:
            if value.variable in states:
                if held >= limit:
                    buckets.append([])
                    held = 0
                buckets[-1].append(value)
                held += _nbytes(value)
        means: dict[Node, list[Tensor]] = {}
        for number, bucket in enumerate(buckets):
            means |= self._exchange_bucket(unroller, bucket, (*at, number))
        return means

    def _exchange_bucket(
        self, unroller: ReplicaUnroller, values: Sequence[Exchanged], at: tuple[int, ...]
    ) -> dict[Node, list[Tensor]]:
        """Exchange some differences at once."""
        for value in values:
            for node in self._states[value.variable] or ():
                unroller.add_replica_state(node)
        firsts = range(0, len(unroller.owners), unroller.places)
        cause = values[-1].variable
        records = unroller.builder.records
        begun = len(records)
        made = exchange_sums(
            self.rule,
            [[value.parts[place] for place in firsts] for value in values],
            [
                [
                    tuple(unroller.current[s][k] for s in self._states[value.variable] or ())
                    for k in range(self._replicas)
                ]
                for value in values
            ],
            self._sites(unroller, cause, len(values)),
            (*self._stream, *at),
            values=[
                [unroller.current[value.variable][place] for place in firsts] for value in values
            ]
            if self.rule.reads_value
            else None,
        )
        sent = 2 * (self._replicas - 1) * sum(map(_nbytes, values))
        records[begun:] = [
            replace(record, plain=0 if number else sent)
            for number, record in enumerate(records[begun:])
        ]
        found = {}
        for value, own in zip(values, made, strict=True):
            for number, node in enumerate(self._states[value.variable] or ()):
                unroller.current[node] = [one.state[number] for one in own]
            means = []
            for place, one in zip(firsts, own, strict=True):
                with unroller.on_device(place, value.variable):
                    means.append(one.total / float(self._replicas))
            found[value.variable] = copy_within_replicas(unroller, value, means)
        return found

    def _sites(self, unroller: ReplicaUnroller, cause: Node, count: int) -> Sites:
        """Return the scopes of the nodes of an exchange between the first devices of replicas."""
        name = f"{show_count(count, 'difference')} by {self.rule!r}"

        logged = CommunicationLog(unroller.builder, cause, name)

        def log(kind: str, made: Sequence[Tensor]) -> None:
            result = ShardedTensor(made[0].spec, whole(made[0].ndim), tuple(made))
            logged.exchange(kind, (REPLICA,), result)

        def log_rows(every: Sequence[Tensor], to: int | None) -> None:
            firsts = unroller.owners[:: unroller.places]
            sent: dict[SentTensor, float] = {
                (part, receiver): expected_bytes(part)
                for source, part in zip(firsts, every, strict=True)
                for receiver in (firsts if to is None else (firsts[to],))
                if receiver != source
            }
            logged("rows", (REPLICA,), sent)

        return Sites(
            lambda rank: unroller.on_device(rank * unroller.places, cause),
            lambda: unroller.cross_device(cause),
            log,
            log_rows,
        )


def copy_within_replicas(
    unroller: ReplicaUnroller, value: Exchanged, firsts: Sequence[Tensor]
) -> list[Tensor]:
    """Return a tensor at each device, given that at the first device of each replica."""
    found: list[Tensor] = []
    node, count = value.variable, unroller.places
    for replica, first in enumerate(firsts):
        if count == 1:
            found.append(first)
            continue
        like = [first, *value.parts[replica * count + 1 : (replica + 1) * count]]
        with unroller.cross_device(node):
            copies = broadcast(first, count, like)
        result = ShardedTensor(first.spec, whole(first.ndim), tuple(copies))
        log = CommunicationLog(unroller.builder, node, unroller.name_of(node))
        log.exchange("broadcast", tuple(unroller.template.mesh), result)
        found += copies
    return found


def _nbytes(value: Exchanged) -> int:
    spec = value.variable.specs[0]
    return int(product(spec.shape)) * int(spec.dtype.itemsize)


__all__ = ["DifferenceFilter", "copy_within_replicas"]

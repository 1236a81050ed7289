"""Emission of compressed sums: the exchange of a `compressed_sum` node, over the places of a mesh.

The node's gradients are partial sums along the axis of replicas, and its state has a row for each
place. Gradients are exchanged in buckets, in the order in which the backward pass finishes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from graphflow.base.formatting import show_count
from graphflow.ir.op import FUNCTIONS, Node, Tensor
from graphflow.ir.spec import TensorSpec, product
from graphflow.parallel.compression.exchange import Sites, exchange_sums
from graphflow.parallel.compression.filter import expected_bytes
from graphflow.parallel.mesh.device_mesh import Place
from graphflow.parallel.mesh.layouts import Layout, SentTensor, ShardedTensor, whole
from graphflow.parallel.resharding.communication_log import CommunicationLog, user_name
from graphflow.parallel.resharding.resharder import Resharder

COMPRESSED = "compressed_sum"
"""The name of the op behind gradients that a filter compresses."""


class _Row(NamedTuple):
    """A gradient, the state of its exchange, and its variable if the filter reads it."""

    gradient: Tensor
    state: tuple[Tensor, ...]
    variable: Tensor | None


def emit_compressed(
    resharder: Resharder, node: Node, values: Mapping[Tensor, ShardedTensor], bucket: int
) -> dict[Tensor, ShardedTensor]:
    """Return the values of a `compressed_sum` node: sums that are whole, and the next state.

    A gradient that is not partial along one axis of devices passes as it is, and so does its state.

    Args:
        resharder: builds the collectives.
        node: the node.
        values: the sharded tensor of each input.
        bucket: bytes of gradients that are exchanged at once; 0: each by itself.
    """
    count = node.attrs["count"]
    found = {new: values[old] for old, new in zip(node.inputs, node.outputs, strict=True)}
    rows: dict[str, list[_Row]] = {}
    begin, after = count, count + sum(node.attrs["states"])
    for number, size in enumerate(node.attrs["states"]):
        gradient, state = node.inputs[number], node.inputs[begin : begin + size]
        begin += size
        variable = node.inputs[after + number] if node.attrs["reads"] else None
        axis = _summed_axis(resharder, values[gradient])
        if axis is not None:
            rows.setdefault(axis, []).append(_Row(gradient, state, variable))
    outputs = dict(zip(node.inputs, node.outputs, strict=True))
    for axis, every in rows.items():
        for number, own in enumerate(_in_buckets(every, bucket)):
            made = _emit_bucket(resharder, node, own, values, axis, number)
            found.update({outputs[tensor]: value for tensor, value in made.items()})
    return found


def _summed_axis(resharder: Resharder, value: ShardedTensor) -> str | None:
    """Return the axis of devices over which a whole tensor of known size is to be summed."""
    local = resharder.mesh.sequential
    across = [(axis, kind) for axis, kind in value.layout.partial if axis not in local]
    if len(across) != 1 or across[0][1] != "sum" or any(value.layout.dims):
        return None
    return across[0][0] if value.spec.is_concrete else None


def _in_buckets(rows: Sequence[_Row], limit: int) -> list[list[_Row]]:
    """Divide gradients into buckets, in the order in which they were made."""
    found: list[list[_Row]] = []
    size = limit
    for row in sorted(rows, key=lambda row: row.gradient.node.serial):
        if size >= limit:
            found.append([])
            size = 0
        found[-1].append(row)
        size += _nbytes(row.gradient.spec)
    return found


def _nbytes(spec: TensorSpec) -> int:
    return int(product(spec.shape)) * int(spec.dtype.itemsize)


def _emit_bucket(
    resharder: Resharder,
    node: Node,
    rows: Sequence[_Row],
    values: Mapping[Tensor, ShardedTensor],
    axis: str,
    number: int,
) -> dict[Tensor, ShardedTensor]:
    """Exchange some gradients; return the values that stand for them and their state after it."""
    partial = _PartialRows(resharder, node, rows, values, axis, number)
    parts: dict[Tensor, dict[Place, Tensor]] = {tensor: {} for tensor in partial.tensors}
    known: dict[tuple[Tensor, ...], list[list[Tensor]]] = {}
    for group in resharder.mesh.groups(axis):
        key = partial.shards(group)
        if key not in known:  # micro-batches of one device share an exchange
            known[key] = partial.exchange(group)
        for tensor, made in zip(partial.tensors, known[key], strict=True):
            parts[tensor].update(zip(group, made, strict=True))
    found = {}
    for tensor, own in parts.items():
        layout = whole(tensor.ndim) if tensor in partial.sums else values[tensor].layout
        shards = tuple(own[place] for place in resharder.mesh.places)
        found[tensor] = ShardedTensor(tensor.spec, layout, shards)
    return found


class _PartialRows:
    """Gradients that are partial along one axis of devices, with their state.

    Args:
        resharder, node, values: see `emit_compressed`.
        rows: the gradients, and the state of each.
        axis: the axis.
        number: the number of the bucket.
    """

    def __init__(
        self,
        resharder: Resharder,
        node: Node,
        rows: Sequence[_Row],
        values: Mapping[Tensor, ShardedTensor],
        axis: str,
        number: int,
    ) -> None:
        self._resharder = resharder
        self._node = node
        self._rows = rows
        self._axis = axis
        self._stream = (*node.attrs["stream"], number)
        scale = values[node.inputs[-1]] if node.attrs["scaled"] else None
        if scale is not None:
            name = user_name(node.inputs[-1].node)
            scale = resharder.convert(scale, whole(0), node, name)
        self._scale = scale
        within = ((axis, "sum"),)
        self._values = {tensor: values[tensor] for row in rows for tensor in row.state}
        for row in rows:
            if row.variable is not None:
                variable = row.variable
                self._values[variable] = resharder.convert(
                    values[variable], whole(variable.ndim), node, user_name(variable.node)
                )
        for gradient, _, _ in rows:  # micro-batches of a device are summed there
            value = values[gradient]
            layout = Layout(value.layout.dims, within)
            name = user_name(gradient.node)
            self._values[gradient] = resharder.convert(value, layout, node, name)
        self.sums = {row.gradient for row in rows}
        self.tensors = [tensor for row in rows for tensor in (row.gradient, *row.state)]

    def shards(self, group: Sequence[Place]) -> tuple[Tensor, ...]:
        """Return all shards at the places of a group."""
        return tuple(
            self._resharder.shard_at(self._values[tensor], place)
            for place in group
            for tensor in self.tensors
        )

    def exchange(self, group: Sequence[Place]) -> list[list[Tensor]]:
        """Exchange the gradients of a group; return the results of each of `tensors` at its
        places."""
        states = [[self._state(row.state, place) for place in group] for row in self._rows]
        read = [row.variable for row in self._rows if row.variable is not None]
        first = len(self._resharder.records)
        made = exchange_sums(
            self._node.attrs["rule"],
            [[self._shard(row.gradient, place) for place in group] for row in self._rows],
            states,
            self._sites(group),
            self._stream,
            self._scales(group),
            [[self._shard(variable, place) for place in group] for variable in read] or None,
        )
        self._note_plain_bytes(first, len(group))
        found: list[list[Tensor]] = []
        for row, each in zip(self._rows, made, strict=True):
            found.append([one.total for one in each])
            for number, _ in enumerate(row.state):
                own = []
                for one, place in zip(each, group, strict=True):
                    with self._resharder.on_device(place, self._node):
                        own.append(
                            FUNCTIONS["reshape"](one.state[number], (1, *one.state[number].shape))
                        )
                found.append(own)
        return found

    def _scales(self, group: Sequence[Place]) -> list[Tensor] | None:
        """Return the scale of the loss at each place; None if there is none."""
        if self._scale is None:
            return None
        return [self._resharder.shard_at(self._scale, place) for place in group]

    def _shard(self, tensor: Tensor, place: Place) -> Tensor:
        return self._resharder.shard_at(self._values[tensor], place)

    def _state(self, state: Sequence[Tensor], place: Place) -> tuple[Tensor, ...]:
        """Return a place's row of each state variable."""
        with self._resharder.on_device(place, self._node):
            return tuple(FUNCTIONS["reshape"](self._shard(t, place), t.shape[1:]) for t in state)

    def _sites(self, group: Sequence[Place]) -> Sites:
        """Return the scopes of the nodes of a group's exchange."""
        names = f"{show_count(len(self._rows), 'gradient')} by {self._node.attrs['rule']!r}"

        logged = CommunicationLog(self._resharder, self._node, names)

        def log(kind: str, made: Sequence[Tensor]) -> None:
            result = ShardedTensor(made[0].spec, whole(made[0].ndim), tuple(made))
            logged.exchange(kind, (self._axis,), result)

        def log_rows(every: Sequence[Tensor], to: int | None) -> None:
            sent: dict[SentTensor, float] = {}
            for place in group if to is None else (group[to],):
                own = self._resharder.sent_bytes(zip(group, every, strict=True), place, self._node)
                sent |= {moved: expected_bytes(moved[0]) for moved in own}
            logged("rows", (self._axis,), sent)

        return Sites(
            lambda rank: self._resharder.on_device(group[rank], self._node),
            lambda: self._resharder.cross_device(self._node),
            log,
            log_rows,
        )

    def _note_plain_bytes(self, first: int, replicas: int) -> None:
        """Note in the first record of an exchange what it would have sent without the filter."""
        records = self._resharder.records
        sent = 2 * (replicas - 1) * sum(_nbytes(row.gradient.spec) for row in self._rows)
        records[first:] = [
            replace(record, plain=0 if number else sent)
            for number, record in enumerate(records[first:])
        ]


__all__ = ["COMPRESSED", "emit_compressed"]

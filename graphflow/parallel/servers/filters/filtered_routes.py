"""Routes through a filter: what travels between a server and its workers in fewer bytes.

A push sends filter(gradient + rest), and its worker keeps the rest for the next turn. A pull sends
filter(value − what the worker has), so nothing is lost that does not travel:

    window's start   server ─value→ worker            both note it: what the worker has
    each answer      server ─filter(difference)→      both add what arrives

The state of pushes is a variable with a row for each worker, at that worker. What workers have is
noted in the loops alone, since each window begins with whole values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from graphflow.frontend.concurrent_loops import ConcurrentLoops, Party, PartyChannel
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, RandomStreams, Tensor, as_tensor
from graphflow.ir.spec import TensorSpec
from graphflow.optim.update_targets import wide_dtype
from graphflow.parallel.compression.exchange import draw_from, encode_kept, given_state, seed_of
from graphflow.parallel.compression.filter import Filter, Parts, used_rows_of
from graphflow.parallel.compression.filters.key_cache import (
    NO_CODE,
    omit_known_keys,
    restore_keys,
)
from graphflow.parallel.compression.traffic import MessagePart, message_parts
from graphflow.parallel.servers.loops.routes import PullRoute, PushRoute, State
from graphflow.parallel.sharding.emission.sharded_graph import ShardedVariable


class FilteredTensor(NamedTuple):
    """A tensor that travels through a filter.

    Attributes:
        rule: the filter.
        spec: the spec of the tensor.
        stream: numbers that no other tensor of a window has, for random numbers.
    """

    rule: Filter
    spec: TensorSpec
    stream: tuple[int, ...]

    @property
    def wide(self) -> TensorSpec:
        """The spec in which the filter computes: at least float32."""
        return self.spec.with_dtype(wide_dtype(self.spec.dtype))

    @property
    def parts(self) -> list[MessagePart]:
        """The parts of a message."""
        return message_parts(self.rule, self.spec)

    @property
    def nbytes(self) -> int:
        """The bytes of a message, as far as they are expected."""
        return sum(part.expected_bytes for part in self.parts)

    def channels(self, loops: ConcurrentLoops, workers: int) -> list[list[PartyChannel]]:
        """Return for each part of a message a channel for each worker."""
        return [
            [
                loops.channel(part.spec.shape, part.spec.dtype.name, ragged=part.is_ragged)
                for _ in range(workers)
            ]
            for part in self.parts
        ]

    def encode(
        self, tensor: Tensor, state: State, value: Tensor | None, worker: int
    ) -> tuple[Parts, State]:
        """Return the parts of a message, and the next state."""
        with draw_from(RandomStreams(seed_of(self.stream, 0, worker))):
            parts, after = encode_kept(self.rule, tensor, tuple(state), value)
        return parts, [*after]

    def encode_change(self, change: Tensor, state: State, value: Tensor) -> tuple[Parts, State]:
        """Return the parts of a message, and the next state, of a tensor that has the rest of the
        last one in it already."""
        with draw_from(RandomStreams(seed_of(self.stream, 0, 0))):
            parts, after = self.rule.encode(
                change, given_state(self.rule, change, tuple(state), value)
            )
        return tuple(parts), [*after]

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor that a message stands for, in at least float32."""
        return self.rule.decode(tuple(parts), self.wide)

    def count_bytes(self, parts: Parts) -> Tensor:
        """Return the bytes of a message, and those of the tensor, int64 (2,)."""
        size: Any = np.int64(0)
        for part in parts:
            used, row = used_rows_of(part), prod(map(int, part.shape[1:])) * part.dtype.itemsize
            rows = used[1] if used is not None else np.int64(part.shape[0] if part.ndim else 1)
            size = size + rows * np.int64(row)
        both: Tensor = FUNCTIONS["stack"]([size, np.int64(self.spec.nbytes)])
        return both

    # Positions that are not sent again --------------------------------------------------------

    def first_code(self) -> State:
        """Return what a sender remembers of positions before its first message."""
        return [] if self.rule.cached is None else [as_tensor(NO_CODE)]

    def first_keys(self) -> State:
        """Return what a receiver remembers of positions before its first message."""
        if self.rule.cached is None:
            return []
        spec = self.parts[self.rule.cached.part - 1].spec  # the code of positions comes last
        return [FUNCTIONS["zeros"](spec.shape, spec.dtype.name), as_tensor(NO_CODE)]

    def omit_keys(self, parts: Parts, known: State) -> tuple[Parts, State]:
        """Return a message without positions that its receiver has, and what the sender remembers
        of them."""
        if self.rule.cached is None:
            return parts, []
        parts, code = omit_known_keys(self.rule.cached, parts, known[0])
        return parts, [code]

    def restore_keys(self, parts: Sequence[Tensor], known: State) -> tuple[Parts, State]:
        """Return a message with its positions, and what the receiver remembers of them."""
        if self.rule.cached is None:
            return tuple(parts), []
        made, keys, code = restore_keys(self.rule.cached, parts, *known)
        return made, [keys, code]


Answered = Literal["one", "all", "any"]
"""The workers that a server answers at once: one, all that it has not answered for the last time,
or any."""


class FilteredPush(PushRoute):
    """Carries a gradient from each worker to a server through a filter.

    Args:
        loops: the loops of the window.
        sent: the gradient.
        workers: the number of workers.
        servers: the number of servers, whose places come before those of workers.
        states: the variables of the filter's state, with a row for each worker.
    """

    def __init__(
        self,
        loops: ConcurrentLoops,
        sent: FilteredTensor,
        workers: int,
        servers: int,
        states: Mapping[Node, ShardedVariable],
    ) -> None:
        self.spec = sent.spec
        self._sent = sent
        self._servers = servers
        self._workers = workers
        self._states = states
        self._parts = sent.channels(loops, workers)

    @property
    def variables(self) -> Mapping[Node, ShardedVariable]:
        return self._states

    def worker_states(self, worker: int) -> Sequence[Node]:
        return [pieces.nodes[self._servers + worker] for pieces in self._states.values()]

    @property
    def reads_value(self) -> bool:
        return self._sent.rule.reads_value

    def open(self) -> State:
        return [_repeat(each, self._workers) for each in self._sent.first_keys()]

    def begin(self, party: Party, worker: int) -> State:
        return [*super().begin(party, worker), *self._sent.first_code(), _no_bytes()]

    def send(
        self, party: Party, worker: int, value: Tensor, state: State, at: Tensor | None = None
    ) -> State:
        count = len(self._states)
        own = [FUNCTIONS["reshape"](each, each.shape[1:]) for each in state[:count]]
        parts, after = self._sent.encode(value, own, at, worker)
        parts, known = self._sent.omit_keys(parts, state[count:-1])
        sent = state[-1] + self._sent.count_bytes(parts)
        for channels, part in zip(self._parts, parts, strict=True):
            party.send(channels[worker], part)
        return [*(FUNCTIONS["expand_dims"](each, 0) for each in after), *known, sent]

    def take(self, party: Party, which: Tensor, state: State) -> tuple[Tensor, State]:
        received = [party.merge(channels, which)[1] for channels in self._parts]
        own = [FUNCTIONS["take"](each, which, 0) for each in state]
        parts, after = self._sent.restore_keys(received, own)
        found = [_set_row(*each, which) for each in zip(state, after, strict=True)]
        return _in_dtype(self._sent.decode(parts), self.spec), found

    @property
    def is_filtered(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self._sent.nbytes


class FilteredPull(PullRoute):
    """Carries the changes of a variable from its server to the workers through a filter.

    Args:
        loops: the loops of the window.
        sent: the variable.
        workers: the number of workers.
        answered: the workers that a server answers at once.
        server: the number of the server.
        states: the variables of the filter's state, with a row for each estimate.
    """

    def __init__(
        self,
        loops: ConcurrentLoops,
        sent: FilteredTensor,
        workers: int,
        answered: Answered,
        server: int,
        states: Mapping[Node, ShardedVariable],
    ) -> None:
        super().__init__(loops, sent.spec, workers)
        self._sent = sent
        self._workers = workers
        self._answered = answered
        self._server = server
        self._states = states
        self._parts = sent.channels(loops, workers)

    @property
    def variables(self) -> Mapping[Node, ShardedVariable]:
        return self._states

    def server_states(self) -> Sequence[Node]:
        return [pieces.nodes[self._server] for pieces in self._states.values()]

    def open(self, party: Party, value: Tensor) -> State:
        party.send_where(self._channels, value)
        count = count_estimates(self._answered, self._workers)
        noted = (_in_dtype(value, self._sent.wide), *self._sent.first_code())
        own = [node.outputs[0] for node in self.server_states()]
        return [*own, *(_repeat(each, count) for each in noted), _no_bytes()]

    def answer(self, party: Party, value: Tensor, mask: Tensor | None, state: State) -> State:
        if mask is None:  # the whole value is on its way
            return state
        wide = _in_dtype(value, self._sent.wide)
        if self._answered == "any":
            for worker in range(self._workers):
                own = FUNCTIONS["logical_and"](mask, np.arange(self._workers) == worker)
                state = self._answer_one(party, wide, own, np.int64(worker), state)
            return state
        one = self._answered == "one"
        index = FUNCTIONS["argmax"](FUNCTIONS["astype"](mask, "int32")) if one else np.int64(0)
        return self._answer_one(party, wide, mask, index, state)

    def _answer_one(
        self, party: Party, value: Tensor, mask: Tensor, index: Any, state: State
    ) -> State:
        """Send the workers of a mask what an estimate lacks; return the next state."""
        count, (*state, sent) = len(self._states), state
        every = [FUNCTIONS["take"](each, index, 0) for each in state]
        estimate = every[count]
        parts, after = self._sent.encode_change(value - estimate, every[:count], value)
        after.append(estimate + self._sent.decode(parts))
        parts, known = self._sent.omit_keys(parts, every[count + 1 :])
        for channels, part in zip(self._parts, parts, strict=True):
            party.send_where(channels, part, mask)
        answers = FUNCTIONS["sum"](FUNCTIONS["astype"](mask, "int64"))
        number = FUNCTIONS["minimum"](answers, np.int64(1))
        pairs = zip(state, (*after, *known), strict=True)
        rows = [_set_row(old, now, index, number) for old, now in pairs]
        return [*rows, sent + self._sent.count_bytes(parts) * answers]

    def begin(self, party: Party, worker: int) -> State:
        value = party.receive(self._channels[worker])
        wide = _in_dtype(value, self._sent.wide)
        return [as_tensor(np.bool_(True)), wide, *self._sent.first_keys()]

    def receive(self, party: Party, worker: int, state: State) -> tuple[Tensor, State]:
        is_first, before, *known = state

        def receive_change() -> State:
            received = [party.receive(channels[worker]) for channels in self._parts]
            parts, after = self._sent.restore_keys(received, known)
            return [before + self._sent.decode(parts), *after]

        found = party.cond(is_first, lambda: [before, *known], receive_change)
        return _in_dtype(found[0], self.spec), [as_tensor(np.bool_(False)), *found]

    @property
    def is_filtered(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self._sent.nbytes


def count_estimates(answered: Answered, workers: int) -> int:
    """Return how many estimates a server notes of what workers have: one if all have the same."""
    return 1 if answered == "all" else workers


def _no_bytes() -> Tensor:
    """Return the bytes of messages that were sent before a window, and those without filters."""
    return as_tensor(np.zeros(2, np.int64))


def _repeat(x: Tensor, count: int) -> Tensor:
    """Return a tensor with a row for each of some estimates or workers, all alike."""
    rows: Tensor = FUNCTIONS["broadcast_to"](FUNCTIONS["expand_dims"](x, 0), (count, *x.shape))
    return rows


def _set_row(x: Tensor, row: Tensor, index: Any, number: Any = 1) -> Tensor:
    """Return a tensor with another row; if `number` is 0, the tensor itself."""
    rows = FUNCTIONS["reshape"](FUNCTIONS["astype"](index, "int64"), (1,))
    row = FUNCTIONS["expand_dims"](row, 0)
    changed: Tensor = REGISTRY["update_rows"](x, rows, row, as_tensor(number, "int64"))
    return changed


def _in_dtype(x: Tensor, spec: TensorSpec) -> Tensor:
    same: Tensor = x if x.dtype == spec.dtype else FUNCTIONS["astype"](x, spec.dtype.name)
    return same


__all__ = ["Answered", "FilteredPull", "FilteredPush", "FilteredTensor", "count_estimates"]

"""Collectives by messages between workers.

Tensors travel in chunks, and sending does not wait: a rank works on one chunk while others are on
their way. An all-reduce by ring, tree or halving follows the rounds of `schedules.py`. Other
collectives, and the direct all-reduce, send each piece straight to its receiver. The receiver
combines the pieces in the order of the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ProtocolError
from graphflow.ops.communication.reduction_order import combine_function, finish, starts
from graphflow.runtime.collectives.rank_buffers import Array, Collective
from graphflow.runtime.collectives.schedules import all_reduce, broadcast
from graphflow.runtime.transport.tensor_mailbox import Awaited
from graphflow.runtime.wire.step_values import EXCHANGE_PREFIX, TensorParcel

CHUNK_BYTES = 1 << 20
"""Bytes of a message."""


@dataclass(frozen=True)
class MessagePort:
    """Sends and receives arrays between the ranks of a group.

    Args:
        prefix: identifies the group in its session.
        name: name of the collective, for errors.
        outbox: sends a message to another worker.
        take_tensor: (step, key, description of the wait) -> the array that came.
    """

    session: str
    prefix: str
    name: str
    outbox: Callable[[TensorParcel], None]
    take_tensor: Callable[[int, Any, Awaited], Any]

    def send(
        self, step: int, collective: Collective, source: int, target: int, tag: str, array: Array
    ) -> None:
        """Send a copy of an array from one rank to another."""
        key = f"{EXCHANGE_PREFIX}{self.prefix}/{source}/{target}/{tag}"
        copy = np.array(array)  # the buffer is reused before the message has left
        self.outbox(
            TensorParcel(self.session, step, key, collective.workers[target], copy, owned=True)
        )

    def receive(
        self, step: int, collective: Collective, source: int, target: int, tag: str, like: Array
    ) -> Array:
        """Return the array that a rank sent.

        Args:
            like: an array of the expected shape and dtype.

        Raises:
            ProtocolError: the array has another shape or dtype.
            GraphflowError: the step was cancelled.
        """
        key = f"{EXCHANGE_PREFIX}{self.prefix}/{source}/{target}/{tag}"
        devices = collective.devices
        part = (
            f"{collective.kind} {self.name}: the part of rank {source} on {devices[source]} for "
            f"rank {target} on {devices[target]}"
        )
        array: Array = self.take_tensor(step, key, Awaited(part, collective.workers[source]))
        if array.shape != like.shape or array.dtype != like.dtype:
            raise ProtocolError(
                f"{part} is {array.dtype}{array.shape}, not {like.dtype}{like.shape}; do all "
                "workers run the same code?"
            )
        return array


class MessageExchange:
    """A device's part in one collective by messages.

    Args:
        ranks: the device's ranks.
    """

    def __init__(self, collective: Collective, ranks: Sequence[int], post: MessagePort) -> None:
        self.collective = collective
        self.ranks = tuple(ranks)
        self._port = post
        self._chunk_elements = max(1, CHUNK_BYTES // collective.dtype.itemsize)

    def run(
        self, step: int, given: Mapping[int, Array | None], results: Mapping[int, Array]
    ) -> None:
        """Run the collective for all ranks of the device."""

        def one(rank: int) -> None:
            self._run_rank(step, rank, given[rank], results[rank])

        if len(self.ranks) == 1:
            one(self.ranks[0])
            return
        with ThreadPoolExecutor(len(self.ranks)) as pool:  # ranks of a device wait for each other
            for done in [pool.submit(one, rank) for rank in self.ranks]:
                done.result()

    def _run_rank(self, step: int, rank: int, x: Array | None, y: Array) -> None:
        collective = self.collective
        if collective.kind == "broadcast":
            self._broadcast(step, rank, x, y)
        elif collective.kind == "all_reduce" and collective.algorithm != "direct":
            assert x is not None
            _ScheduledReduction(self, step, rank, x, y).run()
        else:
            self._exchange_directly(step, rank, x, y)

    # Each piece straight to its receiver ----------------------------------------------------------

    def _exchange_directly(self, step: int, rank: int, x: Array | None, y: Array) -> None:
        collective, count = self.collective, self.collective.count
        pieces = collective.flat_pieces(rank, x)
        for other in self._others(rank):
            self.send(step, rank, other, "p", pieces[0 if collective.sends_same_to_all else other])
        targets = collective.output_views(rank, y)
        if not collective.reduces:
            for source in range(count):
                mine = pieces[0 if collective.sends_same_to_all else rank]
                size = collective.lengths[source][0 if collective.sends_same_to_all else rank]
                come = mine if source == rank else self.receive(step, source, rank, "p", size)
                targets[source][...] = come.reshape(targets[source].shape)
            return
        size = collective.lengths[rank][rank]
        parts = [
            pieces[rank] if source == rank else self.receive(step, source, rank, "p", size)
            for source in range(count)
        ]
        own = targets[rank].reshape(-1)
        if size:
            with np.errstate(all="ignore"):
                collective.combine(rank, parts, own)
        if collective.kind == "all_reduce":
            for other in self._others(rank):
                self.send(step, rank, other, "r", own)
            for source in self._others(rank):
                place = targets[source]
                place[...] = self.receive(step, source, rank, "r", place.size)

    def _broadcast(self, step: int, rank: int, x: Array | None, y: Array) -> None:
        flat = y.reshape(-1)
        if x is not None:
            flat[...] = x.reshape(-1)
        for each in broadcast(self.collective.count)[rank]:
            if each.action == "give":
                self.send(step, rank, each.peer, "b", flat)
            else:
                flat[...] = self.receive(step, each.peer, rank, "b", flat.size)

    def _others(self, rank: int) -> list[int]:
        """Return the other ranks, from the next one on, so that not all send to rank 0 first."""
        count = self.collective.count
        return [(rank + i) % count for i in range(1, count)]

    # Chunks ---------------------------------------------------------------------------------------

    def send(self, step: int, source: int, target: int, tag: str, array: Array) -> None:
        """Send a flat array in chunks; an empty array needs no message."""
        for number, start in enumerate(range(0, array.size, self._chunk_elements)):
            part = array[start : start + self._chunk_elements]
            self._port.send(step, self.collective, source, target, f"{tag}{number}", part)

    def receive(
        self, step: int, source: int, target: int, tag: str, size: int, dtype: Any = None
    ) -> Array:
        """Return a flat array of `size` elements that comes in chunks."""
        whole = np.empty(size, self.collective.dtype if dtype is None else dtype)
        for number, start in enumerate(range(0, size, self._chunk_elements)):
            part = whole[start : start + self._chunk_elements]
            part[...] = self._port.receive(
                step, self.collective, source, target, f"{tag}{number}", part
            )
        return whole


class _ScheduledReduction:
    """One rank's all-reduce by rounds (`schedules.all_reduce`)."""

    def __init__(self, owner: MessageExchange, step: int, rank: int, x: Array, y: Array) -> None:
        collective = owner.collective
        self._owner = owner
        self._step = step
        self._rank = rank
        self._y = y.reshape(-1)
        self._partial = np.array(x.reshape(-1), collective.working_dtype)
        self._share_starts = starts(collective.lengths[rank])
        self._rounds = all_reduce(
            collective.algorithm, collective.count, collective.attrs["hosts"]
        )[rank]
        self._combine = combine_function(collective.attrs["reduction"], np)

    def run(self) -> None:
        folding = True
        for each in self._rounds:
            if folding and each.action in ("give", "keep"):
                folding = False
                self._finish()
            span = slice(self._share_starts[each.start], self._share_starts[each.stop])
            tag = f"{each.start}:{each.stop}/"
            match each.action:
                case "send":
                    self._send(each.peer, f"f{tag}", self._partial[span])
                case "fold":
                    part = self._partial[span]
                    come = self._receive(each.peer, f"f{tag}", part)
                    first, last = (come, part) if each.before else (part, come)
                    with np.errstate(all="ignore"):
                        self._combine(first, last, out=part)
                case "give":
                    self._send(each.peer, f"k{tag}", self._y[span])
                case "keep":
                    self._y[span] = self._receive(each.peer, f"k{tag}", self._y[span])
        if folding:
            self._finish()

    def _send(self, peer: int, tag: str, array: Array) -> None:
        self._owner.send(self._step, self._rank, peer, tag, array)

    def _receive(self, peer: int, tag: str, like: Array) -> Array:
        return self._owner.receive(self._step, peer, self._rank, tag, like.size, like.dtype)

    def _finish(self) -> None:
        """Store the shares whose last fold was on this rank: those that were never sent."""
        collective = self._owner.collective
        sent = {s for r in self._rounds if r.action == "send" for s in range(r.start, r.stop)}
        for share in range(collective.count):
            if share not in sent:
                part = self._partial[self._share_starts[share] : self._share_starts[share + 1]]
                with np.errstate(all="ignore"):
                    finish(collective.attrs["reduction"], collective.count, part)
                    np.copyto(
                        self._y[self._share_starts[share] : self._share_starts[share + 1]],
                        part,
                        casting="unsafe",
                    )

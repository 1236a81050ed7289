"""Exchanges by parcels between workers: rounds of shares, in parts that follow one another.

Sending does not wait, so a rank works on one part while others are on their way. What is folded as
it comes goes by `schedules.py`; where all pieces of a share go straight to who folds it (direct,
and every reduce-scatter), they are folded there in the order of the algorithm.
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
from graphflow.runtime.wire.messages import EXCHANGE_PREFIX, TensorParcel

CHUNK_BYTES = 1 << 20
"""Bytes that travel together."""


@dataclass(frozen=True)
class MessagePort:
    """Carries arrays between ranks.

    Args:
        prefix: names the group in its session.
        name: of the collective, for errors.
        take: (step, key, what is waited for) -> the array that came.
    """

    session: str
    prefix: str
    name: str
    outbox: Callable[[TensorParcel], None]
    take_tensor: Callable[[int, Any, Awaited], Any]

    def send(self, step: int, what: Collective, source: int, target: int, tag: str, array: Array
             ) -> None:  # fmt: skip
        """Send an array, of which nothing is kept: it may change afterwards."""
        key = f"{EXCHANGE_PREFIX}{self.prefix}/{source}/{target}/{tag}"
        copy = np.array(array)  # it travels while its buffer is used again
        self.outbox(TensorParcel(self.session, step, key, what.workers[target], copy, owned=True))

    def receive(self, step: int, what: Collective, source: int, target: int, tag: str, like: Array
                ) -> Array:  # fmt: skip
        """The array that a rank sent, which must be like another.

        Raises:
            ProtocolError: it is not.
            GraphflowError: the step was given up.
        """
        key = f"{EXCHANGE_PREFIX}{self.prefix}/{source}/{target}/{tag}"
        told = (
            f"{what.kind} {self.name}: the part of rank {source} on {what.devices[source]} for "
            f"rank {target} on {what.devices[target]}"
        )
        array: Array = self.take_tensor(step, key, Awaited(told, what.workers[source]))
        if array.shape != like.shape or array.dtype != like.dtype:
            raise ProtocolError(
                f"{told} is {array.dtype}{array.shape}, not {like.dtype}{like.shape}; do all "
                "workers run the same code?"
            )
        return array


class MessageExchange:
    """What a device does in one collective by way of parcels, for the ranks that it has."""

    def __init__(self, what: Collective, ranks: Sequence[int], post: MessagePort) -> None:
        self.what = what
        self.ranks = tuple(ranks)
        self._port = post
        self._chunk_elements = max(1, CHUNK_BYTES // what.dtype.itemsize)

    def run(
        self, step: int, given: Mapping[int, Array | None], results: Mapping[int, Array]
    ) -> None:
        """All of it: the ranks of one device take turns where they wait for each other."""

        def one(rank: int) -> None:
            self._run_rank(step, rank, given[rank], results[rank])

        if len(self.ranks) == 1:
            one(self.ranks[0])
            return
        with ThreadPoolExecutor(len(self.ranks)) as pool:  # they wait for each other
            for done in [pool.submit(one, rank) for rank in self.ranks]:
                done.result()

    def _run_rank(self, step: int, rank: int, x: Array | None, y: Array) -> None:
        what = self.what
        if what.kind == "broadcast":
            self._broadcast(step, rank, x, y)
        elif what.kind == "all_reduce" and what.algorithm != "direct":
            assert x is not None
            _ScheduledReduction(self, step, rank, x, y).run()
        else:
            self._exchange_directly(step, rank, x, y)

    # Straight to who needs it ---------------------------------------------------------------------

    def _exchange_directly(self, step: int, rank: int, x: Array | None, y: Array) -> None:
        what, count = self.what, self.what.count
        pieces = what.flat_pieces(rank, x)
        for other in self._others(rank):
            self.send(step, rank, other, "p", pieces[0 if what.sends_same_to_all else other])
        targets = what.output_views(rank, y)
        if not what.reduces:
            for source in range(count):
                mine = pieces[0 if what.sends_same_to_all else rank]
                size = what.lengths[source][0 if what.sends_same_to_all else rank]
                come = mine if source == rank else self.receive(step, source, rank, "p", size)
                targets[source][...] = come.reshape(targets[source].shape)
            return
        size = what.lengths[rank][rank]
        parts = [
            pieces[rank] if source == rank else self.receive(step, source, rank, "p", size)
            for source in range(count)
        ]
        own = targets[rank].reshape(-1)
        if size:
            with np.errstate(all="ignore"):
                what.combine(rank, parts, own)
        if what.kind == "all_reduce":
            for other in self._others(rank):
                self.send(step, rank, other, "r", own)
            for source in self._others(rank):
                place = targets[source]
                place[...] = self.receive(step, source, rank, "r", place.size)

    def _broadcast(self, step: int, rank: int, x: Array | None, y: Array) -> None:
        flat = y.reshape(-1)
        if x is not None:
            flat[...] = x.reshape(-1)
        for each in broadcast(self.what.count)[rank]:
            if each.action == "give":
                self.send(step, rank, each.peer, "b", flat)
            else:
                flat[...] = self.receive(step, each.peer, rank, "b", flat.size)

    def _others(self, rank: int) -> list[int]:
        """The other ranks, each beginning with the next: not all send to the same one first."""
        count = self.what.count
        return [(rank + i) % count for i in range(1, count)]

    # In parts -------------------------------------------------------------------------------------

    def send(self, step: int, source: int, target: int, tag: str, array: Array) -> None:
        """A flat array, in parts; nothing where there are no elements."""
        for number, start in enumerate(range(0, array.size, self._chunk_elements)):
            part = array[start : start + self._chunk_elements]
            self._port.send(step, self.what, source, target, f"{tag}{number}", part)

    def receive(
        self, step: int, source: int, target: int, tag: str, size: int, dtype: Any = None
    ) -> Array:
        """A flat array that came in parts."""
        whole = np.empty(size, self.what.dtype if dtype is None else dtype)
        for number, start in enumerate(range(0, size, self._chunk_elements)):
            part = whole[start : start + self._chunk_elements]
            part[...] = self._port.receive(step, self.what, source, target, f"{tag}{number}", part)
        return whole


class _ScheduledReduction:
    """An all-reduce by rounds, of one rank."""

    def __init__(self, owner: MessageExchange, step: int, rank: int, x: Array, y: Array) -> None:
        what = owner.what
        self._owner = owner
        self._step = step
        self._rank = rank
        self._y = y.reshape(-1)
        self._partial = np.array(x.reshape(-1), what.working_dtype)
        self._share_starts = starts(what.lengths[rank])
        self._rounds = all_reduce(what.algorithm, what.count, what.attrs["hosts"])[rank]
        self._combine = combine_function(what.attrs["reduction"], np)

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
        """Store the shares that were folded here to the end: those not sent away."""
        what = self._owner.what
        sent = {s for r in self._rounds if r.action == "send" for s in range(r.start, r.stop)}
        for share in range(what.count):
            if share not in sent:
                part = self._partial[self._share_starts[share] : self._share_starts[share + 1]]
                with np.errstate(all="ignore"):
                    finish(what.attrs["reduction"], what.count, part)
                    np.copyto(
                        self._y[self._share_starts[share] : self._share_starts[share + 1]],
                        part,
                        casting="unsafe",
                    )

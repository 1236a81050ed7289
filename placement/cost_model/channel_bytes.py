"""Bytes and messages that the parties of a `concurrent` node send each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from graphflow.ir.graph import Body, bind_attrs, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import evaluate, nbytes
from graphflow.ops.communication.channels import CHANNEL_OPS, channels_of
from graphflow.ops.communication.send_recv import expected_rows
from graphflow.ops.control_flow.concurrent import channel_ends
from graphflow.ops.control_flow.control import cond, iteration_count


class Messages(NamedTuple):
    """The messages that go through one channel.

    Attributes:
        sender, receiver: its parties.
        nbytes: of a message.
        once: messages before or after the sender's loop.
        turn: messages of a turn: those of an iteration of the sender's loop, or one of a masked
            send, which answers.
        share: messages of an iteration for each of a turn, as far as the node tells: a masked send
            into several channels goes into one of them.
    """

    sender: int
    receiver: int
    nbytes: int
    once: int = 0
    turn: int = 0
    share: float = 1.0

    def count(self, turns: float) -> int:
        """Return the number of messages of so many turns of a worker.

        A server that sends before its loop what a worker's first turn reads sends in its loop what
        the others read.
        """
        return self.once + round(max(turns - self.once, 0.0) * self.turn)


def expected_bytes(tensor: Tensor, size: int, bindings: Mapping[str, int]) -> int:
    """Return the bytes of a tensor that travel: of rows in use, as many as are expected.

    Args:
        size: of the whole tensor.
        bindings: sizes of symbols.
    """
    node = tensor.node
    if node.op.name != "used_rows" or not size:
        return size
    lookups = evaluate(node.attrs["lookups"], bindings)
    rows = expected_rows(lookups, node.attrs["rows"], node.attrs["piece"])
    return round(size * min(1.0, rows / evaluate(tensor.shape[0], bindings)))


def has_channels(node: Node) -> bool:
    """Return True if a node runs channels' ops in its bodies."""
    return any(n.op.name in CHANNEL_OPS for body in bodies(node) for n in body.graph.walk())


def channel_messages(parties: Sequence[Body]) -> list[Messages]:
    """Return the messages between the parties of a node, by channel.

    Args:
        parties: the node's bodies, with sizes bound.
    """
    ends = channel_ends(parties)
    found: dict[int, Messages] = {}
    for body in parties:
        for node, sizes, times, in_loop in _sends(body, 1, False):
            sent = node.inputs[1]
            size = expected_bytes(sent, nbytes(sent.spec.bind(sizes)), sizes)
            channels = channels_of(node)
            is_masked = len(node.inputs) > 2
            for channel in channels:
                before = found.get(channel, Messages(*ends[channel], size))
                if not in_loop:
                    before = before._replace(once=before.once + times)
                elif is_masked:
                    answers = times / len(channels) + (before.share if before.turn else 0.0)
                    before = before._replace(turn=1, share=answers)
                else:
                    before = before._replace(turn=before.turn + times)
                found[channel] = before
    return list(found.values())


def _sends(
    body: Body, times: int, in_loop: bool
) -> Iterator[tuple[Node, Mapping[str, int], int, bool]]:
    """Yield the sends of a body, and how often they run in an iteration of the outermost loop."""
    for node in body.graph.nodes:
        if node.op.name == "channel_send":
            yield node, body.bindings, times, in_loop
        elif has_channels(node):
            attrs = bind_attrs(node.attrs, body.bindings)
            inner = times * iteration_count(node.op, attrs) if in_loop else times
            is_loop = in_loop or node.op is not cond
            for each in attrs.values():
                if isinstance(each, Body):
                    yield from _sends(each, inner, is_loop)

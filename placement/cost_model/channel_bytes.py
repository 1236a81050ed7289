"""Bytes and messages that the parties of a `concurrent` node send each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from graphflow.ir.graph import Body, bind_attrs, bodies
from graphflow.ir.op import Node
from graphflow.ir.spec import nbytes
from graphflow.ops.communication.channels import CHANNEL_OPS, channels_of
from graphflow.ops.control_flow.concurrent import channel_ends
from graphflow.ops.control_flow.control import cond, iteration_count


class Messages(NamedTuple):
    """The messages from one party to another.

    Attributes:
        once: bytes and number of messages outside of the sender's loop.
        turn: bytes and number of messages of an iteration of its loop that sends.
        share: of its iterations that send, as far as the node tells: a masked send into several
            channels goes into one of them.
    """

    once: tuple[int, int] = (0, 0)
    turn: tuple[int, int] = (0, 0)
    share: float = 1.0

    def total(self, turns: float) -> tuple[int, int]:
        """Return bytes and number of messages if so many iterations send."""
        return (
            self.once[0] + round(turns * self.turn[0]),
            self.once[1] + round(turns * self.turn[1]),
        )


def has_channels(node: Node) -> bool:
    """Return True if a node runs channels' ops in its bodies."""
    return any(n.op.name in CHANNEL_OPS for body in bodies(node) for n in body.graph.walk())


def channel_bytes(parties: Sequence[Body]) -> Mapping[tuple[int, int], Messages]:
    """Return the messages between the parties of a node, by sender and receiver.

    Args:
        parties: the node's bodies, with sizes bound.
    """
    ends = channel_ends(parties)
    found: dict[tuple[int, int], Messages] = {}
    for body in parties:
        for node, sizes, times, in_loop in _sends(body, 1, False):
            size = nbytes(node.inputs[1].spec.bind(sizes))
            channels = channels_of(node)
            for channel in channels:
                before = found.get(ends[channel], Messages())
                old = before.turn if in_loop else before.once
                new = old[0] + times * size, old[1] + times
                if not in_loop:
                    found[ends[channel]] = before._replace(once=new)
                    continue
                share = 1.0 / len(channels) if len(node.inputs) > 2 else 1.0
                found[ends[channel]] = before._replace(turn=new, share=share)
    return found


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

"""The op `concurrent`: bodies that run beside each other and exchange tensors through channels.

Each body is a party, such as a server or one of its workers. All parties have a parameter for each
operand. The node's outputs are the results of the first party, then those of the second, and so on.
A step is one run of all parties, so it commits as a whole or not at all.

The optional attribute `rules` (`turn_rules.py`) tells plans the turns of workers and servers. It
changes nothing of what the node computes.

The interpreter and programs of one device run one party at a time (`channel_scheduler.py`). Parties
on several devices run in parallel: the partitioner cuts the node into one for each device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from graphflow.errors import GraphError, ShapeError
from graphflow.ir.graph import Body
from graphflow.ir.op import Cost, Node, Op, register
from graphflow.ir.spec import TensorSpec
from graphflow.ops.communication.channel_scheduler import ChannelScheduler
from graphflow.ops.communication.channels import CHANNEL_OPS, channels_of
from graphflow.ops.control_flow.control import body_cost, check_operands, run_body
from graphflow.ops.control_flow.turn_rules import TurnRules


def parties_of(attrs: Mapping[str, Any]) -> list[Body]:
    """Return the bodies among a node's attributes, in order."""
    return [value for value in attrs.values() if isinstance(value, Body)]


def party_attrs(parties: Sequence[Body], rules: TurnRules | None = None) -> dict[str, Any]:
    """Return the attributes of a node with these parties, and with rules if there are some."""
    bodies = {f"party{i}": body for i, body in enumerate(parties)}
    return bodies if rules is None else {**bodies, "rules": rules}


def walk_parties(node: Node) -> Iterator[tuple[int, Node]]:
    """Yield the nodes in a `concurrent` node with the number of their party.

    A part of a node that was cut has its parties' numbers in the whole node.
    """
    for name, body in node.attrs.items():
        if isinstance(body, Body):
            for inner in body.graph.walk():
                yield int(name.removeprefix("party")), inner


def channel_ends(parties: Sequence[Body]) -> dict[int, tuple[int, int]]:
    """Return, for each channel, the indices of the party that sends and of the one that receives.

    Raises:
        GraphError: a channel does not lead from one party to one other.
    """
    senders: dict[int, set[int]] = {}
    receivers: dict[int, set[int]] = {}
    for i, body in enumerate(parties):
        for node in body.graph.walk():
            if node.op.name in CHANNEL_OPS:
                ends = senders if node.op.name == "channel_send" else receivers
                for channel in channels_of(node):
                    ends.setdefault(channel, set()).add(i)
    found = {}
    for channel in senders.keys() | receivers.keys():
        sent, received = senders.get(channel, set()), receivers.get(channel, set())
        if len(sent) != 1 or len(received) != 1 or sent == received:
            raise GraphError(
                f"parties {sorted(sent)} send into channel {channel}, and parties "
                f"{sorted(received)} receive from it; a channel leads from one party to one other"
            )
        found[channel] = (min(sent), min(received))
    return found


def _infer(*operands: TensorSpec, **attrs: Any) -> tuple[TensorSpec, ...]:
    parties = parties_of(attrs)
    if not parties or not all(body.results for body in parties):
        raise ShapeError("a concurrent node needs parties, each with a result")
    for body in parties:
        check_operands(body, operands)
    channel_ends(parties)
    if (rules := attrs.get("rules")) is not None:
        if not isinstance(rules, TurnRules):
            raise GraphError(f"the rules of a concurrent node are TurnRules, not {rules!r}")
        rules.check(len(parties))
    return tuple(t.spec for body in parties for t in body.outputs)


def _kernel(xp: Any, *arrays: Any, step: int, **attrs: Any) -> tuple[Any, ...]:
    parties = [partial(run_body, xp, body, arrays, step) for body in parties_of(attrs)]
    results = ChannelScheduler(len(parties)).run(parties)
    return tuple(array for each in results for array in each)


def _cost(*specs: TensorSpec, **attrs: Any) -> Cost:
    costs = [body_cost(body) for body in parties_of(attrs)]
    return Cost(sum((f for f, _ in costs), 0), sum((b for _, b in costs), 0))


concurrent: Op = register(
    Op(
        "concurrent",
        infer=_infer,
        kernel=_kernel,
        halves=True,
        cost=_cost,
        pure=False,
        random=True,
        device_kinds=("cpu",),
    )
)

"""The work of the parties of `concurrent` nodes: seconds of a turn, by calibration alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any, NamedTuple

from graphflow.ir.graph import Body, bind_attrs
from graphflow.ir.graph_fingerprint import fingerprint
from graphflow.ir.op import Node
from graphflow.ops.communication.channels import CHANNEL_OPS
from graphflow.ops.control_flow.concurrent import parties_of
from graphflow.ops.control_flow.control import cond, is_control, iteration_count, while_loop
from graphflow.ops.control_flow.turn_rules import TurnRules
from graphflow.placement.calibration.node_bucket import TURN, Bucket, half_octaves
from graphflow.placement.calibration.roofline import Rates
from graphflow.placement.cost_model.channel_bytes import has_channels


class PartyWork(NamedTuple):
    """The seconds of a party in a window, by calibration alone.

    Attributes:
        turn: seconds of a turn, or of a server for one push.
        once: seconds of what is outside of its loops.
        turns: how often its loops run.
    """

    turn: float
    once: float
    turns: float


def turn_bucket(body: Body, party: int, device: str, busy: bool, predicted: float) -> Bucket:
    """Return the bucket of a party's turns, which only the same party shares.

    Turns may call the user's functions, whose seconds say nothing about other turns, and one of
    several equal workers may be slow.
    """
    op = f"{TURN} {party} {fingerprint(body.graph)}"
    return Bucket(device, busy, TURN, op, "", half_octaves(predicted * 1e9), 0)


def window_link(kind: str) -> str:
    """Return the name under which messages in windows over a kind of link are observed."""
    return f"{kind} in windows"


def party_works(node: Node, bindings: Mapping[str, int], rates: Sequence[Rates]) -> list[PartyWork]:
    """Return the work of each party of a `concurrent` node.

    Args:
        rates: of the device of each party.
    """
    attrs = bind_attrs(node.attrs, bindings)
    rules: TurnRules | None = attrs.get("rules")
    found = []
    for i, (body, rate) in enumerate(zip(parties_of(attrs), rates, strict=True)):
        turns, share = None, 1.0
        if rules is not None and i in rules.workers:
            is_pool = rules.consistency == "pool"
            mine = sum(rules.turns) / len(rules.turns)
            turns = mine if is_pool else rules.turns[rules.workers.index(i)]
        elif rules is not None and i in rules.servers:
            turns, share = sum(rules.turns), 1.0 / rules.aggregate
        found.append(_party_work(body, rate, turns, share))
    return found


def _party_work(body: Body, rate: Rates, turns: float | None, share: float) -> PartyWork:
    """Return the work of a party.

    Args:
        turns: how many turns its loops are, if that is known.
        share: of runs in which the longer branch of a `cond` runs.
    """
    inside = once = 0.0
    count = 0.0
    for node in body.graph.nodes:
        if has_channels(node):
            attrs = bind_attrs(node.attrs, body.bindings)
            is_endless = node.op is while_loop and attrs.get("limit") is None
            times = turns if is_endless and turns else float(iteration_count(node.op, attrs))
            inside += times * fsum(_body_seconds(rate, b, share) for b in _bodies_of(attrs))
            count = max(count, times)
        else:
            once += _node_seconds(rate, node, body.bindings, share)
    if not count:  # a window that is written out, without a loop
        inside, once, count = once, 0.0, 1.0
    number = max(turns or count, 1.0)
    return PartyWork(inside / number, once, number)


def _bodies_of(attrs: Mapping[str, Any]) -> list[Body]:
    return [value for value in attrs.values() if isinstance(value, Body)]


def _body_seconds(rate: Rates, body: Body, share: float) -> float:
    return fsum(_node_seconds(rate, n, body.bindings, share) for n in body.graph.nodes)


def _node_seconds(rate: Rates, node: Node, sizes: Mapping[str, int], share: float) -> float:
    """Return the seconds of a node of a party; messages are priced as transfers."""
    if node.op.name in CHANNEL_OPS:
        return 0.0
    attrs = bind_attrs(node.attrs, sizes)
    if is_control(node.op):
        each = [_body_seconds(rate, body, share) for body in _bodies_of(attrs)]
        if node.op is cond:
            return max(each) * share + min(each) * (1.0 - share)
        return iteration_count(node.op, attrs) * fsum(each)
    inputs = [t.spec.bind(sizes) for t in node.inputs]
    return rate.seconds(node.op, inputs, [spec.bind(sizes) for spec in node.specs], attrs)

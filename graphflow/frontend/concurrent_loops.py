"""Builds `concurrent` nodes: parties that run beside each other and exchange tensors.

    loops = ConcurrentLoops()
    push, pull = loops.channel((8,), "float32"), loops.channel((8,), "float32")
    loops.add(server, pin="/worker:0")
    loops.add(worker, pin="/worker:1")
    served, worked = loops.build()

A party is a function of a `Party`, by which it sends, receives and loops. The party puts its ops in
order: each reads the token of the one before, and loops carry the token. A channel holds at least
one tensor beside the one that its receiver reads. A party that sends more may have to wait.

A gate is dataflow: a server that carries the workers' clocks answers those of a mask, by
`Party.send_where`. The order of a server's merges is the stacked `which` of its loop; loop over a
placeholder of orders, and pass both to `replay_order`, so that a recovery repeats the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from graphflow.errors import ArgumentError, GraphError
from graphflow.frontend import control_flow
from graphflow.frontend.tracing import TracedFunction, trace
from graphflow.ir.op import Tensor, as_tensor, device, make_node
from graphflow.ir.spec import Shape, TensorSpec, as_dtype
from graphflow.ops.communication import channels as ops
from graphflow.ops.control_flow.concurrent import concurrent, party_attrs
from graphflow.ops.control_flow.turn_rules import TurnRules


class PartyChannel(NamedTuple):
    """A channel.

    Attributes:
        number: its number in its node.
        spec: the spec of its tensors.
        ragged: of what is sent, a result of `used_rows`, only the rows in use travel.
    """

    number: int
    spec: TensorSpec
    ragged: bool = False


class Party:
    """The ops of one party, in the order in which the party's function calls these methods."""

    def __init__(self) -> None:
        self.token: Tensor = as_tensor(np.zeros(0, np.bool_))

    def send(self, channel: PartyChannel, x: Any) -> None:
        """Send a tensor of the channel's spec."""
        self.send_where((channel,), x)

    def send_where(self, channels: Sequence[PartyChannel], x: Any, mask: Any = None) -> None:
        """Send a tensor into each channel for which the mask is true.

        Args:
            mask: bool, (number of channels,); None sends into all.

        Raises:
            GraphError: the tensor does not have the spec of the channels, or these differ.
        """
        spec = _common_spec(channels)
        tensor = x if isinstance(x, Tensor) else as_tensor(x, spec.dtype)
        if tensor.spec != spec:
            raise GraphError(f"the channels carry {spec}, and {tensor.spec} is sent")
        inputs = (self.token, tensor, *([] if mask is None else [as_tensor(mask)]))
        attrs = {"channels": tuple(c.number for c in channels)}
        (self.token,) = make_node(ops.channel_send, inputs, attrs).outputs

    def receive(self, channel: PartyChannel) -> Tensor:
        """Return the next tensor of a channel."""
        attrs = {"channel": channel.number, **_spec_attrs(channel)}
        value, self.token = make_node(ops.channel_receive, (self.token,), attrs).outputs
        return value

    def merge(self, channels: Sequence[PartyChannel], order: Any = None) -> tuple[Tensor, Tensor]:
        """Return the next tensor of any of several channels, and which one it came from.

        The parts of a message that has several come from further channels, by further merges that
        are given `which` as their order.

        Args:
            order: one int32: the index of the channel to take from, or -1 for any; None: any.

        Returns:
            (which, value): the index of the channel, int32, and its tensor.
        """
        _common_spec(channels)
        attrs = {"channels": tuple(c.number for c in channels), **_spec_attrs(channels[0])}
        inputs = (self.token, *([] if order is None else [as_tensor(order)]))
        which, value, self.token = make_node(ops.merge, inputs, attrs).outputs
        return which, value

    def scan(self, body: Callable[..., Any], init: Any, xs: Any = None, **options: Any) -> Any:
        """Build `gf.scan`, in whose body this party may send and receive."""
        (last, self.token), ys = control_flow.scan(
            lambda carry, x: self._inside(carry[1], body, carry[0], x), (init, self.token), xs,
            **options,
        )  # fmt: skip
        return last, ys

    def _inside(self, token: Tensor, body: Callable[..., Any], carry: Any, x: Any) -> Any:
        outside, self.token = self.token, token
        try:
            state, y = body(carry, x)
            return (state, self.token), y
        finally:
            self.token = outside

    def while_loop(
        self, test: Callable[[Any], Any], body: Callable[[Any], Any], init: Any, **options: Any
    ) -> Any:
        """Build `gf.while_loop`, in whose body this party may send and receive."""

        def step(state: Any) -> Any:
            outside, self.token = self.token, state[1]
            try:
                return body(state[0]), self.token
            finally:
                self.token = outside

        last, self.token = control_flow.while_loop(
            lambda state: test(state[0]), step, (init, self.token), **options
        )
        return last

    def cond(self, pred: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """Build `gf.cond`, in whose branches this party may send and receive."""

        def branch(function: Callable[[], Any]) -> Callable[[Tensor], Any]:
            def run(token: Tensor) -> Any:
                outside, self.token = self.token, token
                try:
                    return function(), self.token
                finally:
                    self.token = outside

            return run

        result, self.token = control_flow.cond(pred, branch(yes), branch(no), self.token)
        return result


def replay_order(came: Tensor, order: Tensor) -> Tensor:
    """Return an order that came; a recovery feeds it if it does the step again.

    Args:
        came: the `which` of all merges of a step.
        order: the placeholder that gives these merges their order. Feed -1 for any order.

    Raises:
        GraphError: `order` is no placeholder, or has another spec.
    """
    if order.node.op.name != "placeholder":
        raise GraphError(f"the order is a placeholder, not {order}")
    (same,) = make_node(ops.replayed_order, (came, order), {}).outputs
    return same


class ConcurrentLoops:
    """The parties and channels of a `concurrent` node that is being built."""

    def __init__(self) -> None:
        self._channels = 0
        self._parties: list[tuple[TracedFunction, str]] = []

    def channel(self, shape: Shape, dtype: str, *, ragged: bool = False) -> PartyChannel:
        """Add a channel for tensors of this shape and dtype.

        Args:
            ragged: what is sent is the result of `used_rows`. Behind the rows in use, a receiver
                finds anything.
        """
        self._channels += 1
        return PartyChannel(self._channels - 1, TensorSpec(tuple(shape), as_dtype(dtype)), ragged)

    def add(self, function: Callable[[Party], Any], pin: str = "") -> None:
        """Add a party.

        Args:
            function: takes a `Party`, returns a nest of tensors. It may read tensors from outside.
            pin: the device, or a part of its name, that runs the party.
        """
        party = Party()

        def run() -> Any:
            return function(party), party.token

        with _pin_nodes(pin):
            self._parties.append((trace(run, (), lambda values: ()), pin))

    def build(self, name: str | None = None, rules: TurnRules | None = None) -> list[Any]:
        """Build the node; return what each party returned.

        Args:
            rules: the turns of workers and servers, by which plans price and draw the node.

        Raises:
            ArgumentError: there is no party.
            GraphError: a channel does not lead from one party to one other party, or the rules do
                not fit the parties.
        """
        if not self._parties:
            raise ArgumentError("add a party before the node is built")
        traced = [each for each, _ in self._parties]
        captures = control_flow.merge_captures(*traced)
        attrs = party_attrs([each.body(captures) for each in traced], rules)
        with _pin_nodes(self._parties[0][1]):
            outputs = list(make_node(concurrent, captures, attrs, name).outputs)
        results = []
        for each in traced:
            mine, outputs = outputs[: len(each.outputs)], outputs[len(each.outputs) :]
            results.append(each.rebuild(mine)[0])
        return results


def _pin_nodes(pin: str) -> AbstractContextManager[None]:
    return device(pin) if pin else nullcontext()


def _spec_attrs(channel: PartyChannel) -> dict[str, Any]:
    attrs: dict[str, Any] = {"shape": channel.spec.shape, "dtype": channel.spec.dtype.name}
    return {**attrs, "ragged": True} if channel.ragged else attrs


def _common_spec(channels: Sequence[PartyChannel]) -> TensorSpec:
    if not channels or any(c[1:] != channels[0][1:] for c in channels):
        raise GraphError(
            f"channels of one spec are needed, not {', '.join(str(c.spec) for c in channels)}"
        )
    return channels[0].spec

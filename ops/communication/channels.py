"""Ops of channels, which lead from one party of a `concurrent` node to another.

The n-th tensor that is sent into a channel is the n-th that is received from it, however many
iterations the loops around the two ends run. A channel has one sending and one receiving party.

Each op takes a token and returns one: an empty tensor that orders the ops of a party. Between
devices, the partitioner replaces these ops by the edges of `send_recv.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.errors import OpError, ShapeError
from graphflow.ir.op import Cost, Node, Op, Tensor, register
from graphflow.ir.spec import Shape, TensorSpec, as_dtype
from graphflow.ops.communication.channel_scheduler import current_scheduler

TOKEN = TensorSpec((0,), np.dtype("bool"))
WHICH = TensorSpec((), np.dtype("int32"))
CHANNEL_OPS = ("channel_send", "channel_receive", "merge")


def _require_token(token: TensorSpec) -> None:
    if token != TOKEN:
        raise ShapeError(f"the first operand is a token, {TOKEN}, not {token}")


def _infer_send(
    token: TensorSpec, x: TensorSpec, mask: TensorSpec | None = None, *, channels: Sequence[int]
) -> TensorSpec:
    _require_token(token)
    if mask is not None and (mask.dtype.kind != "b" or mask.shape != (len(channels),)):
        raise ShapeError(f"the mask has one bool for each of {len(channels)} channels, not {mask}")
    return TOKEN


def _send_kernel(xp: Any, token: Any, x: Any, mask: Any = None, *, channels: Sequence[int]) -> Any:
    scheduler = current_scheduler("channel_send")
    for i, channel in enumerate(channels):
        if mask is None or mask[i]:
            scheduler.send(channel, xp.array(x))
    return token


def _infer_receive(
    token: TensorSpec, channel: int, shape: Shape, dtype: str, ragged: bool = False
) -> tuple[TensorSpec, ...]:
    _require_token(token)
    return TensorSpec(tuple(shape), as_dtype(dtype)), TOKEN


def _receive_kernel(xp: Any, token: Any, channel: int, **attrs: Any) -> tuple[Any, ...]:
    return current_scheduler("channel_receive").receive((channel,))[1], token


def check_order(order: TensorSpec | None) -> None:
    """Check the spec of an operand that says which channel a merge takes from.

    Raises:
        ShapeError: it is not one integer.
    """
    if order is not None and order != WHICH:
        raise ShapeError(f"the order of a merge is one int32, not {order}")


def _infer_merge(
    token: TensorSpec, order: TensorSpec | None = None, *, channels: Sequence[int], shape: Shape,
    dtype: str, ragged: bool = False,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    _require_token(token)
    check_order(order)
    if not channels:
        raise ShapeError("a merge needs a channel")
    return WHICH, TensorSpec(tuple(shape), as_dtype(dtype)), TOKEN


def wanted_channel(order: Any, count: int) -> int:
    """Return the index of the channel that a merge has to take from; -1 for any.

    Raises:
        OpError: there is no such channel.
    """
    wanted = -1 if order is None else int(order)
    if wanted >= count:
        raise OpError(
            f"the order of a merge asks for channel {wanted}, and it has {count}; give back an "
            "order of the same loops"
        )
    return max(wanted, -1)


def _merge_kernel(
    xp: Any, token: Any, order: Any = None, *, channels: Sequence[int], **attrs: Any
) -> tuple[Any, ...]:
    wanted = wanted_channel(order, len(channels))
    which, value = current_scheduler("merge").receive(channels, wanted)
    return xp.asarray(which, "int32"), value, token


def channels_of(node: Node) -> tuple[int, ...]:
    """Return the channels that a node sends into, or receives from."""
    one = node.attrs.get("channel")
    return tuple(node.attrs["channels"]) if one is None else (one,)


def _infer_replayed_order(came: TensorSpec, order: TensorSpec) -> TensorSpec:
    if came != order:
        raise ShapeError(f"the order that came is {came}, and the order that is fed is {order}")
    return came


def _no_cost(*specs: TensorSpec, **attrs: Any) -> Cost:
    """Return no cost: channels are priced as transfers."""
    return Cost(flops=0, bytes=0)


# (token, x[, mask]) -> token: sends x into channels, or into those where the mask is true. If x is
# the result of `used_rows`, only the rows in use travel between devices. The ops at the other ends
# then have the attribute `ragged`, and receive what they like behind these rows.
channel_send = register(
    Op(
        "channel_send",
        infer=_infer_send,
        kernel=_send_kernel,
        cost=_no_cost,
        halves=True,
        pure=False,
        device_kinds=("cpu",),
    )
)

# (token,) -> (value, token): the next tensor of a channel.
channel_receive = register(
    Op(
        "channel_receive",
        infer=_infer_receive,
        kernel=_receive_kernel,
        cost=_no_cost,
        halves=True,
        pure=False,
        device_kinds=("cpu",),
    )
)

# (token[, order]) -> (which, value, token): the next tensor of any of several channels. With an
# order of 0 or more, it is the next tensor of that channel.
merge = register(
    Op(
        "merge",
        infer=_infer_merge,
        kernel=_merge_kernel,
        cost=_no_cost,
        halves=True,
        pure=False,
        device_kinds=("cpu",),
    )
)

# The first input, an order that came, to be fed as the second, a placeholder, if the step is done
# again after a lost worker.
replayed_order = register(
    Op(
        "replayed_order",
        infer=_infer_replayed_order,
        kernel=lambda xp, came, order: came,
        cost=_no_cost,
        alias=True,
    )
)


def replayed_feeds(
    fetches: Sequence[Tensor], values: Sequence[Any]
) -> dict[Node, np.ndarray[Any, Any]]:
    """Return the feeds by which a step that gave some values would give them again."""
    return {
        tensor.node.inputs[1].node: np.array(value)
        for tensor, value in zip(fetches, values, strict=True)
        if tensor.node.op is replayed_order
    }


__all__ = [
    "CHANNEL_OPS", "TOKEN", "WHICH", "channel_receive", "channel_send", "channels_of",
    "check_order", "merge", "replayed_feeds", "replayed_order", "wanted_channel",
]  # fmt: skip

"""Ops at the ends of a cut edge, and of an exchange between several devices.

They move tensors between partitions; the executor runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import REGISTRY, Cost, Node, Op, register
from graphflow.ir.spec import Shape, TensorSpec, as_dtype
from graphflow.ops.communication.channels import WHICH, check_order


def _no_cost(*specs: TensorSpec, **attrs: Any) -> Cost:
    """Return no cost: edges and exchanges are priced as transfers."""
    return Cost(flops=0, bytes=0)


# The tensor `edge` of the step, from `source` (a device).
recv = register(
    Op(
        "recv",
        infer=lambda edge, source, shape, dtype, ragged=False: _spec(shape, dtype),
        cost=_no_cost,
        pure=False,
    )
)

# x, of which only the first `number` rows are in use: no reader depends on the others. An edge
# between devices that carries it is ragged: only the rows in use travel. They are the distinct rows
# of a piece of `piece` rows among `lookups` in a table of `rows`; `expected_rows` says how many
# that may be.
used_rows = register(
    Op(
        "used_rows",
        infer=lambda x, number, lookups, rows, piece: x,
        kernel=lambda xp, x, number, **attrs: x,
        cost=_no_cost,
        alias=True,
        counted=lambda inputs: {0: 1},
    )
)

# Sends its input as `edge` to `target` (a device); of a ragged edge, as many rows of it as the
# second input says. It has no value.
send = register(
    Op(
        "send",
        infer=lambda x, *number, edge, target: TensorSpec((0,), np.dtype("bool")),
        cost=_no_cost,
        pure=False,
        counted=lambda inputs: {0: 1} if inputs > 1 else {},
    )
)

# Sends its first input as those of `edges` to `targets` for which its second, the mask, is true; of
# ragged edges, as many rows of it as the third input says.
send_where = register(
    Op(
        "send_where",
        infer=lambda x, mask, *number, edges, targets: TensorSpec((0,), np.dtype("bool")),
        cost=_no_cost,
        pure=False,
    )
)


def _infer_recv_any(
    *order: TensorSpec, edges: Sequence[int], sources: Sequence[str], shape: Shape, dtype: str,
    ragged: bool = False,
) -> TensorSpec:  # fmt: skip
    """Infer the tensor that comes first over any of some edges.

    Raises:
        ArgumentError, ShapeError: the attributes do not fit, or the order is not one int32.
    """
    if not edges or len(edges) != len(sources):
        raise ArgumentError(f"{len(edges)} edges come from {len(sources)} devices")
    check_order(*order or (None,))
    return _spec(tuple(shape), dtype)


# The next tensor of any of `edges` of the step, from `sources`. If it has an input of 0 or more,
# it is the next tensor of the edge with this index.
recv_any = register(
    Op(
        "recv_any",
        infer=_infer_recv_any,
        cost=_no_cost,
        pure=False,
    )
)

# The index of the edge over which its input, the value of a `recv_any`, has come.
received_from = register(
    Op(
        "received_from",
        infer=lambda x, edge: WHICH,
        cost=_no_cost,
        pure=False,
    )
)

RECEIVING_OPS = ("recv", "recv_any")
SENDING_OPS = ("send", "send_where")


def edges_of(node: Node) -> dict[int, str]:
    """Return the edges that end or begin at a node, each with the device at the other end."""
    match node.op.name:
        case "recv":
            return {node.attrs["edge"]: node.attrs["source"]}
        case "send":
            return {node.attrs["edge"]: node.attrs["target"]}
        case "recv_any":
            return dict(zip(node.attrs["edges"], node.attrs["sources"], strict=True))
        case "send_where":
            return dict(zip(node.attrs["edges"], node.attrs["targets"], strict=True))
    return {}


def expected_rows(lookups: int, rows: int, piece: int) -> float:
    """Return how many distinct rows of a piece are looked up, if all rows are equally likely.

    Args:
        lookups: the lookups, of any rows.
        rows: the rows of the table.
        piece: those of the piece.
    """
    distinct = rows * (1 - (1 - 1 / rows) ** lookups) if rows > 1 else min(lookups, rows)
    return distinct * piece / max(rows, 1)


def _infer_start(
    *xs: TensorSpec, kind: str, group: int, rank: int, devices: Sequence[str],
    shapes: Sequence[Shape], dtype: str, **attrs: Any,
) -> TensorSpec:  # fmt: skip
    """Infer the result of a rank's part in an exchange.

    Raises:
        ArgumentError, ShapeError: the op is no collective, or ranks, devices and tensors do not
            fit.
    """
    op = REGISTRY.get(kind)
    if op is None or op.joint is None:
        raise ArgumentError(f"{kind!r} is no collective")
    for device in devices:
        DeviceName.parse(device)
    specs = [_spec(tuple(shape), dtype) for shape in shapes]
    count = 1 if kind == "broadcast" else len(devices)
    if not 0 <= rank < len(devices) or len(specs) != count:
        raise ArgumentError(f"rank {rank} of {len(devices)} devices and {len(specs)} tensors")
    own = specs[rank : rank + 1]
    if [*xs] != own:
        raise ShapeError(f"rank {rank} has {[*map(str, xs)]}, not {[*map(str, own)]}")
    made = op.infer(*specs, rank=rank, **attrs)
    assert isinstance(made, TensorSpec)
    return made


# Starts the exchange of a group for one rank, with the rank's tensor if it has one. The output is
# the buffer that holds the result after `collective_finish`. The attributes are those of the
# collective, and the `devices` and `shapes` of all ranks.
collective_start = register(
    Op(
        "collective_start",
        infer=_infer_start,
        cost=_no_cost,
        pure=False,
    )
)

# The result of an exchange. Its first input is the `collective_start`. The second one, the rank's
# tensor, is free from now on.
collective_finish = register(
    Op(
        "collective_finish",
        infer=lambda y, *xs, group: y,
        cost=_no_cost,
        pure=False,
        alias=True,
    )
)


def _spec(shape: Shape, dtype: str) -> TensorSpec:
    return TensorSpec(shape, as_dtype(dtype))

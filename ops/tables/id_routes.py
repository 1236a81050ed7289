"""Ids of a hash table that several devices own: which ids a device asks for, and whom.

A hash of an id names a part of the table, and each part belongs to one device. A device that looks
ids up asks each owner for distinct ids, by keys: (id, how often it occurs) as three int32 numbers.
Keys that do not occur are padding, because buffers have room for all ids of the device. Padding
does not travel (`used_rows` in `communication/send_recv.py`).

    ids ─route_ids→ keys of each owner ─merge_ids→ the distinct ids of an owner ─hash_find→ rows

`tensors/table_rows.py` has the ops by which rows and gradients travel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ArgumentError
from graphflow.ir.op import Cost, Op, register, sample
from graphflow.ir.spec import Size, TensorSpec, spec
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.tables.hash_index import part_of

Array = np.ndarray[Any, Any]
_LONG, _SHORT = np.dtype("int64"), np.dtype("int32")
WORDS = 3
"""The numbers of a key: an id of 64 bits, and how often it occurs."""


def _infer_route(ids: TensorSpec, owners: TensorSpec, count: int) -> tuple[TensorSpec, ...]:
    require_kind(ids, "int")
    require_kind(owners, "int")
    number, keys = TensorSpec((), _LONG), TensorSpec((ids.size, WORDS), _SHORT)
    return (TensorSpec((ids.size,), _LONG), *[number] * count, *[keys] * count)


def _route(xp: Any, ids: Array, owners: Array, count: int) -> tuple[Array, ...]:
    distinct, inverse, occurs = np.unique(ids.reshape(-1), return_inverse=True, return_counts=True)
    whose = owners[part_of(distinct, len(owners))]
    order = np.argsort(whose, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    numbers = np.bincount(whose, minlength=count)
    keys, start = np.zeros((count, ids.size, WORDS), np.int32), 0
    for out, number in zip(keys, numbers.tolist(), strict=True):
        own = order[start : start + number]
        out[:number, :2] = distinct[own].astype(np.int64).view(np.int32).reshape(-1, 2)
        out[:number, 2] = occurs[own]
        start += number
    return (place[inverse.reshape(-1)], *map(np.asarray, numbers), *keys)


# The distinct ids among ids, (k,) int64, by owner and then ascending: the position of each id among
# them; for each owner the number of its ids; for each owner its keys, (k, 3) int32, padded. The
# second input is the owner of each part of the table.
route_ids = register(
    Op(
        "route_ids",
        infer=_infer_route,
        kernel=_route,
        cost=lambda ids, owners, count: Cost(flops=ids.size * 20, bytes=ids.size * 64),
        samples=(
            sample(spec("int64", (5,)), spec("int64", (4,)), count=2,
                   make=lambda xs: [xs[0], np.array([0, 1, 1, 0])]),
            sample(spec("int64", (2, 3)), spec("int64", (3,)), count=3,
                   make=lambda xs: [xs[0], np.array([2, 0, 1])]),
            sample(spec("int64", (0,)), spec("int64", (1,)), count=1,
                   make=lambda xs: [xs[0], np.array([0])]),
        ),
        device_kinds=("cpu",),
    )
)  # fmt: skip


def _infer_merge(*keys: TensorSpec) -> tuple[TensorSpec, ...]:
    if not keys:
        raise ArgumentError("there are no keys; give those of one device at least")
    count: Size = 0
    for each in keys:
        require_kind(each, "int")
        count = count + each.shape[0]
    return (TensorSpec((count,), _LONG),) * 3


def _merge(xp: Any, *keys: Array) -> tuple[Array, ...]:
    every = np.concatenate(keys)
    (used,) = np.nonzero(every[:, 2])
    asked = np.ascontiguousarray(every[used, :2]).view(np.int64).reshape(-1)
    distinct, places = np.unique(asked, return_inverse=True)
    ids, counts = (np.zeros(len(every), np.int64) for _ in range(2))
    ids[: len(distinct)] = distinct
    np.add.at(counts, places, every[used, 2])
    inverse = np.full(len(every), -1, np.int64)
    inverse[used] = places
    return ids, counts, inverse


# The distinct ids that all devices ask an owner for, ascending and padded; how often each one
# occurs, 0 for padding; and the position of each key among them, -1 for padding.
merge_ids = register(
    Op(
        "merge_ids",
        infer=_infer_merge,
        kernel=_merge,
        cost=lambda *keys: Cost(
            flops=sum(k.size for k in keys) * 6, bytes=sum(k.size for k in keys) * 32
        ),
        samples=(
            sample(*[spec("int32", (3, WORDS))] * 2,
                   make=lambda xs: [np.array([[1, 0, 2], [-1, -1, 1], [0, 0, 0]], np.int32),
                                    np.array([[1, 0, 1], [5, 7, 1], [6, 7, 3]], np.int32)]),
        ),
        device_kinds=("cpu",),
    )
)  # fmt: skip


__all__ = ["WORDS", "merge_ids", "route_ids"]

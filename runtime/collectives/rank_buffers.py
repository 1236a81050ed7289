"""A collective's data: the pieces that each rank contributes, and where they go in the results.

A rank has one piece for each rank, or one piece for all. What comes from each rank has a place of
its own in the result. Reducing collectives combine the pieces for a rank in that rank's order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import REGISTRY
from graphflow.ir.spec import Shape, TensorSpec, as_dtype, evaluate, is_half
from graphflow.ops.communication.reduction_order import (
    Order,
    combine_function,
    finish,
    fold,
    order_of,
    resolve_algorithm,
    shares,
    starts,
)

Array = np.ndarray[Any, Any]

REDUCING = ("all_reduce", "reduce_scatter")
EXCHANGE_ATTRS = ("kind", "group", "rank", "devices", "shapes", "dtype")
"""Attributes of a `collective_start` node that the collective's own op does not have."""


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective of known sizes.

    Attributes:
        kind: name of its op.
        group: its number in the program.
        devices: device of each rank.
        specs: spec of each rank's tensor; for a broadcast, of rank 0's only.
        attrs: attributes of its op, without the rank.
    """

    kind: str
    group: int
    devices: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    attrs: Mapping[str, Any]

    @staticmethod
    def from_attrs(attrs: Mapping[str, Any]) -> Collective:
        """Make a collective from the attributes of a `collective_start`, with sizes bound."""
        dtype = as_dtype(attrs["dtype"])
        return Collective(
            attrs["kind"],
            int(attrs["group"]),
            tuple(attrs["devices"]),
            tuple(TensorSpec(tuple(shape), dtype) for shape in attrs["shapes"]),
            {name: value for name, value in attrs.items() if name not in EXCHANGE_ATTRS},
        )

    @cached_property
    def count(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The worker of each rank."""
        return tuple(DeviceName.parse(device).worker or 0 for device in self.devices)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the tensors."""
        return self.specs[0].dtype

    @cached_property
    def reduces(self) -> bool:
        """Whether pieces of the ranks are combined."""
        return self.kind in REDUCING

    def result_spec(self, rank: int) -> TensorSpec:
        """Return the spec of a rank's result."""
        spec = REGISTRY[self.kind].infer(*self.specs, rank=rank, **self.attrs)
        assert isinstance(spec, TensorSpec)
        return spec

    @cached_property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """Elements of each piece, by contributing rank. A rank may have one piece for all ranks."""
        whole = [_element_count(spec.shape) for spec in self.specs]
        match self.kind:
            case "all_reduce":
                return (tuple(shares(whole[0], self.count)),) * self.count
            case "all_gather":
                return tuple((size,) for size in whole)
            case "broadcast":
                return ((whole[0],), *[(0,)] * (self.count - 1))
            case "reduce_scatter":
                each = (self.attrs["sizes"],) * self.count
                axis = self.attrs["axis"]
            case _:
                each, axis = self.attrs["sizes"], self.attrs["split_axis"]
        around = [_element_count((*s.shape[:axis], *s.shape[axis + 1 :])) for s in self._rank_specs]
        return tuple(tuple(around[rank] * size for size in own) for rank, own in enumerate(each))

    @property
    def _rank_specs(self) -> tuple[TensorSpec, ...]:
        return self.specs if len(self.specs) == self.count else self.specs * self.count

    @cached_property
    def sends_same_to_all(self) -> bool:
        """Whether a rank contributes one piece to all ranks."""
        return self.kind in ("all_gather", "broadcast")

    def traffic(self, ranks: Sequence[int]) -> list[tuple[str, int, int]]:
        """Return the bytes of one run between ranks of a worker and each other worker.

        Each piece goes straight to the ranks that need it, and so does the sum of an all-reduce.

        Returns:
            "sent" or "received", the other worker, the bytes.
        """
        found: Counter[tuple[str, int]] = Counter()
        for rank, other in product(ranks, range(self.count)):
            peer = self.workers[other]
            if peer != self.workers[rank]:
                found["sent", peer] += self._elements_between(rank, other)
                found["received", peer] += self._elements_between(other, rank)
        size = self.dtype.itemsize
        return [(how, peer, size * count) for (how, peer), count in found.items() if count]

    def _elements_between(self, source: int, target: int) -> int:
        own = self.lengths[source]
        share = own[source] if self.kind == "all_reduce" else 0
        return own[0 if self.sends_same_to_all else target] + share

    def flat_pieces(self, rank: int, x: Array | None) -> list[Array]:
        """Return the pieces of a rank's tensor as flat arrays: views where possible."""
        if x is None:
            return [np.empty(0, self.dtype)]
        return [np.ascontiguousarray(part).reshape(-1) for part in self.input_views(rank, x)]

    def input_views(self, rank: int, x: Array) -> list[Array]:
        """Return the pieces of a rank's tensor as views of it."""
        if self.sends_same_to_all:
            return [x]
        if self.kind == "all_reduce":
            at = starts(self.lengths[rank])
            flat = x.reshape(-1)
            return [flat[start:stop] for start, stop in pairwise(at)]
        axis = self.attrs["axis" if self.reduces else "split_axis"]
        sizes = self.attrs["sizes"]
        at = starts(sizes if self.reduces else sizes[rank])
        return [_slice_axis(x, axis, start, stop) for start, stop in pairwise(at)]

    def output_views(self, rank: int, y: Array) -> list[Array]:
        """Return the views of a rank's result that receive each rank's piece."""
        match self.kind:
            case "all_reduce":
                return self.input_views(rank, y)
            case "reduce_scatter":
                return [y if r == rank else y.reshape(-1)[:0] for r in range(self.count)]
            case "broadcast":
                return [y, *[y.reshape(-1)[:0]] * (self.count - 1)]
            case "all_gather":
                axis = self.attrs["axis"]
                sizes = [spec.shape[axis] for spec in self.specs]
            case _:
                axis = self.attrs["concat_axis"]
                split, own = self.attrs["split_axis"], self.attrs["sizes"]
                sizes = [
                    own[r][rank] if split == axis else spec.shape[axis]
                    for r, spec in enumerate(self.specs)
                ]
        at = starts([evaluate(size, {}) for size in sizes])
        return [_slice_axis(y, axis, start, stop) for start, stop in pairwise(at)]

    # Reducing -----------------------------------------------------------------------------------

    @cached_property
    def algorithm(self) -> str:
        """The algorithm; "auto" is resolved."""
        size = _element_count(self.specs[0].shape)
        return resolve_algorithm(self.attrs["algorithm"], self.count, size, self.attrs["hosts"])

    def order(self, share: int) -> Order:
        """Return the order in which the pieces of a share are combined."""
        return order_of(self.algorithm, self.count, share, self.attrs["hosts"])

    @cached_property
    def working_dtype(self) -> np.dtype[Any]:
        """The dtype of partial results: float32 for 16-bit floats."""
        return np.dtype("float32") if is_half(self.dtype) else self.dtype

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all shares are combined in one order, so that they can be combined as one."""
        return self.algorithm != "ring"

    @cached_property
    def _combine(self) -> Any:
        return combine_function(self.attrs["reduction"], np)

    def combine(self, share: int, pieces: Sequence[Array], out: Array) -> None:
        """Combine the same elements of all ranks into `out`, in the order of a share.

        The caller suppresses numpy's floating-point warnings.
        """
        if self.working_dtype is not self.dtype:
            wide = np.empty(out.shape, self.working_dtype)
            self._fold(share, [p.astype(self.working_dtype) for p in pieces], wide)
            np.copyto(out, wide, casting="unsafe")
        else:
            self._fold(share, pieces, out)

    def _fold(self, share: int, pieces: Sequence[Array], out: Array) -> None:
        reduction: str = self.attrs["reduction"]
        if len(pieces) == 2 and self.is_uniform:
            self._combine(pieces[0], pieces[1], out=out)
        else:
            fold(self.order(share), pieces, self._combine, out, np.empty_like)
        if reduction == "mean":
            finish(reduction, self.count, out)


def _element_count(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= evaluate(size, {})
    return count


def _slice_axis(x: Array, axis: int, start: int, stop: int) -> Array:
    part: Array = x[(slice(None),) * axis + (slice(start, stop),)]
    return part

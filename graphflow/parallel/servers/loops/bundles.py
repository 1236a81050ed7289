"""Bundles: small tensors of one dtype travel in one message, flattened and concatenated.

A message takes about 15 µs beside its bytes, so a model with a hundred biases would wait for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.ir.spec import TensorSpec
from graphflow.parallel.resharding.local_ops import slice_axis

Item = TypeVar("Item")

SMALL_BYTES = 64 << 10
"""The size of the largest tensor that shares a message with others."""


class Bundle(Generic[Item]):
    """Tensors that travel in one message.

    Args:
        items: the things whose tensors travel: pushed tensors, or variables.
        specs: the spec of each tensor.

    Attributes:
        items: the same.
        spec: the spec of the message.
    """

    def __init__(self, items: Sequence[Item], specs: Sequence[TensorSpec]) -> None:
        self.items = tuple(items)
        self._specs = specs
        (self.spec,) = specs if len(specs) == 1 else (_joined_spec(specs),)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the message."""
        if len(tensors) == 1:
            return tensors[0]
        flat = [FUNCTIONS["reshape"](tensor, (-1,)) for tensor in tensors]
        joined: Tensor = FUNCTIONS["concat"](flat)
        return joined

    def split(self, message: Tensor) -> list[Tensor]:
        """Return the tensors of a message."""
        if len(self._specs) == 1:
            return [message]
        found, begin = [], 0
        for spec in self._specs:
            size = int(spec.size)
            part = slice_axis(message, 0, begin, size)
            found.append(FUNCTIONS["reshape"](part, spec.shape))
            begin += size
        return found


def make_bundles(items: Iterable[tuple[Item, TensorSpec, bool]]) -> list[Bundle[Item]]:
    """Return bundles of some tensors.

    Args:
        items: for each tensor what it is, its spec, and whether it may share a message.
    """
    small: dict[str, list[tuple[Item, TensorSpec]]] = {}
    found: list[Bundle[Item]] = []
    for item, spec, may_share in items:
        if may_share and spec.is_concrete and int(spec.nbytes) <= SMALL_BYTES:
            small.setdefault(spec.dtype.name, []).append((item, spec))
        else:
            found.append(Bundle([item], [spec]))
    for own in small.values():
        found.append(Bundle(*map(list, zip(*own, strict=True))))
    return found


def _joined_spec(specs: Sequence[TensorSpec]) -> TensorSpec:
    return specs[0].with_shape((sum(int(spec.size) for spec in specs),))


__all__ = ["Bundle", "make_bundles"]

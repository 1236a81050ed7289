"""Checks for NaN and infinity: whether a step's results are finite, and which node is the origin.

A program with checks of `RESULTS` looks at fetches and new values of variables before anything is
committed. If one is not finite, the step is undone and runs once more in a program that checks
`EVERY` node: node by node, without fusion, with the same bits. That program names the first node
that made NaN or infinity from finite inputs, and commits nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from graphflow.errors import NonFiniteError
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec, is_inexact
from graphflow.ops.communication.send_recv import RECEIVING_OPS, SENDING_OPS
from graphflow.runtime.memory.memory_layout import MemoryLayout
from graphflow.runtime.partitioning.partition import Partition

_INF, _NAN = 1, 2  # flags, as bits
_STORED = ("variable", "constant")
_INPUTS = ("placeholder", *RECEIVING_OPS)


def nonfinite_flags(xp: Any, array: Any) -> int:
    """Return which of `_INF` and `_NAN` an array contains, as bits.

    For most arrays one sum shows that they contain neither: it is finite only if all elements are.
    """
    wide = np.float32 if array.dtype.itemsize <= 2 else None
    total = xp.sum(array, dtype=wide)
    if np.isfinite(complex(total)):
        return 0
    return _INF * bool(xp.isinf(array).any()) + _NAN * bool(xp.isnan(array).any())


class ResultCheck:
    """Checks the results of a program.

    Attributes:
        tensors: the checked tensors: fetches and new values of variables, of inexact dtypes.
    """

    def __init__(self, xp: Any, partition: Partition, layout: MemoryLayout) -> None:
        assigned = (assign.outputs[0] for assign in layout.commits)
        wanted = dict.fromkeys((*partition.fetches.values(), *assigned))
        self.tensors = [t for t in wanted if is_inexact(t.dtype) and layout.specs[t].size]
        self._xp = xp
        self._device = partition.device

    def __call__(self, *arrays: Any) -> None:
        """Check the values of `tensors`.

        Raises:
            NonFiniteError: one is not finite; the error names it.
        """
        for tensor, array in zip(self.tensors, arrays, strict=True):
            if nonfinite_flags(self._xp, array):
                found = _count_nonfinite(self._xp, array)
                node = _describe_node(tensor.node)
                raise NonFiniteError(f"{node} on {self._device} gave {found}")


class NodeCheck:
    """Finds the first node that makes NaN or infinity from finite inputs.

    Args:
        inside: whether the nodes belong to a body, whose parameters are checked outside.
    """

    def __init__(self, xp: Any, device: str, specs: Mapping[Tensor, TensorSpec], inside: bool):
        self._xp = xp
        self._device = device
        self._specs = specs
        self._is_body = inside
        self._known: dict[Tensor, int] = {}

    def checked_outputs(self, node: Node) -> list[Tensor]:
        """Return the outputs of a node that are checked once it has run."""
        if node.op.name == "collective_finish":
            return [node.inputs[0]] if is_inexact(node.inputs[0].dtype) else []
        if node.op.name in (*SENDING_OPS, "assign", "group", "collective_start") or node.op.alias:
            return []
        return [t for t in node.outputs if is_inexact(t.dtype) and self._specs[t].size]

    def make_check(self, node: Node) -> Callable[..., None]:
        """Return the function that checks these outputs of a node."""
        tensors = self.checked_outputs(node)

        def look(*arrays: Any) -> None:
            before = 0
            for tensor in node.inputs:
                before |= self._known.get(_alias_source(tensor), 0)
            for tensor, array in zip(tensors, arrays, strict=True):
                found = self._known[tensor] = nonfinite_flags(self._xp, array)
                if self._is_origin(node, found, before):
                    raise NonFiniteError(self._error_message(node, array))

        return look

    def _is_origin(self, node: Node, found: int, before: int) -> bool:
        """Return True if a node is the origin of NaN or infinity.

        Infinities in variables, constants and feeds are accepted: masks use them.
        """
        if node.op.name in RECEIVING_OPS or (self._is_body and node.op.name == "placeholder"):
            return False
        if node.op.name == "collective_finish":  # a NaN is reported by the rank that it came from
            return found != 0 and not found & _NAN
        if node.op.name in (*_STORED, *_INPUTS):
            return bool(found & _NAN)
        return bool(found & _NAN & ~before) or (found != 0 and before == 0)

    def _error_message(self, node: Node, array: Any) -> str:
        found = _count_nonfinite(self._xp, array)
        where = f"{_describe_node(node)} on {self._device}"
        if node.op.name in (*_STORED, *_INPUTS):
            return f"{where} contains {found} when the step begins; the step was undone"
        specs = ", ".join(str(self._specs[t]) for t in node.inputs)
        return (
            f"{where} was the first node with a result that is not finite: {found}; its inputs are "
            f"[{specs}]; the step was undone"
        )


def _alias_source(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory an alias shows."""
    while tensor.node.op.alias:
        tensor = tensor.node.inputs[0]
    return tensor


def _describe_node(node: Node) -> str:
    name = node.name.rpartition("/")[2] if node.op.name in RECEIVING_OPS else node.name
    return f"{node.op.name} {name!r} (made at {node.location})"


def _count_nonfinite(xp: Any, array: Any) -> str:
    nans, infinities = (int(look(array).sum()) for look in (xp.isnan, xp.isinf))
    found = [f"{n} {what}" for n, what in ((nans, "NaN"), (infinities, "infinity")) if n]
    return f"{' and '.join(found)} among {array.size} values"

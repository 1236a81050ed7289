"""Checks of integers, such as indices and class labels, by native calls among kernels.

A native check notes the integers that it found (`ops/kernels/moves/index_range.py`), and the
kernels after it run on. The program looks once its native calls have returned. Nothing has been
committed by then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.ir.op import Node
from graphflow.ops.kernels.jit.array_address import address


class IntegerCheck:
    """A native check of the integers that a node's op accepts.

    Args:
        refuse: raises the op's error for the least and the largest integer.
        alarm: becomes 1 when any check of the program finds wrong integers.
    """

    def __init__(
        self, node: Node, refuse: Callable[[int, int], None], alarm: ctypes.c_int64
    ) -> None:
        self.node = node
        self.alarm = alarm
        self._refuse = refuse
        self._found: np.ndarray[Any, Any] = np.zeros(3, np.int64)  # whether wrong, least, largest

    @property
    def places(self) -> tuple[int, int]:
        """Addresses of the words that the native check writes."""
        return address(self._found), ctypes.addressof(self.alarm)

    def take_found(self) -> tuple[int, int] | None:
        """Return the least and the largest integer if some are wrong, and forget them."""
        wrong, least, largest = self._found.tolist()
        self._found[0] = 0
        return (least, largest) if wrong else None

    def refuse(self, least: int, largest: int) -> None:
        """Raise the op's error, and mark it as that of the node."""
        try:
            self._refuse(least, largest)
        except Exception as error:
            error.__dict__[_NODE] = self.node
            raise


_NODE = "graphflow_node"


def raise_if_wrong(checks: Sequence[IntegerCheck]) -> None:
    """Raise the error of the first node whose integers its op does not accept, if there is one."""
    found = [(check, check.take_found()) for check in checks]
    for check, integers in found:
        check.alarm.value = 0
        if integers is not None:
            check.refuse(*integers)


def refused_node(error: BaseException) -> Node | None:
    """Return the node whose check raised an error; None for other errors."""
    node: Node | None = error.__dict__.get(_NODE)
    return node

"""Emits checks of values that ops do not accept, such as class labels beyond the number of classes.

A check of a few integers is a native call among the kernels. Others are lines of Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from graphflow.ir.graph import bind_attrs
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import nbytes
from graphflow.ops.kernels.moves.index_range import range_task
from graphflow.runtime.memory.memory_layout import MemoryLayout
from graphflow.runtime.native_calls.integer_checks import IntegerCheck
from graphflow.runtime.native_calls.pointer_table import KernelCall
from graphflow.runtime.program.operand_table import OperandTable
from graphflow.runtime.program.program_part import ProgramSection


class ValueChecks:
    """Adds checks to the compute section of a program.

    Args:
        xp: the array module of the device.
        operands: addresses and names of the program's tensors.
        scope: global names of the generated functions; checks are added to it.
        native: whether integers may be checked by native calls.
    """

    def __init__(
        self,
        layout: MemoryLayout,
        bindings: Mapping[str, int],
        xp: Any,
        operands: OperandTable,
        scope: dict[str, Any],
        compute: ProgramSection,
        *,
        native: bool,
    ) -> None:
        self._layout = layout
        self._bindings = bindings
        self._xp = xp
        self._operands = operands
        self._scope = scope
        self._compute = compute
        self._native = native
        self._alarm = ctypes.c_int64(0)
        self._checked: set[tuple[Tensor, int, int]] = set()

    def emit(self, node: Node, number: int) -> None:
        """Emit the check of a node's inputs."""
        if self.emit_native(node):
            return
        assert node.op.refuse is not None
        attrs = bind_attrs(node.attrs, self._bindings)
        arrays = []
        for i, tensor in enumerate(node.inputs):
            if tensor.dtype.kind == "f":  # only its shape matters
                self._scope[f"c{number}_{i}"] = self._layout.specs[tensor]
                arrays.append(f"c{number}_{i}")
            else:
                arrays.append(self._operands.name(tensor))
        self._scope[f"c{number}"] = partial(node.op.refuse, self._xp, **attrs)
        self._compute.add_line(node, f"c{number}({', '.join(arrays)})")

    def emit_native(self, node: Node) -> bool:
        """Add a native call that checks the integers of a node; return False if there is none.

        Equal checks are added once.
        """
        op, specs = node.op, [self._layout.specs[t] for t in node.inputs]
        if op.bounds is None or not self._native:
            return False
        attrs = bind_attrs(node.attrs, self._bindings)
        which, low, high = op.bounds(*specs, **attrs)
        tensor, given = node.inputs[which], specs[which]
        task = range_task(given, low, high)
        if task is None or (tensor, low, high) in self._checked:
            return task is not None or not given.size
        self._checked.add((tensor, low, high))

        def refuse(*integers: int) -> None:
            arrays: list[Any] = list(specs)
            arrays[which] = np.array(integers, np.int64).astype(given.dtype)
            assert op.refuse is not None
            op.refuse(np, *arrays, **attrs)

        check = IntegerCheck(node, refuse, self._alarm)
        places = (self._operands.pointer_source(tensor), *check.places)
        sizes = (nbytes(given), 24, 0)  # all checks write the same to the last place
        self._compute.add_calls([KernelCall(node, task, places, sizes, 1, check=check)])
        return True

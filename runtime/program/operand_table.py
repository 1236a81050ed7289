"""Operand table: the address and the name of each tensor of a program.

Native calls take addresses, or operands whose address each step supplies. Lines of Python take
names of arrays. A buffer becomes an array only if a line asks for its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.errors import OpError
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import nbytes
from graphflow.ops.kernels.jit.array_address import address, empty_aligned
from graphflow.runtime.memory.backend import DeviceBackend
from graphflow.runtime.memory.memory_layout import MemoryLayout
from graphflow.runtime.native_calls.native_segments import FeedBinding
from graphflow.runtime.native_calls.pointer_table import PointerSource
from graphflow.runtime.program.generated_call_support import Reshaped

_BOUND = ("constant", "variable", "placeholder")
"""Ops whose results lie outside the arena at a fixed address, unless a step supplies it."""


class OperandTable:
    """Addresses and names of a program's tensors.

    Args:
        memory: the arena's bytes.
        scope: global names of the generated functions; arrays are added to it.
        numbers: number of each node, from which names are made.
        line: emits a line that has to run before those that use a name.
        outside: for a body, the buffers of its results (`MemoryLayout.outside`).

    Attributes:
        base_address: address of the arena; 0 if it is not in the host's memory.
        names: names of tensors, as far as they were asked for.
        feeds: bindings of the tensors whose address each run supplies.
    """

    def __init__(
        self,
        layout: MemoryLayout,
        backend: DeviceBackend,
        memory: Any,
        scope: dict[str, Any],
        numbers: Mapping[Node, int],
        line: Callable[[Node, str], None],
        outside: Sequence[Any] = (),
    ) -> None:
        self.base_address = address(memory) if backend.xp is np else 0
        self.names: dict[Tensor, str] = {}
        self.feeds: dict[Tensor, FeedBinding] = {}
        self.scope = scope
        self._layout = layout
        self._to_device = backend.to_device
        self._memory = memory
        self._numbers = numbers
        self._line = line
        self._outside = outside
        self._places: dict[Tensor, int] = {}

    def bind(self, tensor: Tensor, value: Any) -> str:
        """Name an array whose address does not change; return the name."""
        name = f"b{self._numbers[tensor.node]}_{tensor.index}"
        self.scope[name] = value
        self.names[tensor] = name
        return name

    def move(self, tensor: Tensor) -> str:
        """Let each run supply a tensor's address; return the name of the buffer that it has."""
        name = self.name(tensor)
        buffer = f"h{name}"
        self.scope[buffer] = self.scope.pop(name)
        self.feeds[tensor] = FeedBinding(self._layout.specs[tensor], self._to_device)
        return buffer

    def copy_feed(self, tensor: Tensor, key: str, otherwise: FeedBinding) -> str:
        """Return a line that copies a feed to a buffer, which is quicker for small ones than to
        bind their addresses.

        Args:
            key: of the feed.
            otherwise: called for a feed of another shape or dtype; converts or refuses it.
        """
        spec, number = self._layout.specs[tensor], self._numbers[tensor.node]
        buffer = empty_aligned(nbytes(spec)).view(spec.dtype).reshape(spec.shape)
        self.scope |= {f"f{number}": key, f"s{number}": spec.shape, f"d{number}": spec.dtype}
        self.scope[f"k{number}"] = otherwise
        fits = f"(v := feeds[f{number}]).shape == s{number} and v.dtype == d{number}"
        return f"{self.bind(tensor, buffer)}[...] = v if {fits} else k{number}(v)"

    def pointer_source(self, tensor: Tensor) -> PointerSource:
        """Return a tensor's address, or the operand that supplies it in each step."""
        deferred = self._layout.deferred.get(tensor.node)
        if deferred is not None:
            tensor = deferred
        root = tensor if tensor in self._layout.blocks else self._layout.roots[tensor]
        kind = root.node.op.name
        if root in self.feeds:
            return root
        if root in self._layout.outside:
            return address(self._outside[self._layout.outside[root]])
        if kind in _BOUND:
            place = self._places.get(root)
            if place is None:
                place = self._places[root] = address(self.scope[self.names[root]])
            return place
        return self.base_address + self._layout.offset(root)

    def name(self, tensor: Tensor, native: bool = False) -> str:
        """Return the name of a tensor's array, for a line of Python that reads it.

        Args:
            native: whether a generated kernel reads it, which accepts any alignment.
        """
        deferred = self._layout.deferred.get(tensor.node)
        if deferred is not None:
            return self.names[deferred]
        root = tensor if tensor in self._layout.blocks else self._layout.roots[tensor]
        if root in self.feeds and not native:
            self.feeds[root].is_read_by_python = True
        known = self.names.get(tensor)
        if known is not None:
            return known
        if tensor.node.op.name == "assign" and tensor not in self._layout.blocks:
            return self.name(tensor.node.inputs[1], native)
        shape = self._layout.specs[tensor].shape
        kind = root.node.op.name
        if root in self.feeds:
            number = self._numbers[tensor.node]
            self.scope[f"k{number}"] = Reshaped(shape)
            name = self.names[tensor] = f"b{number}_0"
            self._line(tensor.node, f"{name} = k{number}({self.names[root]})")
            return name
        if root in self._layout.outside:
            buffer = self._outside[self._layout.outside[root]]
            return self.bind(tensor, buffer if buffer.shape == shape else buffer.reshape(shape))
        if kind in _BOUND:
            return self.bind(tensor, self.scope[self.names[root]].reshape(shape))
        return self.bind(tensor, self._buffer(tensor))

    def _buffer(self, tensor: Tensor) -> Any:
        spec = self._layout.specs[tensor]
        offset = self._layout.offset(tensor)
        return self._memory[offset : offset + nbytes(spec)].view(spec.dtype).reshape(spec.shape)

    def check_variable(self, node: Node, array: Any) -> None:
        """Check that a variable's array is what the graph says: native code trusts its pointers."""
        spec = self._layout.specs[node.outputs[0]]
        if array.shape != spec.shape or array.dtype != spec.dtype or not array.flags.c_contiguous:
            raise OpError(
                f"{node.name!r} (made at {node.location}) is {array.dtype}{array.shape} in "
                f"memory, but {spec} in the graph; do two variables have one name?"
            )

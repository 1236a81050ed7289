"""Functions that generated lines call besides kernels, and errors that name a line's node.

`EdgeChannel` is a program's view of the world outside its device: edges, collectives, cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from graphflow.errors import (
    CheckError,
    DeviceOutOfMemory,
    GraphflowError,
    OpError,
    ProtocolError,
    TableFullError,
    error_text,
)
from graphflow.ir.op import Node, Op, owner_module
from graphflow.ir.spec import TensorSpec, nbytes
from graphflow.ops.communication.send_recv import edges_of
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.jit.call_table_driver import copy_task, driver_sources
from graphflow.ops.kernels.jit.compiler import compiler
from graphflow.ops.kernels.jit.kept_layouts import KeptLayouts
from graphflow.runtime.collectives.program_collectives import DeviceCollective
from graphflow.runtime.collectives.rank_buffers import Collective
from graphflow.runtime.collectives.ring_ends import RingReceiver, RingSender
from graphflow.runtime.collectives.shared_memory_rings import LoopRings
from graphflow.runtime.memory.live_ranges import loop_states
from graphflow.runtime.memory.memory_layout import MemoryLayout
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.partitioning.user_code_check import runs_user_code
from graphflow.runtime.program.bodies.body_loops import BodyResults
from graphflow.runtime.transport.shared_memory import SharedMemorySegment

LOOP_OPS = ("scan", "while_loop")


class EdgeChannel(Protocol):
    """Connects a program to other devices."""

    @property
    def rings(self) -> LoopRings:
        """The shared memory of its edges in loops."""

    def send(self, step: int, edge: int, target: str, array: Any) -> None:
        """Send a tensor over an edge to a device."""

    def recv(self, step: int, edge: int) -> Any:
        """Return the tensor that comes over an edge."""

    def grant_credit(self, step: int, edge: int, portion: int) -> None:
        """Tell the sender of an edge in a loop that this portion of its tensors was received."""

    def wait_for_credit(self, step: int, edge: int, portion: int, target: str) -> None:
        """Wait until the receiver has granted the credit for a portion."""

    def send_through(self, ring: RingSender, step: int, key: int, array: Any) -> None:
        """Send a tensor of an edge in a loop through its ring."""

    def receive_through(self, ring: RingReceiver, step: int, key: int) -> Any:
        """Return a tensor of an edge in a loop from its ring."""

    def wait_for_any(
        self, step: int, edges: Sequence[int], numbers: Sequence[int], first: int
    ) -> int:
        """Return the index of an edge in a loop whose next tensor, of a number, is there.

        Args:
            first: index of the edge to look at first.
        """

    def join_collective(self, what: Collective, name: str) -> DeviceCollective:
        """Return this device's part in a collective; errors call it `name`."""

    def shared_memory(self, nbytes: int) -> Any:
        """Return memory that other processes of this host can map; None if there is none."""

    def register_buffers(self, segment: SharedMemorySegment) -> None:
        """Announce the shared memory that holds the program's buffers."""

    def forget_agreements(self) -> None:
        """Discard what was agreed with other workers; the program's next run agrees anew."""

    def close(self) -> None:
        """Release everything shared with other workers. The program does not run again."""

    def check_cancelled(self, step: int, loop: str, done: int, of: str) -> None:
        """Raise if the step was cancelled; the error says that `loop` has done `done` iterations,
        and `of` names the total, such as " of 10"."""

    def cancel(self, step: int, reason: GraphflowError) -> None:
        """End all waits of a step with an error, now or when they begin."""


def compile_kernels(layout: MemoryLayout) -> None:
    """Compile all missing kernels of a program and its bodies in one unit."""
    if not is_jit_enabled():
        return
    wanted: dict[str, str] = {}
    _collect_kernels(layout, wanted)
    if wanted:
        compiler().functions({**driver_sources(), **wanted})


def _collect_kernels(layout: MemoryLayout, wanted: dict[str, str]) -> None:
    for fused in {id(each): each for each in layout.regions.values()}.values():
        task = fused.task
        wanted[task.name] = task.text
    wanted.update({task.name: task.text for task in layout.tasks.values()})
    if layout.body_layouts or layout.commits:
        copy = copy_task(0)
        wanted[copy.name] = copy.text
    for inner in layout.body_layouts.values():
        for _, body in inner.parts:
            _collect_kernels(body, wanted)


def out_kernel(
    op: Op,
    xp: Any,
    inputs: Sequence[TensorSpec],
    attrs: Mapping[str, Any],
    plain: bool,
    kept: KeptLayouts | None = None,
) -> Callable[..., None]:
    """Return an op's kernel as a function (out, *arrays).

    Args:
        kept: where the kernel keeps the layout of its weights, if its op declares one.
        plain: let the kernel allocate its result, which is then copied to `out`.
    """
    into = op.into_for(inputs)
    if into is not None and not op.random and not plain:
        if kept is not None:
            attrs = {**attrs, "kept": kept}
        return partial(into, xp, **attrs) if attrs else partial(into, xp)

    users = owner_module(op) is not None

    def run(out: Any, *arrays: Any, step: int = 0) -> None:
        results = op.run(xp, arrays, attrs, step, plain=plain)
        outs = out if isinstance(out, tuple) else (out,)
        for buffer, result in zip(outs, results, strict=True):
            # Without this check a smaller result of a user's kernel would be broadcast.
            if users and xp.shape(result) != buffer.shape:
                raise OpError(
                    f"its kernel returned {_describe_array(result)}, expected "
                    f"{_describe_array(buffer)}"
                )
            xp.copyto(buffer, result)

    return run


def _describe_array(array: Any) -> str:
    return f"{getattr(array, 'dtype', type(array).__name__)}{getattr(array, 'shape', '')}"


def annotate_error(
    error: BaseException, node: Node | None, layout: MemoryLayout, partition: Partition
) -> Exception:
    """Return an error that names the failed node, or the error itself if it already explains.

    A graphflow error raised by a user's function in a graph becomes an OpError: it is no error of
    this session.
    """
    kind: type[OpError] = OpError
    if isinstance(error, CheckError | DeviceOutOfMemory | TableFullError):
        kind = type(error)
    elif isinstance(error, MemoryError):
        kind = DeviceOutOfMemory
    elif isinstance(error, GraphflowError) and (node is None or not runs_user_code(node)):
        return error
    if isinstance(error, OpError) and error.explained:
        return error
    text = (
        error_text(error)
        if isinstance(error, OpError)
        else f"{type(error).__name__}: {error_text(error)}"
    )
    if node is None:
        return kind(f"a step failed on {partition.device}: {text}")
    if isinstance(error, MemoryError) and hasattr(error, "shape") and hasattr(error, "dtype"):
        size = math.prod(error.shape) * error.dtype.itemsize
        text = f"{size:,} bytes cannot be allocated ({error})"
    shapes = ", ".join(str(layout.specs[t]) for t in node.inputs)
    whole = kind(
        f"{node.op.name} {partition.graph.names[node]!r} (made at {node.location}) failed on "
        f"{partition.device}: {text}; its inputs are [{shapes}]"
    )
    whole.explained = True
    return whole


def out_of_memory_error(
    error: DeviceOutOfMemory, layout: MemoryLayout, partition: Partition
) -> DeviceOutOfMemory:
    """Return the error of a program whose memory cannot be allocated; names its largest tensors."""
    kept = [t for t in layout.blocks if layout.roots[t] is t]
    largest = sorted(kept, key=lambda t: -nbytes(layout.specs[t]))[:3]
    named = ", ".join(
        f"{partition.graph.names[t.node]!r} of {nbytes(layout.specs[t]):,} bytes (made at "
        f"{t.node.location})"
        for t in largest
    )
    return DeviceOutOfMemory(
        f"the program of {partition.device} does not fit in its memory: {error}"
        + (f"; its largest tensors are {named}" if named else "")
    )


def body_results(
    node: Node,
    layout: MemoryLayout,
    own: Any,
    outs: Sequence[Any],
    copyto: Callable[[Any, Any], None],
) -> list[BodyResults]:
    """Return the results of each body of a node.

    Args:
        own: the memory of the node's bodies.
        outs: the arrays of the node's outputs.
    """
    inner, states = layout.body_layouts[node], None
    initial: tuple[int, ...] = ()
    if node.op.name in LOOP_OPS:
        before, after = loop_states(node)
        states = len(before)
        pairs = enumerate(zip(before, after, strict=True))
        initial = tuple(i for i, pair in pairs if not layout.share_buffer(*pair))
    return [
        BodyResults(
            tuple(outs[first : None if states is None else first + states]),
            copies.direct,
            copies.swapped,
            tuple(
                own[at : at + nbytes(spec)].view(spec.dtype).reshape(spec.shape)
                for spec, at in copies.spares
            ),
            initial,
            copyto,
        )
        for first, copies in zip(inner.firsts, inner.copies, strict=True)
    ]


def never_cancelled(step: int, loop: str, done: int, of: str) -> None:
    """Never raise: the `check_cancelled` of nodes that are no loops."""


class ReceivedTensorCheck:
    """Checks that a received tensor has the shape and dtype that the program was compiled for.

    Raises:
        ProtocolError: it has not.
    """

    def __init__(self, recv: Node, spec: TensorSpec) -> None:
        self.recv = recv
        self.spec = spec
        self.shape = spec.shape
        self.dtype = spec.dtype

    def __call__(self, array: Any) -> Any:
        if array.shape != self.shape or array.dtype != self.dtype:
            ends = edges_of(self.recv)
            raise ProtocolError(
                f"edge {' or '.join(f'{e} from {end}' for e, end in ends.items())} brought "
                f"{array.dtype}{array.shape} for {self.recv.name.removeprefix('recv/')!r} (made at "
                f"{self.recv.location}), which is {self.spec}; do all workers run the same code?"
            )
        return array


class ReceivedRowsCheck(ReceivedTensorCheck):
    """Checks what a ragged edge brings, and puts zeros behind it up to the program's shape.

    The array that it returns is valid until it is called again.

    Args:
        short: whether readers take the array as it comes, without zeros behind it.

    Raises:
        ProtocolError: it has more rows than that, or rows of another shape or dtype.
    """

    def __init__(self, recv: Node, spec: TensorSpec, short: bool) -> None:
        super().__init__(recv, spec)
        self._short = short
        self._padded: Any = None
        self._used = 0  # rows of `_padded` that are not zeros

    def __call__(self, array: Any) -> Any:
        rows = array.shape[0] if array.ndim else -1
        if rows == self.shape[0] or not 0 <= rows < self.shape[0]:
            return super().__call__(array)
        if array.shape[1:] != self.shape[1:] or array.dtype != self.dtype:
            return super().__call__(array)
        if self._short:
            return array
        if self._padded is None:
            self._padded = np.zeros(self.shape, self.dtype, like=array)
        self._padded[:rows] = array
        self._padded[rows : self._used] = 0
        self._used = rows
        return self._padded


def received_tensor_check(recv: Node, spec: TensorSpec, short: bool = False) -> ReceivedTensorCheck:
    """Return the check of what a receive brings.

    Args:
        short: whether readers of a ragged edge take an array with the rows in use only.
    """
    if recv.attrs.get("ragged", False):
        return ReceivedRowsCheck(recv, spec, short)
    return ReceivedTensorCheck(recv, spec)


class Reshaped:
    """Reshapes an array, for an op that is an alias of its input."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def __call__(self, array: Any) -> Any:
        return array.reshape(self.shape)

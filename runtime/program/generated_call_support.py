"""Lines: what the lines of programs call beside kernels, the same for all kinds of devices, and how
a line that fails is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from graphflow.errors import (
    CheckError,
    DeviceOutOfMemory,
    GraphflowError,
    OpError,
    ProtocolError,
    error_text,
)
from graphflow.ir.op import Node, Op, owner_module
from graphflow.ir.spec import TensorSpec, nbytes
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.jit.array_address import align_up
from graphflow.ops.kernels.jit.call_table_driver import copy_task, driver_sources
from graphflow.ops.kernels.jit.compiler import compiler
from graphflow.runtime.collectives.exchanges import DeviceCollective
from graphflow.runtime.collectives.rank_buffers import Collective
from graphflow.runtime.memory.memory_layout import BodyLayout, MemoryLayout
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.partitioning.user_code_check import runs_user_code
from graphflow.runtime.program.body_loops import LoopBuffers
from graphflow.runtime.transport.shared_memory import SharedMemorySegment

LOOP_OPS = ("scan", "while_loop")


class EdgeChannel(Protocol):
    """Where a program's cut edges lead."""

    def send(self, step: int, edge: int, target: str, array: Any) -> None: ...

    def recv(self, step: int, edge: int) -> Any: ...

    def grant_credit(self, step: int, edge: int, portion: int) -> None:
        """Tell who sends over an edge in a loop that this portion of its tensors was received."""

    def wait_for_credit(self, step: int, edge: int, portion: int, target: str) -> None:
        """Wait until that was told."""

    def join_collective(self, what: Collective, name: str) -> DeviceCollective:
        """The part of this device in an exchange."""

    def shared_memory(self, nbytes: int) -> Any:
        """Memory that other processes of this host can reach; None where there is none."""

    def register_buffers(self, segment: SharedMemorySegment) -> None:
        """Where the program's buffers are, if others can reach them."""

    def forget_agreements(self) -> None:
        """Let go of what was agreed with others: it is agreed anew when the program runs again."""

    def close(self) -> None:
        """Let go of all of that: the program does not run again."""

    def check_cancelled(self, step: int, loop: str, done: int, of: str) -> None:
        """Raise if the step was given up; `loop` has done so many iterations (of so many)."""


def compile_kernels(layout: MemoryLayout) -> None:
    """Compile all kernels of a program and its bodies that are missing, together."""
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
    op: Op, xp: Any, inputs: Sequence[TensorSpec], attrs: Mapping[str, Any], plain: bool
) -> Callable[..., None]:
    """The kernel as a function (out, *arrays); `plain`: by way of a result of its own."""
    into = op.into_for(inputs)
    if into is not None and not op.random and not plain:
        return partial(into, xp, **attrs) if attrs else partial(into, xp)

    users = owner_module(op) is not None

    def run(out: Any, *arrays: Any, step: int = 0) -> None:
        results = op.run(xp, arrays, attrs, step, plain=plain)
        outs = out if isinstance(out, tuple) else (out,)
        for buffer, result in zip(outs, results, strict=True):
            if users and xp.shape(result) != buffer.shape:  # else it would be repeated
                raise OpError(
                    f"its kernel gave {_describe_array(result)} for {_describe_array(buffer)}"
                )
            xp.copyto(buffer, result)

    return run


def _describe_array(array: Any) -> str:
    return f"{getattr(array, 'dtype', type(array).__name__)}{getattr(array, 'shape', '')}"


def annotate_error(
    error: BaseException, node: Node | None, layout: MemoryLayout, partition: Partition
) -> Exception:
    """An error with the node that failed, unless it says already what went wrong. What a user's own
    code raises is always an op's: an error of graphflow's in it is none of this session's."""
    kind: type[OpError] = OpError
    if isinstance(error, CheckError | DeviceOutOfMemory):
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
        text = f"{math.prod(error.shape) * error.dtype.itemsize:,} bytes cannot be had ({error})"
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
    """An error of a program whose memory cannot be had, with its largest tensors."""
    kept = [t for t in layout.blocks if layout.roots[t] is t]
    largest = sorted(kept, key=lambda t: -nbytes(layout.specs[t]))[:3]
    named = ", ".join(
        f"{partition.graph.names[t.node]!r} of {nbytes(layout.specs[t]):,} bytes (made at "
        f"{t.node.location})"
        for t in largest
    )
    return DeviceOutOfMemory(
        f"the program of {partition.device} cannot begin: {error}"
        + (f"; its largest tensors are {named}" if named else "")
    )


def loop_buffers(inner: BodyLayout, own: Any) -> LoopBuffers:
    """The two sets of buffers of what a loop carries, in the memory of its node."""
    here, there = (
        tuple(
            own[at : at + nbytes(spec)].view(spec.dtype).reshape(spec.shape)
            for spec, place in inner.loop_state
            for at in [place + which * align_up(nbytes(spec))]
        )
        for which in range(2)
    )
    return LoopBuffers(here, there)


def never_cancelled(step: int, loop: str, done: int, of: str) -> None:
    """For what is no loop."""


class ReceivedTensorCheck:
    """A tensor that came over an edge, checked to be what the program was compiled for.

    Raises:
        ProtocolError: it is another one.
    """

    def __init__(self, recv: Node, spec: TensorSpec) -> None:
        self.recv = recv
        self.spec = spec
        self.shape = spec.shape
        self.dtype = spec.dtype

    def __call__(self, array: Any) -> Any:
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ProtocolError(
                f"edge {self.recv.attrs['edge']} from {self.recv.attrs['source']} brought "
                f"{array.dtype}{array.shape} for {self.recv.name.removeprefix('recv/')!r} (made at "
                f"{self.recv.location}), which is {self.spec}; do all workers run the same code?"
            )
        return array


class Reshaped:
    """An alias: the input's memory under another shape."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def __call__(self, array: Any) -> Any:
        return array.reshape(self.shape)

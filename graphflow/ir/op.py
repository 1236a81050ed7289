"""Op: everything about one operation in one block; and the way to all that building shares.

Applying an op makes a `Node`, which refers to its inputs and remembers the user's line; a node's
outputs are `Tensor`s, which carry Python's operators. The rest of the package finds this family of
types, the scopes in which nodes are built and the registry here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from graphflow.base.argument_checks import validate_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.source_location import (
    Location,
    error_location,
    is_own,
    user_location,
    with_location,
)
from graphflow.errors import ArgumentError, GraphError
from graphflow.ir.half_precision import has_half, round_to_specs, upcast_half, upcast_into
from graphflow.ir.node import Node, make_node, next_serial
from graphflow.ir.op_declaration import Cost, Rows, Sample, Sharding, sample
from graphflow.ir.op_help import OpDoc
from graphflow.ir.registry import FUNCTIONS, REGISTRY, function
from graphflow.ir.scopes import (
    Autocast,
    NameScope,
    RandomStreams,
    autocast,
    current_prefix,
    current_scope,
    derivative_scope,
    device,
    name_scope,
    next_stream,
    origin_scope,
    prefix_of,
    prefix_scope,
    replacement_scope,
    seed_scope,
    source_scope,
)
from graphflow.ir.spec import TensorSpec
from graphflow.ir.tensor import DEFAULT_DTYPES, Tensor, as_tensor, autocast_inputs, promote_inputs


@dataclass(frozen=True, eq=False)
class Op:
    """One operation, declared in one block.

    Args:
        infer: (*specs, **attrs) -> a TensorSpec, or a tuple of them; may `equate` sizes; raises
            ShapeError or DTypeError.
        kernel: (xp, *arrays, **attrs) -> array(s); xp is numpy or cupy; never changes its inputs.
        into: (xp, out, *arrays, **attrs): the same bits, written to `out`, which is contiguous (a
            tuple for several outputs).
        expr: (xp, *scalars) -> the value of one element; for elementwise ops, instead of a kernel.
            With `rows`: (xp, *values), where xp has sum, mean, max, min, prod, any and all over the
            op's axes, which stay with size 1 (see ops/kernels/fusion/row_ops.py).
        rows: (*shapes, **attrs) -> `Rows`: over which axes `expr` reduces, and how it sees inputs.
        refuse: (xp, *arrays, **attrs), which raises for values that the op does not take; programs
            call it before a generated kernel, and on a GPU before any, with the specs of floats
            for these.
        native: (*specs, **attrs) -> the generated kernel of the same bits for inputs of these sizes
            on a cpu, a `kernels.native.Task`; None where there is none.
        ufunc: the name in xp of the ufunc that is the whole op.
        vjp: (g, y, *inputs, **attrs) -> one cotangent (or None) for each input; builds nodes.
        joint: of collectives, whose nodes differ in `rank` only: (nodes, gs) -> one cotangent for
            each input, of all ranks together; None where each rank's vjp is to be taken.
        jvp: (tangents, y, *inputs, **attrs) -> the tangent(s) of the output(s), where that is
            cheaper than what follows from vjp; a tangent is None where it is zero.
        batch: (op, inputs, batched, **attrs) -> the outputs for inputs that have a new first axis
            where `batched` says so (one at least); it leads each output, too. See ops/batching.py.
            Elementwise ops need none.
        sharding: (*specs, **attrs) -> `Sharding`, or just its equation: how it is cut over devices.
            Elementwise ops need none; others without one get their inputs whole.
        cost: (*specs, **attrs) -> Cost; default: one flop an output element.
        samples: calls for the tests over the registry.
        promotes: its inputs are converted to one dtype; Python scalars take the tensors'.
        elementwise: an element of the output depends on the same element of the inputs only, so
            that `out` may be an input's buffer.
        in_place: `out` may be input 0's buffer; then `into` writes only what changes, and raises
            nothing any more.
        alias: the output is input 0's memory under another shape.
        pure: it may be merged, folded and run again. False: state, randomness, side effects.
        random: the kernel takes `step=`, the session's step number.
        halves: its kernel takes float16 and bfloat16 as they are, since it only moves numbers, or
            runs a body; others get float32, and their results are rounded (see half_precision.py).
        autocast: under `gf.autocast`, "low" takes its float32 inputs in 16 bits, "high" its 16-bit
            inputs in float32; None: inputs as they come.
        device_kinds: on which it has a kernel.
        doc: what it computes, in words: the first line of its `help`.
    """

    name: str
    infer: Callable[..., TensorSpec | tuple[TensorSpec, ...]]
    kernel: Callable[..., Any] | None = None
    into: Callable[..., None] | None = None
    expr: Callable[..., Any] | None = None
    rows: Callable[..., Rows] | None = None
    refuse: Callable[..., None] | None = None
    native: Callable[..., Any] | None = None
    ufunc: str | None = None
    vjp: Callable[..., Sequence[Tensor | None]] | None = None
    joint: Callable[..., Sequence[Tensor] | None] | None = None
    jvp: Callable[..., Any] | None = None
    batch: Callable[..., Any] | None = None
    sharding: Callable[..., Any] | None = None
    cost: Callable[..., Cost] | None = None
    samples: Sequence[Sample] = ()
    promotes: bool = False
    elementwise: bool = False
    in_place: bool = False
    alias: bool = False
    pure: bool = True
    random: bool = False
    halves: bool = False
    autocast: Literal["low", "high"] | None = None
    device_kinds: tuple[str, ...] = ("cpu", "gpu")
    doc: str = ""

    def __call__(self, *inputs: Any, name: str | None = None, **attrs: Any) -> Any:
        """Apply to tensors (or what converts to them): a Tensor, or a tuple of them."""
        if self.arity not in (None, len(inputs)):
            raise ArgumentError(
                f"{self.name} at {user_location()}: takes {self.arity} "
                f"tensor{'s' * (self.arity != 1)}, not {len(inputs)}"
            )
        try:
            tensors = (
                promote_inputs(self.name, inputs)
                if self.promotes
                else tuple(map(as_tensor, inputs))
            )
            if self.autocast is not None:
                tensors = tuple(autocast_inputs(tensors, self.autocast))
        except GraphError as error:
            raise with_location(self.name, error) from None
        outputs = make_node(self, tensors, attrs, name).outputs
        return outputs[0] if len(outputs) == 1 else outputs

    @functools.cached_property
    def arity(self) -> int | None:
        """How many tensors it takes, as its samples show; None: any number."""
        counts = {len(sample.inputs) for sample in self.samples}
        return counts.pop() if len(counts) == 1 else None

    def run(
        self,
        xp: Any,
        arrays: Sequence[Any],
        attrs: Mapping[str, Any],
        step: int = 0,
        plain: bool = False,
    ) -> tuple[Any, ...]:
        """The outputs for concrete arrays, freshly made: the bits that a program gives.

        Args:
            plain: not by a generated kernel; the last bits of exp and its like may differ.
        """
        if not (self.halves or self.alias) and has_half(arrays):
            specs = self.infer(*(TensorSpec(a.shape, a.dtype) for a in arrays), **attrs)
            specs = (specs,) if isinstance(specs, TensorSpec) else specs
            return round_to_specs(self.run(xp, upcast_half(arrays), attrs, step, plain=True), specs)
        result = None
        if (self.elementwise or self.rows is not None) and not plain and _elementwise_runner:
            result = _elementwise_runner[0](self, xp, arrays, attrs)
        if result is not None:
            pass
        elif self.expr is not None and self.rows is None:
            result = self.expr(xp, *arrays, **attrs)
        elif self.kernel is None:
            raise GraphError(f"op {self.name!r} has no kernel: it is not computed by itself")
        elif self.random:
            result = self.kernel(xp, *arrays, step=step, **attrs)
        else:
            result = self.kernel(xp, *arrays, **attrs)
        return result if isinstance(result, tuple) else (result,)

    def writer(self, inputs: Sequence[TensorSpec]) -> Callable[..., None] | None:
        """`into` for inputs of these dtypes."""
        if self.into is None or self.halves or not has_half(inputs):
            return self.into
        return upcast_into(self.into)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __deepcopy__(self, memo: Any) -> Op:
        return self  # of each name there is one


Op.__doc__ = OpDoc(Op.__doc__)  # type: ignore[assignment]

_ElementwiseRunner = Callable[[Op, Any, Sequence[Any], Mapping[str, Any]], Any]
_elementwise_runner: list[_ElementwiseRunner] = []  # one, when the op families are there


def set_elementwise_runner(generated: _ElementwiseRunner) -> None:
    """Let a function (op, xp, arrays, attrs) compute elementwise ops where it gives a result."""
    _elementwise_runner[:] = [generated]


_OWNERS: dict[str, tuple[str, str]] = {}  # of users' ops: the module that registers it, and where


def register(op: Op) -> Op:
    """Enter an op into the registry; its name is its identity on the wire.

    Raises:
        ArgumentError: not an op.
        GraphError: the name is taken, by one of graphflow's ops or another of a user's.
    """
    if not isinstance(op, Op):
        raise ArgumentError(f"register_op at {user_location()}: give a gf.Op, not {op!r}")
    if op.name in REGISTRY:
        _, place = _OWNERS.get(op.name, ("", "graphflow itself"))
        raise GraphError(
            f"op {op.name!r} at {user_location()} is registered twice: there is one by {place}; "
            "choose another name, such as one that begins with your module's"
        )
    REGISTRY[op.name] = op
    caller = sys._getframe(1)
    if is_own(caller.f_code.co_filename, caller.f_globals):
        FUNCTIONS.setdefault(op.name, op)
    else:
        _OWNERS[op.name] = (str(caller.f_globals.get("__name__")), str(user_location()))
    return op


def owner_module(op: Op) -> str | None:
    """The module that registers an op of a user's; None for graphflow's own."""
    return _OWNERS.get(op.name, (None,))[0]


__all__ = [
    "DEFAULT_DTYPES", "FUNCTIONS", "REGISTRY", "Autocast", "Cost", "Location", "NameScope",
    "Node", "Op", "RandomStreams", "Rows", "Sample", "Sharding", "Tensor", "as_tensor",
    "autocast", "autocast_inputs", "current_prefix", "current_scope",
    "derivative_scope", "device", "error_location", "function", "make_node", "name_scope",
    "next_serial", "next_stream", "origin_scope", "owner_module", "prefix_of", "prefix_scope",
    "promote_inputs", "register", "replacement_scope", "sample", "seed_scope",
    "set_elementwise_runner", "source_scope", "user_location", "validate_arguments",
    "with_location",
]  # fmt: skip

"""Op: everything about one operation in one block; and the values that its declaration holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, NamedTuple

import numpy as np

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, GraphError
from graphflow.ir.declarations.half_precision import (
    Float32Runner,
    has_half,
    round_to_specs,
    upcast_half,
    upcast_into,
)
from graphflow.ir.declarations.op_help import OpDoc
from graphflow.ir.spec import Outer, Shape, Size, TensorSpec


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of one run of a node: floating point operations, and bytes moved to or from memory.

    Without `bytes`, a node moves its inputs and outputs once. If these bytes lie anywhere in larger
    arrays, such as some rows of a table, `spread` is the size of the arrays in bytes.
    """

    flops: Size
    bytes: Size | None = None
    spread: Size = 0


class Rows(NamedTuple):
    """The axes that an op reduces over, and how it views its inputs.

    Attributes:
        axes: the reduced axes; None for an op that only reads along rows.
        shapes: the shape in which the op views each input, with the same elements in the same
            order, right-aligned to `whole`.
        whole: the common shape, where the shapes of the inputs do not broadcast to it.
    """

    axes: tuple[int, ...] | None
    shapes: tuple[Shape, ...]
    whole: Shape | None = None


@dataclass(frozen=True)
class ShardExchange:
    """The exchange by which shards finish a computation that each began on its own piece.

    Attributes:
        letter: the letter of the equation along which the shards are cut, by one mesh axis.
        contribute: (op, start, *inputs, **attrs) -> (values that the shard keeps, values that it
            sends), both tuples of tensors; `start` is the index at which its piece begins.
        combine: (op, kept, received, **attrs) -> the outputs; `received` holds the values of each
            sender, in the order of the shards.
        senders: the shards that a shard hears from: those "before" it, "after" it, or "all".
    """

    letter: str
    contribute: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]
    combine: Callable[..., tuple[Any, ...]]
    senders: str


@dataclass(frozen=True)
class Sharding:
    """A rule that says how one application of an op may be cut into shards.

    The partitioner reads these rules (see ops/sharding/rules.py).

    Attributes:
        equation: a letter for each axis of each input and output, as in "ik,kj->ij". Axes of one
            letter are cut together. A letter that is missing on the right is reduced, so each
            shard computes a partial result. `.` marks an axis that must be whole, a capital letter
            an axis that only `expand` can cut.
        scale: elements for each element of the letter, by (tensor, axis), inputs first.
        outer: number of segments in which the axis repeats its letter's elements, or the lengths of
            these segments, by (tensor, axis).
        alternatives: further rules that hold, for axes that this one needs whole.
        ignores_start: `build` does not depend on where a piece begins.
        linear: sets of inputs; the op is linear in each set together, so partial sums may pass.
        kind: how partial results are combined: "sum", "max", "min", "prod", "any", "all", or
            "moments" (`ops/reductions/sharded_moments.py`).
        sizes: the attribute that holds the shape of the (first) output.
        build: (op, cut, *inputs, **attrs) -> the outputs of one shard, where applying the op to the
            pieces would give another result.
        windows: letters along which a shard needs more of an input than its own piece.
        windowed: the inputs of which a shard needs more; default: the first.
        needs: (letter, start, stop) of the output -> (start, stop) of the first input, or a list of
            such pairs, one for each windowed input. The difference is the halo.
        expand: (*inputs, **attrs) -> the outputs, by simpler ops, for capital letters.
        exchange: how shards along a letter finish together.
        view: the op only moves or renames numbers.
        apart: how results are combined ("mean", "sum") if a strategy lets shards compute along
            capital letters from their own pieces only.
    """

    equation: str
    scale: Mapping[tuple[int, int], Size] = field(default_factory=dict)
    linear: tuple[tuple[int, ...], ...] = ()
    kind: str = "sum"
    sizes: str | None = None
    build: Callable[..., Any] | None = None
    windows: str = ""
    windowed: tuple[int, ...] = (0,)
    needs: Callable[..., Any] | None = None
    expand: Callable[..., Any] | None = None
    view: bool = False
    apart: str | None = None
    outer: Mapping[tuple[int, int], Outer] = field(default_factory=dict)
    alternatives: tuple[Sharding, ...] = ()
    ignores_start: bool = False
    exchange: ShardExchange | None = None


@dataclass(frozen=True)
class Sample:
    """An example call of an op, for the tests over the whole registry.

    Attributes:
        inputs: the specs of the inputs.
        attrs: the attributes.
        low, high: bounds of random float inputs; keep them away from kinks and poles.
        classes: integer inputs are drawn from [0, classes).
        make: drawn arrays -> arrays that the op takes, of the same specs; for an op that fails on
            most random inputs, such as one that takes regular matrices only.
        fixed: float inputs without a gradient.
    """

    inputs: tuple[TensorSpec, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    low: float = -2.0
    high: float = 2.0
    classes: int = 3
    make: Callable[[list[Any]], list[Any]] | None = None
    fixed: tuple[int, ...] = ()


@checks_arguments(ArgumentError)
def sample(
    *inputs: TensorSpec,
    low: float = -2.0,
    high: float = 2.0,
    classes: int = 3,
    make: Callable[[list[Any]], list[Any]] | None = None,
    fixed: tuple[int, ...] = (),
    **attrs: Any,
) -> Sample:
    """Make a `Sample` in one line: `sample(spec("float32", (3, 4)), axis=1)`."""
    return Sample(inputs, attrs, low, high, classes, make, fixed)


@dataclass(frozen=True)
class WeightLayout:
    """The input of an op that its kernel on a CPU reads in another layout.

    Attributes:
        operand: index of the input.
        nbytes: (*specs, **attrs) -> bytes of its layout; 0 if the kernel reads it where it is.
    """

    operand: int
    nbytes: Callable[..., int]


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
            call it before a generated kernel. On a GPU they call it before every kernel, with
            specs in place of float arrays.
        bounds: (*specs, **attrs) -> (number of an input, low, high): `refuse` raises exactly if one
            of these integers is outside [low, high). A CPU's programs check that natively, beside
            a generated kernel that stays inside of its operands for any integers.
        records: where `into` has generated kernels, it consists of native calls, which a program
            records once and repeats (ops/kernels/jit/kernel_recording.py).
        layout: the input of which a CPU's kernel makes a layout, and its bytes. `into` then takes
            `kept=`, a place where the layout stays (`KeptLayouts`).
        native: (*specs, **attrs) -> the generated CPU kernel for inputs of these sizes, a
            `KernelTask` (ops/kernels/jit/compiler.py) with the same bits; None where there is none.
        ufunc: the name in xp of the ufunc that is the whole op.
        vjp: (g, y, *inputs, **attrs) -> one cotangent (or None) for each input; builds nodes.
        joint: for collectives, whose nodes differ in `rank` only: (nodes, gs) -> one cotangent for
            each input of all ranks; None if each rank's own vjp applies.
        jvp: (tangents, y, *inputs, **attrs) -> the tangent(s) of the output(s), where this is
            cheaper than the rule derived from vjp; None stands for a zero tangent. For nodes that
            it has no rule for it returns NotImplemented.
        batch: (op, inputs, batched, **attrs) -> the outputs, each with a new first axis.
            `batched` marks the inputs that have this axis, at least one. See ops/batching.py.
            Elementwise ops need no rule.
        sharding: (*specs, **attrs) -> how the op is cut over devices: a `Sharding`, or its
            equation. Elementwise ops need none. Others without one get their inputs whole.
        cost: (*specs, **attrs) -> Cost; default: one flop for each output element.
        rate: "product" if the flops run as fast as those of matrix products; "half_product" if GPU
            libraries compute them in 16 bits, too. None: as measured for this op or its kind.
        samples: example calls for the tests over the registry.
        promotes: convert all inputs to one dtype; Python scalars take that of the tensors.
        elementwise: an element of the output depends on the same element of the inputs only, so
            `out` may be an input's buffer.
        in_place: `out` may be input 0's buffer. `into` then writes only elements that change, after
            all checks that could raise.
        alias: the output is input 0's memory under another shape.
        counted: (number of inputs) -> for each input of which the op reads only the first rows, the
            input that is their number.
        leading: attrs -> the inputs whose first n rows, with all of the other inputs, make the
            first n rows of the outputs. `into` then takes views of these rows. None: no such
            inputs. Elementwise ops need none.
        pure: nodes may be merged, folded and run again. False for state, randomness and effects.
        random: the kernel takes `step=`, the session's step number.
        halves: the kernel takes float16 and bfloat16 as they are, since it only moves numbers or
            runs a body. Other kernels get float32, and their results are rounded (see
            half_precision.py).
        takes_half: (*arrays or specs, **attrs) -> whether a CPU's `into` and `kernel` take these
            16-bit floats as they are, compute in float32 and round once.
        autocast: under `gf.autocast`, "low" converts float32 inputs to 16 bits, "high" 16-bit
            inputs to float32; None converts nothing.
        device_kinds: the kinds of devices that have a kernel.
        doc: the first line of its `help`.
    """

    name: str
    infer: Callable[..., TensorSpec | tuple[TensorSpec, ...]]
    kernel: Callable[..., Any] | None = None
    into: Callable[..., None] | None = None
    expr: Callable[..., Any] | None = None
    rows: Callable[..., Rows] | None = None
    refuse: Callable[..., None] | None = None
    bounds: Callable[..., tuple[int, int, int]] | None = None
    native: Callable[..., Any] | None = None
    records: bool = False
    layout: WeightLayout | None = None
    ufunc: str | None = None
    vjp: Callable[..., Sequence[Any]] | None = None
    joint: Callable[..., Sequence[Any] | None] | None = None
    jvp: Callable[..., Any] | None = None
    batch: Callable[..., Any] | None = None
    sharding: Callable[..., Any] | None = None
    cost: Callable[..., Cost] | None = None
    rate: Literal["product", "half_product"] | None = None
    samples: Sequence[Sample] = ()
    promotes: bool = False
    elementwise: bool = False
    in_place: bool = False
    alias: bool = False
    counted: Callable[[int], Mapping[int, int]] | None = None
    leading: Callable[..., tuple[int, ...] | None] | None = None
    pure: bool = True
    random: bool = False
    halves: bool = False
    takes_half: Callable[..., bool] | None = None
    autocast: Literal["low", "high"] | None = None
    device_kinds: tuple[str, ...] = ("cpu", "gpu")
    doc: str = ""

    def __call__(self, *inputs: Any, name: str | None = None, **attrs: Any) -> Any:
        """Apply the op to tensors, or to values that convert: a Tensor, or a tuple of them."""
        return _hooks.node_builder(self, inputs, name, attrs)

    @functools.cached_property
    def arity(self) -> int | None:
        """The number of inputs, as the samples show; None if it varies."""
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
        """Compute new output arrays, with the bits that a program gives.

        Args:
            plain: use no generated kernel; the last bits of exp and similar functions may differ.
        """
        if has_half(arrays) and not self._takes_as_they_are(xp, arrays, attrs):
            may_generate = self.elementwise and not plain
            made = self._run_generated(xp, arrays, attrs) if may_generate else None
            if made is not None:
                return (made,)
            specs = self.infer(*(TensorSpec(a.shape, a.dtype) for a in arrays), **attrs)
            specs = (specs,) if isinstance(specs, TensorSpec) else specs
            return round_to_specs(self.run(xp, upcast_half(arrays), attrs, step, plain=True), specs)
        result = None
        if (self.elementwise or self.rows is not None) and not plain:
            result = self._run_generated(xp, arrays, attrs)
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

    def _run_generated(self, xp: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        """Run the generated kernel of an elementwise op or one over rows; None without one."""
        run = _hooks.elementwise_runner
        return None if run is None else run(self, xp, arrays, attrs)

    def into_for(self, inputs: Sequence[TensorSpec]) -> Callable[..., None] | None:
        """Return `into` for inputs of these dtypes; None if the op has none."""
        if self.into is None or self.halves or not has_half(inputs):
            return self.into
        return upcast_into(self.into, self.takes_half, _hooks.float32_runner)

    def _takes_as_they_are(self, xp: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> bool:
        """Return True if the kernel takes these 16-bit arrays without a conversion."""
        if self.halves or self.alias or self.takes_half is None:
            return self.halves or self.alias
        return xp is np and self.takes_half(*arrays, **attrs)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __deepcopy__(self, memo: Any) -> Op:
        return self  # the registry holds one op of each name


Op.__doc__ = OpDoc(Op.__doc__)  # type: ignore[assignment]

NodeBuilder = Callable[[Op, tuple[Any, ...], str | None, dict[str, Any]], Any]
ElementwiseRunner = Callable[[Op, Any, Sequence[Any], Mapping[str, Any]], Any]


class _Hooks:
    """Functions that modules above this one install, since they import it."""

    node_builder: NodeBuilder
    elementwise_runner: ElementwiseRunner | None = None
    float32_runner: Float32Runner | None = None


_hooks = _Hooks()


def set_node_builder(build: NodeBuilder) -> None:
    """Let a function (op, inputs, name, attrs) build the nodes of calls of ops."""
    _hooks.node_builder = build


def set_elementwise_runner(run: ElementwiseRunner) -> None:
    """Let a function (op, xp, arrays, attrs) compute elementwise ops where it gives a result."""
    _hooks.elementwise_runner = run


def set_float32_runner(run: Float32Runner) -> None:
    """Let a function (into, out, arrays, attrs) run float32 kernels on 16-bit arrays of CPUs."""
    _hooks.float32_runner = run

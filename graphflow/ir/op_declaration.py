"""Op: everything about one operation in one block; and the values that its declaration holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, NamedTuple

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, GraphError
from graphflow.ir.half_precision import has_half, round_to_specs, upcast_half, upcast_into
from graphflow.ir.op_help import OpDoc
from graphflow.ir.spec import Outer, Shape, Size, TensorSpec


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run of a node needs: floating point operations, and bytes moved (None: in + out)."""

    flops: Size
    bytes: Size | None = None


class Rows(NamedTuple):
    """How an op goes along rows: the axes that it reduces over, and the shape, right-aligned to
    that of the whole, in which it sees each input (the same elements in the same order).

    An op that reduces none (axes None) says what the whole is, if not what its inputs broadcast to.
    """

    axes: tuple[int, ...] | None
    shapes: tuple[Shape, ...]
    whole: Shape | None = None


@dataclass(frozen=True)
class Meeting:
    """What shards along a letter tell each other, when each has looked at its own piece.

    Attributes:
        letter: along which; cut along one axis of the mesh.
        tell: (op, start, *inputs, **attrs) -> (what the shard keeps, what it tells others), both
            tuples of tensors; `start` is where its piece begins.
        hear: (op, kept, heard, **attrs) -> the outputs; `heard` has what each shard told that is
            heard, in order.
        who: is heard: those "before", those "after", or "all".
    """

    letter: str
    tell: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]
    hear: Callable[..., tuple[Any, ...]]
    who: str


@dataclass(frozen=True)
class Sharding:
    """How one application of an op may be cut into shards (see ops/sharding/rules.py).

    Attributes:
        equation: for each input and output a letter for each of its axes, "ik,kj->ij". What has one
            letter is cut together; a letter missing on the right is reduced, so that each shard has
            a partial result. `.` is an axis that is needed whole; a capital is one that an `expand`
            is needed for.
        scale: of (tensor, axis), inputs first, that has so many elements for each of its letter's.
        outer: of (tensor, axis) that has its letter's elements so many times over, in rows; or in
            rows of such lengths.
        alternatives: other rules that hold as well, for axes that this one needs whole.
        placeless: `build` does not look at where a piece begins.
        linear: sets of inputs, together in each of which the op is linear: partial sums may pass.
        kind: how partial results are combined: "sum", "max", "min", "prod", "any", "all", or
            "moments" (`ops/reductions/sharded_moments.py`).
        sizes: the attribute that holds the shape of the (first) output.
        build: (op, cut, *inputs, **attrs) -> outputs of one shard, where the op itself will not do.
        windows: letters along which a shard needs more of the first input than its own piece.
        windowed: the inputs of which it needs more, if not the first only.
        needs: (letter, start, stop) of such a letter -> (start, stop) of the first input: a halo;
            or a list of such, one for each input.
        expand: (*inputs, **attrs) -> the outputs, by simpler ops, for letters that are capitals.
        meeting: for a letter along which shards finish together what each has begun.
        view: moves or renames numbers only.
        apart: how results of shards that each look at their own piece along capitals only are
            combined ("mean", "sum"), where a strategy asks for that.
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
    placeless: bool = False
    meeting: Meeting | None = None


@dataclass(frozen=True)
class Sample:
    """One example call of an op for the tests over the whole registry.

    `low` and `high` bound the random float inputs (keep away from kinks and poles); integer inputs
    are drawn from [0, `classes`). An op that fails on most such inputs (it takes regular matrices
    only, say) names a `make`: arrays drawn -> arrays it takes, of the same specs. `fixed` are float
    inputs that have no gradient.
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
    """A `Sample` in one line: `sample(spec("float32", (3, 4)), axis=1)`."""
    return Sample(inputs, attrs, low, high, classes, make, fixed)


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
    vjp: Callable[..., Sequence[Any]] | None = None
    joint: Callable[..., Sequence[Any] | None] | None = None
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
        return _installed.node_builder(self, inputs, name, attrs)

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
        run_elementwise = _installed.elementwise_runner
        if (self.elementwise or self.rows is not None) and not plain and run_elementwise:
            result = run_elementwise(self, xp, arrays, attrs)
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

NodeBuilder = Callable[[Op, tuple[Any, ...], str | None, dict[str, Any]], Any]
ElementwiseRunner = Callable[[Op, Any, Sequence[Any], Mapping[str, Any]], Any]


class _Installed:
    """Functions of modules that know ops, and which this module therefore cannot import."""

    node_builder: NodeBuilder
    elementwise_runner: ElementwiseRunner | None = None


_installed = _Installed()


def set_node_builder(build: NodeBuilder) -> None:
    """Let a function (op, inputs, name, attrs) build the nodes of calls of ops."""
    _installed.node_builder = build


def set_elementwise_runner(run: ElementwiseRunner) -> None:
    """Let a function (op, xp, arrays, attrs) compute elementwise ops where it gives a result."""
    _installed.elementwise_runner = run

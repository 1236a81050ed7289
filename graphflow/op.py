"""Op, Node and Tensor: one recursive family of types, and the registry of ops.

An `Op` declares everything about one operation in one block. Applying it makes a `Node`, which
refers to its inputs and remembers the user's line; a node's outputs are `Tensor`s, which carry
Python's operators. The operators look their function up by name in `FUNCTIONS`, so this module
knows no particular op.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import repeat
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np

from graphflow.device import DeviceName
from graphflow.errors import ArgumentError, DeviceError, DTypeError, GraphError, GraphflowError
from graphflow.half import any_half, rounded, widened, widening
from graphflow.opdoc import OpDoc
from graphflow.spec import (
    Dim,
    Equation,
    Shape,
    Size,
    TensorSpec,
    as_dtype,
    complex_dtype,
    is_half,
    is_inexact,
    kind,
    limits,
    promote,
    recorded_equations,
)

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_serial = itertools.count()
F = TypeVar("F", bound=Callable[..., Any])


class Location(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def user_location() -> Location:
    """The innermost line on the stack that is not graphflow's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_code.co_filename, frame.f_globals):
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno)


def _is_own(file: str, names: Mapping[str, Any]) -> bool:
    """Whether code is ours: from our files, or written for them (`__init__` of a dataclass)."""
    if file == "<string>":
        return str(names.get("__name__")).startswith("graphflow.")
    return file.startswith(_PACKAGE)


# Scopes: the only global state ----------------------------------------------------------------


@dataclass
class Streams:
    """Numbers the random streams that are drawn from one seed."""

    seed: int = 0
    count: int = 0

    def next(self) -> tuple[int, int]:
        self.count += 1
        return (self.seed, self.count - 1)


@dataclass(frozen=True, eq=False)
class Autocast:
    """The 16-bit dtype of a `gf.autocast` block, and the conversions made in it, each once."""

    dtype: np.dtype[Any]
    made: dict[tuple[Tensor, str, DeviceName], Tensor] = field(default_factory=dict)

    def cast(self, tensor: Tensor, to: str) -> Tensor:
        """float32 in 16 bits for "low", 16 bits in float32 for "high"; anything else as it is."""
        if tensor.dtype != np.float32 if to == "low" else not is_half(tensor.dtype):
            return tensor
        key = (tensor, to, _device_scope.get())
        if key not in self.made:
            wanted = self.dtype if to == "low" else np.dtype("float32")
            self.made[key] = FUNCTIONS["astype"](tensor, wanted)
        return self.made[key]


@dataclass(frozen=True)
class NameScope:
    """What nodes built in a block share: the prefix of their names, where they count as made, the
    source of their randomness, and how their inputs are converted."""

    prefix: str = ""
    location: Location | None = None
    origin: Node | None = None
    streams: Streams = field(default_factory=Streams)
    autocast: Autocast | None = None


_TOP = NameScope()
_ANYWHERE = DeviceName()
_name_scope: ContextVar[NameScope] = ContextVar("name_scope", default=_TOP)
_device_scope: ContextVar[DeviceName] = ContextVar("device_scope", default=_ANYWHERE)


def name_scope(name: str) -> AbstractContextManager[None]:
    """Prefix the names of nodes built in the block: `with gf.name_scope("tower"):`.

    Raises:
        ArgumentError: no name.
    """
    if not (isinstance(name, str) and name):
        raise ArgumentError(
            f"gf.name_scope at {user_location()}: a name is a str that is not empty, not {name!r}"
        )
    return _scope(prefix=f"{_name_scope.get().prefix}{name}/")


def current_prefix() -> str:
    """What the names of nodes built here begin with: "" or `outer/inner/`."""
    return _name_scope.get().prefix


def within(prefix: str) -> AbstractContextManager[None]:
    """Names of nodes built in the block begin with a prefix, whatever scope is open."""
    return _scope(prefix=prefix)


def device(name: str | DeviceName) -> AbstractContextManager[None]:
    """Pin nodes built in the block: `/worker:1/cpu:0`, or partial names such as `gpu`, `/worker:1`.

    An inner scope refines the outer one, part by part.

    Raises:
        DeviceError: the name is malformed.
    """
    if not isinstance(name, DeviceName):
        try:
            name = DeviceName.parse(name)
        except DeviceError as error:
            raise DeviceError(f"gf.device at {user_location()}: {error}") from None
    return _pinned(_device_scope.get().refined(name))


@contextmanager
def _pinned(device: DeviceName) -> Iterator[None]:
    token = _device_scope.set(device)
    try:
        yield
    finally:
        _device_scope.reset(token)


class made_by:
    """Nodes built in the block (gradients, updates) count as made at the line of `origin`, and
    stay near it, or on a `device`. Their dtypes follow from their inputs: autocasting ends here.

    Not a generator: every node that is differentiated opens one.
    """

    __slots__ = ("_device", "_origin", "_pin", "_prefix", "_scope")

    def __init__(
        self, origin: Node, prefix: str = "gradients/", device: DeviceName | None = None
    ) -> None:
        self._origin = origin
        self._prefix = prefix
        self._pin = origin.device if device is None else device

    def __enter__(self) -> None:
        origin, streams = self._origin, _name_scope.get().streams
        self._scope = _name_scope.set(NameScope(self._prefix, origin.location, origin, streams))
        self._device = _device_scope.set(self._pin)

    def __exit__(self, *raised: object) -> None:
        _device_scope.reset(self._device)
        _name_scope.reset(self._scope)


def read_from(name: str, location: Location) -> AbstractContextManager[None]:
    """Nodes built in the block are named `name/…` and count as made at `location`: a place in a
    file that describes a graph, rather than a line of the user's code."""
    return _scope(prefix=f"{_name_scope.get().prefix}{name}/", location=location)


@contextmanager
def _scope(**changes: Any) -> Iterator[None]:
    token = _name_scope.set(replace(_name_scope.get(), **changes))
    try:
        yield
    finally:
        _name_scope.reset(token)


def autocast(dtype: Any) -> AbstractContextManager[None]:
    """Compute products in 16 bits in the block: `with gf.autocast("bfloat16"):`.

    matmul, convolutions and attention take their float32 inputs in the given dtype (and still sum
    in float32); reductions, softmax, losses and norms take theirs in float32; elementwise ops take
    what comes. Conversions are ops with a gradient, so gradients of float32 variables are float32.
    A variable is converted once a block. None ends autocasting for a block inside another.

    Args:
        dtype: "bfloat16", "float16" (see `gf.optim.LossScaling`) or None.

    Raises:
        DTypeError: another dtype.
    """
    wanted = None
    if dtype is not None:
        with located("gf.autocast"):
            wanted = as_dtype(dtype)
            if not is_half(wanted):
                raise DTypeError(
                    f"autocasts to bfloat16 or float16, not {wanted}; use .astype for other dtypes"
                )
    return _scope(autocast=None if wanted is None else Autocast(wanted))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the streams of random nodes built in the block from `seed`, counted from 0."""
    with _scope(streams=Streams(seed)):
        yield


def next_stream() -> tuple[int, int]:
    """A stream (seed, number) that no other random node has."""
    return _name_scope.get().streams.next()


# Ops ------------------------------------------------------------------------------------------


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
class Sharding:
    """How one application of an op may be cut into shards (see ops/sharding.py).

    Attributes:
        equation: for each input and output a letter for each of its axes, "ik,kj->ij". What has one
            letter is cut together; a letter missing on the right is reduced, so that each shard has
            a partial result. `.` is an axis that is needed whole; a capital is one that an `expand`
            is needed for.
        scale: of (tensor, axis), inputs first, that has so many elements for each of its letter's.
        outer: of (tensor, axis) that has its letter's elements so many times over, in rows.
        alternatives: other rules that hold as well, for axes that this one needs whole.
        placeless: `build` does not look at where a piece begins.
        linear: sets of inputs, together in each of which the op is linear: partial sums may pass.
        kind: how partial results are combined: "sum", "max", "min", "prod", "any" or "all".
        sizes: the attribute that holds the shape of the (first) output.
        build: (op, cut, *inputs, **attrs) -> outputs of one shard, where the op itself will not do.
        windows: letters along which a shard needs more of the first input than its own piece.
        windowed: the inputs of which it needs more, if not the first only.
        needs: (letter, start, stop) of such a letter -> (start, stop) of the first input: a halo.
        expand: (*inputs, **attrs) -> the outputs, by simpler ops, for letters that are capitals.
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
    outer: Mapping[tuple[int, int], Size] = field(default_factory=dict)
    alternatives: tuple[Sharding, ...] = ()
    placeless: bool = False


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
            op's axes, which stay with size 1 (see kernels/rowwise.py).
        rows: (*shapes, **attrs) -> `Rows`: over which axes `expr` reduces, and how it sees inputs.
        refuse: (xp, *arrays, **attrs), which raises for values that the op does not take; programs
            call it before a generated kernel, with the specs of floats for these.
        native: (*specs, **attrs) -> the generated kernel of the same bits for inputs of these sizes
            on a cpu, a `kernels.native.Task`; None where there is none.
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
        doc: what it computes, in words: the first line of its `help`.
        halves: its kernel takes float16 and bfloat16 as they are, since it only moves numbers, or
            runs a body; others get float32, and their results are rounded (see half.py).
        autocast: under `gf.autocast`, "low" takes its float32 inputs in 16 bits, "high" its 16-bit
            inputs in float32; None: inputs as they come.
    """

    name: str
    infer: Callable[..., TensorSpec | tuple[TensorSpec, ...]]
    kernel: Callable[..., Any] | None = None
    into: Callable[..., None] | None = None
    expr: Callable[..., Any] | None = None
    rows: Callable[..., Rows] | None = None
    refuse: Callable[..., None] | None = None
    native: Callable[..., Any] | None = None
    ufunc: str | None = None  # the name in xp of the ufunc that is the whole op
    vjp: Callable[..., Sequence[Tensor | None]] | None = None
    joint: Callable[..., Sequence[Tensor] | None] | None = None
    jvp: Callable[..., Any] | None = None
    batch: Callable[..., Any] | None = None
    sharding: Callable[..., Any] | None = None
    cost: Callable[..., Cost] | None = None
    samples: Sequence[Sample] = ()
    promotes: bool = False  # inputs are converted to one dtype; Python scalars take the tensors'
    elementwise: bool = False  # out[i] depends on in[i] only: `out` may be an input's buffer
    # `out` may be input 0's buffer: then only what changes is written, and there is no error left
    in_place: bool = False
    alias: bool = False  # the output is input 0's memory under another shape
    pure: bool = True  # may be merged, folded and run again; False: state, randomness, side effects
    random: bool = False  # the kernel takes `step=`, the session's step number
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
                promoted(self.name, inputs) if self.promotes else tuple(map(as_tensor, inputs))
            )
            tensors = tuple(autocasted(tensors, self.autocast))
        except GraphError as error:
            raise told(self.name, error) from None
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
        if not (self.halves or self.alias) and any_half(arrays):
            specs = self.infer(*(TensorSpec(a.shape, a.dtype) for a in arrays), **attrs)
            specs = (specs,) if isinstance(specs, TensorSpec) else specs
            return rounded(self.run(xp, widened(arrays), attrs, step, plain=True), specs)
        result = None
        if (self.elementwise or self.rows is not None) and not plain and _generated:
            result = _generated[0](self, xp, arrays, attrs)
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
        if self.into is None or self.halves or not any_half(inputs):
            return self.into
        return widening(self.into)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


Op.__doc__ = OpDoc(Op.__doc__)  # type: ignore[assignment]

_Generated = Callable[[Op, Any, Sequence[Any], Mapping[str, Any]], Any]
_generated: list[_Generated] = []  # one, when the op families are there


def run_elementwise_by(generated: _Generated) -> None:
    """Let a function (op, xp, arrays, attrs) compute elementwise ops where it gives a result."""
    _generated[:] = [generated]


REGISTRY: dict[str, Op] = {}
FUNCTIONS: dict[str, Callable[..., Any]] = {}
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
    if _is_own(caller.f_code.co_filename, caller.f_globals):
        FUNCTIONS.setdefault(op.name, op)
    else:
        _OWNERS[op.name] = (str(caller.f_globals.get("__name__")), str(user_location()))
    return op


def owner(op: Op) -> str | None:
    """The module that registers an op of a user's; None for graphflow's own."""
    return _OWNERS.get(op.name, (None,))[0]


def function(f: F) -> F:
    """Enter a public function under its own name, for Tensor's operators and methods to find; its
    arguments are checked, and its errors name it and the user's line."""
    entered = FUNCTIONS[f.__name__] = checked(f, f.__name__)
    return cast(F, entered)


def checked(f: Callable[..., Any], what: str) -> Callable[..., Any]:
    """A function whose flags, numbers, words and functions are what its annotations say, and whose
    errors say that they are of `what`, on the user's line."""
    plain = _plain_arguments(f)

    @functools.wraps(f)
    def entered(*args: Any, **kwargs: Any) -> Any:
        try:
            for place, name, (wanted, fits) in plain:
                value = args[place] if place < len(args) else kwargs.get(name, _ABSENT)
                if value is not _ABSENT and not fits(value):
                    raise ArgumentError(f"{name} is {wanted}, not {value!r}")
            return f(*args, **kwargs)
        except GraphError as error:
            raise told(what, error) from None
        except MemoryError as error:  # numbers that it puts into the graph
            too_large = ArgumentError(f"{error} while the graph is built; give smaller sizes")
            raise told(what, too_large) from None

    return entered


_ABSENT = object()


def _is_flag(value: Any) -> bool:
    return isinstance(value, int | np.bool_) and value in (0, 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool | complex)


_PLAIN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True or False", _is_flag),
    "float": ("a number", _is_number),
    "float | None": ("a number or None", lambda value: value is None or _is_number(value)),
    "Callable[[Tensor], Tensor]": ("a function of a tensor", callable),
    "str": ("a str", lambda value: isinstance(value, str)),
    "str | None": ("a str or None", lambda value: value is None or isinstance(value, str)),
}


def _plain_arguments(f: Callable[..., Any]) -> list[tuple[int, str, Any]]:
    """Place, name and check of a function's arguments that are annotated as flags, numbers and
    words: what else is given for one would fail far from where it is said, or pass for true."""
    code = getattr(f, "__code__", None)
    if code is None:
        return []
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [
        (i if i < code.co_argcount else sys.maxsize, name, _PLAIN[annotation])
        for i, name in enumerate(named)
        if (annotation := f.__annotations__.get(name)) in _PLAIN
    ]


def told(what: str, error: GraphError) -> GraphError:
    """An error that says what failed and on which line of the user's, once."""
    at = f" at {user_location()}: "
    return error if at in str(error) else type(error)(f"{what}{at}{error}")


class located:
    """Name what is built and the user's line in errors of arguments checked before a node is made.

    Not a generator: the frames of contextlib would be taken for the user's.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, GraphError):
            raise told(self.what, error) from None


# Nodes ----------------------------------------------------------------------------------------


class Node:
    """One application of an op. Never changed; compared by identity."""

    __slots__ = (
        "attrs", "device", "equations", "inputs", "location", "name", "op", "origin", "outputs",
        "serial", "specs", "turn",
    )  # fmt: skip

    def __init__(
        self,
        op: Op,
        inputs: tuple[Tensor, ...],
        attrs: Mapping[str, Any],
        specs: tuple[TensorSpec, ...],
        *,
        name: str,
        device: DeviceName,
        location: Location,
        origin: Node | None = None,
        equations: tuple[Equation, ...] = (),
        turn: int = -1,
    ) -> None:
        self.op = op
        self.inputs = inputs
        self.attrs = attrs
        self.specs = specs
        self.name = name
        self.device = device
        self.location = location
        self.origin = origin
        self.equations = equations
        self.turn = turn  # a device runs nodes of a lower one first; -1: as soon as it can
        self.serial = next(_serial)
        self.outputs: tuple[Tensor, ...] = (
            (Tensor(self, 0),)
            if len(specs) == 1
            else tuple(map(Tensor, repeat(self), range(len(specs))))
        )

    def with_inputs(
        self,
        inputs: tuple[Tensor, ...],
        attrs: Mapping[str, Any] | None = None,
        specs: tuple[TensorSpec, ...] | None = None,
        turn: int | None = None,
    ) -> Node:
        """The same application to other inputs of the same specs, or with other attributes."""
        return Node(
            self.op,
            inputs,
            self.attrs if attrs is None else attrs,
            self.specs if specs is None else specs,
            name=self.name,
            device=self.device,
            location=self.location,
            origin=self.origin,
            equations=self.equations,
            turn=self.turn if turn is None else turn,
        )

    def __repr__(self) -> str:
        return f"<{self.op.name} {self.name!r} at {self.location}>"


def next_serial() -> int:
    """A number that no node has: nodes built before have lower ones, those built after, higher."""
    return next(_serial)


def make_node(
    op: Op, inputs: tuple[Tensor, ...], attrs: Mapping[str, Any], name: str | None = None
) -> Node:
    """Check an application of an op by its shape rule and build the node.

    Raises:
        ShapeError, DTypeError, ArgumentError: the rule refuses; the message names op and line.
    """
    scope = _name_scope.get()
    location = scope.location or user_location()
    if name is not None and not (isinstance(name, str) and name):
        raise ArgumentError(
            f"{op.name} at {location}: name is a str that is not empty, not {name!r}"
        )
    try:
        with recorded_equations() as equations:
            specs = op.infer(*[t.node.specs[t.index] for t in inputs], **attrs)
    except GraphflowError as error:
        raise type(error)(f"{op.name} at {location}: {error}") from None
    except TypeError:
        _require_attributes(op, inputs, attrs, location)
        raise
    return Node(
        op,
        inputs,
        attrs,
        (specs,) if isinstance(specs, TensorSpec) else specs,
        name=scope.prefix + (name or op.name),
        device=_device_scope.get(),
        location=location,
        origin=scope.origin,
        equations=tuple(equations),
    )


def _require_attributes(
    op: Op, inputs: tuple[Tensor, ...], attrs: Mapping[str, Any], location: Location
) -> None:
    """Refuse attributes that the op does not have, or say which it lacks."""
    try:
        inspect.signature(op.infer).bind(*inputs, **attrs)
    except TypeError as error:
        raise ArgumentError(f"{op.name} at {location}: {error}") from None


# Tensors --------------------------------------------------------------------------------------


def _binary(name: str, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def operator(self: Tensor, other: Any) -> Any:
        if not _convertible(other):
            return NotImplemented
        return FUNCTIONS[name](other, self) if swapped else FUNCTIONS[name](self, other)

    return operator


def _unary(name: str) -> Callable[[Any], Any]:
    def operator(self: Tensor) -> Any:
        return FUNCTIONS[name](self)

    return operator


def _method(name: str) -> Callable[..., Any]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[name](self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"`gf.{name}(self, ...)`."
    return method


class Tensor:
    """The output number `index` of a node: symbolic, typed, usable with Python's operators.

    `==` builds a node, so tensors are told apart by `is`; as dictionary keys they go by identity.
    """

    __slots__ = ("__weakref__", "index", "node")
    __array_ufunc__ = None  # numpy arrays leave mixed operators to us

    def __init__(self, node: Node, index: int) -> None:
        self.node = node
        self.index = index

    @property
    def spec(self) -> TensorSpec:
        return self.node.specs[self.index]

    @property
    def shape(self) -> Shape:
        return self.node.specs[self.index].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.node.specs[self.index].dtype

    @property
    def ndim(self) -> int:
        return len(self.spec.shape)

    @property
    def size(self) -> Size:
        return self.spec.size

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def real(self) -> Tensor:
        """The real part; a real tensor itself."""
        part: Tensor = FUNCTIONS["real"](self)
        return part

    @property
    def imag(self) -> Tensor:
        """The imaginary part; zeros for a real tensor."""
        part: Tensor = FUNCTIONS["imag"](self)
        return part

    @property
    def T(self) -> Tensor:
        return self if self.ndim < 2 else self.mT

    @property
    def mT(self) -> Tensor:
        transposed: Tensor = FUNCTIONS["matrix_transpose"](self)
        return transposed

    def __repr__(self) -> str:
        return f"<Tensor {self.name!r} {self.spec} at {self.node.location}>"

    __hash__ = object.__hash__

    def _no_value(self, what: str) -> GraphError:
        return GraphError(
            f"{self.name} (made at {self.node.location}) has no {what} while the graph is built: "
            "it is symbolic; use gf.where for choices, Session.run for values"
        )

    def __bool__(self) -> bool:
        raise self._no_value("truth value")

    def __int__(self) -> int:
        raise self._no_value("integer value")

    __index__ = __int__

    def __float__(self) -> float:
        raise self._no_value("float value")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._no_value("array")

    def __len__(self) -> int:
        if not self.ndim or not isinstance(self.shape[0], int):
            raise self._no_value("length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self[i] for i in range(len(self))])

    __add__, __radd__ = _binary("add"), _binary("add", True)
    __sub__, __rsub__ = _binary("subtract"), _binary("subtract", True)
    __mul__, __rmul__ = _binary("multiply"), _binary("multiply", True)
    __truediv__, __rtruediv__ = _binary("divide"), _binary("divide", True)
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _binary("floor_divide", True)
    __mod__, __rmod__ = _binary("remainder"), _binary("remainder", True)
    __pow__, __rpow__ = _binary("pow"), _binary("pow", True)
    __matmul__, __rmatmul__ = _binary("matmul"), _binary("matmul", True)
    __lt__, __le__ = _binary("less"), _binary("less_equal")
    __gt__, __ge__ = _binary("greater"), _binary("greater_equal")
    __eq__ = _binary("equal")
    __ne__ = _binary("not_equal")
    __and__, __rand__ = _binary("bitwise_and"), _binary("bitwise_and", True)
    __or__, __ror__ = _binary("bitwise_or"), _binary("bitwise_or", True)
    __xor__, __rxor__ = _binary("bitwise_xor"), _binary("bitwise_xor", True)
    __lshift__ = _binary("bitwise_left_shift")
    __rlshift__ = _binary("bitwise_left_shift", True)
    __rshift__ = _binary("bitwise_right_shift")
    __rrshift__ = _binary("bitwise_right_shift", True)
    __invert__ = _unary("bitwise_invert")
    __neg__, __pos__, __abs__ = _unary("negative"), _unary("positive"), _unary("abs")
    __getitem__ = _method("getitem")

    sum, mean, max, min, prod = map(_method, ("sum", "mean", "max", "min", "prod"))
    var, std, any, all = map(_method, ("var", "std", "any", "all"))
    argmax, argmin, conj = _method("argmax"), _method("argmin"), _method("conj")
    astype, reshape, squeeze = _method("astype"), _method("reshape"), _method("squeeze")


def _convertible(value: Any) -> bool:
    return isinstance(
        value, Tensor | bool | int | float | complex | np.ndarray | np.generic | list | tuple | Dim
    )


# What plain Python numbers and lists become, by the dtype that numpy gives them.
PLAIN = {"float64": "float32", "complex128": "complex64"}
_PLAIN_DTYPES = {np.dtype(given): np.dtype(taken) for given, taken in PLAIN.items()}


def as_tensor(value: Any, dtype: Any = None) -> Tensor:
    """A tensor as it is; arrays, lists and Python scalars as constants (lists of floats become
    float32, of complex numbers complex64); a symbolic size as the number that it is (int64).

    Raises:
        DTypeError: the value has no supported dtype.
    """
    if isinstance(value, Tensor):
        return value
    if not _convertible(value):
        raise DTypeError(f"cannot make a tensor of {type(value).__name__} {value!r}")
    if isinstance(value, Dim):
        size: Tensor = REGISTRY["size_of"](size=value, dtype=as_dtype(dtype or "int64").name)
        return size
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DTypeError(f"{value!r} is no regular array: {error}") from None
    if dtype is None and not isinstance(value, np.ndarray | np.generic):
        dtype = _PLAIN_DTYPES.get(array.dtype)
    given = as_dtype(array.dtype)
    wanted = given if dtype is None else as_dtype(dtype)
    if wanted is given:
        array = array.astype(wanted)
    else:
        with np.errstate(over="ignore"):  # beyond the dtype is inf, as for any op
            array = array.astype(wanted)
    array.flags.writeable = False
    constant: Tensor = REGISTRY["constant"](value=array)
    return constant


def promoted(op_name: str, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Inputs converted to their common dtype; Python scalars are weak and take the tensors', a
    complex one the complex dtype of the floats'.

    Raises:
        DTypeError: kinds would mix, or a scalar does not fit.
    """
    try:
        strong: Sequence[Tensor] = [as_tensor(x) for x in inputs if type(x) not in _RANKS]
        if op_name in REGISTRY and _name_scope.get().autocast is not None:
            strong = autocasted(strong, REGISTRY[op_name].autocast)
        if not strong:
            strong = [as_tensor(max(inputs, key=lambda x: list(_RANKS).index(type(x))))]
        dtype = strong[0].dtype
        same = True
        for tensor in strong[1:]:
            if tensor.dtype is not dtype:
                same = False
                dtype = promote(dtype, tensor.dtype)
        if same and len(strong) == len(inputs):
            return tuple(strong)
        if kind(dtype) == "float" and any(type(x) is complex for x in inputs):
            dtype = complex_dtype(dtype)
        scalars = iter(strong)
        converted = (_weak(x, dtype) if _is_scalar(x) else next(scalars) for x in inputs)
        return tuple(t if t.dtype == dtype else FUNCTIONS["astype"](t, dtype) for t in converted)
    except DTypeError as error:
        raise told(op_name, error) from None


def autocasted(tensors: Sequence[Tensor], to: Literal["low", "high"] | None) -> Sequence[Tensor]:
    """Inputs in the dtypes in which a `gf.autocast` block computes what declares `to`."""
    scope = _name_scope.get().autocast
    if scope is None or to is None:
        return tensors
    return [scope.cast(t, to) for t in tensors]


def _is_scalar(value: Any) -> bool:
    """Whether a value is a Python scalar (np.float64 is a float, but keeps its dtype), or a size,
    which counts as one."""
    return type(value) in _RANKS


_RANKS = {bool: "bool", int: "int", Dim: "int", float: "float", complex: "complex"}


def _weak(scalar: Any, dtype: np.dtype[Any]) -> Tensor:
    rank = ("bool", "int", "float", "complex")
    scalar_kind = _RANKS[type(scalar)]
    if rank.index(scalar_kind) > rank.index(kind(dtype)) or (
        not is_inexact(dtype) and scalar_kind != kind(dtype)
    ):
        raise DTypeError(
            f"Python scalar {scalar!r} does not fit {dtype}; convert the tensor with .astype first"
        )
    if not isinstance(scalar, Dim) and not _in_range(scalar, dtype):
        raise DTypeError(f"Python scalar {scalar!r} is outside the range of {dtype}")
    return as_tensor(scalar, dtype)


def _in_range(scalar: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds a number, or nearly; floats hold infinities and NaN."""
    if kind(dtype) == "bool":
        return True
    low, high = limits(dtype)
    if is_inexact(dtype):
        return not any(high < abs(part) < np.inf for part in (scalar.real, scalar.imag))
    return bool(low <= scalar <= high)


__all__ = [
    "FUNCTIONS", "PLAIN", "REGISTRY", "Autocast", "Cost", "Location", "Node", "Op", "Sample",
    "Sharding", "Tensor",
    "as_tensor", "autocast", "autocasted", "current_prefix", "device", "function", "located",
    "made_by", "make_node", "name_scope",
    "next_stream", "owner", "promoted", "read_from", "register", "sample", "seeded", "told",
    "user_location", "within",
]  # fmt: skip

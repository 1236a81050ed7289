"""What an op's declaration is made of, beside functions: costs, rows, shardings and samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, NamedTuple

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
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

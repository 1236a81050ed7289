"""How ops are cut over devices: the rules by which `gf.parallel.Shard` divides graphs, by family.

A rule gets the specs of the inputs and the attributes, and says which axes go along with which: an
equation as einsum has it, "ik,kj->ij". Axes of one letter are cut together; a letter that only
inputs have is summed over, so that each shard has a partial sum; `.` is an axis needed whole. See
`graphflow.ir.op.Sharding` for what is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from string import ascii_lowercase
from typing import Any, NamedTuple

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import FUNCTIONS, Op, Sharding, Tensor, make_node
from graphflow.ir.spec import Shape, Size, TensorSpec, broadcast_shapes, floordiv, product

G = FUNCTIONS
Range = tuple[Any, Any]


@dataclass(frozen=True)
class ShardView:
    """What a shard has of an op.

    Attributes:
        start, size, total: of each letter's elements: where the shard's begin, how many these are,
            and how many there are in all.
        shapes: of the shard's outputs.
        ranges: of letters of windows, what it has of the first input.
    """

    start: Mapping[str, Size]
    size: Mapping[str, Size]
    total: Mapping[str, Size]
    shapes: tuple[Shape, ...]
    ranges: Mapping[str, Range]

    def is_split(self, *letters: str) -> bool:
        """Whether one of some letters is cut."""
        return any(self.size[letter] != self.total[letter] for letter in letters)

    of = is_split  # its name before, which rules of users may call


def letters(rank: int, used: str = "") -> str:
    """A letter for each axis."""
    return "".join([c for c in ascii_lowercase if c not in used][:rank])


def fresh(used: str = "") -> Iterator[str]:
    """Letters that are not in use."""
    return iter([c for c in ascii_lowercase if c not in used])


def equation(inputs: Sequence[str], outputs: Sequence[str]) -> str:
    return ",".join(inputs) + "->" + ",".join(outputs)


def without(names: str, axes: Sequence[int], by: str = ".") -> str:
    """Letters with those at some axes replaced."""
    at = {a % len(names) for a in axes} if names else set()
    return "".join(by if i in at else c for i, c in enumerate(names))


def capital(names: str, axes: Sequence[int]) -> str:
    """Letters with those at some axes as capitals."""
    at = {a % len(names) for a in axes} if names else set()
    return "".join(c.upper() if i in at else c for i, c in enumerate(names))


def broadcast_letters(shape: Shape, whole: Shape, names: str) -> str:
    """Letters of an input that broadcasts to a whole."""
    own = names[len(whole) - len(shape) :]
    pairs = zip(shape, whole[len(whole) - len(shape) :], own, strict=True)
    return "".join("." if have == 1 and want != 1 else c for have, want, c in pairs)


# Elementwise ------------------------------------------------------------------------------------


def elementwise_rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
    """Ops over broadcast inputs."""
    whole = broadcast_shapes(*(s.shape for s in specs))
    names = letters(len(whole))
    return Sharding(equation([broadcast_letters(s.shape, whole, names) for s in specs], [names]))


def linear_rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
    """Sums and differences: of partial sums they are partial sums."""
    return replace(elementwise_rule(*specs), linear=(tuple(range(len(specs))),))


def view_rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
    """Ops that hand on their input."""
    return replace(elementwise_rule(*specs), linear=((0,),), view=True)


# Shapes -----------------------------------------------------------------------------------------


class _AxisPair(NamedTuple):
    """An axis of the input and one of the output that are cut alike, and how, see `Sharding`."""

    axes: tuple[int, int]
    scale: dict[tuple[int, int], Size]
    outer: dict[tuple[int, int], Size]


def reshape_rule(x: TensorSpec, shape: Shape) -> Sharding:
    """reshape: sizes that stay, and the first of those that become one, or of which one becomes
    several; these are cut in multiples of the rest. By other rules the later of such sizes are cut,
    in rows."""
    have, want = list(x.shape), list(shape)
    blocks = [_axis_pairs(have, want, range(*i), range(*j)) for i, j in _blocks(have, want)]
    first = [ways[0] for ways in blocks]
    others = [
        _rule_of_pairs([*first[:n], way, *first[n + 1 :]], len(have), len(want))
        for n, ways in enumerate(blocks)
        for way in ways[1:]
    ]
    return replace(_rule_of_pairs(first, len(have), len(want)), alternatives=tuple(others))


def _rule_of_pairs(ways: Sequence[_AxisPair | None], left: int, right: int) -> Sharding:
    """A rule by which axes go together in some ways, a letter for each."""
    names = (["."] * left, ["."] * right)
    scale: dict[tuple[int, int], Size] = {}
    outer: dict[tuple[int, int], Size] = {}
    for way, letter in zip([w for w in ways if w is not None], fresh(), strict=False):
        for side, axis in zip(names, way.axes, strict=True):
            side[axis] = letter
        scale |= way.scale
        outer |= way.outer
    return Sharding(
        equation(["".join(names[0])], ["".join(names[1])]), scale, outer=outer, linear=((0,),),
        sizes="shape", view=True,
    )  # fmt: skip


def _axis_pairs(
    have: Sequence[Size], want: Sequence[Size], i: Sequence[int], j: Sequence[int]
) -> list[_AxisPair | None]:
    """How a stretch of axes that becomes another may be cut: by the first axes of both, if they
    have a measure in common; where several are one elsewhere, by the others of these."""
    first, other = [a for a in i if have[a] != 1], [b for b in j if want[b] != 1]
    if not first or not other:
        return [None]
    size = _common_factor(have[first[0]], want[other[0]])
    ends = {(0, first[0]): have[first[0]], (1, other[0]): want[other[0]]}
    scale = {} if size is None else {k: floordiv(n, size) for k, n in ends.items() if n != size}
    ways = [None if size is None else _AxisPair((first[0], other[0]), scale, {})]
    if len(other) == 1:
        ways += [_inner_pair(have, first, k, other[0], 0) for k in range(1, len(first))]
    elif len(first) == 1:
        ways += [_inner_pair(want, other, k, first[0], 1) for k in range(1, len(other))]
    return ways


def _inner_pair(
    several: Sequence[Size], axes: Sequence[int], k: int, at: int, side: int
) -> _AxisPair:
    """The axis number k of several that are one elsewhere.

    Args:
        side: 0 if the several are the input's.
    """
    key = (1 - side, at)
    behind, before = (product([several[a] for a in part]) for part in (axes[k + 1 :], axes[:k]))
    both = (axes[k], at) if side == 0 else (at, axes[k])
    return _AxisPair(both, {key: behind} if behind != 1 else {}, {key: before})


def _blocks(
    have: Sequence[Size], want: Sequence[Size]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Stretches of two shapes, as short as they can be, that have as many elements."""
    i = j = 0
    while i < len(have) or j < len(want):
        a, b = i, j
        left: Size = have[i] if i < len(have) else 1
        right: Size = want[j] if j < len(want) else 1
        i, j = min(i + 1, len(have)), min(j + 1, len(want))
        while left != right:
            if i < len(have) and (j >= len(want) or not _exceeds(left, right)):
                left, i = left * have[i], i + 1
            elif j < len(want):
                right, j = right * want[j], j + 1
            else:
                break
        yield (a, i), (b, j)


def _exceeds(a: Size, b: Size) -> bool:
    """Whether a size is known to be the larger one."""
    if isinstance(a, int) and isinstance(b, int):
        return a > b
    return not isinstance(a, int) and (isinstance(b, int) or _common_factor(a, b) == b)


def _common_factor(a: Size, b: Size) -> Size | None:
    """The smaller of two sizes, if the other is known to be a multiple of it."""
    for small, large in ((a, b), (b, a)):
        times = 0 if small == 0 else floordiv(large, small)
        exact = isinstance(times, int) or all(
            isinstance(atom, str) for term in times.terms for atom in term
        )
        if exact and times * small == large:
            return small
    return None


def expand_dims_rule(x: TensorSpec, axes: Sequence[int]) -> Sharding:
    """expand_dims."""
    names = letters(x.rank)
    rest = iter(names)
    out = "".join("." if i in axes else next(rest) for i in range(x.rank + len(axes)))
    return Sharding(equation([names], [out]), linear=((0,),), view=True)


def squeeze_rule(x: TensorSpec, axes: Sequence[int]) -> Sharding:
    """squeeze."""
    names = without(letters(x.rank), axes)
    return Sharding(equation([names], [names.replace(".", "")]), linear=((0,),), view=True)


def permute_rule(x: TensorSpec, axes: Sequence[int]) -> Sharding:
    """permute_dims."""
    names = letters(x.rank)
    return Sharding(equation([names], ["".join(names[a] for a in axes)]), linear=((0,),), view=True)


def broadcast_rule(x: TensorSpec, shape: Shape) -> Sharding:
    """broadcast_to."""
    names = letters(len(shape))
    return Sharding(
        equation([broadcast_letters(x.shape, shape, names)], [names]), linear=((0,),), sizes="shape"
    )


def creation_rule(**attrs: Any) -> Sharding:
    """Ops that make a tensor of a shape, each element by itself alike."""
    return Sharding(equation([], [letters(len(attrs["shape"]))]), sizes="shape")


def arange_rule(**attrs: Any) -> Sharding:
    """arange of ints: later shards begin later."""
    if not isinstance(attrs["start"], int) or not isinstance(attrs["step"], int):
        return Sharding("->.")
    return Sharding("->a", build=_build_arange)


def _build_arange(op: Op, cut: ShardView, **attrs: Any) -> Any:
    start = attrs["start"] + cut.start["a"] * attrs["step"]
    if isinstance(start, int):
        return op(**{**attrs, "start": start, "size": cut.size["a"]})
    rest = op(**{**attrs, "size": cut.size["a"]})
    return rest + G["size_of"](size=start - attrs["start"], dtype=attrs["dtype"])


def triangle_rule(x: TensorSpec, k: int) -> Sharding:
    """tril and triu: the diagonal is elsewhere in each block."""
    names = letters(x.rank)
    fixed = x.is_concrete
    names = names if fixed else without(names, (-1, -2))
    build = _build_triangle if fixed else None
    return Sharding(equation([names], [names]), linear=((0,),), build=build)


def _build_triangle(op: Op, cut: ShardView, x: Tensor, k: int) -> Any:
    names = letters(x.ndim)
    return op(x, k=k + int(cut.start[names[-2]]) - int(cut.start[names[-1]]))


def eye_rule(rows: Size, columns: Size, k: int, dtype: str) -> Sharding:
    """eye."""
    if not isinstance(rows, int) or not isinstance(columns, int):
        return Sharding("->..")
    return Sharding("->ab", build=_build_eye)


def _build_eye(op: Op, cut: ShardView, **attrs: Any) -> Any:
    k = attrs["k"] + int(cut.start["a"]) - int(cut.start["b"])
    return op(**{**attrs, "rows": cut.size["a"], "columns": cut.size["b"], "k": k})


# Products and reductions ------------------------------------------------------------------------


def matmul_rule(
    a: TensorSpec, b: TensorSpec, transpose_a: bool = False, transpose_b: bool = False
) -> Sharding:
    """matmul."""
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    names = letters(len(batch))
    i, j, k = tuple(letters(3, names))
    left = broadcast_letters(a.shape[:-2], batch, names) + (k + i if transpose_a else i + k)
    right = broadcast_letters(b.shape[:-2], batch, names) + (j + k if transpose_b else k + j)
    return Sharding(equation([left, right], [names + i + j]), linear=((0,), (1,)))


def sum_rule(x: TensorSpec, axis: Sequence[int], keepdims: bool = False, **attrs: Any) -> Sharding:
    """sum."""
    names = letters(x.rank)
    at = {a % x.rank for a in axis}
    out = "".join("." if i in at else c for i, c in enumerate(names) if keepdims or i not in at)
    return Sharding(equation([names], [out]), linear=((0,),))


def mean_rule(x: TensorSpec, axis: Sequence[int], keepdims: bool = False) -> Sharding:
    """mean: each shard's sum, divided by how many there are in all."""
    at = [letters(x.rank)[a] for a in axis if x.shape[a] != 1]

    def build(op: Op, cut: ShardView, x: Tensor, axis: Any, keepdims: bool) -> Any:
        if not cut.is_split(*at):
            return op(x, axis=axis, keepdims=keepdims)
        total = G["sum"](x, axis=axis, keepdims=keepdims)
        return total / product([cut.total[letter] for letter in at])

    return replace(sum_rule(x, axis, keepdims), build=build, ignores_start=True)


def reduction_rule(kind: str) -> Callable[..., Sharding]:
    """max, min, any and all: shards' results are combined in the same way."""

    def rule(x: TensorSpec, axis: Sequence[int], keepdims: bool = False) -> Sharding:
        return replace(sum_rule(x, axis, keepdims), linear=(), kind=kind)

    return rule


def row_rule(*which: str, outputs: int = 1, linear: bool = False) -> Callable[..., Sharding]:
    """Ops along the axes in some attributes, which they need whole; inputs and outputs alike."""

    def rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
        names = letters(specs[0].rank)
        for name in which:
            axis = attrs[name]
            names = without(names, axis if isinstance(axis, tuple) else (axis,))
        linear_in = (tuple(range(len(specs))),) if linear else ()
        return Sharding(equation([names] * len(specs), [names] * outputs), linear=linear_in)

    return rule


def prod_rule(x: TensorSpec, axis: int) -> Sharding:
    """prod."""
    return replace(sum_rule(x, (axis,), keepdims=True), linear=(), kind="prod")


def rotate_rule(x: TensorSpec, *angles: TensorSpec, **attrs: Any) -> Sharding:
    """rotate_pairs: angles broadcast to all but the last axis."""
    names = letters(x.rank - 1)
    ins = [broadcast_letters(a.shape[:-1], x.shape[:-1], names) + "." for a in angles]
    return Sharding(equation([names + ".", *ins], [names + "."]), linear=((0,),))


def matrix_rule(
    *inner: int, outputs: Sequence[int] = (2,), along: Sequence[str] = ()
) -> Callable[..., Sharding]:
    """Ops of the last axes, `inner` many of each input, that broadcast those in front.

    Args:
        outputs: how many axes of its own each output has.
    """

    def rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
        counts = [*inner, *[0] * (len(specs) - len(inner))]
        fronts = [s.shape[: s.rank - n] for s, n in zip(specs, counts, strict=True)]
        whole = broadcast_shapes(*fronts)
        names = letters(len(whole))
        ins = [
            broadcast_letters(f, whole, names) + "." * n
            for f, n in zip(fronts, counts, strict=True)
        ]
        return Sharding(equation(ins, [names + "." * n for n in outputs]))

    return rule


def equation_rule(text: str, *linear: tuple[int, ...]) -> Callable[..., Sharding]:
    """Ops of known ranks: the equation itself."""

    def rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
        return Sharding(text, linear=linear)

    return rule


def leading_axes_rule(count: int) -> Callable[..., Sharding]:
    """Ops that go through the first axes one by one, of all inputs and the output alike."""

    def rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
        names = letters(count)
        ins = [names + "." * (s.rank - count) for s in specs]
        return Sharding(equation(ins, ins[:1]))

    return rule


# Random numbers ---------------------------------------------------------------------------------


def random_rule(**attrs: Any) -> Sharding:
    """Random tensors: a shard draws the numbers that the whole has there."""

    def build(op: Op, cut: ShardView, **attrs: Any) -> Any:
        names = letters(len(attrs["shape"]))
        start = tuple(cut.start.get(c, 0) for c in names)
        return make(op, **{**attrs, "shape": cut.shapes[0], "part": (attrs["shape"], start)})

    return Sharding(equation([], [letters(len(attrs["shape"]))]), build=build)


def make(op: Op, *inputs: Tensor, **attrs: Any) -> Any:
    """An application of an op as it is."""
    outputs = make_node(op, inputs, attrs).outputs
    return outputs[0] if len(outputs) == 1 else outputs

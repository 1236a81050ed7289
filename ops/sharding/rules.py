"""Sharding rules, by family: how `gf.parallel.Shard` may split ops over devices.

A rule maps the specs of the inputs and the attributes to an equation as in einsum, "ik,kj->ij".
Axes with one letter are split together. A letter that only inputs have is summed over, so each
shard has a partial sum. `.` is an axis that is needed whole. See `graphflow.ir.op.Sharding` for the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from string import ascii_lowercase
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import FUNCTIONS, Op, Sharding, Tensor, make_node
from graphflow.ir.spec import Shape, Size, TensorSpec, broadcast_shapes, product

G = FUNCTIONS
Range = tuple[Any, Any]


@dataclass(frozen=True)
class ShardView:
    """A shard's view of an op: its extents, output shapes and windows.

    Attributes:
        start, size, total: for each letter, where the shard's elements begin, how many they are,
            and how many there are in all.
        shapes: the shapes of the shard's outputs.
        ranges: for letters with windows, the range of the first input that the shard has.
    """

    start: Mapping[str, Size]
    size: Mapping[str, Size]
    total: Mapping[str, Size]
    shapes: tuple[Shape, ...]
    ranges: Mapping[str, Range]

    def is_split(self, *letters: str) -> bool:
        """Return True if one of some letters is split."""
        return any(self.size[letter] != self.total[letter] for letter in letters)

    of = is_split  # the earlier name, which rules of users may call


def letters(rank: int, used: str = "") -> str:
    """Return a letter for each axis; none that is in `used`."""
    return "".join([c for c in ascii_lowercase if c not in used][:rank])


def fresh(used: str = "") -> Iterator[str]:
    """Return an iterator over unused letters."""
    return iter([c for c in ascii_lowercase if c not in used])


def equation(inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """Return an equation, given the letters of each input and output."""
    return ",".join(inputs) + "->" + ",".join(outputs)


def without(names: str, axes: Sequence[int], by: str = ".") -> str:
    """Return letters with those at some axes replaced."""
    at = {a % len(names) for a in axes} if names else set()
    return "".join(by if i in at else c for i, c in enumerate(names))


def capital(names: str, axes: Sequence[int]) -> str:
    """Return letters with those at some axes as capitals (axes for which the op has to be
    expanded)."""
    at = {a % len(names) for a in axes} if names else set()
    return "".join(c.upper() if i in at else c for i, c in enumerate(names))


def broadcast_letters(shape: Shape, whole: Shape, names: str) -> str:
    """Return the letters of an input that broadcasts to a shape."""
    own = names[len(whole) - len(shape) :]
    pairs = zip(shape, whole[len(whole) - len(shape) :], own, strict=True)
    return "".join("." if have == 1 and want != 1 else c for have, want, c in pairs)


# Elementwise ------------------------------------------------------------------------------------


def elementwise_rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
    """Split ops over broadcast inputs."""
    whole = broadcast_shapes(*(s.shape for s in specs))
    names = letters(len(whole))
    return Sharding(equation([broadcast_letters(s.shape, whole, names) for s in specs], [names]))


def linear_rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
    """Split sums and differences. Of partial sums they are partial sums."""
    return replace(elementwise_rule(*specs), linear=(tuple(range(len(specs))),))


def view_rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
    """Split ops that return their input."""
    return replace(elementwise_rule(*specs), linear=((0,),), view=True)


# Shapes -----------------------------------------------------------------------------------------


def expand_dims_rule(x: TensorSpec, axes: Sequence[int]) -> Sharding:
    """Split expand_dims."""
    names = letters(x.rank)
    rest = iter(names)
    out = "".join("." if i in axes else next(rest) for i in range(x.rank + len(axes)))
    return Sharding(equation([names], [out]), linear=((0,),), view=True)


def squeeze_rule(x: TensorSpec, axes: Sequence[int]) -> Sharding:
    """Split squeeze."""
    names = without(letters(x.rank), axes)
    return Sharding(equation([names], [names.replace(".", "")]), linear=((0,),), view=True)


def permute_rule(x: TensorSpec, axes: Sequence[int]) -> Sharding:
    """Split permute_dims."""
    names = letters(x.rank)
    return Sharding(equation([names], ["".join(names[a] for a in axes)]), linear=((0,),), view=True)


def broadcast_rule(x: TensorSpec, shape: Shape) -> Sharding:
    """Split broadcast_to."""
    names = letters(len(shape))
    return Sharding(
        equation([broadcast_letters(x.shape, shape, names)], [names]), linear=((0,),), sizes="shape"
    )


def creation_rule(**attrs: Any) -> Sharding:
    """Split ops that create a tensor whose elements do not depend on their position."""
    return Sharding(equation([], [letters(len(attrs["shape"]))]), sizes="shape")


def arange_rule(**attrs: Any) -> Sharding:
    """Split arange of ints: later shards start at later numbers."""
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
    """Split tril and triu. Each block has the diagonal at another offset."""
    names = letters(x.rank)
    fixed = x.is_concrete
    names = names if fixed else without(names, (-1, -2))
    build = _build_triangle if fixed else None
    return Sharding(equation([names], [names]), linear=((0,),), build=build)


def _build_triangle(op: Op, cut: ShardView, x: Tensor, k: int) -> Any:
    names = letters(x.ndim)
    return op(x, k=k + int(cut.start[names[-2]]) - int(cut.start[names[-1]]))


def eye_rule(rows: Size, columns: Size, k: int, dtype: str) -> Sharding:
    """Split eye. Each block has the diagonal at another offset."""
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
    """Split matmul; along the inner axis, shards have partial sums."""
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    names = letters(len(batch))
    i, j, k = tuple(letters(3, names))
    left = broadcast_letters(a.shape[:-2], batch, names) + (k + i if transpose_a else i + k)
    right = broadcast_letters(b.shape[:-2], batch, names) + (j + k if transpose_b else k + j)
    return Sharding(equation([left, right], [names + i + j]), linear=((0,), (1,)))


def sum_rule(x: TensorSpec, axis: Sequence[int], keepdims: bool = False, **attrs: Any) -> Sharding:
    """Split sum; along reduced axes, shards have partial sums."""
    names = letters(x.rank)
    at = {a % x.rank for a in axis}
    out = "".join("." if i in at else c for i, c in enumerate(names) if keepdims or i not in at)
    return Sharding(equation([names], [out]), linear=((0,),))


def mean_rule(x: TensorSpec, axis: Sequence[int], keepdims: bool = False) -> Sharding:
    """Split mean: each shard's sum is divided by the number of all elements."""
    at = [letters(x.rank)[a] for a in axis if x.shape[a] != 1]

    def build(op: Op, cut: ShardView, x: Tensor, axis: Any, keepdims: bool) -> Any:
        if not cut.is_split(*at):
            return op(x, axis=axis, keepdims=keepdims)
        total = G["sum"](x, axis=axis, keepdims=keepdims)
        return total / product([cut.total[letter] for letter in at])

    return replace(sum_rule(x, axis, keepdims), build=build, ignores_start=True)


def reduction_rule(kind: str) -> Callable[..., Sharding]:
    """Return the rule of max, min, any or all: shards' results are combined by the same
    reduction."""

    def rule(x: TensorSpec, axis: Sequence[int], keepdims: bool = False) -> Sharding:
        return replace(sum_rule(x, axis, keepdims), linear=(), kind=kind)

    return rule


def row_rule(*which: str, outputs: int = 1, linear: bool = False) -> Callable[..., Sharding]:
    """Return the rule of ops that need the axes in some attributes whole; inputs and outputs have
    one shape.

    Args:
        which: the names of these attributes.
        outputs: the number of outputs.
        linear: whether the op is linear in all inputs together.
    """

    def rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
        names = letters(specs[0].rank)
        for name in which:
            axis = attrs[name]
            names = without(names, axis if isinstance(axis, tuple) else (axis,))
        linear_in = (tuple(range(len(specs))),) if linear else ()
        return Sharding(equation([names] * len(specs), [names] * outputs), linear=linear_in)

    return rule


def prod_rule(x: TensorSpec, axis: int) -> Sharding:
    """Split prod."""
    return replace(sum_rule(x, (axis,), keepdims=True), linear=(), kind="prod")


def rotate_rule(x: TensorSpec, *angles: TensorSpec, **attrs: Any) -> Sharding:
    """Split rotate_pairs. The angles broadcast to all but the last axis."""
    names = letters(x.rank - 1)
    ins = [broadcast_letters(a.shape[:-1], x.shape[:-1], names) + "." for a in angles]
    return Sharding(equation([names + ".", *ins], [names + "."]), linear=((0,),))


def matrix_rule(*inner: int, outputs: Sequence[int] = (2,)) -> Callable[..., Sharding]:
    """Return the rule of ops on the last axes whose leading axes broadcast.

    Args:
        inner: how many last axes each input has.
        outputs: how many last axes each output has.
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
    """Return the rule of an op of known ranks: the equation itself."""

    def rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
        return Sharding(text, linear=linear)

    return rule


def leading_axes_rule(count: int) -> Callable[..., Sharding]:
    """Return the rule of ops that go through the first `count` axes one by one, alike in all
    tensors."""

    def rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
        names = letters(count)
        ins = [names + "." * (s.rank - count) for s in specs]
        return Sharding(equation(ins, ins[:1]))

    return rule


# Random numbers ---------------------------------------------------------------------------------


def random_rule(**attrs: Any) -> Sharding:
    """Split random ops. A shard draws the numbers that the whole tensor has there."""

    def build(op: Op, cut: ShardView, **attrs: Any) -> Any:
        names = letters(len(attrs["shape"]))
        start = tuple(cut.start.get(c, 0) for c in names)
        return make(op, **{**attrs, "shape": cut.shapes[0], "part": (attrs["shape"], start)})

    return Sharding(equation([], [letters(len(attrs["shape"]))]), build=build)


def make(op: Op, *inputs: Tensor, **attrs: Any) -> Any:
    """Apply an op with exactly these attributes."""
    outputs = make_node(op, inputs, attrs).outputs
    return outputs[0] if len(outputs) == 1 else outputs

"""Sharding rules of ops over windows: each shard fetches a halo from its neighbours.

Let windows have k elements that are d apart, and move by s. Then the results from `first` to `last`
read the elements from first·s - before to (last - 1)·s - before + (k - 1)·d. Elements outside are
padding, which only the shards at the ends have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.ir.op import Op, Sharding, Tensor
from graphflow.ir.spec import Size, TensorSpec
from graphflow.ops.kernels.images import resample
from graphflow.ops.sharding.rules import Range, ShardView, equation, letters, make, without
from graphflow.ops.windows.pooling_rules import pooled_shape

_SPACE = "uvwxyz"


def _are_known(*shapes: Sequence[Size]) -> bool:
    return all(isinstance(n, int) for shape in shapes for n in shape)


class _WindowGeometry:
    """The windows of an op, axis by axis."""

    def __init__(
        self, sizes: Sequence[Any], out: Sequence[Any], kernel: Sequence[int], **attrs: Any
    ) -> None:
        self.sizes, self.out, self.kernel = sizes, out, kernel
        self.stride, self.dilation = attrs["stride"], attrs["dilation"]
        self.padding = attrs["padding"]
        self.names = _SPACE[: len(sizes)] if _are_known(sizes, out) else "." * len(sizes)

    def span(self, i: int) -> int:
        """Return the number of elements from the first to the last of a window."""
        return int((self.kernel[i] - 1) * self.dilation[i] + 1)

    # Elements that results read -----------------------------------------------------------------

    def elements_read(self, letter: str, first: int, last: int) -> Range:
        """Return the range of elements that a range of results reads."""
        i = self.names.index(letter)
        start = first * self.stride[i] - self.padding[i][0]
        stop = (last - 1) * self.stride[i] - self.padding[i][0] + self.span(i)
        low = min(max(start, 0), self.sizes[i] - 1)
        return low, max(low + 1, min(stop, self.sizes[i]))

    def input_padding(self, cut: ShardView) -> tuple[tuple[int, int], ...]:
        """Return the padding of a shard that holds the elements which its results read."""
        pairs = []
        for i, letter in enumerate(self.names):
            if letter not in cut.ranges:
                pairs.append(self.padding[i])
                continue
            first, last = cut.start[letter], cut.start[letter] + cut.size[letter]
            start = first * self.stride[i] - self.padding[i][0]
            stop = (last - 1) * self.stride[i] - self.padding[i][0] + self.span(i)
            low, high = cut.ranges[letter]
            pairs.append((low - int(start), int(stop) - high))
        return tuple(pairs)

    # Results that read elements -----------------------------------------------------------------

    def results_reading(self, letter: str, first: int, last: int) -> Range:
        """Return the range of results that read a range of elements."""
        i = self.names.index(letter)
        before, step = self.padding[i][0], self.stride[i]
        low = -(-(first + before - self.span(i) + 1) // step)
        low = min(max(low, 0), (before + first) // step, self.out[i] - 1)
        high = min((last - 1 + before) // step + 1, self.out[i])
        return low, max(low + 1, high)

    def transpose_padding(self, cut: ShardView) -> tuple[tuple[int, int], ...]:
        """Return the padding of a shard that holds the results which read its elements."""
        pairs = []
        for i, letter in enumerate(self.names):
            if letter not in cut.ranges:
                pairs.append(self.padding[i])
                continue
            low, high = cut.ranges[letter]
            before = self.padding[i][0] + int(cut.start[letter]) - low * self.stride[i]
            size = int(cut.size[letter])
            after = (high - low - 1) * self.stride[i] + self.span(i) - size - before
            pairs.append((before, after))
        return tuple(pairs)

    def own_sizes(self, cut: ShardView, sizes: Sequence[Any]) -> tuple[Any, ...]:
        """Return the sizes of a shard's elements."""
        return tuple(
            cut.size[letter] if letter in cut.ranges else size
            for letter, size in zip(self.names, sizes, strict=True)
        )


def _positions(n: Any, kernel: Any, stride: int, padding: Any, dilation: int) -> Any:
    return (n + padding[0] + padding[1] - (kernel - 1) * dilation - 1) // stride + 1


# Convolutions -----------------------------------------------------------------------------------


def _channels(groups: int, inner: Size, outer: Size) -> tuple[str, str, str, str, dict[str, Size]]:
    """Return the letters of the channels of x, of the weight's outputs and inputs, and of y.

    The dict gives the number of channels for one element of the group's letter.
    """
    if groups == 1:
        return "c", "o", "c", "o", {}
    return "g", "g", ".", "g", {"x": inner // groups, "w": outer // groups, "y": outer // groups}


def _input_builder(windows: _WindowGeometry) -> Callable[..., Any]:
    """Return what builds a shard's op on x and a second input, with the padding of x's shard."""

    def build(op: Op, cut: ShardView, x: Tensor, other: Tensor, **attrs: Any) -> Any:
        if "g" in cut.size:
            attrs["groups"] = int(cut.size["g"])
        return make(op, x, other, **{**attrs, "padding": windows.input_padding(cut)})

    return build


def conv(x: TensorSpec, w: TensorSpec, groups: int, **attrs: Any) -> Sharding:
    """Shard conv: (n, c, *space), (o, c / groups, *kernel) -> (n, o, *positions)."""
    kernel = tuple(w.shape[2:])
    if not _are_known(kernel):
        return Sharding(
            equation(["n" + "." * (x.rank - 1), "." * w.rank], ["n" + "." * (x.rank - 1)])
        )
    out = [
        _positions(n, k, s, p, d)
        for n, k, s, p, d in zip(
            x.shape[2:], kernel, attrs["stride"], attrs["padding"], attrs["dilation"], strict=True
        )
    ]
    windows = _WindowGeometry(x.shape[2:], out, kernel, **attrs)  # type: ignore[arg-type]
    cx, wo, wc, cy, scale = _channels(groups, x.shape[1], w.shape[0])
    space = windows.names

    return Sharding(
        equation(["n" + cx + space, wo + wc + "." * len(space)], ["n" + cy + space]),
        {(0, 1): scale["x"], (1, 0): scale["w"], (2, 1): scale["y"]} if scale else {},
        ((0,), (1,)), build=_input_builder(windows), windows=space,
        needs=windows.elements_read,
    )  # fmt: skip


def conv_transpose(
    y: TensorSpec, w: TensorSpec, sizes: Sequence[Any], groups: int, **attrs: Any
) -> Sharding:
    """Shard conv_transpose: (n, o, *positions), (o, c / groups, *kernel) -> (n, c, *space)."""
    kernel = tuple(w.shape[2:])
    if not _are_known(kernel):
        return Sharding(
            equation(["n" + "." * (y.rank - 1), "." * w.rank], ["n" + "." * (y.rank - 1)])
        )
    windows = _WindowGeometry(sizes, y.shape[2:], kernel, **attrs)  # type: ignore[arg-type]
    cx, wo, wc, cy, scale = _channels(groups, w.shape[1] * groups, w.shape[0])
    space = windows.names

    def build(op: Op, cut: ShardView, y: Tensor, w: Tensor, **attrs: Any) -> Any:
        if "g" in cut.size:
            attrs["groups"] = int(cut.size["g"])
        attrs["sizes"] = windows.own_sizes(cut, attrs["sizes"])
        return make(op, y, w, **{**attrs, "padding": windows.transpose_padding(cut)})

    return Sharding(
        equation(["n" + cy + space, wo + wc + "." * len(space)], ["n" + cx + space]),
        {(0, 1): scale["y"], (1, 0): scale["w"], (2, 1): scale["x"]} if scale else {},
        ((0,), (1,)), build=build, windows=space, needs=windows.results_reading,
    )  # fmt: skip


def conv_weight_grad(
    x: TensorSpec, g: TensorSpec, kernel: Sequence[int], groups: int, **attrs: Any
) -> Sharding:
    """Shard conv_weight_grad: (n, c, *space), (n, o, *positions) -> (o, c / groups, *kernel)."""
    windows = _WindowGeometry(x.shape[2:], g.shape[2:], kernel, **attrs)
    cx, wo, wc, cy, scale = _channels(groups, x.shape[1], g.shape[1])
    space = windows.names

    return Sharding(
        equation(["n" + cx + space, "n" + cy + space], [wo + wc + "." * len(space)]),
        {(0, 1): scale["x"], (1, 1): scale["y"], (2, 0): scale["w"]} if scale else {},
        ((0,), (1,)), build=_input_builder(windows), windows=space,
        needs=windows.elements_read,
    )  # fmt: skip


# Pooling ----------------------------------------------------------------------------------------


def pool(outputs: int = 1) -> Callable[..., Sharding]:
    """Return the rule of pooling: (n, c, *space), other inputs and outputs (n, c, *positions)."""

    def rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
        x = specs[0]
        named = {k: attrs[k] for k in ("kernel", "stride", "padding", "dilation", "ceil_mode")}
        out = pooled_shape(x, **named)[2:]
        windows = _WindowGeometry(x.shape[2:], out, **named)
        space = windows.names
        if attrs.get("divisor") == "padded" and attrs["ceil_mode"]:
            space = "." * len(space)

        def build(op: Op, cut: ShardView, *inputs: Tensor, **attrs: Any) -> Any:
            if cut.ranges:
                attrs |= {"padding": windows.input_padding(cut), "ceil_mode": False}
            if cut.ranges and len(cut.ranges) < len(space):
                attrs["padding"] = _close_whole_axes(windows, cut, attrs["padding"])
            return make(op, *inputs, **attrs)

        return Sharding(
            equation(["nc" + space] * len(specs), ["nc" + space] * outputs),
            build=build, windows=space, needs=windows.elements_read,
        )  # fmt: skip

    return rule


def _close_whole_axes(
    windows: _WindowGeometry, cut: ShardView, padding: Any
) -> tuple[tuple[int, int], ...]:
    """Return padding with which whole axes keep their number of windows, none left over."""
    pairs = []
    for i, (letter, pair) in enumerate(zip(windows.names, padding, strict=True)):
        if letter not in cut.ranges:
            stop = (windows.out[i] - 1) * windows.stride[i] + windows.span(i)
            pair = (pair[0], stop - windows.sizes[i] - pair[0])
        pairs.append(pair)
    return tuple(pairs)


def pool_transpose(count: int) -> Callable[..., Sharding]:
    """Return the rule of pooling's transposes: inputs (n, c, *positions), output (n, c, *space)."""

    def rule(*specs: TensorSpec, sizes: Sequence[Any], **attrs: Any) -> Sharding:
        g = specs[0]
        windows = _WindowGeometry(sizes, g.shape[2:], attrs["kernel"], **{
            k: attrs[k] for k in ("stride", "padding", "dilation")
        })  # fmt: skip
        divisor = attrs.get("divisor", 1)
        space = windows.names
        if divisor == "inside" or attrs["ceil_mode"]:
            space = "." * len(space)

        def build(op: Op, cut: ShardView, *inputs: Tensor, **attrs: Any) -> Any:
            if cut.ranges:
                attrs["padding"] = windows.transpose_padding(cut)
                attrs["sizes"] = windows.own_sizes(cut, attrs["sizes"])
            return make(op, *inputs, **attrs)

        return Sharding(
            equation(["nc" + space] * count, ["nc" + space]), linear=((0,),) if count == 1 else (),
            build=build, windows=space, windowed=tuple(range(count)), needs=windows.results_reading,
        )  # fmt: skip

    return rule


def unfold(x: TensorSpec, **attrs: Any) -> Sharding:
    """Shard unfold along the batch."""
    return Sharding(equation(["n" + "." * (x.rank - 1)], ["n.."]), linear=((0,),))


def fold(x: TensorSpec, sizes: Sequence[Any], **attrs: Any) -> Sharding:
    """Shard fold along the batch."""
    return Sharding(equation(["n.."], ["n." + "." * len(sizes)]), linear=((0,),))


def resize(
    x: TensorSpec, axes: Sequence[int], sizes: Sequence[Any], rules: Any, transpose: bool,
    parts: Any = None,
) -> Sharding:  # fmt: skip
    """Shard resize: along its axes each shard fetches the elements that its results need."""
    names = letters(x.rank)
    before = tuple(x.shape[a] for a in axes)
    if parts is not None or not _are_known(before, sizes):
        names = without(names, axes)
        return Sharding(equation([names], [names]), linear=((0,),))
    tables = {
        names[a]: resample.table_for(int(n), m, resample.ResampleRule(*rule), transpose)
        for a, n, m, rule in zip(axes, before, sizes, rules, strict=True)
    }

    def needs(letter: str, first: int, last: int) -> Range:
        return resample.input_range(tables[letter], first, last)

    def build(op: Op, cut: ShardView, x: Tensor, **attrs: Any) -> Any:
        if cut.ranges:
            own = [names[a] for a in axes]
            begins = [(cut.ranges[c][0], cut.start[c]) if c in cut.ranges else (0, 0) for c in own]
            attrs["parts"] = tuple(
                (n, m, *begin) for n, m, begin in zip(before, sizes, begins, strict=True)
            )
            attrs["sizes"] = tuple(cut.shapes[0][a] for a in axes)
        return make(op, x, **attrs)

    return Sharding(
        equation([names], [names]), linear=((0,),), build=build, windows="".join(tables),
        needs=needs,
    )  # fmt: skip

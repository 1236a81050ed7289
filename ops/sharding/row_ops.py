"""How ops that look along whole rows are cut within these: softmax, norms, losses over classes.

Such an op is made of simpler ones (`expand`), whose reductions give partial results that shards
combine. So the logits of a large vocabulary need not be together anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.ir.op import FUNCTIONS, REGISTRY, Sharding, Tensor, make_node
from graphflow.ir.spec import Outer, Size, TensorSpec, is_inexact, product
from graphflow.ops.sharding.rules import capital, equation, letters

G = FUNCTIONS
Axes = tuple[int, ...]


def _axes(axis: Any) -> Axes:
    return tuple(axis) if isinstance(axis, tuple) else (axis,)


def same_shape_rule(expand: Callable[..., Any]) -> Callable[..., Sharding]:
    """Ops along `axis` whose inputs and output are alike."""

    def rule(*specs: TensorSpec, axis: Any, **attrs: Any) -> Sharding:
        names = capital(letters(specs[0].rank), _axes(axis))
        return Sharding(equation([names] * len(specs), [names]), expand=expand)

    return rule


def reduction_rule(expand: Callable[..., Any]) -> Callable[..., Sharding]:
    """Ops that reduce `axis`."""

    def rule(x: TensorSpec, axis: Any, keepdims: bool = False, **attrs: Any) -> Sharding:
        at = {a % x.rank for a in _axes(axis)} if x.rank else set()
        names = capital(letters(x.rank), tuple(at))
        out = "".join("." if i in at else c for i, c in enumerate(names) if keepdims or i not in at)
        return Sharding(equation([names], [out]), expand=expand)

    return rule


def arg_extremum_rule(extreme: str) -> Callable[..., Sharding]:
    """argmax and argmin: the first place that has the extreme of all, or no number."""

    def expand(x: Tensor, axis: int | None, keepdims: bool) -> Any:
        axes = list(range(x.ndim)) if axis is None else [axis % x.ndim]
        best = x == G[extreme](x, axes, keepdims=True)
        if is_inexact(x.dtype):
            best = G["logical_or"](best, G["isnan"](x))
        count: Size = 1
        place: Any = G["zeros"]((), "int64")
        for a in reversed(axes):
            own = G["reshape"](G["arange"](x.shape[a]), _broadcast_shape(x, (a,)))
            place = place + own * G["size_of"](size=count, dtype="int64")
            count = count * x.shape[a]
        behind = G["size_of"](size=count, dtype="int64")
        return G["min"](G["where"](best, place, behind), axes, keepdims=keepdims)

    def rule(x: TensorSpec, axis: int | None, keepdims: bool) -> Sharding:
        every = tuple(range(x.rank)) if axis is None else (axis,)
        return reduction_rule(expand)(x, axis=every, keepdims=keepdims)

    return rule


# Moments and norms ------------------------------------------------------------------------------


def _shard_moments(op: Any, cut: Any, x: Tensor, axis: Axes) -> Any:
    """Of a shard: what part of all values it has, their mean and variance."""
    names = letters(x.ndim)
    number, every = (
        REGISTRY["size_of"](size=product([sizes[names[a]] for a in axis]), dtype="float64")
        for sizes in (cut.size, cut.total)
    )
    centre = G["mean"](x, axis, keepdims=True)
    about = x - centre
    part = G["full_like"](centre, 1) * G["astype"](number / every, x.dtype)
    return G["stack"]([part, centre, G["mean"](about * about, axis, keepdims=True)])


def moments_rule(x: TensorSpec, axis: Axes) -> Sharding:
    """moments: those of shards make those of the whole."""
    names = letters(x.rank)
    out = "".join("." if i in axis else c for i, c in enumerate(names))
    text = equation([names], ["." + out])
    return Sharding(text, kind="moments", build=_shard_moments, ignores_start=True)


def _center(x: Tensor, axis: Axes) -> tuple[Any, Any, Any]:
    """x about its mean along some axes, that mean, and the variance."""
    found = REGISTRY["moments"](x, axis=tuple(a % x.ndim for a in axis))
    return x - found[1], found[1], found[2]


def _number(size: Size, like: Tensor) -> Any:
    """A size as a number in a tensor's dtype."""
    return REGISTRY["size_of"](size=size, dtype=like.dtype.name)


def variance(x: Tensor, axis: Axes, keepdims: bool, correction: float) -> Any:
    """var."""
    spread = _center(x, axis)[2]
    if correction:
        number = _number(product([x.shape[a] for a in axis]), x)
        spread = spread * (number / G["maximum"](number - correction, 0.0))
    return spread if keepdims else G["squeeze"](spread, list(axis))


def deviation(x: Tensor, axis: Axes, keepdims: bool, correction: float) -> Any:
    """std."""
    return G["sqrt"](variance(x, axis, keepdims, correction))


def vector_norm(x: Tensor, axis: Axes, keepdims: bool, ord: float) -> Any:
    """vector_norm."""
    size = G["abs"](x)
    if ord == np.inf:
        return G["max"](size, axis, keepdims)
    if ord == -np.inf:
        return G["min"](size, axis, keepdims)
    if ord == 0:
        return G["sum"](G["astype"](G["not_equal"](size, 0), size.dtype), axis, keepdims)
    if ord == 2:
        return G["sqrt"](G["sum"](size * size, axis, keepdims))
    if ord == 1:
        return G["sum"](size, axis, keepdims)
    return G["sum"](size**ord, axis, keepdims) ** (1.0 / ord)


def log_sum_exp(x: Tensor, axis: Axes, keepdims: bool) -> Any:
    """logsumexp."""
    top = G["max"](x, axis, keepdims=True)
    level = G["where"](G["isfinite"](top), top, G["zeros_like"](top))
    total = G["log"](G["sum"](G["exp"](x - level), axis, keepdims=True)) + level
    return total if keepdims else G["squeeze"](total, list(axis))


def softmax(x: Tensor, axis: int) -> Any:
    """softmax."""
    powers = G["exp"](x - G["max"](x, axis, keepdims=True))
    return powers / G["sum"](powers, axis, keepdims=True)


def log_softmax(x: Tensor, axis: int) -> Any:
    """log_softmax."""
    shifted = x - G["max"](x, axis, keepdims=True)
    return shifted - G["log"](G["sum"](G["exp"](shifted), axis, keepdims=True))


def softmax_grad(g: Tensor, y: Tensor, axis: int) -> Any:
    """softmax_grad."""
    return y * (g - G["sum"](g * y, axis, keepdims=True))


def log_softmax_grad(g: Tensor, y: Tensor, axis: int) -> Any:
    """log_softmax_grad."""
    return g - G["exp"](y) * G["sum"](g, axis, keepdims=True)


def _standardize(x: Tensor, axis: Axes, epsilon: float, centred: bool) -> tuple[Any, Any]:
    if centred:
        about, _, spread = _center(x, axis)
    else:
        about, spread = x, G["mean"](x * x, axis, keepdims=True)
    per_deviation = G["rsqrt"](spread + epsilon)
    return about * per_deviation, per_deviation


def standardize(x: Tensor, axis: Axes, epsilon: float, centred: bool = True) -> Any:
    """standardize."""
    return _standardize(x, axis, epsilon, centred)[0]


def standardize_grad(g: Tensor, x: Tensor, axis: Axes, epsilon: float, centred: bool = True) -> Any:
    """standardize_grad."""
    unit, per_deviation = _standardize(x, axis, epsilon, centred)
    rest = g - unit * G["mean"](g * unit, axis, keepdims=True)
    return (rest - G["mean"](g, axis, keepdims=True) if centred else rest) * per_deviation


def _broadcast_shape(x: Tensor, axes: Sequence[int]) -> tuple[Size, ...]:
    return tuple(size if i in axes else 1 for i, size in enumerate(x.shape))


def _affine_norm(
    x: Tensor, scale: Tensor, *bias: Tensor, axis: Axes, along: Axes, epsilon: float,
    centred: bool = True,
) -> Any:  # fmt: skip
    y = _standardize(x, axis, epsilon, centred)[0] * G["reshape"](scale, _broadcast_shape(x, along))
    return y + G["reshape"](bias[0], _broadcast_shape(x, along)) if bias else y


def affine_norm_rule(
    x: TensorSpec, *parameters: TensorSpec, axis: Axes, along: Axes, **attrs: Any
) -> Sharding:
    """affine_norm."""
    names = capital(letters(x.rank), axis)
    own = "".join(names[a] for a in along)
    return Sharding(equation([names, *[own] * len(parameters)], [names]), expand=_affine_norm)


# Batch norm -------------------------------------------------------------------------------------


def _others(x: Any, channel: int) -> Axes:
    return tuple(i for i in range(x.ndim) if i != channel)


def _batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, channel: int, epsilon: float, unbiased: bool = False
) -> Any:
    over = _broadcast_shape(x, (channel,))
    about, *found = _center(x, _others(x, channel))
    centre, spread = (G["reshape"](t, (x.shape[channel],)) for t in found)
    factor = scale * G["rsqrt"](spread + epsilon)
    y = about * G["reshape"](factor, over) + G["reshape"](bias, over)
    if unbiased:
        number = _number(product([x.shape[a] for a in _others(x, channel)]), x)
        spread = spread * (number / G["maximum"](number - 1, 1))
    return y, centre, spread


def _batch_norm_grad(g: Tensor, x: Tensor, scale: Tensor, channel: int, epsilon: float) -> Any:
    axes, over = _others(x, channel), _broadcast_shape(x, (channel,))
    number = product([x.shape[a] for a in axes])
    about, _, spread = _center(x, axes)
    per_deviation = G["rsqrt"](spread + epsilon)
    unit = about * per_deviation
    along, total = G["sum"](g * unit, axes), G["sum"](g, axes)
    rest = g - unit * G["reshape"](along / number, over) - G["reshape"](total / number, over)
    return rest * (G["reshape"](scale, over) * per_deviation), along, total


def batch_norm_rule(x: TensorSpec, *parameters: TensorSpec, channel: int, **attrs: Any) -> Sharding:
    """batch_norm: the moments are those of the whole batch, wherever it is."""
    names = letters(x.rank)
    own = names[channel]
    wide = capital(names, [i for i in range(x.rank) if i != channel])
    return Sharding(equation([wide, own, own], [wide, own, own]), expand=_batch_norm, apart="mean")


def batch_norm_grad_rule(
    g: TensorSpec, x: TensorSpec, scale: TensorSpec, channel: int, epsilon: float
) -> Sharding:
    """batch_norm_grad."""
    names = letters(x.rank)
    own = names[channel]
    wide = capital(names, [i for i in range(x.rank) if i != channel])
    text = equation([wide, wide, own], [wide, own, own])
    return Sharding(text, expand=_batch_norm_grad, apart="sum")


def channel_affine_rule(
    x: TensorSpec, *parameters: TensorSpec, channel: int, epsilon: float
) -> Sharding:
    """channel_affine."""
    names = letters(x.rank)
    return Sharding(equation([names, *[names[channel]] * len(parameters)], [names]))


# Classes ----------------------------------------------------------------------------------------


def _is_label(logits: Tensor, labels: Tensor) -> Any:
    return G["one_hot"](labels, logits.shape[-1], "bool")


def _pick_label(logits: Tensor, labels: Tensor) -> Any:
    zeros = G["zeros_like"](logits)
    return G["sum"](G["where"](_is_label(logits, labels), logits, zeros), -1)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Any:
    shifted = logits - G["max"](logits, -1, keepdims=True)
    total = G["sum"](G["exp"](shifted), -1, keepdims=True)  # as softmax has it, for the gradient
    picked = _pick_label(shifted, labels)  # before the total is read: both travel together
    return G["squeeze"](G["log"](total), -1) - picked


def _cross_entropy_grad(g: Tensor, logits: Tensor, labels: Tensor) -> Any:
    share = softmax(logits, logits.ndim - 1)
    slope = G["where"](_is_label(logits, labels), share - 1.0, share)
    return slope * G["expand_dims"](g, -1)


def cross_entropy_rule(logits: TensorSpec, labels: TensorSpec) -> Sharding:
    """cross_entropy."""
    names = letters(labels.rank)
    own = letters(1, names).upper()
    return Sharding(equation([names + own, names], [names]), expand=_cross_entropy)


def nll_rule(x: TensorSpec, labels: TensorSpec) -> Sharding:
    """nll."""
    names = letters(labels.rank)
    own = letters(1, names).upper()
    return Sharding(
        equation([names + own, names], [names]), expand=lambda x, labels: -_pick_label(x, labels)
    )


def cross_entropy_grad_rule(g: TensorSpec, logits: TensorSpec, labels: TensorSpec) -> Sharding:
    """cross_entropy_grad."""
    names = letters(labels.rank)
    own = names + letters(1, names).upper()
    return Sharding(equation([names, own, names], [own]), expand=_cross_entropy_grad)


# Attention --------------------------------------------------------------------------------------


def _attention_rule(
    specs: Sequence[TensorSpec], kinds: Sequence[str], outs: Sequence[str]
) -> Sharding:
    """Ops of attention: cut along the batch, heads (in multiples of those that share keys) and
    queries. The kinds of tensors: "q" (…, heads, T, d), "k" (…, shared, S, d), "l" (…, heads, T)
    and "m", a mask that broadcasts to (…, heads, T, S)."""
    q = specs[kinds.index("q", 2) if kinds[0] != "q" else 0]
    k = specs[kinds.index("k")]
    front = letters(q.rank - 3)
    head, row = tuple(letters(2, front))
    heads, shared = q.shape[-3], k.shape[-3]
    if not isinstance(q.shape[-2], int):
        row = "."
    scale: dict[tuple[int, int], Size] = {}
    whole = (*q.shape[:-1], k.shape[-2])
    names = {"q": front + head + row + ".", "k": front + head + "..", "l": front + head + row}
    tensors = [*kinds, *outs]
    texts = []
    for number, kind in enumerate(tensors):
        if kind == "m":
            mask = specs[min(number, len(specs) - 1)]
            wide = front + head + row + "."
            own = wide[len(whole) - mask.rank :]
            text = "".join("." if n == 1 else c for n, c in zip(mask.shape, own, strict=True))
        else:
            text = names[kind]
        texts.append(text)
        if kind != "k" and head in text and heads != shared:
            scale[number, text.index(head)] = heads // shared

    def build(op: Any, cut: Any, *inputs: Tensor, **attrs: Any) -> Any:
        start = int(cut.start[row]) if row in cut.start else 0
        return op(*inputs, **{**attrs, "offset": attrs["offset"] + start})

    return Sharding(equation(texts[: len(specs)], texts[len(specs) :]), scale, build=build)


def attention_rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
    """attention."""
    return _attention_rule(specs, ["q", "k", "k", *"m" * (len(specs) - 3)], ["q", "l"])


def attention_grad_rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
    """attention_grad."""
    kinds = ["q", "l", "q", "k", "k", "l", *"m" * (len(specs) - 6)]
    return _attention_rule(specs, kinds, ["q", "k", "k"])


def attention_mask_grad_rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
    """attention_mask_grad."""
    return _attention_rule(specs, ["q", "l", "q", "k", "k", "l", "m"], ["m"])


def packed_attention_rule(*specs: TensorSpec, heads: int, shared: int, **attrs: Any) -> Sharding:
    """attention_packed and its gradient: cut along the batch, and along heads of keys, which
    queries, keys and values have side by side, in stretches of unlike length where queries share
    keys."""
    x = specs[0]
    front = letters(x.rank - 2)
    head = letters(1, front)
    each = heads // shared
    depth = x.shape[-1] // (heads + 2 * shared if len(specs) < 4 else heads)
    kinds = ["x", "m"] if len(specs) < 4 else ["y", "x", "y", "l", "m"]
    outs = ["y", "l"] if len(specs) < 4 else ["x"]
    names = {"x": front + "." + head, "y": front + "." + head, "l": front + head + "."}
    texts = []
    scale: dict[tuple[int, int], Size] = {}
    outer: dict[tuple[int, int], Outer] = {}
    for number, kind in enumerate([*kinds[: len(specs)], *outs]):
        if kind == "m":
            mask = specs[number].shape
            own = (front + head + "..")[x.rank + 1 - len(mask) :]
            texts.append("".join("." if n == 1 else c for n, c in zip(mask, own, strict=True)))
            if head in texts[-1] and each != 1:
                scale[number, texts[-1].index(head)] = each
            continue
        texts.append(names[kind])
        if kind == "l" and each != 1:
            scale[number, x.rank - 2] = each
        elif kind == "x":
            scale[number, x.rank - 1] = depth
            outer[number, x.rank - 1] = 3 if each == 1 else (each, 1, 1)
        elif kind == "y":
            scale[number, x.rank - 1] = depth * each

    def build(op: Any, cut: Any, *inputs: Tensor, **attrs: Any) -> Any:
        count = cut.size[head]
        own = {"heads": count * each, "shared": count}
        made = make_node(op, inputs, {**attrs, **own}).outputs
        return made if len(made) > 1 else made[0]

    text = equation(texts[: len(specs)], texts[len(specs) :])
    return Sharding(text, scale, build=build, ignores_start=each == 1, outer=outer)

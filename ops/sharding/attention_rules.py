"""Sharding rules of attention: split along the batch, the heads and the queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.ir.op import Sharding, Tensor, make_node
from graphflow.ir.spec import Outer, Size, TensorSpec
from graphflow.ops.sharding.rules import equation, letters


def _attention_rule(
    specs: Sequence[TensorSpec], kinds: Sequence[str], outs: Sequence[str]
) -> Sharding:
    """Return the rule of an attention op.

    Heads are split in multiples of those that share keys and values. Only queries are split along
    T: each shard reads all keys.

    Args:
        specs: the inputs.
        kinds: for each input, "q" (…, heads, T, d), "k" (…, shared, S, d), "l" (…, heads, T), or
            "m", a mask that broadcasts to (…, heads, T, S).
        outs: the same for each output.
    """
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
    """Split attention."""
    return _attention_rule(specs, ["q", "k", "k", *"m" * (len(specs) - 3)], ["q", "l"])


def attention_grad_rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
    """Split the gradient of attention."""
    kinds = ["q", "l", "q", "k", "k", "l", *"m" * (len(specs) - 6)]
    return _attention_rule(specs, kinds, ["q", "k", "k"])


def attention_mask_grad_rule(*specs: TensorSpec, **attrs: Any) -> Sharding:
    """Split the gradient of attention's mask."""
    return _attention_rule(specs, ["q", "l", "q", "k", "k", "l", "m"], ["m"])


def packed_attention_rule(*specs: TensorSpec, heads: int, shared: int, **attrs: Any) -> Sharding:
    """Split attention_packed and its gradient along the batch and along heads.

    Queries, keys and values of all heads stand side by side in one axis. A shard has those of its
    heads: a piece of each segment. Segments differ in length if several queries share keys.
    """
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

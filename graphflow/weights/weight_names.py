"""Names of a model's variables: those of graphflow, and those that torch gives the same modules.

A torch module names a weight by the attributes that lead to it: "encoder.layers.0.linear1.weight".
Layers say what torch calls their attributes (`Layer.torch_names`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import REGISTRY, Tensor
from graphflow.ops.networks.layers.layer_base import Layer

KINDS = ("graphflow", "torch")
"""Whose names weights may have."""


@dataclass(frozen=True)
class WeightNames:
    """The names of a model's variables.

    Attributes:
        variables: each name, and the variable that it stands for. A variable that is reached on
            several ways has several names in torch.
        counts: names of numbers that torch has besides, and the model does without.
    """

    variables: Mapping[str, Tensor]
    counts: tuple[str, ...] = ()

    @property
    def alternatives(self) -> dict[Tensor, list[str]]:
        """The names of each variable."""
        found: dict[Tensor, list[str]] = {}
        for name, variable in self.variables.items():
            found.setdefault(variable, []).append(name)
        return found


def name_weights(model: Layer, kind: str) -> WeightNames:
    """Return the names of a model's variables, buffers too.

    Args:
        kind: one of `KINDS`.
    """
    if kind == "graphflow":
        return WeightNames({**model.parameters(), **model.buffers()})
    variables: dict[str, Tensor] = {}
    counts: list[str] = []
    for path, item in walk(model):
        if isinstance(item, Tensor):
            variables[path] = item
        else:
            counts += [_join(path, count) for count in item.torch_counts]
    return WeightNames(variables, tuple(counts))


def walk(
    item: Any, path: str = "", inside: tuple[int, ...] = (), *, translate: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield the layers and variables in a model, each with the path that leads to it.

    Args:
        inside: what the item lies in, which it may refer to.
        translate: write paths in torch's words.
    """
    if isinstance(item, Tensor):
        if item.node.op is REGISTRY["variable"]:
            yield path, item
        return
    if id(item) in inside:
        return
    parts: Mapping[Any, Any]
    words: Mapping[str, str] = {}
    if isinstance(item, Layer):
        yield path, item
        parts = vars(item)
        words = {n: word for n, word in item.torch_names.items() if translate or not word}
    elif isinstance(item, Mapping):
        parts = item
    elif isinstance(item, list | tuple):
        parts = dict(enumerate(item))
    else:
        return
    for name, part in parts.items():
        for rest, found in walk(part, "", (*inside, id(item)), translate=translate):
            word = words.get(_join(str(name), rest))
            known = word if word and rest else _join(words.get(name, str(name)), rest)
            yield _join(path, known), found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name

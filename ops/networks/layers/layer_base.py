"""The base class of layers and models: it finds their variables and names what they compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import numpy as np

from graphflow import init
from graphflow.errors import ArgumentError
from graphflow.init import Initializer
from graphflow.ir.graph import Graph
from graphflow.ir.op import (
    REGISTRY,
    Tensor,
    current_prefix,
    name_scope,
    prefix_scope,
    user_location,
    validate_arguments,
)

MAX_LAYERS = 10_000
"""Most layers of one network, since each adds variables and nodes."""


class Layer:
    """Base class of layers and of models made of them: it finds the variables in an object.

    A model keeps its layers as attributes (or in lists, tuples and dicts) and defines `__call__`:

        class Classifier(gf.nn.Layer):
            def __init__(self) -> None:
                self.hidden = gf.nn.Linear(784, 256, name="hidden")
                self.out = gf.nn.Linear(256, 10, name="out")

            def __call__(self, x):
                return self.out(gf.nn.relu(self.hidden(x)))

    A layer names its ops as its variables: `hidden/matmul` beside `hidden/weight`. A layer of yours
    has the name of the scope that it was made in, `with gf.name_scope("encoder"): Classifier()`, or
    gives itself one by `with self.scope("encoder"):` around the body of `__init__`.
    """

    _outer_scope: str = ""  # name scope in which the layer was made
    _scope: str = ""  # name scope of its own

    def __init_subclass__(cls, **options: Any) -> None:
        """Check the arguments of graphflow's own layers; leave users' layers alone."""
        super().__init_subclass__(**options)
        if cls.__module__.startswith("graphflow."):
            for name in ("__init__", "__call__"):
                if name in vars(cls):
                    setattr(cls, name, validate_arguments(vars(cls)[name], ""))
        if "__call__" in vars(cls):
            setattr(cls, "__call__", _run_in_scope(vars(cls)["__call__"]))  # noqa: B010

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a layer that remembers the current name scope."""
        layer = super().__new__(cls)
        set_attributes(layer, _outer_scope=current_prefix())
        return layer

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Open a name scope for variables that `__init__` makes; the layer also computes under it.

        Raises:
            ArgumentError: name is no valid name.
        """
        opened = name_scope(name)
        if not self._scope:  # the outermost counts
            set_attributes(self, _scope=f"{current_prefix()}{name}/")
        return opened

    def parameters(self) -> dict[str, Tensor]:
        """Return the trainable variables by name, each once, in order of creation."""
        return _variables_by_name(self, True)

    def buffers(self) -> dict[str, Tensor]:
        """Return the other variables, such as running statistics, by name."""
        return _variables_by_name(self, False)


def _run_in_scope(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a layer's `__call__` to run under the layer's name scope."""

    @wraps(call)
    def wrapper(self: Layer, *args: Any, **kwargs: Any) -> Any:
        with prefix_scope(_prefix_of(self)):
            return call(self, *args, **kwargs)

    return wrapper


def _prefix_of(layer: Layer) -> str:
    """Return the prefix of names that a layer computes under.

    It is the scope of its variables. If the layer is called within another scope, it is that scope
    and the layer's own name.
    """
    here, there = current_prefix(), layer._scope or layer._outer_scope
    if there.startswith(here):
        return there
    return here + layer._scope.removeprefix(layer._outer_scope)


def _variables_by_name(layer: Layer, trainable: bool) -> dict[str, Tensor]:
    graph = Graph(dict.fromkeys(_variables(layer, set())))
    return {
        graph.names[node]: node.outputs[0]
        for node in graph.nodes
        if node.attrs["trainable"] is trainable
    }


def _variables(item: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the variables in layers, and in lists, tuples and dicts of layers."""
    if isinstance(item, Tensor):
        if item.node.op is REGISTRY["variable"]:
            yield item
        return
    parts: Iterable[Any]
    if isinstance(item, Layer):
        parts = vars(item).values()
    elif isinstance(item, Mapping):
        parts = item.values()
    elif isinstance(item, list | tuple):
        parts = item
    else:
        return
    if id(item) not in seen:
        seen.add(id(item))
        for part in parts:
            yield from _variables(part, seen)


def parameter(name: str, initial: Initializer, trainable: bool = True) -> Tensor:
    """Make a variable in the current name scope; a second one of the same name gets a number."""
    tensor: Tensor = REGISTRY["variable"](
        initial=initial,
        trainable=trainable,
        shape=initial.shape,
        dtype=initial.dtype,
        named=False,
        name=name,
    )
    return tensor


def uniform_parameter(name: str, shape: tuple[int, ...], bound: float, dtype: Any) -> Tensor:
    """Make a parameter that is initially uniform on ±bound."""
    return parameter(name, init.uniform(shape, -bound, bound, dtype))


def inverse_root(number: int) -> float:
    """Return 1/√number: torch's bound for linear maps of so many inputs."""
    return 1 / math.sqrt(number)


def set_attributes(layer: Layer, /, **attributes: Any) -> None:
    """Set attributes of a frozen layer that is being made."""
    for name, value in attributes.items():
        object.__setattr__(layer, name, value)


def require_sizes(layer: Layer, **sizes: Any) -> None:
    """Refuse sizes that are not positive ints; the message names the layer and the user's line."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ArgumentError(
                f"{type(layer).__name__} at {user_location()}: {name} must be an int above 0, "
                f"got {value!r}"
            )


def require_layers(layer: Layer, num_layers: Any) -> None:
    """Refuse numbers of layers that are not positive ints, or more than are built."""
    require_sizes(layer, num_layers=num_layers)
    if num_layers > MAX_LAYERS:
        raise ArgumentError(
            f"{num_layers:,} layers are more than are built, which is {MAX_LAYERS:,}"
        )

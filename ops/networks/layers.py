"""Layers: small frozen values that hold variables and are called on tensors.

Initial values are torch's defaults, drawn from streams of their own (see `gf.random.seed`). Names
of variables come from name scopes and the layer's name: `encoder/linear/weight`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, ClassVar

import numpy as np

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, ShapeError
from graphflow.frontend.builders import assign
from graphflow.init import Initializer
from graphflow.ir.graph import Graph
from graphflow.ir.op import (
    REGISTRY,
    Tensor,
    as_tensor,
    current_prefix,
    error_location,
    name_scope,
    prefix_scope,
    user_location,
    validate_arguments,
)
from graphflow.ir.spec import show_shape
from graphflow.ops.matrices.matmul import add_bias, matmul
from graphflow.ops.networks.batch_norm import batch_norm
from graphflow.ops.networks.dropout import dropout
from graphflow.ops.networks.norm import group_norm, layer_norm, rms_norm
from graphflow.ops.networks.training_mode import current_updates
from graphflow.ops.tensors.take import take

Key = int | slice


class Layer:
    """Base of layers and of models made of them: what finds the variables in an object.

    A model keeps its layers as attributes (or in lists, tuples and dicts) and defines `__call__`:

        class Classifier(gf.nn.Layer):
            def __init__(self) -> None:
                self.hidden = gf.nn.Linear(784, 256, name="hidden")
                self.out = gf.nn.Linear(256, 10, name="out")

            def __call__(self, x):
                return self.out(gf.nn.relu(self.hidden(x)))

    What a layer computes is named as its variables are: `hidden/matmul` beside `hidden/weight`. One
    of yours has a name where it was made under one, `with gf.name_scope("encoder"): Classifier()`,
    or gives itself one, `with self.scope("encoder"):` around what `__init__` makes.
    """

    _outer_scope: str = ""  # the scope that it was made in
    _scope: str = ""  # its own

    def __init_subclass__(cls, **options: Any) -> None:
        """Let our own layers check their arguments as functions do; a user's are left alone."""
        super().__init_subclass__(**options)
        if cls.__module__.startswith("graphflow."):
            for name in ("__init__", "__call__"):
                if name in vars(cls):
                    setattr(cls, name, validate_arguments(vars(cls)[name], ""))
        if "__call__" in vars(cls):
            setattr(cls, "__call__", _run_in_scope(vars(cls)["__call__"]))  # noqa: B010

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A layer that knows in which name scope it is made."""
        layer = super().__new__(cls)
        set_attributes(layer, _outer_scope=current_prefix())
        return layer

    def scope(self, name: str) -> AbstractContextManager[None]:
        """A name scope for what `__init__` makes, under which the layer computes, too.

        Raises:
            ArgumentError: no name.
        """
        opened = name_scope(name)
        if not self._scope:  # the outermost counts
            set_attributes(self, _scope=f"{current_prefix()}{name}/")
        return opened

    def parameters(self) -> dict[str, Tensor]:
        """The trainable variables by name, each once, in the order in which they were made."""
        return _variables_by_name(self, True)

    def buffers(self) -> dict[str, Tensor]:
        """The other variables, such as running statistics, by name."""
        return _variables_by_name(self, False)


def _run_in_scope(call: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's call, under its name."""

    @wraps(call)
    def wrapper(self: Layer, *args: Any, **kwargs: Any) -> Any:
        with prefix_scope(_prefix_of(self)):
            return call(self, *args, **kwargs)

    return wrapper


def _prefix_of(layer: Layer) -> str:
    """Where a layer computes: under the scope of its variables, unless it is called within another
    one; there under its own name."""
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
    """Variables in layers, and in lists, tuples and dicts of them."""
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


# For those who write layers ---------------------------------------------------------------------


def parameter(name: str, initial: Initializer, trainable: bool = True) -> Tensor:
    """A variable under the name of the scope; a second one of that name gets a number."""
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
    """A parameter, uniform on ±bound to begin with."""
    return parameter(name, init.uniform(shape, -bound, bound, dtype))


def inverse_root(number: int) -> float:
    """1/√number: the bound of torch's linear maps of so many inputs."""
    return 1 / math.sqrt(number)


def set_attributes(layer: Layer, **attributes: Any) -> None:
    """Set attributes of a frozen layer that is being made."""
    for name, value in attributes.items():
        object.__setattr__(layer, name, value)


def require_sizes(layer: Layer, **sizes: Any) -> None:
    """Refuse sizes that are no ints above 0; names the layer and the user's line."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ArgumentError(
                f"{type(layer).__name__} at {user_location()}: {name} is an int above 0, "
                f"not {value!r}"
            )


# Linear maps ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, init=False)
class Linear(Layer):
    """x·weightᵀ + bias over the last axis: (…, inputs) to (…, outputs).

    Variables: `weight` (outputs, inputs) and `bias` (outputs,), uniform on ±1/√inputs.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, inputs: int, outputs: int, bias: bool = True, *, dtype: Any = "float32",
        name: str = "linear",
    ) -> None:  # fmt: skip
        require_sizes(self, inputs=inputs, outputs=outputs)
        bound = inverse_root(inputs)
        with self.scope(name):
            set_attributes(
                self,
                weight=uniform_parameter("weight", (outputs, inputs), bound, dtype),
                bias=uniform_parameter("bias", (outputs,), bound, dtype) if bias else None,
            )

    def __call__(self, x: Any) -> Tensor:
        x, inputs = as_tensor(x), self.weight.shape[1]
        if x.ndim and isinstance(x.shape[-1], int) and x.shape[-1] != inputs:
            raise ShapeError(
                f"Linear at {user_location()}: the last axis of x holds its {inputs} inputs, "
                f"x is {show_shape(x.shape)}"
            )
        return add_bias(matmul(x, self.weight, transpose_b=True), self.bias)


@dataclass(frozen=True, eq=False, init=False)
class Embedding(Layer):
    """Rows of a table: ints of any shape to that shape and (size,).

    Variables: `weight` (number, size), standard normal. An int outside [-number, number) is an
    error in the step.
    """

    weight: Tensor

    def __init__(
        self, number: int, size: int, *, dtype: Any = "float32", name: str = "embedding"
    ) -> None:
        require_sizes(self, number=number, size=size)
        with self.scope(name):
            set_attributes(
                self, weight=parameter("weight", init.normal((number, size), 0.0, 1.0, dtype))
            )

    def __call__(self, indices: Any) -> Tensor:
        return take(self.weight, indices, 0)


# Normalisation ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, init=False)
class LayerNorm(Layer):
    """`gf.nn.layer_norm` over the last axes, of the given shape (an int: the last).

    Variables, unless `affine` is False: `scale` and `bias`.
    """

    scale: Tensor | None
    bias: Tensor | None
    shape: tuple[int, ...]
    epsilon: float

    def __init__(
        self, shape: int | tuple[int, ...], epsilon: float = 1e-5, affine: bool = True,
        bias: bool = True, *, dtype: Any = "float32", name: str = "layer_norm",
    ) -> None:  # fmt: skip
        set_attributes(self, shape=_normalized_shape(self, shape), epsilon=epsilon)
        with self.scope(name):
            _set_affine(self, self.shape, affine, affine and bias, dtype)

    def __call__(self, x: Any) -> Tensor:
        x, axes = _require_last_axes(self, x, self.shape)
        return layer_norm(x, self.scale, self.bias, axes, self.epsilon)


@dataclass(frozen=True, eq=False, init=False)
class RMSNorm(Layer):
    """`gf.nn.rms_norm` over the last axes, of the given shape (an int: the last).

    Variables, unless `affine` is False: `scale`.
    """

    scale: Tensor | None
    shape: tuple[int, ...]
    epsilon: float

    def __init__(
        self, shape: int | tuple[int, ...], epsilon: float = 1e-5, affine: bool = True, *,
        dtype: Any = "float32", name: str = "rms_norm",
    ) -> None:  # fmt: skip
        set_attributes(self, shape=_normalized_shape(self, shape), epsilon=epsilon)
        with self.scope(name):
            _set_affine(self, self.shape, affine, None, dtype)

    def __call__(self, x: Any) -> Tensor:
        x, axes = _require_last_axes(self, x, self.shape)
        return rms_norm(x, self.scale, axes, self.epsilon)


def _set_affine(
    layer: Layer, shape: tuple[int, ...], scale: bool, bias: bool | None, dtype: Any
) -> None:
    """The variables of a norm, 1 and 0; None where they are not wanted, no bias for None."""
    set_attributes(layer, scale=parameter("scale", init.ones(shape, dtype)) if scale else None)
    if bias is not None:
        set_attributes(layer, bias=parameter("bias", init.zeros(shape, dtype)) if bias else None)


def _normalized_shape(layer: Layer, shape: Any) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    for size in sizes or (shape,):
        require_sizes(layer, shape=size)
    return tuple(map(int, sizes))


def _require_last_axes(
    layer: Layer, x: Any, shape: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """x, and which of its axes a norm is over."""
    x = as_tensor(x)
    if x.shape[-len(shape) :] != shape:
        raise ShapeError(
            f"{type(layer).__name__} at {user_location()}: the last axes of x are {shape}, "
            f"not those of {show_shape(x.shape)}"
        )
    return x, tuple(range(-len(shape), 0))


@dataclass(frozen=True, eq=False, init=False)
class GroupNorm(Layer):
    """`gf.nn.group_norm`. Variables, unless `affine` is False: `scale` and `bias` (channels,)."""

    scale: Tensor | None
    bias: Tensor | None
    groups: int
    epsilon: float
    channels_last: bool

    def __init__(
        self, groups: int, channels: int, epsilon: float = 1e-5, affine: bool = True, *,
        channels_last: bool = False, dtype: Any = "float32", name: str = "group_norm",
    ) -> None:  # fmt: skip
        require_sizes(self, groups=groups, channels=channels)
        set_attributes(self, groups=groups, epsilon=epsilon, channels_last=channels_last)
        with self.scope(name):
            _set_affine(self, (channels,), affine, affine, dtype)

    def __call__(self, x: Any) -> Tensor:
        return group_norm(x, self.groups, self.scale, self.bias, self.epsilon, self.channels_last)


@dataclass(frozen=True, eq=False, init=False)
class BatchNorm(Layer):
    """`gf.nn.batch_norm`: in a `gf.nn.training` block by the batch, else by running statistics.

    In training, the assignments of the new running statistics go to the list of the block; a step
    that trains fetches them too. Optimisers leave them alone: they are not trainable.

    Variables: `scale` and `bias` unless `affine` is False; buffers `mean` and `variance`; all
    (channels,).
    """

    scale: Tensor | None
    bias: Tensor | None
    mean: Tensor
    variance: Tensor
    epsilon: float
    momentum: float
    channels_last: bool

    _ranks: ClassVar[tuple[int, ...]] = ()  # of x; () is any

    def __init__(
        self, channels: int, epsilon: float = 1e-5, momentum: float = 0.1, affine: bool = True, *,
        channels_last: bool = False, dtype: Any = "float32", name: str = "batch_norm",
    ) -> None:  # fmt: skip
        require_sizes(self, channels=channels)
        set_attributes(self, epsilon=epsilon, momentum=momentum, channels_last=channels_last)
        with self.scope(name):
            _set_affine(self, (channels,), affine, affine, dtype)
            set_attributes(
                self,
                mean=parameter("mean", init.zeros((channels,), dtype), trainable=False),
                variance=parameter("variance", init.ones((channels,), dtype), trainable=False),
            )

    def __call__(self, x: Any) -> Tensor:
        x, updates = as_tensor(x), current_updates()
        if self._ranks and x.ndim not in self._ranks:
            raise ShapeError(
                f"{type(self).__name__} at {user_location()}: x has rank "
                f"{' or '.join(map(str, self._ranks))}, not shape {show_shape(x.shape)}"
            )
        given = (x, self.scale, self.bias, self.mean, self.variance)
        attrs: dict[str, Any] = {"epsilon": self.epsilon, "channels_last": self.channels_last}
        if updates is None:
            result: Tensor = batch_norm(*given, **attrs)
            return result
        y, mean, variance = batch_norm(*given, training=True, momentum=self.momentum, **attrs)
        updates += [assign(self.mean, mean), assign(self.variance, variance)]
        trained: Tensor = y
        return trained


class BatchNorm1d(BatchNorm):
    """`BatchNorm` of (N, C) or (N, C, L)."""

    _ranks = (2, 3)


class BatchNorm2d(BatchNorm):
    """`BatchNorm` of (N, C, H, W)."""

    _ranks = (4,)


class BatchNorm3d(BatchNorm):
    """`BatchNorm` of (N, C, D, H, W)."""

    _ranks = (5,)


# Others -----------------------------------------------------------------------------------------


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class Dropout(Layer):
    """`gf.nn.dropout` in a `gf.nn.training` block, else x as it is."""

    rate: float = 0.5

    def __post_init__(self) -> None:
        number = isinstance(self.rate, int | float) and not isinstance(self.rate, bool)
        if not number or not 0 <= self.rate < 1:
            raise ArgumentError(
                f"Dropout at {user_location()}: rate is a number in [0, 1), not {self.rate!r}"
            )

    def __call__(self, x: Any) -> Tensor:
        return as_tensor(x) if current_updates() is None else dropout(x, self.rate)


class Sequential(Layer):
    """Layers and functions, one after the other: `Sequential(Linear(4, 8), gf.nn.relu)`."""

    def __init__(self, *layers: Callable[[Any], Any]) -> None:
        with error_location("Sequential"):
            for layer in layers:
                if not callable(layer):
                    raise ArgumentError(f"layers are callable, {layer!r} is not")
        self.layers = tuple(layers)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: Key) -> Any:
        """A layer, or a Sequential of several."""
        chosen = self.layers[index]
        return Sequential(*chosen) if isinstance(chosen, tuple) else chosen

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(repr, self.layers))})"

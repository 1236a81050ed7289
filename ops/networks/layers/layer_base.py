"""The base class of layers and models: it finds their variables and names what they compute.

What it does with sessions and files is in `graphflow.weights`, above this folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import numpy as np

from graphflow import init
from graphflow.base.argument_checks import did_you_mean
from graphflow.base.formatting import show_bytes, show_count
from graphflow.base.notebook_html import html_table
from graphflow.errors import ArgumentError
from graphflow.init import Initializer
from graphflow.ir.graph import Graph
from graphflow.ir.name_hints import LAYER_HINTS
from graphflow.ir.op import (
    REGISTRY,
    Tensor,
    as_tensor,
    current_prefix,
    name_scope,
    prefix_scope,
    user_location,
    validate_arguments,
)
from graphflow.ir.spec import show_shape

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

    torch_names: ClassVar[Mapping[str, str]] = {}
    """What torch calls attributes that have another name there; "" for a list whose items torch has
    in the layer itself. An attribute of a part is "part.attribute"."""
    torch_counts: ClassVar[tuple[str, ...]] = ()
    """Numbers in torch's state that this layer does without; they are 0 in saved weights."""

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

    if not TYPE_CHECKING:  # type checkers would allow every attribute

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__} has no attribute {name!r}"
            if name in LAYER_HINTS:
                text += f"; use {LAYER_HINTS[name]}"
            elif name[0] != "_" and (hint := did_you_mean(name, dir(self))):
                text += f"; {hint}"
            raise AttributeError(text, name=name, obj=self)

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

    def _repr_html_(self) -> str:
        trained = self.parameters()
        count = sum(math.prod(map(int, v.shape)) for v in trained.values())
        size = sum(math.prod(map(int, v.shape)) * v.dtype.itemsize for v in trained.values())
        rows = [
            (name, v.dtype, show_shape(v.shape), "yes" if name in trained else "no")
            for name, v in (trained | self.buffers()).items()
        ]
        title = f"{type(self).__name__}: {show_count(count, 'parameter')}, {show_bytes(size)}"
        return html_table(title, ("variable", "dtype", "shape", "trained"), rows)

    # Weights in sessions and files --------------------------------------------------------------

    def state(self, session: Any, names: str = "graphflow") -> dict[str, np.ndarray[Any, Any]]:
        """Return the values of all variables in a session by name, buffers too.

        Args:
            session: an open `gf.Session`.
            names: "graphflow", those of `parameters` and `buffers`, or "torch", those of a torch
                module with the same attributes.

        Raises:
            ArgumentError, VariableError: no session; a variable that is too large for one array.
        """
        found: dict[str, np.ndarray[Any, Any]] = _weights().read_state(self, session, names)
        return found

    def load(
        self, session: Any, source: Any, names: str = "graphflow", strict: bool = True, *,
        rename: Mapping[str, str] | None = None,
    ) -> Any:  # fmt: skip
        """Set all variables in a session to weights from a file, a folder or a dict.

            model.load(session, "resnet.safetensors", names="torch")

        Args:
            session: an open `gf.Session`, of one process or of many.
            source: a safetensors file; a folder or an index of Hugging Face's, whose weights may be
                in several files; a checkpoint of a session; or a dict from names to arrays.
            names: what the names are: "graphflow", or "torch".
            strict: raise an error for names that only the model or only the source has. Otherwise,
                variables without a value keep theirs.
            rename: from names, or beginnings of names, in the source to those of the model:
                `{"module.": ""}`, `{"encoder": "body"}`.

        Returns:
            What was loaded, and which floats were converted. Print it.

        Raises:
            CheckpointError: the source cannot be read, or does not fit: the error lists all that is
                missing, unexpected and of another shape, and nothing is changed.
        """
        return _weights().load_state(self, session, source, names, strict, rename)

    def save(
        self, session: Any, path: str | os.PathLike[str], names: str = "graphflow", *,
        file_bytes: int = 5 * 10**9,
    ) -> Any:  # fmt: skip
        """Write all variables in a session to a safetensors file.

        Weights of more than `file_bytes` go to several files and an index, as Hugging Face has
        them.

        Args:
            session: an open `gf.Session`.
            path: a file that ends in .safetensors, or a folder for `model.safetensors`.
            names: as for `state`.
            file_bytes: the most bytes of arrays in a file.

        Returns:
            The path of the file or of the index.

        Raises:
            CheckpointError: it cannot be written; what was there before stays.
        """
        return _weights().save_state(self, session, path, names, file_bytes)

    def summary(self, *shapes: Any, batch: int = 1, cluster: Any = None) -> Any:
        """Return a table of the layers: output shapes, parameters, bytes, and predicted times.

            print(model.summary((None, 1, 28, 28)))

        Args:
            shapes: of the model's inputs: a tuple of sizes for float32, a `gf.spec(dtype, shape)`,
                or a tensor.
            batch: what a size of None is for predicted times.
            cluster: where the times are predicted for; default: this process.

        Raises:
            ArgumentError, ShapeError: something is no shape, or the model takes no such inputs.
        """
        module: Any = import_module("graphflow.weights.layer_summary")
        return module.summarize(self, shapes, batch, cluster)


def _weights() -> Any:
    """Return the module that reads and writes weights: files and sessions lie above this folder."""
    return import_module("graphflow.weights.model_weights")


class LayerCall(NamedTuple):
    """A call of a layer that `record_calls` noted.

    Attributes:
        depth: how many calls of other layers it was made in.
        start, stop: serial numbers before its first and after its last node.
    """

    layer: Layer
    depth: int
    start: int
    stop: int
    result: Any


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[LayerCall | None] = []
        self.open: list[Layer] = []


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def record_calls() -> Iterator[list[LayerCall]]:
    """Note the calls of layers in the block, in the order in which they begin."""
    recorder, found = _Recorder(), list[LayerCall]()
    token = _recorder.set(recorder)
    try:
        yield found
    finally:
        _recorder.reset(token)
        found += [call for call in recorder.calls if call is not None]


def _record(recorder: _Recorder, layer: Layer, call: Callable[[], Any]) -> Any:
    """Run a call of a layer and note it; a call of its base class is a part of it."""
    if recorder.open and recorder.open[-1] is layer:
        return call()
    place, depth = len(recorder.calls), len(recorder.open)
    recorder.calls.append(None)
    recorder.open.append(layer)
    start = as_tensor(0.0).node.serial
    result = call()
    recorder.open.pop()
    recorder.calls[place] = LayerCall(layer, depth, start, as_tensor(0.0).node.serial, result)
    return result


def _run_in_scope(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a layer's `__call__` to run under the layer's name scope."""

    @wraps(call)
    def wrapper(self: Layer, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder.get()
        with prefix_scope(_prefix_of(self)):
            if recorder is not None:
                return _record(recorder, self, lambda: call(self, *args, **kwargs))
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

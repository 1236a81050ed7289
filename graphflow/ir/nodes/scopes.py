"""Scopes: the names, devices, lines, random streams and dtypes that nodes built in a block share.

Two context variables hold them. They are the only mutable global state while a graph is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import field
from typing import Any, NamedTuple

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.source_location import Location, error_location, user_location
from graphflow.errors import ArgumentError, DeviceError, DTypeError
from graphflow.ir.declarations.registry import FUNCTIONS
from graphflow.ir.device_name import DeviceName
from graphflow.ir.nodes.node import Node, Tensor
from graphflow.ir.spec import as_dtype, is_half


@dataclass
class RandomStreams:
    """A counter of the random streams of one seed."""

    seed: int = 0
    count: int = 0

    def next(self) -> tuple[int, int]:
        """Take the next stream: (seed, number)."""
        self.count += 1
        return (self.seed, self.count - 1)


@dataclass(frozen=True, eq=False)
class Autocast:
    """The 16-bit dtype of a `gf.autocast` block, and the conversions already built in it."""

    dtype: np.dtype[Any]
    conversions: dict[tuple[Tensor, str, DeviceName], Tensor] = field(default_factory=dict)

    def cast(self, tensor: Tensor, to: str) -> Tensor:
        """Convert float32 to 16 bits for "low", 16 bits to float32 for "high"; keep others."""
        if tensor.dtype != np.float32 if to == "low" else not is_half(tensor.dtype):
            return tensor
        key = (tensor, to, current_device.get())
        if key not in self.conversions:
            wanted = self.dtype if to == "low" else np.dtype("float32")
            self.conversions[key] = FUNCTIONS["astype"](tensor, wanted)
        return self.conversions[key]


class NameScope(NamedTuple):
    """The properties that nodes built in a block share.

    Attributes:
        streams: the source of random streams.
        prefix: the start of their names.
        location: the line that they count as built at; None for the user's own line.
        origin: the node that they are derivatives of.
        autocast: the conversion of their inputs.
        turn: see `Node`.
    """

    streams: RandomStreams
    prefix: str = ""
    location: Location | None = None
    origin: Node | None = None
    autocast: Autocast | None = None
    turn: int = -1


_TOP = NameScope(RandomStreams())
_UNCONSTRAINED = DeviceName()
current_scope: ContextVar[NameScope] = ContextVar("name_scope", default=_TOP)
current_device: ContextVar[DeviceName] = ContextVar("device_scope", default=_UNCONSTRAINED)


def is_name(name: Any) -> bool:
    """Return True for non-empty text that is valid Unicode.

    Files and wire messages cannot hold a lone surrogate.
    """
    if not isinstance(name, str) or not name:
        return False
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


@checks_argument_names(ArgumentError)
def name_scope(name: str) -> AbstractContextManager[None]:
    """Prefix the names of nodes built in the block: `with gf.name_scope("tower"):`.

    Raises:
        ArgumentError: the name is not a non-empty Unicode str.
    """
    if not is_name(name):
        raise ArgumentError(
            f"gf.name_scope at {user_location()}: a name is a str that is not empty, and Unicode, "
            f"not {name!r}"
        )
    return _scope(prefix=f"{current_scope.get().prefix}{name}/")


def current_prefix() -> str:
    """Return the prefix of names in the open scope: "" or `outer/inner/`."""
    return current_scope.get().prefix


def prefix_scope(prefix: str) -> AbstractContextManager[None]:
    """Begin the names of nodes built in the block with `prefix`, whatever scope is open."""
    return _scope(prefix=prefix)


@checks_argument_names(ArgumentError)
def device(name: str | DeviceName) -> AbstractContextManager[None]:
    """Pin nodes built in the block: `/worker:1/cpu:0`, or partial names such as `gpu`, `/worker:1`.

    An inner scope refines the outer one, part by part.

    Raises:
        DeviceError: the name is malformed.
    """
    if not isinstance(name, DeviceName):
        try:
            name = DeviceName.parse(name)
        except DeviceError as error:
            raise DeviceError(f"gf.device at {user_location()}: {error}") from None
    return _device_scope(current_device.get().refine(name))


@contextmanager
def _device_scope(device: DeviceName) -> Iterator[None]:
    token = current_device.set(device)
    try:
        yield
    finally:
        current_device.reset(token)


class origin_scope:
    """Attribute nodes built in the block (gradients, updates) to the node `origin`.

    They count as built at its line, and get its device pin or `device`. Autocasting is off, since
    their dtypes follow from their inputs.

    A class with slots rather than a generator: differentiation opens one for every node.
    """

    __slots__ = ("_device", "_origin", "_pin", "_prefix", "_scope", "_turn")

    def __init__(
        self,
        origin: Node,
        prefix: str = "gradients/",
        device: DeviceName | None = None,
        turn: int = -1,
    ) -> None:
        self._origin = origin
        self._prefix = prefix
        self._turn = turn
        self._pin = origin.device if device is None else device

    def __enter__(self) -> None:
        origin, streams = self._origin, current_scope.get().streams
        scope = NameScope(streams, self._prefix, origin.location, origin, None, self._turn)
        self._scope = current_scope.set(scope)
        self._device = current_device.set(self._pin)

    def __exit__(self, *raised: object) -> None:
        current_device.reset(self._device)
        current_scope.reset(self._scope)


def derivative_scope(node: Node, what: str = "gradients/") -> origin_scope:
    """Attribute nodes built in the block to a node that they are a derivative of.

    Derivatives are gradients, tangents and batched versions. Their names begin with the open
    scope's prefix and `what`; derivatives of derivatives get no further prefix.
    """
    scope = current_scope.get()
    return origin_scope(node, scope.prefix if scope.origin is not None else scope.prefix + what)


def derivative_seed_scope(node: Node) -> AbstractContextManager[None]:
    """Set the origin of nodes built in the block, and leave their line and device as they are.

    For the cotangents and tangents of ones or zeros with which a derivative begins.
    """
    return _scope(origin=node)


def replacement_scope(node: Node) -> origin_scope:
    """Give nodes built in the block the scope, turn, line and device of the replaced node."""
    return origin_scope(node, prefix_of(node), turn=node.turn)


def prefix_of(node: Node) -> str:
    """Return the scope in a node's name: "" or `outer/inner/`."""
    return node.name[: node.name.rfind("/") + 1]


def source_scope(name: str, location: Location) -> AbstractContextManager[None]:
    """Name nodes built in the block `name/…`, and let them count as built at `location`.

    The location is a place in a file that describes a graph, such as an ONNX model.
    """
    return _scope(prefix=f"{current_scope.get().prefix}{name}/", location=location)


@contextmanager
def _scope(**changes: Any) -> Iterator[None]:
    token = current_scope.set(current_scope.get()._replace(**changes))
    try:
        yield
    finally:
        current_scope.reset(token)


@checks_argument_names(ArgumentError)
def autocast(dtype: Any) -> AbstractContextManager[None]:
    """Compute products in 16 bits in the block: `with gf.autocast("bfloat16"):`.

    matmul, convolutions and attention convert float32 inputs to the given dtype, and still sum in
    float32. Reductions, softmax, losses and norms convert their inputs to float32. Elementwise ops
    convert nothing. Conversions are ops with a gradient, so gradients of float32 variables are
    float32. Each variable is converted once in a block. None turns autocasting off in an inner
    block.

    Args:
        dtype: "bfloat16", "float16" (see `gf.optim.LossScaling`) or None.

    Raises:
        DTypeError: another dtype.
    """
    wanted = None
    if dtype is not None:
        with error_location("gf.autocast"):
            wanted = as_dtype(dtype)
            if not is_half(wanted):
                raise DTypeError(
                    f"autocasts to bfloat16 or float16, not {wanted}; use .astype for other dtypes"
                )
    return _scope(autocast=None if wanted is None else Autocast(wanted))


@contextmanager
def seed_scope(seed: int) -> Iterator[None]:
    """Number the streams of random nodes built in the block from 0, under `seed`."""
    with _scope(streams=RandomStreams(seed)):
        yield


def next_stream() -> tuple[int, int]:
    """Take a stream (seed, number) that no other random node has."""
    return current_scope.get().streams.next()

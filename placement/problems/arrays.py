"""Arrays of problems and assignments, converted and read-only; errors name the wrong place."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphflow.errors import ProblemError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ProblemArrays(Protocol):
    """The arrays of a `Problem` that checks and assignments read; `Problem` documents each."""

    @property
    def nodes(self) -> int: ...
    @property
    def devices(self) -> int: ...
    @property
    def compute(self) -> Floats: ...
    @property
    def edges(self) -> Ints: ...
    @property
    def bytes(self) -> Floats: ...
    @property
    def tensor(self) -> Ints: ...
    @property
    def latency(self) -> Floats: ...
    @property
    def bandwidth(self) -> Floats: ...
    @property
    def groups(self) -> Ints: ...
    @property
    def prefer(self) -> Ints: ...
    @property
    def shared(self) -> Floats: ...
    @property
    def routes(self) -> Ints: ...
    @property
    def client(self) -> int | None: ...
    @property
    def allowed(self) -> NDArray[np.bool_]: ...


def array_of(name: str, value: ArrayLike, dtype: type, ndim: int) -> NDArray[Any]:
    """Return `value` as an array of a dtype and a number of axes.

    Raises:
        ProblemError: It cannot be one.
    """
    try:
        raw = np.asarray(value)
        if dtype is np.int64 and raw.size and raw.dtype.kind not in "iu":
            raise ProblemError(f"{name} must hold integers, not {raw.dtype}")
        if raw.size and raw.dtype.kind in "bcmM":
            raise ProblemError(f"{name} must hold numbers, not {raw.dtype}")
        array: NDArray[Any] = np.array(raw, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise ProblemError(f"{name} is not an array of {dtype.__name__}: {error}") from None
    if array.ndim != ndim:
        raise ProblemError(
            f"{name} has {array.ndim} dimensions (shape {array.shape}); expected {ndim}"
        )
    return freeze(array)


def is_empty(value: ArrayLike) -> bool:
    """Return True if a value has no element; a value that becomes no array counts as not empty."""
    try:
        return np.size(value) == 0
    except ValueError:  # rows of several lengths: `array_of` refuses them
        return False


def freeze(array: NDArray[Any]) -> NDArray[Any]:
    """Make an array read-only and return it."""
    array.setflags(write=False)
    return array


def put(holder: object, name: str, array: NDArray[Any]) -> None:
    """Set an attribute of a frozen value."""
    object.__setattr__(holder, name, array)


def reject(name: str, array: NDArray[Any], bad: NDArray[np.bool_], what: str) -> None:
    """Raise ProblemError if an element is bad; the error names the first one's place and value."""
    where = np.argwhere(bad)
    if len(where):
        index = ", ".join(map(str, where[0].tolist()))
        more = f" (and {len(where) - 1} more)" if len(where) > 1 else ""
        raise ProblemError(f"{name}[{index}] = {array[tuple(where[0])]:g} {what}{more}")


def error_at(message: str, nodes: ArrayLike) -> ProblemError:
    """Return a ProblemError that holds the indices of nodes."""
    error = ProblemError(message)
    error.nodes = tuple(int(node) for node in np.asarray(nodes))
    return error

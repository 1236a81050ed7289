"""The user's source line: where a node was built, and where an error occurred."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

from graphflow.errors import GraphError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Location(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def user_location() -> Location:
    """Return the innermost line on the stack that is outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_own(frame.f_code.co_filename, frame.f_globals):
        frame = frame.f_back
    return Location(_readable(frame.f_code.co_filename), frame.f_lineno)


def _readable(file: str) -> str:
    """Return a path as valid UTF-8; undecodable bytes become replacement characters."""
    return file if file.isascii() else os.fsencode(file).decode("utf-8", "replace")


def is_own(file: str, names: Mapping[str, Any]) -> bool:
    """Return True if code belongs to this package: its files, or methods generated for its
    classes."""
    if file == "<string>":
        return str(names.get("__name__")).startswith("graphflow.")
    return file.startswith(_PACKAGE)


def with_location(what: str, error: GraphError) -> GraphError:
    """Return the error with `what` and the user's line in front, unless it names the line
    already."""
    at = f" at {user_location()}: "
    return error if at in str(error) else type(error)(f"{what}{at}{error}")


class error_location:
    """Context manager that adds `what` and the user's line to a GraphError of the block.

    A generator with `contextmanager` would not do: frames of contextlib would count as the user's.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, GraphError):
            raise with_location(self.what, error) from None

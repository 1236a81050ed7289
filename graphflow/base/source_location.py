"""The user's line: where a node counts as made, and what errors of arguments name."""

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
    """The innermost line on the stack that is not graphflow's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_own(frame.f_code.co_filename, frame.f_globals):
        frame = frame.f_back
    return Location(_readable(frame.f_code.co_filename), frame.f_lineno)


def _readable(file: str) -> str:
    """A path as it can be written anywhere: one that is no UTF-8, with marks for what is not."""
    return file if file.isascii() else os.fsencode(file).decode("utf-8", "replace")


def is_own(file: str, names: Mapping[str, Any]) -> bool:
    """Whether code is ours: from our files, or written for them (`__init__` of a dataclass)."""
    if file == "<string>":
        return str(names.get("__name__")).startswith("graphflow.")
    return file.startswith(_PACKAGE)


def with_location(what: str, error: GraphError) -> GraphError:
    """An error that says what failed and on which line of the user's, once."""
    at = f" at {user_location()}: "
    return error if at in str(error) else type(error)(f"{what}{at}{error}")


class error_location:
    """Name what is built and the user's line in errors of arguments checked before a node is made.

    Not a generator: the frames of contextlib would be taken for the user's.
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

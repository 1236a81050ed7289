"""Errors as messages: the class by name, the text, and the traceback of the worker."""

from __future__ import annotations

import traceback

from graphflow import errors
from graphflow.errors import (
    GraphflowError,
    OpError,
    StepTimeout,
    error_text,
    escape_surrogates,
    escape_unprintable,
)
from graphflow.runtime.wire.messages import Failed
from graphflow.runtime.wire.msgpack_codec import TEXT_CAP


def failure_message(request: int, error: BaseException) -> Failed:
    """Return the message that reports an error to a coordinator."""
    known = isinstance(error, GraphflowError) and hasattr(errors, type(error).__name__)
    kind = type(error).__name__ if known else OpError.__name__
    text = error_text(error) if known else f"{type(error).__name__}: {error_text(error)}"
    trace = escape_surrogates("".join(traceback.format_exception(error)))
    awaits = error.worker if isinstance(error, StepTimeout) else None
    return Failed(
        request, kind, text[:TEXT_CAP], trace[-TEXT_CAP:], -1 if awaits is None else awaits
    )


def error_by_name(kind: str, text: str) -> GraphflowError:
    """Return an error of a class of `graphflow.errors`; an OpError if there is no such class."""
    found = getattr(errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, GraphflowError)):
        found = OpError
    return found(text)


def error_from_message(message: Failed, where: str) -> GraphflowError:
    """Return the error that a worker reported, with the worker's traceback as a note.

    Both texts are cleaned: they must not send control sequences to the terminal that shows them.
    """
    error = error_by_name(message.error, printable_text(message.text))
    if isinstance(error, StepTimeout) and message.awaits >= 0:
        error.worker = message.awaits
    error.add_note(f"Traceback on {where}:\n{printable_text(message.traceback)}")
    return error


def printable_text(text: str) -> str:
    """Return a text from another process without its non-printing characters, line by line."""
    return "\n".join(map(escape_unprintable, text.split("\n")))

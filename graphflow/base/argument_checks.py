"""Checks of the arguments that users give to public functions.

A wrong argument raises an error that names the function, the user's line, what the argument must
be, and what it is. Checks follow the annotations (`argument_kinds`); a function that checks its
values itself has only its argument names checked here.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from graphflow.base.argument_kinds import REFUSED, Kind, kind_of
from graphflow.base.argument_names import explain_repeated, translate_argument
from graphflow.base.source_location import user_location, with_location
from graphflow.errors import ArgumentError, GraphError, GraphflowError

if sys.version_info >= (3, 14):
    from annotationlib import Format

F = TypeVar("F", bound=Callable[..., Any])


def validate_arguments(f: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Wrap `f` so that it checks each argument against its annotation before it runs.

    Numpy scalars become Python numbers first. Errors name `what` and the user's line.

    Args:
        what: the name for errors; "" for the class of the first argument.
    """
    # Parsing hundreds of signatures would slow the import, so it waits for the first call.
    arguments = functools.cache(lambda: _arguments(f))

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            for place, name, taken in _convert_arguments(arguments(), args, kwargs):
                if place < len(args):
                    args = (*args[:place], taken, *args[place + 1 :])
                else:
                    kwargs[name] = taken
            return f(*args, **kwargs)
        except GraphError as error:
            raise with_location(_subject(what, args), error) from None
        except MemoryError as error:  # from arrays that become constants of the graph
            too_large = ArgumentError(f"{error} while the graph is built; give smaller sizes")
            raise with_location(_subject(what, args), too_large) from None
        except TypeError:
            if (wrong := _describe_mismatch(f, args, kwargs)) is None:
                raise
            raise with_location(_subject(what, args), ArgumentError(wrong)) from None

    return wrapper


def checks_arguments(error: type[GraphflowError]) -> Callable[[F], F]:
    """Make a public function, or a class's `__init__`, raise `error` for arguments of a wrong kind.

    The arguments are checked after the call: an error of this package that the function raises
    itself takes precedence, since it knows the remedy.
    """

    def decorate(public: F) -> F:
        if isinstance(public, type):
            setattr(public, "__init__", _check_values(_own_method(public, "__init__"), "", error))  # noqa: B010
            return public
        return cast(F, _check_values(public, public.__name__, error))

    return decorate


def checks_argument_names(
    error: type[GraphflowError], but: Collection[str] = ()
) -> Callable[[F], F]:
    """Make a public function, or a class's methods, explain a misspelt or missing argument.

    For functions that check the values themselves. The error names the argument that was probably
    meant.

    Args:
        error: the class of the error.
        but: methods that are called so often that a wrapper would cost too much; they keep
            Python's own TypeError.
    """

    def decorate(public: F) -> F:
        if not isinstance(public, type):
            return cast(F, _check_names(public, public.__name__, error))
        methods = {"__init__": public.__name__} | {
            name: f"{public.__name__}.{name}" for name in vars(public) if name[0] != "_"
        }
        for name, what in methods.items():
            method = _own_method(public, name)
            if inspect.isfunction(method) and name not in but:
                setattr(public, name, _check_names(method, what, error))
        return public

    return decorate


def _own_method(cls: type, name: str) -> Any:
    """Return a method as it stands in the class; a lazy dataclass creates it on the first
    access."""
    getattr(cls, name)
    return vars(cls)[name]


def _check_names(
    f: Callable[..., Any], what: str, error: type[GraphflowError]
) -> Callable[..., Any]:
    """Wrap `f` so that a TypeError of the call itself becomes an `error` with a suggestion."""

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except TypeError:
            if (wrong := _describe_mismatch(f, args, kwargs)) is None:
                raise
            raise error(f"{what} at {user_location()}: {wrong}") from None

    return wrapper


def _check_values(
    f: Callable[..., Any], what: str, error: type[GraphflowError]
) -> Callable[..., Any]:
    """Wrap `f` so that arguments of a wrong kind raise `error`, whatever the call itself did."""
    arguments = functools.cache(lambda: _arguments(f))

    def find_error(args: Sequence[Any], kwargs: Mapping[str, Any]) -> GraphflowError | None:
        try:
            _convert_arguments(arguments(), args, kwargs)
        except ArgumentError as refused:
            return error(f"{_subject(what, args)} at {user_location()}: {refused}")
        return None

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            result = f(*args, **kwargs)
        except GraphflowError:
            raise
        except Exception as failed:
            wrong = find_error(args, kwargs)
            unknown = _describe_mismatch(f, args, kwargs) if isinstance(failed, TypeError) else None
            if unknown is not None:
                wrong = error(f"{_subject(what, args)} at {user_location()}: {unknown}")
            if wrong is None:
                raise
            raise wrong from None
        if (wrong := find_error(args, kwargs)) is not None:
            raise wrong
        return result

    return wrapper


def signature_of(f: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, with its annotations unevaluated.

    Since Python 3.14 `inspect.signature` evaluates annotations. Names that a user imports only for
    type checkers would fail there.

    Raises:
        TypeError, ValueError: the function has no signature that Python knows, as some C
            functions.
    """
    if sys.version_info >= (3, 14):
        return inspect.signature(f, annotation_format=Format.STRING)  # noqa: TID251
    return inspect.signature(f)  # noqa: TID251


def did_you_mean(word: Any, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """Return "did you mean 'axis'?" for a word that is close to some of the known ones, else "".

    Args:
        most: how many suggestions to name.
        cutoff: least similarity, from 0 to 1.
    """
    from difflib import get_close_matches  # only for errors

    near = get_close_matches(str(word), list(known), most, cutoff)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def format_value(value: Any, most: int = 200) -> str:
    """Return a value's repr for an error message, shortened to about `most` characters."""
    try:
        text = repr(value)
    except Exception as error:  # a user's __repr__
        return f"a {type(value).__name__} ({type(error).__name__} from its repr)"
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


class _Argument(NamedTuple):
    """An argument that has a check: its position, its name, and the check."""

    place: int
    name: str
    kind: Kind


def _subject(what: str, args: Sequence[Any]) -> str:
    return what or type(args[0]).__name__


def _convert_arguments(
    arguments: Sequence[_Argument], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[int, str, Any]]:
    """Return (position, name, converted value) of each argument that is not passed on unchanged.

    Raises:
        ArgumentError: a value is not of the kind that its annotation asks for.
    """
    found = []
    for place, name, kind in arguments:
        value = args[place] if place < len(args) else kwargs.get(name, REFUSED)
        taken = value if value is REFUSED else kind.take(value)
        if taken is not value:
            _require(taken, name, kind, value)
            found.append((place, name, taken))
    return found


def _require(taken: Any, name: str, kind: Kind, value: Any) -> None:
    if taken is REFUSED:
        raise ArgumentError(f"{name} must be {kind.words}, not {format_value(value)}")


def _arguments(f: Callable[..., Any]) -> list[_Argument]:
    """Return the arguments of a function whose annotations can be checked."""
    f = inspect.unwrap(f)  # the wrapper of another decorator takes any arguments
    code = getattr(f, "__code__", None)
    if code is None:
        return []
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = []
    for i, name in enumerate(names):
        kind = kind_of(f.__annotations__.get(name), getattr(f, "__globals__", {}))
        if kind is not None:
            found.append(_Argument(i if i < code.co_argcount else sys.maxsize, name, kind))
    return found


def _describe_mismatch(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Say why a call does not fit the signature of a function; None if it fits."""
    signature = signature_of(f)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [name for name in signature.parameters if name not in ("self", "cls")]
        unknown = [name for name in kwargs if name not in names]
        if unknown:
            return describe_unexpected(unknown[0], names)
        twice = str(error).partition("multiple values for argument ")[2].strip("'")
        text = f"{error} ({explain_repeated(twice)})" if twice else str(error)
        return f"{text}; it takes {', '.join(names) or 'nothing'}"
    return None


def describe_unexpected(word: str, names: Sequence[str]) -> str:
    """Say that a call gave an unknown argument `word` to a function that takes `names`."""
    hint = translate_argument(word, names) or did_you_mean(word, names)
    text = f"got an unexpected keyword argument {word!r}" + f" ({hint})" * bool(hint)
    return f"{text}; it takes {', '.join(names) or 'nothing'}"


# Numbers ---------------------------------------------------------------------------------------


def check_flag(name: str, value: object) -> None:
    """Refuse anything but True or False for the argument `name`.

    Raises:
        ArgumentError: it is neither.
    """
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, not {value!r}")


def as_count(value: object, least: int = 1) -> int | None:
    """Return a count as an int; None if it is no int (a bool, a float, text), or less than
    `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        return None
    return int(value)


def require_count(what: str, name: str, value: object, least: int = 1) -> int:
    """Return a count that a user gave to `what` as an int.

    Raises:
        ArgumentError: it is no int, or less than `least`.
    """
    count = as_count(value, least)
    if count is None:
        raise ArgumentError(
            f"{what} at {user_location()}: {name} must be an int from {least}, not {value!r}"
        )
    return count


def to_builtin(value: Any) -> Any:
    """Return a numpy integer or float as Python's; any other value as it is."""
    if isinstance(value, np.integer):
        return int(value)
    return float(value) if isinstance(value, np.floating) else value


def as_seconds(value: Any) -> float | None:
    """Return a finite, non-negative number as a float; None for any other value."""
    value = to_builtin(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if 0 <= found < math.inf else None
